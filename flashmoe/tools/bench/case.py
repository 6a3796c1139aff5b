"""One attention problem and what it costs at least: operations, bytes, keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"f16": 2, "bf16": 2, "f32": 4})
LAYOUTS = ("bhsd", "bshd")


@dataclass(frozen=True)
class Case:
    """Forward attention: q [batch, heads_q, seq_q, head_dim], k and v [batch, heads_kv, seq_k, head_dim].

    ``layout`` is the order in memory; ``bshd`` reaches the operator as a transposed view, without a copy.
    """

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int
    head_dim: int
    causal: bool
    layout: str = "bhsd"

    @property
    def key(self) -> str:
        """A name that is the same in every run, so that two reports can be compared."""
        heads = f"h{self.heads_q}" if self.heads_q == self.heads_kv else f"h{self.heads_q}kv{self.heads_kv}"
        seq = f"s{self.seq_q}" if self.seq_q == self.seq_k else f"q{self.seq_q}k{self.seq_k}"
        layout = "" if self.layout == "bhsd" else f"-{self.layout}"
        return f"{self.dtype}-d{self.head_dim}-{self.mask}-b{self.batch}-{heads}-{seq}{layout}"

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def scores(self) -> int:
        """Elements of Q K^T, masked ones included."""
        return self.batch * self.heads_q * self.seq_q * self.seq_k

    @property
    def flops(self) -> int:
        """Two matrix products, a multiply and an add each. Causal: half of them for a square, as published numbers do, and
        what the rows see of more keys (bottom-right)."""
        full = 4 * self.scores * self.head_dim
        if not self.causal:
            return full
        if self.seq_q == self.seq_k:
            return full // 2
        hidden = self.seq_q * (self.seq_q - 1) // 2
        return full - 4 * self.batch * self.heads_q * hidden * self.head_dim

    @property
    def bytes_moved(self) -> int:
        """Each of Q, K and V read once and O written once."""
        queries = 2 * self.batch * self.heads_q * self.seq_q * self.head_dim
        keys = 2 * self.batch * self.heads_kv * self.seq_k * self.head_dim
        return (queries + keys) * DTYPE_BYTES[self.dtype]

    @property
    def intensity(self) -> float:
        """Floating-point operations for each byte that must move."""
        return self.flops / self.bytes_moved

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, **asdict(self)}


def case_from_json(row: Mapping[str, Any]) -> Case:
    return Case(**{name: value for name, value in row.items() if name != "key"})
