"""Decoding of multi-head latent attention as a problem: sequences of one length in pages."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flashmoe.errors import ArgumentError
from flashmoe_tools.operations import DTYPE_BYTES, ProblemBase, fields

HEAD_DIM, LATENT_DIM = 576, 512
KEY_BYTES = 656  # of the 8-bit float cache
CACHES = ("16-bit", "fp8")
_SIZES = ("heads", "batch", "tokens", "keys", "page_size")
_KEY = re.compile(
    r"mla-(?P<dtype>\w+)-h(?P<h>\d+)-b(?P<b>\d+)-q(?P<q>\d+)k(?P<k>\d+)-p(?P<p>\d+)(?P<fp8>-fp8)?(?:-top(?P<top>\d+))?"
)


@dataclass(frozen=True)
class MlaDecodeProblem(ProblemBase):
    """``batch`` sequences of ``keys`` keys in pages in random order, with ``tokens`` query tokens each.

    The mask is bottom-right. ``cache``: the queries' dtype, or fp8 with 656 bytes per key. ``topk``: how many keys of
    its sequence each token's indices name, in random order; 0: there are no indices.
    """

    operation: ClassVar[str] = "mla_decode"

    dtype: str
    heads: int
    batch: int
    tokens: int
    keys: int
    page_size: int = 64
    cache: str = CACHES[0]
    topk: int = 0

    @property
    def has_codes(self) -> bool:
        return self.cache == "fp8"

    @property
    def key(self) -> str:
        cache, top = "-fp8" if self.has_codes else "", f"-top{self.topk}" if self.topk else ""
        return f"mla-{self.dtype}-h{self.heads}-b{self.batch}-q{self.tokens}k{self.keys}-p{self.page_size}{cache}{top}"

    @property
    def title(self) -> str:
        more = (", fp8 cache" if self.has_codes else "") + (f", top {self.topk}" if self.topk else "")
        return f"{self.dtype} B={self.batch} H={self.heads} Sq={self.tokens} Sk={self.keys} pages of {self.page_size}{more}"

    @property
    def scale(self) -> float:
        return float(192**-0.5)

    @property
    def flops(self) -> int:
        """Operations of the visible scores: 576 columns for scores, 512 for values."""
        seen = self.tokens * (self.topk or self.keys) - (0 if self.topk else self.tokens * (self.tokens - 1) // 2)
        return 2 * self.batch * self.heads * seen * (HEAD_DIM + LATENT_DIM)

    @property
    def bytes_moved(self) -> int:
        """The cache (or the keys that each token's indices name) and q read once, the output written once."""
        rows = self.tokens * self.heads * (HEAD_DIM + LATENT_DIM)
        size = DTYPE_BYTES[self.dtype]
        keys = min(self.tokens * self.topk, self.keys) if self.topk else self.keys
        return self.batch * (keys * (KEY_BYTES if self.has_codes else HEAD_DIM * size) + rows * size)

    @classmethod
    def from_key(cls, key: str) -> MlaDecodeProblem:
        """The problem with this key, such as mla-bf16-h128-b64-q1k8192-p64."""
        match = cls.read_key(_KEY, key, cls.smallest().key)
        cache = CACHES[match["fp8"] is not None]
        heads, batch, tokens, keys, page_size = (int(match[name]) for name in "hbqkp")
        return cls(match["dtype"], heads, batch, tokens, keys, page_size, cache, int(match["top"] or 0))

    @classmethod
    def smallest(cls) -> MlaDecodeProblem:
        return cls("f16", heads=4, batch=2, tokens=1, keys=40, page_size=16)

    def __post_init__(self) -> None:
        if self.topk > self.keys or (self.topk and self.tokens != 1):
            msg = f"{self.key}: indices name at most the keys that there are, {self.keys}, of one token"
            raise ArgumentError(msg)

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[MlaDecodeProblem]:
        """Each list is an axis, and the table means the product of its axes."""
        fields.known(row, {"dtype", "cache", "topk", *_SIZES}, where)
        dtypes = [
            fields.choice(one, tuple(DTYPE_BYTES), where, "dtype") for one in fields.axis(row.get("dtype", "bf16"))
        ]
        caches = [fields.choice(one, CACHES, where, "cache") for one in fields.axis(row.get("cache", CACHES[0]))]
        topk = fields.count(row["topk"], where, "topk") if "topk" in row else 0
        stated = {"tokens": 1, "page_size": 64, **row}
        axes = [fields.counts(stated, where, name) for name in _SIZES]
        for dtype, cache, sizes in itertools.product(dtypes, caches, itertools.product(*axes)):
            yield cls(dtype, **dict(zip(_SIZES, sizes, strict=True)), cache=cache, topk=topk)

    def fit(self, dtypes: Collection[str], max_tokens: int) -> MlaDecodeProblem:
        """As many sequences as fit into memory."""
        batch = max(1, min(self.batch, max_tokens // self.tokens))
        return replace(self, dtype=self.dtype if self.dtype in dtypes else "f16", batch=batch)


PROBLEM = MlaDecodeProblem
