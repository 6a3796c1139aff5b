"""flash_attn 3's qv: queries whose scores are q k^T + qv v^T, as in absorbed latent attention.

Calls of the shape that DeepSeek's decoding uses (one key head, 64 columns of q and 512 of qv, both caches views of one tensor) run on
:func:`flashmoe.mla_decode`. All others are computed with torch operations in float32, one sequence at a time: correct and
differentiable, not fast, and the host waits for lengths on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmoe.errors import ShapeError
from flashmoe.mla.api import mla_decode

_ROTARY, _LATENT = 64, 512  # columns of mla_decode's keys
_MOST_ROWS = 128


def options_of(q: Tensor, qv: Tensor, v: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` with flash_attn 3's default scale, (D + Dv) ** -0.5. Raises ShapeError if qv does not match q and v."""
    if qv.shape != (*q.shape[:-1], v.shape[-1]):
        msg = f"qv has shape {list(qv.shape)}; needed: q's with v's last dimension, {[*q.shape[:-1], v.shape[-1]]}"
        raise ShapeError(msg)
    scale = options["scale"]
    return {**options, "scale": (q.shape[-1] + v.shape[-1]) ** -0.5 if scale is None else scale}


def attend_ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor,
    rows: list[slice],
    keys: list[slice],
    options: dict[str, Any],
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """q [Nq, Hq, D], qv [Nq, Hq, Dv], k [Nk, Hkv, D], v [Nk, Hkv, Dv]; ``rows`` and ``keys`` slice out each sequence; other rows get zeros.

    Returns (out [Nq, Hq, Dv], lse [Hq, Nq] float32)."""
    parts = [_attend(q[row], k[key], v[key], qv[row], chunk, **options) for row, key in zip(rows, keys, strict=True)]
    index = torch.cat([torch.arange(row.start, row.stop, device=q.device) for row in rows])
    out = torch.zeros_like(qv).index_copy(0, index, torch.cat([part[0] for part in parts]))
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device=q.device)
    return out, lse.index_copy(1, index, torch.cat([part[1] for part in parts], 1))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor,
    chunk: int,
    *,
    causal: bool,
    window: tuple[int, int] | None,
    softcap: float,
    scale: float,
    **_: Any,  # num_splits; slopes are not supported
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence."""
    heads = k.shape[1]
    q, qv = (
        rows.float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3) for rows in (q, qv)
    )  # [Hkv, group, Sq, columns]
    k, values = (rows.float().transpose(0, 1).unsqueeze(1) for rows in (k, v))
    scores = (q @ k.mT + qv @ values.mT) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    # The key at each row's own position
    own = torch.arange(q.shape[2], device=q.device).unsqueeze(1) + (k.shape[2] - q.shape[2])
    key = torch.arange(k.shape[2], device=q.device)
    left, right = (-1, -1) if window is None else window
    right = 0 if causal else right
    hidden = torch.zeros_like(own + key, dtype=torch.bool)
    if right >= 0:
        hidden |= key > own + right
    if left >= 0:
        hidden |= key < own - left
    if chunk:
        first = own - own % chunk
        hidden |= (key < first) | (key >= first + chunk)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    out = (weights @ values).permute(2, 0, 1, 3).flatten(1, 2).to(v.dtype)
    return out, lse.flatten(0, 1)


def decode_latents(
    q: Tensor,
    qv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    used: Tensor,
    block_table: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor] | None:
    """(out [B, Sq, Hq, 512], lse [B, Hq, Sq]) by :func:`flashmoe.mla_decode`; None if it does not support q, the caches or the options."""
    is_latent = q.dim() == 4 and (q.shape[-1], v_cache.shape[-1], v_cache.shape[2]) == (_ROTARY, _LATENT, 1)
    behind = k_cache.storage_offset() - v_cache.storage_offset()
    is_one = (
        k_cache.untyped_storage().data_ptr() == v_cache.untyped_storage().data_ptr()
        and behind == _LATENT
        and k_cache.stride() == v_cache.stride()
        and v_cache.stride()[-1] == 1
    )
    is_plain = options["window"] is None and options["softcap"] == 0 and q.dtype.itemsize == 2
    is_small = q.dim() == 4 and q.shape[1] <= _MOST_ROWS and q.shape[2] <= _MOST_ROWS
    is_page = block_table is None or v_cache.shape[1] % 16 == 0
    if not (is_latent and is_one and is_plain and is_small and is_page):
        return None
    size, strides = (*v_cache.shape[:2], _LATENT + _ROTARY), (*v_cache.stride()[:2], 1)
    found: Any = mla_decode(
        torch.cat((qv, q), -1),
        v_cache.as_strided(size, strides, v_cache.storage_offset()),
        cache_seqlens=used.int(),
        scale=options["scale"],
        block_table=block_table,
        causal=options["causal"],
        num_splits=options["num_splits"],
        return_lse=True,
    )
    out, lse = found
    return out, lse
