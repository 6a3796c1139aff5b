"""The report format. Every stage (build, audit, doctor, test, bench, ...) writes it; tables, HTML and CI read it.

A report is a list of checks plus stage-specific ``data``. Its verdict is derived, never set; if nothing was checked, it
is FAIL.

python -m flashmoe_tools.report REPORT.json SUMMARY.json     what a repository keeps of a report (for a benchmark use
                                                             python -m flashmoe bench --render REPORT.json --summary FILE)
"""

import json
import os
import platform
import re
import stat
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

from flashmoe.errors import ExitCode, ReportError

SCHEMA = "flashmoe.report/1"


class Verdict(str, Enum):
    """SKIP: nothing was checked, which never counts as PASS. UNPROVED: the claim can be neither proved nor refuted."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    UNPROVED = "NOT PROVED"
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
    """The worst verdict of ``checks``; FAIL if no check reached a verdict."""
    verdicts = {check.verdict for check in checks} - {Verdict.SKIP}
    if not verdicts or Verdict.FAIL in verdicts:
        return Verdict.FAIL
    return next((verdict for verdict in (Verdict.UNPROVED, Verdict.WARN) if verdict in verdicts), Verdict.PASS)


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
        return {Verdict.FAIL: ExitCode.FAILED, Verdict.UNPROVED: ExitCode.NOT_PROVED}.get(self.verdict, ExitCode.OK)

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


def typed_command(module: str = "flashmoe") -> tuple[str, ...]:
    """The command line as reports store it: without the folders of this machine."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return ("python", "-m", module, *words)


def built_commit(library: Path) -> str:
    """The commit in the provenance next to the library, with ``+`` appended if files differed from it; empty if unknown."""
    for folder in (library.parent, library.parent.parent):  # in a wheel, in a build folder
        try:
            record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
            return str(record["commit"]) + ("+" if record["dirty"] else "")
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return ""


def write_json(path: Path, payload: Mapping[str, Any]) -> None:
    """Writes ``payload`` so that a reader sees the old file or the new one, never a mixture.

    An existing path that is not a regular file (a device, a FIFO, a symbolic link) is kept and written into. Raises
    ReportError if nothing can be written.
    """
    _write(path, json.dumps(payload, indent=1, default=str))


def _write(path: Path, text: str) -> None:
    try:
        if _is_replaceable(path):
            _replace_file(path, text + "\n")
        else:
            path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        msg = f"cannot write {path}: {error.strerror}; name a file in a folder that this user can write to, on a disk with room"
        raise ReportError(msg) from error


def _is_replaceable(path: Path) -> bool:
    """Whether a new file may replace ``path``: nothing exists there, or a regular file that is not a link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True


def _replace_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_report(path: Path, report: Report) -> None:
    write_json(path, report.to_json())


def _read_object(path: Path) -> dict[str, Any]:
    try:
        payload = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"cannot read the report {path}: {error.strerror}; run the session that writes it first"
        raise ReportError(msg) from error
    except (ValueError, RecursionError) as error:
        msg = f"{path} is not JSON ({error}); delete it and run the session that writes it again"
        raise ReportError(msg) from error
    if not isinstance(payload, dict):
        msg = f"{path} has schema {type(payload).__name__!r}, this flashmoe reads {SCHEMA!r}"
        raise ReportError(msg)
    return payload


def read_report(path: Path) -> Report:
    """Reads a report back; raises ReportError if it is missing, damaged or has another schema."""
    payload = _read_object(path)
    if payload.get("schema") != SCHEMA:
        msg = f"{path} has schema {payload.get('schema')!r}, this flashmoe reads {SCHEMA!r}"
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
        msg = f"{path} has a missing or invalid field of {SCHEMA}: {error!r}"
        raise ReportError(msg) from error


LINE = 240  # a value that fits into one line of a summary is not split
ENTRY = 8_000  # characters: larger parts of a report's data are raw material
FOLDED = re.compile(r"(\d+) checks")
MANY = 5  # a list of at least this many numbers is treated as samples


def summarise(path: Path, entry: int = ENTRY) -> dict[str, Any]:
    """A report as a repository keeps it: passed and skipped checks counted, samples as medians, raw material left out.

    A JSON object of another schema is kept in the same way. Raises ReportError if ``path`` holds neither.
    """
    payload = _read_object(path)
    if payload.get("schema") != SCHEMA:
        return _small(payload, entry)
    report = fold_checks(read_report(path))
    return replace(report, data=_small(report.data, entry)).to_json()


def _small(data: Mapping[str, Any], entry: int) -> dict[str, Any]:
    kept = {key: rounded(medians(value)) for key, value in data.items()}
    left_out = [key for key, value in kept.items() if len(json.dumps(value)) > entry]
    return {key: value for key, value in kept.items() if key not in left_out} | (
        {"left_out": left_out} if left_out else {}
    )


def fold_checks(report: Report) -> Report:
    """Keeps FAIL and WARN; merges all passed and all skipped checks into one each. The verdict stays the same."""
    folded = [check for check in report.checks if check.verdict not in (Verdict.PASS, Verdict.SKIP)]
    for verdict in (Verdict.PASS, Verdict.SKIP):
        same = [check for check in report.checks if check.verdict is verdict]
        found = Counter(check.found for check in same)
        if len(same) == 1:
            folded += same
        elif same:
            words = ", ".join(f"{text} ({count})" for text, count in found.most_common() if text)
            folded.append(Check(f"{len(same)} checks", verdict, words if len(words) <= 2 * LINE else ""))
    return replace(report, checks=tuple(folded))


def count(checks: Sequence[Check], *verdicts: Verdict) -> int:
    """Number of checks with one of these verdicts; a merged check in a summary counts as the number it replaces."""
    folded = (FOLDED.fullmatch(check.name) for check in checks if check.verdict in verdicts)
    return sum(int(match[1]) if match else 1 for match in folded)


def medians(value: Any) -> Any:
    """``value`` with each list of at least ``MANY`` numbers replaced by its median."""
    if isinstance(value, Mapping):
        return {key: medians(one) for key, one in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) >= MANY and all(isinstance(one, (int, float)) for one in value):
        return statistics.median(value)
    return [medians(one) for one in value]


def rounded(value: Any) -> Any:
    """``value`` with its numbers rounded to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def write_summary(path: Path, payload: Mapping[str, Any]) -> None:
    """JSON with one line per row, so that changing one number changes one line."""
    _write(path, _lines(payload))


def _lines(value: Any, indent: str = "") -> str:
    text = json.dumps(value, default=str, separators=(",", ":"))
    if len(text) <= LINE or not value or not isinstance(value, (dict, list, tuple)):
        return text
    inner = indent + " "
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {_lines(one, inner)}" for key, one in value.items()]
        return f"{{\n{inner}" + f",\n{inner}".join(rows) + f"\n{indent}}}"
    return f"[\n{inner}" + f",\n{inner}".join(_lines(one, inner) for one in value) + f"\n{indent}]"


def main(arguments: Sequence[str]) -> int:
    if len(arguments) not in (2, 3) or not all(word.isdecimal() for word in arguments[2:]):
        print("usage: python -m flashmoe_tools.report REPORT.json SUMMARY.json [LARGEST_ENTRY]", file=sys.stderr)
        return ExitCode.USAGE
    try:
        write_summary(Path(arguments[1]), summarise(Path(arguments[0]), *map(int, arguments[2:])))
    except ReportError as error:
        print(f"ReportError: {error}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.OK


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
