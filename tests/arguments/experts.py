"""Valid calls of the operators of a mixture-of-experts layer, and the rules that each follows."""

import math
from collections.abc import Callable
from typing import Any

from .described import Call, ints, t
from .experts_rules import (
    E4M3,
    WORDS,
    blocks,
    grouped,
    grouped_gradient,
    layer,
    layer_backward,
    mxfp4,
    quantize_weights,
    route,
    scaled,
    scaled_backward,
    scaled_kept,
    sort,
    whole_blocks,
)


def _layer(
    tokens: int = 5, hidden: int = 16, inner: int = 24, experts: int = 4, top_k: int = 2, transposed: bool = False
) -> Call:
    w13, w2 = (experts, 2 * inner, hidden), (experts, hidden, inner)
    if transposed:
        w13, w2 = (experts, hidden, 2 * inner), (experts, inner, hidden)
    tensors = {"x": t("bfloat16", tokens, hidden), "w13": t("bfloat16", *w13), "w2": t("bfloat16", *w2)}
    routed = {
        "topk_weights": t("float32", tokens, top_k),
        "topk_ids": t("int32", tokens, top_k, values=(0, 3, 2, 1, 3)),
    }
    biased = {"b13": t("bfloat16", experts, 2 * inner), "b2": t("bfloat16", experts, hidden)}
    others = {"expert_map": None, "shared": t("bfloat16", tokens, hidden), "activation": "swiglu", "layout": "concat"}
    return {**tensors, **routed, **biased, **others, "transposed": transposed}


def _mapped(tokens: int = 5, hidden: int = 16, inner: int = 24, experts: int = 4, top_k: int = 2) -> Call:
    call = _layer(tokens, hidden, inner, experts, top_k, transposed=True)
    return {**call, "expert_map": ints(2, -1, 0, 3, 1, 1), "layout": "interleaved"}


def _keeping(tokens: int = 5, hidden: int = 16, inner: int = 24, experts: int = 4, top_k: int = 2) -> Call:
    return {**_layer(tokens, hidden, inner, experts, top_k), "keep": True}


def _into(make: Callable[..., Call]) -> Callable[..., Call]:
    def made() -> Call:
        call = make()
        return {"out": t("bfloat16", *call["x"].sizes), **call}

    return made


def _saved(tokens: int, experts: int, top_k: int = 2) -> Call:
    slots = top_k * tokens
    swapped = t("int32", slots, values=tuple(slot ^ (top_k > 1) for slot in range(64)))
    rows = {"row_slots": swapped, "slot_rows": swapped}
    ends = [min(end, slots) for end in (0, 2, 3, 7)][: max(experts, 1)]
    ends += [slots] * (experts + 1 - len(ends))
    return {"expert_offsets": t("int32", experts + 1, values=tuple(ends)), **rows, "row_weights": t("float32", slots)}


def _backward(tokens: int = 5, hidden: int = 16, inner: int = 24, experts: int = 4) -> Call:
    c = _layer(tokens, hidden, inner, experts)
    given = {"grad_out": t("bfloat16", tokens, hidden), **{name: c[name] for name in ("x", "w13", "w2", "b13", "b2")}}
    saved = {"preactivation": t("bfloat16", 2 * tokens, 2 * inner), **_saved(tokens, experts)}
    return {**given, **saved, "activation": "swiglu", "layout": "concat", "transposed": False, "needs": 63}


def _scaled(tokens: int = 5, hidden: int = 256, inner: int = 128, experts: int = 4, top_k: int = 2) -> Call:
    c = _layer(tokens, hidden, inner, experts, top_k)
    codes = {name: t(E4M3, *c[name].sizes) for name in ("w13", "w2")}
    w13_scale = t("float32", experts, blocks(2 * inner), blocks(hidden))
    scales = {"w13_scale": w13_scale, "w2_scale": t("float32", experts, blocks(hidden), blocks(inner))}
    routed = {name: c[name] for name in ("topk_weights", "topk_ids")}
    return {
        "x": c["x"],
        **codes,
        **scales,
        **routed,
        "x_scale": None,
        "expert_map": None,
        "shared": c["shared"],
        "activation": "swiglu",
    }


def _scaled_x(tokens: int = 5, hidden: int = 256, inner: int = 128, experts: int = 4, top_k: int = 2) -> Call:
    call = {**_scaled(tokens, hidden, inner, experts, top_k), "x": t(E4M3, tokens, hidden)}
    return {**call, "x_scale": t("float32", tokens, blocks(hidden))}


def _scaled_backward(tokens: int = 5, hidden: int = 256, inner: int = 128, experts: int = 4) -> Call:
    return _scaled_saved(tokens, hidden, inner, experts, top_k=2)


