"""Watches which backend torch chooses for attention of jagged nested tensors, and notes each call that does not get the flash backend.

torch makes that choice in Python, before any operator is called (``torch.nested._internal.sdpa``), so the dispatcher does not see it.
While flashmoe is active the function that chooses is wrapped; :func:`unwatch` restores torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nested._internal import sdpa
from torch.nn.attention import SDPBackend

from flashmoe import fallback
from flashmoe.attn import sdpa_dispatch
from flashmoe.attn.sdpa_dispatch import Backend, Route

# The limits of torch's flash backend.
DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256

CALLER = 6  # frames up from the warning: note_fallback, this wrapper, torch's attention, its two __torch_function__s, the caller

_torchs_choice: Any = getattr(sdpa, "_select_sdp_backend", None)


def watch() -> None:
    """Note each jagged call that torch dispatches to another backend, following FLASHMOE_FALLBACK when the call is made or traced."""
    if _torchs_choice is not None:  # otherwise this torch chooses elsewhere
        vars(sdpa)["_select_sdp_backend"] = _choose
        sdpa_dispatch.jagged_route = route


def unwatch() -> None:
    """Undo :func:`watch`."""
    if _torchs_choice is not None:
        vars(sdpa)["_select_sdp_backend"] = _torchs_choice
        sdpa_dispatch.jagged_route = None


def _choose(query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> SDPBackend:
    choice: SDPBackend = _torchs_choice(query, key, value, *others, **more)
    if choice not in (SDPBackend.FLASH_ATTENTION, SDPBackend.ERROR):  # torch raises the error
        fallback.note_fallback(_reason(choice, query, key, value), stacklevel=CALLER)
    return choice


def route(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Route:
    """Where attention of jagged tensors is computed while flashmoe is active."""
    try:
        sdpa._validate_sdpa_input(query, key, value, attn_mask, dropout_p, is_causal, scale)
    except ValueError as error:
        return Route(Backend.TORCH, f"torch rejects these jagged tensors: {error}")
    query, key, value, _ = sdpa._autocast(query, key, value, None)
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if query.dim() > 3 and query._ragged_idx == 1:  # type: ignore[attr-defined]
        # The ragged dimension comes before the heads: torch treats this as dense attention of the values.
        given = (query.values(), key.values(), value.values(), attn_mask, dropout_p, is_causal)
        unsupported_reason = sdpa_dispatch.find_unsupported(*given, scale, enable_gqa)
        if unsupported_reason is not None:
            return Route(Backend.TORCH, unsupported_reason)
        choice = SDPBackend(torch._fused_sdp_choice(*given, scale=scale, enable_gqa=enable_gqa))
    else:
        choice = _torchs_choice(*given, enable_gqa)
    if choice == SDPBackend.ERROR:
        return Route(Backend.TORCH, f"torch has no backend for these jagged tensors: {_why(query, key, value)}")
    if choice != SDPBackend.FLASH_ATTENTION:
        return Route(Backend.TORCH, _reason(choice, query, key, value))
    return Route(
        Backend.FLASHMOE, "torch runs these jagged tensors on its flash backend, which flashmoe replaces while active"
    )


def _reason(choice: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> str:
    backend = choice.name.lower().replace("_", " ")
    return f"torch chose its {backend} backend for these jagged tensors, not flash: {_why(query, key, value)}"


def _why(query: Tensor, key: Tensor, value: Tensor) -> str:
    """The condition of torch's flash backend that is not met."""
    if not torch.backends.cuda.flash_sdp_enabled():
        return "flash is switched off (sdpa_kernel or torch.backends.cuda.enable_flash_sdp)"
    if query.device.type != "cuda":
        return f"flash supports jagged tensors on a GPU, not on {query.device.type}"
    if query.dtype not in DTYPES:
        return f"flash supports float16 and bfloat16, not {query.dtype}"
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) == 4:
        return f"flash supports four dimensions [B, H, S, D], not {len(q)}"
    if not q[3] == k[3] == v[3] or q[3] % 8 != 0 or q[3] > MAX_HEAD_DIM:
        found = f"{q[3]}, {k[3]} and {v[3]}"
        return (
            f"flash supports one head dim for query, key and value, a multiple of 8 up to {MAX_HEAD_DIM}, not {found}"
        )
    if not q[1] == k[1] == v[1]:
        return f"flash supports one number of heads for query, key and value, not {q[1]}, {k[1]} and {v[1]}"
    if any(tensor._get_min_seqlen() == 0 for tensor in (query, key, value)):  # type: ignore[attr-defined]
        return "flash does not support empty sequences"
    return "torch.backends.cuda.can_use_flash_attention(..., debug=True) says why flash does not support them"
