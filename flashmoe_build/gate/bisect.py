"""``nox -s bisect -- GOOD BAD``: git bisect over steps of the gate, in a separate worktree.

The user's checkout is not touched. Builds share one content cache, so that each commit only compiles what it changed. The result is
the first bad commit, and one report that contains those of that commit and of the last good one before it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe.errors import ArgumentError, ExitCode
from flashmoe_build.gate import commit as one_commit
from flashmoe_tools.bench.stopping import stop_signals
from flashmoe_tools.report import Check, Report, Verdict, host_environment, typed_command, utc_now, write_report

TIME_LIMIT_SECONDS = 4 * 3600.0
# Removes the current folder from the path: it holds the tree under test, whose package must not be imported instead of this one.
JUDGE = (
    "import sys; sys.path[:] = filter(None, sys.path); from flashmoe_build.gate.commit import main; sys.exit(main())"
)


@dataclass(frozen=True)
class Search:
    """The search range: ``good`` and ``bad`` are full hashes."""

    root: Path
    good: str
    bad: str
    gate: str
    reports: Path
    case: str = ""
    suite: str = ""

    @property
    def command(self) -> list[str]:
        """The command that judges the commit in the current folder."""
        words = [sys.executable, "-c", JUDGE, "--gate", self.gate, "--reports", str(self.reports)]
        speed = ["--good", self.good, "--bad", self.bad, "--case", self.case, "--suite", self.suite]
        return words + (speed if self.gate == "speed" else [])

    @property
    def environment(self) -> dict[str, str]:
        """Makes the command import this package.

        Disables bytecode files: Python considers one fresh if size and second of its source match, which can be the case for two
        commits that are checked out within a second.
        """
        folders = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "LC_ALL": "C",
            "PYTHONPATH": os.pathsep.join(folders),
            "FLASHMOE_CACHE_DIR": os.environ.get("FLASHMOE_CACHE_DIR") or str(self.reports / "cache"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def words(self) -> dict[str, str]:
        """good, bad or skip for each judged commit, in the order of the search."""
        path = self.reports / one_commit.WORDS
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return {row["commit"]: row["word"] for row in map(json.loads, lines)}


def git(folder: Path, *words: str, check: bool = True, environment: Mapping[str, str] | None = None) -> str:
    """git's output. Raises ArgumentError with git's message if it fails."""
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIME_LIMIT_SECONDS,
        env=environment or {**os.environ, "LC_ALL": "C"},
    )
    if check and done.returncode != 0:
        msg = f"git {words[0]}: {(done.stderr or done.stdout).strip()}"
        raise ArgumentError(msg)
    return done.stdout.strip()


def commit_named(root: Path, name: str) -> str:
    found = git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False)
    if not found:
        msg = f"git knows no commit {name!r} here"
        raise ArgumentError(msg)
    return found


def search(task: Search) -> tuple[str, str]:
    """(first bad commit, git's log of the search); the commit is empty if too many had to be skipped."""
    if not git(task.root, "rev-list", "--ancestry-path", f"{task.good}..{task.bad}"):
        msg = f"{task.good[:12]} is not an ancestor of {task.bad[:12]}: name the last good commit first, then a later bad one"
        raise ArgumentError(msg)
    task.reports.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flashmoe-bisect-") as scratch:
        worktree = Path(scratch) / "tree"
        git(task.root, "worktree", "add", "--detach", str(worktree), task.bad)
        try:
            _check_ends(task, worktree)
            git(worktree, "bisect", "start", task.bad, task.good)
            output = git(worktree, "bisect", "run", *task.command, check=False, environment=task.environment)
            found, ended, _ = output.partition("is the first bad commit")
            return (found.split()[-1] if ended else ""), git(worktree, "bisect", "log", check=False)
        finally:
            git(worktree, "bisect", "reset", check=False)
            git(task.root, "worktree", "remove", "--force", str(worktree), check=False)


def _check_ends(task: Search, worktree: Path) -> None:
    """Judges both ends first: a search between ends that do not differ would only find noise."""
    for commit, expected in ((task.good, "good"), (task.bad, "bad")):
        git(worktree, "checkout", "--detach", commit)
        subprocess.run(
            task.command,
            cwd=worktree,
            env=task.environment,
            check=False,
            timeout=TIME_LIMIT_SECONDS,
            stdout=subprocess.DEVNULL,
        )
        found = task.words().get(commit, "nothing")
        if found != expected:
            msg = f"{commit[:12]} was given as {expected}, but the gate says {found}: see {task.reports / commit}.json"
            raise ArgumentError(msg)


def report_of(task: Search, first_bad: str, log: str, started: str, seconds: float) -> Report:
    tried = {name: word for name, word in task.words().items() if name not in (task.good, task.bad)}
    listed = ", ".join(f"{name[:10]} {word}" for name, word in tried.items()) or "none was needed"
    why = f"{len(tried)} commits in between were tested: {listed}"
    last_good = commit_named(task.root, f"{first_bad}^") if first_bad else ""
    if first_bad:
        subject = git(task.root, "log", "-1", "--format=%s", first_bad)
        step = f"git show {first_bad}"
        check = Check("first bad commit", Verdict.PASS, f"{first_bad} {subject}", why=why, next_step=step)
    else:
        check = Check("first bad commit", Verdict.FAIL, "not found: too many commits could not be tested", why=why)
    data: dict[str, Any] = {
        "schema": "flashmoe.bisect/1",
        "gate": task.gate,
        "good": task.good,
        "bad": task.bad,
        "first_bad": first_bad,
        "last_good": last_good,
        "tried": [{"commit": name, "word": word} for name, word in tried.items()],
        "log": log,
        "neighbours": {
            name: json.loads((task.reports / f"{name}.json").read_text(encoding="utf-8"))
            for name in (last_good, first_bad)
            if (task.reports / f"{name}.json").is_file()
        },
    }
    return Report("bisect", (check,), data, host_environment(), typed_command(), started, seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("good", help="a commit that passes the gate")
    add("bad", help="a later commit that does not")
    add("--gate", default="correctness", help=f"{', '.join(one_commit.GATES)}, or another step of the gate")
    add("--case", default="", metavar="KEY", help="with --gate speed: the case that became slower")
    add("--suite", default="cpu", metavar="NAME", help="with --gate speed: the suite that holds the case")
    add("--root", type=Path, default=Path(), metavar="DIR", help="the repository (default: here)")
    add("--reports", type=Path, metavar="DIR", help="default: build/reports/bisect")
    add("--json", type=Path, metavar="FILE")


def run(args: argparse.Namespace) -> int:
    if args.gate == "speed" and not args.case:
        msg = "--gate speed needs --case KEY: one case, so that a commit takes seconds; a bench report names its cases"
        raise ArgumentError(msg)
    one_commit.steps_of(args.gate)
    root = args.root.resolve()
    good, bad = commit_named(root, args.good), commit_named(root, args.bad)
    reports = (args.reports or root / "build" / "reports" / "bisect").resolve()
    for old in (reports / one_commit.WORDS, *reports.glob("*.baseline.json")):
        old.unlink(missing_ok=True)
    task = Search(root, good, bad, args.gate, reports, args.case, args.suite)
    started, clock = utc_now(), time.monotonic()
    with stop_signals():
        first_bad, log = search(task)
    report = report_of(task, first_bad, log, started, time.monotonic() - clock)
    write_report(args.json or reports / "bisect.json", report)
    for check in report.checks:
        print(f"{check.verdict} {check.name}: {check.found}\n{check.why}\n{check.next_step}".rstrip())
    return int(report.exit_code if first_bad else ExitCode.FAILED)
