"""A bench report as one self-contained HTML page: no script, no font, no address that is fetched."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from flashmoe.tools.bench.figure import draw, heads_text
from flashmoe.tools.bench.markdown import MARKS, describe_case, number, rate_unit
from flashmoe.tools.problems.attention import AttentionProblem
from flashmoe.tools.report import Report, Verdict, count


def render_page(report: Report) -> str:
    """The whole page as text."""
    data = report.data
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
        figure=Markup(draw(data, factor, unit)),
        heat=heat_rows(data),
        rows=detail_rows(data, factor),
        unit=unit,
        environment=list(flatten(report.environment)),
        ceilings=_ceilings(data, factor, unit),
        problems=[check for check in report.checks if check.verdict in (Verdict.FAIL, Verdict.WARN)],
        skipped=count(report.checks, Verdict.SKIP),
        checked=count(report.checks, *Verdict),
        repeat=shlex.join(report.command) if report.command else "",
    )


def _device(report: Report) -> str:
    gpu = report.environment.get("gpu") or {}
    return str(gpu.get("name") or report.environment.get("processor") or "unknown device")


def _row_name(case: AttentionProblem) -> str:
    return f"{case.dtype} D={case.head_dim} {case.mask}{heads_text(case)}"


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
