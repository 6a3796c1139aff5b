"""``nox -s gate``: runs the steps in order; one table and one report."""

import argparse
from pathlib import Path

from flashmoe.errors import ArgumentError, ExitCode
from flashmoe_build.gate.history import append_record, record_of
from flashmoe_build.gate.pipeline import Pipeline, find_paths
from flashmoe_build.gate.steps import select
from flashmoe_tools.bench.stopping import stop_signals
from flashmoe_tools.interpreter import runnable
from flashmoe_tools.report import Report, Verdict, write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--budget-minutes", type=float, default=15.0, metavar="M", help="stop after this long (default: 15)")
    add("--rate", type=float, default=0.0, metavar="PER_HOUR", help="what an hour of this machine costs")
    add("--only", metavar="A,B", help="only these steps")
    add("--root", type=Path, default=Path(), metavar="DIR", help="the checkout to look at (default: here)")
    add("--library", type=Path, metavar="FILE.so", help="built elsewhere: the build step is skipped")
    add("--json", type=Path, metavar="FILE", help="default: build/reports/gate.json")
    add("--record", type=Path, metavar="FOLDER", help="add the outcome to the history in this folder")


def run(args: argparse.Namespace) -> int:
    if args.budget_minutes <= 0.0 or args.rate < 0.0:
        msg = f"--budget-minutes {args.budget_minutes:g} --rate {args.rate:g}: a positive time and a rate of at least 0"
        raise ArgumentError(msg)
    root = args.root.resolve()
    steps = select(args.only.split(",") if args.only else ())
    paths = find_paths(root, args.library.resolve() if args.library else None)
    pipeline = Pipeline(steps, paths, 60.0 * args.budget_minutes, args.rate)
    with stop_signals():
        report = pipeline.run()
    write_report(args.json or root / "build" / "reports" / "gate.json", report)
    if args.record:
        append_record(args.record, record_of(report, root, paths.library))
    print(render(report))
    return int(ExitCode.INTERRUPTED if pipeline.interrupted else report.exit_code)


def render(report: Report) -> str:
    """One line per step: verdict, time, cost, what its checks found; then where the run ended and what to do."""
    data = report.data
    priced = data["rate_per_hour"] > 0.0
    width = max(len("stage"), *(len(row["name"]) for row in data["steps"]))
    lines = [f"{'stage':<{width}}  verdict  seconds{'     cost' if priced else ''}  checks"]
    for row in data["steps"]:
        cost = f"  {row['cost']:7.4f}" if priced else ""
        lines.append(
            f"{row['name']:<{width}}  {row['verdict']:<7}  {row['seconds']:7.1f}{cost}  {_first(row['found'])}"
        )
    total = f", cost {data['cost']:.4f}" if priced else ""
    lines.append(f"gate {report.verdict}: {report.seconds:.0f} of {data['budget_seconds']:.0f} s{total}")
    missing = f" ({', '.join(data['unproven'])} has to pass first)" if data["unproven"] else ""
    lines.append(f"known good: {', '.join(data['known_good']) or 'nothing'}{missing}")
    lines += [f"not checked: {words}" for words in data["not_checked"]]
    for check in report.checks:
        if check.verdict is Verdict.FAIL:
            lines += [f"stopped at {check.name}: {check.found}", f"why: {check.why}", f"next: {check.next_step}"]
    return runnable("\n".join(lines))


def _first(text: str, width: int = 160) -> str:
    """The first line, truncated at a word boundary."""
    line = text.partition("\n")[0]
    return line if len(line) <= width else f"{line[:width].rpartition(' ')[0]} ..."
