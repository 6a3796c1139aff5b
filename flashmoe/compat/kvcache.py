"""Attention over caches as flash_attn 2 and 3 have it: rotary embedding, another order of the batch, padding on the left. No gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmoe.attn.kvcache import attention_with_kvcache
from flashmoe.attn.varlen import attend
from flashmoe.compat import arguments, rotary
from flashmoe.errors import ArgumentError

MAX_SPLITS = 32  # the kernels' own; flash_attn takes 128


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
) -> tuple[Tensor, Tensor]:
    """(out as q, lse [B, Hq, Sq], or [Hq, Nq] of ragged rows).

    q [B, Sq, Hq, D], or [Nq, Hq, D] with cu_seqlens_q; caches [B, S, Hkv, D], or pages [P, page_size, Hkv, D] with block_table; k and v
    [B, Snew, Hkv, D] go behind the ``lengths`` keys that are there. rotary_first [B]: the position of the first new key, ``lengths`` by
    default. options: scores, num_splits.
    """
    if cache_batch_idx is not None:
        if block_table is not None:
            msg = "cache_batch_idx goes with dense caches; pages are found by block_table alone: leave cache_batch_idx out"
            raise ArgumentError(msg)
        block_table = cache_batch_idx.unsqueeze(1)  # a sequence's cache is one page
    options = {**options, "num_splits": min(options["num_splits"], MAX_SPLITS)}
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    used = arguments.lengths_of(lengths, batch, room, q.device)
    if block_table is not None:
        arguments.check_table(used, 0 if k is None else k.shape[1], block_table, k_cache.shape[1])
    if rotary_cos is not None or rotary_sin is not None:
        if rotary_cos is None or rotary_sin is None or k is None or cu_seqlens_q is not None:
            msg = (
                "rotary_cos and rotary_sin belong together, with new keys k and v to rotate, and dense q; give them all"
            )
            raise ArgumentError(msg)
        first = used if rotary_first is None else rotary_first
        is_local = options["causal"] or options["window"] is not None
        q, k = rotary.rotate_cache_call(q, k, rotary_cos, rotary_sin, first, rotary_interleaved, is_local)
    rows = q if cu_seqlens_q is not None else q.transpose(1, 2)
    caches = [cache.transpose(1, 2) if block_table is None else cache for cache in (k_cache, v_cache)]
    fresh = [None if tensor is None else tensor.transpose(1, 2) for tensor in (k, v)]
    if cache_leftpad is None and cu_seqlens_q is None:
        out, lse = attention_with_kvcache(
            rows, *caches, *fresh, cache_seqlens=used, block_table=block_table, **options, return_lse=True
        )
        return out.transpose(1, 2), lse
    if fresh[0] is not None:
        torch.ops.flashmoe.attention_append_(*caches, *fresh, used, block_table)
        used = used + fresh[0].shape[2]
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
