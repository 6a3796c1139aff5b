"""A bench report as one self-contained HTML page: no script, no font, no address that is fetched.

Rows are sorted by style sheet alone: each carries its rank under every order, and a choice picks one of them.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from flashmoe_tools.bench.figure import draw, panels, rooflines, styles, swatch
from flashmoe_tools.bench.heat import heat_rows, legend
from flashmoe_tools.bench.markdown import describe_case, number, rate_unit
from flashmoe_tools.bench.places import FORCED, in_front
from flashmoe_tools.report import Report, Verdict, count

UNITS = {"power_limit": "W"}
BYTES = ("memory", "l2_bytes")
SHARES = ("cpu_busy", "gpu_busy")
# Orders of the table of every number: words, and what a row is sorted by; rows without the number come last.
Key = Callable[[Mapping[str, Any]], float | None]
ORDERS: tuple[tuple[str, Key | None], ...] = (
    ("as measured", None),
    ("fastest", lambda row: row["summary"]["median_us"] if row["summary"] else None),
    ("highest rate", lambda row: -row["rate"] if row["summary"] else None),
    ("highest GB/s", lambda row: -row["summary"]["gbps"] if row["summary"] else None),
    ("lowest share of a product", lambda row: row["summary"]["share_of_matmul"] if row["summary"] else None),
    ("most memory", lambda row: None if row["peak_mb"] is None else -row["peak_mb"]),
    ("dearest call", lambda row: None if row["cpu_us"] is None else -row["cpu_us"]),
)


def template(name: str) -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).resolve().parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment.get_template(name)


def render_page(report: Report) -> str:
    """The whole page as text."""
    data = report.data
    factor, unit = rate_unit(data)
    rows, front = detail_rows(data, factor), in_front(data)
    heat = heat_rows(data)
    text: str = template("report.html.j2").render(
        report=report,
        data=data,
        device=device_of(report),
        titles={row["name"]: row["title"] for row in data["contenders"]},
        aggregates=_split(data["aggregates"], lambda row: (row["subject"], row["baseline"]), front),
        charts=[Markup(chart) for chart in draw(data, factor, unit, front)],
        swatches=_swatches(data, front),
        roofs=[Markup(chart) for chart in rooflines(data, factor, unit, front)],
        heat=heat,
        maps=_split(list(heat["groups"].items()), lambda item: item[0].split(" / "), front),
        legend=legend(),
        folded=_folded(data, front),
        rows=rows,
        ranks=_ranks(rows),
        orders=[words for words, _ in ORDERS],
        csv=csv_address(rows, unit),
        unit=unit,
        environment=list(flatten(report.environment)),
        ceilings=_ceilings(data, factor, unit),
        problems=[check for check in report.checks if check.verdict in (Verdict.FAIL, Verdict.WARN)],
        skipped=count(report.checks, Verdict.SKIP),
        checked=count(report.checks, *Verdict),
        repeat=shlex.join(report.command) if report.command else "",
    )
    return text


def device_of(report: Report) -> str:
    gpu = report.environment.get("gpu") or {}
    return str(gpu.get("name") or report.environment.get("processor") or "unknown device")


def _split(
    rows: Sequence[Any], pair: Callable[[Any], Sequence[str]], front: Collection[str]
) -> tuple[list[Any], list[Any]]:
    """Comparisons of two contenders in front, and the others; all of them in front where none is."""
    shown = [row for row in rows if set(pair(row)) <= set(front)]
    return (shown, [row for row in rows if row not in shown]) if shown else (list(rows), [])


def _swatches(data: Mapping[str, Any], front: Collection[str]) -> list[tuple[Markup, str]]:
    """(line and marker, title) of each contender that a chart shows."""
    timed = {name for panel in panels(data, 1.0, "") for cell in panel.cells for name in cell["summaries"]}
    titles = {row["name"]: row["title"] for row in data["contenders"]}
    return [
        (Markup(swatch(look)), titles[name]) for name, look in styles(data).items() if name in front and name in timed
    ]


def _folded(data: Mapping[str, Any], front: Collection[str]) -> str:
    """What is not in front and why, in words."""
    others = [row["name"] for row in data["contenders"] if row["name"] not in front]
    forced = [name for name in others if FORCED.fullmatch(name)]
    slow = [name for name in others if name not in forced]
    words = []
    if forced:
        words.append(f"forced families of ours ({', '.join(forced)})")
    if slow:
        words.append(f"references that are nowhere the fastest ({', '.join(slow)})")
    return " and ".join(words)


def detail_rows(data: Mapping[str, Any], factor: float) -> list[dict[str, Any]]:
    """One row for each case and contender, with everything that was measured or the reason why not."""
    rows = []
    for cell in data["cells"]:
        at = {"case": describe_case(cell["case"]), "key": cell["case"]["key"]}
        for name, outcome in cell["verification"].items():
            summary = cell["summaries"].get(name)
            cpu = cell["call_cpu_ns"].get(name)
            rows.append(
                {
                    **at,
                    "name": name,
                    "outcome": "right" if outcome["passed"] else f"WRONG: {outcome['reason']}",
                    "summary": summary,
                    "rate": factor * summary["tflops"] if summary else None,
                    "cpu_us": sorted(cpu)[len(cpu) // 2] / 1e3 if cpu else None,
                    "peak_mb": cell["peak_bytes"][name] / 1e6 if name in cell["peak_bytes"] else None,
                }
            )
        nothing = {"summary": None, "rate": None, "cpu_us": None, "peak_mb": None}
        rows += [
            {**at, "name": name, "outcome": f"not timed: {reason}", **nothing}
            for name, reason in cell["unsupported"].items()
        ]
    return rows


def _ranks(rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Of each row its place under each order but the first, which is the order of the page."""
    ranks: list[list[int]] = [[] for _ in rows]
    for _, key in ORDERS:
        if key is None:
            continue
        found = [key(row) for row in rows]
        values = [(one is None, one or 0.0) for one in found]
        for rank, at in enumerate(sorted(range(len(rows)), key=values.__getitem__)):
            ranks[at].append(rank)
    return ranks


