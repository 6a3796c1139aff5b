"""A step of a dense decoder over a paged cache as a problem: one new token per sequence, or a chunk of a prompt."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flashmoe_tools.operations import DTYPE_BYTES, ProblemBase, fields

_SIZES = ("layers", "width", "heads", "heads_kv", "head_dim", "ffn", "vocabulary", "batch", "keys", "rows")
_KEY = re.compile(
    r"decoder-(?P<dtype>\w+)-l(?P<layers>\d+)-w(?P<width>\d+)-h(?P<heads>\d+)kv(?P<heads_kv>\d+)d(?P<head_dim>\d+)-f(?P<ffn>\d+)-"
    r"v(?P<vocabulary>\d+)-b(?P<batch>\d+)-n(?P<keys>\d+)-r(?P<rows>\d+)"
)


@dataclass(frozen=True)
class DecoderProblem(ProblemBase):
    """``rows`` new tokens for each of ``batch`` sequences, which then have ``keys`` keys; other sizes as in model.Shape."""

    operation: ClassVar[str] = "decoder"

    dtype: str
    layers: int
    width: int
    heads: int
    heads_kv: int
    head_dim: int
    ffn: int
    vocabulary: int
    batch: int
    keys: int
    rows: int

    @property
    def key(self) -> str:
        return (
            f"decoder-{self.dtype}-l{self.layers}-w{self.width}-h{self.heads}kv{self.heads_kv}d{self.head_dim}-f{self.ffn}-"
            f"v{self.vocabulary}-b{self.batch}-n{self.keys}-r{self.rows}"
        )

    @property
    def title(self) -> str:
        return f"{self.dtype} {self.layers} layers of {self.width}, {self.batch} x {self.rows} tokens, {self.keys} keys"

    @property
    def parameters(self) -> int:
        """Number of parameters in the matrix products."""
        of_heads = (2 * self.heads + 2 * self.heads_kv) * self.head_dim
        return self.layers * self.width * (of_heads + 3 * self.ffn) + self.vocabulary * self.width

    @property
    def flops(self) -> int:
        tokens = self.batch * self.rows
        seen = self.keys - (self.rows - 1) // 2
        return 2 * tokens * self.parameters + 4 * self.layers * tokens * seen * self.heads * self.head_dim

    @property
    def bytes_moved(self) -> int:
        """The weights and the cached keys and values, read once."""
        cache = 2 * self.layers * self.batch * self.keys * self.heads_kv * self.head_dim
        return (self.parameters + cache) * DTYPE_BYTES[self.dtype]

    @classmethod
    def from_key(cls, key: str) -> DecoderProblem:
        """The problem with this key, such as decoder-bf16-l8-w1024-h16kv8d128-f3072-v8192-b64-n2048-r1."""
        match = cls.read_key(_KEY, key, "decoder-bf16-l8-w1024-h16kv8d128-f3072-v8192-b64-n2048-r1")
        return cls(match["dtype"], **{name: int(match[name]) for name in _SIZES})

    @classmethod
    def smallest(cls) -> DecoderProblem:
        sizes = {"layers": 1, "width": 64, "heads": 2, "heads_kv": 1, "head_dim": 64, "ffn": 64, "vocabulary": 64}
        return cls("bf16", **sizes, batch=2, keys=32, rows=1)

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[DecoderProblem]:
        """``dtype`` and each size: one value, or a list whose values are all used."""
        fields.known(row, {"dtype", *_SIZES}, where)
        dtypes = [
            fields.choice(one, tuple(DTYPE_BYTES), where, "dtype") for one in fields.axis(row.get("dtype", "bf16"))
        ]
        counts = list(itertools.product(*(fields.counts(row, where, name) for name in _SIZES)))
        for dtype, values in itertools.product(dtypes, counts):
            problem = cls(dtype, **dict(zip(_SIZES, values, strict=True)))
            fields.divide(problem.heads, problem.heads_kv, where, "heads", "heads_kv")
            if problem.rows > problem.keys:
                fields.fail(where, "rows", problem.rows, f"at most keys = {problem.keys}")
            yield problem

    def fit(self, dtypes: Collection[str], max_tokens: int) -> DecoderProblem:
        dtype = self.dtype if self.dtype in dtypes else "f16"
        return replace(self, dtype=dtype, batch=max(1, min(self.batch, max_tokens // self.rows)))


PROBLEM = DecoderProblem
