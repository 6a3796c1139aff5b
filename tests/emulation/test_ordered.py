"""Decoding in two kernels has the bits of a prefill, on emulated kernels and scores of any value."""

from dataclasses import replace

import pytest
import torch

from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.machine import Settings
from flashmoe_build.emulation.runner import execute
from flashmoe_tools.operations.serving.emulation import forward, ordered
from flashmoe_tools.operations.serving.emulation.problem import VarlenProblem
from flashmoe_tools.operations.serving.emulation.tensors import build
from flashmoe_tools.tables import Unit, load_tables

KINDS = ("f16_d64", "bf16_d128", "f16_d256")


def units(kind: str) -> tuple[Unit, Unit, Unit]:
    """(scores, values, ragged)"""
    found = {unit.name: unit for unit in load_tables().units(("sm_90a",))}
    names = ("attention_decode_scores", "attention_decode_values", "attention_varlen_forward")
    scores, values, ragged = (found[f"{name}_sm90_{kind}"] for name in names)
    return scores, values, ragged


def bits(
    kernels: tuple[Unit, Unit, Unit], problem: VarlenProblem
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(out, lse) of the two kernels, and of the ragged one, without rows that belong to no sequence."""
    of_scores, of_values, of_all = kernels
    found = []
    scores = execute(of_scores, ordered.score_trial_on(of_scores, problem, build(problem)), Settings(), Options())
    assert scores.passed, scores.explain()
    tensors = build(problem)
    second = ordered.value_trial_on(of_values, problem, tensors, scores.results["scores"])
    whole = replace(problem, splits=1, is_decoding=False)
    first = build(whole)
    for unit, trial in ((of_values, second), (of_all, forward.trial_on(of_all, whole, first))):
        outcome = execute(unit, trial, Settings(), Options())
        assert outcome.passed, outcome.explain()
        found.append((outcome.results["out"].nan_to_num(7.0), outcome.results["lse"].nan_to_num(7.0)))
    return found[0], found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_the_ragged_kernel(kind: str) -> None:
    """Scores so large that the softmax references move; every layout; windows; sinks."""
    named = {problem.name: problem for problem in ordered.problems(units("f16_d64")[1])}
    dtype, dim = kind.split("_d")
    for name in ("decode", "ragged", "equal"):
        made = replace(named[name], dtype=dtype, head_dim=int(dim), head_dim_v=int(dim), magnitude=5.0)
        for problem in (made, replace(made, left=70, right=0, has_sinks=True)):
            own, other = bits(units(kind), problem)
            for what, one, wanted in zip(("out", "lse"), own, other, strict=True):
                assert torch.equal(one, wanted), f"{problem.name}: {int((one != wanted).sum())} values of {what} differ"
