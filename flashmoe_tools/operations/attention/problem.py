"""Forward attention as a problem: its name, its minimal cost, its inputs and its reference."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flashmoe_tools.operations import DTYPE_BYTES, ProblemBase
from flashmoe_tools.operations.attention.grid import expand_row

LSE_TOLERANCE = 2e-4
_KEY = re.compile(
    r"(?P<dtype>\w+)-d(?P<d>\d+)(v(?P<v>\d+))?-(?P<mask>causal|full)-b(?P<b>\d+)-h(?P<h>\d+)(kv(?P<kv>\d+))?-"
    r"(s(?P<s>\d+)|q(?P<q>\d+)k(?P<k>\d+))(?P<layout>-bshd)?"
)


@dataclass(frozen=True)
class AttentionProblem(ProblemBase):
    """q [batch, heads_q, seq_q, head_dim], k [batch, heads_kv, seq_k, head_dim], v [batch, heads_kv, seq_k, columns_v].

    A causal mask is bottom-right. ``layout`` is the order in memory; ``bshd`` is passed to the operator as a transposed
    view, without a copy.
    """

    operation: ClassVar[str] = "attention"
    heaviest_kernel: ClassVar[str] = "attention_forward"
    products: ClassVar[tuple[int, int]] = (1, 1)  # over head_dim: Q K^T; over columns_v: P V

    seq_q: int
    seq_k: int
    head_dim: int = 64
    heads_q: int = 2
    heads_kv: int = 2
    batch: int = 1
    causal: bool = False
    dtype: str = "f16"
    layout: str = "bhsd"
    value_dim: int | None = None  # None: head_dim

    @property
    def columns_v(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def key(self) -> str:
        heads = f"h{self.heads_q}" if self.heads_q == self.heads_kv else f"h{self.heads_q}kv{self.heads_kv}"
        seq = f"s{self.seq_q}" if self.seq_q == self.seq_k else f"q{self.seq_q}k{self.seq_k}"
        layout = "" if self.layout == "bhsd" else f"-{self.layout}"
        columns = f"d{self.head_dim}" + ("" if self.value_dim is None else f"v{self.value_dim}")
        return f"{self.dtype}-{columns}-{self.mask}-b{self.batch}-{heads}-{seq}{layout}"

    @property
    def title(self) -> str:
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q} on {self.heads_kv}"
        columns = f"D={self.head_dim}" + ("" if self.value_dim is None else f" Dv={self.value_dim}")
        return f"{self.dtype} B={self.batch} H={heads} Sq={self.seq_q} Sk={self.seq_k} {columns} {self.mask}"

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def scores(self) -> int:
        """Number of elements of Q K^T, including masked ones."""
        return self.batch * self.heads_q * self.seq_q * self.seq_k

    @property
    def flops(self) -> int:
        """Operations of the matrix products; a multiply and an add count as two.

        Causal: half of them for a square problem, as in published numbers; with more keys, what the rows see
        (bottom-right).
        """
        per_score = 2 * (self.products[0] * self.head_dim + self.products[1] * self.columns_v)
        full = self.scores * per_score
        if not self.causal:
            return full
        if self.seq_q == self.seq_k:
            return full // 2
        hidden = self.seq_q * (self.seq_q - 1) // 2
        return full - self.batch * self.heads_q * hidden * per_score

    @property
    def bytes_moved(self) -> int:
        """Each of Q, K and V read once and O written once."""
        rows = self.batch * (self.heads_q * self.seq_q + self.heads_kv * self.seq_k)
        return rows * (self.head_dim + self.columns_v) * DTYPE_BYTES[self.dtype]

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @classmethod
    def from_key(cls, key: str) -> AttentionProblem:
        """The problem with this key, such as bf16-d128-causal-b4-h16-s4096."""
        match = cls.read_key(_KEY, key, "bf16-d128-causal-b4-h16-s4096, or -h32kv8-q1k8192 at its end")
        heads = int(match["h"])
        seq_q, seq_k = (int(match["s"]),) * 2 if match["s"] else (int(match["q"]), int(match["k"]))
        return cls(
            dtype=match["dtype"],
            batch=int(match["b"]),
            heads_q=heads,
            heads_kv=int(match["kv"] or heads),
            seq_q=seq_q,
            seq_k=seq_k,
            head_dim=int(match["d"]),
            value_dim=int(match["v"]) if match["v"] else None,
            causal=match["mask"] == "causal",
            layout="bshd" if match["layout"] else "bhsd",
        )

    @classmethod
    def smallest(cls) -> AttentionProblem:
        return cls(dtype="f16", batch=1, heads_q=1, heads_kv=1, seq_q=32, seq_k=32, head_dim=64, causal=False)

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[AttentionProblem]:
        return (cls(**fields) for fields in expand_row(row, where))

    def fit(self, dtypes: Collection[str], max_tokens: int) -> AttentionProblem:
        dtype = self.dtype if self.dtype in dtypes else "f16"
        return replace(self, dtype=dtype, batch=min(self.batch, max(1, max_tokens // self.seq_q)))


PROBLEM = AttentionProblem
