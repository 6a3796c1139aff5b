"""Ragged and paged problems with windows, softcaps and sinks, compared with the operation's definition, sequence by sequence."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashmoe
from flashmoe_tools.operations.attention.reference import ScoreOptions, attend

from .reference import LSE_TOLERANCE, assert_ran_here, tolerance


@dataclass(frozen=True)
class Band(ScoreOptions):
    """Score options as keywords of flashmoe's functions."""

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap, "scale": self.scale}


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, band: Band, sinks: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of [..., Hq, Sq, D]: the operation's definition, in the dtype of q."""
    return attend(q, k, v, band, sinks=sinks, mask=mask)


@dataclass(frozen=True)
class Ragged:
    """Lengths of the sequences, heads and head dims. ``spare`` tokens, of NaN, belong to no sequence."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    spare: int = 0

    @property
    def longest(self) -> tuple[int, int]:
        return max(self.lengths_q, default=0), max(self.lengths_k, default=0)

    def tensors(self, device: str, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as ragged tensors [tokens, heads, head_dim]."""
        generator = torch.Generator().manual_seed(seed)

        def tokens(lengths: tuple[int, ...], heads: int, head_dim: int) -> Tensor:
            values = torch.randn(sum(lengths) + self.spare, heads, head_dim, generator=generator)
            values[sum(lengths) :] = math.nan
            return values.to(dtype).to(device)

        return (
            tokens(self.lengths_q, self.heads_q, self.head_dim),
            tokens(self.lengths_k, self.heads_kv, self.head_dim),
            tokens(self.lengths_k, self.heads_kv, self.head_dim_v),
        )

    def cu_seqlens(self, device: str) -> tuple[Tensor, Tensor]:
        lengths = (self.lengths_q, self.lengths_k)
        sums = ([0, *torch.tensor(one, dtype=torch.int64).cumsum(0).tolist()] for one in lengths)
        first, second = (torch.tensor(one, dtype=torch.int32, device=device) for one in sums)
        return first, second


def expected(
    ragged: Ragged, q: Tensor, k: Tensor, v: Tensor, band: Band, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out [N, Hq, Dv], lse [Hq, N]) of the tokens that belong to sequences, in the dtype of the tensors."""
    outs, lses, first_q, first_k = [], [], 0, 0
    for rows, keys in zip(ragged.lengths_q, ragged.lengths_k, strict=True):
        parts = (q[first_q : first_q + rows], k[first_k : first_k + keys], v[first_k : first_k + keys])
        out, lse = by_definition(*(part.transpose(0, 1) for part in parts), band, sinks)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
        first_q, first_k = first_q + rows, first_k + keys
    return torch.cat(outs), torch.cat(lses, 1)


def compare(
    found: tuple[Tensor, Tensor], wide: tuple[Tensor, Tensor], plain: Tensor, device: str, *, ran: bool = True
) -> None:
    """Applies the error rule: ``wide`` in float64, ``plain`` by torch in the tensors' own dtype."""
    out, lse = found
    if ran:
        assert_ran_here(device)
    reference, reference_lse = wide
    limit = tolerance(reference, plain)
    error = (out.double() - reference).abs().max().item()
    assert error <= limit, f"max error {error:.3e} over {limit:.3e}"
    hidden = reference_lse == -math.inf
    assert torch.equal(lse == -math.inf, hidden)
    seen = reference_lse[~hidden]
    if seen.numel():
        largest = max(1.0, seen.abs().max().item())
        assert (lse.double()[~hidden] - seen).abs().max().item() <= LSE_TOLERANCE * largest


def call_ragged(
    ragged: Ragged,
    band: Band,
    device: str,
    dtype: torch.dtype,
    *,
    with_sinks: bool = False,
    seed: int = 0,
    **options: Any,
) -> tuple[tuple[Tensor, ...], Tensor | None, tuple[Tensor, Tensor]]:
    """attention_varlen on the problem: (q, k, v), the sinks, and (out, lse) of the sequences' tokens."""
    tensors = ragged.tensors(device, dtype, seed)
    sinks = torch.linspace(-1, 2, ragged.heads_q, device=device) if with_sinks else None
    lengths = *ragged.cu_seqlens(device), *ragged.longest
    out, lse = flashmoe.attention_varlen(*tensors, *lengths, sinks=sinks, return_lse=True, **band.options, **options)
    tokens = sum(ragged.lengths_q)
    assert out.shape == (tokens + ragged.spare, ragged.heads_q, ragged.head_dim_v)
    assert lse.shape == (ragged.heads_q, tokens + ragged.spare)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    return tensors, sinks, (out[:tokens], lse[:, :tokens])


def check_ragged(ragged: Ragged, band: Band, device: str, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
    """``call_ragged``, compared with the reference; returns (out, lse)."""
    tensors, sinks, found = call_ragged(ragged, band, device, dtype, **options)
    if found[0].numel():
        wide = expected(ragged, *(tensor.double() for tensor in tensors), band, sinks)
        compare(found, wide, expected(ragged, *tensors, band, sinks)[0], device, ran=ragged.longest[1] > 0)
    return found


@dataclass(frozen=True)
class Pages:
    """A paged cache: the keys of a dense one, in pages listed by a table."""

    k: Tensor  # [pages, page_size, heads, head_dim]
    v: Tensor
    block_table: Tensor  # [sequences, pages of the longest]


def to_pages(
    k: Tensor, v: Tensor, lengths: tuple[int, ...], page_size: int, *, room: int = 0, shared: int = 0, seed: int = 0
) -> Pages:
    """Pages of ``page_size`` in random order, from dense k and v [B, Hkv, Sk, D]; unused memory is NaN, unused table entries are -1.

    room: keys beyond its own for which each sequence has pages. shared: this many leading pages of every sequence are those of sequence 0,
    so all sequences must begin with its keys.
    """
    device = k.device
    per_sequence = max(1, -(-(max(lengths, default=0) + room) // page_size))
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(len(lengths) * per_sequence + 2, generator=generator).tolist()
    shape = (len(numbers), page_size, k.shape[1])
    k_pages = torch.full((*shape, k.shape[3]), math.nan, dtype=k.dtype, device=device)
    v_pages = torch.full((*shape, v.shape[3]), math.nan, dtype=v.dtype, device=device)
    table = torch.full((len(lengths), per_sequence), -1, dtype=torch.int32)
    for sequence, length in enumerate(lengths):
        for index in range(-(-(length + room) // page_size)):
            is_shared = sequence > 0 and index < shared
            page = int(table[0, index]) if is_shared else numbers[sequence * per_sequence + index]
            table[sequence, index] = page
            keys = slice(index * page_size, min(length, (index + 1) * page_size))
            if is_shared or keys.stop <= keys.start:
                continue
            k_pages[page, : keys.stop - keys.start] = k[sequence, :, keys].transpose(0, 1)
            v_pages[page, : keys.stop - keys.start] = v[sequence, :, keys].transpose(0, 1)
    return Pages(k_pages, v_pages, table.to(device))
