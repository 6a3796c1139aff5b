"""``python -m flashmoe doctor``: prints the verdicts, or the report as JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashmoe.errors import ExitCode, TableError
from flashmoe.variables import VARIABLES
from flashmoe_tools.doctor.collect import DEFAULT_PROBE_TIMEOUT_S, collect
from flashmoe_tools.doctor.judge import judge
from flashmoe_tools.progress import Progress
from flashmoe_tools.report import Check, Report, Verdict, host_environment, utc_now, write_report
from flashmoe_tools.streams import show

if TYPE_CHECKING:
    from flashmoe_tools.tables import Tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print the report as JSON instead of text, or write it to FILE",
    )
    parser.add_argument(
        "--timeout",
        type=seconds_above_zero,
        default=DEFAULT_PROBE_TIMEOUT_S,
        metavar="SECONDS",
        help="limit for loading the extension and the smoke test (default: %(default)g)",
    )
    parser.add_argument("--variables", action="store_true", help="only list flashmoe's environment variables")


def seconds_above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        msg = f"{text!r} is not a time; write a number of seconds above 0"
        raise argparse.ArgumentTypeError(msg)
    return value


def run(args: argparse.Namespace) -> int:
    if args.variables:
        print("\n".join(describe_variables(os.environ)))
        return int(ExitCode.OK)
    started, clock = utc_now(), time.monotonic()
    with Progress("doctor"):
        facts = collect(os.environ, args.timeout)
    checks = judge(facts, read_tables())
    seconds = round(time.monotonic() - clock, 2)
    report = Report("doctor", checks, {}, host_environment(), ("flashmoe", "doctor"), started, seconds)
    if args.json == "-":
        print(json.dumps(report.to_json(), indent=1))
    else:
        show(render(report, facts.flashmoe))
        if args.json:
            write_report(Path(args.json), report)
    return int(report.exit_code)


def describe_variables(environ: Mapping[str, str]) -> list[str]:
    """One line per variable: its value here, its possible values, what it does."""
    width = max(map(len, VARIABLES))
    lines = []
    for name, variable in VARIABLES.items():
        value = f"={environ[name]}" if environ.get(name) else ""
        values = f" ({', '.join(variable.values)})" if variable.values else ""
        lines.append(f"{variable.when:5}  {name:<{width}}{value}  {variable.meaning}{values}")
    return lines


def read_tables() -> Tables | str:
    """The tables, or why they cannot be read."""
    try:
        from flashmoe_tools.tables import load_tables

        return load_tables()
    except (ImportError, TableError) as error:
        return f"{type(error).__name__}: {error}"


def render(report: Report, version: str) -> str:
    """One line per check that passed, up to four for the others."""
    width = max(len(check.name) for check in report.checks)
    lines = [f"flashmoe {version} on this machine"]
    for check in report.checks:
        lines.append(f"{check.verdict!s:4}  {check.name:<{width}}  {check.found}")
        lines += [f"{'':{width + 6}}  {line}" for line in _details(check)]
    counts = ", ".join(_tally(report.checks))
    lines.append(f"doctor {report.verdict}: {counts}; {report.seconds:.1f} s")
    return "\n".join(lines)


def _details(check: Check) -> list[str]:
    if check.verdict is Verdict.PASS:
        return []
    if check.verdict is Verdict.SKIP:
        return [f"{check.why}{'; next: ' + check.next_step if check.next_step else ''}".lstrip("; ")]
    parts = [("expected", check.expected), ("why", check.why), ("fix", check.next_step)]
    return [f"{label + ':':<10}{text}" for label, text in parts if text]


def _tally(checks: Sequence[Check]) -> list[str]:
    counts = {verdict: sum(check.verdict is verdict for check in checks) for verdict in Verdict}
    return [f"{count} {verdict}" for verdict, count in counts.items() if count]
