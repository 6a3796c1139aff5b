"""How the key blocks of a batch are divided among the parts (work shares), as described in csrc/mla/tile_scheduler.cuh."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LANES = 32  # sequences that a warp processes at once
LEAD = 2  # extra cost of a sequence per part (Q and the output), in key blocks


@dataclass(frozen=True)
class Segment:
    """Key blocks ``begin`` to ``end`` of a sequence, and the slot for the part's partial results."""

    part: int
    sequence: int
    begin: int
    end: int
    blocks: int  # number of key blocks of the sequence
    slot: int

    @property
    def is_whole(self) -> bool:
        return self.begin == 0 and self.end == self.blocks


def segments(keys: Sequence[int], block_n: int, parts: int, least_share: int, num_splits: int) -> Iterator[Segment]:
    """The segments of all parts, in order."""
    blocks = [max(1, -(-length // block_n)) for length in keys]
    if num_splits == 1:
        yield from (Segment(index, index, 0, count, count, 2 * index) for index, count in enumerate(blocks))
        return
    most = max(blocks)
    lead, least_share = LEAD, max(least_share, -(-(most - 1) // (num_splits - 1)))
    share = max(-(-sum(count + lead for count in blocks) // parts), least_share)
    if min(blocks) == most:
        item = most + lead
        aligned = -(-share // item) * item
        if len(blocks) <= min(LANES, parts):
            each = parts // len(blocks)
            aligned = max(-(-most // each), least_share)
            item = each * aligned
        if aligned <= share + share // 16:
            share, lead = aligned, item - most
    first = 0
    for sequence, count in enumerate(blocks):
        first += lead
        block = 0
        while block < count:
            part = (first + block) // share
            end = min(count, (part + 1) * share - first)
            slot = 2 * part + (first + block > part * share)
            yield Segment(part, sequence, block, end, count, slot)
            block = end
        first += count
