"""Decoding on emulated kernels: what the suite's comparison with fp64 would not show."""

from dataclasses import replace

import pytest
import torch

from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.machine import Settings
from flashmoe_build.emulation.runner import execute
from flashmoe_tools.operations.serving.emulation import decode
from flashmoe_tools.operations.serving.emulation.problem import Keys, VarlenProblem
from flashmoe_tools.operations.serving.emulation.tensors import build
from flashmoe_tools.tables import Unit, load_tables

NAME = "attention_decode_sm80_f16_d64"


def kernel() -> tuple[Unit, dict[str, VarlenProblem]]:
    unit = next(unit for unit in load_tables().units() if unit.name == NAME)
    return unit, {problem.name: problem for problem in decode.problems(unit)}


def test_whichever_block_is_last_adds_up_the_same() -> None:
    unit, problems = kernel()
    outcomes = [
        execute(unit, decode.trial(unit, problems["ragged"]), Settings(seed=seed), Options()) for seed in (1, 2, 3)
    ]
    for outcome in outcomes:
        assert outcome.passed, outcome.explain()
        assert torch.equal(outcome.results["out"].nan_to_num(7.0), outcomes[0].results["out"].nan_to_num(7.0))


def test_unshared_results_do_not_depend_on_the_batch() -> None:
    """num_splits=1: later sequences change neither a sequence's output nor its log-sum-exp."""
    unit, problems = kernel()
    problem = replace(problems["one split"], data_seed=3)
    tensors = build(problem)
    execute(unit, decode.trial_on(unit, problem, tensors), Settings(), Options())
    first = tensors.out[:2].clone()
    assert tensors.seqused_k is not None
    tensors.seqused_k[2:] = torch.tensor([0, 1, 2])
    tensors.out.fill_(float("nan"))
    execute(unit, decode.trial_on(unit, problem, tensors), Settings(), Options())
    assert torch.equal(tensors.out[:2], first)


@pytest.mark.parametrize("is_shared", [False, True])
def test_equal_sequences_are_whole_unless_they_share_pages(is_shared: bool) -> None:
    unit, problems = kernel()
    equal = problems["equal"]
    equal = replace(equal, keys=tuple(2 * keys for keys in equal.keys), keys_layout=Keys.PAGED, page_size=16)
    results = []
    for splits in (1, 32):  # the first: whole items in any case
        problem = replace(equal, splits=splits)
        tensors = build(problem)
        if is_shared:
            assert tensors.block_table is not None
            tensors.block_table[1:] = tensors.block_table[0].clone()
            _, k, v = tensors.sequences[0]
            tensors = replace(tensors, sequences=tuple((q, k, v) for q, _, _ in tensors.sequences))
        outcome = execute(unit, decode.trial_on(unit, problem, tensors), Settings(), Options())
        assert outcome.passed, outcome.explain()
        results.append(outcome.results["out"])
    assert results[0].equal(results[1]) == (not is_shared)


def test_lengths_that_lie_stay_inside_the_tensors() -> None:
    unit, problems = kernel()
    for wrong in ([10**9, -5, 3, 2**31 - 1, 7], [-(2**31), 0, 0, 0, 0]):
        tensors = build(problems["decode"])
        assert tensors.seqused_k is not None
        tensors.seqused_k.copy_(torch.tensor(wrong))
        lying = replace(decode.trial_on(unit, problems["decode"], tensors), check=list)
        report = execute(unit, lying, Settings(), Options()).report
        assert report.failure is None, str(report.failure)
