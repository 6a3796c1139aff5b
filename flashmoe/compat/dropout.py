"""Dropout with flash_attn's results: rng_state, and S_dmask, the signed probabilities from which its tests take the mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmoe.attn import philox
from flashmoe.attn.dropout import check_probability, draw_state

SCORES_AT_ONCE = 1 << 24


def dropout_options(dropout_p: float, q: Tensor) -> dict[str, Any]:
    """flashmoe's keywords, with a fresh random state; empty without dropout."""
    probability = check_probability(dropout_p)
    return {} if probability == 0.0 else {"dropout_p": probability, "rng_state": draw_state(q.device)}


def state_of(dropout: dict[str, Any], q: Tensor) -> Tensor:
    """rng_state as flash_attn returns it: zeros without dropout."""
    state: Tensor | None = dropout.get("rng_state")
    return torch.zeros(2, dtype=torch.int64, device=q.device) if state is None else state


@torch.no_grad()
def signed_probabilities(q: Tensor, k: Tensor, options: dict[str, Any], dropout: dict[str, Any]) -> Tensor:
    """S_dmask [B, Hq, Sq, Sk] in q's dtype: exp(score - row maximum), negative where a key is dropped, 0 where it is hidden.

    q [B, Hq, Sq, D], k [B, Hkv, Sk, D]. Computed with torch operations, for inspection, a few sequences at a time: a mask's words take at
    least 8 bytes of memory per score.
    """
    batch, heads, rows, _ = q.shape
    keys, slopes = k.shape[2], options["alibi_slopes"]
    result = q.new_empty((batch, heads, rows, keys))
    step = max(1, SCORES_AT_ONCE // max(1, heads * rows * keys))
    for b in range(0, batch, step):
        some = slice(b, min(b + step, batch))
        keep = philox.keep_mask(
            dropout["rng_state"], dropout["dropout_p"], range(batch)[some], range(heads), rows, keys
        )
        own = {**options, "alibi_slopes": slopes[some] if slopes is not None and slopes.dim() == 2 else slopes}
        result[some] = _signed(q[some], k[some], keep, own)
    return result


@torch.no_grad()
def signed_ragged_probabilities(
    q: Tensor,
    k: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    options: dict[str, Any],
    dropout: dict[str, Any],
) -> Tensor:
    """The same for q [Nq, Hq, D] and k [Nk, Hkv, D]: [B, Hq, longest rows, longest keys], 0 past a sequence's ends. Waits for the GPU."""
    ends_q, ends_k = (lengths.tolist() for lengths in cu_seqlens)
    batch, heads = len(ends_q) - 1, q.shape[1]
    result = q.new_zeros((batch, heads, *longest))
    for b in range(batch):
        own_q = q[ends_q[b] : ends_q[b + 1]].transpose(0, 1).unsqueeze(0)
        own_k = k[ends_k[b] : ends_k[b + 1]].transpose(0, 1).unsqueeze(0)
        rows, keys = own_q.shape[2], own_k.shape[2]
        keep = philox.keep_mask(dropout["rng_state"], dropout["dropout_p"], range(b, b + 1), range(heads), rows, keys)
        slopes = options["alibi_slopes"]
        own = {**options, "alibi_slopes": slopes[b] if slopes is not None and slopes.dim() == 2 else slopes}
        result[b, :, :rows, :keys] = _signed(own_q, own_k, keep, own)[0]
    return result


def _signed(q: Tensor, k: Tensor, keep: Tensor, options: dict[str, Any]) -> Tensor:
    scores = (q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * (
        q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    )
    if options["softcap"] > 0.0:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    rows, keys = scores.shape[2:]
    distance = torch.arange(keys, device=q.device) - torch.arange(keys - rows, keys, device=q.device).unsqueeze(1)
    if options["alibi_slopes"] is not None:
        scores = scores - options["alibi_slopes"].float()[..., None, None] * distance.abs()
    left, right = options["window"] or (-1, -1)
    right = 0 if options["causal"] else right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -torch.inf)
    largest = scores.amax(-1, keepdim=True) if keys else scores
    weights = torch.where(hidden, 0.0, torch.exp(scores - largest))
    return torch.where(keep, weights, -weights).to(q.dtype)
