"""Attention over caches as in flash_attn 2 and 3: rotary embedding, reordered batches, padding on the left. No gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmoe.attn.kvcache import attention_with_kvcache
from flashmoe.attn.varlen import attend
from flashmoe.compat import arguments, latent_query, rotary
from flashmoe.compat.sections import slices, split_sequences
from flashmoe.errors import ArgumentError

MAX_SPLITS = 32  # the kernels' limit; flash_attn accepts up to 128


@torch.no_grad()
def attend_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    lengths: Any,
    block_table: Tensor | None,
    options: dict[str, Any],
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_first: Tensor | None = None,
    rotary_interleaved: bool = True,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    cu_seqlens_k_new: Tensor | None = None,
    chunk: int = 0,
    qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out in q's layout, lse [B, Hq, Sq], or [Hq, Nq] for ragged rows).

    q [B, Sq, Hq, D], or [Nq, Hq, D] with cu_seqlens_q; caches [B, S, Hkv, D], or pages [P, page_size, Hkv, D] with block_table; k and v
    [B, Snew, Hkv, D] are appended after the first ``lengths`` keys. rotary_first [B]: the position of the first new key, ``lengths`` by
    default. With cu_seqlens_k_new int32 [B + 1] k and v are ragged, [Nnew, Hkv, D]. chunk: flash_attn 3's attention_chunk.
    qv: see latent_query.py. options: score options, num_splits.
    """
    if cache_batch_idx is not None:
        if block_table is not None:
            msg = "cache_batch_idx is only used with dense caches; block_table selects pages; remove cache_batch_idx"
            raise ArgumentError(msg)
        block_table = cache_batch_idx.unsqueeze(1)  # each sequence's cache counts as one page
    options = {**options, "num_splits": min(options["num_splits"], MAX_SPLITS)}
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    used = arguments.lengths_of(lengths, batch, room, q.device)
    if block_table is not None:
        added = 0 if k is None or cu_seqlens_k_new is not None else k.shape[1]
        arguments.check_table(used, added, block_table, k_cache.shape[1])
    if rotary_cos is not None or rotary_sin is not None:
        if rotary_cos is None or rotary_sin is None or k is None:
            msg = "rotary_cos and rotary_sin must be passed together, with new keys k and v to rotate; pass all of them"
            raise ArgumentError(msg)
        first = used if rotary_first is None else rotary_first
        is_local = options["causal"] or options["window"] is not None
        tables = (rotary_cos, rotary_sin, first, rotary_interleaved)
        q = rotary.rotate_rows(q, *tables, cu_seqlens_q, step=is_local)
        k = rotary.rotate_rows(k, *tables, cu_seqlens_k_new, step=True)
    if k is not None and v is not None and cu_seqlens_k_new is not None:
        append_ragged((k_cache, v_cache), (k, v), used, cu_seqlens_k_new, block_table)
        used, k, v = used + torch.diff(cu_seqlens_k_new), None, None
    rows = q if cu_seqlens_q is not None else q.transpose(1, 2)
    caches = [cache.transpose(1, 2) if block_table is None else cache for cache in (k_cache, v_cache)]
    fresh = [None if tensor is None else tensor.transpose(1, 2) for tensor in (k, v)]
    if cache_leftpad is None and cu_seqlens_q is None and not chunk and qv is None:
        out, lse = attention_with_kvcache(
            rows, *caches, *fresh, cache_seqlens=used, block_table=block_table, **options, return_lse=True
        )
        return out.transpose(1, 2), lse
    if fresh[0] is not None:
        torch.ops.flashmoe.attention_append_(*caches, *fresh, used, block_table)
        used = used + fresh[0].shape[2]
    if chunk or qv is not None:
        return _attend_gathered(
            q, k_cache, v_cache, used, cache_leftpad, block_table, cu_seqlens_q, max_seqlen_q, chunk, options, qv
        )
    if cache_leftpad is not None:
        keys = arguments.keys_after_padding(k_cache, v_cache, used, cache_leftpad, block_table)
    else:
        keys = arguments.Keys(
            caches[0], caches[1], {"seqused_k": used, "block_table": block_table, "max_seqlen_k": room}
        )
    result: Any = attend(
        rows,
        keys.k,
        keys.v,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        **keys.options,
        **options,
        sinks=None,
        return_lse=True,
    )
    out, lse = result
    return (out if cu_seqlens_q is not None else out.transpose(1, 2)), lse


def append_ragged(
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    used: Tensor,
    cu_seqlens: Tensor,
    block_table: Tensor | None,
) -> None:
    """Append new keys and values [N, Hkv, D], split into sequences by cu_seqlens int32 [B + 1], after the first used[b] keys of each."""
    sequence, index = rotary.positions_of(new[0].shape[0], cu_seqlens)
    key = used[sequence] + index
    for cache, rows in zip(caches, new, strict=True):
        if block_table is None:
            cache[sequence.long(), key.long()] = rows
        else:
            page_size = cache.shape[1]
            cache[block_table[sequence.long(), (key // page_size).long()].long(), (key % page_size).long()] = rows


def _attend_gathered(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    used: Tensor,
    leftpad: Tensor | None,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    chunk: int,
    options: dict[str, Any],
    qv: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """With chunks or qv. Gathers the keys into one tensor, a copy of at least the caches' used rows; few models need this."""
    if qv is not None and not chunk and leftpad is None:
        decoded = latent_query.decode_latents(q, qv, k_cache, v_cache, used, block_table, options)
        if decoded is not None:
            return decoded
    batch = used.shape[0]
    padding = torch.zeros_like(used) if leftpad is None else leftpad
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    key = (torch.arange(room, device=q.device) + padding.unsqueeze(1)).clamp_(max=room - 1)
    page_size = k_cache.shape[1]
    row = (
        torch.arange(batch, device=q.device).unsqueeze(1)
        if block_table is None
        else block_table.gather(1, key // page_size)
    )
    keys, values = (cache[row.long(), key % page_size].flatten(0, 1) for cache in (k_cache, v_cache))
    starts_k = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * room
    if cu_seqlens_q is None:
        starts_q, max_seqlen_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q.shape[1], q.shape[1]
    else:
        starts_q = cu_seqlens_q
    if qv is not None:
        flat = [rows if cu_seqlens_q is not None else rows.flatten(0, 1) for rows in (q, qv)]
        parts = slices(starts_q), slices(starts_k, used - padding)
        out, lse = latent_query.attend_ragged(flat[0], keys, values, flat[1], *parts, options, chunk)
    else:
        sections = split_sequences(starts_q, None, starts_k, used - padding, room, chunk)
        result: Any = attend(
            q.flatten(0, 1) if cu_seqlens_q is None else q,
            keys,
            values,
            cu_seqlens_q=sections.cu_seqlens_q,
            cu_seqlens_k=sections.cu_seqlens_k,
            seqused_k=sections.seqused_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=sections.max_seqlen_k,
            **options,
            sinks=None,
            return_lse=True,
        )
        out, lse = result
    if cu_seqlens_q is None:
        return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)
    return out, lse
