"""For every operation: its problems are read back, right results pass, wrong ones do not."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import choose, default_registry
from flashmoe_tools.bench.suites import load_suite, suite_names
from flashmoe_tools.operations import Problem, operations, problem_from_json, problem_from_key, problem_type
from flashmoe_tools.operations.moe_scaled.reference import SixteenBits

OPERATIONS = operations()
# Problems on which more can go wrong than on the smallest: masks aligned bottom-right, grouped heads, tails.
EXAMPLES = {
    "attention": "f32-d64-causal-b1-h8kv2-q16k40",
    "attention_backward": "backward-bf16-d64-causal-b2-h4kv2-q48k80",
    "attention_training": "training-bf16-d64-causal-b2-h4kv2-q48k80",
    "moe_mxfp4": "mxfp4-e8k2-h128i64-t5",
    "moe_scaled": "e4m3-e8k2-h256i128-t5",
    "serving": "serve-f32-d64-causal-b3-h4kv2-q90k90-ramp",
    "serving_backward": "backward-serve-f32-d64-causal-b2-h4kv2-q40k40-sinks",
    "train_step": "step-bf16-l2-w64-h4kv2-f96-v50-b2-s40",
}


def example(operation: str) -> Problem:
    key = EXAMPLES.get(operation)
    return problem_type(operation).smallest() if key is None else problem_from_key(key)


def spoilt(result: Any, index: int, value: float | None) -> Any:
    """The result with ``value`` in a row of one of its tensors; None: with one column missing."""
    if isinstance(result, SixteenBits):
        return replace(result, out=spoilt(result.out, index, value))
    if not isinstance(result, torch.Tensor):
        return [spoilt(one, 0, value) if at == index else one for at, one in enumerate(result)]
    wrong = result[..., :-1] if value is None else result.clone()
    if value is not None:
        wrong[-1] = value
    return wrong


@pytest.mark.parametrize("name", suite_names())
def test_every_case_of_a_suite_is_read_back(name: str) -> None:
    suite = load_suite(name)
    for case in (*suite.cases, *suite.quick_only):
        assert problem_from_json(case.to_json()) == problem_from_key(case.key) == case
        assert case.flops > 0 < case.bytes_moved
        assert case.fit({case.dtype}, 2**40) == case


@pytest.mark.parametrize("operation", OPERATIONS)
def test_results_of_every_contender_pass_and_wrong_ones_do_not(operation: str) -> None:
    problem, registry, ran = example(operation), default_registry(operation), []
    inputs = problem.make_inputs("cpu", 0)
    for one in choose(registry, list(registry), "cpu", baseline_only=False):
        if one.available("cpu") or one.name.endswith("-compiled"):  # compiling takes seconds each
            continue
        try:
            with one.context():
                prepared = one.prepare(inputs)
                result = prepared.call()
        except ArgumentError:  # raised by contenders that cannot compute the case
            continue
        own = inputs if prepared.own is None else prepared.own
        outcome = own.problem.make_reference(own).judge(result)
        assert outcome.passed, f"{one.name}: {outcome.reason}"
        ran.append(one.name)
    assert "flashmoe" in ran
    assert len(ran) > 1
    reference, result = problem.make_reference(inputs), registry["flashmoe"].prepare(inputs).call()
    assert reference.tolerance > 0 < reference.coverage  # recorded with a contender's refusal
    count = 1 if isinstance(result, (torch.Tensor, SixteenBits)) else len(result)
    for index in range(count):
        values = (
            (None, 0.0, float("nan")) if operation != "train_step" else (None, float("nan"))
        )  # one bound for all weights
        for value in values:
            outcome = reference.judge(spoilt(result, index, value))
            assert not outcome.passed, f"tensor {index}, {value}"
            assert outcome.reason
    if count > 1:
        assert not reference.judge(result[1:]).passed
