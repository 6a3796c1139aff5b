"""Results without data: the shapes, dtypes and strides that the compiled operators allocate; and their flop counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmoe.moe.options import Layer, Mxfp4Layer, Routing, ScaledLayer
from flashmoe.moe.packed import SIDE
from flashmoe.rules import check

# The order of the gradients of a layer, and of the bits of `needs`.
GRADIENTS = ("x", "w13", "w2", "topk_weights", "b13", "b2")
Gradients = tuple[Tensor | None, ...]
Shape = Sequence[int]


def layer(*arguments: Any) -> Tensor:
    """[T, H], contiguous."""
    check("_fused_moe_inference", arguments)
    x: Tensor = arguments[0]
    return x.new_empty(x.shape)


def layer_kept(*arguments: Any) -> tuple[Tensor, ...]:
    """(out, preactivation, expert_offsets, row_slots, slot_rows, row_weights); without ``keep`` all except out have size 0."""
    *given, keep = arguments
    call, out = Layer(*given), layer(*given)
    experts, inner = call.w2.shape[0], call.w2.shape[1 if call.transposed else 2]
    slots = call.topk_ids.numel() if keep else 0
    preactivation = out.new_empty((slots, 2 * inner) if keep else (0,))
    offsets = out.new_empty((experts + 1 if keep else 0,), dtype=torch.int32)
    rows = offsets.new_empty((slots,))
    return out, preactivation, offsets, rows, torch.empty_like(rows), out.new_empty((slots,), dtype=torch.float32)


def layer_into(out: Tensor, *arguments: Any) -> None:
    check("_fused_moe_out", (out, *arguments))


def layer_backward(
    grad_out: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    preactivation: Tensor,
    expert_offsets: Tensor,
    row_slots: Tensor,
    slot_rows: Tensor,
    row_weights: Tensor,
    activation: str,
    layout: str,
    transposed: bool,
    needs: int,
) -> Gradients:
    """The gradients whose bits are set in ``needs``, contiguous; None for the others."""
    tokens, hidden = x.shape
    experts, both = w2.shape[0], preactivation.shape[1]
    top_k = row_slots.shape[0] // tokens if tokens > 0 else 1
    shapes = (x.shape, w13.shape, w2.shape, (tokens, top_k), (experts, both), (experts, hidden))
    return tuple(
        x.new_empty(shape, dtype=torch.float32 if name == "topk_weights" else x.dtype) if needs >> bit & 1 else None
        for bit, (name, shape) in enumerate(zip(GRADIENTS, shapes, strict=True))
    )


def output_dtype(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype is torch.float8_e4m3fn else x.dtype


def scaled(*arguments: Any, operator: str = "_fused_moe_scaled") -> Tensor:
    check(operator, arguments)
    x: Tensor = arguments[0]
    return x.new_empty(x.shape, dtype=output_dtype(x))


def scaled_kept(*arguments: Any) -> tuple[Tensor, ...]:
    """(out, preactivation, expert_offsets, row_slots, slot_rows, row_weights)."""
    check("_fused_moe_scaled_kept", arguments)
    call = ScaledLayer(*arguments)
    slots = call.topk_ids.numel()
    rows = call.x.new_empty((slots,), dtype=torch.int32)
    weights = call.x.new_empty((slots,), dtype=torch.float32)
    offsets = rows.new_empty((call.w13.shape[0] + 1,))
    return (
        call.x.new_empty(call.x.shape),
        call.x.new_empty((slots, call.w13.shape[1])),
        offsets,
        rows,
        rows.clone(),
        weights,
    )


def scaled_backward(*arguments: Any) -> Gradients:
    """The gradients whose bits are set in ``needs``, contiguous; None for the others."""
    check("_fused_moe_scaled_backward", arguments)
    _, x, _, w2, _, _, preactivation, _, row_slots, *_, needs = arguments
    (tokens, hidden), (experts, inner, _) = x.shape, w2.shape
    top_k = row_slots.shape[0] // tokens if tokens > 0 else 1
    shapes = (x.shape, (experts, preactivation.shape[1], hidden), (experts, hidden, inner), (tokens, top_k))
    return tuple(
        x.new_empty(shape, dtype=torch.float32 if name == "topk_weights" else x.dtype) if needs >> bit & 1 else None
        for bit, (name, shape) in enumerate(zip(GRADIENTS, shapes, strict=False))
    )


def quantized_weights(weights: Tensor) -> tuple[Tensor, ...]:
    """e4m3 values and float32 scales, of the weights and of their transpose."""
    check("_quantize_weights", (weights,))
    experts, n, k = weights.shape
    values = weights.new_empty((experts, n, k), dtype=torch.float8_e4m3fn)
    scales = weights.new_empty((experts, n // 128, k // 128), dtype=torch.float32)
    return values, scales, values.new_empty((experts, k, n)), scales.new_empty((experts, k // 128, n // 128))


def mxfp4(*arguments: Any) -> Tensor:
    check("_fused_moe_mxfp4", arguments)
    x: Tensor = arguments[0]
    return x.new_empty(x.shape)


def route(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(weights float32 [T, k], ids int32 [T, k], counts int32 [E])."""
    check("topk_route", arguments)
    call = Routing(*arguments)
    tokens, experts = call.logits.shape
    ids = call.logits.new_empty((tokens, call.k), dtype=torch.int32)
    return ids.new_empty(ids.shape, dtype=torch.float32), ids, ids.new_empty((experts,))


