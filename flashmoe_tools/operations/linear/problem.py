"""y = x W^T as a problem."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flashmoe_tools.operations import DTYPE_BYTES, ProblemBase, fields

_KEY = re.compile(r"linear-(?P<dtype>\w+)-n(?P<columns>\d+)k(?P<inner>\d+)-r(?P<rows>\d+)")
_SIZES = ("columns", "inner", "rows")


@dataclass(frozen=True)
class LinearProblem(ProblemBase):
    """x [rows, inner], weight [columns, inner], no bias."""

    operation: ClassVar[str] = "linear"

    dtype: str
    columns: int
    inner: int
    rows: int

    @property
    def key(self) -> str:
        return f"linear-{self.dtype}-n{self.columns}k{self.inner}-r{self.rows}"

    @property
    def title(self) -> str:
        return f"{self.dtype} {self.rows} rows, N={self.columns} K={self.inner}"

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.inner

    @property
    def bytes_moved(self) -> int:
        """The weights and x read once, the result written once."""
        size = self.columns * self.inner + self.rows * (self.columns + self.inner)
        return size * DTYPE_BYTES[self.dtype]

    @classmethod
    def from_key(cls, key: str) -> LinearProblem:
        """The problem with this key, such as linear-bf16-n4096k4096-r64."""
        match = cls.read_key(_KEY, key, "linear-bf16-n4096k4096-r64")
        return cls(match["dtype"], **{name: int(match[name]) for name in _SIZES})

    @classmethod
    def smallest(cls) -> LinearProblem:
        return cls("bf16", columns=64, inner=64, rows=16)

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[LinearProblem]:
        """Each list is an axis, and the table means the product of its axes."""
        fields.known(row, {"dtype", *_SIZES}, where)
        dtypes = [
            fields.choice(one, tuple(DTYPE_BYTES), where, "dtype") for one in fields.axis(row.get("dtype", "bf16"))
        ]
        counts = list(itertools.product(*(fields.counts(row, where, name) for name in _SIZES)))
        for dtype, values in itertools.product(dtypes, counts):
            yield cls(dtype, **dict(zip(_SIZES, values, strict=True)))

    def fit(self, dtypes: Collection[str], max_tokens: int) -> LinearProblem:
        dtype = self.dtype if self.dtype in dtypes else "f16"
        return replace(self, dtype=dtype, rows=min(self.rows, max_tokens))


PROBLEM = LinearProblem
