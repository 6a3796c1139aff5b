"""Rules for autocast and torch.func.vmap.

Both sit above autograd in torch's dispatcher and run only when asked for, so a plain call pays nothing for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_AUTOCAST_KEYS = (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"))
_registrations: list[torch.library.Library] = []


def register() -> None:
    """Called once by ``_extension.load``."""
    library = torch.library.Library("flashmoe", "FRAGMENT")
    for device_type, key in _AUTOCAST_KEYS:
        for name in ("flash_attention_forward", "_flash_attention_inference"):
            library.impl(name, _autocast_rule(name, device_type, key), key)
    torch.library.register_vmap("flashmoe::flash_attention_forward", _vmap_forward, lib=library)
    _registrations.append(library)  # a Library drops its registrations when it is collected


def autocast_dtype(tensor: Tensor, device_type: str, target: torch.dtype) -> torch.dtype:
    """The dtype that autocast gives ``tensor``: torch casts floating tensors of the device, but never float64."""
    eligible = tensor.is_floating_point() and tensor.dtype is not torch.float64 and tensor.device.type == device_type
    return target if eligible else tensor.dtype


def _autocast_rule(name: str, device_type: str, key: str) -> Any:
    operator = getattr(torch.ops.flashmoe, name).default
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast_and_call(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Any:
        """As scaled_dot_product_attention: every floating input in autocast's dtype, autocast off below."""
        target = torch.get_autocast_dtype(device_type)
        q, k, v = (t.to(autocast_dtype(t, device_type, target)) for t in (q, k, v))
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(q, k, v, scale, causal)

    return cast_and_call


def _vmap_forward(
    info: Any, in_dims: tuple[int | None, ...], q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """The mapped dimension becomes part of the batch."""
    merged = [merge_batch(t, dim, info.batch_size) for t, dim in zip((q, k, v), in_dims[:3], strict=True)]
    out, lse = torch.ops.flashmoe.flash_attention_forward.default(*merged, scale, causal)
    return (split_batch(out, info.batch_size), split_batch(lse, info.batch_size)), (0, 0)


def merge_batch(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """[..., size, ...] with the mapped dimension at ``dim`` (None: shared by all) to [size * batch, heads, ...]."""
    front = tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return front.flatten(0, 1)


def split_batch(tensor: Tensor, size: int) -> Tensor:
    """[size * batch, ...] to [size, batch, ...]; the division by size 0 leaves an empty batch."""
    batch = tensor.shape[0] // size if size else 0
    return tensor.reshape(size, batch, *tensor.shape[1:])
