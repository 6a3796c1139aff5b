"""The workloads of the multi-GPU suite: attention over sharded sequences, and experts spread over ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashmoe_tools.operations import fields


@dataclass(frozen=True)
class AttentionWorkload:
    """Causal attention, forward and backward, over one sequence or a ragged batch.

    A ragged batch has ``sequences`` sequences, which together have ``length`` rows.
    """

    length: int
    heads: int
    heads_kv: int
    head_dim: int = 128
    sequences: int = 0  # 0: one dense sequence
    repeats: int = 0  # 0: the suite's number
    at_least: float = 0.0  # share of linear speedup; 0: no limit

    @property
    def key(self) -> str:
        ragged = f"-ragged{self.sequences}" if self.sequences else ""
        return f"attention-s{self.length}-h{self.heads}-{self.heads_kv}-d{self.head_dim}{ragged}"

    def ends(self) -> list[int]:
        """cu_seqlens of the ragged batch, whose lengths are in the ratio 1 : 2 : 3 and so on.

        Multiples of 16 if the total is one, because ring-flash-attn needs sequences that divide evenly.
        """
        parts, unit = self.sequences * (self.sequences + 1) // 2, 1 if self.length % 16 else 16
        ends = [self.length * (count * (count + 1) // 2) // parts for count in range(self.sequences + 1)]
        return [end // unit * unit for end in ends]

    def min_bytes(self, size: int, element: int) -> int:
        """Bytes that one rank must send on average.

        These are the keys and values that other ranks see, once, and one sum of gradients to each owner. With zig-zag
        sharding a higher rank sees the first half of a lower rank's keys, and a lower rank all of a higher rank's.
        """
        part = 2 * self.length // size * self.heads_kv * self.head_dim * element
        return round(2 * part * (size - 1) * 0.75)


@dataclass(frozen=True)
class ExpertsWorkload:
    """A layer of experts, forward or forward and backward, with the same number of tokens on every rank."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    backward: bool = False
    codes: bool = False  # also measure rows sent as e4m3 codes
    skewed: bool = False  # expert e has a probability proportional to 1 / (e + 1), so the first rank gets the most rows
    repeats: int = 0  # 0: four times the suite's number
    at_most: float = 0.0  # multiple of the busiest rank's compute time plus row transfer time; 0: no limit

    @property
    def key(self) -> str:
        shape = f"experts-t{self.tokens}-h{self.hidden}-i{self.inner}-e{self.experts}-k{self.top_k}"
        return shape + "-skewed" * self.skewed + "-backward" * self.backward


Workload = AttentionWorkload | ExpertsWorkload
_FIELDS = {
    "attention": ({"length", "heads", "heads_kv", "head_dim", "sequences", "repeats"}, "at_least", AttentionWorkload),
    "experts": ({"tokens", "hidden", "inner", "experts", "top_k", "repeats"}, "at_most", ExpertsWorkload),
}
_OPTIONAL = {"head_dim", "sequences", "repeats"}
_FLAGS = {"attention": (), "experts": ("backward", "codes", "skewed")}


def parse_workloads(rows: Any, source: str) -> tuple[tuple[Workload, ...], frozenset[str]]:
    """The workloads in a suite's ``[[parts]]``, and the keys of those in the quick run. A wrong field is a SuiteError."""
    if not isinstance(rows, list) or not rows:
        fields.fail(source, "parts", rows, "at least one [[parts]] table")
    found, quick = [], set()
    for number, row in enumerate(rows, start=1):
        where = f"{source}: parts[{number}]"
        work = _workload(dict(fields.table(row, source, f"parts[{number}]")), where)
        found.append(work)
        if fields.flag(row.get("quick", False), where, "quick"):
            quick.add(work.key)
    return tuple(found), frozenset(quick)


def _workload(row: Mapping[str, Any], where: str) -> Workload:
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
    work: Workload = make(**values)
    return work
