"""Attention that writes its result to the caller's tensor (``out=``), with operators that allocate nothing. For inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.compiler import is_compiling

from flashmoe import _extension
from flashmoe.attn import arguments, e4m3
from flashmoe.attn.options import Varlen
from flashmoe.attn.refusals import NO_OUT_TRANSFORM
from flashmoe.errors import ArgumentError
from flashmoe.rules import check
from flashmoe.transforms import has_tangent

_extension.load()
_operator = torch.ops.flashmoe._attention_varlen_out.default
_e4m3_operator = torch.ops.flashmoe._attention_e4m3_out.default
_bare_operator, _bare_e4m3_operator = _operator._op, _e4m3_operator._op  # as in varlen.py
SIZES = "of the result's sizes"
NO_GRADIENT = "out= is given, but a gradient is requested; remove out=, or call under torch.no_grad()"


def call_of(given: Varlen, k_scale: e4m3.Scale, v_scale: e4m3.Scale, out: Tensor | None) -> tuple[str, tuple[Any, ...]]:
    """The name of the operator for these keys, and its arguments; with scales if the keys are float8_e4m3fn."""
    is_fp8 = e4m3.is_fp8(given.k)
    if not is_fp8:
        e4m3.check_unscaled(k_scale, v_scale, given.k)
    operands: tuple[Any, ...] = (*given, *e4m3.scale_arguments(k_scale, v_scale)) if is_fp8 else given
    if out is None:
        return "attention_e4m3_forward" if is_fp8 else "attention_varlen_forward", operands
    if not isinstance(out, Tensor):
        arguments.check_is_dense_tensor("out", out, SIZES)
    return "_attention_e4m3_out" if is_fp8 else "_attention_varlen_out", (out, *operands)


def attend(given: Varlen, k_scale: e4m3.Scale, v_scale: e4m3.Scale, out: Tensor) -> Tensor:
    """Writes and returns ``out``; raises what a call without ``out`` raises, and an error if ``out`` does not match the result."""
    name, operands = call_of(given, k_scale, v_scale, out)
    tensors = [one for one in (given.q, given.k, given.v, given.sinks, given.mask, out) if isinstance(one, Tensor)]
    if transforms_are_active() and not is_compiling():
        raise ArgumentError(NO_OUT_TRANSFORM)
    if (is_grad_enabled() and any(one.requires_grad for one in tensors)) or has_tangent(*tensors):
        raise ArgumentError(NO_GRADIENT)
    if out.device != getattr(
        given.q, "device", out.device
    ):  # the dispatcher would follow a meta tensor and compute nothing
        check(name, operands)
    call = _e4m3_operator if name == "_attention_e4m3_out" else _operator
    if is_compiling():
        call(*operands)
        return out
    try:
        call(*operands)
    except Exception as error:
        arguments.check_is_dense_tensor("out", out, SIZES)
        cause = arguments.explain_varlen(error, given, (name, operands))
        if cause is error:
            raise
        raise cause from error
    return out


def attention_out(out: Tensor, given: Varlen, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> None:
    """For engines that call each layer with tensors of their own making: only the operator, eager, without gradients.

    Keys in float8_e4m3fn need float32 scales. Raises the errors of :func:`attend`.
    """
    try:
        if k_scale is None:
            _bare_operator(out, *given)
        else:
            _bare_e4m3_operator(out, *given, k_scale, v_scale, 1.0, 1.0)
    except RuntimeError:
        attend(given, k_scale, v_scale, out)  # says what is wrong
        raise


def check_alone(out: Any, *, has_dropout: bool, return_lse: bool) -> None:
    """Raise if a call with ``out`` also wants dropout or lse, which these operators do not have."""
    if out is not None and (has_dropout or return_lse):
        other = "dropout_p" if has_dropout else "return_lse=True"
        msg = f"out= and {other} are both given, which is not supported; remove one of them"
        raise ArgumentError(msg)
