"""Mixture of experts: everything that a user calls, and what torch must know about the operators behind it.

api         fused_moe, topk_route, grouped_mm
module      MoE, a layer with its router as an ``nn.Module``
options     words and limits; the operators' arguments by name
errors      which rule a call broke, in words
operators   the operators as data: what ``torch.ops.flashmoe`` is told about each
fake        results without data, and costs
autograd    gradients, vmap, torch.func
scaled      the layer with float8_e4m3fn weights
training    the layer with products of float8_e4m3fn, and their gradients
mxfp4       the layer with weights of 4 bits
packed      these weights in the order of the kernel that is made for it
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    import flashmoe

    where = f"; it is flashmoe.{name}" if name in flashmoe.__all__ else ""
    msg = f"module 'flashmoe.moe' has no attribute {name!r}{where}"
    raise AttributeError(msg)
