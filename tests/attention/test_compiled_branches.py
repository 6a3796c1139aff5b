"""Code paths that differ under torch.compile give the same results and reject the same calls as eager code."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashmoe
from flashmoe.errors import ArgumentError, FlashmoeError

Answer = Tensor | tuple[Tensor, ...]


def _random(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def _dense(**options: Any) -> Answer:
    return flashmoe.attention(_random(2, 4, 5, 64), _random(2, 2, 9, 64), _random(2, 2, 9, 64), **options)


def _ragged(**options: Any) -> Answer:
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    q, k, v = (_random(7, heads, 64) for heads in (4, 2, 2))
    return flashmoe.attention_varlen(q, k, v, ends, ends, 4, 4, **options)


def _cached(codes: bool = False, **options: Any) -> Answer:
    cache = _random(2, 2, 8, 64)
    cache, scales = (cache.to(torch.float8_e4m3fn), {"k_scale": 0.5, "v_scale": 2.0}) if codes else (cache, {})
    new = [_random(2, 2, 1, 64)] * 2
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    return flashmoe.attention_with_kvcache(
        _random(2, 4, 1, 64), cache, cache.clone(), *new, cache_seqlens=lengths, **scales, **options
    )


def _of_codes(ragged: bool = False, **options: Any) -> Answer:
    q, k, v = (_random(*sizes).to(torch.float8_e4m3fn) for sizes in ((1, 4, 7, 64), (1, 2, 7, 64), (1, 2, 7, 64)))
    scales = {"q_scale": 0.5, "k_scale": torch.tensor(0.25), "v_scale": 2.0}
    if not ragged:
        return flashmoe.attention(q, k, v, **scales, **options)
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    q, k, v = (one[0].transpose(0, 1).contiguous() for one in (q, k, v))
    return flashmoe.attention_varlen(q, k, v, ends, ends, 4, 4, **scales, **options)


def _by_name(**_: Any) -> Answer:
    """As a compiled program calls it: through the dispatcher."""
    return torch.ops.flashmoe.flash_attention_forward(*(_random(2, 2, 5, 64) for _ in range(3)), 0.1, True)


def _latents(**options: Any) -> Answer:
    lengths = torch.tensor([4, 8], dtype=torch.int32)
    cache = torch.zeros(2, 8, 656, dtype=torch.uint8)
    flashmoe.mla_append(_random(2, 4, 576), cache, cache_seqlens=torch.tensor([0, 4], dtype=torch.int32))
    return flashmoe.mla_decode(_random(2, 1, 16, 576), cache, cache_seqlens=lengths, scale=0.1, **options)


def _experts(kind: str, **options: Any) -> Answer:
    x, w13, w2 = _random(5, 128), _random(4, 256, 128), _random(4, 128, 128)
    weights, ids = torch.full((5, 2), 0.5), torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0]], dtype=torch.int32)
    if kind == "scaled":
        options["quantized"] = (flashmoe.quantize_weights(w13), flashmoe.quantize_weights(w2))
        options["precision"] = "fp8"
    elif kind == "mxfp4":
        w13, w2 = (torch.arange(one.numel() // 2).to(torch.uint8).view(*one.shape[:2], -1) for one in (w13, w2))
        options |= {
            f"{name}_scale": torch.full((4, rows, 4), 120, dtype=torch.uint8)
            for name, rows in (("w13", 256), ("w2", 128))
        }
    return flashmoe.fused_moe(x, w13, w2, weights, ids, **options)


def _compile(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("flashmoe.") and hasattr(module, "is_compiling"):
            monkeypatch.setattr(module, "is_compiling", lambda: True)


def _beside_a_transform(call: Callable[[], Answer]) -> Answer:
    """The call inside a transform of another, unrelated tensor."""
    answers: list[Answer] = []
    torch.func.grad(lambda other: answers.append(call()) or other.sum())(torch.ones(1))
    return answers[0]


BOTH = ({}, {"return_lse": True})
CALLS: list[tuple[str, Callable[..., Answer], dict[str, Any]]] = [
    *[
        ("dense", _dense, {**more, **both})
        for both in BOTH
        for more in ({}, {"causal": True}, {"scale": 0.3}, {"softcap": 5.0})
    ],
    *[("dropout", call, {"dropout_p": 0.5, **both}) for both in BOTH for call in (_dense, _ragged)],
    *[("ragged", _ragged, {**more, **both}) for both in BOTH for more in ({}, {"window": (2, 0)})],
    *[("cached", _cached, {"codes": codes, **both}) for both in BOTH for codes in (False, True)],
    *[("codes", _of_codes, {"ragged": ragged, **both}) for both in BOTH for ragged in (False, True)],
    *[("latents", _latents, both) for both in BOTH],
    *[("experts", _experts, {"kind": kind}) for kind in ("plain", "scaled", "mxfp4")],
    ("linear", lambda: flashmoe.linear(_random(5, 64), _random(32, 64)), {}),
    ("operator", _by_name, {"return_lse": True}),
]


@pytest.mark.parametrize("way", ["compiled", "beside a transform", "both"])
@pytest.mark.parametrize(("what", "call", "options"), CALLS, ids=lambda one: one if isinstance(one, str) else "")
def test_the_same_results(
    monkeypatch: pytest.MonkeyPatch, what: str, call: Callable[..., Answer], options: dict[str, Any], way: str
) -> None:
    def called(way: str) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        answer = call(**options) if way in ("", "compiled") else _beside_a_transform(lambda: call(**options))
        return answer if isinstance(answer, tuple) else (answer,)

    expected = called("")
    if way != "beside a transform":
        _compile(monkeypatch)
    elif options.get("kind") in ("scaled", "mxfp4"):
        with pytest.raises(FlashmoeError):  # experts with few bits have no rule for transforms, and say so
            called(way)
        return
    found = called(way)
    assert len(found) == len(expected) == 1 + options.get("return_lse", False)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_out_beside_a_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected, because a transform cannot follow it; allowed in a compiled program, which torch makes functional."""
    for call, shape in ((_experts, (5, 128)), (_cached, (2, 4, 1, 64))):
        given, out = {"kind": "plain"} if call is _experts else {}, torch.empty(shape, dtype=torch.bfloat16)
        expected = call(**given)
        with pytest.raises(ArgumentError):
            _beside_a_transform(lambda call=call, given=given, out=out: call(**given, out=out))
        with monkeypatch.context() as patch:
            _compile(patch)
            assert torch.equal(
                _beside_a_transform(lambda call=call, given=given, out=out: call(**given, out=out)), expected
            )
        assert torch.equal(out, expected)


