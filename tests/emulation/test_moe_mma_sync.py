"""The grouped products with mma.sync: the bits of a row do not depend on the tile."""

from __future__ import annotations

import pytest
import torch

from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.machine import TENSOR_CORES, Settings
from flashmoe_build.emulation.moe.mma_sync import Problem, run
from flashmoe_tools.tables import Unit, load_tables

SETTINGS = Settings(core=TENSOR_CORES["t4"])


def unit(operation: str, variant: str = "") -> Unit:
    found = (u for u in load_tables().units() if (u.row.operation, u.row.family) == (operation, "sm75"))
    return next(u for u in found if u.row.variant == variant)


def bits(kernel: Unit, problem: Problem) -> torch.Tensor:
    outcome = run(kernel, problem, SETTINGS, Options())
    assert outcome.passed, outcome.explain()
    return outcome.out[: problem.rows].view(torch.int16)


@pytest.mark.parametrize("operation", ["grouped_gemm", "grouped_gemm_gated"])
def test_tile_does_not_change_a_bit(operation: str) -> None:
    problem = Problem(operation, "nk", "f16", counts=(40, 0, 33), n=144, k=72, top_k=1)
    assert bits(unit(operation), problem).equal(bits(unit(operation, "m32"), problem))
