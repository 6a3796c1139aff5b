"""Products of groups of rows with one matrix each: what the operators return where there is no data, their gradients, their cost.

    grouped_mm           out[row] = a[row] b[e]                   a [M, K], b [E, K, N], out [M, N]
    _grouped_mm_2d2d     out[e] = sum over e's rows a[:, row] b[row]    a [N, M], b [M, K], out [E, N, K]
where e's rows are offsets[e - 1] to offsets[e]. Each one's gradients are calls of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.compiler import is_compiling

from flashmoe.operator import Operator
from flashmoe.operators.moe.arguments import validate_grouped, validate_grouped_gradient
from flashmoe.transforms import autocasted, function_under_transforms

NO_FORWARD_MODE = (
    "flashmoe.grouped_mm has no forward-mode derivative; use reverse mode, or compose it of torch's operators"
)


def grouped(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    validate_grouped(a, b, offsets)
    return a.new_empty((a.shape[0], b.shape[2]))


def grouped_2d2d(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    validate_grouped_gradient(a, b, offsets)
    return a.new_empty((offsets.shape[0], a.shape[0], b.shape[1]))


def keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def grouped_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, offsets = ctx.saved_tensors
    da = call(grad, b.mT, offsets) if ctx.needs_input_grad[0] else None
    db = call(a.mT, grad, offsets) if ctx.needs_input_grad[1] else None
    return da, db, None


def grouped_2d2d_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """grad [E, N, K]: a's columns of e have the gradient grad[e] b[row], b's rows a[:, row] grad[e]."""
    a, b, offsets = ctx.saved_tensors
    da = call(b, grad.mT, offsets).mT if ctx.needs_input_grad[0] else None
    db = call(a.mT, grad, offsets) if ctx.needs_input_grad[1] else None
    return da, db, None


def call(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """The operator for b's rank, under torch.func's transforms too."""
    is_2d = getattr(b, "ndim", 3) == 2
    if not is_compiling() and transforms_are_active():
        result: Tensor = (_2d2d_under_transforms if is_2d else _under_transforms)(*autocasted(a, b), offsets)
        return result
    operators = torch.ops.flashmoe
    result = (operators._grouped_mm_2d2d if is_2d else operators.grouped_mm).default(a, b, offsets)
    return result


def vmap_grouped(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
    """One call for each."""
    parts = [
        call(*(t if dim is None else t.select(dim, index) for t, dim in zip(tensors, in_dims, strict=True)))
        for index in range(info.batch_size)
    ]
    return torch.stack(parts), 0


_under_transforms = function_under_transforms(call, keep, grouped_gradient, vmap_grouped, NO_FORWARD_MODE)
_2d2d_under_transforms = function_under_transforms(call, keep, grouped_2d2d_gradient, vmap_grouped, NO_FORWARD_MODE)


def grouped_flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    """Of shapes; two operations for a multiply-add."""
    return 2 * a[0] * a[1] * b[-1]


OPERATORS = (
    Operator(
        "grouped_mm",
        fake=grouped,
        flops=grouped_flops,
        autocast=2,
        gradient=grouped_gradient,
        setup_context=keep,
        vmap=vmap_grouped,
    ),
    Operator(
        "_grouped_mm_2d2d",
        fake=grouped_2d2d,
        flops=grouped_flops,
        autocast=2,
        gradient=grouped_2d2d_gradient,
        setup_context=keep,
        vmap=vmap_grouped,
    ),
)
