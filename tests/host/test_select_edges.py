"""Where the fused backward kernel begins: exactly at the lengths, heads and rounds that were measured."""

from __future__ import annotations

from typing import Any

import pytest

MULTIPROCESSORS = 132  # of the fixture's GPU


@pytest.mark.parametrize(
    ("head_dim", "batch", "heads", "rows", "keys", "is_fused"),
    [
        (128, 1, 8, 16384, 16384, True),
        (128, 1, 7, 16384, 16384, False),
        (128, 2, 4, 16384, 16384, True),
        (128, 4, 32, 2048, 2048, True),
        (128, 4, 32, 2047, 2048, False),
        (128, 4, 32, 2048, 2047, False),
        (64, 16, 32, 1024, 1024, True),
        (64, 16, 32, 1023, 1024, False),
        (64, 16, 32, 1024, 1023, False),
        (64, 1, 1, 131072, 131072, True),
    ],
)
def test_lengths_and_heads(
    choose: Any, head_dim: int, batch: int, heads: int, rows: int, keys: int, is_fused: bool
) -> None:
    assert choose.fused(90, head_dim, False, batch, heads, rows, keys) is is_fused


@pytest.mark.parametrize(("keys", "rounds"), [(4096, 3), (1536, 12)])
def test_rounds_of_tiles(choose: Any, keys: int, rounds: int) -> None:
    """Whole multiples of the multiprocessors, found by the number of heads at which the choice changes."""
    first = next(heads for heads in range(1, 400) if choose.fused(90, 64, False, 1, heads, 4096, keys))
    tiles = {-(-keys // block) * first for block in (64, 80, 96, 128, 192)}
    before = {-(-keys // block) * (first - 1) for block in (64, 80, 96, 128, 192)}
    assert any(a >= rounds * MULTIPROCESSORS > b for a, b in zip(sorted(tiles), sorted(before), strict=True))
    exact = next((heads for heads in range(1, 800) if 32 * heads == rounds * MULTIPROCESSORS), None)
    assert exact is None or choose.fused(90, 64, False, 1, exact, 4096, 4096)
