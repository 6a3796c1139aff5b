"""The parts of the suite of several GPUs: attention of divided sequences, divided experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashmoe_tools.operations import fields

ELEMENT = 2  # bytes of bfloat16


@dataclass(frozen=True)
class AttentionPart:
    """Causal; forward and backward. One sequence, or a ragged batch of ``sequences`` that together have ``length`` rows."""

    length: int
    heads: int
    heads_kv: int
    head_dim: int = 128
    sequences: int = 0  # 0: one, dense
    repeats: int = 0  # 0: the suite's
    at_least: float = 0.0  # of linear speedup; 0: no bar

    @property
    def key(self) -> str:
        ragged = f"-ragged{self.sequences}" if self.sequences else ""
        return f"attention-s{self.length}-h{self.heads}-{self.heads_kv}-d{self.head_dim}{ragged}"

    def ends(self) -> list[int]:
        """cu_seqlens of the ragged batch, whose lengths are as 1 to 2 to 3 and so on; in multiples of 16 where the whole is one,
        since ring-flash-attn takes sequences that divide evenly."""
        parts, unit = self.sequences * (self.sequences + 1) // 2, 1 if self.length % 16 else 16
        ends = [self.length * (count * (count + 1) // 2) // parts for count in range(self.sequences + 1)]
        return [end // unit * unit for end in ends]

    def least_bytes(self, size: int, element: int) -> int:
        """What one rank must send, on average: the keys and values that others see, once, and one sum of gradients to each owner.

        Zig-zag: a higher rank sees the first half of a lower one's keys, a lower rank all of a higher one's.
        """
        part = 2 * self.length // size * self.heads_kv * self.head_dim * element
        return round(2 * part * (size - 1) * 0.75)


@dataclass(frozen=True)
class ExpertsPart:
    """A layer of experts, the same number of tokens on every rank; forward, or forward and backward."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    backward: bool = False
    codes: bool = False  # also with rows that travel as e4m3 codes
    skewed: bool = False  # expert e is as likely as 1 / (e + 1) makes it, so that the first rank has most rows
    repeats: int = 0  # 0: four times the suite's
    at_most: float = 0.0  # of the busiest rank's computation and rows at the measured rate; 0: no bar

    @property
    def key(self) -> str:
        shape = f"experts-t{self.tokens}-h{self.hidden}-i{self.inner}-e{self.experts}-k{self.top_k}"
        return shape + "-skewed" * self.skewed + "-backward" * self.backward


Part = AttentionPart | ExpertsPart
_FIELDS = {
    "attention": ({"length", "heads", "heads_kv", "head_dim", "sequences", "repeats"}, "at_least", AttentionPart),
    "experts": ({"tokens", "hidden", "inner", "experts", "top_k", "repeats"}, "at_most", ExpertsPart),
}
_OPTIONAL = {"head_dim", "sequences", "repeats"}
_FLAGS = {"attention": (), "experts": ("backward", "codes", "skewed")}


def parse_parts(rows: Any, source: str) -> tuple[tuple[Part, ...], frozenset[str]]:
    """The parts that a suite's ``[[parts]]`` state, and the keys of those of the quick run. A wrong field is a SuiteError."""
    if not isinstance(rows, list) or not rows:
        fields.fail(source, "parts", rows, "at least one [[parts]] table")
    found, quick = [], set()
    for number, row in enumerate(rows, start=1):
        where = f"{source}: parts[{number}]"
        part = _part(dict(fields.table(row, source, f"parts[{number}]")), where)
        found.append(part)
        if fields.flag(row.get("quick", False), where, "quick"):
            quick.add(part.key)
    return tuple(found), frozenset(quick)


def _part(row: Mapping[str, Any], where: str) -> Part:
    what = fields.choice(row.get("what"), tuple(_FIELDS), where, "what")
    counted, bar, make = _FIELDS[what]
    fields.known(row, {"what", "quick", bar, *counted, *_FLAGS[what]}, where)
    values: dict[str, Any] = {name: fields.count(row[name], where, name) for name in counted if name in row}
    values |= {name: fields.flag(row[name], where, name) for name in _FLAGS[what] if name in row}
    missing = sorted(counted - _OPTIONAL - set(values))
    if missing:
        fields.fail(where, missing[0], None, "a whole number, at least 1")
    if bar in row:
        if isinstance(row[bar], bool) or not isinstance(row[bar], (int, float)):
            fields.fail(where, bar, row[bar], "a number")
        values[bar] = float(row[bar])
    part: Part = make(**values)
    return part
