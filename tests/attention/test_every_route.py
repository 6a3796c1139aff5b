"""Which path a call takes, and why: each reason to leave it to torch, and when the operator without a log-sum-exp runs."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import flashmoe
from flashmoe.attn import (
    api,
    autograd,
    backward,
    dropout,
    e4m3,
    fake,
    fp8,
    kvcache,
    out_variant,
    sdpa,
    sdpa_dispatch,
    varlen,
    varlen_backward,
)
from flashmoe.attn.arguments import MAX_SCALE
from flashmoe.errors import DifferentiationError, ShapeError

from .test_every_answer import BF16, CALLS, CPU, ENDS, F16, F32, GPU, ROWS, of

# Where a call of scaled_dot_product_attention goes


@pytest.mark.parametrize(
    ("q", "k", "v", "gqa", "told"),
    [
        ((3, 1), (4, 1), (4, 512), False, None),
        ((3, 512), (4, 512), (4, 1), False, None),
        ((3, 0), (4, 0), (4, 8), False, "head dim 0 is outside 1 to 512"),
        ((3, 513), (4, 513), (4, 8), False, "head dim 513 is outside 1 to 512"),
        ((3, 8), (4, 8), (4, 0), False, "head dim 0 is outside 1 to 512"),
        ((3, 8), (4, 8), (4, 513), False, "head dim 513 is outside 1 to 512"),
        *(((8,) if one == 0 else (3, 8), (8,) if one == 1 else (3, 8), (8,) if one == 2 else (3, 8), False,
           "an input has fewer than two dimensions") for one in range(3)),
        ((3, 8), (4, 9), (4, 8), False, "the head dim of query and key, or the length of key and value, differs"),
        ((3, 8), (4, 8), (5, 8), False, "the head dim of query and key, or the length of key and value, differs"),
        ((3, 8), (4, 8), (4, 8), True, "enable_gqa needs a head dimension"),
        ((2, 3, 8), (4, 8), (2, 4, 8), True, "enable_gqa needs a head dimension"),
        ((2, 3, 8), (2, 4, 8), (2, 4, 8), True, None),
        ((4, 3, 8), (2, 4, 8), (2, 4, 8), True, None),
        ((4, 3, 8), (2, 4, 8), (2, 4, 8), False, "batch shapes (4,), (2,) and (2,) do not broadcast"),
        ((4, 3, 8), (1, 4, 8), (4, 4, 8), False, None),
        ((4, 3, 8), (2, 4, 8), (1, 4, 8), True, "query heads 4, key heads 2 and value heads 1 are not divisible into groups"),
        ((4, 3, 8), (3, 4, 8), (3, 4, 8), True, "query heads 4, key heads 3 and value heads 3 are not divisible into groups"),
        ((4, 3, 8), (0, 4, 8), (0, 4, 8), True, "query heads 4, key heads 0 and value heads 0 are not divisible into groups"),
        ((2, 4, 3, 8), (3, 2, 4, 8), (3, 2, 4, 8), True, "batch shapes (2,), (3,) and (3,) do not broadcast"),
        ((2, 4, 3, 8), (1, 2, 4, 8), (2, 2, 4, 8), True, None),
    ],
)  # fmt: skip
def test_which_shapes_stay(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], gqa: bool, told: str | None
) -> None:
    assert sdpa_dispatch._unsupported_shape(of(*q), of(*k), of(*v), None, 0.0, False, None, gqa) == told


@pytest.mark.parametrize("wide_is_q", [True, False])
@pytest.mark.parametrize(
    ("size", "place", "capability", "dropout", "grads", "told"),
    [
        (256, GPU, (7, 5), 0.5, "qkvm", None), (512, CPU, (7, 5), 0.5, "qkvm", None),
        (257, GPU, (7, 5), 0.0, "", "head dim 257 needs compute capability 8.0; this GPU is older"),
        (257, GPU, (8, 0), 0.0, "", None), (257, torch.device("meta"), (7, 5), 0.0, "", None),
        (257, GPU, (9, 0), 0.1, "q", "dropout supports head dims up to 256 on a GPU, not 257"),
        *((257, GPU, (9, 0), 0.0, one, "gradients support head dims up to 256 on a GPU, not 257") for one in "qkvm"),
    ],
)  # fmt: skip
def test_wide_heads_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    wide_is_q: bool,
    size: int,
    place: torch.device,
    capability: tuple[int, int],
    dropout: float,
    grads: str,
    told: str | None,
) -> None:
    monkeypatch.setattr(sdpa_dispatch, "_capability", lambda _: capability)
    monkeypatch.setattr(sdpa_dispatch, "Tensor", SimpleNamespace)
    sizes = (size, size, 64) if wide_is_q else (64, 64, size)
    q, k, v = (of(3, one, device=place, grad=name in grads) for one, name in zip(sizes, "qkv", strict=True))
    mask = of(3, 3, grad="m" in grads) if "m" in grads else None
    assert sdpa_dispatch._unsupported_wide(q, k, v, mask, dropout) == told
    with torch.no_grad():
        gone = told is not None and told.startswith("gradients")
        assert sdpa_dispatch._unsupported_wide(q, k, v, mask, dropout) == (None if gone else told)


@pytest.mark.parametrize(
    ("dtypes", "place", "told"),
    [
        ((F32, F32, F32), CPU, None), ((F16, F16, F16), GPU, None), ((BF16, BF16, BF16), GPU, None),
        ((F32, F32, F32), GPU, "there is no kernel for torch.float32 on cuda"),
        ((F32, F16, F32), CPU, "the inputs have different dtypes (torch.float32, torch.float16, torch.float32)"),
        ((F32, F32, F16), CPU, "the inputs have different dtypes (torch.float32, torch.float32, torch.float16)"),
        ((torch.float64,) * 3, CPU, "there is no kernel for torch.float64 on cpu"),
    ],
)  # fmt: skip
def test_which_dtypes_stay(
    monkeypatch: pytest.MonkeyPatch, dtypes: tuple[torch.dtype, ...], place: torch.device, told: str | None
) -> None:
    monkeypatch.setattr(sdpa_dispatch, "_capability", lambda _: (8, 0))
    tensors = [of(3, 8, device=place, dtype=dtype) for dtype in dtypes]
    assert sdpa_dispatch._unsupported_dtype(*tensors) == told


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        ((CPU, CPU, CPU), None), ((GPU, GPU, GPU), None), ((torch.device("meta"),) * 3, None),
        ((CPU, GPU, CPU), "the inputs are on different devices (cpu, cuda:0, cpu)"),
        ((CPU, CPU, GPU), "the inputs are on different devices (cpu, cpu, cuda:0)"),
        ((torch.device("xpu"),) * 3, "there is no kernel for device type xpu"),
    ],
)  # fmt: skip
def test_which_devices_stay(devices: tuple[torch.device, ...], told: str | None) -> None:
    assert sdpa_dispatch._unsupported_device(*[of(3, 8, device=device) for device in devices]) == told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"dropout_p": 0.999}, None), ({"dropout_p": 0}, None), ({"dropout_p": 1.0}, sdpa_dispatch.WRONG_DROPOUT),
        ({"dropout_p": -0.1}, sdpa_dispatch.WRONG_DROPOUT), ({"dropout_p": True}, sdpa_dispatch.WRONG_DROPOUT),
        ({"dropout_p": None}, sdpa_dispatch.WRONG_DROPOUT), ({"dropout_p": False}, None),
        ({"is_causal": 1}, "is_causal is a int, not a bool"), ({"enable_gqa": None}, "enable_gqa is a NoneType, not a bool"),
        ({"scale": MAX_SCALE}, None), ({"scale": -MAX_SCALE}, None), ({"scale": 1.5 * MAX_SCALE}, "scale is not a finite number"),
        ({"scale": float("nan")}, "scale is not a finite number"), ({"scale": "1"}, "scale is not a finite number"),
        ({"query": 3}, "an input is a int, not a tensor"), ({"value": None}, "an input is a NoneType, not a tensor"),
        ({"key": ROWS.to_sparse()}, sdpa_dispatch.NESTED),
        ({"attn_mask": torch.zeros(4, 4), "is_causal": True}, "attn_mask and is_causal are both given, which torch rejects"),
        ({"attn_mask": 1.0}, "attn_mask is not a dense tensor"), ({"attn_mask": torch.zeros(4, 4).to_sparse()}, "attn_mask is not a dense tensor"),
        ({"attn_mask": torch.zeros(4, 4, dtype=F16)},
         "attn_mask is torch.float16 on cpu; flashmoe supports bool or query's dtype, on query's device"),
        ({"attn_mask": torch.zeros(4, 4, device="meta")},
         "attn_mask is torch.float32 on meta; flashmoe supports bool or query's dtype, on query's device"),
        ({"attn_mask": torch.zeros(4, 5)}, "attn_mask does not broadcast to the scores"),
        ({"attn_mask": torch.zeros(1, 2, 3, 4, 4)}, "attn_mask does not broadcast to the scores"),
        *(({"attn_mask": torch.zeros(shape)}, None) for shape in ((), (4,), (1, 1), (3, 4, 1), (2, 3, 4, 4), (2, 1, 1, 4))),
    ],
    ids=str,
)  # fmt: skip
def test_why_a_call_goes_to_torch(given: dict[str, Any], told: str | None) -> None:
    call = {**dict.fromkeys(("query", "key", "value"), ROWS), "attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    call |= {"scale": None, "enable_gqa": False, **given}
    assert sdpa_dispatch.find_unsupported(*call.values()) == told
    if told is None:
        route = sdpa_dispatch.explain(**call)
        assert (str(route.path), route.reason) == ("flashmoe", "all arguments are supported")


def test_lengths_that_would_be_read_past() -> None:
    with pytest.raises(ShapeError, match="key and value must have one length; found 4 and 5; slice or pad one of them"):
        sdpa_dispatch.check_equal_lengths(ROWS, torch.zeros(2, 3, 5, 8))
    for other in (ROWS[..., :1], None, torch.zeros(5), torch.zeros(2, 3, 5, 8).to_sparse()):
        sdpa_dispatch.check_equal_lengths(ROWS, other)
        sdpa_dispatch.check_equal_lengths(other, ROWS)
    none = torch.zeros(2, 0, 4, 8)
    assert sdpa_dispatch.has_no_heads(ROWS, ROWS, none)
    for tensors in (
        (ROWS, ROWS, ROWS),
        (ROWS, ROWS, torch.zeros(0, 8)),
        (none, ROWS, None),
        (none, ROWS.to_sparse(), ROWS),
    ):
        assert not sdpa_dispatch.has_no_heads(*tensors)


# Which operator


CACHES = {
    "q": torch.zeros(2, 2, 1, 8, dtype=BF16),
    "cache_seqlens": ENDS[1:] - 2,
    "k_cache": torch.zeros(2, 2, 3, 8).to(torch.float8_e4m3fn),
}
SHORT: dict[str, tuple[Any, Callable[..., Any], dict[str, Any]]] = {
    "dense": (api, flashmoe.attention, CALLS["dense"][1]),
    "ragged": (varlen, flashmoe.attention_varlen, CALLS["ragged"][1]),
    "codes": (e4m3, flashmoe.attention_with_kvcache, {**CACHES, "v_cache": CACHES["k_cache"]}),
}


@pytest.mark.filterwarnings("ignore")  # warnings of torch's tracer
@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("how", ["plain", "lse", "no_grad", "q", "k", "v", "mode", "traced", "mapped", "level"])
def test_where_the_operator_without_a_log_sum_exp_serves(monkeypatch: pytest.MonkeyPatch, kind: str, how: str) -> None:
    """Only if nothing needs more: a gradient, a transform, a mode or a tracer needs the other operator."""
    place, function, call = SHORT[kind]
    used: list[str] = []
    short = place._inference_operator
    monkeypatch.setattr(place, "_inference_operator", lambda *given: used.append("") or short(*given))
    names = [name for name in ("q", "k", "v") if name in call]
    if how in names:
        call = {**call, how: call[how].clone().requires_grad_()}
    elif how == "no_grad":
        call = {**call, "q": call["q"].clone().requires_grad_()}
    elif how in ("k", "v"):
        return  # codes have no gradient
    rest = {name: value for name, value in call.items() if name != "q"}
    if how == "mode":
        with FlopCounterMode(display=False):
            function(**call)
    elif how == "traced":
        torch.jit.trace(lambda q: function(q, **rest), call["q"], check_trace=False)
    elif how == "mapped":
        if kind == "codes":
            return
        torch.func.vmap(lambda q: function(q, **rest))(call["q"][None])
    elif how == "level":
        with forward_ad.dual_level():
            function(**call)
    elif kind == "codes" and how == "q":
        return  # rejected
    else:
        with torch.set_grad_enabled(how != "no_grad"):
            function(**call, return_lse=how == "lse")
    serves = (
        how in ("plain", "no_grad")
        or (how == "level" and kind != "dense")
        or (kind == "codes" and how in ("mode", "traced"))
    )
    assert bool(used) is serves


TRAINED: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "dense": ("EagerForward", flashmoe.attention, dict.fromkeys("qkv", ROWS)),
    "ragged": ("eager_varlen", flashmoe.attention, {**dict.fromkeys("qkv", ROWS), "sinks": torch.zeros(3), "attn_mask": torch.zeros(4, 4)}),
    "dropped": ("eager_dropout", flashmoe.attention, {**dict.fromkeys("qkv", ROWS), "sinks": torch.zeros(3), "attn_mask": torch.zeros(4, 4), "dropout_p": 0.5}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # warnings of torch's tracer
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("how", ["plain", "mode", "traced", "autocast", "q", "k", "v"])
def test_where_a_gradient_has_a_function_of_its_own(monkeypatch: pytest.MonkeyPatch, kind: str, how: str) -> None:
    """Whichever tensor requires a gradient; a mode, a tracer, autocast and tensor subclasses need the dispatcher."""
    name, function, call = TRAINED[kind]
    used: list[str] = []
    own = getattr(autograd, name)

    def spy(*given: Any) -> Any:
        used.append(name)
        return (own.apply if kind == "dense" else own)(*given)

    monkeypatch.setattr(autograd, name, SimpleNamespace(apply=spy) if kind == "dense" else spy)
    for asks in [one for one, value in call.items() if isinstance(value, Tensor)]:
        used.clear()
        given = {**call, asks: call[asks].clone().requires_grad_()}
        if how in "qkv":
            given[how] = torch.nn.Parameter(given[how])
        if how == "traced":
            rest = {other: value for other, value in given.items() if other != asks}
            torch.jit.trace(
                lambda x, asks=asks, rest=rest: function(**rest, **{asks: x}), given[asks], check_trace=False
            )
        else:
            modes = {"mode": FlopCounterMode(display=False), "autocast": torch.autocast("cpu", torch.bfloat16)}
            with modes.get(how, nullcontext()):
                function(**given)
        serves = how == "plain" or (kind == "dense" and how not in ("mode", "traced"))
        assert bool(used) is serves, asks


FAILING: dict[str, tuple[Any, str, Callable[..., Any], dict[str, Any]]] = {
    "dense": (api, "_inference_operator", flashmoe.attention, CALLS["dense"][1]),
    "dense with a log-sum-exp": (api.autograd, "dense_forward", flashmoe.attention, {**CALLS["dense"][1], "return_lse": True}),
    "ragged": (varlen, "_call", flashmoe.attention_varlen, CALLS["ragged"][1]),
    "codes": (e4m3, "_inference_operator", flashmoe.attention_with_kvcache, {**CACHES, "v_cache": CACHES["k_cache"]}),
    "dropped": (dropout, "_operator", flashmoe.attention, {**CALLS["dense"][1], "dropout_p": 0.5}),
    "into": (out_variant, "_operator", flashmoe.attention_varlen, {**CALLS["ragged"][1], "out": torch.zeros(5, 2, 8)}),
    "products of codes": (fp8, "_operator", flashmoe.attention, dict.fromkeys("qkv", torch.empty(1, 1, 2, 16, device="meta").to(torch.float8_e4m3fn))),
    "append": (kvcache, "_append", kvcache.append_checked, {}),
    "append of codes": (e4m3, "_append_operator", e4m3.append, {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAILING)
@pytest.mark.parametrize("is_ours", [True, False])
def test_an_error_that_nothing_explains_is_raised_as_it_is(
    monkeypatch: pytest.MonkeyPatch, kind: str, is_ours: bool
) -> None:
    """If a rule of flashmoe explains the error, that is raised, with the operator's own error as its cause."""
    place, name, function, call = FAILING[kind]
    error = RuntimeError("flashmoe:shape: told by C++" if is_ours else "of somebody else")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(place, name, fail)
    rows, ends = torch.zeros(2, 2, 3, 8), torch.zeros(2, dtype=torch.int32)
    cache = (rows, rows.clone(), rows[:, :, :1].clone(), rows[:, :, 1:2].clone(), ends, None)
    codes = tuple(
        one if one is ends or one is None else one.to(BF16 if at > 1 else torch.float8_e4m3fn)
        for at, one in enumerate(cache)
    )
    given = {"append": cache, "append of codes": (codes, None, None)}.get(kind, ())
    with pytest.raises(RuntimeError if not is_ours else ShapeError) as caught:
        function(*given, **call)
    assert (caught.value is error) is not is_ours
    assert caught.value.__cause__ is (error if is_ours else None)


