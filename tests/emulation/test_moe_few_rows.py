"""A row's bits of a grouped product do not depend on the tile."""

from __future__ import annotations

import torch

from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.machine import Settings
from flashmoe_build.emulation.moe.backward import GatedBackwardProblem, run_gated_backward
from flashmoe_build.emulation.moe.few_rows import GATED, Outcome, Problem, run
from flashmoe_tools.tables import Unit, load_tables


def unit(variant: str) -> Unit:
    return next(
        unit
        for unit in load_tables().units()
        if (unit.row.operation, unit.row.variant, unit.dtype) == (GATED, variant, "bf16")
    )


def passed(variant: str, problem: Problem, seed: int) -> Outcome:
    outcome = run(unit(variant), problem, Settings(seed=seed), Options())
    assert outcome.passed, outcome.explain()
    return outcome


def test_tiles_agree() -> None:
    problem = Problem(GATED, "nk", "bf16", (11, 0, 3), n=144, k=328, top_k=2, has_bias=True, keeps=True)
    small, *others = (passed(variant, problem, seed) for seed, variant in enumerate(("m8", "m8_deep", "m32")))
    for other in others:
        for left, right in ((small.out, other.out), (small.lse, other.lse)):
            assert torch.equal(left[: problem.rows].view(torch.int16), right[: problem.rows].view(torch.int16))


def test_backward_tiles_agree() -> None:
    """Dots too: they are sums over 128 columns in both."""
    problem = GatedBackwardProblem((70, 0, 3), 264, 72, "swiglu", "kn", "bf16")
    units = [
        unit
        for unit in load_tables().units()
        if (unit.row.operation, unit.row.family, unit.dtype) == ("grouped_gemm_gated_backward", "sm90", "bf16")
    ]
    one, other = (run_gated_backward(unit, problem, Settings(seed=3), Options()) for unit in units)
    assert one.passed, one.explain()
    assert other.passed, other.explain()
    assert torch.equal(one.out.view(torch.int16), other.out.view(torch.int16))
    assert torch.equal(one.lse.view(torch.int32), other.lse.view(torch.int32))
