"""The table at the end of ``./nox``: one line a stage, read from the stages' report files and from nothing else.

python -m flashmoe_build.summary build/reports build symbols smoke bench
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmoe.errors import ExitCode, ReportError
from flashmoe.tools.report import Report, Verdict, overall, read_report

MAX_PROBLEMS = 5


@dataclass(frozen=True)
class Row:
    """One stage as the table shows it; ``verdict`` None when the stage left no report."""

    stage: str
    verdict: Verdict | None
    seconds: float
    counts: str
    problems: tuple[str, ...]


def row_of(stage: str, report: Report | None) -> Row:
    if report is None:
        return Row(stage, None, 0.0, "no report: the stage did not finish", ())
    tally = {verdict: sum(check.verdict is verdict for check in report.checks) for verdict in Verdict}
    counts = ", ".join(f"{count} {verdict}" for verdict, count in tally.items() if count)
    problems = tuple(
        f"{check.verdict} {check.name}: {check.found}" + (f"; next: {check.next_step}" if check.next_step else "")
        for check in report.checks
        if check.verdict in (Verdict.FAIL, Verdict.WARN)
    )
    return Row(stage, report.verdict, report.seconds, counts or "nothing checked", problems)


def render(rows: Sequence[Row]) -> str:
    """The table as plain text, problems under it."""
    width = max(len(row.stage) for row in rows)
    lines = [f"{'stage':<{width}}  verdict  seconds  checks"]
    for row in rows:
        verdict = row.verdict.value if row.verdict else "NOT RUN"
        lines.append(f"{row.stage:<{width}}  {verdict:<7}  {row.seconds:7.1f}  {row.counts}")
    for row in rows:
        lines += [f"  {row.stage}: {problem}" for problem in row.problems[:MAX_PROBLEMS]]
        if len(row.problems) > MAX_PROBLEMS:
            lines.append(f"  {row.stage}: {len(row.problems) - MAX_PROBLEMS} more in build/reports/{row.stage}.json")
    return "\n".join(lines)


def load(folder: Path, stage: str) -> Report | None:
    path = folder / f"{stage}.json"
    return read_report(path) if path.is_file() else None


def main(arguments: Sequence[str]) -> int:
    asked = bool({"-h", "--help"} & set(arguments))
    if asked or len(arguments) < 2:
        print("usage: python -m flashmoe_build.summary FOLDER STAGE...", file=sys.stdout if asked else sys.stderr)
        return ExitCode.OK if asked else ExitCode.USAGE
    folder, stages = Path(arguments[0]), arguments[1:]
    try:
        reports = {stage: load(folder, stage) for stage in stages}
    except ReportError as error:
        print(f"ReportError: {error}", file=sys.stderr)
        return ExitCode.FAILED
    print(render([row_of(stage, report) for stage, report in reports.items()]))
    if any(report is None for report in reports.values()):
        return ExitCode.FAILED
    checks = [check for report in reports.values() if report is not None for check in report.checks]
    failed = any(report is not None and report.verdict is Verdict.FAIL for report in reports.values())
    return ExitCode.FAILED if failed or overall(checks) is Verdict.FAIL else ExitCode.OK


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
