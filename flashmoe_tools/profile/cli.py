"""``python -m flashmoe profile``: one case, the numbers that matter, and a diagnosis with the rule that fired."""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashmoe.errors import DriverError, ExitCode, ReportError
from flashmoe_tools.interpreter import runnable
from flashmoe_tools.operations import Problem, problem_from_key
from flashmoe_tools.profile.collect import collect, find_ncu
from flashmoe_tools.profile.diagnose import Finding, diagnose
from flashmoe_tools.profile.difference import render as render_difference
from flashmoe_tools.profile.metrics import Launch, fields, parse_csv
from flashmoe_tools.profile.resources import build_facts, read_data, slowest_case, timing_facts
from flashmoe_tools.report import (
    Check,
    Report,
    Verdict,
    host_environment,
    read_report,
    typed_command,
    utc_now,
    write_report,
)

DATA_SCHEMA = "flashmoe.profile/1"
DEFAULT_CASE = "bf16-d128-full-b4-h16-s4096"
REPORTS = Path("build") / "reports"
# Meanings of a benchmark's numbers; those of the profiler's are in metrics.toml.
SAYS = {
    "median_us": "of a call, from the benchmark",
    "call_us": "all kernels of a call",
    "share_of_matmul": "of the fastest matrix product that the benchmark measured",
    "share_of_copy": "of the copy that the benchmark measured",
    "ratio": "times as fast as the benchmark's baseline",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--case",
        metavar="KEY",
        help="of any operation, as reports name it (backward-bf16-d128-..., bf16-e128k8-h2048i768-t512); "
        "default: the slowest of --bench, else " + DEFAULT_CASE,
    )
    parser.add_argument("--bench", type=Path, default=REPORTS / "bench.json", metavar="FILE", help="a bench report")
    parser.add_argument("--build", type=Path, default=REPORTS / "build.json", metavar="FILE", help="the build's report")
    parser.add_argument("--target", default="", metavar="sm_XX", help="which target's row of the build report to use")
    parser.add_argument("--ncu", metavar="PATH", help="path of Nsight Compute, if it is not on PATH")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="an existing `ncu --csv --page raw` file, instead of a run"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="two profiles side by side")


def run(args: argparse.Namespace) -> int:
    if args.compare:
        before, after = (_read_profile(path) for path in args.compare)
        print(render_difference(before, after))
        return ExitCode.OK
    started, clock = utc_now(), time.monotonic()
    bench, build = read_data(args.bench, "bench"), read_data(args.build, "build")
    case = _case(args.case, bench)
    launches, source, reason = _launches(args, case)
    report = make_report(case, launches, bench, build, args.target, source, reason, started, time.monotonic() - clock)
    if args.json:
        write_report(args.json, report)
    print(render(report))
    return int(report.exit_code)


def _case(key: str | None, bench: Mapping[str, Any]) -> Problem:
    if key:
        return problem_from_key(key)
    try:
        return slowest_case(bench) if bench else problem_from_key(DEFAULT_CASE)
    except ReportError:
        return problem_from_key(DEFAULT_CASE)


def _launches(args: argparse.Namespace, case: Problem) -> tuple[tuple[Launch, ...], str, str]:
    """(launches, their source, why there are none)."""
    if args.csv:
        return parse_csv(args.csv.read_text(encoding="utf-8")), f"csv {args.csv.name}", ""
    ncu = find_ncu(args.ncu)
    if ncu is None:
        return (), "resource table and timings", "Nsight Compute (ncu) is not installed"
    try:
        return collect(ncu, case.key), "Nsight Compute", ""
    except (DriverError, ReportError) as error:
        return (), "resource table and timings", str(error)


