"""Ragged, paged and windowed attention on emulated kernels: what the suite's comparison with fp64 would not show."""

from dataclasses import replace

import pytest
import torch

from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.machine import Settings
from flashmoe_build.emulation.runner import Outcome, Trial, execute
from flashmoe_tools.operations.attention.emulation import forward as dense_forward
from flashmoe_tools.operations.attention.emulation.problem import Problem, Shape, make_inputs
from flashmoe_tools.operations.serving.emulation.forward import trial_on
from flashmoe_tools.operations.serving.emulation.problem import VarlenProblem
from flashmoe_tools.operations.serving.emulation.tensors import build
from flashmoe_tools.operations.serving_backward.emulation import backward
from flashmoe_tools.tables import Unit, load_tables

NAME = "attention_varlen_forward_sm90_f16_d64"
LIES = ([30, 20, 40, 61], [3, 50, 10**6, 2 * 10**6], [-5, 10, 61, -7])


def named(name: str) -> Unit:
    return next(unit for unit in load_tables().units() if unit.name == name)


def sm90(variant: str = "") -> Unit:
    return named(NAME + variant)


def launched(unit: Unit, trial: Trial) -> Outcome:
    """Does not check the results, because lengths may be wrong."""
    outcome = execute(unit, replace(trial, check=list), Settings(), Options())
    assert outcome.passed, outcome.explain()
    return outcome


@pytest.mark.parametrize("name", ["sm90_f16_d64_causal", "sm80_f16_d64", "sm75_f16_d64"])
def test_a_sequence_has_the_bits_of_a_dense_call_where_the_tile_is_the_same(name: str) -> None:
    dense, ragged = (
        named(f"attention_forward_{name}"),
        named(f"attention_varlen_forward_{name.removesuffix('_causal')}"),
    )
    assert (dense.row.block_m, dense.row.block_n) == (ragged.row.block_m, ragged.row.block_n)
    shape = Shape(1, 2, 1, 70, 150, 64)
    alone = launched(dense, dense_forward.trial(dense, Problem(shape, "f16", causal=True))).results
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
    results = launched(ragged, trial_on(ragged, problem, tensors)).results
    assert tensors.cu_seqlens_q is not None
    rows = slice(int(tensors.cu_seqlens_q[1]), int(tensors.cu_seqlens_q[2]))
    assert torch.equal(tensors.out[rows].transpose(0, 1), alone["out"][0])
    close = 0.0 if dense.row.family == "sm90" else 2.0**-22  # the ragged kernel's last step would add a sink
    torch.testing.assert_close(results["lse"][:, rows], alone["lse"][0], rtol=close, atol=0.0)


def test_a_result_does_not_depend_on_the_rows_that_follow_it() -> None:
    """Rows of a tile past a sequence's end belong to the next sequence: they must not move the sequence's maximum."""
    problem = VarlenProblem("neighbours", "f16", (70, 20, 5), (210, 150, 9), 2, 1, 64, 64, softcap=4.0)
    problem = replace(problem, magnitude=0.3)
    outs = []
    for factor in (1.0, 40.0):
        tensors = build(problem)
        tensors.sequences[1][0].mul_(factor)
        unit = sm90("_scores")
        outcome = execute(unit, trial_on(unit, problem, tensors), Settings(), Options())
        assert outcome.passed, outcome.explain()
        first = int(tensors.cu_seqlens_q[0]) if tensors.cu_seqlens_q is not None else 0
        outs.append(tensors.out[first : first + 70].clone())
    assert torch.equal(outs[0], outs[1])


def test_heads_that_share_a_tile_have_the_bits_of_heads_that_do_not() -> None:
    problem = VarlenProblem("short", "f16", (100, 64, 3), (150, 90, 9), 6, 2, 64, 64, right=0)
    tensors = build(problem)
    together = execute(sm90(), trial_on(sm90(), problem, tensors), Settings(), Options())
    assert together.passed, together.explain()
    wanted = tensors.out.clone()
    tensors.out.fill_(float("nan"))
    cu_q, cu_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    assert cu_q is not None
    assert cu_k is not None
    for index in range(3):  # too few tiles when run separately
        one = replace(problem, rows=problem.rows[index : index + 1], keys=problem.keys[index : index + 1])
        own = replace(tensors, cu_seqlens_q=cu_q[index:].clone(), cu_seqlens_k=cu_k[index:].clone())
        results = launched(sm90(), trial_on(sm90(), one, own)).results
        rows = slice(int(cu_q[index]), int(cu_q[index + 1]))
        assert torch.equal(tensors.out[rows], wanted[rows])
        assert torch.equal(results["lse"][:, rows], together.results["lse"][:, rows])


def test_lengths_that_lie_stay_inside_the_tensors() -> None:
    """cu_seqlens that decrease, pass an end, or hold more than max_seqlen_q rows: at most wrong rows, no other memory."""
    problem = VarlenProblem("wrong", "f16", (20, 30, 5), (40, 33, 9), 2, 1, 64, 64)
    for wrong in LIES:
        tensors = build(problem)
        for cu in (tensors.cu_seqlens_q, tensors.cu_seqlens_k):
            assert cu is not None
            cu.copy_(torch.tensor(wrong))
        launched(sm90(), trial_on(sm90(), problem, tensors))


def test_rows_in_front_of_the_first_sequence_have_slots_and_no_tile() -> None:
    """sm80 finds a tile by its slot. Those before the first sequence count backwards, into rows of no sequence."""
    unit = next(unit for unit in load_tables().units() if unit.name == "attention_varlen_forward_sm80_f16_d64")
    problem = VarlenProblem("front", "f16", (150, 20, 5), (9, 7, 3), 1, 1, 64, 64)
    tensors = build(problem)
    assert tensors.cu_seqlens_q is not None
    tensors.cu_seqlens_q.copy_(torch.tensor([140, 160, 170, 175]))
    launched(unit, trial_on(unit, problem, tensors))
    assert torch.isnan(tensors.out[:140]).all()
    assert torch.isnan(tensors.out[175:]).all()
    assert not torch.isnan(tensors.out[140:175]).any()


def test_tiles_that_add_in_order_do_not_wait_for_ever_where_lengths_lie() -> None:
    """Sequences whose rows overlap would count each other's tiles: in that case no row has a gradient."""
    unit = next(unit for unit in load_tables().units() if unit.name == "attention_varlen_backward_fused_sm90_f16_d64")
    problem = VarlenProblem("wrong", "f16", (20, 30, 5), (40, 33, 9), 2, 1, 64, 64, right=0)
    for wrong in (*LIES, [0, 40, 0, 40]):
        tensors = build(problem)
        given, expected = backward.expect(problem, tensors, shares_weights=False, score_unit=1e-6)
        assert tensors.cu_seqlens_q is not None
        tensors.cu_seqlens_q.copy_(torch.tensor(wrong))
        outcome = launched(unit, backward.trial_on(unit, problem, tensors, given, expected))
        if wrong == [0, 40, 0, 40]:
            assert not any(result.any() for result in outcome.results.values())
