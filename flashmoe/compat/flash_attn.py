"""flash_attn 2's functions on flashmoe's kernels: the same names, signatures, layouts ([B, S, H, D]) and meaning.

Every result is deterministic, whatever ``deterministic`` says; dropout draws from torch's default generator of the device, as in
flash_attn, but gives another mask for the same seed.
Causal masks and windows are aligned bottom-right, as in flash_attn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashmoe
from flashmoe.compat import arguments, flash_attn_gpu  # noqa: F401
from flashmoe.compat.arguments import score_options as _options
from flashmoe.compat.dropout import dropout_options, signed_probabilities, signed_ragged_probabilities
from flashmoe.compat.flash_attn_wrapped import (  # noqa: F401 (others import them from here)
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
    maybe_contiguous,
    round_multiple,
)
from flashmoe.compat.kvcache import attend_cache
from flashmoe.errors import ShapeError

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, Tensor | None]
_UNBOUNDED: Window = arguments.UNBOUNDED
USE_TRITON_ROCM = False  # other libraries read it


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D]; returns [B, Sq, Hq, D], and with ``return_attn_probs`` (out, lse [B, Hq, Sq], S_dmask).

    S_dmask is None without dropout, otherwise [B, Hq, Sq, Sk] in q's dtype, computed with torch operations: exp(score - row maximum),
    negative where a key is dropped. Raises the errors of flashmoe.attention.
    """
    del deterministic  # it always is
    options = _options(causal, window_size, softcap, softmax_scale, alibi_slopes)
    dropout = dropout_options(dropout_p, q)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out: Tensor
    out, lse = flashmoe.attention(q, k, v, **options, **dropout, return_lse=True)
    if not return_attn_probs:
        return out.transpose(1, 2)
    return out.transpose(1, 2), lse, signed_probabilities(q, k, options, dropout) if dropout else None


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """qkv [B, S, 3, H, D]; otherwise as :func:`flash_attn_func`."""
    q, k, v = _unpack(qkv, "qkv", 5, 3)
    options: tuple[Any, ...] = (dropout_p, softmax_scale, causal, window_size, softcap)
    rest: tuple[Any, ...] = (alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options, *rest)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q [B, Sq, Hq, D], kv [B, Sk, 2, Hkv, D]; otherwise as :func:`flash_attn_func`."""
    k, v = _unpack(kv, "kv", 5, 2)
    options: tuple[Any, ...] = (dropout_p, softmax_scale, causal, window_size, softcap)
    rest: tuple[Any, ...] = (alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options, *rest)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """q [Nq, Hq, D], k and v [Nk, Hkv, D] or pages [P, page_size, Hkv, D] with block_table int32 [B, pages]; cu_seqlens int32 [B + 1].

    Returns [Nq, Hq, D], and with ``return_attn_probs`` (out, lse [Hq, Nq], S_dmask). With pages cu_seqlens_k gives the lengths, and dropout
    is not supported. S_dmask as in :func:`flash_attn_func`, [B, Hq, max_seqlen_q, max_seqlen_k].
    """
    del deterministic
    options = _options(causal, window_size, softcap, softmax_scale, alibi_slopes)
    dropout = dropout_options(dropout_p, q)
    longest = (int(max_seqlen_q), int(max_seqlen_k))
    paged: dict[str, Any] = {}
    keys: Tensor | None = cu_seqlens_k
    if block_table is not None:
        paged = {"block_table": block_table, "seqused_k": torch.diff(cu_seqlens_k)}
        keys = None
    out: Tensor
    out, lse = flashmoe.attention_varlen(
        q, k, v, cu_seqlens_q, keys, longest[0], longest[1], **options, **dropout, **paged, return_lse=True
    )
    if not return_attn_probs:
        return out
    lengths = (cu_seqlens_q, cu_seqlens_k)
    return out, lse, signed_ragged_probabilities(q, k, lengths, longest, options, dropout) if dropout else None


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """qkv [N, 3, H, D]; otherwise as :func:`flash_attn_varlen_func`."""
    q, k, v = _unpack(qkv, "qkv", 4, 3)
    options: tuple[Any, ...] = (dropout_p, softmax_scale, causal, window_size, softcap)
    rest: tuple[Any, ...] = (alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options, *rest)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q [Nq, Hq, D], kv [Nk, 2, Hkv, D]; otherwise as :func:`flash_attn_varlen_func`."""
    k, v = _unpack(kv, "kv", 4, 2)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options: tuple[Any, ...] = (dropout_p, softmax_scale, causal, window_size, softcap)
    rest: tuple[Any, ...] = (alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *lengths, *options, *rest)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q [B, Sq, Hq, D]; caches [B, S, Hkv, D], or pages [P, page_size, Hkv, D] with block_table; k and v [B, Snew, Hkv, D] are
    appended to the caches, after the first cache_seqlens (an int, or int32 [B]) keys, and attended to.

    rotary_cos and rotary_sin [positions, R / 2] rotate the first R columns of the new keys, from position cache_seqlens on, and of q: at
    increasing positions under a causal mask or a window, otherwise all at position cache_seqlens. cache_batch_idx int32 [B]: the index of
    each sequence's cache. cache_leftpad int32 [B]: the number of leading keys that no row sees. Returns [B, Sq, Hq, D], and with
    ``return_softmax_lse`` also lse [B, Hq, Sq]. No gradients. A sequence longer than its row of block_table raises a RuntimeError; checking
    this waits for the GPU, as in flash_attn.
    """
    out, lse = attend_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        lengths=cache_seqlens,
        block_table=block_table,
        options={**_options(causal, window_size, softcap, softmax_scale, alibi_slopes), "num_splits": num_splits},
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
    )
    return (out, lse) if return_softmax_lse else out


def _unpack(packed: Tensor, name: str, rank: int, count: int) -> tuple[Tensor, ...]:
    axis = rank - 3
    if packed.dim() != rank or packed.shape[axis] != count:
        head = "[batch, length" if rank == 5 else "[tokens"
        msg = f"{name} has shape {list(packed.shape)}; needed: {head}, {count}, heads, head_dim]"
        raise ShapeError(msg)
    return packed.unbind(axis)
