"""The tensors of a ragged, paged or banded problem.

NaN stands wherever no row sees a key: past the used keys of an entry, in pages that no entry has, in the keys of entries without rows;
and in query rows that belong to no entry.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from flashmoe_build.emulation.problem import DTYPES
from flashmoe_build.emulation.varlen.problem import Keys, MaskTensor, Rows, VarlenProblem

NAN = float("nan")
SPARE_ROWS = 3  # query rows in front of the first entry and behind the last one
GARBAGE_PAGE = 10**6  # in the block table past an entry's own pages


@dataclass(frozen=True)
class Tensors:
    """``q``, ``k``, ``v`` and ``out`` as they lie in memory; ``entries`` views of them as [heads, rows or keys, columns]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    entries: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    seqused_k: torch.Tensor | None
    block_table: torch.Tensor | None
    sinks: torch.Tensor | None
    mask: torch.Tensor | None  # [batch, heads, rows, keys], expanded

    def outputs(self, problem: VarlenProblem) -> list[torch.Tensor]:
        """Views of ``out``, one for each entry: [heads, rows, columns]."""
        return _entries_of_rows(problem, self.out, self.cu_seqlens_q)


def _offsets(lengths: tuple[int, ...], start: int, spare: int = 0) -> list[int]:
    return list(itertools.accumulate((length + spare for length in lengths), initial=start))


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _entries_of_rows(p: VarlenProblem, tensor: torch.Tensor, cu: torch.Tensor | None) -> list[torch.Tensor]:
    if cu is None:
        return list(tensor)
    return [tensor[first : first + rows].transpose(0, 1) for first, rows in zip(cu.tolist(), p.rows, strict=False)]


def build(p: VarlenProblem) -> Tensors:
    """Fresh random tensors, the same for the same problem."""
    generator = torch.Generator().manual_seed(p.data_seed * 7919 + 29)
    dtype = DTYPES[p.dtype]

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    cu_q = _int32(_offsets(p.rows, SPARE_ROWS)) if p.rows_layout is Rows.RAGGED else None
    if cu_q is None:
        q_sizes: tuple[int, ...] = (len(p.rows), p.heads_q, p.rows[0])
    else:
        q_sizes = (int(cu_q[-1]) + SPARE_ROWS, p.heads_q)
    q = torch.full((*q_sizes, p.head_dim), NAN, dtype=dtype)
    for view in _entries_of_rows(p, q, cu_q):
        view.copy_(normal(*view.shape) * p.magnitude + 0.25)
    cu_k, used, table, pages = _places(p, generator)
    k, v = (torch.full((*pages, dim), NAN, dtype=dtype) for dim in (p.head_dim, p.head_dim_v))
    entries = []
    for entry, (q_view, length) in enumerate(zip(_entries_of_rows(p, q, cu_q), p.keys, strict=True)):
        rows = []
        for tensor in (k, v):
            places = _key_places(p, tensor, entry, cu_k, table)
            values = normal(length, p.heads_kv, tensor.shape[-1]) + 0.25
            if p.rows[entry] > 0:
                for index in range(length):  # of a page that two entries share the first one's values stay
                    if torch.isnan(places[index]).any():
                        places[index].copy_(values[index])
            rows.append(torch.stack(places[:length]) if length > 0 else values.to(dtype))
        entries.append((q_view, rows[0].transpose(0, 1), rows[1].transpose(0, 1)))
    sinks = normal(p.heads_q) * 2 if p.has_sinks else None
    if table is not None:
        for entry, (row_count, length) in enumerate(zip(p.rows, p.keys, strict=True)):
            behind = max(0, length - row_count - p.left) // p.page_size
            table[entry, :behind] = GARBAGE_PAGE if entry % 2 else -1  # of pages that windows have left behind
    out = torch.full((*q_sizes, p.head_dim_v), NAN, dtype=dtype)
    mask = _mask(p, generator)
    return Tensors(q, k, v, out, tuple(entries), cu_q, cu_k, used, table, sinks, mask)


def _places(
    p: VarlenProblem, generator: torch.Generator
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, tuple[int, ...]]:
    """(cu_seqlens_k, seqused_k, block_table, sizes of k and v but the last)."""
    used = _int32(list(p.keys))
    if p.keys_layout is Keys.DENSE:
        return (
            None,
            used if p.spare_keys or len(set(p.keys)) > 1 else None,
            None,
            (len(p.keys), p.heads_kv, p.most_keys),
        )
    if p.keys_layout is Keys.RAGGED:
        cu = _int32(_offsets(p.keys, 0, p.spare_keys))
        return cu, used if p.spare_keys else None, None, (max(1, int(cu[-1])), p.heads_kv)
    counts = [-(-length // p.page_size) for length in p.keys]
    order = torch.randperm(
        sum(counts) + 2, generator=generator
    ).tolist()  # two pages are nobody's, the first among them
    order.insert(0, order.pop(order.index(0)))
    table = torch.full((len(p.keys), max(*counts, -(-p.most_keys // p.page_size), 1)), GARBAGE_PAGE)
    table[:, -1] = -7
    for entry, count in enumerate(counts):
        table[entry, :count] = torch.tensor([order.pop() for _ in range(count)])
    first = [entry for entry, length in enumerate(p.keys) if length >= p.page_size and p.rows[entry] > 0]
    for entry in first[1:]:  # a common prefix
        table[entry, 0] = table[first[0], 0]
    return None, used, table.to(torch.int32), (sum(counts) + 2, p.page_size, p.heads_kv)


def _key_places(
    p: VarlenProblem, tensor: torch.Tensor, entry: int, cu: torch.Tensor | None, table: torch.Tensor | None
) -> list[torch.Tensor]:
    """The memory of each key of an entry: [heads, columns]."""
    if table is not None:
        return [tensor[int(table[entry, j // p.page_size]), j % p.page_size] for j in range(p.keys[entry])]
    if cu is not None:
        return list(tensor[int(cu[entry]) : int(cu[entry]) + p.keys[entry]])
    return list(tensor[entry].transpose(0, 1)[: p.keys[entry]])


def _mask(p: VarlenProblem, generator: torch.Generator) -> torch.Tensor | None:
    if p.mask is MaskTensor.NONE:
        return None
    sizes = (len(p.rows), p.heads_q, max(p.rows))
    own = [1 if broadcast else size for size, broadcast in zip(sizes, p.mask_broadcast, strict=True)]
    hidden = torch.rand(*own, max(p.keys), generator=generator) < 0.3
    hidden[0, 0, 0] = True  # a row that sees nothing
    if p.mask is MaskTensor.BOOL:
        return (~hidden).expand(*sizes, -1)
    values = torch.randn(hidden.shape, generator=generator) * 2
    return values.masked_fill(hidden, float("-inf")).to(DTYPES[p.dtype]).expand(*sizes, -1)
