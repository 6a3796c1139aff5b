"""Runs every checker, as many at once as there are cores, all of them even if one fails; prints one line each at the end.

nox -s lint                 # all
nox -s lint -- mypy ruff    # some
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from flashmoe.errors import ExitCode
from flashmoe_tools.report import Check, Report, Verdict, host_environment, utc_now, write_report

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 300
# Files in formats defined by a platform, by the name of their schema in check-jsonschema.
SCHEMAS = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/*.yml",
    "dependabot": ".github/dependabot.yml",
    "citation-file-format": "CITATION.cff",
}
FORMAT_CXX = "git ls-files '*.h' '*.cuh' '*.cpp' | xargs .nox/env/lint-*/bin/clang-format -i"


@dataclass(frozen=True)
class Checker:
    """A command, what it checks, and the command that fixes its findings (empty: by hand)."""

    name: str
    command: tuple[str, ...]
    mend: str = ""


def checkers(root: Path, tools: Path) -> tuple[Checker, ...]:
    """The checkers with files to check in ``root``; ``tools`` is the environment's bin folder."""
    python = str(tools / "python")
    scripts = [str(path.relative_to(root)) for path in shell_scripts(root)]
    found = [
        Checker("ruff", (str(tools / "ruff"), "check", "."), "ruff check --fix ."),
        Checker("format", (str(tools / "ruff"), "format", "--check", "."), "ruff format ."),
        Checker("mypy", (python, "-m", "mypy")),
        Checker("shellcheck", (str(tools / "shellcheck"), *scripts)),
        Checker("clang-format", (str(tools / "clang-format"), "--dry-run", "-Werror", *cxx_sources(root)), FORMAT_CXX),
        Checker("lock", (python, "-m", "flashmoe_build.environments.relock", "--check"), "nox -s lock"),
        Checker("docs", (python, "-m", "flashmoe_build.docs", "--check"), "nox -s docs"),
    ]
    if util.find_spec("sphinx"):  # in lockfiles/lint.in for Python 3.11 and newer
        found.append(Checker("site", (python, "-m", "flashmoe_build.site", "--check")))
    dockerfiles = sorted(
        str(path.relative_to(root)) for path in [*root.glob("Dockerfile*"), *root.glob("docker/Dockerfile*")]
    )
    if dockerfiles:
        found.append(Checker("hadolint", (str(tools / "hadolint"), *dockerfiles)))
    if (root / ".github" / "workflows").is_dir():
        found.append(Checker("zizmor", (str(tools / "zizmor"), "--offline", "--no-progress", ".github/workflows")))
        for name, pattern in SCHEMAS.items():
            files = sorted(str(path.relative_to(root)) for path in root.glob(pattern) if path.name != "config.yml")
            command = (str(tools / "check-jsonschema"), "--builtin-schema", f"vendor.{name}", *files)
            found.append(Checker(f"schema {name}", command))
        actionlint = shutil.which("actionlint")  # has no wheel that could be locked; used if installed
        if actionlint:
            found.append(Checker("actionlint", (actionlint,)))
    return tuple(found)


def cxx_sources(root: Path) -> list[str]:
    """Kernels, host code and the C++ of the tests."""
    files = (path for folder in ("csrc", "tests") for path in (root / folder).rglob("*"))
    return sorted(str(path.relative_to(root)) for path in files if path.suffix in (".h", ".cuh", ".cpp"))


def shell_scripts(root: Path) -> Iterable[Path]:
    """The launcher, CI's script, and tracked files in folders that may contain more."""
    candidates = [root / "nox", *sorted((root / ".ci").glob("*"), reverse=True), *sorted((root / "docker").glob("*"))]
    for path in candidates:
        if path.is_file() and path.read_bytes()[:2] == b"#!" and b"sh" in path.read_bytes().split(b"\n", 1)[0]:
            yield path


def run_checker(checker: Checker, root: Path) -> Check:
    """Run one checker, and print its output when it is done."""
    words = " ".join(Path(word).name if word.startswith("/") else word for word in checker.command)
    try:
        done = subprocess.run(
            checker.command, cwd=root, timeout=TIMEOUT_S, check=False, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Check(checker.name, Verdict.FAIL, f"timed out after {TIMEOUT_S} s", next_step="run only this checker")
    except OSError as error:
        return Check(checker.name, Verdict.FAIL, f"cannot run: {error.strerror}", "the tool of lockfiles/lint.txt")
    status = done.returncode
    print(f"== {checker.name}: {words}\n{done.stdout}", end="", flush=True)
    verdict = Verdict.FAIL if status else Verdict.PASS
    return Check(
        checker.name, verdict, f"exit status {status}", "exit status 0", next_step=checker.mend if status else ""
    )


def main(arguments: Sequence[str]) -> int:
    known = checkers(ROOT, Path(sys.executable).parent)
    names = [checker.name for checker in known]
    if {"-h", "--help"} & set(arguments):
        print(f"usage: nox -s lint -- [CHECKER ...]\n\nall of them, or some of: {', '.join(names)}")
        return ExitCode.OK
    unknown = [word for word in arguments if word not in names]
    if unknown:
        print(f"no checker {unknown[0]!r}; known: {', '.join(names)}", file=sys.stderr)
        return ExitCode.USAGE
    started, clock = utc_now(), time.monotonic()
    chosen = [checker for checker in known if not arguments or checker.name in arguments]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # one program per core
        checks = tuple(pool.map(lambda checker: run_checker(checker, ROOT), chosen))
    report = Report(
        "lint", checks, {}, host_environment(), ("lint", *arguments), started, round(time.monotonic() - clock, 1)
    )
    write_report(ROOT / "build" / "reports" / "lint.json", report)
    for check in checks:
        hint = f"  next: {check.next_step}" if check.next_step else ""
        print(f"{check.verdict!s:5} {check.name}{hint}")
    return int(report.exit_code)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
