"""The tensors of a ragged or paged problem.

They are NaN wherever no row sees a key (past the used keys of a sequence, in unused pages, in the keys of sequences
without rows) and in query rows that belong to no sequence.
"""

import itertools
from dataclasses import dataclass

import torch

from flashmoe_build.emulation.compare import DTYPES
from flashmoe_tools.operations.attention.emulation.recurrence import exact_inputs
from flashmoe_tools.operations.serving.emulation.problem import SPARE_ROWS, Keys, MaskTensor, Rows, VarlenProblem

NAN = float("nan")
MASK_BLOCK = 64  # kMaskBlock
GARBAGE_PAGE = 10**6  # fills the block table after a sequence's own pages


@dataclass(frozen=True)
class Tensors:
    """``q``, ``k``, ``v`` and ``out`` as stored; ``sequences`` are views of them as [heads, rows or keys, columns]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    sequences: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    seqused_k: torch.Tensor | None
    block_table: torch.Tensor | None
    sinks: torch.Tensor | None
    mask: torch.Tensor | None  # [batch, heads, rows, keys], or for ALiBi [batch, heads], expanded

    def statistics(self, p: VarlenProblem) -> tuple[int, ...]:
        """Sizes of lse, dlse and row_dot: [batch, heads, rows], or [heads, total rows]."""
        if p.rows_layout is Rows.DENSE:
            return len(p.rows), p.heads_q, p.rows[0]
        return p.heads_q, self.q.shape[0]

    def of_rows(self, p: VarlenProblem, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Views of a tensor stored like ``q``, one per sequence: [heads, rows, columns]."""
        return _of_rows(p, tensor, self.cu_seqlens_q)

    def of_keys(self, p: VarlenProblem, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The same for the used keys, without pages: [heads, keys, columns]."""
        if self.cu_seqlens_k is None:
            return [own[:, :keys] for own, keys in zip(tensor, p.keys, strict=True)]
        firsts = self.cu_seqlens_k.tolist()
        return [tensor[first : first + keys].transpose(0, 1) for first, keys in zip(firsts, p.keys, strict=False)]

    def of_statistic(self, p: VarlenProblem, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The same for lse, dlse or row_dot: [heads, rows]."""
        if self.cu_seqlens_q is None:
            return list(tensor)
        firsts = self.cu_seqlens_q.tolist()
        return [tensor[:, first : first + rows] for first, rows in zip(firsts, p.rows, strict=False)]


def _offsets(lengths: tuple[int, ...], start: int, spare: int = 0) -> list[int]:
    return list(itertools.accumulate((length + spare for length in lengths), initial=start))


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _of_rows(p: VarlenProblem, tensor: torch.Tensor, cu: torch.Tensor | None) -> list[torch.Tensor]:
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
    for view in _of_rows(p, q, cu_q):
        view.copy_(exact_inputs(view, generator)[0] if p.is_exact else normal(*view.shape) * p.magnitude + 0.25)
    cu_k, used, table, pages = _lay_out_keys(p, generator)
    k, v = (torch.full((*pages, dim), NAN, dtype=dtype) for dim in (p.head_dim, p.head_dim_v))
    sequences = []
    for sequence, (q_view, length) in enumerate(zip(_of_rows(p, q, cu_q), p.keys, strict=True)):
        rows = []
        for tensor in (k, v):
            memory = _keys_of(p, tensor, sequence, cu_k, table)
            values = normal(length, p.heads_kv, tensor.shape[-1]) + 0.25
            if p.is_exact:
                values = exact_inputs(values.transpose(0, 1), generator)[1 if tensor is k else 2].transpose(0, 1)
            if p.rows[sequence] > 0:
                for index in range(length):  # if two sequences share a page, the first one's values stay
                    if torch.isnan(memory[index]).any():
                        memory[index].copy_(values[index])
            rows.append(torch.stack(memory[:length]) if length > 0 else values.to(dtype))
        sequences.append((q_view, rows[0].transpose(0, 1), rows[1].transpose(0, 1)))
    sinks = normal(p.heads_q) * 2 if p.has_sinks else None
    if table is not None:
        for sequence, (row_count, length) in enumerate(zip(p.rows, p.keys, strict=True)):
            behind = max(0, length - row_count - p.left) // p.page_size
            table[sequence, :behind] = GARBAGE_PAGE if sequence % 2 else -1  # for pages that windows have left behind
    out = torch.full((*q_sizes, p.head_dim_v), NAN, dtype=dtype)
    mask = _mask(p, generator)
    return Tensors(q, k, v, out, tuple(sequences), cu_q, cu_k, used, table, sinks, mask)


def _lay_out_keys(
    p: VarlenProblem, generator: torch.Generator
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, tuple[int, ...]]:
    """(cu_seqlens_k, seqused_k, block_table, sizes of k and v except the last)."""
    used = _int32(list(p.keys))
    if p.keys_layout is Keys.DENSE:
        return (
            None,
            used if p.spare_keys or len(set(p.keys)) > 1 else None,
            None,
            (len(p.keys), p.heads_kv, p.max_keys),
        )
    if p.keys_layout is Keys.RAGGED:
        cu = _int32(_offsets(p.keys, 0, p.spare_keys))
        return cu, used if p.spare_keys else None, None, (max(1, int(cu[-1])), p.heads_kv)
    counts = [-(-length // p.page_size) for length in p.keys]
    order = torch.randperm(
        sum(counts) + 2, generator=generator
    ).tolist()  # two pages belong to no sequence, including the first
    order.insert(0, order.pop(order.index(0)))
    table = torch.full((len(p.keys), max(*counts, -(-p.max_keys // p.page_size), 1)), GARBAGE_PAGE)
    table[:, -1] = -7
    for sequence, count in enumerate(counts):
        table[sequence, :count] = torch.tensor([order.pop() for _ in range(count)])
    first = [index for index, length in enumerate(p.keys) if length >= p.page_size and p.rows[index] > 0]
    for sequence in first[1:]:  # a common prefix
        table[sequence, 0] = table[first[0], 0]
    return None, used, table.to(torch.int32), (sum(counts) + 2, p.page_size, p.heads_kv)


def _keys_of(
    p: VarlenProblem, tensor: torch.Tensor, sequence: int, cu: torch.Tensor | None, table: torch.Tensor | None
) -> list[torch.Tensor]:
    """The memory of each key of a sequence: [heads, columns]."""
    if table is not None:
        return [tensor[int(table[sequence, j // p.page_size]), j % p.page_size] for j in range(p.keys[sequence])]
    if cu is not None:
        return list(tensor[int(cu[sequence]) : int(cu[sequence]) + p.keys[sequence]])
    return list(tensor[sequence].transpose(0, 1)[: p.keys[sequence]])


def _mask(p: VarlenProblem, generator: torch.Generator) -> torch.Tensor | None:
    if p.mask is MaskTensor.NONE:
        return None
    sizes = (len(p.rows), p.heads_q, max(p.rows))
    own = [1 if broadcast else size for size, broadcast in zip(sizes, p.mask_broadcast, strict=True)]
    if p.mask is MaskTensor.ALIBI:  # both signs
        return (torch.rand(*own[:2], generator=generator) * 0.4 - 0.05).expand(*sizes[:2])
    hidden = torch.rand(*own, max(p.keys), generator=generator) < 0.3
    hidden[0, 0, 0] = True  # a row that sees nothing
    if p.has_lowest:
        hidden[..., 1:2, : 2 * max(p.keys) // 3] = True  # and one that only sees the last keys
    if p.hides_blocks:
        blocks = _hidden_blocks(p, hidden.shape, generator)
        hidden |= blocks.repeat_interleave(MASK_BLOCK, 2).repeat_interleave(MASK_BLOCK, 3)[
            :, :, : hidden.shape[2], : hidden.shape[3]
        ]
    if p.mask is MaskTensor.BOOL:
        return (~hidden).expand(*sizes, -1)
    values = torch.randn(hidden.shape, generator=generator) * 2
    low = torch.finfo(DTYPES[p.dtype]).min if p.has_lowest else float("-inf")
    return values.masked_fill(hidden, low).to(DTYPES[p.dtype]).expand(*sizes, -1)


def _hidden_blocks(p: VarlenProblem, sizes: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Blocks of a mask of these sizes that are hidden as a whole: [batch, heads, row blocks, key blocks]."""
    counts = [-(-size // MASK_BLOCK) for size in sizes[2:]]
    if p.visible_blocks:
        hidden = torch.ones(len(p.visible_blocks), *counts, dtype=torch.bool)
        for matrix, rows in zip(hidden, p.visible_blocks, strict=True):
            for row, keys in zip(matrix, rows, strict=True):
                row[list(keys)] = False
        return hidden.view(*sizes[:2], *counts)
    hidden = torch.rand(*sizes[:2], *counts, generator=generator) < 0.5
    hidden[:, :, 1] = hidden[:, :, 3:] = True  # of rows that see nothing
    hidden[..., 4:6] = True  # of keys that nothing sees
    hidden[0, 0, :, :3] = True
    return hidden
