"""The layer under torch.func, whose transforms need a Function and cannot use the operator's own rule."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from flashmoe.errors import DifferentiationError
from flashmoe.operator import keep_nothing
from flashmoe.operators.moe import layer
from flashmoe.transforms import autocasted

NO_FORWARD_MODE = (
    "flashmoe.fused_moe has no forward-mode derivative; use reverse mode, or compose the layer of torch's operators"
)


def layer_under_transforms(*arguments: Any) -> Tensor:
    """The layer, for the arguments of ``_fused_moe_inference``."""
    if not torch.is_grad_enabled():  # torch.func.grad enables it
        only: Tensor = torch.ops.flashmoe._fused_moe_inference.default(*arguments)
        return only
    given = list(arguments)  # cast here, so that what is kept for the backward pass has one dtype
    for place, tensor in zip(layer.CAST, autocasted(*(given[place] for place in layer.CAST)), strict=True):
        given[place] = tensor
    result: Tensor = TransformedLayer.apply(*given, True)[0]  # type: ignore[no-untyped-call]
    return result


class TransformedLayer(torch.autograd.Function):
    """The forward operator for torch.func."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = torch.ops.flashmoe._fused_moe.default(*arguments)
        return result

    setup_context = staticmethod(layer.keep_for_backward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return layer.gradient_by(backward_under_transforms, ctx, grads[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """One call for each: what is kept for the backward pass belongs to one sort."""
        return _one_by_one(TransformedLayer, info, in_dims, arguments)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise DifferentiationError(NO_FORWARD_MODE)


def backward_under_transforms(*arguments: Any) -> layer.Gradients:
    """``_fused_moe_backward``, whose last argument says which gradients there are."""
    found = iter(TransformedBackward.apply(*arguments))  # type: ignore[no-untyped-call]
    return tuple(next(found) if arguments[-1] >> bit & 1 else None for bit in range(6))


class TransformedBackward(torch.autograd.Function):
    """The backward operator for torch.func, without the gradients that nobody needs; cannot be differentiated."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        found = torch.ops.flashmoe._fused_moe_backward.default(*arguments)
        return tuple(gradient for gradient in found if gradient is not None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        return _one_by_one(TransformedBackward, info, in_dims, arguments)

    setup_context = staticmethod(keep_nothing)
    backward = staticmethod(layer.refuse_double_backward)
    jvp = staticmethod(layer.refuse_double_backward)


def _one_by_one(
    function: Any, info: Any, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    parts = [
        function.apply(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    return tuple(torch.stack(results) for results in zip(*parts, strict=True)), (0,) * len(parts[0])