def sort(ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, experts: int) -> tuple[Tensor, ...]:
    """(expert_offsets int32 [E + 1], row_slots int32 [slots], slot_rows int32 [slots], row_weights float32 [slots])."""
    check("moe_sort", (ids, topk_weights, expert_map, experts))
    rows = ids.new_empty((ids.numel(),), dtype=torch.int32)
    return rows.new_empty((experts + 1,)), rows, torch.empty_like(rows), rows.new_empty(rows.shape, dtype=torch.float32)


def grouped(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    check("grouped_mm", (a, b, offsets))
    return a.new_empty((a.shape[0], b.shape[2]))


def grouped_2d2d(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    check("_grouped_mm_2d2d", (a, b, offsets))
    return a.new_empty((offsets.shape[0], a.shape[0], b.shape[1]))


# Flop counts, from shapes in place of tensors; a multiply-add counts as two.


def layer_flops(*arguments: Any, **_: Any) -> int:
    """Gate, up and down for every (token, expert) slot."""
    call: Any = Layer(*arguments[: len(Layer._fields)])
    return 3 * _product(call.topk_ids[0] * call.topk_ids[1], call.w2)


def layer_into_flops(out: Any, *arguments: Any, **_: Any) -> int:
    return layer_flops(*arguments)


def layer_backward_flops(grad_out: Any, x: Any, w13: Any, w2: Shape, *arguments: Any, **_: Any) -> int:
    """dz takes one product; dx and dw13 take two products' worth each, dw2 one."""
    row_slots, needs = arguments[4], arguments[10]
    needed = {name for bit, name in enumerate(GRADIENTS) if needs >> bit & 1}
    products = 2 * len(needed & {"x", "w13"}) + len(needed & {"w2"})
    return (products + bool(needed - {"b2"})) * _product(row_slots[0], w2)


def _product(slots: int, w2: Shape) -> int:
    """The flops of multiplying all rows by [H, I] matrices once."""
    return 2 * slots * w2[1] * w2[2]


def scaled_flops(*arguments: Any, **_: Any) -> int:
    call: Any = ScaledLayer(*arguments)
    return 3 * _product(call.topk_ids[0] * call.topk_ids[1], call.w2)


def scaled_backward_flops(grad_out: Any, x: Any, w13: Any, w2: Shape, *arguments: Any, **_: Any) -> int:
    """s takes one product; dx and dw13 take two products' worth each, dw2 one."""
    row_slots, needs = arguments[4], int(arguments[8])
    return (1 + 2 * (needs & 1) + (needs & 2) + (needs >> 2 & 1)) * _product(row_slots[0], w2)


def mxfp4_flops(*arguments: Any, **_: Any) -> int:
    call: Any = Mxfp4Layer(*arguments)
    if call.w13_scale is None:  # packed blocks of 64 by 64
        experts, rows, columns, _ = call.w2
        return 3 * _product(call.topk_ids[0] * call.topk_ids[1], (experts, SIDE * rows, SIDE * columns))
    return 6 * _product(call.topk_ids[0] * call.topk_ids[1], call.w2)  # two codes per byte


def grouped_flops(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[-1]


def no_flops(*_: Any, **__: Any) -> int:
    """For operators without matrix products."""
    return 0
