"""The gradient of an additive mask: on a GPU the steps around the kernels, on the CPU all of it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmoe.attn import fake, philox
from flashmoe.attn.options import VarlenBackward
from flashmoe.attn.varlen_backward import backward_by_kernels, in_dtype_of, run, with_positive_scale

SCHEMA = (
    "attention_bias_gradient(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor out, Tensor lse, "
    "float scale, int window_left, int window_right, float softcap, float dropout_p, Tensor? rng_state) -> Tensor"
)
_ROWS = 512  # rows of scores that the CPU holds at a time


class BiasGradient(NamedTuple):
    """The arguments of ``attention_bias_gradient``, in order. Dense: q [B, Hq, Sq, D], k and v [B, Hkv, Sk, ...]."""

    grad_out: Tensor | None
    grad_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor  # additive, [B or 1, Hq or 1, Sq or 1, Sk or 1]
    out: Tensor
    lse: Tensor
    scale: float
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float
    rng_state: Tensor | None


def bias_gradient(*arguments: Any) -> Tensor:
    """dS, summed over the dimensions in which ``mask`` has size 1: in the mask's shape and dtype, contiguous, with float32 sums.

    A missing gradient counts as zero. The order of each sum is fixed, so the bits are the same on every run.
    """
    given = BiasGradient(*arguments)
    if 0 in (given.q.numel(), given.k.numel(), given.mask.numel()):
        return fake.bias_gradient(*given).zero_()
    out = given.out
    upstream = torch.zeros_like(out) if given.grad_out is None else given.grad_out
    q, scale, _ = with_positive_scale(given.q.to(out.dtype), given.scale)
    cast = given._replace(
        grad_out=upstream if upstream.stride(-1) == 1 else upstream.contiguous(),
        grad_lse=None if given.grad_lse is None else given.grad_lse.contiguous(),
        q=q,
        k=given.k.to(out.dtype),
        v=given.v.to(out.dtype),
        mask=given.mask.to(out.dtype),
        lse=given.lse.contiguous(),
        scale=scale,
    )
    return in_dtype_of(given.mask, _on_cpu(cast) if out.device.type == "cpu" else _by_kernels(cast)).contiguous()


def mask_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """The results of ``attention_varlen_backward``, and the gradient of an additive mask, whose bits do not depend on what else is needed."""
    given = VarlenBackward(*arguments)
    assert given.mask is not None
    if given.out.device.type == "cpu" or 0 in (given.q.numel(), given.k.numel(), given.mask.numel()):
        return *backward_by_kernels(*arguments), bias_gradient(*mask_only_arguments(given))
    return _mask_backward_by_kernels(given)


def _mask_backward_by_kernels(given: VarlenBackward) -> tuple[Tensor, ...]:
    assert given.mask is not None
    gradients, cast, (row_dot, stored) = run(
        torch.ops.flashmoe._attention_mask_backward.default, given, more=fake.MASK_GRADIENT
    )
    if stored is None:
        assert row_dot is not None
        total = _sums(mask_only_arguments(cast), row_dot)
    else:
        total = stored[..., : given.mask.shape[3]]
    return *gradients, in_dtype_of(given.mask, total).contiguous()


def mask_only_arguments(given: VarlenBackward, dropout_p: float = 0.0, rng_state: Tensor | None = None) -> BiasGradient:
    """The arguments for the mask's gradient only."""
    tensors = (given.grad_out, given.grad_lse, given.q, given.k, given.v, given.mask, given.out, given.lse)
    numbers = (given.scale, given.window_left, given.window_right, given.softcap, dropout_p)
    return BiasGradient(*tensors, *numbers, rng_state)  # type: ignore[arg-type]


def _by_kernels(given: BiasGradient) -> Tensor:
    operators = torch.ops.flashmoe
    score_mod = (given.scale, given.window_left, given.window_right, given.softcap)
    tensors = (given.grad_out, given.grad_lse, given.q, given.k, given.v, *[None] * 5, given.out, given.lse)
    *_, row_dot = operators._attention_varlen_backward.default(*tensors, 0, 0, *score_mod, 0)
    return _sums(given, row_dot)


def _sums(given: BiasGradient, row_dot: Tensor) -> Tensor:
    score_mod = (given.scale, given.window_left, given.window_right, given.softcap)
    sums = torch.ops.flashmoe._attention_bias_gradient.default(
        *(given.grad_out, given.q, given.k, given.v, given.mask, given.lse, row_dot),
        *(*score_mod, given.dropout_p, given.rng_state),
    )
    folded = [dim for dim in range(1, 5) if given.mask.shape[dim - 1] == 1 and sums.shape[dim] > 1]
    whole: Tensor = sums if sums.shape[0] == 1 and not folded else sums.sum((0, *folded), keepdim=True)
    return whole[0]


def _on_cpu(given: BiasGradient) -> Tensor:
    batch, heads, rows, _ = given.q.shape
    keys, group = given.k.shape[2], heads // given.k.shape[1]
    total = given.mask.new_zeros(given.mask.shape, dtype=torch.float32)
    seen = _visible(rows, keys, given.window_left, given.window_right)
    for b in range(batch):
        for h in range(heads):
            at = (b if total.shape[0] > 1 else 0, h if total.shape[1] > 1 else 0)
            keep_mask = None
            if given.rng_state is not None:
                keep_mask = philox.keep_mask(
                    given.rng_state, given.dropout_p, range(b, b + 1), range(h, h + 1), rows, keys
                )[0, 0]
            for first in range(0, rows, _ROWS):
                block = slice(first, min(first + _ROWS, rows))
                gradient = _score_gradient(given, (b, h, h // group), at, block, seen[block], keep_mask)
                own = block if total.shape[2] > 1 else slice(0, 1)
                if total.shape[2] == 1:
                    gradient = gradient.sum(0, keepdim=True)
                total[at][own] += gradient.sum(1, keepdim=True) if total.shape[3] == 1 else gradient
    return total


def _score_gradient(
    given: BiasGradient,
    of: tuple[int, int, int],
    at: tuple[int, int],
    block: slice,
    seen: Tensor,
    keep_mask: Tensor | None,
) -> Tensor:
    """dS of some rows of one sequence and head, float32 [rows, Sk]. ``of``: sequence, query head, key head; ``at``: the mask's indices."""
    b, h, key_head = of
    upstream, lse = given.grad_out[b, h, block].float(), given.lse[b, h, block, None]  # type: ignore[index]
    scores = given.q[b, h, block].float() @ given.k[b, key_head].float().mT * given.scale
    if given.softcap > 0.0:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    mask = given.mask[at]
    scores += mask[block] if mask.shape[0] > 1 else mask
    weights = (scores - lse).clamp_(max=0.0).exp_()
    weights = torch.where(seen & (lse > -math.inf), weights, 0.0)
    gradient = upstream @ given.v[b, key_head].float().mT
    if keep_mask is not None:
        gradient = torch.where(keep_mask[block], gradient / (1.0 - given.dropout_p), 0.0)
    row_dot = torch.linalg.vecdot(upstream, given.out[b, h, block].float())
    if given.grad_lse is not None:
        row_dot = row_dot - given.grad_lse[b, h, block]
    result: Tensor = weights * (gradient - row_dot[:, None])
    return result


def _visible(rows: int, keys: int, left: int, right: int) -> Tensor:
    """bool [rows, keys]: the keys that each row sees through a window, aligned bottom-right; -1 means no limit."""
    distance = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen
