"""flash_attn 3's public functions (its module flash_attn_interface) on flashmoe's kernels: the same names, signatures and layouts.

pack_gqa, sm_margin and scheduler_metadata tune FlashAttention's kernels and change no result: they are accepted and ignored. Every result
is deterministic. Not supported, and rejected by name: float8 (q_descale, k_descale, v_descale).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flashmoe
from flashmoe.attn.arguments import MAX_GPU_OPTIONS_HEAD_DIM
from flashmoe.attn.varlen import attend
from flashmoe.compat import arguments, flash_attn_gpu, latent_query
from flashmoe.compat.flash_attn_wrapped import maybe_contiguous, round_multiple  # noqa: F401 (others import them from here)
from flashmoe.compat.kvcache import attend_cache
from flashmoe.compat.sections import Sections, slices, split_sequences
from flashmoe.errors import ArgumentError, ShapeError

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor]
_INTERFACE = "flash_attn 3's interface of August 2026"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = arguments.UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]; returns [B, Sq, Hq, Dv], and with ``return_attn_probs`` (out, lse
    [B, Hq, Sq]). Raises ArgumentError for unsupported arguments (above), and the errors of flashmoe.attention."""
    del num_splits, pack_gqa, deterministic, sm_margin
    _refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = arguments.score_options(causal, window_size, softcap, softmax_scale)
    if qv is not None:
        rows, keys = (
            [slice(first * size, (first + 1) * size) for first in range(len(q))] for size in (q.shape[1], k.shape[1])
        )
        options = latent_query.options_of(q, qv, v, options)
        out, lse = latent_query.attend_ragged(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), qv.flatten(0, 1), rows, keys, options, attention_chunk
        )
        out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
        return (out, lse) if return_attn_probs else out
    if attention_chunk:
        batch, length, room = (*q.shape[:2], k.shape[1])
        starts = [torch.arange(batch + 1, dtype=torch.int32, device=q.device) * size for size in (length, room)]
        sections = split_sequences(starts[0], None, starts[1], None, room, attention_chunk)
        out, lse = _attend_sections(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), sections, length, options)
        out, lse = out.unflatten(0, (batch, length)), lse.unflatten(1, (batch, length)).transpose(0, 1)
        return (out, lse) if return_attn_probs else out
    of_q, of_k, of_v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out, lse = _in_columns(
        lambda values: flashmoe.attention(of_q, of_k, values, **options, return_lse=True), of_q, of_k, of_v
    )
    return (out.transpose(1, 2), lse) if return_attn_probs else out.transpose(1, 2)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = arguments.UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """qkv [B, S, 3, H, D], or [B, S, num_heads_q + 2 Hkv, D]; otherwise as :func:`flash_attn_func`."""
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads, heads], dim=2)
    else:
        msg = (
            f"qkv has shape {list(qkv.shape)}; needed: [batch, length, 3, heads, head_dim], or with num_heads_q [batch, length, "
            "num_heads_q + 2 key heads, head_dim]"
        )
        raise ShapeError(msg)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = arguments.UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """q [Nq, Hq, D], k [Nk, Hkv, D], v [Nk, Hkv, Dv]; returns [Nq, Hq, Dv], and with ``return_attn_probs`` (out, lse [Hq, Nq])."""
    del num_splits, pack_gqa, deterministic, sm_margin
    _refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = arguments.score_options(causal, window_size, softcap, softmax_scale)
    if qv is not None:
        options = latent_query.options_of(q, qv, v, options)
        parts = slices(cu_seqlens_q, seqused_q), slices(cu_seqlens_k, seqused_k)
        out, lse = latent_query.attend_ragged(q, k, v, qv, *parts, options, attention_chunk)
        return (out, lse) if return_attn_probs else out
    if seqused_q is not None or attention_chunk:
        sections = split_sequences(cu_seqlens_q, seqused_q, cu_seqlens_k, seqused_k, int(max_seqlen_k), attention_chunk)
        out, lse = _attend_sections(q, k, v, sections, int(max_seqlen_q), options)
        return (out, lse) if return_attn_probs else out
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    out, lse = _in_columns(
        lambda values: flashmoe.attention_varlen(
            q, k, values, *lengths, **options, seqused_k=seqused_k, return_lse=True
        ),
        q,
        k,
        v,
    )
    return (out, lse) if return_attn_probs else out


def _in_columns(
    attend: Callable[[Tensor], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """attend(v); if a gradient is recorded, in groups of at most 256 columns of v, the limit of the gradient kernels; their gradients add up."""
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    if not is_recorded or v.shape[-1] <= MAX_GPU_OPTIONS_HEAD_DIM or q.shape[-1] > MAX_GPU_OPTIONS_HEAD_DIM:
        return attend(v)
    parts = [attend(columns) for columns in v.split(MAX_GPU_OPTIONS_HEAD_DIM, dim=-1)]
    return torch.cat([out for out, _ in parts], -1), parts[0][1]


def _attend_sections(
    q: Tensor, k: Tensor, v: Tensor, sections: Sections, max_seqlen_q: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    lengths = (sections.cu_seqlens_q, sections.cu_seqlens_k, max_seqlen_q, sections.max_seqlen_k)
    return _in_columns(
        lambda values: flashmoe.attention_varlen(
            q, k, values, *lengths, **options, seqused_k=sections.seqused_k, return_lse=True
        ),
        q,
        k,
        v,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = arguments.UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Like flash_attn 2's function, with page_table for block_table; q may be ragged [Nq, Hq, D] with cu_seqlens_q and max_seqlen_q.

    Returns out in q's layout, and with ``return_softmax_lse`` (out, lse [B, Hq, Sq] or [Hq, Nq], and two empty tensors in place of
    flash_attn's partial results).
    """
    del scheduler_metadata, pack_gqa, sm_margin
    _refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = arguments.score_options(causal, window_size, softcap, softmax_scale)
    options = options if qv is None else latent_query.options_of(q, qv, v_cache, options)
    if page_table is not None and cache_batch_idx is not None:
        page_table, cache_batch_idx = page_table[cache_batch_idx], None
    out, lse = attend_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        lengths=cache_seqlens,
        block_table=page_table,
        options={**options, "num_splits": num_splits},
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_first=rotary_seqlens,
        rotary_interleaved=rotary_interleaved,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=0 if max_seqlen_q is None else int(max_seqlen_q),
        cu_seqlens_k_new=cu_seqlens_k_new,
        chunk=attention_chunk,
        qv=qv,
    )
    return (out, lse, lse.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Combines attention over splits of the keys: out_partial [splits, B, S, H, D] and lse_partial [splits, B, S, H], float32.

    Returns (out [B, S, H, D] in out_dtype, lse [B, S, H]); splits without a key have lse -inf.
    """
    lse = torch.logsumexp(lse_partial, 0)
    weights = torch.exp(lse_partial - lse.masked_fill(lse == -torch.inf, 0.0)).unsqueeze(-1)
    parts = torch.where(weights > 0, out_partial * weights, 0.0)
    combined = parts.sum(0).to(out_dtype or out_partial.dtype)
    return (combined if out is None else out.copy_(combined)), lse


def get_scheduler_metadata(*_: Any, cache_seqlens: Tensor | None = None, **__: Any) -> Tensor:
    """An empty int32 tensor: flashmoe plans its splits on the device, in the call itself."""
    device = None if cache_seqlens is None else cache_seqlens.device
    return torch.empty(0, dtype=torch.int32, device=device)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, two empty tensors), without a gradient: called by ring attention. Ragged keys have cu_seqlens_k, caches do not."""
    _refuse(seqused_q=seqused_q, cu_seqlens_k_new=cu_seqlens_k_new)
    window = (window_size_left, window_size_right)
    if cu_seqlens_k is None:
        found: Any = flash_attn_with_kvcache(
            q,
            k,
            v,
            k_new,
            v_new,
            qv,
            rotary_cos,
            rotary_sin,
            seqused_k,
            kv_batch_idx,
            leftpad_k,
            page_table,
            cu_seqlens_q,
            None,
            max_seqlen_q,
            seqlens_rotary,
            q_descale,
            k_descale,
            v_descale,
            softmax_scale,
            causal,
            window,
            attention_chunk,
            softcap,
            rotary_interleaved,
            scheduler_metadata,
            num_splits,
            pack_gqa,
            sm_margin,
            return_softmax_lse=True,
        )
        out, lse = found[:2]
    else:
        _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
        _refuse(k_new=k_new, v_new=v_new, leftpad_k=leftpad_k, kv_batch_idx=kv_batch_idx)
        with torch.no_grad():
            out, lse = attend(
                q,
                k,
                v,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                seqused_k=seqused_k,
                max_seqlen_q=max_seqlen_q or 0,
                max_seqlen_k=max_seqlen_k or 0,
                **arguments.score_options(causal, window, softcap, softmax_scale),
                sinks=None,
                return_lse=True,
            )
    out = out if out_ is None else out_.copy_(out)
    return out, lse, lse.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Fills dq, dk and dv; returns rowsum(dout * out) [B, Hq, Sq], or [Hq, Nq] for ragged rows."""
    del sm_margin
    _refuse(seqused_q=sequed_q, seqused_k=sequed_k)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    tensors = (dout, q, k, v, out, softmax_lse, dq, dk, dv)
    scores = (is_causal, window_size_left, window_size_right, softcap, deterministic)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return flash_attn_gpu.bwd(*tensors, None, 0.0, scale, *scores)[3]
    if max_seqlen_q is None or max_seqlen_k is None:
        msg = "cu_seqlens_q and cu_seqlens_k need max_seqlen_q and max_seqlen_k; pass the longest sequences' lengths"
        raise ArgumentError(msg)
    lengths = (cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k)
    return flash_attn_gpu.varlen_bwd(*tensors, *lengths, 0.0, scale, False, *scores)[3]


def _refuse(**given: Any) -> None:
    arguments.refuse(_INTERFACE, **given)
