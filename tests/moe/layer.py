"""The layer's operators, called as the tests need them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashmoe
from tests.moe.reference import NAMES, Case, Inputs

SMALL = Case(11, dtype=torch.float16)
FULL = replace(SMALL, biases=True, shared=True)


def call(case: Case, inputs: Inputs, **changes: Any) -> Tensor:
    """flashmoe.fused_moe as the case says."""
    keywords = {
        "b13": inputs.b13,
        "b2": inputs.b2,
        "activation": case.activation,
        "layout": case.layout,
        "transposed": case.transposed,
        "expert_map": inputs.expert_map,
        "shared": inputs.shared,
    }
    tensors = (inputs.x, inputs.w13, inputs.w2, inputs.topk_weights, inputs.topk_ids)
    return flashmoe.fused_moe(*tensors, **{**keywords, **changes})


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
