"""Values to scale, as a problem."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashmoe.errors import ArgumentError
from flashmoe_tools.operations import fields

if TYPE_CHECKING:
    from flashmoe_tools.operations.toy.reference import Inputs, Reference  # type: ignore[import-not-found]


@dataclass(frozen=True)
class Scaling:
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

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "operation": self.operation, **asdict(self)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Scaling:
        return cls(row["dtype"], row["size"])

    @classmethod
    def from_key(cls, key: str) -> Scaling:
        name, _, size = key.partition("-")
        if name != cls.operation or not size.isdigit():
            msg = f"{key!r} names no case; one is written as toy-64"
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

    def make_inputs(self, device: str, seed: int) -> Inputs:
        from flashmoe_tools.operations.toy.reference import make_inputs

        return make_inputs(self, device, seed)

    def make_reference(self, inputs: Inputs) -> Reference:
        from flashmoe_tools.operations.toy.reference import make_reference

        return make_reference(inputs)


PROBLEM = Scaling
