"""Gradients, vmap and torch.func for the operators of a mixture-of-experts layer.

``_fused_moe`` saves only x, the preactivation [slots, 2I] and the sort for its backward pass: the activation is recomputed.
``_fused_moe_inference`` and ``_fused_moe_out`` compute the same, save nothing and have no gradient.

For routing, with l a token's logits, c the chosen experts, and g the gradient of their weights times scale, the gradients of l are
    softmax                  p (g' - sum(g p_c)), p = softmax(l), g' = g at c and 0 elsewhere
    softmax, renormalised    q (g - sum(g q)) at c, q = softmax(l_c); topk_softmax the same, renormalised or not
    sigmoid                  g s (1 - s) at c, s = sigmoid(l_c)
    sigmoid, renormalised    the same with (g - sum(g w)) / sum(s) in place of g, w = s / sum(s)
The choice itself has no gradient, nor has a bias that is added only for the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flashmoe.errors import ArgumentError, DifferentiationError
from flashmoe.moe.fake import GRADIENTS, Gradients
from flashmoe.moe.options import Layer, Routing
from flashmoe.operator import save_nothing
from flashmoe.transforms import autocasted, function_under_transforms, has_tangent, merge_batches

_NO_FORWARD_MODE = "flashmoe.{} has no forward-mode derivative; use reverse mode, or build it from torch's operators"
_ONCE = "flashmoe.fused_moe can be differentiated once; a second derivative was requested. Build the layer from torch's operators for it"
_NOT_BATCHED = (
    "flashmoe.fused_moe does not support is_grads_batched=True; request one gradient at a time, or use torch.vmap over the function of "
    "torch.func.vjp"
)
# The arguments that autocast casts. topk_weights may stay float32.
CAST = tuple(Layer._fields.index(name) for name in ("x", "w13", "w2", "b13", "b2", "shared"))


def check_no_tangents(function: str, *arguments: Any) -> None:
    """Raise if a forward-mode derivative is being computed through one of the arguments, because it would be lost."""
    if forward_ad._current_level < 0:  # no dual level is open: the usual case, decided first
        return
    if has_tangent(*(argument for argument in arguments if isinstance(argument, Tensor))):
        raise DifferentiationError(_NO_FORWARD_MODE.format(function))


def one_by_one(call: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for vmap: one call per element of the mapped dimension."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        found = [
            call(*(x if dim is None else x.select(dim, i) for x, dim in zip(values, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        return tuple(torch.stack(results) for results in zip(*found, strict=True)), (0,) * len(found[0])

    return rule


# The layer


def save_for_layer(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *given, ctx.is_kept = inputs
    layer = Layer(*given)
    ctx.save_for_backward(layer.x, layer.w13, layer.w2, layer.b13, layer.b2, *output[1:])
    ctx.words = layer.activation, layer.layout, layer.transposed
    ctx.weights_dtype, ctx.top_k = layer.topk_weights.dtype, layer.topk_weights.shape[1]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def layer_gradient(ctx: Any, grad_out: Tensor | None, *_: Any) -> Gradients:
    """The gradients for the arguments of ``_fused_moe``, None where not needed."""
    return _layer_gradient(_layer_backward, ctx, grad_out)


def _layer_gradient(backward: Callable[..., Gradients], ctx: Any, grad_out: Tensor | None) -> Gradients:
    """``backward``: ``_fused_moe_backward``, or its replacement under torch.func."""
    if grad_out is None:
        return (None,) * len(ctx.needs_input_grad)
    needed = Layer(*ctx.needs_input_grad[:-1])
    needs = sum(getattr(needed, name) << bit for bit, name in enumerate(GRADIENTS))
    found: dict[str, Tensor | None] = {}
    if needs:
        if not ctx.is_kept:
            msg = "_fused_moe was called with keep=False, so nothing was saved for the backward pass; call it with keep=True"
            raise ArgumentError(msg)
        found = dict(zip(GRADIENTS, backward(grad_out, *ctx.saved_tensors, *ctx.words, needs), strict=True))
    dweights = found.get("topk_weights")
    if dweights is not None:  # without tokens, the operator cannot know k
        found["topk_weights"] = dweights.to(ctx.weights_dtype).reshape(grad_out.shape[0], ctx.top_k)
    if needed.shared:
        found["shared"] = grad_out
    return (*(found.get(name) for name in Layer._fields), None)


# Whether the graph that autograd runs is kept for another backward pass; True outside a backward pass.
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
# Whether several gradients are requested at once, by torch.autograd.grad(is_grads_batched=True).
_is_batched: Callable[[Tensor], bool] = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda _: False)


def _layer_backward(grad_out: Tensor, *arguments: Any) -> Gradients:
    """In the graph's last backward pass the preactivation's gradient overwrites the preactivation: saves [slots, 2I] of memory on a GPU."""
    operators = torch.ops.flashmoe
    is_eager = type(grad_out) is Tensor  # a compiler's tensors have other types
    if is_eager and _is_batched(grad_out):  # for these torch does not find our vmap rule
        raise DifferentiationError(_NOT_BATCHED)
    consumes = is_eager and not _keeps_graph()
    call = operators._fused_moe_backward_consuming if consumes else operators._fused_moe_backward
    found: Gradients = call.default(grad_out, *arguments)
    return found


def raise_double_backward(ctx: Any, *_: Any) -> NoReturn:
    raise DifferentiationError(_ONCE)


def vmap_layer(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
    """The mapped dimension becomes more tokens if the weights are shared; otherwise one call per element."""
    layer, dims, size = Layer(*arguments), Layer._make(in_dims), info.batch_size
    if any(dim is not None for dim in (dims.w13, dims.w2, dims.b13, dims.b2, dims.expert_map)):
        result: tuple[Tensor, int] = one_by_one(torch.ops.flashmoe._fused_moe_inference.default)(
            info, in_dims, *arguments
        )
        return result
    names = ("x", "topk_weights", "topk_ids", "shared")
    merged = merge_batches([getattr(layer, name) for name in names], [getattr(dims, name) for name in names], size)
    more = layer._replace(**dict(zip(names, merged, strict=True)))
    return torch.ops.flashmoe._fused_moe_inference.default(*more).unflatten(0, (size, -1)), 0


def layer_under_transforms(layer: Layer) -> Tensor:
    """The layer for torch.func, which cannot use the operator's own rule."""
    if not torch.is_grad_enabled():  # torch.func.grad enables it
        only: Tensor = torch.ops.flashmoe._fused_moe_inference.default(*layer)
        return only
    given = list(layer)  # cast here, so that everything saved for the backward pass has one dtype
    for index, tensor in zip(CAST, autocasted(*(given[index] for index in CAST)), strict=True):
        given[index] = tensor
    result: Tensor = _transformed_layer(*given, True)[0]
    return result


