"""Attention with q, k and v all in float8_e4m3fn: 8-bit products on GPUs of compute capability 9.0, 16 bits elsewhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.compiler import is_compiling

from flashmoe import _extension
from flashmoe.attn import arguments
from flashmoe.attn.e4m3 import E4M3, Scale, split_scale
from flashmoe.checks import has_fx_proxies, trace_call
from flashmoe.errors import ArgumentError, DtypeError, ShapeError
from flashmoe.fallback import at_trace_time
from flashmoe.rules import check, explain
from flashmoe.transforms import has_tangent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_extension.load()
_operator = torch.ops.flashmoe.attention_fp8_forward.default
_varlen_operator = torch.ops.flashmoe.attention_fp8_varlen_forward.default
OPERATOR, VARLEN_OPERATOR = "attention_fp8_forward", "attention_fp8_varlen_forward"
OUT_DTYPES = (torch.bfloat16, torch.float16)
Scales = tuple[Scale, Scale, Scale]
_NAMES = ("q_scale", "k_scale", "v_scale")


def is_fp8_call(q: Any, q_scale: Scale, k_scale: Scale, v_scale: Scale, out_dtype: torch.dtype | None) -> bool:
    """Whether q is float8_e4m3fn, or an argument is given that only such a q allows."""
    return (isinstance(q, Tensor) and q.dtype is E4M3) or not (
        q_scale is None and k_scale is None and v_scale is None and out_dtype is None
    )


def _raise_not_fp8(q: Any, scales: Scales) -> NoReturn:
    name = next((name for name, value in zip(_NAMES, scales, strict=True) if value is not None), "out_dtype")
    found = f"found {q.dtype}" if isinstance(q, Tensor) else f"found {type(q).__name__}"
    msg = f"{name} is only used with q, k and v of torch.float8_e4m3fn; {found}; remove {name}=, or quantise all three"
    raise ArgumentError(msg)


def attend(
    attention: Callable[..., Any],
    tensors: tuple[Any, Any, Any],
    scales: Scales,
    out_dtype: torch.dtype | None,
    *,
    causal: bool,
    scale: float | None,
    return_lse: bool,
    consistent: bool,
    options: Mapping[str, Any],
) -> Any:
    """``options``: options that the kernel lacks, as keywords of ``attention``, which then runs on dequantised tensors."""
    if has_fx_proxies(*tensors):
        named = {**dict(zip(("q", "k", "v", *_NAMES), (*tensors, *scales), strict=True)), "out_dtype": out_dtype}
        given = {"causal": causal, "scale": scale, "return_lse": return_lse, "consistent": consistent}
        return trace_call(attention, **named, **given, **options)
    q = tensors[0]
    if not isinstance(q, Tensor) or q.dtype is not E4M3:
        _raise_not_fp8(q, scales)
    arguments.check_scalars(scale, causal, return_lse, consistent)
    dtype, factor, parts = _prepared(tensors, scales, out_dtype, scale)
    values, factors = zip(*parts, strict=True)
    operands = (*tensors, factor, causal, dtype is torch.float16, *values, *factors)
    chosen = {name: value for name, value in options.items() if not _is_default(value)}
    if chosen or factor <= 0.0 or not _has_kernel(q.device) or _is_differentiated(*tensors, *scales):
        if not is_compiling():
            check(OPERATOR, operands)
        wide = torch.float32 if q.device.type == "cpu" else dtype
        elements = [dequantize(one, *part, wide) for one, part in zip(tensors, parts, strict=True)]
        given = {"causal": causal, "scale": factor, "return_lse": return_lse, "consistent": consistent}
        result = attention(*elements, **given, **_in(wide, chosen))
        return (result[0].to(dtype), result[1]) if return_lse else result.to(dtype)
    return _call(_operator, OPERATOR, operands, return_lse)


def attend_varlen(
    attention: Callable[..., Any],
    tensors: tuple[Any, Any, Any],
    scales: Scales,
    out_dtype: torch.dtype | None,
    lengths: tuple[Any, Any, Any, Any, Any],
    *,
    causal: bool,
    scale: float | None,
    return_lse: bool,
    options: Mapping[str, Any],
) -> Any:
    """``lengths``: cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k. ``options``: as keywords of ``attention``; pages and
    score options run on its 16-bit kernels."""
    q, k, v = tensors
    if not isinstance(q, Tensor) or q.dtype is not E4M3:
        _raise_not_fp8(q, (scales[0], None, None))
    if options["out"] is not None:
        msg = "out is given, but q is torch.float8_e4m3fn, whose result has another dtype; remove out="
        raise ArgumentError(msg)
    arguments.check_scalars(scale, causal, return_lse, options["consistent"])
    dtype, factor, parts = _prepared(tensors, scales, out_dtype, scale)
    cu_seqlens_q, cu_seqlens_k, seqused_k = lengths[:3]
    most = arguments.as_integer(lengths[3]), arguments.as_integer(lengths[4])
    arguments.check_numbers(*most, -1, -1, 0.0, 0)
    for name, tensor in (("cu_seqlens_k", cu_seqlens_k), ("seqused_k", seqused_k)) if not is_compiling() else ():
        arguments.check_optional_tensor(name, tensor)
    given = {"seqused_k": seqused_k, "causal": causal, "scale": factor, "return_lse": return_lse, **options}
    if options["block_table"] is not None:
        key_scales = {"k_scale": scales[1], "v_scale": scales[2]}
        wide_q = _dequantize_tokens("q_scale", q, *parts[0], cu_seqlens_q, dtype)
        return attention(wide_q, k, v, cu_seqlens_q, cu_seqlens_k, *most, **given, **key_scales)
    values, factors = zip(*parts, strict=True)
    operands = (*tensors, *lengths[:3], *most, factor, causal, dtype is torch.float16, *values, *factors)
    is_plain = all(_is_default(options[name]) for name in _SCORE_OPTIONS)
    if is_plain and factor > 0.0 and _has_kernel(q.device) and not _is_differentiated(*tensors, *scales):
        return _call(_varlen_operator, VARLEN_OPERATOR, operands, return_lse)
    if not is_compiling():
        check(VARLEN_OPERATOR, operands)
    wide = torch.float32 if q.device.type == "cpu" else dtype
    ends = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)
    elements = [
        _dequantize_tokens(name, one, *part, of, wide)
        for name, one, part, of in zip(_NAMES, tensors, parts, ends, strict=True)
    ]
    result = attention(*elements, cu_seqlens_q, cu_seqlens_k, *most, **given)
    return (result[0].to(dtype), result[1]) if return_lse else result.to(dtype)


_SCORE_OPTIONS = ("window", "softcap", "sinks", "alibi_slopes", "dropout_p")


def _dequantize_tokens(
    name: str, codes: Tensor, values: Tensor | None, factor: float, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """``dequantize`` for ragged tensors, [N, H, D]; with a scale per sequence, each token finds its own through ``ends`` [B + 1]."""
    tokens, heads = codes.shape[:2]
    if values is None:
        return (codes.float() * factor).to(dtype)
    batch = max(ends.shape[0] - 1, 0)
    if tuple(values.shape) not in ((), (heads,), (batch, heads)):
        sizes = f"[], [{heads}] (heads) or [{batch}, {heads}] (sequences, heads)"
        msg = f"{name} must be a number or float32 {sizes}; found {list(values.shape)}; reshape it"
        raise ShapeError(msg)
    if values.dim() == 2 and batch > 0:
        at = torch.arange(tokens, device=codes.device, dtype=ends.dtype)
        values = values[torch.searchsorted(ends[1:], at, right=True).clamp(max=batch - 1)]
    elif values.dim() == 2:
        return codes.to(dtype)
    return (codes.float() * factor * (values[..., None] if values.dim() > 0 else values)).to(dtype)


def _prepared(
    tensors: tuple[Any, Any, Any], scales: Scales, out_dtype: torch.dtype | None, scale: float | None
) -> tuple[torch.dtype, float, list[tuple[Tensor | None, float]]]:
    """The output's dtype, the factor of the scores, and for each tensor its scales as (tensor, factor)."""
    dtype = torch.bfloat16 if out_dtype is None else out_dtype
    if dtype not in OUT_DTYPES:
        msg = f"out_dtype must be torch.bfloat16 or torch.float16; found {out_dtype}; convert the result"
        raise DtypeError(msg)
    if not is_compiling():
        for name, tensor in zip("qkv", tensors, strict=True):
            arguments.check_is_dense_tensor(name, tensor)
    q = tensors[0]
    factor = float(max(q.shape[-1:], default=1) or 1) ** -0.5 if scale is None else float(scale)
    return dtype, factor, [split_scale(name, one) for name, one in zip(_NAMES, scales, strict=True)]


