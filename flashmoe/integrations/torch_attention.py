"""flashmoe behind torch's own attention functions.

While active, it computes the attention that torch dispatches to its flash backend: ``F.scaled_dot_product_attention`` (eager and
compiled), also with jagged nested tensors, ``torch.nn.attention.varlen.varlen_attn`` and torch's context parallel all end in the operators
of :data:`~flashmoe.integrations.torch_kernels.KERNELS`, whose implementations are replaced in torch's dispatcher. Torch's own
kernels are kept and run what flashmoe lacks: ALiBi, a debug mask, float64. With FLASHMOE_FALLBACK=warn or error,
``scaled_dot_product_attention`` itself is watched as well, for calls that torch dispatches to another backend; calls with jagged tensors
are always watched (:mod:`~flashmoe.integrations.torch_jagged`).

On Hopper torch prefers cuDNN to its flash backend. cuDNN's attention is therefore switched off while active, as with
``torch.backends.cuda.enable_cudnn_sdp(False)``; ``deactivate`` restores the switch.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, register_flash_attention_impl

from flashmoe import fallback
from flashmoe.attn.arguments import DTYPES
from flashmoe.errors import ArgumentError
from flashmoe.integrations import torch_jagged
from flashmoe.integrations.torch_kernels import KERNELS, Kernel, LackingError

NAME = "flashmoe"  # in torch's registry of flash attention implementations
SDPA = "scaled_dot_product_attention"


@dataclass
class _Active:
    """The state that a deactivation restores."""

    library: torch.library.Library
    cudnn_was_enabled: bool

    def remove(self) -> None:
        """The method that torch's registry calls (torch 2.12 and later)."""
        self.library._destroy()
        torch_jagged.unwatch()
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn_was_enabled)


_active: _Active | None = None
_torch_kernels: dict[str, Any] = {}


def activate() -> None:
    """Run torch's attention functions on flashmoe from now on, wherever torch would choose its flash backend.

    Forward and backward, eager and compiled; compile after activating, because a compiled graph keeps the backend that torch
    chose when it was traced. Calls that flashmoe does not support run on torch's kernel as before, and FLASHMOE_FALLBACK says what
    happens then (``allow``, ``warn`` or ``error``; set it before activating: dense calls that torch dispatches to other backends are
    only watched if it is ``warn`` or ``error`` at this point). A second call changes nothing.

    ``torch.nn.attention.list_flash_attention_impls`` lists the implementation as "flashmoe".
    """
    if _active is None:
        torch.nn.attention.activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """Undo :func:`activate`; torch's own kernels and its choice of backends are restored. No effect if not active."""
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
    """:func:`activate` for the duration of a block; if already active before, it stays active."""
    was_active = is_active()
    activate()
    try:
        yield
    finally:
        if not was_active:
            deactivate()


def _install() -> _Active:
    """Called by torch's registry. Saves torch's kernels, then overrides them with flashmoe's."""
    global _active
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # Overriding an operator is the purpose
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, (keys, function) in KERNELS.items():
            for key in keys:
                if f"{name}/{key}" not in _torch_kernels:
                    _torch_kernels[f"{name}/{key}"] = _torch_kernel(name, key)
                library.impl(name, _with_fallback(name, key, function), key, with_keyset=True, allow_override=True)
        if fallback.fallback_policy() != "allow":  # otherwise no call pays for it
            kernel = _torch_kernels.setdefault(SDPA, _torch_kernel(SDPA, "CPU"))
            library.impl(
                SDPA, _with_fallback_note(kernel), "CompositeImplicitAutograd", with_keyset=True, allow_override=True
            )
    torch_jagged.watch()
    _active = _Active(library, torch.backends.cuda.cudnn_sdp_enabled())
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    return _active


def _torch_kernel(name: str, key: str) -> Any:
    """torch's own kernel, or None: torch has none for ragged attention on the CPU."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return None


class _Falling(threading.local):
    """Whether this thread is inside one of torch's kernels, which call other replaced operators."""

    now = False


_falling = _Falling()


def _with_fallback(name: str, key: str, function: Kernel) -> Kernel:
    def call(keyset: Any, *arguments: Any, **options: Any) -> Any:
        kernel = _torch_kernels[f"{name}/{key}"]
        if _falling.now:
            return kernel.call_boxed(keyset, *arguments, **options)
        try:
            return function(*arguments, **options)
        except LackingError as lack:
            reason = str(lack)
        if kernel is None:
            msg = f"{reason}; and torch has no {name} on this device"
            raise ArgumentError(msg)
        fallback.note_fallback(reason)
        _falling.now = True
        try:
            return kernel.call_boxed(keyset, *arguments, **options)
        finally:
            _falling.now = False

    return call


def _with_fallback_note(kernel: Any) -> Kernel:
    """torch's ``scaled_dot_product_attention``, with a fallback note for each call that is not dispatched to the flash backend."""

    def call(
        keyset: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        if query.device.type in DTYPES and not _falling.now:
            with torch._C._DisableTorchDispatch():  # for fake tensors torch's kernel also calls their device's dispatch
                choice = SDPBackend(torch._fused_sdp_choice(*given, scale=scale, enable_gqa=enable_gqa))
            if choice not in (SDPBackend.FLASH_ATTENTION, SDPBackend.ERROR):
                backend = choice.name.lower().replace("_", " ")
                fallback.note_fallback(f"torch chose its {backend} backend for this call, not flash")
        return kernel.call_boxed(keyset, *given, scale=scale, enable_gqa=enable_gqa)

    return call


register_flash_attention_impl(NAME, register_fn=_install)
