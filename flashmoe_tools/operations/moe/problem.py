"""The forward mixture-of-experts layer as a problem: its name, its minimal cost, its inputs and its reference."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flashmoe_tools.operations import DTYPE_BYTES, ProblemBase, fields

ROUTINGS = ("uniform", "zipf", "hot")
_KEY = re.compile(
    r"(?P<dtype>\w+)-e(?P<experts>\d+)k(?P<top_k>\d+)-h(?P<hidden>\d+)i(?P<intermediate>\d+)-t(?P<tokens>\d+)"
    r"(-(?P<routing>zipf|hot))?"
)
_SIZES = ("experts", "top_k", "hidden", "intermediate", "tokens")


@dataclass(frozen=True)
class MoeProblem(ProblemBase):
    """x [tokens, hidden], w13 [experts, 2 * intermediate, hidden], w2 [experts, hidden, intermediate], swiglu.

    ``routing``: uniform; zipf, expert e chosen as 1 / (e + 1); hot, every token to the same top_k experts.
    """

    operation: ClassVar[str] = "moe"
    heaviest_kernel: ClassVar[str] = "grouped_gemm_gated"

    dtype: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tokens: int
    routing: str = "uniform"

    @property
    def key(self) -> str:
        routing = "" if self.routing == "uniform" else f"-{self.routing}"
        sizes = f"e{self.experts}k{self.top_k}-h{self.hidden}i{self.intermediate}-t{self.tokens}"
        return f"{self.dtype}-{sizes}{routing}"

    @property
    def title(self) -> str:
        sizes = f"E={self.experts} k={self.top_k} H={self.hidden} I={self.intermediate}"
        return f"{self.dtype} T={self.tokens} {sizes} {self.routing}"

    @property
    def slots(self) -> int:
        return self.tokens * self.top_k

    @property
    def flops(self) -> int:
        """Gate, up and down for every choice of a token; a multiply and an add count as two."""
        return 6 * self.slots * self.hidden * self.intermediate

    @property
    def active_experts(self) -> int:
        """Expected number of experts whose weights are read, for uniform choices."""
        if self.routing == "hot":
            return self.top_k
        return round(self.experts * (1 - (1 - self.top_k / self.experts) ** self.tokens))

    @property
    def bytes_moved(self) -> int:
        """The weights of the active experts and x read once, the result written once."""
        weights = 3 * self.active_experts * self.hidden * self.intermediate
        return (weights + 2 * self.tokens * self.hidden) * DTYPE_BYTES[self.dtype]

    @classmethod
    def from_key(cls, key: str) -> MoeProblem:
        """The problem with this key, such as bf16-e128k8-h2048i768-t512."""
        match = cls.read_key(_KEY, key, "bf16-e128k8-h2048i768-t512, or -zipf or -hot at its end")
        sizes = {name: int(match[name]) for name in _SIZES}
        return cls(dtype=match["dtype"], routing=match["routing"] or "uniform", **sizes)

    @classmethod
    def smallest(cls) -> MoeProblem:
        return cls(dtype="bf16", experts=4, top_k=2, hidden=64, intermediate=64, tokens=16)

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[MoeProblem]:
        """Each list is an axis, and the table means the product of its axes."""
        fields.known(row, {"dtype", "routing", *_SIZES}, where)
        dtypes = [
            fields.choice(one, tuple(DTYPE_BYTES), where, "dtype") for one in fields.axis(row.get("dtype", "bf16"))
        ]
        words = [fields.choice(one, ROUTINGS, where, "routing") for one in fields.axis(row.get("routing", "uniform"))]
        counts = itertools.product(*(fields.counts(row, where, name) for name in _SIZES))
        for dtype, routing, values in itertools.product(dtypes, words, list(counts)):
            sizes = dict(zip(_SIZES, values, strict=True))
            if sizes["top_k"] > sizes["experts"]:
                fields.fail(where, "top_k", sizes["top_k"], f"at most experts = {sizes['experts']}")
            yield cls(dtype=dtype, routing=routing, **sizes)

    def fit(self, dtypes: Collection[str], max_tokens: int) -> MoeProblem:
        dtype = self.dtype if self.dtype in dtypes else "f16"
        return replace(self, dtype=dtype, tokens=min(self.tokens, max_tokens))


PROBLEM = MoeProblem
