"""The audit's report for people: coloured tables on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from flashmoe.report import Check, Report, Verdict

_COLOURS = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red", Verdict.SKIP: "cyan"}
_HEADER = ("kernel", "target", "registers", "threads", "static", "dynamic", "blocks per multiprocessor")


def kernel_rows(data: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row for each kernel and target; the GPUs that the target covers stand side by side in the last column."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for subject in data.get("subjects", []):
        for row in subject.get("launchability", []):
            registers = "-" if row["registers"] is None else str(row["registers"])
            key = (row["kernel"], row["target"], registers, str(row["threads"]), str(row["smem_static"]), str(row["smem_dynamic"]))
            text = f"{row['gpu']} none" if row["problems"] else f"{row['gpu']} {row['blocks_per_sm']} ({row['limited_by']})"
            grouped.setdefault(key, []).append(text)
    return [(*key, ", ".join(texts)) for key, texts in sorted(grouped.items())]


def details(check: Check) -> list[tuple[str, str]]:
    """What a reader needs of a check that did not pass."""
    rows = (("found", check.found), ("expected", check.expected), ("why", check.why), ("next", check.next_step))
    return [(word, text) for word, text in rows if text]


def plain(report: Report) -> Iterable[str]:
    """Lines for a log."""
    for check in report.checks:
        if check.verdict is Verdict.PASS:
            yield f"{check.verdict}  {check.name}: {check.found}"
            continue
        yield f"{check.verdict}  {check.name}"
        yield from (f"        {word:9}{text}" for word, text in details(check))
    rows = kernel_rows(report.data)
    if rows:
        table = [_HEADER, *rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(_HEADER))]
        yield ""
        yield from ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    yield ""
    yield summary(report)


def summary(report: Report) -> str:
    counts = {verdict: sum(c.verdict is verdict for c in report.checks) for verdict in Verdict}
    numbers = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"audit of {report.data.get('path', '')}: {report.verdict} ({numbers or 'nothing checked'}; {report.seconds:.1f} s)"


def show(report: Report, stream: TextIO | None = None) -> None:
    """Print the report; rich tables only on a terminal, and only where rich is installed."""
    out = stream if stream is not None else sys.stdout
    if out.isatty():
        try:
            _show_rich(report, out)
        except ImportError:
            pass
        else:
            return
    out.write("\n".join(plain(report)) + "\n")


def _show_rich(report: Report, out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=out)
    table = Table(title=f"audit of {report.data.get('path', '')}", show_lines=False)
    for column in ("verdict", "check", "result"):
        table.add_column(column, overflow="fold")
    for check in report.checks:
        text = check.found if check.verdict is Verdict.PASS else "\n".join(f"{word}: {t}" for word, t in details(check))
        table.add_row(Text(str(check.verdict), style=_COLOURS[check.verdict]), Text(check.name), Text(text))
    console.print(table)
    rows = kernel_rows(report.data)
    if rows:
        kernels = Table(title="launchability (shared memory in bytes)")
        for column in _HEADER:
            kernels.add_column(column, overflow="fold")
        for row in rows:
            kernels.add_row(*(Text(cell) for cell in row))
        console.print(kernels)
    console.print(Text(summary(report), style=_COLOURS[report.verdict]))
