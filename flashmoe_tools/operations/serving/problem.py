"""Attention over a batch of sequences of different lengths as a problem: paged decoding, ragged prefill, scores."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flashmoe_tools.operations import DTYPE_BYTES, ProblemBase, fields

SHORT = {"one": 512, "one34": 34}  # length of the other sequences if one is long
SPREADS = ("equal", "shared", "ramp", "mixed", *SHORT)
MIXED = (4096, 3000, 2500, 2000, 1500, 1200, 900, 600, 300, 150, 100, 38)  # relative to 4096
BOOL_MASKS = ("bool", "padding", "documents")
MASKS = ("none", "additive", *BOOL_MASKS, "learned")
DOCUMENTS = 8  # in a sequence
CACHES = ("own", "e4m3")
_SIZES = ("head_dim", "heads", "heads_kv", "batch", "seq_q", "seq_k")
_NAMES = {"heads": "heads_q"}  # fields whose name in the problem differs
_FIELDS = {
    "dtype",
    "causal",
    "page_size",
    "spread",
    "most_keys",
    "window",
    "softcap",
    "sinks",
    "mask",
    "deviation",
    "alibi",
    "cache",
    "dropout",
    *_SIZES,
}
_KEY = re.compile(
    r"serve-(?P<dtype>\w+)-d(?P<d>\d+)-(?P<mask>causal|full)-b(?P<b>\d+)-h(?P<h>\d+)kv(?P<kv>\d+)-q(?P<q>\d+)k(?P<k>\d+)"
    r"(-p(?P<p>\d+))?(-(?P<spread>shared|ramp|mixed|one34|one))?(-w(?P<w>\d+))?(-cap(?P<cap>\d+))?(?P<sinks>-sinks)?"
    r"(-(?P<tensor>additive|bool|padding|documents|learned))?(?P<alibi>-alibi)?(-sd(?P<sd>\d+))?(?P<cache>-e4m3)?(-drop(?P<drop>\d+))?"
)


@dataclass(frozen=True)
class ServingProblem(ProblemBase):
    """``batch`` sequences of up to seq_q queries and seq_k keys; if seq_q = seq_k, each has the same number of both.

    ``page_size``: keys are in pages in random order; 0: ragged, one sequence after the other. ``spread``: all sequences
    equal; shared: equal and in the same pages; ramp: lengths seq_k / batch, 2 seq_k / batch and so on; mixed: twelve
    lengths in turn, from seq_k to a hundredth of it; one and one34: one sequence of seq_k keys among others of 512 or
    34. The mask is bottom-right.

    ``window``: how many keys a row sees, including its own; 0: all. ``softcap``: 0 for none. ``sinks``: a logit per
    head that is added to the sum. ``mask``: a tensor per sequence, the same for all heads; padding: a bool one,
    causal, in a batch padded at the end, of which the shortest sequence fills half; documents: a bool one, causal
    within each of eight documents; learned: an additive one per head, the same for all sequences, with a gradient.
    ``deviation``: of the scores, before the softcap. ``alibi``: a slope per head, 2^(-8 / heads) and its powers.
    ``cache``: the format of keys and values, the queries' dtype or e4m3. ``dropout``: p in percent.
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
    window: int = 0
    softcap: int = 0
    sinks: bool = False
    mask: str = "none"
    deviation: int = 1
    alibi: bool = False
    cache: str = "own"
    dropout: int = 0

    @property
    def plain(self) -> ServingProblem:
        """The same without score options, except a causal mask."""
        return replace(self, window=0, softcap=0, sinks=False, mask="none", alibi=False, dropout=0)

    @property
    def lengths_k(self) -> tuple[int, ...]:
        if self.spread == "ramp":
            return tuple(max(1, self.seq_k * (index + 1) // self.batch) for index in range(self.batch))
        if self.spread == "mixed":
            return tuple(max(1, self.seq_k * MIXED[index % len(MIXED)] // MIXED[0]) for index in range(self.batch))
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
        return f"serve-{self.dtype}-d{self.head_dim}-{mask}-{sizes}{pages}{spread}{self._scores('-', 'w', 'cap', 'sd')}{self._end('-', 'drop')}"

    def _end(self, gap: str, dropout: str, cache: str = "") -> str:
        kept = "" if self.cache == "own" else gap + cache + self.cache
        return kept + (f"{gap}{dropout}{self.dropout}" if self.dropout else "")

    def _scores(self, gap: str, window: str, softcap: str, deviation: str) -> str:
        """The score options as text, each word after a ``gap``."""
        words = (
            f"{window}{self.window}" if self.window else "",
            f"{softcap}{self.softcap}" if self.softcap else "",
            "sinks" if self.sinks else "",
            self.mask if self.mask != "none" else "",
            "alibi" if self.alibi else "",
            f"{deviation}{self.deviation}" if self.deviation != 1 else "",
        )
        return "".join(gap + word for word in words if word)

    @property
    def title(self) -> str:
        where = f"pages of {self.page_size}" if self.page_size else "ragged"
        words = {"shared": ", the same for all", "ramp": ", lengths up to that", "mixed": ", twelve lengths"}
        spread = f", others of {SHORT[self.spread]}" if self.spread in SHORT else words.get(self.spread, "")
        mask = "" if self.causal else ", full"
        return (
            f"{self.dtype} B={self.batch} H={self.heads_q} on {self.heads_kv} Sq={self.seq_q} Sk={self.seq_k} "
            f"D={self.head_dim} {where}{spread}{mask}{self.describe_scores()}{self._end(', ', 'dropout of percent ', 'keys in ')}"
        )

    def describe_scores(self) -> str:
        """The score options as readable text, each after a comma."""
        return self._scores(", ", "window ", "softcap ", "scores of deviation ")

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def flops(self) -> int:
        """Two matrix products over the visible scores; half of them for a causal square, as in published numbers."""
        if self.mask in ("padding", "documents"):
            return 4 * self.heads_q * self.head_dim * sum(map(sum, self.visible_keys))
        scores = 0
        for rows, keys in zip(self.lengths_q, self.lengths_k, strict=True):
            hidden = 0 if not self.causal else rows * rows // 2 if rows == keys else rows * (rows - 1) // 2
            scores += self._windowed(keys) - self._windowed(keys - rows) if self.window else rows * keys - hidden
        return 4 * self.heads_q * scores * self.head_dim

    @property
    def visible_keys(self) -> list[list[int]]:
        """For a mask of padding or documents: how many keys each row of each sequence sees; they are the last ones up to the row's own."""
        rows, batch = range(self.seq_q), self.batch
        if self.mask == "documents":
            length = -(-self.seq_k // DOCUMENTS)
            return [[row % length + 1 for row in rows]] * batch
        kept = [self.seq_k * (batch + index) // (2 * batch - 1 or 1) for index in range(batch)]
        return [[min(row + 1, own) for row in rows] for own in kept]

    def _windowed(self, rows: int) -> int:
        """The scores that the first rows of a sequence see of its window."""
        short = min(rows, self.window)  # rows with fewer keys than the window
        return short * (short + 1) // 2 + (rows - short) * self.window

    @property
    def bytes_moved(self) -> int:
        """Q, K and V read once (keys as far as a window shows, shared pages once for all), a mask, and O written once."""
        is_shared = self.spread == "shared"
        lengths = list(zip(self.lengths_q, self.lengths_k, strict=True))[: 1 if is_shared else None]
        seen = (min(keys, self.window + rows - 1) if self.window else keys for rows, keys in lengths)
        size = DTYPE_BYTES[self.dtype]
        queries, keys = 2 * self.heads_q * sum(self.lengths_q), 2 * self.heads_kv * sum(seen)
        key_size = size if self.cache == "own" else 1
        return (queries * size + keys * key_size) * self.head_dim + self.mask_bytes

    @property
    def mask_bytes(self) -> int:
        size = 0 if self.mask == "none" else 1 if self.mask in BOOL_MASKS else DTYPE_BYTES[self.dtype]
        return size * (self.heads_q if self.mask == "learned" else self.batch) * self.seq_q * self.seq_k

    def to_json(self) -> dict[str, Any]:
        """Only the fields that differ from their defaults, because reports hold hundreds of problems."""
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        defaults = {one.name: one.default for one in dataclasses.fields(self)}
        stated = {name: value for name, value in given.items() if value != defaults[name]}
        return {"key": self.key, "operation": self.operation, **stated}

    @classmethod
    def from_key(cls, key: str) -> ServingProblem:
        """The problem with this key, such as serve-bf16-d128-causal-b8-h32kv8-q1k8192-p16."""
        match = cls.read_key(_KEY, key, "serve-bf16-d128-causal-b8-h32kv8-q1k8192-p16, or with -ramp behind")
        d, h, kv, b, q, k, p = (int(match[name] or 0) for name in ("d", "h", "kv", "b", "q", "k", "p"))
        w, cap, sd = (int(match[name] or 0) for name in ("w", "cap", "sd"))
        return cls(
            *(match["dtype"], d, h, kv, b, q, k, match["mask"] == "causal", p, match["spread"] or "equal"),
            *(w, cap, match["sinks"] is not None, match["tensor"] or "none", sd or 1, match["alibi"] is not None),
            *("e4m3" if match["cache"] else "own", int(match["drop"] or 0)),
        )

    @classmethod
    def smallest(cls) -> ServingProblem:
        return cls("f16", head_dim=64, heads_q=2, heads_kv=1, batch=2, seq_q=1, seq_k=32, page_size=16)

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[ServingProblem]:
        """Each list is an axis, and the table means the product of its axes.

        Problems with more than ``most_keys`` keys are left out.
        """
        fields.known(row, _FIELDS, where)

        def counts(name: str, default: int) -> list[int]:
            return fields.counts(row, where, name) if name in row else [default]

        def words(name: str, options: Sequence[str], default: str) -> list[str]:
            return [fields.choice(one, options, where, name) for one in fields.axis(row.get(name, default))]

        axes: dict[str, Sequence[Any]] = {
            "dtype": words("dtype", tuple(DTYPE_BYTES), "bf16"),
            **{_NAMES.get(name, name): fields.counts(row, where, name) for name in _SIZES},
            "page_size": counts("page_size", 0),
            "spread": words("spread", SPREADS, "equal"),
            "mask": words("mask", MASKS, "none"),
            "window": counts("window", 0),
            "softcap": counts("softcap", 0),
            "deviation": counts("deviation", 1),
            "causal": [fields.flag(row.get("causal", True), where, "causal")],
            "sinks": [fields.flag(row.get("sinks", False), where, "sinks")],
            "alibi": [fields.flag(row.get("alibi", False), where, "alibi")],
            "cache": words("cache", CACHES, "own"),
            "dropout": counts("dropout", 0),
        }
        most = fields.count(row.get("most_keys", 2**31), where, "most_keys")
        for values in itertools.product(*axes.values()):
            problem = cls(**dict(zip(axes, values, strict=True)))
            problem._check(where)
            if sum(problem.lengths_k) <= most:
                yield problem

    def _check(self, where: str) -> None:
        fields.divide(self.heads_q, self.heads_kv, where, "heads", "heads_kv")
        if self.spread == "shared" and not self.page_size:
            fields.fail(where, "spread", self.spread, "another without page_size: pages are what sequences share")
        if self.dropout and (self.page_size or self.dropout >= 100):
            fields.fail(where, "dropout", self.dropout, "a percentage below 100, without pages, which serve inference")
        if self.window and not self.causal:
            fields.fail(where, "causal", self.causal, "true with a window, whose last key is the row's own")
        if self.mask in ("padding", "documents") and self.seq_q != self.seq_k:
            fields.fail(where, "mask", self.mask, "as many queries as keys: rows and keys are the same tokens")
        if self.mask != "none" and (self.causal or self.page_size or self.spread != "equal"):
            fields.fail(
                where, "mask", self.mask, "equal sequences without pages and causal = false, as others take masks"
            )

    def fit(self, dtypes: Collection[str], max_tokens: int) -> ServingProblem:
        """As many sequences of each length as fit; a batch that fits is unchanged."""
        found = replace(self, dtype=self.dtype if self.dtype in dtypes else "f16")
        while sum(found.lengths_q) > max_tokens and found.batch > 1:
            found = replace(found, batch=max(1, min(found.batch - 1, found.batch * max_tokens // sum(found.lengths_q))))
        return found


PROBLEM = ServingProblem
