"""A page for every benchmark report in a folder, and one that lists all reports there, of whatever program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flashmoe.errors import ReportError
from flashmoe_tools.bench.compare import read_bench
from flashmoe_tools.bench.page import device_of, render_page, template
from flashmoe_tools.report import Report, read_report

INDEX = "index.html"


@dataclass(frozen=True)
class Row:
    """One report: what it is about, its outcome in words, and its page relative to the folder (empty: it has none)."""

    path: str
    report: Report
    title: str
    device: str
    outcome: str
    page: str = ""


def write_index(folder: Path) -> tuple[Path, int]:
    """Writes the pages and the index; returns its path and how many reports it lists. ReportError when there is none."""
    rows = [row for path in sorted(folder.rglob("*.json")) if (row := _row(folder, path)) is not None]
    if not rows:
        msg = f"there is no report in {folder}; `bench --json {folder}/bench.json` writes one"
        raise ReportError(msg)
    rows.sort(key=lambda row: row.report.started, reverse=True)
    path = folder / INDEX
    path.write_text(template("index.html.j2").render(rows=rows), encoding="utf-8")
    return path, len(rows)


def _row(folder: Path, path: Path) -> Row | None:
    """None for a file that holds no report."""
    name = path.relative_to(folder).as_posix()
    try:
        report = read_report(path)
    except ReportError:
        return None
    first = next((f"{check.verdict} {check.name}: {check.found}" for check in report.checks if check.found), "")
    plain = Row(name, report, report.kind, device_of(report), first[:120])
    if report.kind != "bench":
        return plain
    try:
        bench = read_bench(path)
    except ReportError:  # of a suite of builds, which has no cells
        return plain
    data = bench.data
    page = path.with_suffix(".html")
    page.write_text(render_page(bench), encoding="utf-8")
    ratios = [
        f"{row['subject']} {row['geometric_mean']:.2f} times as fast as {row['baseline']}"
        for row in data["aggregates"]
        if row["baseline"] == data["baseline"]
    ]
    outcome = f"partial: {data['partial']}" if data.get("partial") else "; ".join(ratios[:1])
    return Row(name, report, data["suite"]["title"], device_of(report), outcome, page.relative_to(folder).as_posix())
