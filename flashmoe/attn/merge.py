"""Attention over two sets of keys, from the results over each.

Importing this module imports torch, and nothing compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmoe.checks import shape_of
from flashmoe.errors import ArgumentTypeError, DeviceError, DtypeError, ShapeError


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both parts, from the results of attention over each: of a shared prefix, of ring attention.

    Args:
        out_a, out_b: [B, H, S, D] or ragged [N, H, D], as the attention functions return them; one shape and dtype.
        lse_a, lse_b: [B, H, S] or [H, N], float32. -inf for a part without visible keys.

    Returns:
        (out, lse) in the shapes and dtypes of the parts, computed in float32, or in float64 where they are that. A row that sees no
        key in either has out 0 and lse -inf. At most one part may have counted a sink. Differentiable in all four, any number of
        times.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentTypeError: the parts do not belong together; the message says why.
    """
    _check_parts(out_a, lse_a, out_b, lse_b)
    rank = out_a.dim()
    rows = (out_a.shape[1], out_a.shape[0]) if rank == 3 else tuple(out_a.shape[:-1])
    if rank not in (3, 4) or out_a.shape != out_b.shape or tuple(lse_a.shape) != rows or lse_a.shape != lse_b.shape:
        found = ", ".join(shape_of(t) for t in (out_a, lse_a, out_b, lse_b))
        msg = f"out must be [B, H, S, D] with lse [B, H, S], or [N, H, D] with lse [H, N], both parts alike; found {found}"
        raise ShapeError(msg)
    # Differences to the larger: -inf - -inf does not arise, and neither weight overflows.
    largest = torch.maximum(lse_a, lse_b).detach()
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weight_a, weight_b = (lse_a - largest).exp(), (lse_b - largest).exp()
    total = weight_a + weight_b
    is_empty = total == 0
    safe = torch.where(is_empty, 1.0, total)
    lse = torch.where(is_empty, -torch.inf, largest + safe.log())
    part_a, part_b = weight_a / safe, weight_b / safe
    if rank == 3:
        part_a, part_b = part_a.mT, part_b.mT
    # A part of weight 0 may hold anything.
    out = _weighted(out_a, part_a) + _weighted(out_b, part_b)
    return out.to(out_a.dtype), lse


def _check_parts(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> None:
    """Tensors of floating types, alike in dtype and on one device."""
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
            msg = f"both parts must have one floating dtype; found {found}; convert them with .to()"
            raise DtypeError(msg)


def _weighted(out: Tensor, weight: Tensor) -> Tensor:
    weight = weight.unsqueeze(-1)
    return torch.where(weight == 0, 0.0, out.to(torch.promote_types(out.dtype, torch.float32))) * weight
