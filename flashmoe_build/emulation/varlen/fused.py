"""The sums of dq that the fused backward kernel of ragged and banded attention makes: where they lie, and whose turns there were.

Numbered here from the lengths alone, by a table, not by the kernel's rule for a row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashmoe_build.emulation.fused_queries import PIECE_ROWS, TILE_KEYS
from flashmoe_build.emulation.varlen.problem import Rows, VarlenProblem
from flashmoe_build.emulation.varlen.tensors import Tensors


@dataclass(frozen=True)
class Sums:
    """``memory`` holds the pieces (NaN), ``[heads, pieces, ...]``, and behind them a turn for each (zeros)."""

    memory: torch.Tensor
    pieces: torch.Tensor
    turns: torch.Tensor
    first: tuple[int, ...]  # piece of each entry


def make_sums(p: VarlenProblem, tensors: Tensors, width: int) -> Sums:
    if p.rows_layout is Rows.DENSE:
        own = math.ceil(p.rows[0] / PIECE_ROWS)
        count, first = own * len(p.rows), tuple(own * entry for entry in range(len(p.rows)))
    else:
        assert tensors.cu_seqlens_q is not None
        starts = tensors.cu_seqlens_q.tolist()[:-1]
        count = tensors.q.shape[0] // PIECE_ROWS + len(p.rows) + 2
        first = tuple(start // PIECE_ROWS + entry + 1 for entry, start in enumerate(starts))
    memory = torch.full((p.heads_q * count * (PIECE_ROWS * width + 1),), math.nan)
    sums, turns = memory.split([p.heads_q * count * PIECE_ROWS * width, p.heads_q * count])
    turns.zero_()
    pieces = sums.view(p.heads_q, count, width // 8, 4, 8, 4, 2, 2)
    return Sums(memory, pieces, turns.view(torch.int32).view(p.heads_q, count), first)


def rows_of_entry(p: VarlenProblem, sums: Sums, entry: int) -> torch.Tensor:
    """[heads, rows, head_dim] of an entry, unscaled: see rows_of_sums of the dense kernels. Zeros where no tile has had a turn."""
    own = slice(sums.first[entry], sums.first[entry] + math.ceil(p.rows[entry] / PIECE_ROWS))
    unused = (sums.turns[:, own] == 0).view(p.heads_q, -1, *[1] * 6)
    pieces = sums.pieces[:, own].masked_fill(unused, 0.0)
    rows = pieces.permute(0, 1, 3, 6, 4, 2, 5, 7).flatten(1, 4).flatten(2)
    return rows[:, : p.rows[entry], : p.head_dim]


def expected_turns(p: VarlenProblem, sums: Sums) -> torch.Tensor:
    """[pieces]: how many tiles of keys have one that a row of the piece, or one that would follow the last, sees."""
    turns = torch.zeros(sums.turns.shape[1], dtype=torch.int32)
    for entry, (rows, keys) in enumerate(zip(p.rows, p.keys, strict=True)):
        key = torch.arange(keys)[None, :]
        for piece in range(math.ceil(rows / PIECE_ROWS)):
            at = torch.arange(PIECE_ROWS * piece, PIECE_ROWS * (piece + 1))[:, None] + (keys - rows)
            seen = ((key >= at - p.left) & (key <= at + p.right)).any(0)
            tiles = [bool(part.any()) for part in seen.split(TILE_KEYS)]
            turns[sums.first[entry] + piece] = sum(tiles)
    return turns
