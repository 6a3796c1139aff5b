"""Gradients of ragged and windowed attention: the steps around the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmoe.attn import fake
from flashmoe.attn.arguments import MAX_GPU_OPTIONS_HEAD_DIM
from flashmoe.attn.options import VarlenBackward, is_slopes
from flashmoe.rules import broken

SCHEMA = (
    "attention_varlen_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? sinks, Tensor? mask, Tensor out, Tensor lse, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float scale, int window_left, int window_right, float softcap, int needs=15) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
DROPOUT_SCHEMA = SCHEMA.replace("attention_varlen_backward", "attention_dropout_backward").replace(
    "needs=15", "needs, float dropout_p, Tensor rng_state"
)
MASK_SCHEMA = SCHEMA.replace("attention_varlen_backward", "attention_mask_backward").replace(
    "(Tensor, Tensor, Tensor, Tensor)", "(Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LEAST_SCALE = 2.0**-126  # a smaller magnitude counts as zero: it is not a normal float32 number
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def backward_by_kernels(*arguments: Any) -> Gradients:
    """(dq, dk, dv, dsinks), in the dtypes of q, k and v, and float32; a gradient whose bit in ``needs`` (see ``fake.py``) is 0 is empty.

    A missing gradient counts as zero. Rows and keys that belong to no sequence, and rows without a visible key, have zero gradients. Under
    autocast the forward pass computed in ``out``'s dtype, and so does this. With dropout, its probability and ``rng_state`` follow.
    """
    count = len(VarlenBackward._fields)
    operators, dropout = torch.ops.flashmoe, arguments[count:]
    call = operators._attention_dropout_backward if dropout else operators._attention_varlen_backward
    return run(call.default, VarlenBackward(*arguments[:count]), dropout).gradients


class Run(NamedTuple):
    """The gradients from a call of the kernels, the arguments it was given, and its other results."""

    gradients: Gradients
    given: VarlenBackward
    rest: tuple[Tensor | None, ...]  # row_dot, and any results after it


def run(call: Callable[..., Any], given: VarlenBackward, dropout: tuple[Any, ...] = (), more: int = 0) -> Run:
    """``call``: an operator of the kernels. ``more``: bits of its ``needs`` besides those of dq, dk and dv."""
    _check_head_dim(given, has_dropout=bool(dropout))
    grad_out, out, lse, needs = given.grad_out, given.out, given.lse, given.needs
    upstream = torch.zeros_like(out) if grad_out is None else grad_out
    if upstream.stride(-1) != 1:
        upstream = upstream.contiguous()
    statistic = None if given.grad_lse is None else given.grad_lse.contiguous()
    mask = given.mask
    rows, scale, factor = with_positive_scale(_cast(given.q, out), given.scale)
    kernels = VarlenBackward(  # not _replace, which takes 3 us
        upstream,
        statistic,
        rows,
        _cast(given.k, out),
        _cast(given.v, out),
        *given[5:9],
        mask if mask is None or mask.dtype == torch.bool or is_slopes(mask) else _cast(mask, out),
        out,
        lse.contiguous(),
        given.max_seqlen_q,
        given.max_seqlen_k,
        scale,
        given.window_left,
        given.window_right,
        given.softcap,
        needs & fake.ALL_GRADIENTS | more,
    )
    dq, dk, dv, *rest = call(*kernels, *dropout)
    if factor != 1.0 and dq is not None:
        dq = -dq if factor else torch.zeros_like(dq)
    if given.sinks is None or not needs & 8:
        dsinks = lse.new_empty(0)
    else:
        row_dot = rest[0]
        if row_dot is None:
            row_dot = torch.linalg.vecdot(upstream.float(), out.float())
            row_dot = row_dot.mT if given.cu_seqlens_q is not None else row_dot
            row_dot = row_dot if statistic is None else row_dot - statistic
        dsinks = sink_gradient(given.sinks, lse, row_dot, given.cu_seqlens_q)
    gradients = in_dtype_of(given.q, dq), in_dtype_of(given.k, dk), in_dtype_of(given.v, dv), dsinks
    return Run(gradients, kernels, tuple(rest))


def _cast(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor if tensor.dtype is like.dtype else tensor.to(like.dtype)  # .to() takes 2 us even if it does nothing


def _check_head_dim(given: VarlenBackward, *, has_dropout: bool) -> None:
    if not given.q.is_cuda:
        return
    head_dim = max(given.q.shape[-1], given.v.shape[-1])
    if head_dim > MAX_GPU_OPTIONS_HEAD_DIM:
        what = "the gradient of dropout" if has_dropout else "the gradient of packed or windowed attention"
        wide = broken("attention.wide", what=what, head_dim=head_dim, most=MAX_GPU_OPTIONS_HEAD_DIM)
        raise wide


def with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """The kernels need a scale above zero: a negative sign moves to q; the factor returned last puts it back on dq."""
    factor = 1.0 if scale >= LEAST_SCALE else -1.0 if scale <= -LEAST_SCALE else 0.0
    if factor != 1.0:
        q = -q if factor else q - q
    return q, abs(scale) if factor else 1.0, factor


def sink_gradient(sinks: Tensor, lse: Tensor, row_dot: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """[Hq] float32: a sink is a score without a value, so its gradient is -sum over rows of exp(sink - lse) * row_dot.

    lse, row_dot: [B, Hq, Sq], or [Hq, N], in which rows that belong to no sequence are undefined.
    """
    weights = (sinks.unsqueeze(1) - lse).exp()
    counts = lse > -math.inf
    if cu_seqlens_q is not None:
        row = torch.arange(lse.shape[-1], device=lse.device)
        counts = counts & (row >= cu_seqlens_q[0]) & (row < cu_seqlens_q[-1])
    products = torch.where(counts, weights * row_dot, 0.0)
    return -(products.sum(-1) if cu_seqlens_q is not None else products.sum((0, 2)))


def in_dtype_of(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return fake.unneeded(tensor)
    return gradient if gradient.dtype == tensor.dtype else fake.gradient_like(tensor).copy_(gradient)
