"""Implementations that replace torch's flash attention operators: dense, its CPU form, and ragged; each with its gradient.

Arguments and results follow the operators' schemas in torch 2.10 and later. Arguments that a later torch adds arrive in ``others`` and
must be None. A call that flashmoe does not support raises :class:`LackingError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashmoe import _extension
from flashmoe.attn import sdpa_dispatch
from flashmoe.attn.arguments import DTYPES, explain_varlen
from flashmoe.attn.dropout import draw_state
from flashmoe.attn.options import Varlen

_extension.load()
# An OpOverload's __call__ only forwards to this.
_forward_operator = torch.ops.flashmoe.flash_attention_forward.default._op
_backward_operator = torch.ops.flashmoe.flash_attention_backward.default._op
_ragged_forward_operator = torch.ops.flashmoe.attention_varlen_forward.default._op
_ragged_backward_operator = torch.ops.flashmoe.attention_varlen_backward.default._op
_dropout_forward_operator = torch.ops.flashmoe.attention_dropout_forward.default._op
_dropout_backward_operator = torch.ops.flashmoe.attention_dropout_backward.default._op

Kernel = Callable[..., Any]


class LackingError(Exception):
    """flashmoe does not support this call; the text says why."""


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise LackingError(reason)


def _require_computed(dropout_p: float, q: Tensor) -> None:
    _require(0.0 <= dropout_p < 1.0, sdpa_dispatch.WRONG_DROPOUT)
    if q.dtype not in DTYPES[q.device.type]:
        msg = f"there is no kernel for {q.dtype} on {q.device.type}"
        raise LackingError(msg)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _random_state(q: Tensor, dropout_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Seed and offset from the device's generator, redrawn by each replay of a captured graph; an unused tensor and the debug mask, in the
    shapes that compiled graphs assert. Without dropout none of them is read."""
    if dropout_p:
        state = draw_state(q.device).view(torch.uint64)
    else:
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
    return state, torch.empty((), dtype=torch.uint64, device=q.device), q.new_empty(0)


def _as_ragged(scale: float, causal: bool) -> tuple[Any, ...]:
    """The ragged operators' arguments after lengths and mask, for dense tensors."""
    return 0, 0, scale, -1, 0 if causal else -1, 0.0


def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float | None, causal: bool, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _require_computed(dropout_p, q)
    _require(dropout_p == 0.0 or state is not None, NO_STATE)
    given = (_dense(q), _dense(k), _dense(v))
    result: tuple[Tensor, Tensor]
    try:
        if dropout_p and state is not None:
            numbers = (*_as_ragged(_scale(scale, q), causal), 0)
            result = _dropout_forward_operator(*given, *[None] * 6, *numbers, dropout_p, state.view(torch.int64))
        else:
            result = _forward_operator(*given, _scale(scale, q), causal)
    except Exception as error:
        raise _explained(error, q, k, v) from error
    return result


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    scale: float | None,
    causal: bool,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _require_computed(dropout_p, q)
    _require(dropout_p == 0.0 or state is not None, NO_STATE)
    given = (grad, None, _dense(q), _dense(k), _dense(v))
    try:
        if dropout_p and state is not None:
            numbers = (*_as_ragged(_scale(scale, q), causal), 7, dropout_p, state.view(torch.int64))
            dq, dk, dv, _ = _dropout_backward_operator(*given, *[None] * 5, out, lse, *numbers)
        else:
            dq, dk, dv = _backward_operator(*given, out, lse, _scale(scale, q), causal)
    except Exception as error:
        raise _explained(error, q, k, v) from error
    return dq, dk, dv


def _explained(error: Exception, q: Tensor, k: Tensor, v: Tensor) -> Exception:
    """Why the operator rejected the call; searched only then, because it takes longer than the call."""
    unsupported_reason = sdpa_dispatch.find_unsupported(q, k, v, None, 0.0, False, None, True)
    return error if unsupported_reason is None else LackingError(unsupported_reason)


# Dense: [B, H, S, D].


def sdpa_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _require(not return_debug_mask, NO_DEBUG_MASK)
    state, *others = _random_state(q, dropout_p)
    out, lse = _forward(q, k, v, dropout_p, scale, is_causal, state)
    return out, lse, None, None, q.shape[2], k.shape[2], state, *others


