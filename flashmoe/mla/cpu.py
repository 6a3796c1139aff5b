"""Decoding on the CPU, one sequence after the other, in torch's own vectorised products: float32 inside whatever the dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmoe.mla import codes
from flashmoe.rules import broken, check

LATENT_DIM = 512


def decode(
    q: Tensor,
    kv_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """``mla_decode`` for CPU tensors; lengths and pages are looked at."""
    check("mla_decode", (q, kv_cache, cache_seqlens, block_table, sinks, scale, causal, num_splits))
    batch, tokens, heads, _ = q.shape
    out = q.new_zeros(batch, tokens, heads, LATENT_DIM)
    lse = torch.full((batch, heads, tokens), -torch.inf)
    for sequence, length in enumerate(cache_seqlens.tolist()):
        keys = _keys(kv_cache, block_table, sequence, length)
        keys = (codes.dequantize(keys, q.dtype) if codes.has_codes(kv_cache) else keys).float()
        scores = (q[sequence].float() * scale) @ keys.mT  # [tokens, heads, keys]
        if causal:
            ends = length - (tokens - 1 - torch.arange(tokens))
            scores.masked_fill_((torch.arange(length) >= ends[:, None])[:, None], -torch.inf)
        terms = scores
        if sinks is not None:
            terms = torch.cat([scores, sinks[None, :, None].expand(tokens, heads, 1)], dim=-1)
        if terms.shape[-1] == 0:
            continue
        total = torch.logsumexp(terms, dim=-1, keepdim=True)
        weights = torch.exp(scores - torch.where(total == -torch.inf, 0.0, total))
        out[sequence] = (weights @ keys[:, :LATENT_DIM]).to(q.dtype)
        lse[sequence] = total.squeeze(-1).mT
    return out, lse


def _keys(kv_cache: Tensor, block_table: Tensor | None, sequence: int, length: int) -> Tensor:
    """[length, 576] of one sequence, or 656 bytes."""
    page_size = kv_cache.shape[1]
    most = page_size if block_table is None else page_size * block_table.shape[1]
    if not 0 <= length <= most:
        rule = "mla.length"
        raise broken(rule, sequence=sequence, found=length, most=most)
    if block_table is None:
        return kv_cache[sequence, :length]
    pages = block_table[sequence, : -(-length // page_size)]
    outside = (pages < 0) | (pages >= kv_cache.shape[0])
    if outside.any():
        index = int(outside.int().argmax())
        rule = "mla.page"
        raise broken(rule, sequence=sequence, index=index, found=int(pages[index]), pages=kv_cache.shape[0])
    return kv_cache[pages.long()].flatten(0, 1)[:length]
