"""A training step with e4m3 products by definition, in float64 on a CPU and float32 on a GPU, and its rule.

The definition is in flashmoe/moe/training.py; numbers are rounded by ``moe_scaled/formats.py``, which shares no code
with ours, and the derivative of the activation is computed by torch's autograd. Rounding is not continuous: a sum that
differs in its last bit may change a number by a whole unit of e4m3 or bfloat16. So the rule limits the relative error
of all elements of a result together to 0.01, while e4m3 itself costs 0.03 to 0.07. A contender that computes in 16 bits
returns ``SixteenBits`` and is judged by the rule of ``moe_backward``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.judging import high_dtype, judge_gradients
from flashmoe_tools.operations.moe import reference as forward
from flashmoe_tools.operations.moe_backward import reference as sixteen_bits
from flashmoe_tools.operations.moe_backward.reference import NAMES, BackwardInputs
from flashmoe_tools.operations.moe_scaled import formats
from flashmoe_tools.operations.moe_scaled.formats import BLOCK

TOLERANCE = 0.01

make_inputs = sixteen_bits.make_inputs


@dataclass(frozen=True)
class SixteenBits:
    """The gradients of a contender with 16-bit products."""

    gradients: Sequence[Tensor]


def as_e4m3(x: Tensor, block_rows: int = 1) -> Tensor:
    """x [rows, columns] after rounding, a scale per ``block_rows`` by 128, in x's dtype; last blocks may be smaller."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % block_rows))
    found = formats.dequantize(*formats.quantize(padded, block_rows), block_rows)
    return found[: x.shape[0]].to(x.dtype)


def in_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def step(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    dout: Tensor,
    dtype: torch.dtype,
    *,
    shared: Tensor | None = None,
    activation: str = "swiglu",
) -> tuple[Tensor, ...]:
    """(out, dx, dw13, dw2, dweights) in ``dtype``; an id that names no expert contributes nothing."""
    x, weights, dout = (one.detach().to(dtype) for one in (x, weights, dout))
    out = torch.zeros_like(x) if shared is None else shared.detach().to(dtype)
    dx, dweights = torch.zeros_like(x), torch.zeros_like(weights)
    dw13, dw2 = (torch.zeros(one.shape, dtype=dtype, device=x.device) for one in (w13, w2))
    for expert in range(len(w13)):
        tokens, choices = torch.where(ids == expert)  # in the order of slots
        if len(tokens) == 0:
            continue
        up, down = (as_e4m3(one[expert].detach().to(dtype), BLOCK) for one in (w13, w2))
        rows, weight, slope = x[tokens], weights[tokens, choices, None], dout[tokens]
        z = as_e4m3(rows) @ up.mT
        y = in_bfloat16(as_e4m3(forward.activate(z, activation)) @ down.mT)
        out = out.index_add(0, tokens, weight * y)
        z = in_bfloat16(z).requires_grad_()
        s = in_bfloat16(as_e4m3(slope) @ down)
        active = forward.activate(z, activation)
        (dz,) = torch.autograd.grad(active, z, weight * s)
        dz, active = in_bfloat16(dz), active.detach()
        dweights[tokens, choices] = (active * s).sum(1)
        dx = dx.index_add(0, tokens, in_bfloat16(as_e4m3(dz) @ up))
        dw13[expert] = as_e4m3(dz.mT) @ as_e4m3(rows, BLOCK)
        dw2[expert] = as_e4m3(slope.mT) @ as_e4m3(in_bfloat16(weight * active), BLOCK)
    return out, dx, dw13, dw2, dweights


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative error of all elements together; NaN if any is NaN."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


@dataclass(frozen=True)
class StepReference:
    """Expected dx, dw13, dw2 and dweights; the 16-bit ones are created when a result needs them."""

    gradients: tuple[Tensor, ...]
    inputs: BackwardInputs
    tolerance: float = TOLERANCE
    coverage: float = 1.0

    @cached_property
    def sixteen_bits(self) -> sixteen_bits.GradientReference:
        return sixteen_bits.make_reference(self.inputs)

    def judge(self, result: Any, lse: Tensor | None = None) -> Verification:
        if isinstance(result, SixteenBits):
            return self.sixteen_bits.judge(result.gradients, lse)
        dtypes = [leaf.dtype for leaf in self.inputs.leaves()]
        forms = [(one.shape, dtype) for one, dtype in zip(self.gradients, dtypes, strict=True)]

        def error_of(index: int) -> float:
            return relative_error(result[index], self.gradients[index])

        return judge_gradients(NAMES, result, forms, error_of, [self.tolerance] * len(forms), self.coverage)


def make_reference(inputs: forward.Inputs) -> StepReference:
    assert isinstance(inputs, BackwardInputs)
    i = inputs
    expected = step(i.x, i.w13, i.w2, i.topk_weights, i.topk_ids, i.dout, high_dtype(i.x.device))
    return StepReference(expected[1:], inputs)