def _layer_kept(*arguments: Any) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = torch.ops.flashmoe._fused_moe.default(*arguments)
    return result


def _gradient_under_transforms(ctx: Any, grad_out: Tensor | None, *_: Any) -> Gradients:
    return _layer_gradient(_backward_under_transforms, ctx, grad_out)


def _backward_under_transforms(*arguments: Any) -> Gradients:
    found = iter(_transformed_backward(*arguments))
    return tuple(next(found) if arguments[-1] >> bit & 1 else None for bit in range(len(GRADIENTS)))


def _needed_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """``_fused_moe_backward`` without the entries for gradients that are not needed."""
    found = torch.ops.flashmoe._fused_moe_backward.default(*arguments)
    return tuple(gradient for gradient in found if gradient is not None)


# The tensors saved for a backward pass belong to one sort, hence one call per element of a mapped dimension.
_transformed_layer: Callable[..., Any] = function_under_transforms(
    _layer_kept,
    save_for_layer,
    _gradient_under_transforms,
    one_by_one(lambda *given: _transformed_layer(*given)),  # noqa: PLW0108, bound later
    _NO_FORWARD_MODE.format("fused_moe"),
)
_transformed_backward: Callable[..., Any] = function_under_transforms(
    _needed_gradients,
    save_nothing,
    raise_double_backward,
    one_by_one(lambda *given: _transformed_backward(*given)),  # noqa: PLW0108, bound later
    _ONCE,
)


