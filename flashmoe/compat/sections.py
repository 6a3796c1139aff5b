"""Splits ragged batches into more sequences: for unused rows (flash_attn 3's seqused_q), and for chunks of keys (its attention_chunk).

A row sees the keys of the chunk that contains its own key; the last row's own key is the last key. The rows of a chunk become a sequence
with the chunk's keys, aligned bottom-right, so that causal masks and windows need no change. Rows without a key become sequences without
keys, whose results are zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def slices(starts: Tensor, used: Tensor | None = None) -> list[slice]:
    """The first used[b] rows of each sequence in starts int32 [B + 1]; reading them waits for the GPU."""
    begins, lengths = starts[:-1].tolist(), (torch.diff(starts) if used is None else used).tolist()
    return [slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]


class Sections(NamedTuple):
    """Starts of rows and of keys, int32 [B * of_sequence + 1], and the number of keys of each, int32 [B * of_sequence]."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor
    max_seqlen_k: int
    of_sequence: int  # sections per original sequence


def split_sequences(
    starts_q: Tensor, used_q: Tensor | None, starts_k: Tensor, used_k: Tensor | None, max_seqlen_k: int, chunk: int
) -> Sections:
    """starts_q and starts_k int32 [B + 1]; used_q and used_k int32 [B], None if all rows and keys are used. chunk: 0 for a single chunk of all keys."""
    rows, keys = torch.diff(starts_q), torch.diff(starts_k)
    rows = rows if used_q is None else used_q
    used = keys if used_k is None else used_k
    length = chunk or max(1, max_seqlen_k)
    begins = (
        torch.arange(max(1, -(-max_seqlen_k // length)), device=starts_q.device, dtype=torch.int32) * length
    )  # of chunks
    # First the rows before the first key (if any), then those of each chunk, then the unused rows.
    of_chunk = torch.minimum((begins - (used - rows).unsqueeze(1)).clamp_(min=0), rows.unsqueeze(1)) if chunk else None
    first = torch.zeros((rows.shape[0], 1), dtype=torch.int32, device=starts_q.device)
    row = torch.cat((first, first if of_chunk is None else of_chunk, rows.unsqueeze(1)), 1) + starts_q[:-1, None]
    key = torch.cat((first, torch.minimum(begins, keys.unsqueeze(1)), keys.unsqueeze(1)), 1) + starts_k[:-1, None]
    seen = (used.unsqueeze(1) - begins).clamp_(min=0, max=length)
    return Sections(
        torch.cat((row.flatten(), starts_q[-1:])).int(),
        torch.cat((key.flatten(), starts_k[-1:])).int(),
        torch.cat((first, seen, first), 1).flatten().int(),
        min(length, max_seqlen_k),
        begins.shape[0] + 2,
    )
