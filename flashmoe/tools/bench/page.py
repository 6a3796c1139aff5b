"""A bench report as one self-contained HTML page: no script, no font, no address that is fetched."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from flashmoe.tools.bench.markdown import MARKS, describe_case, number, rate_unit
from flashmoe.tools.bench.svg import Point, Series, line_chart, roofline, swatch
from flashmoe.tools.problems.attention import AttentionProblem
from flashmoe.tools.report import Report, Verdict

Cells = Sequence[Mapping[str, Any]]


def render_page(report: Report) -> str:
    """The whole page as text."""
    data = report.data
    styles = {row["name"]: index for index, row in enumerate(data["contenders"])}
    factor, unit = rate_unit(data)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).resolve().parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment.get_template("report.html.j2").render(
        report=report,
        data=data,
        device=_device(report),
        legend=[(row["title"], Markup(swatch(styles[row["name"]]))) for row in data["contenders"]],
        rate_charts=[(title, Markup(chart)) for title, chart in rate_charts(data["cells"], styles, factor, unit)],
        time_charts=[(title, Markup(chart)) for title, chart in time_charts(data["cells"], styles)],
        rooflines=[(title, Markup(chart)) for title, chart in rooflines(data, styles, factor, unit)],
        heat=heat_rows(data),
        rows=detail_rows(data, factor),
        unit=unit,
        environment=list(flatten(report.environment)),
        ceilings=_ceilings(data, factor, unit),
        problems=[check for check in report.checks if check.verdict in (Verdict.FAIL, Verdict.WARN)],
        skipped=sum(check.verdict is Verdict.SKIP for check in report.checks),
        repeat=shlex.join(report.command) if report.command else "",
    )


def _device(report: Report) -> str:
    gpu = report.environment.get("gpu") or {}
    return str(gpu.get("name") or report.environment.get("processor") or "unknown device")


FEW_QUERIES = 64  # fewer than this against more keys: reading K and V is the work, and GB/s its measure


def _heads(case: AttentionProblem) -> str:
    return f", {case.heads_q} on {case.heads_kv} heads" if case.heads_q != case.heads_kv else ""


def _groups(cells: Cells, timings: set[str], *, decode: bool) -> dict[str, list[Mapping[str, Any]]]:
    """Cells that share a chart: all but the sequence lengths alike (and the batch, which prefill grids trade for length).

    Of prefill, a group with one length has no line to draw; it is left to the tables, unless no group has more.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for cell in cells:
        case = AttentionProblem.from_json(cell["case"])
        is_decode = case.seq_q != case.seq_k and case.seq_q < FEW_QUERIES
        if cell["timing"] in timings and cell["summaries"] and is_decode == decode:
            queries = f", B = {case.batch}, {case.seq_q} of Q" if case.seq_q != case.seq_k else ""
            groups.setdefault(f"{case.dtype}, D = {case.head_dim}, {case.mask}{_heads(case)}{queries}", []).append(cell)
    lines = {name: group for name, group in groups.items() if len({cell["case"]["seq_k"] for cell in group}) > 1}
    return groups if decode else lines or groups


def rate_charts(cells: Cells, styles: Mapping[str, int], factor: float, unit: str) -> list[tuple[str, str]]:
    """TFLOP/s (GFLOP/s on a CPU) against the sequence length; GB/s where few queries read many keys."""

    def speed(summary: Mapping[str, Any]) -> tuple[float, float, float]:
        low, high = summary["tflops_interval"] or (summary["tflops"], summary["tflops"])
        return factor * summary["tflops"], factor * low, factor * high

    def bandwidth(summary: Mapping[str, Any]) -> tuple[float, float, float]:
        low, high = summary["tflops_interval"] or (summary["tflops"], summary["tflops"])
        scale = summary["gbps"] / summary["tflops"]
        return summary["gbps"], scale * low, scale * high

    timings = {"events", "wall"}
    charts = _charts(_groups(cells, timings, decode=False), styles, speed, unit, y_log=False)
    return charts + _charts(_groups(cells, timings, decode=True), styles, bandwidth, "GB/s", y_log=False)


def time_charts(cells: Cells, styles: Mapping[str, int]) -> list[tuple[str, str]]:
    """Latency in microseconds against the sequence length, of the cells timed inside a graph."""

    def value(summary: Mapping[str, Any]) -> tuple[float, float, float]:
        low, high = summary["interval_us"]
        median = summary["median_us"]
        return median, median if low is None else low, median if high is None else high

    groups = _groups(cells, {"graph"}, decode=False) | _groups(cells, {"graph"}, decode=True)
    return _charts(groups, styles, value, "us a call", y_log=True)


def _charts(
    groups: Mapping[str, Cells], styles: Mapping[str, int], value: Any, unit: str, *, y_log: bool
) -> list[tuple[str, str]]:
    charts = []
    for title, cells in groups.items():
        series = []
        for name, style in styles.items():
            points = []
            for cell in cells:
                if name in cell["summaries"]:
                    here, low, high = value(cell["summaries"][name])
                    length = cell["case"]["seq_k"]
                    points.append(Point(length, here, low, high, f"{name}, {length}: {here:.3g} {unit}"))
            series.append(Series(name, style, tuple(points)))
        charts.append((title, line_chart(f"{title}: {unit}", "sequence length", unit, series, y_log=y_log)))
    return charts


