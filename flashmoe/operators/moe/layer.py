"""The operators of the whole layer: what they return where there is no data, their gradient, their cost.

``_fused_moe`` keeps for the backward pass x, the preactivation [slots, 2I] and the sort, nothing else: the activation is
computed again, and what is temporary stands where a result will. ``_fused_moe_inference`` and ``_fused_moe_out`` compute
the same and keep nothing; they have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashmoe.errors import ArgumentError, DifferentiationError
from flashmoe.operator import Operator
from flashmoe.operators.moe.arguments import validate_layer

# The order of the gradients, and the bits of `needs`.
NEED_X, NEED_W13, NEED_W2, NEED_WEIGHTS, NEED_B13, NEED_B2 = (1 << bit for bit in range(6))
Gradients = tuple[Tensor | None, ...]


def forward(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """(out, preactivation, expert_offsets, row_slots, slot_rows, row_weights) as the compiled operator allocates them."""
    *layer, keep = arguments
    out = inference(x, *layer)
    w2, topk_ids, transposed = layer[1], layer[3], layer[-1]
    slots, both = (topk_ids.numel(), 2 * w2.shape[1 if transposed else 2]) if keep else (0, None)
    ints = x.new_empty((slots,), dtype=torch.int32)
    offsets = x.new_empty((w2.shape[0] + 1 if keep else 0,), dtype=torch.int32)
    weights = x.new_empty((slots,), dtype=torch.float32)
    preactivation = x.new_empty((0,) if both is None else (slots, both))
    return out, preactivation, offsets, ints, torch.empty_like(ints), weights


def inference(x: Tensor, *arguments: Any) -> Tensor:
    """[T, H], contiguous; raises the same typed errors that eager mode raises."""
    validate_layer(x, *arguments)
    return x.new_empty(x.shape)


def into(out: Tensor, *arguments: Any) -> None:
    validate_layer(*arguments)


def backward(
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
    """The gradients that ``needs`` asks for, contiguous; None for the others."""
    tokens, hidden = x.shape
    experts, both = w2.shape[0], preactivation.shape[1]
    top_k = row_slots.shape[0] // tokens if tokens > 0 else 1
    shapes = (x.shape, w13.shape, w2.shape, (tokens, top_k), (experts, both), (experts, hidden))
    dtypes = (x.dtype, x.dtype, x.dtype, torch.float32, x.dtype, x.dtype)
    return tuple(
        x.new_empty(shape, dtype=dtype) if needs >> bit & 1 else None
        for bit, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    )


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w13, w2, topk_weights, _, b13, b2, _, _, activation, layout, transposed, keep = inputs
    ctx.save_for_backward(x, w13, w2, b13, b2, *output[1:])
    ctx.words = activation, layout, transposed
    ctx.is_kept, ctx.weights_dtype, ctx.top_k = keep, topk_weights.dtype, topk_weights.shape[1]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def gradient(ctx: Any, grad_out: Tensor | None, *_: Any) -> Gradients:
    """For the arguments of ``_fused_moe``, None where none is needed."""
    return gradient_by(_backward, ctx, grad_out)


# Whether the graph that autograd runs is kept for another pass; True outside a pass.
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
# Whether several gradients are asked for at once, by torch.autograd.grad(is_grads_batched=True).
_is_batched: Callable[[Tensor], bool] = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda _: False)


def _backward(grad_out: Tensor, *arguments: Any) -> Gradients:
    """In the graph's last pass the gradient of the preactivation takes its place: [slots, 2I] less memory on a GPU."""
    operators = torch.ops.flashmoe
    is_eager = type(grad_out) is Tensor  # a compiler's tensors have other types
    if is_eager and _is_batched(grad_out):  # for which torch finds no rule of ours
        msg = (
            "flashmoe.fused_moe takes no is_grads_batched=True; ask for one gradient at a time, or use torch.vmap over the function "
            "of torch.func.vjp"
        )
        raise DifferentiationError(msg)
    consumes = is_eager and not _keeps_graph()
    call = operators._fused_moe_backward_consuming if consumes else operators._fused_moe_backward
    found: Gradients = call.default(grad_out, *arguments)
    return found


