"""Attention in 8-bit floats as a problem: the 16-bit problem's sizes; its dtype is the output's; and the kind of scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashmoe.errors import ArgumentError
from flashmoe_tools.operations import fields
from flashmoe_tools.operations.attention.problem import AttentionProblem

if TYPE_CHECKING:
    from typing_extensions import Self

_PREFIX = "e4m3-"
# What has a scale in q, k and v: nothing (values are rounded as they are), each head of a sequence, or each block of 64
# or 128 rows. V has no blocks of 64.
SCALES = ("none", "heads", "blocks64", "blocks128")


@dataclass(frozen=True)
class Fp8Problem(AttentionProblem):
    operation: ClassVar[str] = "attention_fp8"
    heaviest_kernel: ClassVar[str] = "attention_forward_e4m3"
    scales: str = "none"

    @property
    def key(self) -> str:
        return f"{_PREFIX}{super().key}" + ("" if self.scales == "none" else f"-{self.scales}")

    @property
    def title(self) -> str:
        return f"e4m3 to {super().title}" + ("" if self.scales == "none" else f", scales of {self.scales}")

    @property
    def bytes_moved(self) -> int:
        """Q, K and V read once, one byte per value, and O written once."""
        queries = 3 * self.batch * self.heads_q * self.seq_q * self.head_dim
        return queries + 2 * self.batch * self.heads_kv * self.seq_k * self.head_dim

    @classmethod
    def from_key(cls, key: str) -> Self:
        """The problem with this key, such as e4m3-bf16-d128-causal-b1-h64kv8-s4096 or the same plus -blocks128."""
        if not key.startswith(_PREFIX):
            msg = f"{key!r} is not a case key of {cls.operation}; example: {cls.smallest().key}"
            raise ArgumentError(msg)
        wide, _, scales = key.removeprefix(_PREFIX).rpartition("-")
        if scales not in SCALES[1:]:
            wide, scales = key.removeprefix(_PREFIX), "none"
        return cls(**asdict(AttentionProblem.from_key(wide)), scales=scales)

    @classmethod
    def smallest(cls) -> Self:
        return cls(**asdict(AttentionProblem.smallest()))

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[Self]:
        wide = {name: value for name, value in row.items() if name != "scales"}
        axis = [fields.choice(one, SCALES, where, "scales") for one in fields.axis(row.get("scales", "none"))]
        for found in AttentionProblem.expand(wide, where):
            for scales in axis:
                if scales.startswith("blocks"):  # complete blocks only
                    fields.divide(found.seq_q, 128, where, "seq", "128")
                    fields.divide(found.seq_k, 128, where, "seq", "128")
                yield cls(**asdict(found), scales=scales)


PROBLEM = Fp8Problem
