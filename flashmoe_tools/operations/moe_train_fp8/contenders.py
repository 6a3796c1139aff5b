"""A layer's training step with e4m3 products: ours, ours with prequantised weights, our 16-bit step, and torch's.

Weights need quantising only once per optimizer step, even if the batch is processed in several parts.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch

from flashmoe_tools.bench.contenders import Contender, Prepared, always, flashmoe_available
from flashmoe_tools.operations.moe.contenders import BOTH, Layer, flashmoe_layer, grouped
from flashmoe_tools.operations.moe_backward.reference import BackwardInputs
from flashmoe_tools.operations.moe_scaled.contenders import has_kernels
from flashmoe_tools.operations.moe_train_fp8.reference import SixteenBits


def _ours(inputs: BackwardInputs, *, is_quantized: bool = False) -> Prepared:
    layer, leaves = partial(flashmoe_layer(), precision="fp8"), inputs.leaves()
    if is_quantized:
        quantize = import_module("flashmoe").quantize_weights
        layer = partial(layer, quantized=(quantize(inputs.w13), quantize(inputs.w2)))
    return Prepared(lambda: torch.autograd.grad(layer(*leaves, inputs.topk_ids), leaves, inputs.dout))


def _sixteen_bits(make_layer: Callable[[], Layer]) -> Callable[[BackwardInputs], Prepared]:
    def prepare(inputs: BackwardInputs) -> Prepared:
        layer, leaves = make_layer(), inputs.leaves()
        return Prepared(lambda: SixteenBits(torch.autograd.grad(layer(*leaves, inputs.topk_ids), leaves, inputs.dout)))

    return prepare


def contenders() -> tuple[Contender, ...]:
    return (
        Contender("flashmoe", "flashmoe", BOTH, has_kernels, _ours, ours=True),
        Contender(
            "flashmoe-quantized",
            "flashmoe, weights quantised before",
            BOTH,
            has_kernels,
            partial(_ours, is_quantized=True),
            ours=True,
        ),
        Contender("flashmoe-bf16", "flashmoe, bf16", BOTH, flashmoe_available, _sixteen_bits(flashmoe_layer)),
        Contender("torch-grouped", "torch: grouped_mm", BOTH, always, _sixteen_bits(lambda: grouped)),
    )