def sdpa_backward(
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
    _require(cum_seq_q is None and cum_seq_k is None, "lengths are passed to the dense operator")
    return _backward(grad_out, q, k, v, out, lse, dropout_p, scale, is_causal, philox_seed)


def sdpa_forward_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    _require_square(q, k, is_causal, attn_mask)
    return _forward(q, k, v, dropout_p, scale, is_causal)


def sdpa_backward_cpu(
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
    _require_square(q, k, is_causal, attn_mask)
    _require(lse.dtype == torch.float32, "torch's own forward pass left a log-sum-exp in another dtype")
    return _backward(grad_out, q, k, v, out, lse, dropout_p, scale, is_causal)


def _require_square(q: Tensor, k: Tensor, is_causal: bool, attn_mask: Tensor | None) -> None:
    _require(attn_mask is None, "attn_mask is given")
    # The CPU operator's causal mask is aligned top-left, ours bottom-right.
    _require(not is_causal or q.shape[2] == k.shape[2], "is_causal with different lengths")


NO_STATE = "dropout_p is not 0, and this operator of torch has no result for the random state"
NO_DEBUG_MASK = "a debug mask is requested; flashmoe does not store scores"


# Ragged: [tokens, H, D] with cumulative lengths. torch also calls these operators for dense [B, S, H, D], from its own dense kernel.


def ragged_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    compute_auxiliary: bool = True,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, state, unused, debug mask); with block_table k and v are pages [pages, page_size, H, D]."""
    _require(not return_debug_mask, NO_DEBUG_MASK)
    _require(cum_seq_q is not None, NO_LENGTHS)
    _require_computed(dropout_p, q)
    _require_nothing_else(others)
    left, right = _sides(window_size_left, window_size_right, is_causal)
    if block_table is not None:
        cum_seq_k = None  # its numbers count rows; with pages the lengths are in seqused_k
    lengths = (cum_seq_q, cum_seq_k, seqused_k, block_table, None, None)
    numbers = (max_q, max_k, _scale(scale, q), left, right, 0.0, num_splits or 0)
    given = (_dense(q), _dense(k), _dense(v), *lengths, *numbers)
    state, *rest = _random_state(q, dropout_p)
    try:
        if dropout_p:
            out, lse = _dropout_forward_operator(*given, dropout_p, state.view(torch.int64))
        else:
            out, lse = _ragged_forward_operator(*given)
    except Exception as error:
        raise _explained_ragged(error, given) from error
    return _laid_out(out, q), lse, state, *rest


def ragged_backward(
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
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    _require(cum_seq_q is not None, NO_LENGTHS)
    _require_computed(dropout_p, q)
    _require_nothing_else(others)
    left, right = _sides(window_size_left, window_size_right, is_causal)
    lengths = (cum_seq_q, cum_seq_k, None)
    numbers = (max_q, max_k, _scale(scale, q), left, right, 0.0)
    rows, keys, values = _dense(q), _dense(k), _dense(v)
    call = _dropout_backward_operator if dropout_p else _ragged_backward_operator
    dropout = (7, dropout_p, rng_state.view(torch.int64)) if dropout_p else ()
    try:
        dq, dk, dv, _ = call(
            _dense(grad_out), None, rows, keys, values, *lengths, None, None, _dense(out), lse, *numbers, *dropout
        )
    except Exception as error:
        raise _explained_ragged(error, (rows, keys, values, *lengths, *[None] * 3, *numbers, 0)) from error
    return _laid_out(dq, q), _laid_out(dk, k), _laid_out(dv, v)


NO_LENGTHS = "the ragged operator is called without lengths"


def _require_nothing_else(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        _require(value is None, f"{name} is given; flashmoe's varlen attention has no such argument")


def _sides(left: int | None, right: int | None, causal: bool) -> tuple[int, int]:
    """torch passes None or any negative number for no limit."""
    no_left, no_right = left is None or left < 0, right is None or right < 0
    return -1 if no_left else left, 0 if causal else -1 if no_right else right  # type: ignore[return-value]


def _explained_ragged(error: Exception, given: tuple[Any, ...]) -> Exception:
    """torch computes calls that flashmoe's operator rejects for their arguments, or rejects them with its own error."""
    cause = explain_varlen(error, Varlen(*given))
    return LackingError(str(cause)) if isinstance(cause, ValueError | TypeError) else error


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the strides of ``torch.empty_like``, which compiled graphs assert."""
    if like.is_contiguous():
        return tensor
    result = torch.empty_like(like)
    return tensor if result.stride() == tensor.stride() else result.copy_(tensor)


KERNELS: dict[str, tuple[tuple[str, ...], Kernel]] = {
    "_scaled_dot_product_flash_attention": (("CUDA",), sdpa_forward),
    "_scaled_dot_product_flash_attention_backward": (("CUDA",), sdpa_backward),
    "_scaled_dot_product_flash_attention_for_cpu": (("CPU",), sdpa_forward_cpu),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (("CPU",), sdpa_backward_cpu),
    "_flash_attention_forward": (("CUDA", "CPU"), ragged_forward),
    "_flash_attention_backward": (("CUDA", "CPU"), ragged_backward),
}
