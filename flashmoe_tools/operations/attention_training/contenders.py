"""Forward and then backward pass through autograd, for every contender of the forward pass."""

from collections.abc import Callable
from dataclasses import replace

import torch

from flashmoe_tools.bench.contenders import Contender, Prepared
from flashmoe_tools.operations.attention import contenders as attention
from flashmoe_tools.operations.attention.reference import Inputs
from flashmoe_tools.operations.attention_backward.reference import BackwardInputs


def _with_backward(prepare: Callable[[Inputs], Prepared]) -> Callable[[BackwardInputs], Prepared]:
    def prepare_both(inputs: BackwardInputs) -> Prepared:
        leaves = [tensor.detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
        forward = prepare(Inputs(inputs.problem, *leaves)).call
        return Prepared(lambda: torch.autograd.grad(forward(), leaves, inputs.dout))

    return prepare_both


def contenders() -> tuple[Contender, ...]:
    """The forward pass's contenders under the same names, except FlashAttention-3, whose operators bypass autograd."""
    found = (one for one in attention.contenders() if one.name != attention.FA3)
    return tuple(replace(one, prepare=_with_backward(one.prepare)) for one in found)
