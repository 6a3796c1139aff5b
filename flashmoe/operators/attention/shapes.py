"""What the operators return when there is no data (meta and fake tensors), and what a call costs in operations.

Operations are counted as torch counts its own attention: the matrix products alone, two operations for a multiply-add, and
all of the scores under a causal mask, too. So utilisation figures of a model do not change with the attention that it calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmoe.operators.attention.drop_in import is_drop_in
from flashmoe.rules import check

# The bits of the backward operators' `needs`: 1 for dq, 2 for dk, 4 for dv, 8 for the sinks of ragged attention.
ALL_GRADIENTS = 7
ALL_VARLEN_GRADIENTS = 15


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) as the compiled operator allocates them; raises the same typed errors that eager mode raises."""
    check("flash_attention_forward", (q, k, v, scale, causal))
    return dense_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def inference(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Tensor:
    """As :func:`forward`, without lse; scale is 1 / sqrt(D) by default. v may have a head_dim of its own."""
    check("_flash_attention_inference", (q, k, v, scale, causal))
    sizes = (*q.shape[:3], v.shape[3])
    return q.new_empty_strided(sizes, output_strides(sizes, q.stride()))


def drop_in(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, enable_gqa: bool) -> Tensor | None:
    """As :func:`inference`; None where scaled_dot_product_attention would broadcast or mask otherwise."""
    return inference(q, k, v, scale, causal) if is_drop_in(q.shape, k.shape, causal, enable_gqa) else None


def backward(
    grad_out: Any,
    grad_lse: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Any,
    lse: Any,
    scale: float,
    causal: bool,
    needs: int = ALL_GRADIENTS,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each dense in the layout of its input; empty where nobody needs it."""
    dq, dk, dv = (dense_like(t) if needs >> place & 1 else unneeded(t) for place, t in enumerate((q, k, v)))
    return dq, dk, dv


def unneeded(tensor: Tensor) -> Tensor:
    """In place of a gradient that nobody needs: no element, and one dimension, which no gradient has."""
    return tensor.new_empty(0)


def bits(needed: Sequence[bool]) -> int:
    """``needs``, from what autograd says of each input."""
    return sum(1 << place for place, need in enumerate(needed) if need)


def dense_like(tensor: Tensor) -> Tensor:
    """Uninitialised, with the strides of :func:`output_strides`."""
    return tensor.new_empty_strided(tensor.shape, output_strides(tensor.shape, tensor.stride()))


def output_strides(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor in q's order of dimensions, head_dim last; contiguous where q is expanded.

    Equal strides keep the order of the dimensions. The compiled operator's ``output_strides`` is the same rule.
    """
    outer = [0, 1, 2]
    if not any(stride == 0 for stride in strides):
        outer.sort(key=lambda axis: -strides[axis])  # stable
    result = [0, 0, 0, 1]
    step = max(1, sizes[3])
    for axis in reversed(outer):
        result[axis] = step
        step *= max(1, sizes[axis])
    return tuple(result)


def forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv] as shapes: q k^T and P v."""
    return _product(q, k) + _product((*q[:3], v[3]), k)


def backward_flops(
    grad_out: Any, grad_lse: Any, q: Sequence[int], k: Sequence[int], *rest: Any, needs: int = ALL_GRADIENTS, **_: Any
) -> int:
    """Shapes, as the backward operator takes its tensors."""
    same, of_v = backward_products(rest[5] if len(rest) > 5 else needs)
    return (same + of_v) * _product(q, k)


def backward_products(needs: int) -> tuple[int, int]:
    """How many products over q's head_dim, and over v's: the scores again, dQ and dK; dP, for these two, and dV."""
    needs_scores_gradient = bool(needs & 3)
    return 1 + (needs & 1) + (needs >> 1 & 1), needs_scores_gradient + (needs >> 2 & 1)


def _product(q: Sequence[int], k: Sequence[int]) -> int:
    batch, heads, rows, head_dim = q
    return 2 * batch * heads * rows * k[2] * head_dim
