"""The operator of linear, as data."""

from __future__ import annotations

from flashmoe.layers import autograd
from flashmoe.operator import Operator

OPERATORS = (
    Operator(
        "_linear",
        fake=autograd.fake,
        flops=autograd.flops,
        autocast=3,
        gradient=autograd.gradient,
        setup_context=autograd.setup_context,
        vmap=autograd.vmap,
    ),
)
