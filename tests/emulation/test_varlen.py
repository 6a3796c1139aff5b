"""Ragged, paged and banded attention on emulated kernels: what the suite's comparison with fp64 would not show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashmoe_build.emulation.attention import run_forward
from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.machine import Settings
from flashmoe_build.emulation.problem import Problem, Shape, make_inputs
from flashmoe_build.emulation.varlen import backward
from flashmoe_build.emulation.varlen.problem import VarlenProblem
from flashmoe_build.emulation.varlen.run import launch, run_on
from flashmoe_build.emulation.varlen.tensors import build
from flashmoe_tools.tables import Unit, load_tables

NAME = "attention_varlen_forward_sm90_f16_d64"
LIES = ([30, 20, 40, 61], [3, 50, 10**6, 2 * 10**6], [-5, 10, 61, -7])


def named(name: str) -> Unit:
    return next(unit for unit in load_tables().units() if unit.name == name)


def sm90(variant: str = "") -> Unit:
    return named(NAME + variant)


@pytest.mark.parametrize("name", ["sm90_f16_d64_causal", "sm80_f16_d64", "sm75_f16_d64"])
def test_an_entry_has_the_bits_of_a_dense_call_where_the_tile_is_the_same(name: str) -> None:
    dense, ragged = (
        named(f"attention_forward_{name}"),
        named(f"attention_varlen_forward_{name.removesuffix('_causal')}"),
    )
    assert (dense.row.block_m, dense.row.block_n) == (ragged.row.block_m, ragged.row.block_n)
    shape = Shape(1, 2, 1, 70, 150, 64)
    alone = run_forward(dense, Problem(shape, "f16", causal=True), Settings(), Options())
    problem = VarlenProblem("dense", "f16", (20, 70), (9, 150), 2, 1, 64, 64, right=0)
    tensors = build(problem)
    inputs = make_inputs(Problem(shape, "f16", causal=True))
    for tensor, cu, given in zip(
        (tensors.q, tensors.k, tensors.v),
        (tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.cu_seqlens_k),
        (inputs.q, inputs.k, inputs.v),
        strict=True,
    ):
        assert cu is not None
        tensor[int(cu[1]) : int(cu[2])] = given[0].transpose(0, 1)
    report, results = launch(ragged, problem, tensors, Settings(), Options())
    assert report.failure is None, str(report.failure)
    assert tensors.cu_seqlens_q is not None
    rows = slice(int(tensors.cu_seqlens_q[1]), int(tensors.cu_seqlens_q[2]))
    assert torch.equal(tensors.out[rows].transpose(0, 1), alone.out[0])
    close = 0.0 if dense.row.family == "sm90" else 2.0**-22  # of a band's last step, where a sink would join
    torch.testing.assert_close(results.lse[:, rows], alone.lse[0], rtol=close, atol=0.0)


def test_a_result_does_not_depend_on_the_rows_that_follow_it() -> None:
    """Rows of a tile past an entry's end are the next entry's: they may not move the maximum of its own."""
    problem = VarlenProblem("neighbours", "f16", (70, 20, 5), (210, 150, 9), 2, 1, 64, 64, softcap=4.0)
    problem = replace(problem, magnitude=0.3)
    outs = []
    for factor in (1.0, 40.0):
        tensors = build(problem)
        tensors.entries[1][0].mul_(factor)
        outcome = run_on(sm90("_scores"), problem, tensors, Settings(), Options())
        assert outcome.passed, outcome.explain()
        first = int(tensors.cu_seqlens_q[0]) if tensors.cu_seqlens_q is not None else 0
        outs.append(outcome.out[first : first + 70].clone())
    assert torch.equal(outs[0], outs[1])


def test_heads_that_share_a_tile_have_the_bits_of_heads_that_do_not() -> None:
    problem = VarlenProblem("short", "f16", (100, 64, 3), (150, 90, 9), 6, 2, 64, 64, right=0)
    tensors = build(problem)
    together = run_on(sm90(), problem, tensors, Settings(), Options())
    assert together.passed, together.explain()
    wanted = together.out.clone()
    tensors.out.fill_(float("nan"))
    cu_q, cu_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    assert cu_q is not None
    assert cu_k is not None
    for entry in range(3):  # too few tiles alone
        report, results = launch(
            *(sm90(), replace(problem, rows=problem.rows[entry : entry + 1], keys=problem.keys[entry : entry + 1])),
            *(replace(tensors, cu_seqlens_q=cu_q[entry:].clone(), cu_seqlens_k=cu_k[entry:].clone()), Settings()),
            Options(),
        )
        assert report.failure is None, str(report.failure)
        rows = slice(int(cu_q[entry]), int(cu_q[entry + 1]))
        assert torch.equal(tensors.out[rows], wanted[rows])
        assert torch.equal(results.lse[:, rows], together.lse[:, rows])


def test_lengths_that_lie_stay_inside_the_tensors() -> None:
    """cu_seqlens that decrease, pass either end, or hold more rows than max_seqlen_q: wrong rows at most, no other memory."""
    problem = VarlenProblem("wrong", "f16", (20, 30, 5), (40, 33, 9), 2, 1, 64, 64)
    for wrong in LIES:
        tensors = build(problem)
        for cu in (tensors.cu_seqlens_q, tensors.cu_seqlens_k):
            assert cu is not None
            cu.copy_(torch.tensor(wrong))
        report, _ = launch(sm90(), problem, tensors, Settings(), Options())
        assert report.failure is None, str(report.failure)


def test_rows_in_front_of_the_first_entry_have_slots_and_no_tile() -> None:
    """sm80 finds a tile by its slot. Those before the first entry's count backwards, into rows that are nobody's."""
    unit = next(unit for unit in load_tables().units() if unit.name == "attention_varlen_forward_sm80_f16_d64")
    problem = VarlenProblem("front", "f16", (150, 20, 5), (9, 7, 3), 1, 1, 64, 64)
    tensors = build(problem)
    assert tensors.cu_seqlens_q is not None
    tensors.cu_seqlens_q.copy_(torch.tensor([140, 160, 170, 175]))
    report, _ = launch(unit, problem, tensors, Settings(), Options())
    assert report.failure is None, str(report.failure)
    assert torch.isnan(tensors.out[:140]).all()
    assert torch.isnan(tensors.out[175:]).all()
    assert not torch.isnan(tensors.out[140:175]).any()


def test_tiles_that_take_turns_do_not_wait_for_ever_where_lengths_lie() -> None:
    """Entries whose rows overlap would count each other's turns: then no row has a gradient."""
    unit = next(unit for unit in load_tables().units() if unit.name == "attention_varlen_backward_fused_sm90_f16_d64")
    problem = VarlenProblem("wrong", "f16", (20, 30, 5), (40, 33, 9), 2, 1, 64, 64, right=0)
    for wrong in (*LIES, [0, 40, 0, 40]):
        tensors = build(problem)
        given, _ = backward.expect(problem, tensors, shares_weights=False, score_unit=1e-6)
        assert tensors.cu_seqlens_q is not None
        tensors.cu_seqlens_q.copy_(torch.tensor(wrong))
        launched = backward.launch(unit, problem, tensors, given, Settings(), Options())
        assert launched.report.failure is None, str(launched.report.failure)
        if wrong == [0, 40, 0, 40]:
            assert not any(result.any() for result in launched.results.values())
