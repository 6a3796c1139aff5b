"""Ragged, paged and banded attention: the operators without data, their gradient, their cost.

Rows are dense ([B, H, S, D]) or ragged ([N, H, D] with cu_seqlens_q); keys likewise, or pages. ``attention_varlen_forward`` has
the sixteen arguments of :func:`varlen_arguments.validate`, in that order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from flashmoe.errors import ArgumentError, DifferentiationError
from flashmoe.operator import Operator, keep_nothing
from flashmoe.operators.attention import shapes
from flashmoe.operators.attention.autograd import NO_FORWARD_MODE, refuse_double_backward
from flashmoe.rules import check
from flashmoe.transforms import merge_batches, split_batch

BACKWARD_SCHEMA = (
    "attention_varlen_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? sinks, Tensor? mask, Tensor out, Tensor lse, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float scale, int window_left, int window_right, float softcap, int needs=15) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
LEAST_SCALE = 2.0**-126  # a scale below is taken for zero: float32 holds no normal number there
NO_TRANSFORM_APPENDS = (
    "new keys are appended in place, which no transform of torch.func (vmap, functionalize) can follow; make the mapped dimension part "
    "of the batch, a cache for each sequence, or append before"
)
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
_DIFFERENTIABLE = (0, 1, 2, 7)  # q, k, v and sinks among the forward operator's arguments


def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) as the compiled operator allocates them; raises the same typed errors that eager mode raises."""
    check("attention_varlen_forward", (q, k, v, *arguments))
    float32 = torch.float32
    if arguments[0] is not None:  # cu_seqlens_q
        tokens, heads, _ = q.shape
        return q.new_empty((tokens, heads, v.shape[-1])), q.new_empty((heads, tokens), dtype=float32)
    sizes = (*q.shape[:3], v.shape[-1])
    out = q.new_empty_strided(sizes, shapes.output_strides(sizes, q.stride()))
    return out, q.new_empty(q.shape[:3], dtype=float32)


def inference(*arguments: Any) -> Tensor:
    return forward(*arguments)[0]


