"""The audit's report as text, in colour on a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from flashmoe_tools import streams
from flashmoe_tools.report import Check, Report, Verdict

LEGEND = (
    "each target: registers per thread, then blocks per multiprocessor on each GPU that it covers, in arch.toml's order"
)


def kernel_table(data: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A header and one row per unit with the targets side by side; each cell shows the worst of the unit's kernels."""
    launches = [row for subject in data.get("subjects", []) for row in subject.get("launchability", [])]
    if not launches:
        return []
    units: dict[str, list[Mapping[str, Any]]] = {}
    for row in launches:
        units.setdefault(row["unit"], []).append(row)
    targets = sorted({row["target"] for row in launches})
    rows = [("unit", "threads", "static", "dynamic", *targets)]
    for unit, members in sorted(units.items()):
        sizes = (str(max(row[key] for row in members)) for key in ("threads", "smem_static", "smem_dynamic"))
        rows.append((unit, *sizes, *(_cell([row for row in members if row["target"] == target]) for target in targets)))
    return rows


def _cell(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    blocks: dict[str, int] = {}
    for row in rows:
        count = 0 if row["problems"] else row["blocks_per_sm"]
        blocks[row["gpu"]] = min(count, blocks.get(row["gpu"], count))
    registers = [row["registers"] for row in rows if row["registers"] is not None]
    return f"{max(registers) if registers else '-'}: {' '.join(str(count) for count in blocks.values())}"


def printable(text: str) -> str:
    """``text`` with non-printable characters escaped, because names come from the file under audit."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def details(check: Check) -> list[tuple[str, str]]:
    """The details of a check that did not pass."""
    rows = (("found", check.found), ("expected", check.expected), ("why", check.why), ("next", check.next_step))
    return [(word, printable(text)) for word, text in rows if text]


def plain(report: Report, *, every: bool = True) -> Iterable[str]:
    """Lines for a log. Without ``every``: only the summary and the checks that did not pass."""
    if not every:
        yield summary(report)
    for check in report.checks:
        if check.verdict is Verdict.PASS and not every:
            continue
        if check.verdict is Verdict.PASS:
            yield f"{check.verdict}  {printable(check.name)}: {printable(check.found)}"
            continue
        yield f"{check.verdict}  {printable(check.name)}"
        yield from (f"        {word:9}{text}" for word, text in details(check))
    if not every:
        yield "--details lists what passed, and the kernels' registers and blocks"
        return
    table = kernel_table(report.data)
    if table:
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        yield from ("", LEGEND)
        yield from (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        )
    yield ""
    yield summary(report)


def summary(report: Report) -> str:
    counts = {verdict: sum(c.verdict is verdict for c in report.checks) for verdict in Verdict}
    numbers = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    what = printable(str(report.data.get("path", "")))
    return f"audit of {what}: {report.verdict} ({numbers or 'nothing checked'}; {report.seconds:.1f} s)"


def show(report: Report, stream: TextIO | None = None, *, every: bool = True) -> None:
    """Prints the report; on a terminal, a verdict at the start of a line is in colour."""
    streams.show("\n".join(plain(report, every=every)), stream)
