"""What the operators return when there is no data (meta and fake tensors): shapes, dtypes and strides, or the same typed error as a
call with data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmoe.attn.options import DenseBackward, Varlen, VarlenBackward
from flashmoe.rules import check

# The bits of the backward operators' `needs`: 1 for dq, 2 for dk, 4 for dv, 8 for the sinks of ragged attention; for the kernels also
# 16 for the gradient of the scores, which a mask's gradient needs.
ALL_GRADIENTS = 7
MASK_GRADIENT = 16


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attention_forward``."""
    check("flash_attention_forward", arguments)
    return _dense_output(*arguments[:3])


def inference(*arguments: Any) -> Tensor:
    check("_flash_attention_inference", arguments)
    return _dense_output(*arguments[:3])[0]


def drop_in(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, enable_gqa: bool) -> Tensor | None:
    """None if scaled_dot_product_attention would broadcast, or would place the causal mask differently."""
    return inference(q, k, v, scale, causal) if matches_sdpa(q.shape, k.shape, causal, enable_gqa) else None


def varlen_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``attention_varlen_forward``."""
    check("attention_varlen_forward", arguments)
    return _varlen_output(Varlen(*arguments))


def _varlen_output(given: Varlen) -> tuple[Tensor, Tensor]:
    if given.cu_seqlens_q is None:
        return _dense_output(given.q, given.k, given.v)
    tokens, heads, _ = given.q.shape
    lse = given.q.new_empty((heads, tokens), dtype=torch.float32)
    return given.q.new_empty((tokens, heads, given.v.shape[-1])), lse


def varlen_inference(*arguments: Any) -> Tensor:
    return varlen_forward(*arguments)[0]


def varlen_out(*arguments: Any) -> None:
    check("_attention_varlen_out", arguments)


def e4m3_out(*arguments: Any) -> None:
    check("_attention_e4m3_out", arguments)


def append(*arguments: Any) -> None:
    check("attention_append_", arguments)


def dropout_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``attention_dropout_forward``."""
    check("attention_dropout_forward", arguments)
    return _varlen_output(Varlen(*arguments[: len(Varlen._fields)]))


def dropout_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return varlen_backward(*arguments[: len(VarlenBackward._fields)])


def dropout_kernels(*arguments: Any) -> tuple[Tensor | None, ...]:
    return varlen_kernels(*arguments[: len(VarlenBackward._fields)])


def e4m3_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``attention_e4m3_forward``."""
    check("attention_e4m3_forward", arguments)
    return _varlen_output(Varlen(*arguments[: len(Varlen._fields)]))


def e4m3_inference(*arguments: Any) -> Tensor:
    return e4m3_forward(*arguments)[0]


def fp8_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``attention_fp8_forward``."""
    check("attention_fp8_forward", arguments)
    q, _, v, _, _, is_float16 = arguments[:6]
    sizes = (*q.shape[:3], v.shape[-1])
    dtype = torch.float16 if is_float16 else torch.bfloat16
    out = q.new_empty_strided(sizes, output_strides(sizes, q.stride()), dtype=dtype)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def fp8_varlen_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``attention_fp8_varlen_forward``."""
    check("attention_fp8_varlen_forward", arguments)
    q, v, is_float16 = arguments[0], arguments[2], arguments[10]
    tokens, heads = q.shape[:2]
    out = q.new_empty((tokens, heads, v.shape[-1]), dtype=torch.float16 if is_float16 else torch.bfloat16)
    return out, q.new_empty((heads, tokens), dtype=torch.float32)


def e4m3_append(*arguments: Any) -> None:
    check("attention_append_e4m3_", arguments)


def _dense_output(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    sizes = (*q.shape[:3], v.shape[-1])
    out = q.new_empty_strided(sizes, output_strides(sizes, q.stride()))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def backward(*arguments: Any) -> tuple[Tensor, ...]:
    """(dq, dk, dv), each dense in the layout of its input; empty if not needed."""
    given = DenseBackward(*arguments)
    return _gradients(given)


def varlen_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """(dq, dk, dv, dsinks) in the same way; dsinks [Hq], or [0] without sinks."""
    given = VarlenBackward(*arguments)
    heads = given.q.shape[1] if given.sinks is not None and given.needs & 8 else 0
    return *_gradients(given), given.q.new_empty(heads, dtype=torch.float32)


def mask_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """The results of ``varlen_backward`` and the mask's gradient."""
    mask = VarlenBackward(*arguments).mask
    assert mask is not None
    return *varlen_backward(*arguments), mask.new_empty(mask.shape)


def bias_gradient(*arguments: Any) -> Tensor:
    """The result of ``attention_bias_gradient``: in the mask's shape, contiguous."""
    mask: Tensor = arguments[5]
    return mask.new_empty(mask.shape)


def bias_kernels(*arguments: Any) -> Tensor:
    """The result of ``_attention_bias_gradient`` with a single partial sum, as on a GPU with few multiprocessors."""
    return arguments[4].new_empty((1, *arguments[4].shape))  # type: ignore[no-any-return]


def varlen_kernels(*arguments: Any) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, row_dot) as the compiled operator allocates them: row_dot [B, Hq, Sq] or [Hq, N], only on a GPU."""
    given = VarlenBackward(*arguments)
    needs = given.needs & ALL_GRADIENTS
    gradients = (gradient if needs >> index & 1 else None for index, gradient in enumerate(_gradients(given)))
    return *gradients, torch.empty_like(given.lse) if given.lse.device.type == "cuda" else None


def mask_kernels(*arguments: Any) -> tuple[Tensor | None, ...]:
    """The results of ``_attention_mask_backward`` when another kernel computes the mask's gradient."""
    return *varlen_kernels(*arguments), None


def _gradients(given: DenseBackward | VarlenBackward) -> tuple[Tensor, ...]:
    tensors = enumerate((given.q, given.k, given.v))
    return tuple(gradient_like(tensor) if given.needs >> index & 1 else unneeded(tensor) for index, tensor in tensors)


def matches_sdpa(q: Sequence[int], k: Sequence[int], causal: bool, enable_gqa: bool) -> bool:
    """Whether one call of the operator equals scaled_dot_product_attention: four dimensions, nothing to broadcast, and a causal mask
    only if square. The shapes are [B, Hq, Sq, D] and [B, Hkv, Sk, D].

    The extension's ``matches_sdpa`` implements the same rule for calls that need no Python; a test compares the two.
    """
    return len(q) == len(k) == 4 and q[0] == k[0] and (enable_gqa or q[1] == k[1]) and not (causal and q[2] != k[2])


def unneeded(tensor: Tensor) -> Tensor:
    """Stands in for a gradient that is not needed: no elements, and one dimension, which no gradient has."""
    return tensor.new_empty(0)


def bits(needed: Sequence[bool]) -> int:
    """``needs``, from autograd's needs_input_grad."""
    return sum(1 << index for index, need in enumerate(needed) if need)


def gradient_like(tensor: Tensor) -> Tensor:
    """Uninitialised and dense: with the strides of :func:`output_strides` for four dimensions, contiguous for ragged tensors."""
    if tensor.dim() != 4:
        return tensor.new_empty(tensor.shape)
    return tensor.new_empty_strided(tensor.shape, output_strides(tensor.shape, tensor.stride()))


def output_strides(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor in q's order of dimensions, head_dim last; contiguous if q is expanded.

    Dimensions with equal strides keep their order. The compiled operator's ``output_strides`` implements the same rule.
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
