"""The message for linear's own argument rule (flashmoe/rules.py); its tensors follow the grouped product's rules (flashmoe/moe/rules.py)."""

from __future__ import annotations

from flashmoe.errors import ArgumentError
from flashmoe.rules import by_error

RULES = by_error(
    {ArgumentError: {"linear.tile": "tile is {tile}; supported here: -1, which chooses, to {last}; leave it at -1"}}
)
