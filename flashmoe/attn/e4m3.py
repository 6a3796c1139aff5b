"""Attention over caches of 8-bit floats (float8_e4m3fn) with 16-bit queries: turns the user's arguments into the operators'."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.compiler import is_compiling

from flashmoe import _extension
from flashmoe.attn import arguments
from flashmoe.attn.options import Varlen
from flashmoe.attn.refusals import NO_GRADIENT
from flashmoe.checks import is_number
from flashmoe.errors import ArgumentError, ArgumentTypeError, DifferentiationError
from flashmoe.rules import explain
from flashmoe.transforms import has_tangent

_extension.load()
_operator = torch.ops.flashmoe.attention_e4m3_forward.default
_inference_operator = torch.ops.flashmoe._attention_e4m3_inference.default._op
_append_operator = torch.ops.flashmoe.attention_append_e4m3_.default

E4M3 = torch.float8_e4m3fn
Scale = Tensor | float | None


def is_fp8(cache: Any) -> bool:
    return isinstance(cache, Tensor) and cache.dtype is E4M3


def check_unscaled(k_scale: Scale, v_scale: Scale, k: Any) -> None:
    """Raise if scales are given for a cache that is not of 8-bit floats."""
    if k_scale is None and v_scale is None:
        return
    name = "k_scale" if k_scale is not None else "v_scale"
    found = f"found {k.dtype}" if isinstance(k, Tensor) else f"found {type(k).__name__}"
    msg = f"{name} is only used with k and v of torch.float8_e4m3fn; {found}; remove {name}=, or quantise both"
    raise ArgumentError(msg)


def split_scale(name: str, scale: Any) -> tuple[Tensor | None, float]:
    """A scale as (tensor, factor): one of them is None or 1."""
    if scale is None:
        return None, 1.0
    if isinstance(scale, Tensor):
        return (scale.float() if scale.is_floating_point() else scale), 1.0
    if not is_number(scale):
        msg = f"{name} must be a number, a float32 tensor or None; found {type(scale).__name__}; use float(...)"
        raise ArgumentTypeError(msg)
    return None, float(scale)


def scale_arguments(k_scale: Scale, v_scale: Scale) -> tuple[Tensor | None, Tensor | None, float, float]:
    (k, k_factor), (v, v_factor) = split_scale("k_scale", k_scale), split_scale("v_scale", v_scale)
    return k, v, k_factor, v_factor


def attend(given: Varlen, k_scale: Scale, v_scale: Scale, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    tensors = [one for one in (given.q, given.sinks, given.mask, k_scale, v_scale) if isinstance(one, Tensor)]
    if (is_grad_enabled() and any(one.requires_grad for one in tensors)) or has_tangent(*tensors):
        raise DifferentiationError(NO_GRADIENT)
    operands = (*given, *scale_arguments(k_scale, v_scale))
    if is_compiling():
        out, lse = _operator(*operands)
        return (out, lse) if return_lse else out
    try:
        if return_lse or transforms_are_active():
            result: tuple[Tensor, Tensor] = _operator(*operands)
            return result if return_lse else result[0]
        only: Tensor = _inference_operator(*operands)
        return only
    except Exception as error:
        cause = arguments.explain_varlen(error, given, ("attention_e4m3_forward", operands))
        if cause is error:
            raise
        raise cause from error


def append(cache: tuple[Any, ...], k_scale: Scale, v_scale: Scale) -> None:
    """``cache``: k_cache, v_cache, k_new, v_new, cache_seqlens, block_table."""
    operands = (*cache, *scale_arguments(k_scale, v_scale))
    try:
        _append_operator(*operands)
    except Exception as error:
        cause = explain(error, "attention_append_e4m3_", operands)
        if cause is error:
            raise
        raise cause from error
