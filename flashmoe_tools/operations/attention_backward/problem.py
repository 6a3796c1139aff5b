"""The backward pass of attention as a problem: dq, dk and dv of a forward problem and a gradient of its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashmoe_tools.operations.attention.problem import AttentionProblem

if TYPE_CHECKING:  # torch: reading and comparing reports needs none
    from flashmoe_tools.operations.attention.reference import Inputs
    from flashmoe_tools.operations.attention_backward.reference import BackwardInputs, GradientReference


@dataclass(frozen=True)
class AttentionBackwardProblem(AttentionProblem):
    """The forward problem's sizes; out and lse are there, and dout [batch, heads_q, seq_q, head_dim] is given."""

    operation: ClassVar[str] = "attention_backward"
    heaviest_kernel: ClassVar[str] = "attention_backward_dkv"
    word: ClassVar[str] = "backward"
    products: ClassVar[int] = 5  # where the forward pass has two: S again, dP, dV, dK and dQ

    @property
    def key(self) -> str:
        return f"{self.word}-{super().key}"

    @property
    def title(self) -> str:
        return f"{self.word} {super().title}"

    @property
    def flops(self) -> int:
        return super().flops * self.products // 2

    @property
    def bytes_moved(self) -> int:
        """Q, K, V, O, dO and the log-sum-exp read once, dQ, dK and dV written once."""
        return 2 * super().bytes_moved + 4 * self.batch * self.heads_q * self.seq_q

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "operation": self.operation, **asdict(self)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> AttentionBackwardProblem:
        return cls(**asdict(AttentionProblem.from_json(row)))

    @classmethod
    def from_key(cls, key: str) -> AttentionBackwardProblem:
        return cls(**asdict(AttentionProblem.from_key(key.removeprefix(f"{cls.word}-"))))

    def make_inputs(self, device: str, seed: int) -> BackwardInputs:
        from flashmoe_tools.operations.attention_backward.reference import make_inputs

        return make_inputs(self, device, seed)

    def make_reference(self, inputs: Inputs) -> GradientReference:  # type: ignore[override]  # judges three gradients
        from flashmoe_tools.operations.attention_backward.reference import make_reference

        return make_reference(inputs)


PROBLEM = AttentionBackwardProblem
