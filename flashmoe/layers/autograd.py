"""Shapes, flop counts and gradients of the operator ``_linear``.

The gradient of x is another such product, with the transposed weight; that of the weight is the grouped product that sums over rows,
with one group; that of the bias is torch's sum. All are deterministic, and a row's gradient does not depend on the other rows either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.compiler import is_compiling

from flashmoe.moe.autograd import call_grouped, one_by_one
from flashmoe.rules import check
from flashmoe.transforms import autocasted, function_under_transforms

CHOOSE = -1  # choose the best tile for the number of rows


def fake(x: Tensor, weight: Tensor, bias: Tensor | None, tile: int) -> Tensor:
    check("_linear", (x, weight, bias, tile))
    return x.new_empty((x.shape[0], weight.shape[0]))


def flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """From the arguments' shapes; a multiply-add counts as two."""
    return int(2 * x[0] * weight[0] * weight[1])


def call_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: int = CHOOSE) -> Tensor:
    """The operator, including under torch.func's transforms."""
    if not is_compiling() and transforms_are_active():
        result: Tensor = _transformed(*autocasted(x, weight, bias), tile)
        return result
    result = torch.ops.flashmoe._linear.default(x, weight, bias, tile)
    return result


def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, int], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dx = call_linear(grad, weight.mT, None) if needs_x else None
    dweight = None
    if needs_weight:
        end = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        dweight = call_grouped(grad.mT, x, end).squeeze(0)
    return dx, dweight, grad.sum(0) if needs_bias else None, None


vmap = one_by_one(call_linear)
_transformed = function_under_transforms(
    call_linear,
    setup_context,
    gradient,
    vmap,
    "flashmoe.linear has no forward-mode derivative; use reverse mode, or torch.nn.functional.linear",
)
