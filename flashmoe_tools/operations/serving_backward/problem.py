"""The backward pass over ragged batches with score options as a problem: the gradients of a forward problem."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from flashmoe_tools.operations import fields
from flashmoe_tools.operations.serving.problem import ServingProblem


@dataclass(frozen=True)
class ServingBackwardProblem(ServingProblem):
    """The forward problem's sizes without pages, which have no gradient; dout [tokens, heads_q, head_dim] is given."""

    operation: ClassVar[str] = "serving_backward"
    word: ClassVar[str] = "backward"
    products: ClassVar[int] = 5

    @property
    def key(self) -> str:
        return f"{self.word}-{super().key}"

    @property
    def title(self) -> str:
        return f"{self.word} {super().title}"

    @property
    def flops(self) -> int:
        """Five products, compared with two in the forward pass: S again, dP, dV, dK and dQ.

        A learned mask's gradient needs no other product.
        """
        return super().flops * self.products // 2

    @property
    def bytes_moved(self) -> int:
        """Q, K, V, O, dO, a mask and the log-sum-exp read once, dQ, dK, dV and a learned mask's gradient written once."""
        of_mask = 0 if self.mask == "learned" else self.mask_bytes
        return 2 * super().bytes_moved - of_mask + 4 * self.heads_q * sum(self.lengths_q)

    @classmethod
    def from_key(cls, key: str) -> ServingBackwardProblem:
        return cls(**asdict(ServingProblem.from_key(key.removeprefix(f"{cls.word}-"))))

    @classmethod
    def smallest(cls) -> ServingBackwardProblem:
        return cls("f16", head_dim=64, heads_q=2, heads_kv=1, batch=2, seq_q=32, seq_k=32)

    def _check(self, where: str) -> None:
        super()._check(where)
        if self.page_size:
            fields.fail(where, "page_size", self.page_size, "absent: attention over pages has no gradient")
        if self.mask == "learned" and self.sinks:
            fields.fail(where, "sinks", self.sinks, "false with a learned mask: one of the two is judged")


PROBLEM = ServingBackwardProblem
