"""Attention over two sets of keys, merged from the results over each: one kernel on a GPU, torch operations elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.compiler import is_compiling
from torch.nn import Parameter

from flashmoe import _extension
from flashmoe.checks import shape_of
from flashmoe.errors import ArgumentTypeError, DeviceError, DtypeError, ShapeError
from flashmoe.transforms import has_tangent

_extension.load()
MAX_HEAD_DIM = 512  # of the kernel


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention over two sets of keys into attention over both, for example for a shared prefix or ring attention.

    Args:
        out_a, out_b: [B, H, S, D] or ragged [N, H, D], as the attention functions return them; of the same shape and dtype.
        lse_a, lse_b: [B, H, S] or [H, N], float32. -inf where a row sees no key.

    Returns:
        (out, lse) in the shapes and dtypes of the inputs, computed in float32, or in float64 for float64 inputs. A row that sees no
        key in either has out 0 and lse -inf. At most one input may include a sink. Differentiable in all four inputs, any number of
        times.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError: the two results do not match; the message says why.
    """
    _check_parts(out_a, lse_a, out_b, lse_b)
    rank = out_a.dim()
    rows = (out_a.shape[1], out_a.shape[0]) if rank == 3 else tuple(out_a.shape[:-1])
    if rank not in (3, 4) or out_a.shape != out_b.shape or tuple(lse_a.shape) != rows or lse_a.shape != lse_b.shape:
        found = ", ".join(shape_of(t) for t in (out_a, lse_a, out_b, lse_b))
        msg = f"out must be [B, H, S, D] with lse [B, H, S], or [N, H, D] with lse [H, N], and both results with equal shapes; found {found}"
        raise ShapeError(msg)
    parts = (out_a, lse_a, out_b, lse_b)
    if not _has_kernel(*parts) or transforms_are_active() or has_tangent(*parts):
        return _merged(*parts)
    if is_grad_enabled() and any(part.requires_grad for part in parts):
        merged: tuple[Tensor, Tensor] = _Merge.apply(*parts)  # type: ignore[no-untyped-call]
        return merged
    dense = torch.preserve_format if out_a.stride(-1) == 1 else torch.contiguous_format  # of columns beside each other
    out = torch.empty_like(out_a, memory_format=dense)
    lse = torch.empty_like(lse_a, memory_format=torch.contiguous_format)
    _call(*parts, out, lse)
    return out, lse


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """:func:`merge_attention` of the four, written to ``out`` and ``lse``. ``out`` may be float32 even if ``part`` is not. No gradients."""
    if _has_kernel(out, lse, part, part_lse):
        _call(out, lse, part, part_lse, out, lse)
        return
    for old, new in zip((out, lse), _merged(out, lse, part, part_lse), strict=True):
        old.copy_(new)


def _has_kernel(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> bool:
    """Whether the GPU's kernel can merge these; under a compiler torch operations are used, because it fuses them itself."""
    return (
        out_a.is_cuda
        and out_b.dtype in (torch.float16, torch.bfloat16)
        and out_a.dtype in (out_b.dtype, torch.float32)
        and lse_a.dtype == lse_b.dtype == torch.float32
        and 1 <= out_a.shape[-1] <= MAX_HEAD_DIM
        and lse_a.numel() < 2**31
        and all(type(part) in (Tensor, Parameter) for part in (out_a, lse_a, out_b, lse_b))
        and not is_compiling()
    )


def _call(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    parts = (part if part.stride(-1) == 1 else part.contiguous() for part in (out_a, lse_a, out_b, lse_b))
    torch.ops.flashmoe._attention_merge.default(*parts, out, lse)


class _Merge(torch.autograd.Function):
    """The forward pass is the kernel; the backward pass recomputes the merge with torch operations and differentiates it."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*parts)
        out, lse = merge_attention(*parts)
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[3]):
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts, create_graph = ctx.saved_tensors, is_grad_enabled()
        wanted = [part for part, needed in zip(parts, ctx.needs_input_grad, strict=True) if needed]
        with torch.enable_grad():
            merged = _merged(*parts)
        count = 1 + merged[1].requires_grad
        found = iter(torch.autograd.grad(merged[:count], wanted, grads[:count], create_graph=create_graph))
        return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


def _merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    # Subtracting the larger lse avoids -inf - -inf, and neither weight overflows.
    largest = torch.maximum(lse_a, lse_b).detach()
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weight_a, weight_b = (lse_a - largest).exp(), (lse_b - largest).exp()
    total = weight_a + weight_b
    is_empty = total == 0
    safe = torch.where(is_empty, 1.0, total)
    lse = torch.where(is_empty, -torch.inf, largest + safe.log())
    part_a, part_b = weight_a / safe, weight_b / safe
    if out_a.dim() == 3:
        part_a, part_b = part_a.mT, part_b.mT
    # Whatever an input of weight 0 contains is ignored.
    out = _weighted(out_a, part_a) + _weighted(out_b, part_b)
    return out.to(out_a.dtype), lse


def _check_parts(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> None:
    """Raise unless all are tensors of floating types on one device, out_a and out_b of one dtype, lse_a and lse_b of one."""
    parts = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, part in parts.items():
        if not isinstance(part, Tensor):
            msg = f"{name} must be a torch.Tensor, as the attention functions return it; found {type(part).__name__}"
            raise ArgumentTypeError(msg)
        if part.device != out_a.device:
            msg = f"{name} must be on out_a's device; found {part.device} and {out_a.device}; move it with .to(out_a.device)"
            raise DeviceError(msg)
        first = f"{name[:-1]}a"
        if part.dtype != parts[first].dtype or not part.is_floating_point():
            found = f"{part.dtype} in {name} and {parts[first].dtype} in {first}"
            msg = f"both results must have one floating dtype; found {found}; convert them with .to()"
            raise DtypeError(msg)


def _weighted(out: Tensor, weight: Tensor) -> Tensor:
    weight = weight.unsqueeze(-1)
    return torch.where(weight == 0, 0.0, out.to(torch.promote_types(out.dtype, torch.float32))) * weight
