"""What a build costs: wall time, number of units, and the peak memory of its largest process.

./nox -s bench -- --suite build-cost
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe.errors import ArgumentError, ExitCode, FlashmoeError
from flashmoe_tools.bench.record import DATA_SCHEMA
from flashmoe_tools.progress import Progress
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

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT_SECONDS = 1800.0
# Limits for a build on four cores: seconds from nothing, seconds after one touched kernel file, bytes per process.
COLD_SECONDS = 120.0
TOUCHED_SECONDS = 15.0
PROCESS_BYTES = 1.5e9


@dataclass(frozen=True)
class BuildCase:
    """One build to time: the targets, and a file to touch first (empty: build from nothing).

    ``replace`` is what the touch does: (old, new) text; the old text must occur in the file exactly once. Without it a comment is added.
    """

    archs: str
    touch: str = ""
    replace: tuple[str, str] | None = None

    @property
    def key(self) -> str:
        if not self.touch:
            return f"build-{self.archs}-cold"
        return f"build-{self.archs}-{'edit' if self.replace else 'touch'}-{Path(self.touch).stem}"


# Builds from nothing, after a comment was added to a kernel file that most units include, and after an instruction was added to it
# (a barrier: nothing else changes).
INCLUDED = "csrc/attention/forward/sm80/forward.cuh"
CASES = (
    BuildCase("all"),
    BuildCase("all", INCLUDED),
    BuildCase("all", INCLUDED, ("walk.start();", "walk.start();\n  ptx::barrier_sync_block();")),
)


def measure_builds(cases: Sequence[BuildCase], command: tuple[str, ...]) -> Report:
    """Runs each build in the same scratch folder, in order, so that a touched build finds the cold one's cache."""
    started, clock = utc_now(), time.monotonic()
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="flashmoe-build-") as scratch:
        copy = Path(scratch) / "source"
        _copy_tree(ROOT, copy)
        with Progress("build-cost", len(cases)) as progress:
            for case in cases:
                progress.note(case.key)
                row, check = _one_build(copy, case)
                rows.append(row)
                checks.append(check)
                progress.advance(case.key)
    data = {"schema": DATA_SCHEMA, "suite": {"name": "build-cost", "title": "Cost of a build"}, "builds": rows}
    return Report("build-cost", tuple(checks), data, host_environment(), command, started, time.monotonic() - clock)


def _copy_tree(root: Path, target: Path) -> None:
    """Copies only the sources: a build in place would use the checkout's cache and leave its output there."""
    target.mkdir()
    for name in ("csrc", "flashmoe", "flashmoe_build", "flashmoe_tools", "lockfiles"):
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        if (root / name).is_file():
            shutil.copy2(root / name, target / name)


def _one_build(source: Path, case: BuildCase) -> tuple[dict[str, Any], Check]:
    if case.touch:
        _touch(source / case.touch, case)
    argv = [sys.executable, "-m", "flashmoe_build", "--library-only", "--out", "build", "--archs", case.archs]
    seconds, code, tail, largest = _run(argv, source)
    row: dict[str, Any] = {
        "key": case.key,
        "archs": case.archs,
        "touch": case.touch,
        "seconds": seconds,
        "exit_code": code,
    }
    if code != 0:
        return row, Check(case.key, Verdict.FAIL, f"exit {code}: {tail}", "a build", next_step=" ".join(argv[1:]))
    built = read_report(source / "build" / "reports" / "build.json").data
    peak = max(largest, built["peak_bytes_per_job"])
    row |= {
        "units": len(built["units"]),
        "compiled": len(built["units"]) - built["cached_units"],
        "new_ptx": built["ptx"] - built["cached_ptx"],
        "jobs": built["jobs"],
        "peak_process_bytes": peak,
    }
    if not case.touch:
        row |= _wheel(source, case)
    return row, _judge(case, row)


def _touch(path: Path, case: BuildCase) -> None:
    if not path.is_file():
        msg = f"the build case touches {case.touch}, which does not exist"
        raise ArgumentError(msg)
    text = path.read_text(encoding="utf-8")
    # The cache is keyed by content and ignores time stamps, so the content must change.
    old, new = case.replace or (text, text + "\n// touched\n")
    if text.count(old) != 1:
        msg = f"the build case replaces {old!r}, which occurs {text.count(old)} times in {case.touch}; give text that occurs once"
        raise ArgumentError(msg)
    path.write_text(text.replace(old, new), encoding="utf-8")


def _wheel(source: Path, case: BuildCase) -> dict[str, Any]:
    """Size of the wheel for these targets, and the seconds that packing it takes once everything is compiled."""
    argv = [sys.executable, "-m", "flashmoe_build", "--out", "build", "--dist", "dist", "--archs", case.archs]
    seconds, code, tail, _ = _run(argv, source)
    sizes = [path.stat().st_size for path in (source / "dist").glob("*.whl")]
    if code != 0 or len(sizes) != 1:
        return {"wheel_bytes": None, "wheel_error": f"exit {code}: {tail}"}
    return {"wheel_bytes": sizes[0], "wheel_seconds": seconds}


def _judge(case: BuildCase, row: Mapping[str, Any]) -> Check:
    limit = TOUCHED_SECONDS if case.touch else COLD_SECONDS
    peak = row["peak_process_bytes"]
    found = (
        f"{row['seconds']:.1f} s, {row['new_ptx']} PTX and {row['compiled']} of {row['units']} binaries made by {row['jobs']} jobs, "
        f"largest process {peak / 1e9:.2f} GB"
    )
    if row.get("wheel_bytes"):
        found += f"; wheel {row['wheel_bytes'] / 1e6:.1f} MB, packed in {row['wheel_seconds']:.1f} s"
    elif "wheel_error" in row:
        return Check(case.key, Verdict.FAIL, f"{found}; no wheel: {row['wheel_error']}", "a wheel")
    word = Verdict.PASS if row["seconds"] <= limit and peak <= PROCESS_BYTES else Verdict.WARN
    return Check(case.key, word, found, f"{limit:g} s and {PROCESS_BYTES / 1e9:g} GB per process on 4 cores")


# Runs the build as its only child, so that the largest child process belongs to the build.
MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[2:]).returncode
with open(sys.argv[1], "w") as stream:
    stream.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024))
raise SystemExit(code)
"""


def _run(argv: Sequence[str], folder: Path) -> tuple[float, int, str, int]:
    """(seconds, exit code, end of the output, bytes of the largest process; 0 when the build was stopped)."""
    begin = time.monotonic()
    largest = folder / "largest-process"
    try:
        environment = {**os.environ, "FLASHMOE_CACHE_DIR": str(folder / "build" / "cache")}  # not a warm one
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(largest), *argv],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return time.monotonic() - begin, 124, f"stopped after {TIME_LIMIT_SECONDS:g} s", 0
    text = (done.stderr or done.stdout)[-400:].strip()
    return time.monotonic() - begin, done.returncode, text, int(largest.read_text()) if largest.is_file() else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=str(__doc__).partition("\n")[0])
    parser.add_argument("--suite", choices=("build-cost",))
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        report = measure_builds(CASES, typed_command())
    except FlashmoeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return ExitCode.USAGE if isinstance(error, ArgumentError) else ExitCode.FAILED
    if args.json:
        write_report(args.json, report)
    for check in report.checks:
        print(f"{check.verdict} {check.name}: {check.found}")
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
