"""Dropout on emulated kernels: the mask itself, bit for bit, and that all families have the same."""

from dataclasses import replace

import pytest
import torch

from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.machine import Settings
from flashmoe_build.emulation.runner import Trial, execute
from flashmoe_tools.operations.attention import philox
from flashmoe_tools.operations.serving.emulation import forward
from flashmoe_tools.operations.serving.emulation.problem import VarlenProblem
from flashmoe_tools.operations.serving.emulation.tensors import build
from flashmoe_tools.operations.serving_backward.emulation import backward
from flashmoe_tools.tables import Unit, load_tables

FAMILIES = ("sm80", "sm75")  # and sm90
ROWS, KEYS = (5, 64), (33, 64)  # at most 64 of either: the identity fits the head dim
PROBLEM = VarlenProblem("mask", "f16", ROWS, KEYS, 2, 1, 64, 64, dropout_p=0.3, data_seed=3, wants_lse=False)


def named(name: str) -> Unit:
    return next(unit for unit in load_tables().units() if unit.name == name)


def launched(unit: Unit, trial: Trial) -> None:
    outcome = execute(unit, replace(trial, check=list), Settings(), Options())
    assert outcome.passed, outcome.explain()


def wanted(sequence: int) -> torch.Tensor:
    """[heads, rows, keys]"""
    sizes = (PROBLEM.heads_q, ROWS[sequence], KEYS[sequence])
    return philox.factors(*PROBLEM.rng_state, PROBLEM.dropout_p, sequence, *sizes) > 0


@pytest.mark.parametrize("family", ["sm90", *FAMILIES])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_forward_kernel_drops_the_mask(family: str, dim: int) -> None:
    """With queries of zero and the identity as values the output is the mask, whatever the tile."""
    unit = named(f"attention_dropout_forward_{family}_f16_d{dim}")
    problem = replace(PROBLEM, head_dim=dim, head_dim_v=dim)
    tensors = build(problem)
    for q, _, _ in tensors.sequences:
        q.zero_()
    for view in tensors.of_keys(problem, tensors.v):
        view.copy_(torch.eye(view.shape[1], dim))
    launched(unit, forward.trial_on(unit, problem, tensors))
    for sequence, out in enumerate(tensors.of_rows(problem, tensors.out)):
        assert torch.equal(out[..., : KEYS[sequence]] != 0, wanted(sequence))


BACKWARD = [(family, dim) for family in FAMILIES for dim in (64, 128, 256)] + [("sm90", dim) for dim in (64, 128, 256)]


@pytest.mark.parametrize(("family", "dim"), BACKWARD)
def test_the_backward_kernel_drops_the_same(family: str, dim: int) -> None:
    """The same for dv, with the identity as dout: of the last head, because the other's dout is zero."""
    kind = "fused" if (family, dim) in (("sm90", 64), ("sm90", 128)) else "dkv"
    unit = named(f"attention_dropout_backward_{kind}_{family}_f16_d{dim}")
    problem = replace(PROBLEM, head_dim=dim, head_dim_v=dim, has_counter=family == "sm90")
    tensors = build(problem)
    for q, _, _ in tensors.sequences:
        q.zero_()
    given, expected = backward.expect(problem, tensors, shares_weights=True, score_unit=1e-6)
    for view in tensors.of_rows(problem, given.dout):
        view[0].zero_()
        view[1].copy_(torch.eye(view.shape[1], dim))
    trial = backward.trial_on(unit, problem, tensors, given, expected)
    launched(unit, trial)
    for sequence, dv in enumerate(tensors.of_keys(problem, trial.results["dv"])):
        assert torch.equal((dv[0, :, : ROWS[sequence]] != 0).mT, wanted(sequence)[1])
