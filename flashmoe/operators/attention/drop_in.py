"""Where one call of the operator is scaled_dot_product_attention itself, without rearranging its arguments."""

from __future__ import annotations

from collections.abc import Sequence


def is_drop_in(q: Sequence[int], k: Sequence[int], causal: bool, enable_gqa: bool) -> bool:
    """Four dimensions, nothing to broadcast, a square causal mask; of the shapes [B, Hq, Sq, D] and [B, Hkv, Sk, D].

    The extension's ``is_usual`` is the same rule for calls that need no Python; a test compares the two.
    """
    return len(q) == len(k) == 4 and q[0] == k[0] and (enable_gqa or q[1] == k[1]) and not (causal and q[2] != k[2])
