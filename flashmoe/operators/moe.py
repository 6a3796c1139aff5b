"""The operators of a mixture-of-experts layer, where ``find_operators`` looks for them."""

from __future__ import annotations

from flashmoe.moe.operators import OPERATORS

__all__ = ["OPERATORS"]
