"""What .ci/run takes of that which CI's workflow runs whole: drawn by the commit, so that over commits every part has its turn.

``FLASHMOE_DRAW`` is any text; .ci/run sets the commit. Without it everything runs.
"""

import hashlib
from collections.abc import Iterable

VARIABLE = "FLASHMOE_DRAW"


def number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def drawn(names: Iterable[str], of: int, draw: str) -> set[str]:
    """One of ``of`` of the names, at least one of any. Each draw takes one of ``of`` parts, which have no name in common."""
    ordered = sorted(set(names), key=number)
    return set(ordered[number(draw) % min(of, len(ordered)) :: of]) if ordered else set()
