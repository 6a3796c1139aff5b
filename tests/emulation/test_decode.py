"""Decoding on emulated kernels: what the suite's comparison with fp64 would not show."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashmoe.tools.tables import Unit, load_tables
from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.machine import Settings
from flashmoe_build.emulation.varlen import decode
from flashmoe_build.emulation.varlen.problem import VarlenProblem
from flashmoe_build.emulation.varlen.tensors import build

NAME = "attention_decode_sm80_f16_d64"


def kernel() -> tuple[Unit, dict[str, VarlenProblem]]:
    unit = next(unit for unit in load_tables().units() if unit.name == NAME)
    return unit, {problem.name: problem for problem in decode.problems(unit)}


def test_whichever_block_is_last_adds_up_the_same() -> None:
    unit, problems = kernel()
    outcomes = [decode.run(unit, problems["ragged"], Settings(seed=seed), Options()) for seed in (1, 2, 3)]
    for outcome in outcomes:
        assert outcome.passed, outcome.explain()
        assert torch.equal(outcome.out.nan_to_num(7.0), outcomes[0].out.nan_to_num(7.0))


def test_unshared_results_do_not_depend_on_the_batch() -> None:
    """num_splits=1: entries behind an entry change neither its output nor its log-sum-exp."""
    unit, problems = kernel()
    problem = replace(problems["one split"], data_seed=3)
    tensors = build(problem)
    whole = decode.run_on(unit, problem, tensors, Settings(), Options())
    first = whole.out[:2].clone()
    assert tensors.seqused_k is not None
    tensors.seqused_k[2:] = torch.tensor([0, 1, 2])
    tensors.out.fill_(float("nan"))
    decode.run_on(unit, problem, tensors, Settings(), Options())
    assert torch.equal(tensors.out[:2], first)


def test_lengths_that_lie_stay_inside_the_tensors() -> None:
    unit, problems = kernel()
    for wrong in ([10**9, -5, 3, 2**31 - 1, 7], [-(2**31), 0, 0, 0, 0]):
        tensors = build(problems["decode"])
        assert tensors.seqused_k is not None
        tensors.seqused_k.copy_(torch.tensor(wrong))
        report = decode.run_on(unit, problems["decode"], tensors, Settings(), Options()).report
        assert report.failure is None, str(report.failure)
