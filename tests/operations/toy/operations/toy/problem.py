"""A problem: values to scale."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flashmoe.errors import ArgumentError
from flashmoe_tools.operations import ProblemBase, fields


@dataclass(frozen=True)
class Scaling(ProblemBase):
    operation: ClassVar[str] = "toy"

    dtype: str
    size: int

    @property
    def key(self) -> str:
        return f"toy-{self.size}"

    @property
    def title(self) -> str:
        return f"{self.size} numbers, scaled"

    @property
    def flops(self) -> int:
        return self.size

    @property
    def bytes_moved(self) -> int:
        return 8 * self.size

    @classmethod
    def from_key(cls, key: str) -> Scaling:
        name, _, size = key.partition("-")
        if name != cls.operation or not size.isdigit():
            msg = f"{key!r} is not a case key; example: toy-64"
            raise ArgumentError(msg)
        return cls("f32", int(size))

    @classmethod
    def smallest(cls) -> Scaling:
        return cls("f32", 4)

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[Scaling]:
        fields.known(row, {"size"}, where)
        return (cls("f32", size) for size in fields.counts(row, where, "size"))

    def fit(self, dtypes: Collection[str], max_tokens: int) -> Scaling:
        del dtypes, max_tokens
        return self


PROBLEM = Scaling
