"""The kernels of multi-head latent attention on the emulated machine."""

from __future__ import annotations

from flashmoe_tools.operations.mla_decode.emulation import combine, decode

RUNNERS = {"mla_decode": decode.RUNNER, "mla_combine": combine.RUNNER}
