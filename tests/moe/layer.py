"""The layer's operators, called as the tests need them."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.moe.reference import NAMES, Case, Inputs


def run(case: Case, inputs: Inputs) -> Tensor:
    """[T, H], differentiable."""
    out: Tensor = torch.ops.flashmoe._fused_moe(
        inputs.x,
        inputs.w13,
        inputs.w2,
        inputs.topk_weights,
        inputs.topk_ids,
        inputs.b13,
        inputs.b2,
        inputs.expert_map,
        inputs.shared,
        case.activation,
        case.layout,
        case.transposed,
        True,
    )[0]
    return out


def run_backward(case: Case, inputs: Inputs, dout: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(out, gradients of leaves())."""
    leaves = [leaf.requires_grad_() for leaf in inputs.to(case.dtype).leaves()]
    own = Inputs(**{**vars(inputs), **dict(zip(leaf_names(inputs), leaves, strict=True))})
    out = run(case, own)
    return out.detach(), torch.autograd.grad(out, leaves, dout)


def leaf_names(inputs: Inputs) -> list[str]:
    """The names of Inputs.leaves()."""
    return [name for name in (*NAMES, "shared") if getattr(inputs, name) is not None]
