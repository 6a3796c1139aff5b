"""Dynamic shared memory of one thread block, itemised, per kernel family.

Every generated translation unit asserts that the sum equals the kernel's own ``Spec::kSharedBytes``, so a formula here
that drifts from its kernel does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Items = tuple[tuple[str, int], ...]


def _sm80(head_dim: int, block_m: int, block_n: int, stages: int, warps: int, element: int, _: Mapping[str, int]) -> Items:
    tile = block_n * head_dim * element
    return (("Q tile", block_m * head_dim * element), ("K tiles", stages * tile), ("V tiles", stages * tile))


FORMULAS: Mapping[str, Callable[[int, int, int, int, int, int, Mapping[str, int]], Items]] = {"sm80": _sm80}


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
