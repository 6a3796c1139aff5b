"""Transposed operands on the emulated machine: an expert's rows fill whole blocks of 128, and between two experts there may be a block
that nobody uses."""

from collections.abc import Iterator
from itertools import pairwise

import torch

from flashmoe_tools.operations.moe_scaled.formats import BLOCK


def blocks(slots: int, experts: int) -> int:
    return slots // BLOCK + experts


def experts_of(offsets: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Of each expert with rows these, and its blocks."""
    ends = offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(ends)):
        if end > begin:
            first = begin // BLOCK + expert
            yield slice(begin, end), slice(first, first + -(-(end - begin) // BLOCK))


def rows_of(at: slice) -> slice:
    """The padded rows of blocks."""
    return slice(at.start * BLOCK, at.stop * BLOCK)


def whole(rows: torch.Tensor) -> torch.Tensor:
    """An expert's rows, and zeros to the end of the last block."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % BLOCK))