def gradient_by(call: Callable[..., Gradients], ctx: Any, grad_out: Tensor | None) -> Gradients:
    """By ``_fused_moe_backward``, or what stands for it under torch.func."""
    nothing: Gradients = (None,) * 13
    wants = dict(zip((0, 1, 2, 3, 5, 6), (1 << bit for bit in range(6)), strict=True))
    needs = sum(bit for index, bit in wants.items() if ctx.needs_input_grad[index])
    if grad_out is None:
        return nothing
    found: Gradients = (None,) * 6
    if needs:
        if not ctx.is_kept:
            msg = (
                "_fused_moe was called with keep=False, so nothing is there for a backward pass; call it with keep=True"
            )
            raise ArgumentError(msg)
        x, w13, w2, b13, b2, *kept = ctx.saved_tensors
        found = call(grad_out, x, w13, w2, b13, b2, *kept, *ctx.words, needs)
    dx, dw13, dw2, dweights, db13, db2 = found
    if dweights is not None:
        dweights = dweights.to(ctx.weights_dtype).reshape(grad_out.shape[0], ctx.top_k)  # without tokens k is not known
    dshared = grad_out if ctx.needs_input_grad[8] else None
    return dx, dw13, dw2, dweights, None, db13, db2, None, dshared, None, None, None, None


def refuse_double_backward(ctx: Any, *_: Any) -> NoReturn:
    msg = (
        "flashmoe.fused_moe can be differentiated once; this asked for a second derivative. Compose the layer of torch's "
        "operators for it"
    )
    raise DifferentiationError(msg)


def vmap_inference(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *arguments: Any) -> tuple[Tensor, int]:
    """The mapped dimension becomes more tokens where the weights are shared; else one call for each."""
    w13, w2, topk_weights, topk_ids, b13, b2, expert_map, shared, *words = arguments
    dims = in_dims[1:9]
    call = torch.ops.flashmoe._fused_moe_inference.default
    if any(dims[index] is not None for index in (0, 1, 4, 5, 6)):
        tensors = tuple(zip((x, *arguments[:8]), in_dims, strict=False))
        parts = [[t if dim is None else t.select(dim, index) for t, dim in tensors] for index in range(info.batch_size)]
        return torch.stack([call(*part, *words) for part in parts]), 0
    merged = [
        None if t is None else _merge(t, dim, info.batch_size)
        for t, dim in ((x, in_dims[0]), (topk_weights, dims[2]), (topk_ids, dims[3]), (shared, dims[7]))
    ]
    out = call(merged[0], w13, w2, merged[1], merged[2], b13, b2, expert_map, merged[3], *words)
    return out.unflatten(0, (info.batch_size, -1)), 0


def _merge(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """[..., size, ...], or the same for all, to [size * T, ...]."""
    front = tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return front.flatten(0, 1)


def _product(slots: int, w2: Sequence[int]) -> int:
    """One product of all rows with [H, I] matrices."""
    return 2 * slots * w2[1] * w2[2]


def forward_flops(
    x: Any, w13: Any, w2: Sequence[int], topk_weights: Any, topk_ids: Sequence[int], *_: Any, **__: Any
) -> int:
    """Of shapes: gate, up and down for every slot, two operations for a multiply-add."""
    return 3 * _product(topk_ids[0] * topk_ids[1], w2)


def into_flops(out: Any, *arguments: Any, **__: Any) -> int:
    return forward_flops(*arguments)


def backward_flops(grad_out: Any, x: Any, w13: Any, w2: Sequence[int], *arguments: Any, **__: Any) -> int:
    """dz takes one product, dx and dw13 two each, dw2 one."""
    row_slots, needs = arguments[4], arguments[10]
    products = sum(count for bit, count in ((NEED_X, 2), (NEED_W13, 2), (NEED_W2, 1)) if needs & bit)
    needs_dz = needs & (NEED_X | NEED_W13 | NEED_W2 | NEED_WEIGHTS | NEED_B13)
    return (products + (1 if needs_dz else 0)) * _product(row_slots[0], w2)


# x, w13, w2, b13, b2 and shared: one dtype. topk_weights may stay float32.
CAST = (0, 1, 2, 5, 6, 8)

OPERATORS = (
    Operator(
        "_fused_moe",
        fake=forward,
        flops=forward_flops,
        autocast=CAST,
        gradient=gradient,
        setup_context=keep_for_backward,
    ),
    Operator("_fused_moe_inference", fake=inference, flops=forward_flops, autocast=CAST, vmap=vmap_inference),
    Operator("_fused_moe_out", fake=into, flops=into_flops),
    Operator("_fused_moe_backward", fake=backward, flops=backward_flops, gradient=refuse_double_backward),
    Operator("_fused_moe_backward_consuming", fake=backward, flops=backward_flops),
)
