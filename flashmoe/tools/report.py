"""The one report format. Every stage (build, audit, doctor, test, bench, ...) writes it; tables, HTML and CI read it.

A report is a list of checks plus stage-specific ``data``. Its verdict is derived, never set: nothing checked is FAIL.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

from flashmoe.errors import ExitCode, ReportError

SCHEMA = "flashmoe.report/1"


class Verdict(str, Enum):
    """SKIP means that nothing was checked; it never counts as PASS."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    verdict: Verdict
    found: str = ""
    expected: str = ""
    why: str = ""
    next_step: str = ""


def overall(checks: Sequence[Check]) -> Verdict:
    """The worst verdict of ``checks``; FAIL when no check reached a verdict at all."""
    verdicts = {check.verdict for check in checks} - {Verdict.SKIP}
    if not verdicts or Verdict.FAIL in verdicts:
        return Verdict.FAIL
    return Verdict.WARN if Verdict.WARN in verdicts else Verdict.PASS


@dataclass(frozen=True)
class Report:
    """What ran, on what, with which versions, and the result."""

    kind: str
    checks: tuple[Check, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    started: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        return overall(self.checks)

    @property
    def exit_code(self) -> ExitCode:
        if all(check.verdict is Verdict.SKIP for check in self.checks):
            return ExitCode.NOTHING_CHECKED
        return ExitCode.FAILED if self.verdict is Verdict.FAIL else ExitCode.OK

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "verdict": self.verdict.value, **asdict(self)}


def utc_now() -> str:
    """The current time as ISO 8601 in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def host_environment() -> dict[str, Any]:
    """The machine and interpreter, without a host name or a path."""
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
    }


def _processor_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def write_json(path: Path, payload: Mapping[str, Any]) -> None:
    """Write ``payload`` so that a reader sees the old file or the new one, never half of it.

    Raises ReportError where nothing can be written.
    """
    try:
        _replace_file(path, payload)
    except OSError as error:
        msg = f"cannot write {path}: {error.strerror}; name a file in a folder that this user can write to, on a disk with room"
        raise ReportError(msg) from error


def _replace_file(path: Path, payload: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(payload, stream, indent=1, default=str)
            stream.write("\n")
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_report(path: Path, report: Report) -> None:
    write_json(path, report.to_json())


def read_report(path: Path) -> Report:
    """Read a report back; raises ReportError when it is missing, damaged or of another schema."""
    try:
        payload = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"cannot read the report {path}: {error.strerror}; run the session that writes it first"
        raise ReportError(msg) from error
    except ValueError as error:
        msg = f"{path} is not JSON ({error}); delete it and run the session that writes it again"
        raise ReportError(msg) from error
    if not isinstance(payload, dict) or payload.get("schema") != SCHEMA:
        found = payload.get("schema") if isinstance(payload, dict) else type(payload).__name__
        msg = f"{path} has schema {found!r}, this flashmoe reads {SCHEMA!r}"
        raise ReportError(msg)
    try:
        checks = tuple(Check(**{**row, "verdict": Verdict(row["verdict"])}) for row in payload["checks"])
        return Report(
            kind=payload["kind"],
            checks=checks,
            data=payload["data"],
            environment=payload["environment"],
            command=tuple(payload["command"]),
            started=payload["started"],
            seconds=payload["seconds"],
        )
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{path} lacks or misstates a field of {SCHEMA}: {error!r}"
        raise ReportError(msg) from error
