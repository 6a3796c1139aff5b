"""Runs one program with a time limit; returns what its report says, or why there is none."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmoe.errors import ReportError
from flashmoe_tools.report import Check, Report, Verdict, overall, read_report

GRACE_SECONDS = 10.0
TAIL = 600
LOOK_SECONDS = 5.0  # between two looks at the running program's log


@dataclass(frozen=True)
class Outcome:
    """The verdict on a program with the reason, and its report if it wrote one."""

    verdict: Verdict
    found: str
    seconds: float
    report: Report | None = None


def execute(
    command: Sequence[str],
    report_path: Path,
    *,
    folder: Path,
    environment: Mapping[str, str],
    limit: float,
    ignore: Sequence[str] = (),
    note: Callable[[str], object] = str,
) -> Outcome:
    """Runs ``command`` and reads the report that it writes; ``note`` is called with the newest output line from time to time.

    An old report is moved away, so that it cannot be taken for a new one, and is restored if the command wrote none: it is still
    valid for the last build.
    """
    report_path.parent.mkdir(parents=True, exist_ok=True)
    old = report_path.with_suffix(".old.json")
    if report_path.exists():
        report_path.replace(old)
    begin = time.monotonic()
    log = report_path.with_suffix(".log")
    try:
        # Run the tree in `folder`, not a package of the same name from elsewhere.
        own = {**os.environ, "PYTHONSAFEPATH": "", **environment}
        code, tail = _run(command, folder, own, limit, log, note)
        return _outcome(code, tail, report_path, time.monotonic() - begin, limit, ignore)
    finally:
        if old.exists():
            old.unlink() if report_path.exists() else old.replace(report_path)


def _outcome(
    code: int | None, tail: str, report_path: Path, seconds: float, limit: float, ignore: Sequence[str]
) -> Outcome:
    if code is None:
        return Outcome(Verdict.FAIL, f"did not end within {limit:.0f} s and was stopped", seconds)
    try:
        report = read_report(report_path)
    except ReportError:
        return Outcome(Verdict.FAIL, f"exit {code} and no report: {tail} (all of it: {report_path.stem}.log)", seconds)
    verdict, found = verdict_of(report, ignore)
    if code != 0 and verdict in (Verdict.PASS, Verdict.WARN) and not ignore:
        return Outcome(Verdict.FAIL, f"exit {code} although its report says {verdict}: {tail}", seconds, report)
    return Outcome(verdict, found, seconds, report)


def verdict_of(report: Report, ignore: Sequence[str]) -> tuple[Verdict, str]:
    """The worst verdict of the checks that count, and a description of the first check with that verdict."""
    checks = [check for check in report.checks if check.name not in ignore]
    verdict = overall(checks)
    tally = {word: sum(check.verdict is word for check in checks) for word in Verdict}
    counts = ", ".join(f"{number} {word}" for word, number in tally.items() if number) or "nothing was checked"
    first = next((check for check in checks if check.verdict is verdict), None)
    if verdict is Verdict.PASS or first is None:
        return verdict, counts
    return verdict, f"{counts}; {_words(first)}"


def _words(check: Check) -> str:
    text = f"{check.name}: {check.found}"
    if check.expected:
        text += f" (expected {check.expected})"
    return f"{text}; next: {check.next_step}" if check.next_step else text


def _run(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    limit: float,
    log: Path,
    note: Callable[[str], object],
) -> tuple[int | None, str]:
    """(exit code, or None if it was stopped; the end of ``log``). Ends every process that was started."""
    with log.open("w+b") as output:
        try:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return 127, f"{command[0]}: {error.strerror}"
        try:
            code = _wait(process, time.monotonic() + max(limit, 0.1), log, note)
        finally:
            _stop(process)
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - TAIL))
        text = output.read().decode(errors="replace")
        return code, text.partition(" ")[2].strip() if len(text) >= TAIL and " " in text else text.strip()


def _wait(process: subprocess.Popen[bytes], end: float, log: Path, note: Callable[[str], object]) -> int | None:
    """The exit code; None once the time ``end`` has passed."""
    while (left := end - time.monotonic()) > 0.0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=min(left, LOOK_SECONDS))
        if newest := newest_line(log):
            note(newest)
    return None


def newest_line(log: Path) -> str:
    """The last complete line that a running program has written, empty if there is none."""
    with log.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL))
        lines = stream.read().decode(errors="replace").replace("\r", "\n").split("\n")[:-1]
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Sends the program's process group SIGTERM, then SIGKILL. A program that has ended may have left others in it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)
            return