def backward(grad_out: Any, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Gradients:
    """(dq, dk, dv, dsinks), dense in the layout of what they belong to; dsinks [Hq], or [0] without sinks. Empty where nobody needs
    one."""
    sinks = arguments[3]
    needs = arguments[13] if len(arguments) > 13 else shapes.ALL_VARLEN_GRADIENTS
    dq, dk, dv = (_like(t) if needs >> place & 1 else shapes.unneeded(t) for place, t in enumerate((q, k, v)))
    return dq, dk, dv, q.new_empty(q.shape[1] if sinks is not None and needs & 8 else 0, dtype=torch.float32)


def kernel_backward(grad_out: Tensor, grad_lse: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, row_dot) as the compiled operator allocates them: row_dot [B, Hq, Sq] or [Hq, N], on a GPU alone."""
    needs = arguments[16] if len(arguments) > 16 else shapes.ALL_GRADIENTS
    gradients = backward(grad_out, grad_lse, *arguments)[:3]
    lse = arguments[9]
    return (
        *(gradient if needs >> place & 1 else None for place, gradient in enumerate(gradients)),
        torch.empty_like(lse) if lse.device.type == "cuda" else None,
    )


def _like(tensor: Tensor) -> Tensor:
    return shapes.dense_like(tensor) if tensor.dim() == 4 else tensor.new_empty(tensor.shape)


def append(*arguments: Any) -> None:
    check("attention_append_", arguments)


def vmap_append(*_: Any) -> NoReturn:
    raise ArgumentError(NO_TRANSFORM_APPENDS)


def backward_by_kernels(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    needs: int = shapes.ALL_VARLEN_GRADIENTS,
) -> Gradients:
    """(dq, dk, dv, dsinks), in the dtypes of q, k and v, and float32; empty what ``needs`` has no bit for (see ``shapes``).

    A missing gradient counts as zero. Rows and keys of no sequence, and rows without a visible key, have zero gradients. Under
    autocast the forward pass worked in ``out``'s dtype, and so does this.
    """
    upstream = torch.zeros_like(out) if grad_out is None else grad_out
    if upstream.stride(-1) != 1:
        upstream = upstream.contiguous()
    statistic = None if grad_lse is None else grad_lse.contiguous()
    rows, keys, values = (tensor.to(out.dtype) for tensor in (q, k, v))
    # The kernels take a scale above zero: its sign moves to q and back to dq.
    factor = 1.0 if scale >= LEAST_SCALE else -1.0 if scale <= -LEAST_SCALE else 0.0
    if factor != 1.0:
        rows = -rows if factor else rows - rows
    dq, dk, dv, row_dot = torch.ops.flashmoe._attention_varlen_backward.default(
        upstream,
        statistic,
        *(rows, keys, values, cu_seqlens_q, cu_seqlens_k, seqused_k, sinks),
        mask if mask is None or mask.dtype == torch.bool else mask.to(out.dtype),
        *(out, lse.contiguous(), max_seqlen_q, max_seqlen_k, abs(scale) if factor else 1.0),
        *(window_left, window_right, softcap, needs & shapes.ALL_GRADIENTS),
    )
    if factor != 1.0 and dq is not None:
        dq = -dq if factor else torch.zeros_like(dq)
    if sinks is None or not needs & 8:
        dsinks = lse.new_empty(0)
    else:
        if row_dot is None:
            row_dot = torch.linalg.vecdot(upstream.float(), out.float())
            row_dot = row_dot.mT if cu_seqlens_q is not None else row_dot
            row_dot = row_dot if statistic is None else row_dot - statistic
        dsinks = sink_gradient(sinks, lse, row_dot, cu_seqlens_q)
    return _in_dtype_of(q, dq), _in_dtype_of(k, dk), _in_dtype_of(v, dv), dsinks


def sink_gradient(sinks: Tensor, lse: Tensor, row_dot: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """[Hq] float32: a sink is a score without a value, so its gradient is -sum over rows of exp(sink - lse) * row_dot.

    lse, row_dot: [B, Hq, Sq], or [Hq, N] where rows of no sequence may hold anything.
    """
    weights = (sinks.unsqueeze(1) - lse).exp()
    counts = lse > -math.inf
    if cu_seqlens_q is not None:
        row = torch.arange(lse.shape[-1], device=lse.device)
        counts = counts & (row >= cu_seqlens_q[0]) & (row < cu_seqlens_q[-1])
    products = torch.where(counts, weights * row_dot, 0.0)
    return -(products.sum(-1) if cu_seqlens_q is not None else products.sum((0, 2)))


def _in_dtype_of(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return shapes.unneeded(tensor)
    return gradient if gradient.dtype == tensor.dtype else _like(tensor).copy_(gradient)


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, sinks, mask, *numbers = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, sinks, mask, *output)
    ctx.numbers, ctx.has_pages = tuple(numbers[:-1]), block_table is not None
    ctx.set_materialize_grads(False)  # an unused lse costs nothing in the backward pass


def gradient(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """For the arguments of ``attention_varlen_forward``, None where none is needed."""
    return gradient_by(torch.ops.flashmoe.attention_varlen_backward.default, ctx, grad_out, grad_lse)


def gradient_by(
    call: Callable[..., Gradients], ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    nothing: tuple[Tensor | None, ...] = (None,) * 16
    if grad_out is None and grad_lse is None:
        return nothing
    if ctx.has_pages:
        msg = "attention over pages has no gradient; gather the keys, or call it under torch.no_grad()"
        raise DifferentiationError(msg)
    if ctx.needs_input_grad[8]:
        msg = (
            "attention has no gradient for attn_mask; detach it, or use flashmoe.scaled_dot_product_attention, which hands a mask "
            "that requires one to torch"
        )
        raise DifferentiationError(msg)
    needed = [ctx.needs_input_grad[place] for place in _DIFFERENTIABLE]
    gradients = call(grad_out, grad_lse, *ctx.saved_tensors, *ctx.numbers, shapes.bits(needed))
    places = zip(_DIFFERENTIABLE, gradients, needed, strict=True)
    found = {place: gradient for place, gradient, need in places if need}
    return tuple(found.get(place) for place in range(16))


def under_transforms(*arguments: Any) -> tuple[Tensor, Tensor]:
    """``attention_varlen_forward`` where a torch.func transform is active, whichever it is."""
    if retrieve_current_functorch_interpreter().key() == TransformType.Functionalize:
        result: tuple[Tensor, Tensor] = torch.ops.flashmoe.attention_varlen_forward.default(*arguments)
        return result
    result = TransformedForward.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class TransformedForward(torch.autograd.Function):
    """The forward operator for torch.func, whose transforms need a Function and cannot use the operator's own rule."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.flashmoe.attention_varlen_forward.default(*arguments)
        return result

    setup_context = staticmethod(keep_for_backward)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradient_by(TransformedBackward.apply, ctx, grad_out, grad_lse)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        return _map(TransformedForward.apply, info.batch_size, in_dims, arguments, _FORWARD)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise DifferentiationError(NO_FORWARD_MODE)


class TransformedBackward(torch.autograd.Function):
    """The backward operator for torch.func; cannot be differentiated."""

    @staticmethod
    def forward(*arguments: Any) -> Gradients:
        result: Gradients = torch.ops.flashmoe.attention_varlen_backward.default(*arguments)
        return result

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        return _map(TransformedBackward.apply, info.batch_size, in_dims, arguments, _BACKWARD)

    setup_context = staticmethod(keep_nothing)
    backward = staticmethod(refuse_double_backward)
    jvp = staticmethod(refuse_double_backward)


# Where the tensors stand that have a batch dimension when rows and keys are dense, and those that have none.
_FORWARD = ((0, 1, 2, 5, 8), (3, 4, 6, 7))
_BACKWARD = ((0, 1, 2, 3, 4, 7, 9, 10, 11), (5, 6, 8))


def vmap_forward(
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    return _map(torch.ops.flashmoe.attention_varlen_forward.default, info.batch_size, in_dims, arguments, _FORWARD)


def vmap_inference(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
    call = torch.ops.flashmoe.attention_varlen_forward.default
    return _map(call, info.batch_size, in_dims, arguments, _FORWARD)[0][0], 0


def vmap_backward(
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    return _map(torch.ops.flashmoe.attention_varlen_backward.default, info.batch_size, in_dims, arguments, _BACKWARD)


def _map(
    call: Callable[..., tuple[Tensor, ...]],
    size: int,
    in_dims: tuple[int | None, ...],
    arguments: tuple[Any, ...],
    places: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The mapped dimension joins the batch where rows and keys are dense; else one call for each."""
    batched, others = places
    q = batched[0] if places is _FORWARD else batched[2]
    sums_sinks = places is _BACKWARD and arguments[8] is not None  # over the batch
    if any(arguments[place] is not None for place in others[:-1]) or in_dims[others[-1]] is not None or sums_sinks:
        parts = [
            call(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, in_dims, strict=True)))
            for i in range(size)
        ]
        return tuple(torch.stack(results) for results in zip(*parts, strict=True)), (0,) * len(parts[0])
    merged = list(arguments)
    chosen = [arguments[place] for place in batched]
    for place, tensor in zip(batched, merge_batches(chosen, [in_dims[p] for p in batched], size), strict=True):
        merged[place] = tensor
    results = call(*merged)
    split = tuple(
        split_batch(result, size, arguments[q], in_dims[q]) if result.dim() > 1 else result.expand(size, *result.shape)
        for result in results
    )
    return split, (0,) * len(split)


def forward_flops(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *arguments: Any, **_: Any) -> int:
    """Of the tensors themselves: two operations for a multiply-add, hidden scores included."""
    block_table, max_seqlen_q, max_seqlen_k = arguments[1], arguments[4], arguments[5]
    seqused_k, heads = arguments[0], q.shape[1]
    lengths = (_lengths(cu_seqlens_q, q, max_seqlen_q), _lengths(cu_seqlens_k, k, max_seqlen_k, seqused_k, block_table))
    scores = sum(rows * keys for rows, keys in zip(*lengths, strict=True))
    return int(2 * heads * scores * (q.shape[-1] + v.shape[-1]))


def backward_flops(grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, *arguments: Any, **_: Any) -> int:
    """As the forward pass: the scores again, dQ and dK have q's head_dim, dV and dP have v's."""
    cu_seqlens_q, cu_seqlens_k, seqused_k = arguments[:3]
    lengths = (_lengths(cu_seqlens_q, q, arguments[7]), _lengths(cu_seqlens_k, k, arguments[8], seqused_k))
    scores = sum(rows * keys for rows, keys in zip(*lengths, strict=True))
    of_q, of_v = shapes.backward_products(arguments[13] if len(arguments) > 13 else shapes.ALL_VARLEN_GRADIENTS)
    return int(2 * q.shape[1] * scores * (of_q * q.shape[-1] + of_v * v.shape[-1]))


def _lengths(
    cu_seqlens: Tensor | None,
    tensor: Tensor,
    longest: int,
    used: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Sequence[int]:
    """Of each sequence; where a tensor has no data, as if all were the longest."""
    for counted in (used, cu_seqlens):
        if counted is None:
            continue
        count = counted.shape[0] - (counted is cu_seqlens)
        if counted.device.type == "meta" or type(counted) is not Tensor:
            return [longest if counted is cu_seqlens or block_table is not None else int(tensor.shape[2])] * count
        return (counted.diff() if counted is cu_seqlens else counted).tolist()
    return [tensor.shape[2]] * tensor.shape[0]


_CAST = (0, 1, 2, 8)  # q, k, v and an additive mask: one dtype

OPERATORS = (
    Operator(
        "attention_varlen_forward",
        fake=forward,
        flops=forward_flops,
        counts_raw=True,
        autocast=_CAST,
        vmap=vmap_forward,
        gradient=gradient,
        setup_context=keep_for_backward,
    ),
    Operator(
        "_attention_varlen_inference",
        fake=inference,
        flops=forward_flops,
        counts_raw=True,
        autocast=_CAST,
        vmap=vmap_inference,
    ),
    Operator(
        "attention_varlen_backward",
        schema=BACKWARD_SCHEMA,
        impls={"CPU": backward_by_kernels, "CUDA": backward_by_kernels},
        fake=backward,
        flops=backward_flops,
        counts_raw=True,
        vmap=vmap_backward,
        gradient=refuse_double_backward,
    ),
    Operator("_attention_varlen_backward", fake=kernel_backward, flops=backward_flops, counts_raw=True),
    Operator("attention_append_", fake=append, flops=lambda *_, **__: 0, vmap=vmap_append),
)
