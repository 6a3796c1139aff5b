"""What the operators return when there is no data: shapes, dtypes and strides for meta and fake tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashmoe import checks


def register() -> None:
    """Called once by ``_extension.load``."""
    torch.library.register_fake("flashmoe::flash_attention_forward", flash_attention_forward)
    torch.library.register_fake("flashmoe::_flash_attention_inference", flash_attention_inference)
    torch.library.register_fake("flashmoe::_flash_attention_drop_in", flash_attention_drop_in)


def flash_attention_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) as the compiled operator allocates them; raises the same typed errors that eager mode raises."""
    checks.validate(q, k, v, scale, causal)
    batch, heads, rows, _ = q.shape
    out = q.new_empty_strided(q.shape, output_strides(q.shape, q.stride()))
    return out, q.new_empty((batch, heads, rows), dtype=torch.float32)


def flash_attention_inference(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Tensor:
    """As :func:`flash_attention_forward`, without lse; scale is 1 / sqrt(D) by default."""
    return flash_attention_forward(q, k, v, 1.0 if scale is None else scale, causal)[0]


def flash_attention_drop_in(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, enable_gqa: bool
) -> Tensor | None:
    """As :func:`flash_attention_inference`; None where scaled_dot_product_attention would broadcast or mask otherwise."""
    usual = (
        q.dim() == k.dim() == 4
        and q.shape[0] == k.shape[0]
        and (enable_gqa or q.shape[1] == k.shape[1])
        and not (causal and q.shape[2] != k.shape[2])
    )
    return flash_attention_inference(q, k, v, scale, causal) if usual else None


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
