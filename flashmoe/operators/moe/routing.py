"""Choosing experts and sorting by expert: what the operators return where there is no data, and the gradient of the choice.

With l a token's logits, c the chosen experts, g the gradient of their weights times scale, the gradients of l are
    softmax                  p (g' - sum(g p_c)), p = softmax(l), g' = g at c and 0 elsewhere
    softmax, renormalised    q (g - sum(g q)) at c, q = softmax(l_c); topk_softmax the same, renormalised or not
    sigmoid                  g s (1 - s) at c, s = sigmoid(l_c)
    sigmoid, renormalised    the same with (g - sum(g w)) / sum(s) in place of g, w = s / sum(s)
The choice itself has none, nor has a bias that is added for the choice alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.compiler import is_compiling

from flashmoe.operator import Operator
from flashmoe.operators.moe.arguments import validate_route, validate_sort
from flashmoe.transforms import function_under_transforms

NO_FORWARD_MODE = (
    "flashmoe.topk_route has no forward-mode derivative; use reverse mode, or compose it of torch's operators"
)


def route(logits: Tensor, k: int, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(weights float32 [T, k], ids int32 [T, k], counts int32 [E])."""
    validate_route(logits, k, *options)
    tokens, experts = logits.shape
    ids = logits.new_empty((tokens, k), dtype=torch.int32)
    return ids.new_empty(ids.shape, dtype=torch.float32), ids, ids.new_empty((experts,))


def sort(ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, experts: int) -> tuple[Tensor, ...]:
    """(expert_offsets int32 [E + 1], row_slots int32 [slots], slot_rows int32 [slots], row_weights float32 [slots])."""
    validate_sort(ids, topk_weights, expert_map, experts)
    rows = ids.new_empty((ids.numel(),), dtype=torch.int32)
    offsets = rows.new_empty((experts + 1,))
    return offsets, rows, torch.empty_like(rows), rows.new_empty(rows.shape, dtype=torch.float32)


def keep_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, scoring, bias, _, _, renormalize, scale = inputs
    ctx.save_for_backward(logits, bias, output[1])
    ctx.words = scoring, renormalize, scale
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def gradient(ctx: Any, grad_weights: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """Of logits, and of a bias that is part of them (topk_softmax); in torch's operators, so it has derivatives itself."""
    if grad_weights is None:
        return (None,) * 8
    logits, bias, ids = ctx.saved_tensors
    scoring, renormalize, scale = ctx.words
    scores = logits.float()
    if scoring == "topk_softmax" and bias is not None:
        scores = scores + bias
    chosen = ids.long()
    dscores = _gradient_of_scores(grad_weights * scale, scores, chosen, scoring, renormalize)
    dbias = dscores.sum(0) if ctx.needs_input_grad[3] and scoring == "topk_softmax" else None
    return dscores.to(logits.dtype), None, None, dbias, None, None, None, None


def _gradient_of_scores(grad: Tensor, scores: Tensor, ids: Tensor, scoring: str, renormalize: bool) -> Tensor:
    """grad float32 [T, k], scores float32 [T, E], ids int64 [T, k]."""
    chosen = scores.gather(1, ids)
    if scoring == "softmax" and not renormalize:
        p = scores.softmax(1)
        spread = torch.zeros_like(scores).scatter(1, ids, grad)
        return p * (spread - (spread * p).sum(1, keepdim=True))
    if scoring == "sigmoid":
        s = chosen.sigmoid()
        if renormalize:
            total = s.sum(1, keepdim=True)
            grad = (grad - (grad * s).sum(1, keepdim=True) / total) / total
        dchosen = grad * s * (1 - s)
    else:
        q = chosen.softmax(1)
        dchosen = q * (grad - (grad * q).sum(1, keepdim=True))
    return torch.zeros_like(scores).scatter(1, ids, dchosen)


def vmap_route(
    info: Any, in_dims: tuple[int | None, ...], logits: Tensor, k: int, scoring: str, bias: Tensor | None, *options: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The mapped dimension becomes more tokens; the tokens of each part are counted again. A mapped bias: one call for each."""
    size = info.batch_size
    if in_dims[3] is not None and bias is not None:
        parts = [
            call(
                logits if in_dims[0] is None else logits.select(in_dims[0], i),
                k,
                scoring,
                bias.select(in_dims[3], i),
                *options,
            )
            for i in range(size)
        ]
        return tuple(torch.stack(results) for results in zip(*parts, strict=True)), (0, 0, 0)
    front = logits.expand(size, *logits.shape) if in_dims[0] is None else logits.movedim(in_dims[0], 0)
    weights, ids, counts = call(front.flatten(0, 1), k, scoring, bias, *options)
    ids = ids.unflatten(0, (size, -1))
    chosen = ids.flatten(1).long()
    counts = counts.new_zeros((size, counts.shape[0])).scatter_add(
        1, chosen, torch.ones_like(chosen, dtype=counts.dtype)
    )
    return (weights.unflatten(0, (size, -1)), ids, counts), (0, 0, 0)


def call(logits: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``topk_route``, under torch.func's transforms too."""
    if not is_compiling() and transforms_are_active():
        result: tuple[Tensor, Tensor, Tensor] = _under_transforms(logits, *options)
        return result
    result = torch.ops.flashmoe.topk_route.default(logits, *options)
    return result


_under_transforms = function_under_transforms(call, keep_for_gradient, gradient, vmap_route, NO_FORWARD_MODE)


def no_flops(*_: Sequence[int], **__: Any) -> int:
    """No matrix product."""
    return 0


OPERATORS = (
    Operator(
        "topk_route",
        fake=route,
        flops=no_flops,
        gradient=gradient,
        setup_context=keep_for_gradient,
        vmap=vmap_route,
    ),
    Operator("moe_sort", fake=sort, flops=no_flops),
)
