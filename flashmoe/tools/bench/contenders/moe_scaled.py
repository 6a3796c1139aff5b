"""The layer with e4m3 weights: ours, our 16-bit layer with the same weights in bfloat16, and torch's composition.

torch's grouped product of 8 bits takes one scale for a row, not one for each 128 values of it, so weights are dequantised to
bfloat16 in every call. What computes in 16 bits rounds no activation to e4m3; a reference of its own judges it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch

from flashmoe.tools.bench.contenders import Contender, Prepared, always, flashmoe_available
from flashmoe.tools.bench.contenders.moe import BOTH, flashmoe_layer, grouped
from flashmoe.tools.problems.moe_scaled.tensors import ScaledInputs, SixteenBits, dequantize

Layer = Callable[..., Any]  # of ScaledInputs and ids


def _ours(inputs: ScaledInputs) -> Callable[[torch.Tensor], Any]:
    layer = partial(flashmoe_layer(), w13_scale=inputs.w13_scale, w2_scale=inputs.w2_scale)
    return lambda ids: layer(inputs.x, inputs.w13, inputs.w2, inputs.topk_weights, ids)


def _ours_in_sixteen_bits(inputs: ScaledInputs) -> Callable[[torch.Tensor], Any]:
    layer, (w13, w2) = flashmoe_layer(), inputs.dequantized
    return lambda ids: SixteenBits(layer(inputs.x, w13, w2, inputs.topk_weights, ids))


def _dequantized(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    return grouped(x, dequantize(w13, w13_scale), dequantize(w2, w2_scale), weights, ids)


def _torch(function: Layer, inputs: ScaledInputs) -> Callable[[torch.Tensor], Any]:
    tensors = (inputs.w13, inputs.w2, inputs.w13_scale, inputs.w2_scale, inputs.topk_weights)
    return lambda ids: SixteenBits(function(inputs.x, *tensors, ids))


def _compiled(inputs: ScaledInputs) -> Callable[[torch.Tensor], Any]:
    """Compiled once for all numbers of tokens above one: dequantising, which has none, takes nearly all of the time."""
    for tensor in (inputs.x, inputs.topk_weights, *inputs.routings) if inputs.problem.tokens > 1 else ():
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _torch(torch.compile(_dequantized, fullgraph=True, dynamic=False), inputs)


def _in_turn(bind: Callable[[ScaledInputs], Callable[[torch.Tensor], Any]]) -> Callable[[ScaledInputs], Prepared]:
    """Each call takes the next routing."""

    def prepare(inputs: ScaledInputs) -> Prepared:
        layer, ids = bind(inputs), cycle(inputs.routings)
        return Prepared(lambda: layer(next(ids)))

    return prepare


def _has_kernels(device: str) -> str:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        return "the kernels are for GPUs of compute capability 9.0"
    return flashmoe_available(device)


def contenders() -> tuple[Contender, ...]:
    torch_title = "torch: dequantise, grouped_mm"
    return (
        Contender("flashmoe", "flashmoe", BOTH, _has_kernels, _in_turn(_ours), ours=True),
        Contender("flashmoe-bf16", "flashmoe, bf16", BOTH, flashmoe_available, _in_turn(_ours_in_sixteen_bits)),
        Contender("torch-grouped", torch_title, BOTH, always, _in_turn(partial(_torch, _dequantized))),
        Contender("torch-grouped-compiled", f"{torch_title}, compiled", BOTH, always, _in_turn(_compiled)),
    )
