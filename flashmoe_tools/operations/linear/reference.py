"""The tensors of a linear problem, its product in higher precision, and the rule for a result (moe/reference.py).

Calls cycle through several copies of the weights. A single copy would stay in L2, which a model's weights do not.
"""

import math
import zlib
from dataclasses import dataclass

import torch

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.judging import high_dtype, judge_result, max_abs, wrong_form
from flashmoe_tools.operations.linear.problem import LinearProblem
from flashmoe_tools.operations.moe.reference import allowed

COLD_BYTES = 2**28  # minimal size of all copies: four times the largest L2 of today
MOST_COPIES = 16
MAX_ROWS = {"cuda": 4096, "cpu": 64}  # rows that are checked, spread over x


@dataclass(frozen=True)
class Inputs:
    """x [rows, inner] and equal weights [columns, inner], each copy in its own memory."""

    problem: LinearProblem
    x: torch.Tensor
    weights: tuple[torch.Tensor, ...]

    def poison(self) -> None:
        torch.full((self.problem.rows, self.problem.columns), math.nan, dtype=self.x.dtype, device=self.x.device)


def make_inputs(problem: LinearProblem, device: str, seed: int) -> Inputs:
    """Standard normal rows and scaled weights; the seed depends only on the run's seed and the problem."""
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(f"{seed} {problem.key}".encode()))
    dtype = TORCH_DTYPES[problem.dtype]
    x = torch.randn(problem.rows, problem.inner, generator=generator, device=device, dtype=dtype)
    weight = torch.randn(problem.columns, problem.inner, generator=generator, device=device, dtype=dtype)
    weight *= problem.inner**-0.5
    copies = 1 if device == "cpu" else min(MOST_COPIES, 1 + COLD_BYTES // weight.nbytes)
    return Inputs(problem, x, tuple(weight.clone() for _ in range(copies)))


@dataclass(frozen=True)
class Reference:
    problem: LinearProblem
    rows: torch.Tensor
    out: torch.Tensor
    tolerance: float
    coverage: float

    def judge(self, result: torch.Tensor, lse: torch.Tensor | None = None) -> Verification:
        """``result`` is [rows, columns]."""
        del lse
        form = (self.problem.rows, self.problem.columns), TORCH_DTYPES[self.problem.dtype]
        if text := wrong_form("result", result, form):
            return Verification(False, math.inf, self.tolerance, None, self.coverage, text)
        return judge_result(result, max_abs(result[self.rows] - self.out), self.tolerance, self.coverage)


def make_reference(inputs: Inputs) -> Reference:
    problem, x, weight = inputs.problem, inputs.x, inputs.weights[0]
    count = min(problem.rows, MAX_ROWS[x.device.type])
    rows = torch.linspace(0, problem.rows - 1, count, device=x.device).round().long()
    high = high_dtype(x.device)
    out = x[rows].to(high) @ weight.to(high).mT
    return Reference(problem, rows, out, allowed(out, x[rows] @ weight.mT, x.dtype), count / problem.rows)
