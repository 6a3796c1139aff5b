"""The forward pass and then the backward pass, both by autograd, of whoever takes part in the forward pass alone."""

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
    """Those of the forward pass under the same names; FlashAttention-3's operators are called without autograd."""
    found = (one for one in attention.contenders() if one.name != attention.FA3)
    return tuple(replace(one, prepare=_with_backward(one.prepare)) for one in found)
