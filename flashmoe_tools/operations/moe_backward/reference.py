"""The tensors of a layer's training step: the forward tensors and dout, the gradients by definition, a rule for each.

The reference is torch's derivative of the loop over experts in float32 (float64 on a CPU), over the complete batch,
because a weight gradient is a sum over it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.judging import high_dtype, judge_gradients, max_abs
from flashmoe_tools.operations.moe import reference as forward
from flashmoe_tools.operations.moe.problem import MoeProblem

NAMES = ("dx", "dw13", "dw2", "dweights")


@dataclass(frozen=True)
class BackwardInputs(forward.Inputs):
    """dout [T, H], the gradient of the output."""

    dout: torch.Tensor

    def leaves(self) -> tuple[torch.Tensor, ...]:
        """New autograd leaves, in the order of NAMES."""
        return tuple(t.detach().requires_grad_() for t in (self.x, self.w13, self.w2, self.topk_weights))


def make_inputs(problem: MoeProblem, device: str, seed: int) -> BackwardInputs:
    given = forward.make_inputs(problem, device, seed)
    return BackwardInputs(**vars(given), dout=forward.make_inputs(problem, device, seed + 1).x)


@dataclass(frozen=True)
class GradientReference:
    """Expected dx, dw13, dw2, dweights and the allowed error of each."""

    gradients: tuple[torch.Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    tolerances: tuple[float, ...]
    coverage: float = 1.0

    @property
    def tolerance(self) -> float:
        return max(self.tolerances)

    def judge(self, result: Sequence[torch.Tensor], lse: torch.Tensor | None = None) -> Verification:
        """``result`` is ordered like NAMES; error and tolerance are those of the gradient closest to its bound."""
        del lse
        forms = [(one.shape, dtype) for one, dtype in zip(self.gradients, self.dtypes, strict=True)]

        def error_of(index: int) -> float:
            expected = self.gradients[index]
            return max_abs(result[index].to(expected.dtype) - expected)

        return judge_gradients(NAMES, result, forms, error_of, self.tolerances, self.coverage)


def make_reference(inputs: forward.Inputs) -> GradientReference:
    assert isinstance(inputs, BackwardInputs)
    exact = _differentiate(inputs, high_dtype(inputs.x.device))
    plain = _differentiate(inputs, inputs.x.dtype)
    return GradientReference(
        exact,
        tuple(leaf.dtype for leaf in inputs.leaves()),
        tuple(forward.allowed(a, b, inputs.x.dtype) for a, b in zip(exact, plain, strict=True)),
    )


def _differentiate(inputs: BackwardInputs, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, w13, w2, weights = leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in inputs.leaves()]
    out = forward.compose(x, w13, w2, weights, inputs.topk_ids, dtype)
    return torch.autograd.grad(out, leaves, inputs.dout.to(dtype))
