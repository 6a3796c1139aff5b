"""A layer's training step with e4m3 products: ours, our step in 16 bits, and torch's."""

from collections.abc import Callable
from functools import partial

import torch

from flashmoe_tools.bench.contenders import Contender, Prepared, always, flashmoe_available
from flashmoe_tools.operations.moe.contenders import BOTH, Layer, flashmoe_layer, grouped
from flashmoe_tools.operations.moe_backward.reference import BackwardInputs
from flashmoe_tools.operations.moe_scaled.contenders import has_kernels
from flashmoe_tools.operations.moe_train_fp8.reference import SixteenBits


def _ours(inputs: BackwardInputs) -> Prepared:
    layer, leaves = partial(flashmoe_layer(), precision="fp8"), inputs.leaves()
    return Prepared(lambda: torch.autograd.grad(layer(*leaves, inputs.topk_ids), leaves, inputs.dout))


def _sixteen_bits(make_layer: Callable[[], Layer]) -> Callable[[BackwardInputs], Prepared]:
    def prepare(inputs: BackwardInputs) -> Prepared:
        layer, leaves = make_layer(), inputs.leaves()
        return Prepared(lambda: SixteenBits(torch.autograd.grad(layer(*leaves, inputs.topk_ids), leaves, inputs.dout)))

    return prepare


def contenders() -> tuple[Contender, ...]:
    return (
        Contender("flashmoe", "flashmoe", BOTH, has_kernels, _ours, ours=True),
        Contender("flashmoe-bf16", "flashmoe, bf16", BOTH, flashmoe_available, _sixteen_bits(flashmoe_layer)),
        Contender("torch-grouped", "torch: grouped_mm", BOTH, always, _sixteen_bits(lambda: grouped)),
    )
