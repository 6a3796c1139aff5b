"""Floating-point operations of the operators, for torch.utils.flop_counter.FlopCounterMode.

Counted as torch counts its own attention: the matrix products alone, two operations for a multiply-add, and all of the
scores under a causal mask, too. So utilisation figures of a model do not change with the attention that it calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

FORWARD_PRODUCTS = 2  # q k^T and P v
BACKWARD_PRODUCTS = 5  # the scores again, dV, dP, dQ and dK


def register() -> None:
    """Called once by ``_extension.load``."""
    operators = torch.ops.flashmoe
    register_flop_formula(
        (
            operators.flash_attention_forward,
            operators._flash_attention_inference,
            operators._flash_attention_drop_in,
        )
    )(forward_flops)
    register_flop_formula(operators.flash_attention_backward)(backward_flops)


def forward_flops(q: Sequence[int], k: Sequence[int], *_: Any, **__: Any) -> int:
    """q [B, Hq, Sq, D] and k [B, Hkv, Sk, D] as shapes."""
    return FORWARD_PRODUCTS * _product(q, k)


def backward_flops(grad_out: Any, grad_lse: Any, q: Sequence[int], k: Sequence[int], *_: Any, **__: Any) -> int:
    """Shapes, as the backward operator takes its tensors."""
    return BACKWARD_PRODUCTS * _product(q, k)


def _product(q: Sequence[int], k: Sequence[int]) -> int:
    batch, heads, rows, head_dim = q
    return 2 * batch * heads * rows * k[2] * head_dim