@pytest.mark.parametrize(("what", "call", "options"), CALLS, ids=lambda one: one if isinstance(one, str) else "")
def test_what_the_cpu_hands_to_torch(
    monkeypatch: pytest.MonkeyPatch, what: str, call: Callable[..., Answer], options: dict[str, Any]
) -> None:
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    if options.get("kind") == "scaled":  # it has kernels only on GPUs
        with pytest.raises(ArgumentError, match="would run on torch"):
            call(**options)
        return
    call(**options)


class _End(torch.autograd.Function):
    """A function that passes no gradient on."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.count = len(given)
        return sum((one.sum() for one in given), start=torch.zeros(()))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None,) * ctx.count


TRAINED: dict[str, Callable[[Tensor], Answer]] = {
    "dense": lambda x: flashmoe.attention(x, x, x, return_lse=True),
    "masked": lambda x: flashmoe.attention(x, x, x, softcap=5.0, return_lse=True),
    "dropout": lambda x: flashmoe.attention(x, x, x, dropout_p=0.5, return_lse=True),
    "merge": lambda x: flashmoe.merge_attention(x, x[..., 0], x, x[..., 0]),
    "experts": lambda x: flashmoe.fused_moe(
        x[0, 0], x.view(1, 64, 64)[:, :32], x.view(1, 64, 64)[..., :16], x[0, 0, :, :1], torch.zeros(16, 1, dtype=torch.int32)
    ),
    "route": lambda x: flashmoe.topk_route(x[0, 0], 2)[0],
}  # fmt: skip


@pytest.mark.parametrize("what", TRAINED)
def test_no_gradient_comes_back(what: str) -> None:
    """If the function after ours passes no gradient on, its inputs get none, or zeros, and nothing is computed."""
    x = _random(1, 4, 16, 64, dtype=torch.float32).requires_grad_()
    answer = TRAINED[what](x)
    with _Full():
        _End.apply(*(answer if isinstance(answer, tuple) else (answer,))).backward()
    assert x.grad is None or not x.grad.any()


class _Full(TorchDispatchMode):
    """A device without memory for any result of flashmoe."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "flashmoe":
            raise torch.OutOfMemoryError("no room")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("what", "call", "options"), CALLS, ids=lambda one: one if isinstance(one, str) else "")
def test_an_error_that_no_rule_explains_is_raised_as_it_is(
    what: str, call: Callable[..., Answer], options: dict[str, Any]
) -> None:
    with _Full(), pytest.raises(torch.OutOfMemoryError, match="no room") as caught:
        call(**options)
    assert caught.value.__cause__ is None


WRONG: dict[str, Callable[[], Any]] = {
    "dense": lambda: flashmoe.attention(_random(1, 2, 3, 64), _random(1, 2, 3, 64), _random(1, 2, 4, 64)),
    "ragged": lambda: flashmoe.attention_varlen(*[_random(7, 2, 64)] * 3, *[torch.tensor([0, 9], dtype=torch.int32)] * 2, 9, 9),
    "cached": lambda: _cached(softcap=-1.0),
    "codes": lambda: _cached(codes=True, softcap=-1.0),
    "decode": lambda: _latents(num_splits=-1),
    "append": lambda: flashmoe.mla_append(_random(2, 1, 576), torch.zeros(2, 8, 655, dtype=torch.uint8), cache_seqlens=torch.zeros(2)),
    "experts": lambda: flashmoe.fused_moe(_random(5, 64), _random(4, 64, 128), _random(4, 64, 128), torch.ones(5, 2), torch.ones(5, 2)),
    "linear": lambda: flashmoe.linear(_random(5, 64), _random(32, 63)),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_the_same_refusals(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Typed errors when Python runs; under a compiler, which cannot trace the messages, the operator's own error."""
    with pytest.raises(FlashmoeError):
        WRONG[what]()
    _compile(monkeypatch)
    with pytest.raises((FlashmoeError, RuntimeError)):
        WRONG[what]()
