"""FlexAttention as a contender: options match the reference; unsupported ones and uncompiled calls are refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import default_registry
from flashmoe_tools.operations import flex, problem_from_key
from flashmoe_tools.operations.attention.problem import AttentionProblem
from flashmoe_tools.operations.serving.problem import ServingProblem
from flashmoe_tools.operations.serving_backward.problem import ServingBackwardProblem
from flashmoe_tools.operations.serving_training.problem import ServingTrainingProblem

CAUSAL = ServingProblem("f32", 64, 4, 2, batch=2, seq_q=40, seq_k=70)
FULL = replace(CAUSAL, causal=False)
SCORES = (
    CAUSAL,
    replace(CAUSAL, window=7),
    replace(CAUSAL, softcap=3, deviation=4),
    replace(CAUSAL, alibi=True, heads_q=8),
    replace(FULL, alibi=True),
    replace(CAUSAL, seq_q=1, page_size=16, alibi=True),
    *(replace(FULL, mask=mask) for mask in ("additive", "bool", "learned")),
    *(replace(FULL, mask="learned", batch=1, heads_kv=heads, heads_q=heads) for heads in (1, 4)),
    *(replace(FULL, mask=mask, heads_q=1, heads_kv=1) for mask in ("learned", "additive")),
    replace(CAUSAL, window=20, softcap=3, alibi=True, deviation=4),
)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Replaces FlexAttention's kernels by its definition in torch operations.

    This runs on a CPU, also with gradients, which its kernels only support on GPUs.
    """
    from torch.nn.attention import flex_attention as module

    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", "gradients" not in request.node.name)
    torch._dynamo.reset()  # captured tensors have gradients when it is traced
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "compiled", lambda function, tensors, named: partial(function, *tensors, **named))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("problem", SCORES, ids=str)
def test_options_are_what_the_reference_says(problem: ServingProblem) -> None:
    inputs = problem.make_inputs("cpu", 0)
    reference = problem.make_reference(inputs)
    result = default_registry("serving")["flex-attention"].prepare(inputs).call()
    verdict = reference.judge(result)
    assert verdict.passed, verdict.reason
    if problem != replace(problem.plain, causal=False):
        plain = replace(inputs.plain, problem=replace(problem.plain, causal=False))
        without = default_registry("serving")["flex-attention"].prepare(plain).call()
        assert problem.seq_q == 1 or not reference.judge(without).passed


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:The .grad attribute")
@pytest.mark.parametrize("kind", [ServingBackwardProblem, ServingTrainingProblem])
@pytest.mark.parametrize("problem", [replace(FULL, mask="learned"), replace(CAUSAL, window=9)], ids=str)
def test_gradients_are_what_the_reference_says(problem: ServingProblem, kind: type[ServingBackwardProblem]) -> None:
    case = kind(**vars(problem))
    inputs = case.make_inputs("cpu", 0)
    call = default_registry(kind.operation)["flex-attention"].prepare(inputs).call
    reference = case.make_reference(inputs)
    for _ in range(2):  # as often as it is called
        gradients = call()
        assert len(gradients) == (4 if problem.mask == "learned" else 3)
        verdict = reference.judge(gradients)
        assert verdict.passed, verdict.reason


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("key", ["f32-d64-causal-b2-h4kv2-q48k80", "f32-d320-full-b1-h2-s48"])
def test_dense_attention_takes_part(key: str) -> None:
    case = problem_from_key(key)
    assert isinstance(case, AttentionProblem)
    inputs = case.make_inputs("cpu", 0)
    verdict = case.make_reference(inputs).judge(default_registry()["flex-attention"].prepare(inputs).call())
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dropout": 10}, "neither dropout nor sinks"),
        ({"sinks": True}, "sinks: FlexAttention has neither"),
        ({"spread": "mixed", "seq_q": 70}, "differ in length"),
    ],
    ids=str,
)
def test_what_it_has_not_is_refused(changes: dict[str, Any], words: str) -> None:
    inputs = replace(CAUSAL, **changes).make_inputs("cpu", 0)
    with pytest.raises(ArgumentError, match=words):
        default_registry("serving")["flex-attention"].prepare(inputs)


def test_it_is_never_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))

    def of(number: int) -> Callable[..., torch.Tensor]:
        return lambda x: x + number

    for number in range(20):  # more than a function may be compiled for
        assert flex.compiled(of(number), (x,), {})().tolist() == [1.0 + number] * 3

    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(Exception, match="graph_break"):
        flex.compiled(breaks, (x,), {})
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with pytest.raises(ArgumentError, match="switched off"):
        flex.compiled(of(1), (x,), {})