# Routing


def call_route(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``topk_route``, including under torch.func's transforms."""
    if not is_compiling() and transforms_are_active():
        result: tuple[Tensor, Tensor, Tensor] = _transformed_route(*arguments)
        return result
    result = torch.ops.flashmoe.topk_route.default(*arguments)
    return result


def save_for_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    call = Routing(*inputs)
    ctx.save_for_backward(call.logits, call.bias, output[1])
    ctx.words = call.scoring, call.renormalize, call.scale
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def route_gradient(ctx: Any, grad_weights: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """The gradients of logits, and of a bias added to them (topk_softmax); in torch's operators, so they can be differentiated again."""
    if grad_weights is None:
        return (None,) * len(Routing._fields)
    logits, bias, ids = ctx.saved_tensors
    scoring, renormalize, scale = ctx.words
    scores = logits.float()
    if scoring == "topk_softmax" and bias is not None:
        scores = scores + bias
    dscores = _gradient_of_scores(grad_weights * scale, scores, ids.long(), scoring, renormalize)
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
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The mapped dimension becomes more tokens, whose choices are counted separately again. A mapped bias: one call per element."""
    if in_dims[3] is not None:
        result: tuple[tuple[Tensor, ...], tuple[int, ...]] = one_by_one(call_route)(info, in_dims, *arguments)
        return result
    size = info.batch_size
    (logits,) = merge_batches(arguments[:1], in_dims[:1], size)
    weights, ids, counts = call_route(logits, *arguments[1:])
    ids = ids.unflatten(0, (size, -1))
    chosen = ids.flatten(1).long()
    counts = counts.new_zeros((size, counts.shape[0])).scatter_add(
        1, chosen, torch.ones_like(chosen, dtype=counts.dtype)
    )
    return (weights.unflatten(0, (size, -1)), ids, counts), (0, 0, 0)


_transformed_route = function_under_transforms(
    call_route, save_for_route, route_gradient, vmap_route, _NO_FORWARD_MODE.format("topk_route")
)


# Grouped products. The gradients of each form are calls of the two forms.


def call_grouped(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """The operator for b's rank, including under torch.func's transforms."""
    is_2d = getattr(b, "ndim", 3) == 2
    if not is_compiling() and transforms_are_active():
        result: Tensor = (_transformed_2d2d if is_2d else _transformed_grouped)(*autocasted(a, b), offsets)
        return result
    operators = torch.ops.flashmoe
    result = (operators._grouped_mm_2d2d if is_2d else operators.grouped_mm).default(a, b, offsets)
    return result


def save_for_grouped(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def grouped_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, offsets = ctx.saved_tensors
    da = call_grouped(grad, b.mT, offsets) if ctx.needs_input_grad[0] else None
    db = call_grouped(a.mT, grad, offsets) if ctx.needs_input_grad[1] else None
    return da, db, None


def grouped_2d2d_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """grad [E, N, K]: group e's columns of a have the gradient grad[e] b[row], b's rows a[:, row] grad[e]."""
    a, b, offsets = ctx.saved_tensors
    da = call_grouped(b, grad.mT, offsets).mT if ctx.needs_input_grad[0] else None
    db = call_grouped(a.mT, grad, offsets) if ctx.needs_input_grad[1] else None
    return da, db, None


vmap_grouped = one_by_one(call_grouped)
_transformed_grouped, _transformed_2d2d = (
    function_under_transforms(
        call_grouped, save_for_grouped, gradient, vmap_grouped, _NO_FORWARD_MODE.format("grouped_mm")
    )
    for gradient in (grouped_gradient, grouped_2d2d_gradient)
)
