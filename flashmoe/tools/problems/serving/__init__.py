"""Attention over a batch of sequences of their own lengths as a problem: decoding from pages, ragged prefill."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from flashmoe.errors import ArgumentError
from flashmoe.tools.problems import DTYPE_BYTES, fields

if TYPE_CHECKING:  # torch: reading and comparing reports needs none
    from flashmoe.tools.problems.serving.tensors import Inputs, Reference

SHORT = {"one": 512, "one34": 34}  # keys of the other sequences where one is long
SPREADS = ("equal", "ramp", "mixed", *SHORT)
MIXED = (4096, 3000, 2500, 2000, 1500, 1200, 900, 600, 300, 150, 100, 38)  # of 4096
_SIZES = ("head_dim", "heads", "heads_kv", "batch", "seq_q", "seq_k")
_KEY = re.compile(
    r"serve-(?P<dtype>\w+)-d(?P<d>\d+)-(?P<mask>causal|full)-b(?P<b>\d+)-h(?P<h>\d+)kv(?P<kv>\d+)-q(?P<q>\d+)k(?P<k>\d+)"
    r"(-p(?P<p>\d+))?(-(?P<spread>ramp|mixed|one34|one))?"
)


@dataclass(frozen=True)
class ServingProblem:
    """``batch`` sequences of up to seq_q queries and seq_k keys; with seq_q = seq_k each has as many of both.

    ``page_size``: keys lie in pages in random order; 0: ragged, one sequence behind the other. ``spread``: all sequences equal;
    ramp, of seq_k / batch, 2 seq_k / batch and so on; mixed, of twelve lengths in turn, from seq_k to a hundredth of it; one of seq_k
    keys among others of 512, or of 34. The mask is bottom-right.
    """

    operation: ClassVar[str] = "serving"

    dtype: str
    head_dim: int
    heads_q: int
    heads_kv: int
    batch: int
    seq_q: int
    seq_k: int
    causal: bool = True
    page_size: int = 0
    spread: str = "equal"

    @property
    def lengths_k(self) -> tuple[int, ...]:
        if self.spread == "ramp":
            return tuple(max(1, self.seq_k * (entry + 1) // self.batch) for entry in range(self.batch))
        if self.spread == "mixed":
            return tuple(max(1, self.seq_k * MIXED[entry % len(MIXED)] // MIXED[0]) for entry in range(self.batch))
        others = min(SHORT.get(self.spread, self.seq_k), self.seq_k)
        return (self.seq_k, *(others,) * (self.batch - 1))

    @property
    def lengths_q(self) -> tuple[int, ...]:
        if self.seq_q == self.seq_k:
            return self.lengths_k
        return tuple(min(self.seq_q, keys) for keys in self.lengths_k)

    @property
    def key(self) -> str:
        mask = "causal" if self.causal else "full"
        sizes = f"b{self.batch}-h{self.heads_q}kv{self.heads_kv}-q{self.seq_q}k{self.seq_k}"
        pages = f"-p{self.page_size}" if self.page_size else ""
        spread = "" if self.spread == "equal" else f"-{self.spread}"
        return f"serve-{self.dtype}-d{self.head_dim}-{mask}-{sizes}{pages}{spread}"

    @property
    def title(self) -> str:
        where = f"pages of {self.page_size}" if self.page_size else "ragged"
        spread = {"equal": "", "ramp": ", lengths up to that", "mixed": ", twelve lengths"}.get(self.spread)
        if spread is None:
            spread = f", others of {SHORT[self.spread]}"
        return (
            f"{self.dtype} B={self.batch} H={self.heads_q} on {self.heads_kv} Sq={self.seq_q} Sk={self.seq_k} "
            f"D={self.head_dim} {where}{spread}"
        )

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def flops(self) -> int:
        """Two matrix products over the scores that are seen; of a causal square half of them, as published numbers do."""
        scores = 0
        for rows, keys in zip(self.lengths_q, self.lengths_k, strict=True):
            hidden = 0 if not self.causal else rows * rows // 2 if rows == keys else rows * (rows - 1) // 2
            scores += rows * keys - hidden
        return 4 * self.heads_q * scores * self.head_dim

    @property
    def bytes_moved(self) -> int:
        """Each of Q, K and V read once and O written once."""
        queries = 2 * self.heads_q * sum(self.lengths_q)
        keys = 2 * self.heads_kv * sum(self.lengths_k)
        return (queries + keys) * self.head_dim * DTYPE_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "operation": self.operation, **asdict(self)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ServingProblem:
        return cls(**{name: value for name, value in row.items() if name not in ("key", "operation")})

    @classmethod
    def from_key(cls, key: str) -> ServingProblem:
        """The problem that a report calls ``key``, such as serve-bf16-d128-causal-b8-h32kv8-q1k8192-p16."""
        match = _KEY.fullmatch(key)
        if match is None or match["dtype"] not in DTYPE_BYTES:
            msg = f"{key!r} names no case; one is written as serve-bf16-d128-causal-b8-h32kv8-q1k8192-p16, or with -ramp behind"
            raise ArgumentError(msg)
        d, h, kv, b, q, k, p = (int(match[name] or 0) for name in ("d", "h", "kv", "b", "q", "k", "p"))
        return cls(match["dtype"], d, h, kv, b, q, k, match["mask"] == "causal", p, match["spread"] or "equal")

    @classmethod
    def smallest(cls) -> ServingProblem:
        return cls("f16", head_dim=64, heads_q=2, heads_kv=1, batch=2, seq_q=1, seq_k=32, page_size=16)

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[ServingProblem]:
        """A list is an axis, and the table stands for the product of its axes, without those of over ``most_keys`` keys."""
        fields.known(row, {"dtype", "causal", "page_size", "spread", "most_keys", *_SIZES}, where)
        dtypes = [
            fields.choice(one, tuple(DTYPE_BYTES), where, "dtype") for one in fields.axis(row.get("dtype", "bf16"))
        ]
        spreads = [fields.choice(one, SPREADS, where, "spread") for one in fields.axis(row.get("spread", "equal"))]
        pages = fields.counts(row, where, "page_size") if "page_size" in row else [0]
        causal = fields.flag(row.get("causal", True), where, "causal")
        most = fields.count(row.get("most_keys", 2**31), where, "most_keys")
        sizes = itertools.product(*(fields.counts(row, where, name) for name in _SIZES))
        for dtype, values, page, spread in itertools.product(dtypes, list(sizes), pages, spreads):
            head_dim, heads_q, heads_kv, batch, seq_q, seq_k = values
            problem = cls(dtype, head_dim, heads_q, heads_kv, batch, seq_q, seq_k, causal, page, spread)
            fields.divide(problem.heads_q, problem.heads_kv, where, "heads", "heads_kv")
            if sum(problem.lengths_k) <= most:
                yield problem

    def fit(self, dtypes: Collection[str], max_tokens: int) -> ServingProblem:
        dtype = self.dtype if self.dtype in dtypes else "f16"
        return replace(self, dtype=dtype, batch=min(self.batch, max(1, max_tokens // self.seq_q)))

    def make_inputs(self, device: str, seed: int) -> Inputs:
        """Fresh random tensors; torch is needed from here on."""
        from flashmoe.tools.problems.serving.tensors import make_inputs

        return make_inputs(self, device, seed)

    def make_reference(self, inputs: Inputs) -> Reference:
        from flashmoe.tools.problems.serving.tensors import make_reference

        return make_reference(inputs)


PROBLEM = ServingProblem
