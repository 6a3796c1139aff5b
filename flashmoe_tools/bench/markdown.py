"""A bench report as Markdown: short enough for a terminal or a pull request."""

from collections.abc import Mapping, Sequence
from typing import Any

from flashmoe_tools.bench.call_cost import TIMING
from flashmoe_tools.operations import problem_from_json
from flashmoe_tools.report import Report, Verdict, count

MARKS = {"FASTER": "+", "SLOWER": "-", "SAME": "=", "AMBIGUOUS": "?"}


def bench_markdown(report: Report) -> str:
    data = report.data
    lines = [f"## {data['suite']['title']}", "", _headline(report), ""]
    lines += _cells(data)
    lines += _aggregates(data)
    lines += _call_shares(data)
    lines += _problems(report)
    return "\n".join(lines).rstrip() + "\n"


def _headline(report: Report) -> str:
    environment = report.environment
    device = (environment.get("gpu") or {}).get("name") or environment.get("processor", "")
    packages = environment.get("packages", {})
    text = f"{report.verdict} on {device}, torch {packages.get('torch', '?')}, {report.seconds:.0f} s, {report.started}"
    if environment.get("forced_family"):
        text += f", our {environment['forced_family']} kernels forced"
    partial = report.data.get("partial")
    return f"{text}. PARTIAL: {partial}" if partial else text


def _cells(data: Mapping[str, Any]) -> list[str]:
    """One row per case: median and TFLOP/s of each contender, then ratio and verdict of each comparison."""
    names = [row["name"] for row in data["contenders"]]
    factor, unit = (None, "CPU time") if data["settings"].get("timing") == TIMING else rate_unit(data)
    pairs = list(
        dict.fromkeys((row["subject"], row["baseline"]) for cell in data["cells"] for row in cell["comparisons"])
    )
    header = ["case", *(f"{name} us ({unit})" for name in names), *(f"{subject} / {base}" for subject, base in pairs)]
    lines = [_row(header), _row(["---"] * len(header))]
    for cell in data["cells"]:
        found = {(row["subject"], row["baseline"]): row for row in cell["comparisons"]}
        lines.append(
            _row(
                [
                    cell["case"]["key"],
                    *(_time(cell, name, factor) for name in names),
                    *(ratio_text(found.get(pair)) for pair in pairs),
                ]
            )
        )
    lines.append("")
    lines.append(
        "Ratio: baseline time / ours, above 1 is faster, with a 95% interval; + FASTER, - SLOWER, = SAME, ? AMBIGUOUS."
    )
    references = sorted({name for cell in data["cells"] for name in cell.get("yardsticks", {})})
    if references:
        lines.append(
            f"{', '.join(references)}: without what a case does to its scores; ratios are of TFLOP/s of visible work."
        )
    lines.append("")
    return lines


def rate_unit(data: Mapping[str, Any]) -> tuple[float, str]:
    """The factor that converts a report's TFLOP/s to the unit that suits its device, and that unit."""
    return (1e3, "GFLOP/s") if data["settings"]["device"] == "cpu" else (1.0, "TFLOP/s")


def _time(cell: Mapping[str, Any], name: str, factor: float | None) -> str:
    if name in cell["summaries"]:
        summary = cell["summaries"][name]
        if factor is None:
            return number(summary["median_us"])
        return f"{number(summary['median_us'])} ({number(factor * summary['tflops'])}){load_text(cell, name)}"
    outcome = cell["verification"].get(name)
    if outcome is not None and not outcome["passed"]:
        return "WRONG"
    return "-"


def load_text(cell: Mapping[str, Any], name: str) -> str:
    """Clock and power next to a time that was measured under sustained load."""
    load = cell.get("load", {}).get(name)
    return f" {number(load['sm_clock'])} MHz {number(load['power'])} W" if load else ""


def ratio_text(row: Mapping[str, Any] | None) -> str:
    """A ratio such as 1.234 [1.200, 1.260] +; the last mark is the verdict's."""
    if row is None:
        return "-"
    low, high = row["interval"]
    interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    return f"{row['ratio']:.3f}{interval} {MARKS[row['verdict']]}"


def _aggregates(data: Mapping[str, Any]) -> list[str]:
    if not data["aggregates"]:
        return []
    lines = [_row(["ratio", "geometric mean", "worst", "worst case", "cells", "verdicts"]), _row(["---"] * 6)]
    for row in data["aggregates"]:
        low, high = row["interval"]
        mean = f"{row['geometric_mean']:.3f}"
        if low is not None and high is not None:
            mean += f" [{low:.3f}, {high:.3f}]"
        verdicts = ", ".join(f"{count} {word}" for word, count in row["verdicts"].items())
        name = f"{row['subject']} / {row['baseline']}"
        lines.append(_row([name, mean, f"{row['worst']:.3f}", row["worst_case"], str(row["cells"]), verdicts]))
    return [*lines, ""]


def _call_shares(data: Mapping[str, Any]) -> list[str]:
    rows = data.get("call_shares", [])
    if not rows:
        return []
    lines = [_row(["CPU time of a call", "share, geometric mean", "worst", "worst case", "cells"]), _row(["---"] * 5)]
    for row in rows:
        name = f"{row['subject']} of {row['baseline']}"
        lines.append(
            _row([name, f"{row['geometric_mean']:.3f}", f"{row['worst']:.3f}", row["worst_case"], str(row["cells"])])
        )
    return [*lines, ""]


def _problems(report: Report) -> list[str]:
    bad = [check for check in report.checks if check.verdict in (Verdict.FAIL, Verdict.WARN)]
    lines = [f"- {check.verdict} {check.name}: {check.found}" for check in bad]
    skipped = count(report.checks, Verdict.SKIP)
    if skipped:
        total = count(report.checks, *Verdict)
        lines.append(f"- SKIP: {skipped} of {total} checks proved nothing (not supported here, or not reached)")
    return lines


def number(value: float | None) -> str:
    """Three significant digits without an exponent; a dash if unknown."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def describe_case(row: Mapping[str, Any]) -> str:
    """A case in words, for titles."""
    return problem_from_json(row).title
