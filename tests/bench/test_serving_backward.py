"""The backward pass of ragged batches as an operation: what a problem counts; right gradients pass, wrong ones do not."""

from dataclasses import replace

import pytest
import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import default_registry
from flashmoe_tools.bench.suites import load_suite
from flashmoe_tools.operations import problem_from_json, problem_from_key
from flashmoe_tools.operations.fields import SuiteError
from flashmoe_tools.operations.serving.problem import ServingProblem
from flashmoe_tools.operations.serving_backward.problem import ServingBackwardProblem

RAGGED = ServingBackwardProblem("bf16", 64, 4, 2, batch=3, seq_q=90, seq_k=90, spread="ramp")
WINDOW = ServingBackwardProblem("bf16", 64, 4, 2, batch=2, seq_q=70, seq_k=70, window=20)
SINKS = ServingBackwardProblem("f32", 64, 4, 2, batch=2, seq_q=40, seq_k=40, sinks=True)
CAPPED = ServingBackwardProblem("bf16", 64, 4, 2, batch=2, seq_q=128, seq_k=128, softcap=5, deviation=5)
ADDITIVE = ServingBackwardProblem("bf16", 64, 4, 2, batch=2, seq_q=30, seq_k=50, causal=False, mask="additive")
BOOL = replace(ADDITIVE, mask="bool")
FLAT = ServingBackwardProblem("bf16", 64, 4, 2, batch=1, seq_q=384, seq_k=384, softcap=30, deviation=3)
SCORES = (WINDOW, SINKS, CAPPED, FLAT, ADDITIVE, BOOL)
REGISTRY = default_registry("serving_backward")


def test_a_problem_is_named_counted_and_read_back() -> None:
    for problem in (RAGGED, *SCORES):
        forward = ServingProblem.from_key(problem.key.removeprefix("backward-"))
        assert problem_from_json(problem.to_json()) == problem
        assert problem_from_key(problem.key) == problem
        assert 2 * problem.flops == 5 * forward.flops
        assert problem.bytes_moved - 2 * forward.bytes_moved == 16 * sum(problem.lengths_q) - forward.mask_bytes
        assert type(problem.plain) is ServingBackwardProblem
    with pytest.raises(ArgumentError, match="is not a case key"):
        ServingProblem.from_key(RAGGED.key)
    row = {"head_dim": 64, "heads": 2, "heads_kv": 2, "batch": 1, "seq_q": 8, "seq_k": 8, "page_size": 16}
    with pytest.raises(SuiteError, match="over pages has no gradient"):
        list(ServingBackwardProblem.expand(row, "mine.toml"))


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (RAGGED, "flashmoe"),
        *((problem, name) for problem in SCORES for name in ("flashmoe", "flashmoe-plain", "flashmoe-dense")),
        (ADDITIVE, "sdpa"),
        (ServingBackwardProblem.smallest(), "flashmoe"),
        *((problem, "flashmoe") for problem in load_suite("masks-train").quick_only),
    ],
    ids=str,
)
def test_right_gradients_pass(problem: ServingBackwardProblem, name: str) -> None:
    inputs = problem.make_inputs("cpu", 0)
    prepared = REGISTRY[name].prepare(inputs)
    own = inputs if prepared.own is None else prepared.own
    assert own.problem == (problem if name in ("flashmoe", "sdpa") else problem.plain)
    verdict = own.problem.make_reference(own).judge(prepared.call())
    assert verdict.passed, verdict.reason
    assert verdict.coverage == 1.0


@pytest.mark.parametrize("problem", [*SCORES, *load_suite("masks-train").quick_only], ids=str)
def test_gradients_without_what_a_case_does_to_its_scores_do_not(problem: ServingBackwardProblem) -> None:
    inputs = problem.make_inputs("cpu", 0)
    plain = REGISTRY["flashmoe-plain"].prepare(inputs).call()
    missing = [] if inputs.shared is None else [torch.zeros_like(inputs.shared)]
    assert "max error" in problem.make_reference(inputs).judge((*plain, *missing)).reason


def test_a_sum_over_entries_is_judged_where_all_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """dsinks is a sum over the batch; dq, dk and dv are still checked for the remaining pairs."""
    inputs = SINKS.make_inputs("cpu", 0)
    assert len(SINKS.make_reference(inputs).tolerances) == 4
    monkeypatch.setattr("flashmoe_tools.operations.serving_backward.reference.MOST_PAIRS", 2)
    reference = SINKS.make_reference(inputs)
    assert reference.coverage == 0.5
    assert len(reference.tolerances) == 3
    gradients = list(REGISTRY["flashmoe"].prepare(inputs).call())
    assert reference.judge(gradients).passed
    gradients[1] = gradients[1].roll(1, 0)
    assert reference.judge(gradients).reason.startswith("dk: max error")


def test_the_sinks_of_the_suite_are_checked_whole() -> None:
    """Sizes for which a GPU checks every pair, so that dsinks is judged."""
    from flashmoe_tools.operations.attention.reference import MAX_SCORES
    from flashmoe_tools.operations.serving_backward.reference import MOST_PAIRS

    [case] = [case for case in load_suite("masks-train").cases if case.sinks]  # type: ignore[attr-defined]
    assert case.batch * case.heads_kv <= MOST_PAIRS  # type: ignore[attr-defined]
    scores = case.batch * case.heads_q * case.seq_q * case.seq_k  # type: ignore[attr-defined]
    assert scores <= MAX_SCORES["cuda"] // 8
