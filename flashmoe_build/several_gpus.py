"""The tables of docs/distributed.md, from the newest reports of the multi-GPU suites."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashmoe.errors import ReportError
from flashmoe_tools.report import read_report

FOLDERS = "docs/results/*-x{size}"  # one folder per day and machine, so that the last is the newest
CODES = "e4m3"
Table = tuple[Sequence[str], list[Sequence[str]]]


def newest(root: Path, size: int) -> list[Mapping[str, Any]]:
    """The data of the newest report of each suite for this many GPUs, ordered by suite name."""
    pattern = f"{FOLDERS.format(size=size)}/distributed*.json"
    found = {path.name: path for path in sorted(root.glob(pattern))}
    if not found:
        msg = f"no report in {pattern}; write one: bench --suite distributed --summary FILE"
        raise ReportError(msg)
    return [read_report(path).data for _, path in sorted(found.items())]


def attention_table(root: Path, size: int = 2) -> Table:
    """Back-to-back milliseconds, and the share of linear speedup for back-to-back and for single calls."""
    header = ("rows, heads", "one GPU", "ring", "all_gather", "torch", "ring-flash-attn", "of linear", "single calls")
    return header, [_attention(row, size) for row in _parts(root, size, "attention")]


def experts_table(root: Path, size: int = 2) -> Table:
    """Back-to-back milliseconds, and the best form's share of the time for computation and sending rows."""
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
    return header, [_experts(row) for row in _parts(root, size, "experts")]


def codes_table(root: Path) -> Table:
    """Back-to-back milliseconds with 16 bits and with e4m3 codes, and how far the output differs from one GPU's."""
    header = (
        "layer",
        *(f"{form}{codes}" for form in ("by sizes", "padded", "in a graph") for codes in ("", ", e4m3")),
        "off",
        "off, e4m3",
    )
    forms = ("experts", "padded", "padded, graph")
    lines: list[Sequence[str]] = []
    for row in _parts(root, 2, "experts"):
        if "root_mean_squares" not in row:
            continue
        names = [
            name
            for form in forms
            for name in (form, form.replace(", graph", "") + f", {CODES}" + ", graph" * ("graph" in form))
        ]
        off = [f"{row['root_mean_squares'][name]:.2%}" for name in ("padded", f"padded, {CODES}")]
        lines.append((_title(row), *_columns(row, names, lambda ms: f"{ms:.3f}"), *off))
    return header, lines


def _parts(root: Path, size: int, what: str) -> list[dict[str, Any]]:
    return [row for data in newest(root, size) for row in data["parts"] if row["key"].startswith(f"{what}-")]


def _columns(row: dict[str, Any], names: Sequence[str], text: Callable[[float], str]) -> list[str]:
    return [text(row["sustained_ms"][name]) if name in row["sustained_ms"] else "" for name in names]


def _attention(row: dict[str, Any], ranks: int) -> Sequence[str]:
    _, rows, heads, heads_kv, _, *ragged = row["key"].split("-")
    title = f"{rows[1:]}, {heads[1:]} on {heads_kv}" + "".join(f", {one[6:]} sequences" for one in ragged)
    ours = [name for name in ("ring", "all_gather") if name in row["ms"]]
    shares = [times["one"] / ranks / min(times[name] for name in ours) for times in (row["sustained_ms"], row["ms"])]
    columns = _columns(row, ("one", "ring", "all_gather", "torch", "ring-flash-attn"), lambda ms: f"{ms:.1f}")
    return title, *columns, *(f"{share:.3f}" for share in shares)


def _title(row: dict[str, Any]) -> str:
    _, tokens, hidden, inner, experts, top_k, *options = row["key"].split("-")
    title = f"{experts[1:]} x {hidden[1:]} x {inner[1:]}, {top_k[1:]} of them, {tokens[1:]} tokens"
    return title + "".join(f", {one}" for one in options)


def _experts(row: dict[str, Any]) -> Sequence[str]:
    columns = _columns(row, ("experts", "padded", "padded, graph", "torch"), lambda ms: f"{ms:.3f}")
    best = min(share for name, share in row["of_compute_and_rows"].items() if name != "torch" and CODES not in name)
    return _title(row), f"{row['sustained_ms']['share']:.3f}", f"{row['rows_ms']:.3f}", *columns, f"{best:.2f}"
