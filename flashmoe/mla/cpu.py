"""Decoding on the CPU, one sequence at a time, with torch's own vectorised products: computes in float32 for every dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmoe.mla import codes
from flashmoe.mla.codes import LATENT_DIM
from flashmoe.rules import broken, check


def decode(
    q: Tensor,
    kv_cache: Tensor,
    cache_seqlens: Tensor | None,
    block_table: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    num_splits: int,
    indices: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``mla_decode`` for CPU tensors; checks lengths, pages and indices."""
    check("mla_decode", (q, kv_cache, cache_seqlens, block_table, sinks, scale, causal, num_splits, indices))
    if indices is not None:
        return _decode_indices(q, kv_cache, indices, sinks, scale)
    assert cache_seqlens is not None
    batch, tokens, heads, _ = q.shape
    out = q.new_zeros(batch, tokens, heads, LATENT_DIM)
    lse = torch.full((batch, heads, tokens), -torch.inf)
    for sequence, length in enumerate(cache_seqlens.tolist()):
        keys = _values(_keys(kv_cache, block_table, sequence, length), q.dtype)
        hidden = None
        if causal:
            ends = length - (tokens - 1 - torch.arange(tokens))
            hidden = torch.arange(length) >= ends[:, None]
        out[sequence], lse[sequence] = _attend(q[sequence], keys, hidden, sinks, scale)
    return out, lse


def _decode_indices(
    q: Tensor, kv_cache: Tensor, indices: Tensor, sinks: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Token by token; a key listed twice counts twice."""
    batch, tokens, heads, _ = q.shape
    rows = kv_cache.flatten(0, 1)
    outside = (indices < -1) | (indices >= len(rows))
    if outside.any():
        sequence, token, index = (int(one) for one in outside.nonzero()[0])
        rule, found = "mla.index", int(indices[sequence, token, index])
        raise broken(rule, sequence=sequence, token=token, index=index, found=found, most=len(rows) - 1)
    out = q.new_zeros(batch, tokens, heads, LATENT_DIM)
    lse = torch.full((batch, heads, tokens), -torch.inf)
    for sequence in range(batch):
        for token, named in enumerate(indices[sequence].long()):
            keys = _values(rows[named[named >= 0]], q.dtype)
            own = slice(token, token + 1)
            out[sequence, own], lse[sequence, :, own] = _attend(q[sequence, own], keys, None, sinks, scale)
    return out, lse


def _attend(
    q: Tensor, keys: Tensor, hidden: Tensor | None, sinks: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [tokens, heads, 512], lse [heads, tokens]) of one sequence; ``hidden`` bool [tokens, keys]."""
    tokens, heads, _ = q.shape
    # Contiguous, because with other strides torch's product may sum in another order.
    scores = (q.float().contiguous() * scale) @ keys.mT  # [tokens, heads, keys]
    if hidden is not None:
        scores.masked_fill_(hidden[:, None], -torch.inf)
    terms = scores
    if sinks is not None:
        terms = torch.cat([scores, sinks[None, :, None].expand(tokens, heads, 1)], dim=-1)
    total = torch.logsumexp(terms, dim=-1, keepdim=True)
    weights = torch.exp(scores - torch.where(total == -torch.inf, 0.0, total))
    return (weights @ keys[:, :LATENT_DIM]).to(q.dtype), total.squeeze(-1).mT


def _values(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """[keys, 576] in float32."""
    return (codes.dequantize(keys, dtype) if codes.is_fp8(keys) else keys).float()


def _keys(kv_cache: Tensor, block_table: Tensor | None, sequence: int, length: int) -> Tensor:
    """[length, 576] of one sequence, or [length, 656] in bytes."""
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
