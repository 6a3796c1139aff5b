"""Mixture of experts: the public functions, and the operators behind them.

api         fused_moe, topk_route, grouped_mm
module      MoE, a layer with its router as an ``nn.Module``
options     allowed words and limits; the operators' arguments by name
errors      typed errors for a rule that a call broke
operators   the operators as data for ``torch.ops.flashmoe``
fake        results without data, and flop counts
autograd    gradients, vmap, torch.func
scaled      the layer with float8_e4m3fn weights
training    the layer with float8_e4m3fn products, and their gradients
mxfp4       the layer with 4-bit weights
packed      4-bit weights in the order of the kernel that is specialised for it
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    import flashmoe

    where = f"; it is flashmoe.{name}" if name in flashmoe.__all__ else ""
    msg = f"module 'flashmoe.moe' has no attribute {name!r}{where}"
    raise AttributeError(msg)