def rooflines(data: Mapping[str, Any], styles: Mapping[str, int], factor: float, unit: str) -> list[tuple[str, str]]:
    """One roofline for each dtype that has a measured ceiling."""
    ceilings = data["ceilings"]
    if not ceilings:
        return []
    charts = []
    for dtype, peak in ceilings["matmul_tflops"].items():
        cells = [cell for cell in data["cells"] if cell["case"]["dtype"] == dtype]
        series = [Series(name, style, _roof_points(cells, name, factor)) for name, style in styles.items()]
        chart = roofline(f"roofline {dtype}", factor * peak, factor * ceilings["copy_gbps"] / 1e3, unit, series)
        if chart:
            charts.append((dtype, chart))
    return charts


def _roof_points(cells: Cells, name: str, factor: float) -> tuple[Point, ...]:
    points = []
    for cell in cells:
        if name in cell["summaries"]:
            case: AttentionProblem = AttentionProblem.from_json(cell["case"])
            rate = factor * cell["summaries"][name]["tflops"]
            points.append(Point(case.intensity, rate, rate, rate, f"{name}: {describe_case(cell['case'])}"))
    return tuple(points)


def _row_name(case: AttentionProblem) -> str:
    return f"{case.dtype} D={case.head_dim} {case.mask}{_heads(case)}"


def heat_rows(data: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios as a table: a group for each comparison, a row for each (dtype, head dim, mask, grouping), a column for each
    length, and batch where one length has several."""
    columns: list[str] = []
    groups: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
    cases = [AttentionProblem.from_json(cell["case"]) for cell in data["cells"]]
    batches: dict[tuple[str, int], set[int]] = {}
    for case in cases:
        batches.setdefault((_row_name(case), case.seq_k), set()).add(case.batch)
    for case, cell in zip(cases, data["cells"], strict=True):
        square = case.seq_q == case.seq_k
        column = f"{case.seq_k}" if square else f"{case.seq_q} x {case.seq_k}"
        name = _row_name(case)
        if not square or len(batches[name, case.seq_k]) > 1:
            column += f" (B={case.batch})"
        for row in cell["comparisons"]:
            pair = f"{row['subject']} / {row['baseline']}"
            if column not in columns:
                columns.append(column)
            groups.setdefault(pair, {}).setdefault(name, {})[column] = {
                "text": f"{row['ratio']:.2f}",
                "mark": MARKS[row["verdict"]],
                "level": heat_level(row["ratio"], row["verdict"]),
                "title": f"{row['verdict']} ({row['reason']})",
            }
    return {"columns": columns, "groups": groups}


def heat_level(ratio: float, verdict: str) -> str:
    """The shade of a cell: only a shown difference is coloured."""
    if verdict in ("SAME", "AMBIGUOUS"):
        return "even"
    if ratio > 1.0:
        return "up2" if ratio >= 1.2 else "up1"
    return "down2" if ratio < 0.8 else "down1"


def detail_rows(data: Mapping[str, Any], factor: float) -> list[dict[str, Any]]:
    """One row for each case and contender, with everything that was measured or the reason why not."""
    rows = []
    for cell in data["cells"]:
        title = describe_case(cell["case"])
        for name, outcome in cell["verification"].items():
            summary = cell["summaries"].get(name)
            cpu = cell["call_cpu_ns"].get(name)
            rows.append(
                {
                    "case": title,
                    "name": name,
                    "outcome": "right" if outcome["passed"] else f"WRONG: {outcome['reason']}",
                    "summary": summary,
                    "rate": factor * summary["tflops"] if summary else None,
                    "cpu_us": sorted(cpu)[len(cpu) // 2] / 1e3 if cpu else None,
                    "peak_mb": cell["peak_bytes"][name] / 1e6 if name in cell["peak_bytes"] else None,
                }
            )
        rows += [
            {
                "case": title,
                "name": name,
                "outcome": f"not timed: {reason}",
                "summary": None,
                "cpu_us": None,
                "peak_mb": None,
            }
            for name, reason in cell["unsupported"].items()
        ]
    return rows


def _ceilings(data: Mapping[str, Any], factor: float, unit: str) -> list[tuple[str, str]]:
    ceilings = data["ceilings"]
    if not ceilings:
        return []
    rows = [
        (f"matrix product, {dtype}", f"{number(factor * rate)} {unit}")
        for dtype, rate in ceilings["matmul_tflops"].items()
    ]
    return [*rows, ("copy, read plus written", f"{number(ceilings['copy_gbps'])} GB/s")]


def flatten(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested tables as (dotted name, text) rows."""
    rows: list[tuple[str, str]] = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", str(value)))
    return rows
