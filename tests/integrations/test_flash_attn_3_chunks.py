"""flash_attn 3's attention_chunk, seqused_q and cu_seqlens_k_new, against float32 torch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe.compat.flash_attn_3 as fa3
from flashmoe.compat import rotary

ROOM, PAGE = 48, 16


def expected(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int], chunk: int) -> Tensor:
    """[Sq, H, D] for one sequence, q [Sq, H, D], k and v [Sk, Hkv, D]: a row sees the keys in its own chunk."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
    scores = q.float().transpose(0, 1) @ k.mT / math.sqrt(q.shape[-1])
    rows, keys = scores.shape[-2:]
    own, key = torch.arange(rows, device=q.device)[:, None] + keys - rows, torch.arange(keys, device=q.device)
    hidden = torch.zeros((rows, keys), dtype=torch.bool, device=q.device)
    if chunk:
        hidden |= own.div(chunk, rounding_mode="floor") != key // chunk
    if window[0] >= 0:
        hidden |= key < own - window[0]
    if causal or window[1] >= 0:
        hidden |= key > own + (0 if causal else window[1])
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1).nan_to_num(0.0)
    return (weights @ v).transpose(0, 1)


def close(found: Tensor, wanted: Tensor) -> bool:
    limit = 4e-3 if found.dtype == torch.float16 else 2e-5
    return torch.allclose(found.float(), wanted.float(), atol=limit, rtol=limit)


def rows_of(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float16 if device == "cuda" else torch.float32)


@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (False, (-1, -1)), (False, (5, 3))])
@pytest.mark.parametrize(("rows", "keys", "chunk"), [(33, 33, 8), (20, 45, 16), (45, 20, 7), (9, 9, 100)])
def test_chunks_of_keys(device: str, rows: int, keys: int, chunk: int, causal: bool, window: tuple[int, int]) -> None:
    q, k, v = rows_of(device, 2, rows, 4, 32), rows_of(device, 2, keys, 2, 32), rows_of(device, 2, keys, 2, 32)
    options: dict[str, Any] = {"causal": causal, "window_size": window, "attention_chunk": chunk}
    out, lse = fa3.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert lse.shape == (2, 4, rows)
    for b in range(2):
        assert close(out[b], expected(q[b], k[b], v[b], causal, window, chunk))


@pytest.mark.parametrize("chunk", [0, 11])
def test_rows_that_are_not_used(device: str, chunk: int) -> None:
    starts_q, used_q = [0, 12, 12, 40], [9, 0, 28]
    starts_k, used_k = [0, 30, 41, 70], [25, 11, 29]
    q, k, v = (rows_of(device, n, heads, 32).requires_grad_() for n, heads in ((40, 4), (70, 2), (70, 2)))
    lengths = [torch.tensor(x, dtype=torch.int32, device=device) for x in (starts_q, starts_k, used_q, used_k)]
    out = fa3.flash_attn_varlen_func(
        q, k, v, *lengths[:2], 28, 30, seqused_q=lengths[2], seqused_k=lengths[3], causal=True, attention_chunk=chunk
    )
    assert isinstance(out, Tensor)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), upstream)
    wanted = torch.zeros_like(out, dtype=torch.float32)
    for b in range(3):
        at_q = slice(starts_q[b], starts_q[b] + used_q[b])
        at_k = slice(starts_k[b], starts_k[b] + used_k[b])
        wanted[at_q] = expected(q[at_q], k[at_k], v[at_k], True, (-1, -1), chunk)
    assert close(out, wanted)
    for mine, theirs in zip(found, torch.autograd.grad(wanted, (q, k, v), upstream.float()), strict=True):
        assert close(mine, theirs)


@pytest.mark.parametrize("chunk", [0, 13])
@pytest.mark.parametrize("paged", [False, True])
def test_ragged_new_keys_and_rotated_rows_of_a_cache(device: str, paged: bool, chunk: int) -> None:
    lengths, new, order = [17, 0, 30], [3, 5, 1], [2, 0, 1]
    used, cu = (torch.tensor(x, dtype=torch.int32, device=device) for x in (lengths, [0, 3, 8, 9]))
    caches = [rows_of(device, 3, ROOM, 2, 32) for _ in range(2)]
    q, k, v = rows_of(device, 9, 4, 32), rows_of(device, 9, 2, 32), rows_of(device, 9, 2, 32)
    angle = torch.rand(ROOM, 8, device=device) * 6
    cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
    batch_index = torch.tensor(order, dtype=torch.int32, device=device)
    table = torch.randperm(9, device=device).int().view(3, 3) if paged else None
    given = caches
    if table is not None:
        given = [torch.zeros(9, PAGE, 2, 32, device=device, dtype=q.dtype) for _ in range(2)]
        for pages, cache in zip(given, caches, strict=True):
            pages[table.flatten().long()] = cache.reshape(9, PAGE, 2, 32)
    before = [cache.clone() for cache in caches]
    out = fa3.flash_attn_with_kvcache(
        q,
        *given,
        k,
        v,
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=used,
        cache_batch_idx=batch_index,
        page_table=table,
        cu_seqlens_q=cu,
        cu_seqlens_k_new=cu,
        max_seqlen_q=5,
        causal=True,
        attention_chunk=chunk,
        rotary_interleaved=False,
    )
    assert isinstance(out, Tensor)
    for b in range(3):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        positions = torch.arange(new[b], device=device) + lengths[b]
        own_q, own_k = (rotary.rotate(x[rows], cos, sin, positions, False) for x in (q, k))
        end = lengths[b] + new[b]
        keys, values = (
            torch.cat((cache[order[b], : lengths[b]], x)) for cache, x in zip(before, (own_k, v[rows]), strict=True)
        )
        assert close(out[rows], expected(own_q, keys, values, True, (-1, -1), chunk))
        written = given[0][order[b]] if table is None else given[0][table[order[b]].long()].flatten(0, 1)
        assert close(written[:end], keys)
