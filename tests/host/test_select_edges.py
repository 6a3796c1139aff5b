"""Where the fused backward kernel begins: exactly at the lengths, heads and rounds that were measured. And what refusals say."""

from typing import Any

import pytest

MULTIPROCESSORS = 132  # of the fixture's GPU


@pytest.mark.parametrize(
    ("head_dim", "batch", "heads", "rows", "keys", "is_fused"),
    [
        (128, 1, 4, 16384, 16384, True),
        (128, 1, 3, 16384, 16384, False),
        (128, 2, 2, 16384, 16384, True),
        (128, 1, 1, 65536, 65536, True),
        (128, 16, 32, 1024, 1024, True),
        (128, 16, 32, 1023, 1024, False),
        (128, 16, 32, 1024, 1023, False),
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


# (choice by its number, further arguments, what has no kernel)
REFUSALS = (
    (0, {}, "head_dim 64"),
    (0, {"flags": 2}, "head_dim 64, the same bits in every call"),
    (1, {}, "head_dim 64"),
    (1, {"page_size": 12}, "head_dim 64, pages of 12 keys"),
    (1, {"flags": 2, "head_dim": 40}, "head_dim 40, the same bits in every call"),
    (1, {"flags": 1}, "ALiBi, head_dim 64"),
    (2, {}, "the gradient of ragged or banded attention, head_dim 64"),
    (3, {}, "the gradient of attn_mask, head_dim 64"),
    (3, {"flags": 2}, "the gradient of an attn_mask with one row or one key"),
    (4, {}, "a float8_e4m3fn cache, head_dim 64"),
    (5, {}, "products of float8_e4m3fn, head_dim 64"),
    (6, {}, "dropout, head_dim 64"),
    (7, {}, "dropout behind a softcap or a mask tensor, head_dim 64"),
    (8, {}, "the gradient of dropout, head_dim 64"),
    (9, {}, "gradients of keys and values alone"),
    (10, {}, "appending to a cache"),
    (11, {}, "appending to a float8_e4m3fn cache"),
)


@pytest.mark.parametrize(("which", "given", "what"), REFUSALS, ids=[what for _, _, what in REFUSALS])
def test_what_has_no_kernel_is_named(choose_of_hopper_build: Any, which: int, given: dict[str, int], what: str) -> None:
    """Of a family that the environment names, in a build that has none for the GPU; past the dense kernels' head dims by the rule for those."""
    told = choose_of_hopper_build.refusal(which, forced="sm90", **given)
    beginning = "flashmoe:argument: FLASHMOE_KERNEL=sm90: this family has no kernel for float16"
    assert told == f"{beginning}, {what} on a GPU (compute capability 8.0); unset it or name another family"
    head, _, tail = what.partition(", head_dim ")
    if tail:
        assert choose_of_hopper_build.refusal(which, **{**given, "head_dim": 257}) == (
            f"flashmoe:attention.wide|what={head}|head_dim=257|most=256|"
        )
        assert "no kernel for a GPU" in choose_of_hopper_build.refusal(which, **{**given, "head_dim": 256})
