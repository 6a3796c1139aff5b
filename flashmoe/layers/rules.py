"""What the rule of linear's own is told as (flashmoe/rules.py); its tensors keep those of the grouped product (flashmoe/moe/rules.py)."""

from __future__ import annotations

from flashmoe.errors import ArgumentError
from flashmoe.rules import by_error

RULES = by_error(
    {ArgumentError: {"linear.tile": "tile is {tile}; supported here: -1, which chooses, to {last}; leave it at -1"}}
)
