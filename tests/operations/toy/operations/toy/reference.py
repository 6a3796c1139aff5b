"""Random values and their scaled values, which are exact in float32."""

from dataclasses import dataclass

import torch
from flashmoe_tools.operations.toy.problem import Scaling

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.judging import judge_result, max_abs

SCALE = -2.0


@dataclass(frozen=True)
class Inputs:
    problem: Scaling
    x: torch.Tensor

    def poison(self) -> None:
        torch.full_like(self.x, float("nan"))


def scaled(x: torch.Tensor, rule: str = "plain") -> torch.Tensor:
    return (x * SCALE).clamp(min=0.0) if rule == "relu" else x * SCALE


@dataclass(frozen=True)
class Reference:
    out: torch.Tensor
    tolerance: float = 0.0
    coverage: float = 1.0

    def judge(self, result: torch.Tensor, lse: torch.Tensor | None = None) -> Verification:
        del lse
        return judge_result(result, max_abs(result - self.out), self.tolerance, self.coverage)


def make_inputs(problem: Scaling, device: str, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    return Inputs(problem, torch.randn(problem.size, generator=generator, device=device))


def make_reference(inputs: Inputs) -> Reference:
    return Reference(scaled(inputs.x))
