"""One training step of a small decoder as a problem: forward pass, cross-entropy, backward pass."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flashmoe_tools.operations import DTYPE_BYTES, ProblemBase, fields

_SIZES = ("layers", "width", "heads", "heads_kv", "ffn", "vocabulary", "batch", "seq")

_KEY = re.compile(
    r"step-(?P<dtype>\w+)-l(?P<layers>\d+)-w(?P<width>\d+)-h(?P<heads>\d+)kv(?P<heads_kv>\d+)-f(?P<ffn>\d+)-"
    r"v(?P<vocabulary>\d+)-b(?P<batch>\d+)-s(?P<seq>\d+)"
)


@dataclass(frozen=True)
class TrainStepProblem(ProblemBase):
    """A Llama-shaped decoder: RMSNorm, rotary positions, causal grouped-query attention, SwiGLU; needs no other library.

    ``width`` is heads * head_dim, ``ffn`` the inner width of SwiGLU; ``batch`` sequences of ``seq`` tokens.
    """

    operation: ClassVar[str] = "train_step"

    dtype: str
    layers: int
    width: int
    heads: int
    heads_kv: int
    ffn: int
    vocabulary: int
    batch: int
    seq: int

    @property
    def key(self) -> str:
        return (
            f"step-{self.dtype}-l{self.layers}-w{self.width}-h{self.heads}kv{self.heads_kv}-f{self.ffn}-"
            f"v{self.vocabulary}-b{self.batch}-s{self.seq}"
        )

    @property
    def title(self) -> str:
        return (
            f"{self.dtype} {self.layers} layers of {self.width}, {self.heads} heads on {self.heads_kv}, "
            f"B={self.batch} S={self.seq}"
        )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """Number of parameters in the matrix products."""
        kv = self.heads_kv * self.head_dim
        layer = self.width * (2 * self.width + 2 * kv + 3 * self.ffn)
        return self.layers * layer + self.vocabulary * self.width

    @property
    def flops(self) -> int:
        """6 per parameter and token, plus attention's two products forward and five backward, halved by the mask."""
        tokens = self.batch * self.seq
        return 6 * self.parameters * tokens + self.layers * 7 * self.batch * self.seq**2 * self.width

    @property
    def bytes_moved(self) -> int:
        """Weights read twice, their gradients written once."""
        return 3 * self.parameters * DTYPE_BYTES[self.dtype]

    @classmethod
    def from_key(cls, key: str) -> TrainStepProblem:
        """The problem with this key, such as step-bf16-l8-w2048-h16kv4-f5632-v32000-b2-s4096."""
        match = cls.read_key(_KEY, key, "step-bf16-l8-w2048-h16kv4-f5632-v32000-b2-s4096")
        return cls(match["dtype"], **{name: int(match[name]) for name in _SIZES})

    @classmethod
    def smallest(cls) -> TrainStepProblem:
        return cls("bf16", layers=1, width=64, heads=2, heads_kv=1, ffn=128, vocabulary=64, batch=1, seq=32)

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[TrainStepProblem]:
        """``dtype`` and each size: one value, or a list whose values are all used."""
        fields.known(row, {"dtype", *_SIZES}, where)
        dtypes = [fields.choice(one, tuple(DTYPE_BYTES), where, "dtype") for one in fields.axis(row.get("dtype"))]
        sizes = [fields.counts(row, where, name) for name in _SIZES]
        for dtype, values in itertools.product(dtypes, itertools.product(*sizes)):
            problem = cls(dtype, **dict(zip(_SIZES, values, strict=True)))
            fields.divide(problem.heads, problem.heads_kv, where, "heads", "heads_kv")
            fields.divide(
                fields.divide(problem.width, problem.heads, where, "width", "heads"), 2, where, "head_dim", "2"
            )
            yield problem

    def fit(self, dtypes: Collection[str], max_tokens: int) -> TrainStepProblem:
        dtype = self.dtype if self.dtype in dtypes else "f16"
        return replace(self, dtype=dtype, batch=min(self.batch, max(1, max_tokens // self.seq)))


PROBLEM = TrainStepProblem
