"""A row's bits of a grouped product do not depend on the tile."""

from __future__ import annotations

import torch

from flashmoe.tools.tables import Unit, load_tables
from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.machine import Settings
from flashmoe_build.emulation.moe.few_rows import GATED, Outcome, Problem, run


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
