"""The grouped products with mma.sync: the bits of a row do not depend on the tile."""

import pytest
import torch

from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.machine import TENSOR_CORES, Settings
from flashmoe_build.emulation.runner import execute
from flashmoe_tools.operations.moe.emulation import by_rows
from flashmoe_tools.operations.moe.emulation.product import Product
from flashmoe_tools.tables import Unit, load_tables

SETTINGS = Settings(core=TENSOR_CORES["t4"])


def unit(operation: str, variant: str = "") -> Unit:
    found = (u for u in load_tables().units() if (u.row.operation, u.row.family) == (operation, "sm75"))
    return next(u for u in found if u.row.variant == variant)


def bits(kernel: Unit, problem: Product) -> torch.Tensor:
    outcome = execute(kernel, by_rows.trial(kernel, problem), SETTINGS, Options())
    assert outcome.passed, outcome.explain()
    return outcome.results["d"][: problem.rows].view(torch.int16)


@pytest.mark.parametrize("operation", ["grouped_gemm", "grouped_gemm_gated"])
def test_tile_does_not_change_a_bit(operation: str) -> None:
    problem = Product(operation, "f16", (40, 0, 33), 144, 72, "nk", "swiglu", gathers=True)
    assert bits(unit(operation), problem).equal(bits(unit(operation, "m32"), problem))
