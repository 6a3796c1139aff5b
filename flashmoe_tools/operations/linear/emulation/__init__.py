"""The tiles of linear on the emulated machine: kernels of moe/ in sizes of their own, on the problems of moe/, and on those of one matrix."""

from __future__ import annotations

from flashmoe_tools.operations.moe.emulation import by_rows, gemm

RUNNERS = {"linear": gemm.RUNNER, "linear_nk": gemm.RUNNER, "linear_few_rows": by_rows.FEW_ROWS}
