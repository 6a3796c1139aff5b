"""The partials of dq that the fused backward kernel of ragged attention adds up: their places and ranks.

A rank is the number of tiles that add to a partial. Partials are numbered here by a table from the lengths, not by the
kernel's rule for a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashmoe_tools.operations.attention_backward.emulation.fused import PARTIAL_ROWS, TILE_KEYS, Partials
from flashmoe_tools.operations.serving.emulation.problem import VarlenProblem
from flashmoe_tools.operations.serving.emulation.tensors import Tensors


@dataclass(frozen=True)
class RaggedPartials:
    """``all``: [heads, partials of a head]; ``first``: the first partial of each sequence."""

    all: Partials
    first: tuple[int, ...]

    @property
    def memory(self) -> torch.Tensor:
        return self.all.memory

    @classmethod
    def of(cls, p: VarlenProblem, tensors: Tensors, width: int) -> RaggedPartials:
        if tensors.cu_seqlens_q is None:
            own = math.ceil(p.rows[0] / PARTIAL_ROWS)
            count, first = own * len(p.rows), tuple(own * sequence for sequence in range(len(p.rows)))
        else:
            starts = tensors.cu_seqlens_q.tolist()[:-1]
            count = tensors.q.shape[0] // PARTIAL_ROWS + len(p.rows) + 2
            first = tuple(start // PARTIAL_ROWS + sequence + 1 for sequence, start in enumerate(starts))
        return cls(Partials.of((p.heads_q, count), width), first)

    def rows_of(self, p: VarlenProblem, sequence: int) -> torch.Tensor:
        """[heads, rows, head_dim] of a sequence, unscaled."""
        first = self.first[sequence]
        rows = self.all.rows(first, first + math.ceil(p.rows[sequence] / PARTIAL_ROWS))
        return rows[:, : p.rows[sequence], : p.head_dim]

    def expected_ranks(self, p: VarlenProblem) -> torch.Tensor:
        """[partials]: the number of key tiles with a key that one of the partial's rows sees.

        Rows that would follow the last one count too.
        """
        ranks = torch.zeros(self.all.ranks.shape[1], dtype=torch.int32)
        for sequence, (rows, keys) in enumerate(zip(p.rows, p.keys, strict=True)):
            key = torch.arange(keys)[None, :]
            for index in range(math.ceil(rows / PARTIAL_ROWS)):
                at = torch.arange(PARTIAL_ROWS * index, PARTIAL_ROWS * (index + 1))[:, None] + (keys - rows)
                seen = ((key >= at - p.left) & (key <= at + p.right)).any(0)
                tiles = [bool(tile.any()) for tile in seen.split(TILE_KEYS)]
                ranks[self.first[sequence] + index] = sum(tiles)
        return ranks
