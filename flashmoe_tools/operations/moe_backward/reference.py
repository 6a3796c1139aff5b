"""The tensors of a layer's training step: the forward problem's and dout, the gradients by definition, the rule for each.

The reference is torch's derivative of the loop over experts in float32 (float64 on a CPU), of the whole batch: a gradient of
weights is a sum over it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.moe import reference as tensors
from flashmoe_tools.operations.moe.problem import MoeProblem

NAMES = ("dx", "dw13", "dw2", "dweights")


@dataclass(frozen=True)
class BackwardInputs(tensors.Inputs):
    """dout [T, H], the gradient of the output."""

    dout: torch.Tensor

    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Fresh leaves of autograd, in the order of NAMES."""
        return tuple(t.detach().requires_grad_() for t in (self.x, self.w13, self.w2, self.topk_weights))


def make_inputs(problem: MoeProblem, device: str, seed: int) -> BackwardInputs:
    forward = tensors.make_inputs(problem, device, seed)
    dout = tensors.make_inputs(problem, device, seed + 1).x
    return BackwardInputs(problem, forward.x, forward.w13, forward.w2, forward.topk_weights, forward.topk_ids, dout)


@dataclass(frozen=True)
class GradientReference:
    """Expected dx, dw13, dw2, dweights and the error allowed of each."""

    gradients: tuple[torch.Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    tolerances: tuple[float, ...]
    coverage: float = 1.0

    @property
    def tolerance(self) -> float:
        return max(self.tolerances)

    def judge(self, result: Sequence[torch.Tensor], lse: torch.Tensor | None = None) -> Verification:
        """``result`` as NAMES; the error and tolerance given are those of the gradient closest to its bound."""
        del lse
        worst, worst_error, worst_tolerance, reason = -1.0, 0.0, self.tolerance, ""
        for name, found, expected, dtype, tolerance in zip(
            NAMES, result, self.gradients, self.dtypes, self.tolerances, strict=True
        ):
            if found.shape != expected.shape or found.dtype != dtype:
                text = f"{name} is {tuple(found.shape)} {found.dtype}, expected {tuple(expected.shape)} {dtype}"
                return Verification(False, math.inf, tolerance, None, self.coverage, text)
            error = tensors.max_abs(found.to(expected.dtype) - expected)
            if not bool(torch.isfinite(found).all()):
                reason = reason or f"{name} holds NaN or Inf"
            elif not error <= tolerance:
                reason = reason or f"{name}: max error {error:.3g} exceeds {tolerance:.3g}"
            if not error / tolerance <= worst:  # NaN is the worst there is
                worst, worst_error, worst_tolerance = error / tolerance, error, tolerance
        return Verification(not reason, worst_error, worst_tolerance, None, self.coverage, reason)


def make_reference(inputs: tensors.Inputs) -> GradientReference:
    assert isinstance(inputs, BackwardInputs)
    exact = _differentiate(inputs, tensors.high_dtype(inputs.x.device))
    plain = _differentiate(inputs, inputs.x.dtype)
    return GradientReference(
        exact,
        tuple(leaf.dtype for leaf in inputs.leaves()),
        tuple(tensors.allowed(a, b) for a, b in zip(exact, plain, strict=True)),
    )


def _differentiate(inputs: BackwardInputs, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, w13, w2, weights = leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in inputs.leaves()]
    out = tensors.compose(x, w13, w2, weights, inputs.topk_ids, dtype)
    return torch.autograd.grad(out, leaves, inputs.dout.to(dtype))
