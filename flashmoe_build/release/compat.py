"""``nox -s compat``: one wheel file under every torch that it supports, with the lowest and highest local CPython of each, and
under several versions of transformers.

Each cell is a separate environment with that torch from the package index (not from the lock: the aim is to test what users
can install), the wheel under test, and the operator's tests on the CPU. One cell below the floor checks that the import is
rejected with a clear error.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.version import Version

from flashmoe.errors import LockError
from flashmoe_build.environments.environment import find_uv, probe_python, python_candidates
from flashmoe_build.program import ROOT, Stopwatch, ending, finish
from flashmoe_tools.progress import Progress
from flashmoe_tools.report import Check, Report, Verdict

FLOOR = Version("2.10")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TOOLS = ("pytest", "pytest-timeout", "pytest-cov", "hypothesis", "numpy")
TESTS = ("tests/attention",)
# Enough to show that this torch loads the library and runs the operator: registration and opcheck, autograd, compile, errors
# and values. The grid of sizes tests the kernel, whose machine code is the same in every cell.
CORE = (
    "tests/attention/test_extension.py",
    "tests/attention/test_checks.py",
    "tests/attention/test_compile.py",
    "tests/moe/test_train_fp8.py",  # experts, compiled: operators with several results
)
# The last 4.x; a 5.x that does not look up experts by name; the last but one that accepts foreign names for continuous batching.
# The lock has the newest.
TRANSFORMERS = ("4.57.6", "5.5.4", "5.17.0")
TRANSFORMERS_TESTS = (
    "tests/integrations/test_transformers.py",
    "tests/integrations/test_transformers_cache.py",
    "tests/integrations/test_transformers_latents.py",
    "tests/integrations/test_transformers_models.py",
    "tests/integrations/test_transformers_packed.py",
)
THREADS = 2
INSTALL_LIMIT = 1800  # seconds
TEST_LIMIT = 900
CLOSING = re.compile(r"(\d+) passed")


@dataclass(frozen=True)
class Cell:
    """One environment: a torch, a Python, and the result for the wheel in it."""

    torch: str
    python: str
    verdict: Verdict
    found: str
    passed: int
    install_seconds: float
    test_seconds: float
    transformers: str = ""

    @property
    def label(self) -> str:
        return f"{_torch_and(self.torch, self.transformers)}, Python {self.python}"


def _torch_and(torch: str, transformers: str) -> str:
    return f"torch {torch}, transformers {transformers}" if transformers else f"torch {torch}"


def known_versions(output: str, floor: Version = FLOOR) -> tuple[list[str], str]:
    """(releases from the floor on, oldest first; the newest release below it) from `pip index versions torch`."""
    match = re.search(r"Available versions: (.*)", output)
    if match is None:
        msg = f"`pip index versions torch` gave no list: {output.strip()[-300:]!r}; is the package index reachable?"
        raise LockError(msg)
    versions = sorted({Version(word) for word in match[1].split(", ") if "+" not in word})
    releases = [version for version in versions if not version.is_prerelease]
    below = [version for version in releases if version < floor]
    return [str(version) for version in releases if version >= floor], str(below[-1]) if below else ""


def discover() -> tuple[list[str], str]:
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return known_versions(done.stdout + done.stderr)


def local_pythons() -> dict[str, str]:
    """{minor version: interpreter} of the CPythons on this machine; nothing is downloaded."""
    found = {}
    own = str(getattr(sys, "_base_executable", None) or sys.executable)  # may be outside the searched places
    for minor in PYTHONS:
        for path in (*python_candidates(minor, os.environ, own), own):
            words = probe_python(path).split()
            if len(words) == 3 and words[0] == "CPython" and words[1].startswith(f"{minor}."):
                found[minor] = path
                break
    return found


def _uv(arguments: Sequence[str], what: str, cache: Path) -> str:
    """Run uv with a progress line; returns its error output, empty on success."""
    environment = {**os.environ, "UV_CACHE_DIR": str(cache)}
    command = [find_uv(), *arguments]
    with Progress(what):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=INSTALL_LIMIT, env=environment
        )
    return "" if done.returncode == 0 else (done.stderr.strip() or f"uv ended with {done.returncode}")


@dataclass(frozen=True)
class Setup:
    """Shared by all cells: the wheel, the folder of environments, and which part of the suite to run."""

    wheel: Path
    scratch: Path
    tests: tuple[str, ...]
    transformers: str = ""

    @property
    def cache(self) -> Path:
        return self.scratch / "cache"


def run_cell(torch: str, minor: str, interpreter: str, setup: Setup, *, refused: bool = False) -> Cell:
    """Install and test one cell. SKIP, with uv's reason, only means that this torch has no wheel for the interpreter.
    An install that failed for another reason (network, disk) is FAIL, because nothing was shown to work.
    """
    label = f"{_torch_and(torch, setup.transformers)}, Python {minor}"
    folder = setup.scratch / f"{torch}-{minor}"
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    begun = time.monotonic()
    problem = _uv(["venv", "-q", "--no-project", "--python", interpreter, str(folder)], label, setup.cache)
    install = ["pip", "install", "-q", "--python", str(python), "--only-binary", ":all:"]
    packages = [f"torch=={torch}", *TOOLS]
    packages += [f"transformers=={setup.transformers}", "accelerate"] if setup.transformers else []
    problem = problem or _uv([*install, *packages], f"{label}: installing", setup.cache)
    problem = problem or _uv([*install, "--no-deps", str(setup.wheel)], f"{label}: the wheel", setup.cache)
    installed = time.monotonic() - begun
    if problem:
        shutil.rmtree(folder, ignore_errors=True)
        verdict = Verdict.SKIP if NO_WHEEL.search(" ".join(problem.split())) else Verdict.FAIL
        return Cell(torch, minor, verdict, _reason(problem), 0, round(installed, 1), 0.0, setup.transformers)
    begun = time.monotonic()
    verdict, found, passed = _refusal(python, torch) if refused else _tests(python, label, setup.tests)
    seconds = time.monotonic() - begun
    shutil.rmtree(folder, ignore_errors=True)
    return Cell(torch, minor, verdict, found, passed, round(installed, 1), round(seconds, 1), setup.transformers)


NO_WHEEL = re.compile(r"torch==\S+ has no (?:usable )?wheels.*?(?=,? and you require|, we can|\.(?: |$)|$)")


def _reason(problem: str) -> str:
    """uv's message in one line, without this machine's paths."""
    words = " ".join(problem.split())
    match = NO_WHEEL.search(words)
    return textwrap.shorten(re.sub(r"\S*/\S*/\S*", "...", match[0] if match else words), 300)


def _refusal(python: Path, torch: str) -> tuple[Verdict, str, int]:
    code = "import flashmoe; flashmoe.attention"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=False, timeout=TEST_LIMIT, cwd="/"
    )
    found = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no error"
    plain = f"needs torch >= {FLOOR}; found {torch}" in found
    return (Verdict.PASS if done.returncode != 0 and plain else Verdict.FAIL), f"refused: {found}"[:300], 0


def _tests(python: Path, label: str, tests: Sequence[str]) -> tuple[Verdict, str, int]:
    outside = ROOT / "build" / "run" / "compat"
    outside.mkdir(parents=True, exist_ok=True)
    command = [
        str(python),
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
        "-q",
        "--no-cov",
    ]
    command += ["-p", "no:cacheprovider", "-m", "not gpu and not slow", *(str(ROOT / test) for test in tests)]
    command += [
        "-W",
        "default",
    ]  # a newer torch deprecates calls inside itself; under the locked one warnings are errors
    environment = {
        **os.environ,
        "FLASHMOE_TEST_INSTALLED": "1",
        "OMP_NUM_THREADS": str(THREADS),
        "MKL_NUM_THREADS": str(THREADS),
    }
    environment.pop("FLASHMOE_TEST_REPORT", None)
    lines: list[str] = []
    with (
        Progress(f"{label}: tests") as progress,
        subprocess.Popen(
            command, cwd=outside, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            progress.note(line.strip()[:80])
    closing = next((line.strip(" =\n") for line in reversed(lines) if CLOSING.search(line)), "")
    passed = int(match[1]) if (match := CLOSING.search(closing)) else 0
    if process.returncode == 0 and passed:
        return Verdict.PASS, closing, passed
    return Verdict.FAIL, "; ".join([closing or f"exit {process.returncode}", *failures_of(lines)])[:1500], passed


def failures_of(lines: Sequence[str]) -> list[str]:
    """The tests that pytest lists as failed, then its messages: the only record of a failure that does not recur."""
    named = [line.strip() for line in lines if line.startswith(("FAILED", "ERROR"))]
    messages = [line[1:].strip() for line in lines if line.startswith("E   ") and line[1:].strip()]
    return [*named[:5], *messages[:8]]


def run_version(torch: str, pythons: Mapping[str, str], setup: Setup) -> list[Cell]:
    """The lowest and the highest Python here for which this torch has a wheel; Pythons without one are SKIP."""
    minors = sorted(pythons, key=Version)
    cells: dict[str, Cell] = {}
    for order in (minors, minors[::-1]):
        for minor in order:
            if minor not in cells:
                cells[minor] = run_cell(torch, minor, pythons[minor], setup)
                print(f"{cells[minor].verdict} {cells[minor].label}: {cells[minor].found}", flush=True)
            if cells[minor].verdict is not Verdict.SKIP:
                break
    return [cells[minor] for minor in minors if minor in cells]


def run_transformers(
    torch: str, versions: Sequence[str], pythons: Mapping[str, str], wheel: Path, scratch: Path
) -> list[Cell]:
    """Each version with one torch, on the highest Python here for which both have wheels."""
    cells = []
    for version in versions:
        for minor in sorted(pythons, key=Version, reverse=True):
            cell = run_cell(torch, minor, pythons[minor], Setup(wheel, scratch, TRANSFORMERS_TESTS, version))
            if cell.verdict is not Verdict.SKIP:
                break
        print(f"{cell.verdict} {cell.label}: {cell.found}", flush=True)
        cells.append(cell)
    return cells


def compat(
    wheel: Path, scratch: Path, *, quick: bool, full: bool, only: Sequence[str], transformers: Sequence[str] = ()
) -> Report:
    """Runs the cells in order; the lowest and newest torch run the whole operator suite, the others its core."""
    clock = Stopwatch()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()  # now: a concurrent build removes the file
    versions, below = discover()
    chosen = [version for version in versions if version in only] if only else versions
    pythons = local_pythons()
    if not chosen or not pythons:
        msg = (
            f"nothing to try: torch {', '.join(only) or 'of any version'}, Pythons {sorted(pythons)}; known: {versions}"
        )
        raise LockError(msg)
    ends = {versions[0], versions[-1]}
    if quick:
        chosen = sorted(ends, key=Version)
    if transformers and not only:
        chosen = []
    cells: list[Cell] = []
    for torch in chosen:
        setup = Setup(wheel, scratch, TESTS if full or (torch in ends and not only) else CORE)
        cells += run_version(torch, pythons, setup)
        shutil.rmtree(setup.cache, ignore_errors=True)  # 7 GB per torch
    if transformers or not (only or quick):
        cells += run_transformers(versions[0], transformers or TRANSFORMERS, pythons, wheel, scratch)
    if below and not only and not transformers:
        minor = min(pythons, key=Version)
        setup = Setup(wheel, scratch, ())
        cells.append(run_cell(below, minor, pythons[minor], setup, refused=True))
        print(f"{cells[-1].verdict} torch {below}: {cells[-1].found}", flush=True)
    shutil.rmtree(scratch, ignore_errors=True)
    checks = tuple(Check(cell.label, cell.verdict, cell.found) for cell in cells)
    data = {"wheel": wheel.name, "wheel_sha256": digest, "threads": THREADS, "cells": [asdict(cell) for cell in cells]}
    report = clock.report("compat", checks, data)
    tried = sum(check.verdict is not Verdict.SKIP for check in checks)
    print(f"compat {report.verdict}: {tried} environments, wheel sha256 {digest}")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashmoe_build.release.compat", description=__doc__
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--quick", action="store_true", help="the lowest and the newest torch only")
    parser.add_argument("--full", action="store_true", help="the whole operator suite in every environment")
    parser.add_argument("--torch", action="append", default=[], help="this version only (may be repeated)")
    parser.add_argument(
        "--transformers",
        action="append",
        default=[],
        help="this version only, under the lowest torch (may be repeated)",
    )
    options = parser.parse_args(arguments)
    given = options.wheel.resolve()
    kinds = {"quick": options.quick, "full": options.full, "only": options.torch, "transformers": options.transformers}
    return ending(lambda: finish(compat(given, ROOT / "build" / "compat", **kinds)))


if __name__ == "__main__":
    raise SystemExit(main())
