"""How many samples fit, and in which order they are taken. Uses neither torch nor a clock."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

# With a time budget, no cell gets fewer samples per contender than this as long as the budget lasts.
MIN_SAMPLES = 30
# The same for blocks: with fewer pairs nothing can be decided.
MIN_BLOCKS = 10
# If MIN_SAMPLES take longer than this, fewer are taken, down to one sample per block.
FLOOR_SECONDS = 1.0
# The longest that one call of every contender, back to back, may take if slots warm themselves. A GPU at its power
# limit changes its clock every 15 to 20 ms; contenders that alternate at least that fast share it, and the ratio of a
# pair is stable (slots of ten calls of 3 to 7 ms: 5% from pair to pair on an H100, all of it caused by the clock).
ROUND_SECONDS = 0.03


@dataclass(frozen=True)
class Plan:
    """``blocks`` blocks of ``block`` samples of each contender."""

    blocks: int
    block: int

    @property
    def samples(self) -> int:
        return self.blocks * self.block


def plan_samples(
    repeats: int,
    block: int,
    sample_seconds: Sequence[float],
    share_seconds: float | None,
    floor: int = MIN_SAMPLES,
    untimed: int = 0,
) -> Plan:
    """Plans ``repeats`` samples per contender, or as many as ``share_seconds`` allow but at least ``floor``.

    If ``floor`` samples take longer than ``FLOOR_SECONDS``, what fits into those. ``sample_seconds`` holds the measured
    wall time of one call of each contender, ``untimed`` the number of calls that begin a slot. Blocks get shorter
    before their number is reduced, because a verdict is based on pairs of blocks. They also shrink to
    ``ROUND_SECONDS``, but only if a slot begins with an untimed call; otherwise every sample would be the first of its
    slot.
    """
    round_seconds = max(sum(sample_seconds), 1e-9)
    longest = min(block, max(1, int(ROUND_SECONDS / round_seconds))) if untimed else block
    samples = repeats
    if share_seconds is not None:
        in_a_second = longest / (longest + untimed) / round_seconds
        floor = min(floor, max(MIN_BLOCKS, int(FLOOR_SECONDS * in_a_second)))
        samples = min(repeats, max(min(floor, repeats), int(share_seconds * in_a_second)))
    size = max(1, min(longest, samples // MIN_BLOCKS))
    return Plan(blocks=max(1, -(-samples // size)), block=size)


def share_of_budget(
    budget: float | None, elapsed: float, work_left: Sequence[float], before_samples: float = 0.0
) -> float | None:
    """Seconds that the next cell may take: its share of the remaining time, so unused time passes on.

    ``work_left`` holds the operations of the remaining cells, the next one first. Every cell also gets a tenth of the
    mean, because a small one still has to be warmed up, and ``before_samples``: the time that cells have taken so far
    for checking, compiling and warming up.
    """
    if budget is None:
        return None
    base = 0.1 * sum(work_left) / len(work_left)
    left = max(0.0, budget - elapsed)
    fixed = min(before_samples, left / len(work_left))
    return fixed + (left - fixed * len(work_left)) * (work_left[0] + base) / (sum(work_left) + base * len(work_left))


def block_orders(names: Sequence[str], blocks: int, seed: int) -> list[list[str]]:
    """One order of the contenders per block, each drawn independently; the sign test relies on this."""
    source = random.Random(seed)
    return [source.sample(list(names), len(names)) for _ in range(blocks)]
