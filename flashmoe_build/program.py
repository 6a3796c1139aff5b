"""Shared by the programs of a checkout: running commands, reports, and errors that become one line and an exit code."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashmoe.errors import BuildError, ExitCode, FlashmoeError
from flashmoe_tools.progress import Progress
from flashmoe_tools.report import Check, Report, host_environment, utc_now, write_report

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "build" / "reports"


class OutOfReachError(BuildError):
    """This machine lacks something (an engine, root, disk space, an archive): nothing was done and nothing failed."""


class Stopwatch:
    """Starts on construction; makes the report of what was done since then."""

    def __init__(self) -> None:
        self.started, self._begin = utc_now(), time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._begin, 1)

    def report(self, kind: str, checks: Sequence[Check], data: Mapping[str, Any] | None = None) -> Report:
        words = (Path(word).name if "/" in word else word for word in sys.argv[1:])  # no absolute path of this machine
        environment = host_environment()
        return Report(kind, tuple(checks), data or {}, environment, tuple(words), self.started, self.seconds)


def finish(report: Report) -> ExitCode:
    """Writes build/reports/KIND.json; returns the exit code of the report."""
    write_report(REPORTS / f"{report.kind}.json", report)
    return report.exit_code


def ending(work: Callable[[], int], nothing: str = "nothing was checked") -> int:
    """The exit code of ``work``. Errors become one line, which starts with ``nothing`` if this machine lacks something."""
    try:
        return int(work())
    except OutOfReachError as error:
        print(f"{nothing}: {error}", file=sys.stderr)
        return ExitCode.NOTHING_CHECKED
    except (FlashmoeError, subprocess.SubprocessError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return ExitCode.FAILED


def run(
    command: Sequence[str],
    what: str,
    *,
    time_limit: float,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    umask: int = -1,
) -> str:
    """Run with every output line shown as progress; returns the output. On failure raises BuildError with the end of it."""
    variables = {**(environment or os.environ), "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}
    lines: list[str] = []
    started = time.monotonic()
    with (
        Progress(what) as progress,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            errors="replace", env=variables, cwd=cwd, umask=umask,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                progress.note(line.strip()[:100])
                if time.monotonic() - started > time_limit:
                    msg = f"{what}: stopped after {time_limit:.0f} s"
                    raise BuildError(msg)
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        msg = f"{what} failed with exit status {process.returncode}:\n{''.join(lines[-40:])}"
        raise BuildError(msg)
    return "".join(lines)
