"""Dynamic shared memory of one thread block, itemised, per kernel family.

Every generated translation unit asserts that the sum equals the kernel's own ``Spec::kSharedBytes``, so a formula here
that drifts from its kernel does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Items = tuple[tuple[str, int], ...]


def _mma_sync(
    head_dim: int, block_m: int, block_n: int, stages: int, warps: int, element: int, options: Mapping[str, int]
) -> Items:
    """sm75 and sm80: csrc/attention/{sm75,sm80}/spec.cuh. The output tile reuses Q's bytes, so it costs none."""
    tile = block_n * head_dim * element
    return (("Q tile", block_m * head_dim * element), ("K tiles", stages * tile), ("V tiles", stages * tile))


def _sm90(
    head_dim: int, block_m: int, block_n: int, stages: int, warps: int, element: int, options: Mapping[str, int]
) -> Items:
    """csrc/attention/forward/sm90/spec.cuh: 64-column slabs, each a multiple of 1024 bytes; barriers and tile words at the end."""
    consumers = block_m // 64
    slab = 64 * 64 * element  # of the 64 rows of one consumer warpgroup
    query_tiles = options["query_stages"] * consumers
    keys = stages * block_n * head_dim * element
    return (
        ("Q tiles", query_tiles * (head_dim // 64) * slab),
        ("K tiles", keys),
        ("V tiles", keys),
        ("output slabs", consumers * options["output_slabs"] * slab),
        ("tile words", query_tiles * 16),
        ("mbarriers", (2 * query_tiles + 4 * stages) * 8),
    )


def _combine(
    head_dim: int, block_m: int, block_n: int, stages: int, warps: int, element: int, options: Mapping[str, int]
) -> Items:
    """The second pass of split attention keeps everything in registers."""
    return ()


# By family; an operation that is not the forward stands under its own name.
FORMULAS: Mapping[str, Callable[[int, int, int, int, int, int, Mapping[str, int]], Items]] = {
    "sm75": _mma_sync,
    "sm80": _mma_sync,
    "sm90": _sm90,
    "attention_combine": _combine,
}


def itemise(
    family: str,
    *,
    head_dim: int,
    block_m: int,
    block_n: int,
    stages: int,
    warps: int,
    element_bytes: int,
    options: Mapping[str, int],
) -> Items:
    """(name, bytes) of each part; raises KeyError for a family that has no formula."""
    return FORMULAS[family](head_dim, block_m, block_n, stages, warps, element_bytes, options)
