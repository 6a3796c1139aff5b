"""One program with a time limit: what its report says, or why there is none."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmoe.errors import ReportError
from flashmoe_tools.report import Check, Report, Verdict, overall, read_report

GRACE_SECONDS = 10.0
TAIL = 600


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
) -> Outcome:
    """Runs ``command`` and reads the report it leaves. An old report is removed first, so that none is believed twice."""
    report_path.parent.mkdir(parents=True, exist_ok=True)
    report_path.unlink(missing_ok=True)
    begin = time.monotonic()
    log = report_path.with_suffix(".log")
    code, tail = _run(command, folder, {**os.environ, **environment}, limit, log)
    seconds = time.monotonic() - begin
    if code is None:
        return Outcome(Verdict.FAIL, f"did not end within {limit:.0f} s and was stopped", seconds)
    try:
        report = read_report(report_path)
    except ReportError:
        return Outcome(Verdict.FAIL, f"exit {code} and no report: {tail} (all of it: {log.name})", seconds)
    verdict, found = judge(report, ignore)
    if code != 0 and verdict in (Verdict.PASS, Verdict.WARN) and not ignore:
        return Outcome(Verdict.FAIL, f"exit {code} although its report says {verdict}: {tail}", seconds, report)
    return Outcome(verdict, found, seconds, report)


def judge(report: Report, ignore: Sequence[str]) -> tuple[Verdict, str]:
    """The worst verdict of the checks that count, and the first of those that have it, in words."""
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
    command: Sequence[str], folder: Path, environment: Mapping[str, str], limit: float, log: Path
) -> tuple[int | None, str]:
    """(exit code, or None when it was stopped; the end of what ``log`` holds). Ends every process that was started."""
    with log.open("w+b") as output:
        try:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return 127, f"{command[0]}: {error.strerror}"
        try:
            code: int | None = process.wait(timeout=max(limit, 0.1))
        except subprocess.TimeoutExpired:
            code = None
            _stop(process)
        except BaseException:
            _stop(process)
            raise
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - TAIL))
        text = output.read().decode(errors="replace")
        return code, text.partition(" ")[2].strip() if len(text) >= TAIL and " " in text else text.strip()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The program's own group: first asked, then ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)
            return
