"""The dense attention kernels on the emulated machine."""

from __future__ import annotations

from flashmoe_tools.operations.attention.emulation import combine, forward

RUNNERS = {"attention_forward": forward.RUNNER, "attention_combine": combine.RUNNER}