def make_report(
    case: Problem,
    launches: Sequence[Launch],
    bench: Mapping[str, Any],
    build: Mapping[str, Any],
    target: str,
    source: str,
    reason: str,
    started: str,
    seconds: float,
) -> Report:
    """The numbers of the longest launch, completed from the build and benchmark reports, and the rules that fire on them.

    An operation with several kernels has a row for each launch of one call, with the first rule that fires on it.
    """
    on_cpu = bool(bench) and bench["settings"]["device"] == "cpu" and not launches
    symbol, values = build_facts(build, case, target) if build and not on_cpu else ("", {})
    values = {**values, **(timing_facts(bench, case) if bench else {})}
    longest = max(launches, key=lambda one: one.values.get("duration_us", 0.0), default=None)
    if longest is not None:
        if len(launches) > 1:  # a benchmark's time is for the complete call
            values = {name: value for name, value in values.items() if name != "duration_us"}
            values["call_us"] = sum(one.values.get("duration_us", 0.0) for one in launches)
        values |= longest.values
        symbol = longest.kernel
    findings = diagnose({**values, "on_gpu": float(not on_cpu)})
    checks = [_source_check(source, reason)]
    if not values:
        expected = "a profile, a bench report or a build report"
        step = f"name one (--csv, --bench or --build FILE); in a clone ./nox -s build writes {REPORTS / 'build.json'}"
        checks.append(Check("numbers", Verdict.FAIL, "no report of this case", expected, next_step=step))
    checks += [_finding_check(finding) for finding in findings]
    if values and not findings:
        checks.append(Check("diagnosis", Verdict.PASS, "no rule fired on these numbers"))
    data = {
        "schema": DATA_SCHEMA,
        "case": case.to_json(),
        "kernel": symbol,
        "source": source,
        "ceiling": ((bench.get("ceilings") or {}).get("matmul_of") or {}).get(case.dtype, ""),
        "values": values,
        "stalls": dict(longest.stalls) if longest else {},
        "launches": [_launch_row(one) for one in launches],
        "findings": [asdict(finding) for finding in findings],
    }
    command = typed_command()
    return Report("profile", tuple(checks), data, host_environment(), command, started, seconds)


def _launch_row(launch: Launch) -> dict[str, Any]:
    found = diagnose({**launch.values, "on_gpu": 1.0})
    return {"kernel": launch.kernel, "values": dict(launch.values), "rule": found[0].rule if found else ""}


def _launch_lines(launches: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per launch of a call, if there are several: its time, its share of the call's, its first rule."""
    if len(launches) < 2:
        return []
    times = [row["values"].get("duration_us", 0.0) for row in launches]
    whole = sum(times) or 1.0
    lines = [f"{len(launches)} kernels in a call, {sum(times):.1f} us in all; the numbers below are of the longest"]
    for row, time_us in zip(launches, times, strict=True):
        lines.append(f"  {time_us:>9.1f} us {time_us / whole:>4.0%}  {row['kernel']}  {row.get('rule', '')}".rstrip())
    return lines


def _source_check(source: str, reason: str) -> Check:
    if reason:
        why = "stall reasons, achieved occupancy and bank conflicts come only from hardware counters"
        return Check("profiler", Verdict.SKIP, reason, "ncu", why, "install Nsight Compute on the GPU machine")
    return Check("profiler", Verdict.PASS, source)


def _finding_check(finding: Finding) -> Check:
    return Check(f"rule {finding.rule}", Verdict.PASS, f"{finding.says} ({finding.evidence})", next_step=finding.do)


def _read_profile(path: Path) -> Mapping[str, Any]:
    report = read_report(path)
    if report.data.get("schema") != DATA_SCHEMA:
        msg = f"{path} holds a {report.kind!r} report; expected a profile"
        raise ReportError(msg)
    return report.data


def render(report: Report) -> str:
    """Numbers, the largest stalls, then the diagnosis."""
    data = report.data
    says = SAYS | {field.name: field.says for field in fields()}
    if data.get("ceiling"):
        says["share_of_matmul"] += f" ({data['ceiling']})"
    lines = [
        f"profile of {data['case']['key']} from {data['source']}",
        *_launch_lines(data["launches"]),
        *([f"kernel {data['kernel']}"] if data["kernel"] else []),
    ]
    lines += [f"  {name:<28} {value:>12.4g}  {says.get(name, '')}".rstrip() for name, value in data["values"].items()]
    stalls = sorted(data["stalls"].items(), key=lambda item: -item[1])[:5]
    if stalls:
        lines.append("stalls: " + ", ".join(f"{name} {share:.0%}" for name, share in stalls))
    for number, finding in enumerate(data["findings"]):
        lines.append(
            f"{'diagnosis' if number == 0 else 'also'}: {finding['says']} [{finding['rule']}: {finding['evidence']}]"
        )
        lines.append(f"  do: {finding['do']}")
    for check in report.checks:
        if check.verdict is not Verdict.PASS:
            lines.append(f"{check.verdict} {check.name}: {check.found}")
            lines += [f"  next: {check.next_step}"] if check.next_step else []
    return runnable("\n".join(lines))
