"""The tensors of a mixture-of-experts problem: random inputs, the reference by definition, and the rule for a result.

max|out - ref| <= 2 max|plain - ref| + 2 units in the last place of the largest value, where ref is a loop over experts in
float32 (float64 on a CPU) and plain the same loop in the problem's dtype by ordinary torch operations. In float32, four times.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.moe.problem import MoeProblem

# Tokens that are checked, spread over the batch; the report says what share they are.
MAX_TOKENS = {"cuda": 4096, "cpu": 64}


@dataclass(frozen=True)
class Inputs:
    """x [T, H], w13 [E, 2I, H], w2 [E, H, I], topk_weights float32 and topk_ids int32 [T, k]."""

    problem: MoeProblem
    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    def poison(self) -> None:
        """Leave NaN in the memory that the allocator hands out for the next result."""
        torch.full_like(self.x, math.nan)


def make_inputs(problem: MoeProblem, device: str, seed: int) -> Inputs:
    """Standard normal tokens, weights that keep their size; the seed depends on the run's seed and the problem alone."""
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(f"{seed} {problem.key}".encode()))
    dtype = TORCH_DTYPES[problem.dtype]

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale)

    p = problem
    weights, ids = choices(p, device, generator)
    return Inputs(
        problem,
        normal(p.tokens, p.hidden),
        normal(p.experts, 2 * p.intermediate, p.hidden, scale=p.hidden**-0.5),
        normal(p.experts, p.hidden, p.intermediate, scale=p.intermediate**-0.5),
        weights,
        ids,
    )


def choices(problem: MoeProblem, device: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32, ids int32) [T, k] of the problem's routing."""
    logits = torch.zeros(problem.tokens, problem.experts, device=device)
    if problem.routing == "zipf":
        logits -= torch.arange(1.0, problem.experts + 1, device=device).log()
    elif problem.routing == "hot":
        logits += 100.0 * torch.arange(problem.experts, device=device)
    noise = torch.rand(logits.shape, generator=generator, device=device).clamp_min_(1e-20)
    weights, ids = (logits - (-noise.log()).log()).topk(problem.top_k, dim=1)
    return torch.softmax(weights, dim=1), ids.int()


def compose(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The layer in ``dtype``, expert by expert."""
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    w13s, w2s = w13.unbind(), w2.unbind()  # taken one by one, each one's gradient would be as large as all
    for expert in ids.unique().tolist():
        tokens, choices = torch.where(ids == expert)
        gate, up = F.linear(x[tokens].to(dtype), w13s[expert].to(dtype)).chunk(2, dim=1)
        y = F.linear(F.silu(gate) * up, w2s[expert].to(dtype))
        out = out.index_add(0, tokens, y * weights[tokens, choices, None].to(dtype))
    return out


@dataclass(frozen=True)
class Reference:
    """Expected rows of the checked tokens, and the error allowed."""

    problem: MoeProblem
    tokens: torch.Tensor
    out: torch.Tensor
    tolerance: float
    coverage: float

    def judge(self, result: torch.Tensor, lse: torch.Tensor | None = None) -> Verification:
        """``result`` is [T, H]."""
        del lse
        shape, dtype = (self.problem.tokens, self.problem.hidden), TORCH_DTYPES[self.problem.dtype]
        if result.shape != shape or result.dtype != dtype:
            found = f"result is {tuple(result.shape)} {result.dtype}, expected {shape} {dtype}"
            return Verification(False, math.inf, self.tolerance, None, self.coverage, found)
        error = max_abs(result[self.tokens].to(self.out.dtype) - self.out)
        reason = ""
        if not bool(torch.isfinite(result).all()):
            reason = "the result holds NaN or Inf"
        elif not error <= self.tolerance:
            reason = f"max error {error:.3g} exceeds {self.tolerance:.3g}"
        return Verification(not reason, error, self.tolerance, None, self.coverage, reason)


def high_dtype(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type == "cpu" else torch.float32


def checked_tokens(problem: MoeProblem, device: torch.device) -> torch.Tensor:
    """At most MAX_TOKENS, evenly over the batch."""
    count = min(problem.tokens, MAX_TOKENS[device.type])
    return torch.linspace(0, problem.tokens - 1, count, device=device).round().long()


def make_reference(inputs: Inputs) -> Reference:
    problem = inputs.problem
    tokens = checked_tokens(problem, inputs.x.device)
    chosen = (inputs.x[tokens], inputs.w13, inputs.w2, inputs.topk_weights[tokens], inputs.topk_ids[tokens])
    out = compose(*chosen, high_dtype(inputs.x.device))
    plain = compose(*chosen, inputs.x.dtype)
    return Reference(problem, tokens, out, allowed(out, plain), tokens.numel() / problem.tokens)


def allowed(exact: torch.Tensor, plain: torch.Tensor) -> float:
    """The largest error of a result that keeps the rule."""
    factor = 4 if plain.dtype == torch.float32 else 2
    largest = max_abs(exact)
    ulp = math.ldexp(torch.finfo(plain.dtype).eps, math.frexp(largest)[1] - 1)
    return factor * max_abs(plain.to(exact.dtype) - exact) + 2 * ulp


def max_abs(values: torch.Tensor) -> float:
    """Largest magnitude; NaN when any value is NaN, which fails every comparison."""
    return float(values.abs().max()) if values.numel() else 0.0