def _scaled_saved(tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> Call:
    given = {"grad_out": t("bfloat16", tokens, hidden), "x": t("bfloat16", tokens, hidden)}
    codes = {"w13": t(E4M3, experts, hidden, 2 * inner), "w2": t(E4M3, experts, inner, hidden)}
    w13_scale = t("float32", experts, hidden // 128, inner // 64)
    scales = {"w13_scale": w13_scale, "w2_scale": t("float32", experts, inner // 128, hidden // 128)}
    saved = {"preactivation": t("bfloat16", top_k * tokens, 2 * inner), **_saved(tokens, experts, top_k)}
    return {**given, **codes, **scales, **saved, "activation": "swiglu", "needs": 15}


def _mxfp4(tokens: int = 5, hidden: int = 64, inner: int = 32, experts: int = 4, top_k: int = 2) -> Call:
    c = _layer(tokens, hidden, inner, experts, top_k)
    codes = {
        "w13": t("uint8", experts, 2 * inner, hidden // 2, values=(18, 52)),
        "w2": t("uint8", experts, hidden, inner // 2, values=(33,)),
    }
    w13_scale = t("uint8", experts, 2 * inner, hidden // 32, values=(126, 127))
    scales = {"w13_scale": w13_scale, "w2_scale": t("uint8", experts, hidden, inner // 32, values=(127, 125))}
    rest = ("topk_weights", "topk_ids", "b13", "b2", "expert_map", "shared", "activation", "layout")
    return {"x": c["x"], **codes, **scales, **{name: c[name] for name in rest}}


def _packed(tokens: int = 5, hidden: int = 128, inner: int = 64, experts: int = 4, top_k: int = 2) -> Call:
    call = {**_mxfp4(tokens, hidden, inner, experts, top_k), "w13_scale": None, "w2_scale": None}
    w13 = t("uint8", experts, inner // 32, hidden // 64, 2176)
    return {**call, "w13": w13, "w2": t("uint8", experts, hidden // 64, inner // 64, 2176)}


def _sort(tokens: int = 5, top_k: int = 2, experts: int = 4) -> Call:
    ids = t("int64", tokens, top_k, values=(0, 3, 2, 1, 3))
    return {
        "ids": ids,
        "topk_weights": t("float16", tokens, top_k),
        "expert_map": ints(2, -1, 0, 3),
        "experts": experts,
    }


def _route(tokens: int = 5, experts: int = 12) -> Call:
    numbers = {"groups": 3, "topk_groups": 2, "renormalize": True, "scale": 1.5}
    return {
        "logits": t("float32", tokens, experts),
        "k": 4,
        "scoring": "sigmoid",
        "bias": t("float32", experts),
        **numbers,
    }


def _grouped(rows: int = 11, k: int = 16, n: int = 24, experts: int = 3) -> Call:
    offsets = t("int32", experts, values=(4, 4, 11))
    return {"a": t("float32", rows, k), "b": t("float32", experts, k, n), "offsets": offsets}


def _grouped_gradient(rows: int = 11, k: int = 16, n: int = 24, experts: int = 3) -> Call:
    offsets = t("int32", experts, values=(4, 4, 11))
    return {"a": t("float32", n, rows), "b": t("float32", rows, k), "offsets": offsets}


SIZES = {
    "experts": (1024, 1025),
    "top_k": (32, 33),
    "tokens": (2**30, 2**31 - 1),
    "hidden": (12, 2**30, 2**31 - 1),
    "inner": (12, 2**30 - 1, 2**30),
    "k": (12, 2**31 - 1),
    "n": (12, 2**31 - 1),
}
NUMBERS: dict[str, tuple[Any, ...]] = {
    **{name: (*words, "none of them") for name, words in WORDS.items()},
    "transposed": (True, False),
    "keep": (False,),
    "needs": (0, 1, 2, 4, 8, 16, 32),
    "experts": (0, 1, 1024, 1025, -1),
    "groups": (0, 1, 2, 5, 12, 32, 33),
    "topk_groups": (0, 1, 3, 4),
    "k": (0, 1, 8, 9, 32, 33),
    "renormalize": (False,),
    "scale": (math.nan, math.inf, -math.inf, 3.4028234663852886e38, 3.5e38, -3.5e38, 0.0),
    "offsets": ((4, 3, 11), (4, 4, 12), (-1, 4, 11), (0, 0, 0), (1, 5, 10)),
}

# (operator, valid call, rules); for scaled operators with "_torch" and "_out" the extension only checks descriptions.
ROWS: tuple[tuple[str, Callable[..., Call], Callable[..., Any]], ...] = (
    *(("_fused_moe_inference", make, layer) for make in (_layer, _mapped)),
    ("_fused_moe", _keeping, layer),
    *(("_fused_moe_out", _into(make), layer) for make in (_layer, _mapped)),
    ("_fused_moe_backward", _backward, layer_backward),
    ("_fused_moe_backward_consuming", _backward, layer_backward),
    *(("_fused_moe_scaled", make, whole_blocks) for make in (_scaled, _scaled_x)),
    *(("_fused_moe_scaled_torch", make, scaled) for make in (_scaled, _scaled_x)),
    ("_fused_moe_scaled_out", _into(_scaled_x), scaled),
    ("_fused_moe_scaled_kept", _scaled, scaled_kept),
    ("_fused_moe_scaled_backward", _scaled_backward, scaled_backward),
    ("_fused_moe_scaled_backward", lambda tokens=5: _scaled_saved(tokens, 256, 128, 4, top_k=1), scaled_backward),
    ("_quantize_weights", lambda experts=2, n=128, k=256: {"weights": t("bfloat16", experts, n, k)}, quantize_weights),
    *(("_fused_moe_mxfp4", make, mxfp4) for make in (_mxfp4, _packed)),
    ("_fused_moe_mxfp4_out", _into(_mxfp4), mxfp4),
    ("moe_sort", _sort, sort),
    ("moe_sort", lambda tokens=5: _sort(tokens, 1), sort),
    ("_fused_moe_inference", lambda tokens=5: _layer(tokens, top_k=1), layer),
    ("topk_route", _route, route),
    ("topk_route", lambda tokens=3, experts=66: {**_route(tokens, experts), "groups": 33}, route),
    ("topk_route", lambda tokens=3, experts=64: {**_route(tokens, experts), "groups": 32, "scoring": "softmax"}, route),
    ("grouped_mm", _grouped, grouped),
    ("_grouped_mm_2d2d", _grouped_gradient, grouped_gradient),
)
ELSEWHERE: set[str] = set()
