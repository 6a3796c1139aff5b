"""Serving as an operation of the benchmarks: what a problem counts, right results pass, wrong ones do not."""

from __future__ import annotations

import pytest
import torch

from flashmoe.tools.bench.contenders import default_registry
from flashmoe.tools.bench.suites import load_suite
from flashmoe.tools.problems import problem_from_json
from flashmoe.tools.problems.fields import SuiteError
from flashmoe.tools.problems.serving import ServingProblem

DECODE = ServingProblem("f32", 64, 4, 2, batch=3, seq_q=1, seq_k=100, page_size=16)
RAGGED = ServingProblem("f32", 64, 4, 2, batch=3, seq_q=90, seq_k=90, spread="ramp")


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (DECODE, "flashmoe"),
        (DECODE, "flashmoe-ragged"),
        (DECODE, "flashmoe-dense"),
        (DECODE, "sdpa"),
        (RAGGED, "flashmoe"),
        (ServingProblem("bf16", 64, 4, 2, batch=2, seq_q=40, seq_k=40), "sdpa"),
        (ServingProblem("bf16", 64, 4, 2, batch=3, seq_q=7, seq_k=700, page_size=24, spread="one"), "flashmoe"),
        (ServingProblem.smallest(), "flashmoe"),
    ],
    ids=str,
)
def test_right_results_pass(problem: ServingProblem, name: str) -> None:
    inputs = problem.make_inputs("cpu", 0)
    prepared = default_registry("serving")[name].prepare(inputs)
    lse = None if prepared.lse is None else prepared.lse()
    verdict = problem.make_reference(inputs).judge(prepared.call(), lse)
    assert verdict.passed, verdict.reason
    assert verdict.coverage == 1.0


def test_wrong_results_do_not() -> None:
    inputs = RAGGED.make_inputs("cpu", 0)
    reference = RAGGED.make_reference(inputs)
    out = default_registry("serving")["flashmoe"].prepare(inputs).call()
    assert not reference.judge(out[:-1]).passed
    assert not reference.judge(out.roll(1, 0)).passed
    out[5, 1, 3] = torch.nan
    assert not reference.judge(out).passed


def test_a_problem_is_counted_and_read_back() -> None:
    for problem in (DECODE, RAGGED, ServingProblem("bf16", 128, 64, 8, 64, 1, 65536, page_size=16, spread="one")):
        assert problem_from_json(problem.to_json()) == problem
        assert ServingProblem.from_key(problem.key) == problem
    assert DECODE.bytes_moved == 4 * 64 * (2 * 4 * 3 + 2 * 2 * 300)
    assert DECODE.flops == 4 * 4 * 64 * 300
    assert RAGGED.lengths_q == RAGGED.lengths_k == (30, 60, 90)
    assert RAGGED.flops == 4 * 4 * 64 * (30 * 15 + 60 * 30 + 90 * 45)


def test_the_grid_is_bounded_by_memory() -> None:
    suite = load_suite("serving")
    assert {case.page_size for case in suite.cases} == {16, 64, 128, 256}
    assert max(sum(case.lengths_k) for case in suite.cases) <= 4 * 2**20
    row = {"head_dim": 64, "heads": 3, "heads_kv": 2, "batch": 1, "seq_q": 1, "seq_k": 8}
    with pytest.raises(SuiteError, match="heads"):
        list(ServingProblem.expand(row, "mine.toml"))
