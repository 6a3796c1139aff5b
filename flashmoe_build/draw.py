"""Draws the sample that .ci/run takes of what CI's workflow runs in full. It depends on the commit, so that over commits everything runs.

``FLASHMOE_DRAW`` is any text; .ci/run sets the commit. Without it everything runs.
"""

import hashlib
from collections.abc import Iterable

VARIABLE = "FLASHMOE_DRAW"


def number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def drawn(names: Iterable[str], of: int, draw: str) -> set[str]:
    """One in ``of`` of the names, and at least one. For one ``of`` the draws divide the names into ``of`` disjoint samples."""
    ordered = sorted(set(names), key=number)
    return set(ordered[number(draw) % min(of, len(ordered)) :: of]) if ordered else set()
