"""Attention in 8-bit floats as a problem: the sizes of the 16-bit one, whose dtype is the output's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashmoe.errors import ArgumentError
from flashmoe_tools.operations.attention.problem import AttentionProblem

if TYPE_CHECKING:
    from typing_extensions import Self

_PREFIX = "e4m3-"


@dataclass(frozen=True)
class Fp8Problem(AttentionProblem):
    operation: ClassVar[str] = "attention_fp8"
    heaviest_kernel: ClassVar[str] = "attention_forward_e4m3"

    @property
    def key(self) -> str:
        return f"{_PREFIX}{super().key}"

    @property
    def title(self) -> str:
        return f"e4m3 to {super().title}"

    @property
    def bytes_moved(self) -> int:
        """Each of Q, K and V read once, a byte for a value, and O written once."""
        queries = 3 * self.batch * self.heads_q * self.seq_q * self.head_dim
        return queries + 2 * self.batch * self.heads_kv * self.seq_k * self.head_dim

    @classmethod
    def from_key(cls, key: str) -> Self:
        """Such as e4m3-bf16-d128-causal-b1-h64kv8-s4096."""
        if not key.startswith(_PREFIX):
            msg = f"{key!r} names no case of {cls.operation}; one is written as {cls.smallest().key}"
            raise ArgumentError(msg)
        return cls(**asdict(AttentionProblem.from_key(key.removeprefix(_PREFIX))))

    @classmethod
    def smallest(cls) -> Self:
        return cls(**asdict(AttentionProblem.smallest()))

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[Self]:
        return (cls(**asdict(found)) for found in AttentionProblem.expand(row, where))


PROBLEM = Fp8Problem
