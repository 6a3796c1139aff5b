"""The backward pass of attention as a problem: dq, dk and dv of a forward problem and a gradient of its output."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from flashmoe_tools.operations.attention.problem import AttentionProblem


@dataclass(frozen=True)
class AttentionBackwardProblem(AttentionProblem):
    """The forward problem's sizes; out and lse exist already, and dout [batch, heads_q, seq_q, columns_v] is given."""

    operation: ClassVar[str] = "attention_backward"
    heaviest_kernel: ClassVar[str] = "attention_backward_dkv"
    word: ClassVar[str] = "backward"
    products: ClassVar[tuple[int, int]] = (3, 2)  # S again, dK and dQ; dP and dV

    @property
    def key(self) -> str:
        return f"{self.word}-{super().key}"

    @property
    def title(self) -> str:
        return f"{self.word} {super().title}"

    @property
    def bytes_moved(self) -> int:
        """Q, K, V, O, dO and the log-sum-exp read once, dQ, dK and dV written once."""
        return 2 * super().bytes_moved + 4 * self.batch * self.heads_q * self.seq_q

    @classmethod
    def from_key(cls, key: str) -> AttentionBackwardProblem:
        return cls(**asdict(AttentionProblem.from_key(key.removeprefix(f"{cls.word}-"))))


PROBLEM = AttentionBackwardProblem
