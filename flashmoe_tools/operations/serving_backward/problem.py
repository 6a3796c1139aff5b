"""The backward pass over ragged batches, windows, softcaps, sinks and masks as a problem: the gradients of a forward problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashmoe_tools.operations import fields
from flashmoe_tools.operations.serving.problem import ServingProblem

if TYPE_CHECKING:  # torch: reading and comparing reports needs none
    from flashmoe_tools.operations.serving.reference import Inputs
    from flashmoe_tools.operations.serving_backward.reference import BackwardInputs, GradientReference


@dataclass(frozen=True)
class ServingBackwardProblem(ServingProblem):
    """The forward problem's sizes, without pages, which have no gradient; dout [tokens, heads_q, head_dim] is given."""

    operation: ClassVar[str] = "serving_backward"
    word: ClassVar[str] = "backward"

    @property
    def key(self) -> str:
        return f"{self.word}-{super().key}"

    @property
    def title(self) -> str:
        return f"{self.word} {super().title}"

    @property
    def flops(self) -> int:
        """Five products where the forward pass has two: S again, dP, dV, dK and dQ."""
        return super().flops * 5 // 2

    @property
    def bytes_moved(self) -> int:
        """Q, K, V, O, dO, a mask and the log-sum-exp read once, dQ, dK and dV written once."""
        return 2 * super().bytes_moved - self.mask_bytes + 4 * self.heads_q * sum(self.lengths_q)

    @classmethod
    def from_key(cls, key: str) -> ServingBackwardProblem:
        return cls(**asdict(ServingProblem.from_key(key.removeprefix(f"{cls.word}-"))))

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ServingBackwardProblem:
        return cls(**asdict(ServingProblem.from_json(row)))

    @classmethod
    def smallest(cls) -> ServingBackwardProblem:
        return cls("f16", head_dim=64, heads_q=2, heads_kv=1, batch=2, seq_q=32, seq_k=32)

    def _check(self, where: str) -> None:
        super()._check(where)
        if self.page_size:
            fields.fail(where, "page_size", self.page_size, "absent: attention over pages has no gradient")

    def make_inputs(self, device: str, seed: int) -> BackwardInputs:
        from flashmoe_tools.operations.serving_backward.reference import make_inputs

        return make_inputs(self, device, seed)

    def make_reference(self, inputs: Inputs) -> GradientReference:  # type: ignore[override]  # judges several gradients
        from flashmoe_tools.operations.serving_backward.reference import make_reference

        return make_reference(inputs)


PROBLEM = ServingBackwardProblem
