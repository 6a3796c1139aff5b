"""The bits of a row of a grouped product do not depend on the tile."""

import torch

from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.machine import Settings
from flashmoe_build.emulation.runner import Outcome, execute
from flashmoe_tools.operations.moe.emulation import by_rows
from flashmoe_tools.operations.moe.emulation.product import Product
from flashmoe_tools.operations.moe_backward.emulation import gemm
from flashmoe_tools.tables import Unit, load_tables

GATED = "grouped_gemm_gated_few_rows"


def unit(variant: str) -> Unit:
    return next(
        unit
        for unit in load_tables().units()
        if (unit.row.operation, unit.row.variant, unit.dtype) == (GATED, variant, "bf16")
    )


def passed(variant: str, problem: Product, seed: int) -> Outcome:
    kernel = unit(variant)
    outcome = execute(kernel, by_rows.trial(kernel, problem), Settings(seed=seed), Options())
    assert outcome.passed, outcome.explain()
    return outcome


def test_tiles_agree() -> None:
    shape = {"counts": (11, 0, 3), "n": 144, "k": 328, "top_k": 2}
    flags = {"gathers": True, "has_bias": True, "saves": True}
    problem = Product(GATED, "bf16", weights="nk", activation="swiglu", **shape, **flags)  # type: ignore[arg-type]
    small, *others = (passed(variant, problem, seed) for seed, variant in enumerate(("m8", "m8_deep", "m32")))
    for other in others:
        for name in ("d", "preactivation"):
            left, right = small.results[name], other.results[name]
            assert torch.equal(left[: problem.rows].view(torch.int16), right[: problem.rows].view(torch.int16))


def test_backward_tiles_agree() -> None:
    """Dots too: they are sums over 128 columns in both."""
    operation = "grouped_gemm_gated_backward"
    problem = Product(operation, "bf16", (70, 0, 3), 264, 72, "kn", "swiglu", top_k=2)
    units = [
        unit
        for unit in load_tables().units()
        if (unit.row.operation, unit.row.family, unit.dtype) == (operation, "sm90", "bf16")
    ]
    one, other = (execute(one, gemm.gated_backward_trial(one, problem), Settings(seed=3), Options()) for one in units)
    assert one.passed, one.explain()
    assert other.passed, other.explain()
    for name, bits in (("d", torch.int16), ("row_dots", torch.int32)):
        assert torch.equal(one.results[name].view(bits), other.results[name].view(bits))
