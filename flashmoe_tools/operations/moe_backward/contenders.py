"""A layer's training step: the forward pass, then autograd for the gradients of x, both weights and routing weights."""

from collections.abc import Callable

import torch

from flashmoe_tools.bench.contenders import Contender, Prepared, flashmoe_available
from flashmoe_tools.operations.moe.contenders import BOTH, LAYERS, Layer, flashmoe_layer
from flashmoe_tools.operations.moe_backward.reference import BackwardInputs


def _step(make_layer: Callable[[], Layer]) -> Callable[[BackwardInputs], Prepared]:
    def prepare(inputs: BackwardInputs) -> Prepared:
        layer, leaves = make_layer(), inputs.leaves()

        def call() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(layer(*leaves, inputs.topk_ids), leaves, inputs.dout)

        return Prepared(call)

    return prepare


def contenders() -> tuple[Contender, ...]:
    """Ours, and the forward pass's torch contenders under the same names."""
    return (
        Contender("flashmoe", "flashmoe", BOTH, flashmoe_available, _step(flashmoe_layer), ours=True),
        *(Contender(name, title, devices, test, _step(make)) for name, title, devices, test, make in LAYERS),
    )
