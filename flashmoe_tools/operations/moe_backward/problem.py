"""The backward pass of a mixture-of-experts layer as a problem: dx, dw13, dw2 and dweights of a forward problem and a dout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from flashmoe_tools.operations import DTYPE_BYTES
from flashmoe_tools.operations.moe.problem import MoeProblem

PREFIX = "backward-"


@dataclass(frozen=True)
class MoeBackwardProblem(MoeProblem):
    """The forward problem's sizes; dout [tokens, hidden] is given.

    Forward and backward are timed together: a training step.
    """

    operation: ClassVar[str] = "moe_backward"
    heaviest_kernel: ClassVar[str] = "grouped_gemm_weight_gradient"

    @property
    def key(self) -> str:
        return PREFIX + super().key

    @property
    def title(self) -> str:
        return f"forward and backward {super().title}"

    @property
    def flops(self) -> int:
        """For each product of the forward pass there are two more in the backward pass."""
        return 3 * super().flops

    @property
    def bytes_moved(self) -> int:
        """The weights read in either pass and their gradients written; x, dout and dx."""
        weights = 3 * (2 * self.active_experts + self.experts) * self.hidden * self.intermediate
        return (weights + 5 * self.tokens * self.hidden) * DTYPE_BYTES[self.dtype]

    @classmethod
    def from_key(cls, key: str) -> MoeBackwardProblem:
        return cls(**asdict(MoeProblem.from_key(key.removeprefix(PREFIX))))


PROBLEM = MoeBackwardProblem
