"""Reduces Nsight Compute's raw CSV to the few numbers that matter."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flashmoe.errors import ReportError
from flashmoe_tools.toml import tomllib

STALL = re.compile(r"^smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio$")
TIME_UNITS = {
    "ns": 1e-3,
    "nsecond": 1e-3,
    "us": 1.0,
    "usecond": 1.0,
    "ms": 1e3,
    "msecond": 1e3,
    "s": 1e6,
    "second": 1e6,
}
COUNT_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True)
class Field:
    name: str
    metrics: tuple[str, ...]
    unit: str
    says: str


@dataclass(frozen=True)
class Launch:
    """One profiled launch: the reported fields, and the share of each stall reason."""

    kernel: str
    values: Mapping[str, float]
    stalls: Mapping[str, float]


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    with (Path(__file__).resolve().parent / "metrics.toml").open("rb") as stream:
        return tomllib.load(stream)


@lru_cache(maxsize=1)
def fields() -> tuple[Field, ...]:
    return tuple(Field(row["name"], tuple(row["metrics"]), row["unit"], row["says"]) for row in _table()["field"])


def metric_names() -> list[str]:
    """The metrics to request from ncu: every alternative of every field, and every stall reason."""
    stalls = [f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in _table()["stalls"]]
    return [name for field in fields() for name in field.metrics] + stalls


def parse_csv(text: str) -> tuple[Launch, ...]:
    """Launches of ``ncu --csv --page raw``: ncu's own lines, a header row, a row of units, one row per launch.

    Raises ReportError with the profiler's message if there is no such table.
    """
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        words = next((line for line in lines if line.startswith("==ERROR==")), "no table in its output")
        msg = f"the profiler recorded no launch: {words}"
        raise ReportError(msg)
    rows = list(csv.reader(io.StringIO("\n".join(lines[start:]))))
    header, units, launches = rows[0], rows[1] if len(rows) > 1 else [], rows[2:]
    if not launches:
        msg = "the profiler's table contains no launch: no kernel matched its filter"
        raise ReportError(msg)
    return tuple(_launch(header, units, row) for row in launches if len(row) == len(header))


def _launch(header: Sequence[str], units: Sequence[str], row: Sequence[str]) -> Launch:
    table = {name: (value, unit) for name, unit, value in zip(header, units, row, strict=True)}
    values = {}
    for field in fields():
        for metric in field.metrics:
            number = _number(*table.get(metric, ("", "")), field.unit)
            if number is not None:
                values[field.name] = number
                break
    stalls = {}
    for name, (value, unit) in table.items():
        match = STALL.match(name)
        number = _number(value, unit, "ratio")
        if match and number is not None and match.group(1) in _table()["stalls"]:
            stalls[match.group(1)] = number
    total = sum(stalls.values())
    shares = {name: value / total for name, value in stalls.items()} if total > 0.0 else {}
    return Launch(table.get("Kernel Name", ("", ""))[0], derive(values, shares), shares)


def _number(text: str, unit: str, wanted: str) -> float | None:
    """A value in the wanted unit; None for n/a. ncu groups thousands with commas and chooses unit prefixes itself."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    if wanted == "us":
        return value * TIME_UNITS.get(unit, 1e-3)
    return value * COUNT_UNITS.get(unit, 1.0) if wanted == "count" else value


def derive(values: Mapping[str, float], stalls: Mapping[str, float]) -> dict[str, float]:
    """The reported numbers and those derived from them."""
    found = dict(values)
    if found.get("shared_wavefronts"):
        found["conflict_share"] = found.get("bank_conflicts", 0.0) / found["shared_wavefronts"]
    if "waves" in found and found["waves"] > 0.0:
        found["wave_fill"] = found["waves"] / -(-found["waves"] // 1)
    limits = {
        name: found[f"limit_{name}"] for name in ("registers", "shared_memory", "warps") if f"limit_{name}" in found
    }
    for name, blocks in limits.items():
        found[f"limited_by_{name}"] = float(blocks == min(limits.values()))
    sums = {
        "stall_barrier_share": ("barrier", "membar"),
        "stall_wait_share": ("wait",),
        "stall_long_scoreboard_share": ("long_scoreboard",),
        "stall_short_scoreboard_share": ("short_scoreboard", "mio_throttle"),
        "stall_math_share": ("math_pipe_throttle", "tensor_pipe_throttle", "gmma"),
    }
    if stalls:
        found |= {name: sum(stalls.get(word, 0.0) for word in words) for name, words in sums.items()}
    return found
