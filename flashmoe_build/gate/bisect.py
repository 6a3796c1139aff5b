"""``python -m flashmoe bisect GOOD BAD``: git bisect over rungs of the ladder, in a worktree of its own.

The person's checkout is not touched. Builds share one content cache, so a commit costs what it changed. It ends with
the first bad commit, the reports of that commit and of its last good neighbour, and one report of the whole search.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe.errors import ArgumentError, ExitCode
from flashmoe_build.gate.ladder import OWN_LADDER, read_ladder, select
from flashmoe_tools.bench.stopping import stop_signals
from flashmoe_tools.report import Check, Report, Verdict, host_environment, typed_command, utc_now, write_report

GATES = ("symbols", "correctness", "speed")
# What each gate needs below it; a commit that fails at one of these cannot be judged and is skipped.
BELOW = {"symbols": ("build",), "correctness": ("build", "import"), "speed": ("build", "import")}
RUNG_OF_SPEED = "baseline"
TIME_LIMIT_SECONDS = 4 * 3600.0


@dataclass(frozen=True)
class Search:
    """What is searched, and with what."""

    root: Path
    good: str
    bad: str
    gate: str
    ladder: Path
    reports: Path
    case: str = ""
    suite: str = ""

    @property
    def rungs(self) -> tuple[str, ...]:
        """Names of the rungs that a step climbs; the last one is the gate."""
        names = [rung.name for rung in read_ladder(self.ladder)]
        wanted = RUNG_OF_SPEED if self.gate == "speed" else self.gate
        return tuple(name for name in names if name in BELOW.get(self.gate, ()) or name == wanted)


@dataclass(frozen=True)
class Found:
    """``first_bad`` is empty when git could not tell (too many commits were skipped)."""

    first_bad: str
    last_good: str
    tried: tuple[tuple[str, str], ...]  # (commit, good | bad | skip) in the order of the search
    log: str


def git(folder: Path, *words: str, check: bool = True, environment: dict[str, str] | None = None) -> str:
    """git's output. Raises ArgumentError with git's words when it refuses."""
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIME_LIMIT_SECONDS,
        env={**os.environ, "LC_ALL": "C", **(environment or {})},
    )
    if check and done.returncode != 0:
        msg = f"git {words[0]}: {(done.stderr or done.stdout).strip()}"
        raise ArgumentError(msg)
    return done.stdout + (done.stderr if not check else "")


def commit(root: Path, name: str) -> str:
    done = git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False).strip()
    if not done:
        msg = f"git knows no commit {name!r} here"
        raise ArgumentError(msg)
    return done


def search(task: Search) -> Found:
    """Runs the bisection in a temporary worktree, which is removed whatever happens."""
    good, bad = commit(task.root, task.good), commit(task.root, task.bad)
    if not git(task.root, "rev-list", "--ancestry-path", f"{good}..{bad}").split():
        msg = f"{task.good} is no ancestor of {task.bad}: name the last good commit first, then a bad one after it"
        raise ArgumentError(msg)
    task.reports.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flashmoe-bisect-") as scratch:
        worktree = Path(scratch) / "tree"
        git(task.root, "worktree", "add", "--detach", str(worktree), bad)
        try:
            return _bisect(task, worktree, good, bad)
        finally:
            git(worktree, "bisect", "reset", check=False)
            git(task.root, "worktree", "remove", "--force", str(worktree), check=False)


def _bisect(task: Search, worktree: Path, good: str, bad: str) -> Found:
    _check_ends(task, worktree, good, bad)
    git(worktree, "bisect", "start", bad, good)
    output = git(worktree, "bisect", "run", *step_command(task), check=False, environment=step_environment(task))
    log = git(worktree, "bisect", "log", check=False)
    first_bad = ""
    if "is the first bad commit" in output:
        first_bad = output.split("is the first bad commit")[0].split()[-1]
    tried = tuple((name, word) for name, word in _results(task.reports) if name not in (good, bad))
    last_good = commit(worktree, f"{first_bad}^") if first_bad else ""
    return Found(first_bad, last_good, tried, log)


def _check_ends(task: Search, worktree: Path, good: str, bad: str) -> None:
    """Both ends are judged first: a search between ends that do not differ finds nothing but noise."""
    for name, label, wanted in ((good, task.good, "good"), (bad, task.bad, "bad")):
        git(worktree, "checkout", "--detach", name)
        subprocess.run(
            step_command(task),
            cwd=worktree,
            env={**os.environ, **step_environment(task)},
            check=False,
            timeout=TIME_LIMIT_SECONDS,
            stdout=subprocess.DEVNULL,
        )
        found = dict(_results(task.reports)).get(name, "nothing")
        if found != wanted:
            msg = (
                f"{label} ({name[:12]}) was called {wanted}, but the gate says {found}: see {task.reports / name}.json"
            )
            raise ArgumentError(msg)


def step_command(task: Search) -> list[str]:
    words = [
        sys.executable,
        "-m",
        "flashmoe_build.gate.step",
        "--rungs",
        ",".join(task.rungs),
        "--reports",
        str(task.reports),
    ]
    words += ["--ladder", str(task.ladder.resolve())]
    if task.gate == "speed":
        words += ["--against", str(task.reports / f"{commit(task.root, task.good)}.baseline.json"), "--case", task.case]
        words += ["--suite", task.suite, "--bad", str(task.reports / f"{commit(task.root, task.bad)}.baseline.json")]
    return words


def step_environment(task: Search) -> dict[str, str]:
    """The driver's own package runs the step; the programs of the rungs come from the worktree.

    Without bytecode files: Python takes one for fresh when size and second of its source agree, and two commits that are
    checked out within a second can have both in common.
    """
    return {
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "FLASHMOE_CACHE_DIR": os.environ.get("FLASHMOE_CACHE_DIR") or str(task.reports / "cache"),
        "FLASHMOE_STEP_PATH": os.environ.get("PYTHONPATH", ""),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _results(reports: Path) -> list[tuple[str, str]]:
    path = reports / "steps.jsonl"
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["commit"], row["word"]) for row in rows]


def report_of(task: Search, found: Found, started: str, seconds: float) -> Report:
    tried = ", ".join(f"{name[:10]} {word}" for name, word in found.tried)
    if found.first_bad:
        subject = git(task.root, "log", "-1", "--format=%s", found.first_bad).strip()
        check = Check(
            "first bad commit",
            Verdict.PASS,
            f"{found.first_bad} {subject}",
            why=f"{len(found.tried)} commits between {task.good} and {task.bad} were tried: {tried or 'none was needed'}",
            next_step=f"git show {found.first_bad}",
        )
    else:
        check = Check("first bad commit", Verdict.FAIL, "not found: too many commits could not be judged", why=tried)
    data: dict[str, Any] = {
        "schema": "flashmoe.bisect/1",
        "gate": task.gate,
        "good": task.good,
        "bad": task.bad,
        "first_bad": found.first_bad,
        "last_good": found.last_good,
        "tried": [{"commit": name, "word": word} for name, word in found.tried],
        "log": found.log,
        "neighbours": {
            name: json.loads((task.reports / f"{name}.json").read_text(encoding="utf-8"))
            for name in (found.last_good, found.first_bad)
            if name and (task.reports / f"{name}.json").is_file()
        },
    }
    command = typed_command()
    return Report("bisect", (check,), data, host_environment(), command, started, seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("good", help="a commit that passes the gate")
    parser.add_argument("bad", help="a later commit that does not")
    parser.add_argument("--gate", default="correctness", help=f"{', '.join(GATES)}, or another rung of the ladder")
    parser.add_argument("--case", default="", metavar="KEY", help="with --gate speed: the case that became slower")
    parser.add_argument(
        "--suite", default="cpu", metavar="NAME", help="with --gate speed: the suite that holds the case"
    )
    parser.add_argument("--ladder", type=Path, default=OWN_LADDER, metavar="FILE.toml")
    parser.add_argument("--root", type=Path, default=Path(), metavar="DIR", help="the repository (default: here)")
    parser.add_argument("--reports", type=Path, metavar="DIR", help="default: build/reports/bisect")
    parser.add_argument("--json", type=Path, metavar="FILE")


def run(args: argparse.Namespace) -> int:
    if args.gate == "speed" and not args.case:
        msg = "--gate speed needs --case KEY: one case, so that a step takes seconds; a bench report names its cases"
        raise ArgumentError(msg)
    if args.gate != "speed":
        select(read_ladder(args.ladder), [args.gate])
    root = args.root.resolve()
    reports = (args.reports or root / "build" / "reports" / "bisect").resolve()
    for old in (reports / "steps.jsonl", *reports.glob("*.baseline.json")):
        old.unlink(missing_ok=True)
    task = Search(root, args.good, args.bad, args.gate, args.ladder, reports, args.case, args.suite)
    started, clock = utc_now(), time.monotonic()
    with stop_signals():
        found = search(task)
    report = report_of(task, found, started, time.monotonic() - clock)
    write_report(args.json or reports / "bisect.json", report)
    for check in report.checks:
        print(f"{check.verdict} {check.name}: {check.found}\n{check.why}\n{check.next_step}".rstrip())
    return int(report.exit_code if found.first_bad else ExitCode.FAILED)
