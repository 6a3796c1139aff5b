"""Transposed operands on the emulated machine: each expert's rows fill complete blocks of 128.

There may be an unused block between two experts.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

from flashmoe_tools.operations.moe_scaled.formats import BLOCK


def blocks(slots: int, experts: int) -> int:
    return slots // BLOCK + experts


def experts_of(offsets: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """For each expert with rows: its rows, and its blocks."""
    ends = offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(ends)):
        if end > begin:
            first = begin // BLOCK + expert
            yield slice(begin, end), slice(first, first + -(-(end - begin) // BLOCK))


def rows_of(at: slice) -> slice:
    """The padded rows of blocks."""
    return slice(at.start * BLOCK, at.stop * BLOCK)


def whole(rows: torch.Tensor) -> torch.Tensor:
    """An expert's rows, padded with zeros to complete blocks."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % BLOCK))
