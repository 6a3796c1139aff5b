"""flashmoe behind torch's own attention functions.

While active, dense attention that torch hands to its flash backend is computed here: ``F.scaled_dot_product_attention`` (eager and
compiled) and torch's context parallel end in the operators of :data:`KERNELS`, whose implementations are replaced in torch's
dispatcher. Torch's own kernels, kept from before, serve what flashmoe has not: dropout, a debug mask, float64. Ragged attention
(``torch.nn.attention.varlen.varlen_attn``, jagged nested tensors) ends in other operators, which stay torch's.

On Hopper torch asks cuDNN before its flash backend. While active cuDNN's attention is therefore switched off, as
``torch.backends.cuda.enable_cudnn_sdp(False)`` does; ``deactivate`` puts the switch back.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import register_flash_attention_impl

from flashmoe import _extension, routing

_extension.load()
NAME = "flashmoe"  # in torch's registry of flash attention implementations

Kernel = Callable[..., Any]


@dataclass
class _Active:
    """What a deactivation undoes."""

    library: torch.library.Library
    cudnn_was_enabled: bool

    def remove(self) -> None:
        """The name that torch's registry calls (torch 2.12 and later)."""
        self.library._destroy()
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn_was_enabled)


_active: _Active | None = None
_torch_kernels: dict[str, Any] = {}


def activate() -> None:
    """Let torch's attention functions run on flashmoe from now on, wherever torch would choose its flash backend.

    Forward and backward, eager and compiled; compile after activating, because a compiled graph keeps the backend that torch
    chose when it was traced. What flashmoe lacks runs on torch's kernel as before, and FLASHMOE_FALLBACK says what then
    happens (``allow``, ``warn`` or ``error``). A second call changes nothing.

    ``torch.nn.attention.list_flash_attention_impls`` knows the implementation as "flashmoe".
    """
    if _active is None:
        torch.nn.attention.activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """Undo :func:`activate`; torch's own kernels and its choice of backends are as before. Without effect if not active."""
    global _active
    if _active is None:
        return
    active, _active = _active, None
    restore = getattr(torch.nn.attention, "restore_flash_attention_impl", None)
    if restore is not None and torch.nn.attention.current_flash_attention_impl() == NAME:
        restore()  # calls active.remove()
        return
    active.remove()
    registry = torch.nn.attention._registry
    if getattr(registry, "_FLASH_ATTENTION_ACTIVE", None) == NAME:  # torch without a way to restore
        registry._FLASH_ATTENTION_ACTIVE = None


def is_active() -> bool:
    """Whether torch's attention functions run on flashmoe."""
    return _active is not None


@contextlib.contextmanager
def activated() -> Iterator[None]:
    """:func:`activate` for the duration of a block; what was active before it stays so."""
    was_active = is_active()
    activate()
    try:
        yield
    finally:
        if not was_active:
            deactivate()


def _install() -> _Active:
    """Called by torch's registry. Keeps torch's kernels, then puts ours before them."""
    global _active
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Warning only once for all operators"
        )  # that one is overridden is the aim
        for name, (keys, function) in KERNELS.items():
            for key in keys:
                _torch_kernels.setdefault(f"{name}/{key}", torch.library.get_kernel(f"aten::{name}", key))
                library.impl(name, _with_fallback(name, key, function), key, with_keyset=True, allow_override=True)
    _active = _Active(library, torch.backends.cuda.cudnn_sdp_enabled())
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    return _active


class _LackingError(Exception):
    """flashmoe does not compute this; the text says why."""


def _with_fallback(name: str, key: str, function: Kernel) -> Kernel:
    def call(keyset: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except _LackingError as lack:
            routing.note_fallback(str(lack))
        return _torch_kernels[f"{name}/{key}"].call_boxed(keyset, *arguments, **options)

    return call


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _LackingError(reason)


def _check(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, attn_mask: Tensor | None = None) -> None:
    obstacle = routing.find_obstacle(q, k, v, attn_mask, dropout_p, False, None, True)
    if obstacle is not None:
        raise _LackingError(obstacle)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = torch.ops.flashmoe.flash_attention_forward.default(
        _dense(q), _dense(k), _dense(v), _scale(scale, q), causal
    )
    return result


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.flashmoe.flash_attention_backward.default(
        grad, None, _dense(q), _dense(k), _dense(v), out, lse, _scale(scale, q), causal
    )
    return result


def _no_dropout_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """What torch's kernels return for the state of the random numbers, of the shapes that compiled graphs assert."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.zeros((), dtype=torch.uint64, device=device)


# Torch's dense flash attention and its gradient, on CUDA and on the CPU. Arguments as in their schemas.


def _sdpa_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _require(not return_debug_mask, "a debug mask is asked for; flashmoe stores no scores")
    _check(q, k, v, dropout_p)
    out, lse = _forward(q, k, v, scale, is_causal)
    return out, lse, None, None, q.shape[2], k.shape[2], *_no_dropout_state(q.device), q.new_empty(0)


def _sdpa_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _require(cum_seq_q is None and cum_seq_k is None, "lengths are given to the dense operator")
    _check(q, k, v, dropout_p)
    return _backward(grad_out, q, k, v, out, lse, scale, is_causal)


def _sdpa_forward_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, dropout_p, attn_mask)
    _require(attn_mask is None, "attn_mask is given")
    # This operator's causal mask is aligned top-left, ours bottom-right.
    _require(not is_causal or q.shape[2] == k.shape[2], "is_causal with different lengths")
    return _forward(q, k, v, scale, is_causal)


def _sdpa_backward_cpu(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, dropout_p, attn_mask)
    _require(attn_mask is None, "attn_mask is given")
    _require(not is_causal or q.shape[2] == k.shape[2], "is_causal with different lengths")
    _require(lse.dtype == torch.float32, "torch's own forward pass left a log-sum-exp in another dtype")
    return _backward(grad_out, q, k, v, out, lse, scale, is_causal)


KERNELS: dict[str, tuple[tuple[str, ...], Kernel]] = {
    "_scaled_dot_product_flash_attention": (("CUDA",), _sdpa_forward),
    "_scaled_dot_product_flash_attention_backward": (("CUDA",), _sdpa_backward),
    "_scaled_dot_product_flash_attention_for_cpu": (("CPU",), _sdpa_forward_cpu),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (("CPU",), _sdpa_backward_cpu),
}

register_flash_attention_impl(NAME, register_fn=_install)