def _call(
    operator: Callable[..., tuple[Tensor, Tensor]], name: str, operands: tuple[Any, ...], return_lse: bool
) -> Any:
    try:
        out, lse = operator(*operands)
    except Exception as error:
        cause = explain(error, name, operands)
        if cause is error:
            raise
        raise cause from error
    return (out, lse) if return_lse else out


def _is_default(value: Any) -> bool:
    return value is None or (type(value) is float and value == 0.0)


def _in(dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, Any]:
    """Converts an additive mask to the dtype of the dequantised tensors."""
    mask = options.get("attn_mask")
    if not isinstance(mask, Tensor) or mask.dtype is torch.bool:
        return dict(options)
    return {**options, "attn_mask": mask.to(dtype)}


def dequantize(codes: Tensor, values: Tensor | None, factor: float, dtype: torch.dtype) -> Tensor:
    """Codes times their scale, in float32, then rounded once; exact where scales are powers of two that the type holds."""
    wide = codes.float() * factor
    if values is not None and values.dim() == 3:  # per block of 128 or 64 rows
        rows = codes.shape[2]
        block = 128 if values.shape[2] == -(-rows // 128) else 64
        values = values.repeat_interleave(block, dim=2)[..., :rows, None]
    elif values is not None and values.dim() in (1, 2):
        values = values[..., None, None]
    return (wide if values is None else wide * values).to(dtype)


@at_trace_time
def _has_kernel(device: torch.device) -> bool:
    if device.type != "cuda" or os.environ.get("FLASHMOE_KERNEL", "") not in ("", "sm90"):
        return device.type == "meta"
    return torch.cuda.get_device_capability(device) == (9, 0)


def _is_differentiated(*tensors: Any) -> bool:
    given = [one for one in tensors if isinstance(one, Tensor)]
    return (
        (is_grad_enabled() and any(one.requires_grad for one in given))
        or transforms_are_active()
        or has_tangent(*given)
    )
