"""The tables of docs/distributed.md, from the newest report of the suite of several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashmoe.errors import ReportError
from flashmoe_tools.report import read_report

REPORTS = "docs/results/*-x*/distributed.json"  # a folder for each day and machine, so that the last is the newest
Table = tuple[Sequence[str], list[Sequence[str]]]


def newest(root: Path) -> Mapping[str, Any]:
    found = sorted(root.glob(REPORTS))
    if not found:
        msg = f"no report matches {REPORTS}; write one: bench --suite distributed --summary FILE"
        raise ReportError(msg)
    return read_report(found[-1]).data


def attention_table(root: Path) -> Table:
    """Milliseconds back to back, and the share of linear speedup back to back and of single calls."""
    data = newest(root)
    header = ("rows, heads", "one GPU", "ring", "all_gather", "torch", "of linear", "single calls")
    return header, [_attention(row, data["ranks"]) for row in _parts(data, "attention")]


def experts_table(root: Path) -> Table:
    """Milliseconds back to back, and the best form's share of computation and rows."""
    header = (
        "layer",
        "its own experts",
        "rows",
        "by sizes",
        "padded",
        "in a graph",
        "torch",
        "of computation and rows",
    )
    return header, [_experts(row) for row in _parts(newest(root), "experts")]


def _parts(data: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
    return [row for row in data["parts"] if row["key"].startswith(f"{what}-")]


def _columns(row: dict[str, Any], names: Sequence[str], text: Callable[[float], str]) -> list[str]:
    return [text(row["sustained_ms"][name]) if name in row["sustained_ms"] else "" for name in names]


def _attention(row: dict[str, Any], ranks: int) -> Sequence[str]:
    _, rows, heads, heads_kv, _, *ragged = row["key"].split("-")
    title = f"{rows[1:]}, {heads[1:]} on {heads_kv}" + "".join(f", {one[6:]} sequences" for one in ragged)
    ours = [name for name in ("ring", "all_gather") if name in row["ms"]]
    shares = [times["one"] / ranks / min(times[name] for name in ours) for times in (row["sustained_ms"], row["ms"])]
    columns = _columns(row, ("one", "ring", "all_gather", "torch"), lambda ms: f"{ms:.1f}")
    return title, *columns, *(f"{share:.3f}" for share in shares)


def _experts(row: dict[str, Any]) -> Sequence[str]:
    _, tokens, hidden, inner, experts, top_k, *options = row["key"].split("-")
    title = f"{experts[1:]} x {hidden[1:]} x {inner[1:]}, {top_k[1:]} of them, {tokens[1:]} tokens"
    title += "".join(f", {one}" for one in options)
    columns = _columns(row, ("experts", "padded", "padded, graph", "torch"), lambda ms: f"{ms:.3f}")
    best = min(share for name, share in row["of_compute_and_rows"].items() if name != "torch")
    return title, f"{row['sustained_ms']['share']:.3f}", f"{row['rows_ms']:.3f}", *columns, f"{best:.2f}"
