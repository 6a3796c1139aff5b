"""Converts between padded and packed batches, with the names and signatures of flash_attn.bert_padding."""

from __future__ import annotations

import torch
from torch import Tensor


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drop the padding: hidden_states [B, S, ...] and attention_mask [B, S], where nonzero means valid.

    Returns (rows [N, ...], their indices in [B * S], cu_seqlens int32 [B + 1], the longest length, lengths int32 [B]).
    With ``unused_mask`` its rows are kept too, but not counted in the lengths [B] that are returned last. Waits for the GPU, because N is
    needed on the host.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = (kept != 0).sum(dim=-1, dtype=torch.int32)
    used = (attention_mask != 0).sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    cu_seqlens = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max().item()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """:func:`unpad_input` for batches whose rows hold several sequences: attention_mask_in_length [B, S] has their lengths, in
    order, followed by zeros.

    Returns (rows [N, ...], their indices in [B * S], cu_seqlens int32 [sequences + 1], the longest length).
    """
    used = attention_mask_in_length.sum(dim=-1, keepdim=True)
    positions = torch.arange(attention_mask_in_length.shape[-1], device=used.device)
    rows, indices, *_ = unpad_input(hidden_states, positions < used)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    cu_seqlens = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max().item()) if lengths.numel() else 0
    return rows, indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse: rows [N, ...] to [batch, seqlen, ...], zeros elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.reshape(batch, seqlen, *rows.shape[1:])


def index_first_axis(values: Tensor, indices: Tensor) -> Tensor:
    """values[indices] along the first dimension."""
    return values.index_select(0, indices)


def index_first_axis_residual(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(values[indices], values without their gradient)."""
    return index_first_axis(values, indices), values.detach()


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """[first_axis_dim, ...] of zeros except for ``values`` [N, ...] at ``indices`` [N], which must differ from each other."""
    zeros = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return zeros.index_copy(0, indices, values)
