"""The layer's operators, with the calls that tests need."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashmoe
from tests.moe.reference import NAMES, Case, Inputs

SMALL = Case(11, dtype=torch.float16)
FULL = replace(SMALL, biases=True, shared=True)


def call(case: Case, inputs: Inputs, **changes: Any) -> Tensor:
    """flashmoe.fused_moe with the case's options."""
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


def changed(layer: Any, changes: dict[str, Any], made: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments that replace a layer's. A dtype converts the layer's tensor; a shape makes ones (scales of x are float32)."""

    def change(name: str, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return getattr(layer, name).to(value)
        if not isinstance(value, tuple):
            return value
        return torch.ones(value, device=layer.x.device, dtype=torch.float32 if name == "x_scale" else made)

    return {name: change(name, value) for name, value in changes.items()}


def check_that_a_graph_follows_the_routing(layer: Any) -> None:
    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    layer.x.copy_(torch.randn_like(layer.x))
    layer.topk_ids.copy_(layer.topk_ids.flip(0))
    graph.replay()
    assert torch.equal(out, layer())
