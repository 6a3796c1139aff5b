"""A training step with e4m3 products as a problem: the 16-bit step's sizes, 16-bit weights and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from flashmoe_tools.operations import fields
from flashmoe_tools.operations.moe.problem import MoeProblem
from flashmoe_tools.operations.moe_backward.problem import MoeBackwardProblem

PREFIX = "fp8-"
BLOCK = 128


@dataclass(frozen=True)
class MoeTrainFp8Problem(MoeBackwardProblem):
    """bf16; hidden and intermediate are multiples of 128."""

    operation: ClassVar[str] = "moe_train_fp8"
    heaviest_kernel: ClassVar[str] = "grouped_gemm_weight_gradient_scaled"

    @property
    def key(self) -> str:
        return PREFIX + super().key

    @property
    def title(self) -> str:
        return f"{super().title}, e4m3 products"

    @classmethod
    def smallest(cls) -> MoeTrainFp8Problem:
        return cls(dtype="bf16", experts=4, top_k=2, hidden=256, intermediate=128, tokens=16)

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[MoeTrainFp8Problem]:
        for name in ("hidden", "intermediate"):
            for size in fields.counts(row, where, name):
                fields.divide(size, BLOCK, where, name, "a block")
        for found in MoeProblem.expand(row, where):
            yield cls(**asdict(found))

    @classmethod
    def from_key(cls, key: str) -> MoeTrainFp8Problem:
        return cls(**asdict(MoeBackwardProblem.from_key(key.removeprefix(PREFIX))))


PROBLEM = MoeTrainFp8Problem