# What is not copied


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)])
def test_memory_is_laid_out_as_its_tensor_s(order: tuple[int, ...]) -> None:
    shape = (2, 3, 4, 8)
    back = sorted(range(4), key=order.__getitem__)
    tensor = torch.arange(192.0).view([shape[axis] for axis in order]).permute(back)
    assert sdpa._last_contiguous(tensor) is tensor
    assert fake.gradient_like(tensor).stride() == tensor.stride()
    strided = tensor.mT
    assert sdpa._last_contiguous(strided).stride(-1) == 1
    assert sdpa._last_contiguous(strided).equal(strided)
    ragged = torch.zeros(4, 3, 8).transpose(0, 1)
    assert fake.gradient_like(ragged).is_contiguous()
    assert (fake.gradient_like(ragged).shape, fake.unneeded(ragged).shape) == (ragged.shape, (0,))
    assert fake.gradient_like(tensor[:, :1].expand(shape)).is_contiguous()
    for needed in ((True, False, True), (False, True, False), (False,) * 3):
        assert fake.bits(needed) == sum(2**index for index, need in enumerate(needed) if need)
    for needs, found in ((7, (0, 1, 2)), (5, (0, 2)), (2, (1,))):
        rows = (tensor, tensor.clone(), tensor.clone())
        gradients = fake.backward(None, None, *rows, tensor, tensor[..., 0], 1.0, False, needs)
        assert tuple(index for index, gradient in enumerate(gradients) if gradient.dim() == 4) == found


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_gradient_of_the_right_dtype_is_passed_on(dtype: torch.dtype) -> None:
    like, gradient = torch.zeros(2, 3, 4, 8, dtype=dtype), torch.ones(2, 3, 4, 8)
    for function in (backward._as, varlen_backward.in_dtype_of):
        found = function(like, gradient)
        assert (found is gradient) is (dtype is F32)
        assert found.dtype is dtype
        assert found.float().equal(gradient)
        assert function(like, None).shape == (0,)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's warnings about itself
def test_codes_with_a_tangent_are_refused() -> None:
    codes = torch.zeros(2, 3, 2, 8).to(torch.float8_e4m3fn)
    call = {**CALLS["pages"][1], "k": codes, "v": codes, "q": torch.zeros(5, 2, 8, dtype=BF16)}
    with forward_ad.dual_level():
        assert flashmoe.attention_varlen(**call).shape == (5, 2, 8)
        for name, value in (("q", call["q"]), ("sinks", torch.zeros(2))):
            dual = {**call, name: forward_ad.make_dual(value, torch.ones_like(value))}
            with pytest.raises(DifferentiationError, match="has no gradient"):
                flashmoe.attention_varlen(**dual)
