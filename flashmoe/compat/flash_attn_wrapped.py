"""flash_attn 2's private functions around its extension, which ring attention and other libraries import from flash_attn_interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmoe.compat import flash_attn_gpu

Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Forward:
    """(out [B, Sq, Hq, D], lse [B, Hq, Sq], S_dmask, rng_state), without a gradient."""
    window = (window_size_left, window_size_right)
    call = (None, alibi_slopes, dropout_p, softmax_scale, causal, *window, softcap, return_softmax)
    out, lse, probabilities, state = flash_attn_gpu.fwd(q, k, v, *call)
    return out, lse, probabilities, state


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Forward:
    """(out [N, Hq, D], lse [Hq, N], S_dmask, rng_state), without a gradient."""
    keys = (cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q, max_seqlen_k)
    scores = (dropout_p, softmax_scale, zero_tensors, causal, window_size_left, window_size_right, softcap)
    result = flash_attn_gpu.varlen_fwd(q, k, v, None, *keys, *scores, return_softmax, None, num_splits)
    out, lse, probabilities, state = result
    return out, lse, probabilities, state


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Fills dq, dk and dv; returns rowsum(dout * out) [B, Hq, Sq]."""
    window = (window_size_left, window_size_right)
    tensors: tuple[Any, ...] = (dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes)
    scores: tuple[Any, ...] = (dropout_p, softmax_scale, causal, *window, softcap, deterministic, None, rng_state)
    return flash_attn_gpu.bwd(*tensors, *scores)[3]


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Fills dq, dk and dv; returns rowsum(dout * out) [Hq, N]."""
    tensors: tuple[Any, ...] = (dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes)
    scores: tuple[Any, ...] = (max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal)
    rest: tuple[Any, ...] = (window_size_left, window_size_right, softcap, deterministic, None, rng_state)
    return flash_attn_gpu.varlen_bwd(*tensors, *scores, *rest)[3]


# The names that others import for what flash_attn calls through torch's dispatcher.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x with a contiguous last dimension."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    """The smallest multiple of m that is at least x."""
    return -(-x // m) * m


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """The number of keys over which a row of S_dmask has one maximum: all of them, so that each row is exp(score - its maximum)."""
    del device, head_dim, is_dropout, is_causal
    return 1 << 30
