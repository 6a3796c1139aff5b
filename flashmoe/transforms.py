"""What autocast and torch.func's transforms do to tensors; shared by all operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashmoe.errors import DifferentiationError


def autocast_dtype(tensor: Tensor, device_type: str, target: torch.dtype) -> torch.dtype:
    """The dtype that autocast gives ``tensor``: torch casts floating tensors of the device, but never float64. 8-bit floats are
    not cast either, because they are useless without their scales."""
    dtype = tensor.dtype
    eligible = dtype.is_floating_point and dtype is not torch.float64 and dtype.itemsize > 1
    return target if eligible and tensor.device.type == device_type else dtype


def autocasted(*tensors: Any) -> tuple[Any, ...]:
    """``tensors`` as autocast would pass them to an operator on the first tensor's device; non-tensors are returned unchanged."""
    device_type = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return tensors
    target = torch.get_autocast_dtype(device_type)
    return tuple(t.to(autocast_dtype(t, device_type, target)) if isinstance(t, Tensor) else t for t in tensors)


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether a forward-mode derivative is being computed through any of the tensors; None counts as no tensor."""
    if forward_ad._current_level < 0:  # no dual level is open: the usual case, decided in 0.1 us
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def function_under_transforms(
    call: Callable[..., Any],
    setup_context: Callable[..., None],
    gradient: Callable[..., Any],
    vmap: Callable[..., Any],
    no_forward_mode: str,
) -> Callable[..., Any]:
    """``call`` with a gradient that torch.func can use. torch.func cannot use that of ``torch.library.register_autograd``, which also
    does not reject forward mode: tangents would be lost silently. The arguments are those of an ``Operator``."""

    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise DifferentiationError(no_forward_mode)

    rules = {"forward": call, "setup_context": setup_context, "backward": gradient, "vmap": vmap, "jvp": jvp}
    members = {name: staticmethod(rule) for name, rule in rules.items()}
    apply: Callable[..., Any] = type("UnderTransforms", (torch.autograd.Function,), members).apply  # type: ignore[attr-defined]
    return apply


def merge_batches(tensors: Sequence[Any], dims: Sequence[int | None], size: int) -> list[Any]:
    """Moves each tensor's mapped dimension, at index ``dim`` (None: shared by all), into the batch.

    [..., size, ...] becomes [size * batch, heads, ...]; None stays None.
    """
    return [None if t is None else _merge_batch(t, dim, size) for t, dim in zip(tensors, dims, strict=False)]


def _merge_batch(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    front = tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    merged = front.flatten(0, 1)
    return merged if merged.stride(-1) == 1 else merged.contiguous()


def split_batch(tensor: Tensor, size: int, like: Tensor, dim: int | None) -> Tensor:
    """[size * batch, ...] to [size, batch, ...]; the batch is that of ``like``, whose mapped dimension is ``dim``."""
    batch = like.shape[1 if dim == 0 else 0]
    return tensor.reshape(size, batch, *tensor.shape[1:])
