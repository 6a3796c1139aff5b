"""Every argument of every public function with values of other types: accepted, or rejected with a typed error that names the argument."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.autograd import forward_ad

import flashmoe
from flashmoe.errors import DifferentiationError, FlashmoeError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NO_TENSORS = (None, [[1.0]], 3, "x", object())
NO_NUMBERS = (None, "x", [1.0], float("nan"), float("inf"), -1, -1.5, 0, True, 2**70, torch.zeros(2), object())
AS_TORCH = {"scaled_dot_product_attention", "explain"}  # raises like torch; gives a route for anything
ALSO_TOLD = {("fused_moe", "x_scale"): "w13_scale"}  # the argument that is checked first


def _random(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(len(sizes)))


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


E4M3 = torch.float8_e4m3fn
DENSE = {"q": _random(1, 2, 3, 16), "k": _random(1, 2, 5, 16), "v": _random(1, 2, 5, 16)}
RAGGED = {"q": _random(3, 2, 16), "k": _random(5, 2, 16), "v": _random(5, 2, 16)}
LENGTHS = {"cu_seqlens_q": _ints(0, 3), "cu_seqlens_k": _ints(0, 5), "max_seqlen_q": 3, "max_seqlen_k": 5}
DROPOUT = {"dropout_p": 0.5, "rng_state": torch.tensor((1, 2))}
CACHE = {"q": DENSE["q"], "k_cache": DENSE["k"].clone(), "v_cache": DENSE["v"].clone(), "cache_seqlens": _ints(4)}
EXPERTS = {"x": _random(4, 16), "w13": _random(2, 32, 16), "w2": _random(2, 16, 16), "topk_weights": _random(4, 1)}
CODES = torch.zeros(1, 128, 64, dtype=torch.uint8)
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attention", DENSE),
    ("attention", {**DENSE, **DROPOUT}),
    ("attention", {**{name: one.to(E4M3) for name, one in DENSE.items()}, "q_scale": 0.5}),
    ("attention_varlen", {**RAGGED, **LENGTHS}),
    ("attention_varlen", {**{name: one.to(E4M3) for name, one in RAGGED.items()}, **LENGTHS, "q_scale": 0.5}),
    ("attention_varlen", {**RAGGED, **LENGTHS, **DROPOUT}),
    ("attention_with_kvcache", CACHE),
    ("attention_with_kvcache", {**CACHE, "k_new": DENSE["k"][:, :, :1], "v_new": DENSE["v"][:, :, :1]}),
    ("attention_with_kvcache", {**CACHE, "q": DENSE["q"].bfloat16(), "k_cache": DENSE["k"].to(E4M3), "v_cache": DENSE["v"].to(E4M3)}),
    ("dropout_mask", {**DROPOUT, "batch": 1, "heads": 1, "rows": 2, "keys": 3}),
    ("fused_moe", {**EXPERTS, "topk_ids": torch.zeros(4, 1, dtype=torch.int32)}),
    ("grouped_mm", {"a": _random(4, 16), "b": _random(2, 16, 8), "offsets": _ints(2, 4)}),
    ("linear", {"x": _random(4, 16), "w": _random(8, 16)}),
    ("merge_attention", {name: _random(1, 2, 3, *((16,) if "out" in name else ())) for name in ("out_a", "lse_a", "out_b", "lse_b")}),
    ("mla_append", {"latents": _random(1, 2, 576).bfloat16(), "kv_cache": torch.zeros(1, 32, 656).byte(), "cache_seqlens": _ints(3)}),
    ("mla_decode", {"q": _random(1, 1, 2, 576), "kv_cache": _random(1, 32, 576), "cache_seqlens": _ints(3), "scale": 0.1}),
    ("pack_mxfp4", {"codes": CODES, "scales": CODES[..., :4]}),
    ("quantize_weights", {"weights": _random(1, 128, 128).bfloat16()}),
    ("smooth_keys", {"k": DENSE["k"]}),
    ("topk_route", {"logits": _random(4, 8), "k": 2}),
)  # fmt: skip


def _parameters(function: Callable[..., Any]) -> dict[str, str]:
    return {
        name: str(parameter.annotation)
        for name, parameter in inspect.signature(function).parameters.items()
        if "NoReturn" not in str(parameter.annotation)
    }


@pytest.mark.parametrize(("name", "call"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_values_of_another_kind(name: str, call: dict[str, Any]) -> None:
    function, wrong = getattr(flashmoe, name), []
    function(**call)
    for parameter, kind in _parameters(function).items():
        is_tensor, is_optional = "Tensor" in kind, "None" in kind
        for value in NO_TENSORS if is_tensor else NO_NUMBERS:
            must_raise = is_tensor and not (value is None and is_optional) and not (value == 3 and "float" in kind)
            try:
                function(**{**call, parameter: value})
            except FlashmoeError as error:
                if parameter not in str(error) and ALSO_TOLD.get((name, parameter), "-") not in str(error):
                    wrong.append(f"{parameter}={value!r}: {error} does not name it")
            except Exception as error:  # any other kind is what the test looks for
                wrong.append(f"{parameter}={value!r}: {type(error).__name__}: {error}")
            else:
                is_unused = parameter == "rng_state" and "rng_state" not in call
                wrong += [f"{parameter}={value!r} is taken"] if must_raise and not is_unused else []
    assert not wrong, "\n".join(wrong)


def test_every_public_function_is_here() -> None:
    every = {
        name
        for name in flashmoe.__all__
        if inspect.isfunction(getattr(flashmoe, name))
        and any("Tensor" in kind for kind in _parameters(getattr(flashmoe, name)).values())
    }
    assert every - {name for name, _ in CALLS} == AS_TORCH


REFUSE_GRADIENTS = {"attention_with_kvcache", "mla_append", "mla_decode"}
WITHOUT_GRADIENTS = {"quantize_weights"}
MORE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attention", {**DENSE, "attn_mask": _random(3, 5), "sinks": _random(2)}),
    ("attention", {**DENSE, **DROPOUT, "attn_mask": _random(3, 5), "sinks": _random(2)}),
    ("attention_varlen", {**RAGGED, **LENGTHS, "sinks": _random(2)}),
    ("attention_varlen", {**RAGGED, **LENGTHS, **DROPOUT, "sinks": _random(2)}),
    ("attention_with_kvcache", {**CACHE, "sinks": _random(2)}),
    ("mla_decode", {"q": _random(1, 1, 2, 576), "kv_cache": _random(1, 32, 576), "cache_seqlens": _ints(3), "scale": 0.1, "sinks": _random(2)}),
)  # fmt: skip


def _called(name: str, call: dict[str, Any]) -> tuple[Tensor, ...]:
    copies = {one: value.clone() if one in ("k_cache", "v_cache", "kv_cache") else value for one, value in call.items()}
    answer = getattr(flashmoe, name)(**copies)
    return answer if isinstance(answer, tuple) else (answer,)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch, about itself
@pytest.mark.parametrize(("name", "call"), [*CALLS, *MORE], ids=lambda value: value if isinstance(value, str) else "")
def test_derivatives_that_are_asked_for(name: str, call: dict[str, Any]) -> None:
    """For each tensor separately: a gradient is returned, or the call is rejected; without gradients the call is unchanged."""
    expected = _called(name, call)
    for argument, value in call.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        asked = {**call, argument: value.detach().requires_grad_()}
        with torch.no_grad():
            for one, other in zip(_called(name, asked), expected, strict=True):
                assert one is None is other or (torch.equal(one, other) and not one.requires_grad), argument
        if name in REFUSE_GRADIENTS:
            with pytest.raises(DifferentiationError, match="has no gradient"):
                _called(name, asked)
        elif name not in WITHOUT_GRADIENTS:
            assert any(one.requires_grad for one in _called(name, asked)), argument
        with forward_ad.dual_level():
            dual = {**call, argument: forward_ad.make_dual(value, torch.ones_like(value))}
            try:
                answers = _called(name, dual)
            except DifferentiationError:
                continue
            assert name not in REFUSE_GRADIENTS
            assert name in WITHOUT_GRADIENTS or any(
                forward_ad.unpack_dual(one).tangent is not None for one in answers
            ), argument


@pytest.mark.parametrize(("name", "call"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_neither_true_nor_false(name: str, call: dict[str, Any]) -> None:
    """Such a value is rejected as a flag, and True or False as a number."""
    for parameter, kind in _parameters(getattr(flashmoe, name)).items():
        wrong = (
            (0, 1, None, "", torch.tensor(data=True)) if kind == "bool" else (True, False) * (name != "mla_decode")
        )  # accepts either
        for value in wrong if kind.removesuffix(" | None") in ("bool", "float", "int") else ():
            with pytest.raises(FlashmoeError, match=rf"^{parameter} "):
                _called(name, {**call, parameter: value})


@pytest.mark.parametrize(("name", "call"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_tensors_without_dimensions(name: str, call: dict[str, Any]) -> None:
    """Each in turn: rejected with a typed error, except where a single number is valid."""
    for argument, kind in _parameters(getattr(flashmoe, name)).items():
        if "Tensor" in kind:
            dtype = call[argument].dtype if isinstance(call.get(argument), Tensor) else torch.float32
            try:
                _called(name, {**call, argument: torch.zeros((), dtype=dtype)})
            except FlashmoeError:
                continue
            assert re.search("scale|mask|slopes|rng_state", argument), argument


TRACED = {
    "attention": ("q", "k", "v"),
    "attention_varlen": ("q", "cu_seqlens_q"),
    "attention_with_kvcache": ("q", "cache_seqlens"),
    "mla_decode": ("q", "kv_cache", "cache_seqlens"),
    "scaled_dot_product_attention": ("query", "key", "value"),
}
TORCH = {"query": DENSE["q"], "key": DENSE["k"], "value": DENSE["v"]}  # fmt: skip


def _of_one(name: str, call: dict[str, Any], argument: str) -> Callable[[Any], Any]:
    return lambda one: getattr(flashmoe, name)(**call, **{argument: one})


@pytest.mark.parametrize(
    ("name", "call"),
    [(name, call) for name, call in (*CALLS, *MORE, ("scaled_dot_product_attention", TORCH)) if name in TRACED],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_torch_fx_records_one_call(name: str, call: dict[str, Any]) -> None:
    """With each tensor in turn as the traced value."""
    expected = _called(name, call)
    for argument in TRACED[name]:
        copies = {one: value.clone() if "cache" in one else value for one, value in call.items() if one != argument}
        program = fx.symbolic_trace(_of_one(name, copies, argument))
        assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [getattr(flashmoe, name)]
        assert torch.equal(program(call[argument]), expected[0])


@pytest.mark.parametrize(
    ("name", "call"),
    [(name, call) for name, call in (*CALLS, *MORE) if name != "pack_mxfp4"],  # for a checkpoint's tensors
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_call_compiles_whole(name: str, call: dict[str, Any]) -> None:
    torch._dynamo.reset()
    tensors = {one: value for one, value in call.items() if isinstance(value, Tensor)}
    rest = {one: value for one, value in call.items() if one not in tensors}
    function = getattr(flashmoe, name)
    compiled = torch.compile(lambda given: function(**given, **rest), fullgraph=True, backend="eager")
    copies = {one: value.clone() for one, value in tensors.items()}
    expected, found = _called(name, call), compiled(copies)
    for one, other in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
        assert one is None is other or torch.equal(one, other)
