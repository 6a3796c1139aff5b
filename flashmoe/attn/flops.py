"""The number of operations in a call, counted as torch counts its own attention: only the matrix products, two operations per
multiply-add, and all scores even under a causal mask. So a model's utilisation figures do not depend on which attention it calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flashmoe.attn.fake import ALL_GRADIENTS
from flashmoe.attn.options import Varlen, VarlenBackward


def forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Shapes q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv]; counts q k^T and P v."""
    return _product(q, k) + _product((*q[:3], v[3]), k)


def backward_flops(
    grad_out: Any, grad_lse: Any, q: Sequence[int], k: Sequence[int], *rest: Any, needs: int = ALL_GRADIENTS, **_: Any
) -> int:
    """From shapes, in the order of the backward operator's tensors."""
    for_q, for_v = backward_products(rest[5] if len(rest) > 5 else needs)
    return for_q * _product(q, k) + for_v * _product((*q[:3], rest[0][3]), k)


def backward_products(needs: int) -> tuple[int, int]:
    """The number of products over q's head_dim (the recomputed scores, dQ, dK), and over v's (dP, which dQ and dK need, and dV)."""
    needs_scores_gradient = bool(needs & 3)
    return 1 + (needs & 1) + (needs >> 1 & 1), needs_scores_gradient + (needs >> 2 & 1)


def _product(q: Sequence[int], k: Sequence[int]) -> int:
    batch, heads, rows, head_dim = q
    return 2 * batch * heads * rows * k[2] * head_dim


def varlen_flops(*arguments: Any, **_: Any) -> int:
    """From the tensors themselves: two operations per multiply-add, hidden scores included."""
    given = Varlen(*arguments)
    rows = _lengths(given.cu_seqlens_q, given.q, given.max_seqlen_q)
    keys = _lengths(given.cu_seqlens_k, given.k, given.max_seqlen_k, given.seqused_k, given.block_table)
    return int(2 * given.q.shape[1] * _scores(rows, keys) * (given.q.shape[-1] + given.v.shape[-1]))


def fp8_varlen_flops(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *rest: Any, **_: Any
) -> int:
    """Like ``varlen_flops``."""
    rows, keys = _lengths(cu_seqlens_q, q, rest[1]), _lengths(cu_seqlens_k, k, rest[2], rest[0])
    return int(2 * q.shape[1] * _scores(rows, keys) * (q.shape[-1] + v.shape[-1]))


def dropout_backward_flops(*arguments: Any, **_: Any) -> int:
    return varlen_backward_flops(*arguments[: len(VarlenBackward._fields)])


def prefix_flops(*arguments: Any, **_: Any) -> int:
    """For operators whose leading arguments are those of ``attention_varlen_forward``."""
    return varlen_flops(*arguments[: len(Varlen._fields)])


def out_flops(_: Any, *arguments: Any, **__: Any) -> int:
    """Like ``prefix_flops``, after a first argument for the result."""
    return prefix_flops(*arguments)


def varlen_backward_flops(*arguments: Any, **_: Any) -> int:
    """Like the forward pass: the recomputed scores, dQ and dK have q's head_dim, dV and dP have v's."""
    given = VarlenBackward(*arguments)
    rows = _lengths(given.cu_seqlens_q, given.q, given.max_seqlen_q)
    keys = _lengths(given.cu_seqlens_k, given.k, given.max_seqlen_k, given.seqused_k)
    for_q, for_v = backward_products(given.needs)
    return int(2 * given.q.shape[1] * _scores(rows, keys) * (for_q * given.q.shape[-1] + for_v * given.v.shape[-1]))


def mask_backward_flops(*arguments: Any, **_: Any) -> int:
    """Like ``varlen_backward_flops``; the mask's gradient needs the scores and dP."""
    given = VarlenBackward(*arguments)
    count = varlen_backward_flops(*given)
    return count if given.needs & 3 else count + _product((*given.q.shape[:3], given.v.shape[-1]), given.k.shape)


def bias_gradient_flops(*arguments: Any, **_: Any) -> int:
    """The recomputed scores, and dP."""
    q, k, v = arguments[2:5]
    return int(2 * math.prod(q.shape[:3]) * k.shape[2] * (q.shape[-1] + v.shape[-1]))


def bias_kernels_flops(*arguments: Any, **_: Any) -> int:
    return bias_gradient_flops(None, *arguments)


def _scores(rows: Sequence[int], keys: Sequence[int]) -> int:
    return sum(row * key for row, key in zip(rows, keys, strict=True))


def _lengths(
    cu_seqlens: Tensor | None,
    tensor: Tensor,
    longest: int,
    used: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Sequence[int]:
    """The length of each sequence; if a tensor has no data, every sequence counts as the longest."""
    for counted in (used, cu_seqlens):
        if counted is None:
            continue
        count = counted.shape[0] - (counted is cu_seqlens)
        if counted.device.type == "meta" or type(counted) is not Tensor:
            return [longest if counted is cu_seqlens or block_table is not None else int(tensor.shape[2])] * count
        return (counted.diff() if counted is cu_seqlens else counted).tolist()
    return [tensor.shape[2]] * tensor.shape[0]