def csv_address(rows: Sequence[Mapping[str, Any]], unit: str) -> str:
    """Every number as CSV, inside of the address itself: nothing is fetched."""
    stream = io.StringIO()
    columns = ("median_us", "p95_us", "p99_us", "gbps", "share_of_matmul", "share_of_copy", "samples")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["case", "contender", *columns, unit, "low_us", "high_us", "call_us", "peak_mb", "check"])
    for row in rows:
        summary = row["summary"] or {}
        interval = summary.get("interval_us") or (None, None)
        found = [summary.get(name) for name in columns]
        writer.writerow(
            [row["key"], row["name"], *found, row["rate"], *interval, row["cpu_us"], row["peak_mb"], row["outcome"]]
        )
    return "data:text/csv;charset=utf-8," + quote(stream.getvalue())


def _ceilings(data: Mapping[str, Any], factor: float, unit: str) -> list[tuple[str, str]]:
    ceilings = data["ceilings"]
    if not ceilings:
        return []
    of = ceilings.get("matmul_of", {})
    rows = [
        (
            f"fastest matrix product for {dtype}",
            f"{number(factor * rate)} {unit}{f' ({of[dtype]})' if dtype in of else ''}",
        )
        for dtype, rate in ceilings["matmul_tflops"].items()
    ]
    return [*rows, ("copy, read plus written", f"{number(ceilings['copy_gbps'])} GB/s")]


def flatten(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested tables as (dotted name, text with its unit) rows."""
    rows: list[tuple[str, str]] = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", with_unit(name, value)))
    return rows


def with_unit(name: str, value: Any) -> str:
    """A value of the environment as people write it: 79.2 GiB, 700 W, 3%."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if name in BYTES:
            return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
        if name in SHARES:
            return f"{value:.0%}"
        if name in UNITS:
            return f"{value:g} {UNITS[name]}"
        if name == "cudnn":  # 91900 of 9.19.0
            return f"{value // 10000}.{value // 100 % 100}.{value % 100}"
    return "not known" if value is None else str(value)
