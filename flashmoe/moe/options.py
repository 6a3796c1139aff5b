"""The options of a mixture-of-experts layer: allowed words and limits, and the operators' arguments by name."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from torch import Tensor

Activation = Literal["swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu"]
Layout = Literal["concat", "interleaved"]
Scoring = Literal["softmax", "topk_softmax", "sigmoid"]
Precision = Literal["fp8"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
LAYOUTS: tuple[str, ...] = get_args(Layout)
SCORINGS: tuple[str, ...] = get_args(Scoring)
PRECISIONS: tuple[str, ...] = get_args(Precision)
CLAMPED_ALPHA, CLAMPED_LIMIT = 1.702, 7.0  # of the activation clamped_swiglu


class Layer(NamedTuple):
    """The arguments of ``_fused_moe_inference``; ``_fused_moe`` takes one more, ``keep``. Shapes: see :func:`flashmoe.fused_moe`."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    b13: Tensor | None
    b2: Tensor | None
    expert_map: Tensor | None
    shared: Tensor | None
    activation: str
    layout: str
    transposed: bool

    def requires_grad(self) -> bool:
        """Whether autograd needs the gradient of any of the tensors that can have one."""
        tensors = (self.x, self.w13, self.w2, self.topk_weights, self.b13, self.b2, self.shared)
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)


class ScaledLayer(NamedTuple):
    """The arguments of ``_fused_moe_scaled``."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    x_scale: Tensor | None
    expert_map: Tensor | None
    shared: Tensor | None
    activation: str


class Mxfp4Layer(NamedTuple):
    """The arguments of ``_fused_moe_mxfp4``; if the scales are None, the weights are packed."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None
    w2_scale: Tensor | None
    topk_weights: Tensor
    topk_ids: Tensor
    b13: Tensor | None
    b2: Tensor | None
    expert_map: Tensor | None
    shared: Tensor | None
    activation: str
    layout: str


class Scales(NamedTuple):
    """The scales of 8-bit and 4-bit tensors, None for tensors without scales."""

    w13: Tensor | None
    w2: Tensor | None
    x: Tensor | None


class Routing(NamedTuple):
    """The arguments of ``topk_route``."""

    logits: Tensor
    k: int
    scoring: str
    bias: Tensor | None
    groups: int
    topk_groups: int
    renormalize: bool
    scale: float
