"""Writes a page for every benchmark report in a folder, and an index of all reports there, from any program."""

from html import escape
from pathlib import Path
from urllib.parse import quote

from flashmoe.errors import ReportError
from flashmoe_tools.bench.compare import read_bench
from flashmoe_tools.bench.page import device_of, render_page
from flashmoe_tools.report import read_report

INDEX = "index.html"


def write_index(folder: Path) -> tuple[Path, int]:
    """Writes the pages and the index; returns its path and how many reports it lists. ReportError if there is none."""
    rows = sorted((row for path in folder.rglob("*.json") if (row := _row(folder, path)) is not None), reverse=True)
    if not rows:
        msg = f"there is no report in {folder}; `bench --json {folder}/bench.json` writes one"
        raise ReportError(msg)
    items = "\n".join(item for _, item in rows)
    title = "<title>flashmoe reports</title>"
    (folder / INDEX).write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{title}</head>\n'
        f"<body><h1>Reports, newest first</h1>\n<ul>\n{items}\n</ul></body></html>\n",
        encoding="utf-8",
    )
    return folder / INDEX, len(rows)


def _row(folder: Path, path: Path) -> tuple[str, str] | None:
    """(time, list item) of a report, or None for a file that holds no report; writes the page of a benchmark's report."""
    name = path.relative_to(folder).as_posix()
    try:
        report = read_report(path)
    except ReportError:
        return None
    found = next((f"{check.verdict} {check.name}: {check.found}" for check in report.checks if check.found), "")[:120]
    what = escape(report.kind)
    if report.kind == "bench":
        try:
            bench = read_bench(path)
        except ReportError:
            pass  # a suite of builds, which has no cells
        else:
            page = path.with_suffix(".html")
            page.write_text(render_page(bench), encoding="utf-8")
            what = f'<a href="{quote(page.relative_to(folder).as_posix())}">{escape(bench.data["suite"]["title"])}</a>'
    words = escape(f"{report.verdict} on {device_of(report)}, {report.started}, {name}. {found}")
    return report.started, f"<li>{what}: {words}</li>"
