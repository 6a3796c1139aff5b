"""Writes lockfiles/*.txt from lockfiles/*.in and lists what changed.

    python -m flashmoe_build.environments.relock               # rewrite, keeping every version that still fits
    python -m flashmoe_build.environments.relock --upgrade     # rewrite with the newest versions
    python -m flashmoe_build.environments.relock --check       # offline: fail if a lock does not match its .in file

Each file covers CPython 3.10 to 3.12 on x86-64 and AArch64: uv resolves for all of them at once (``--universal``; the bounds are
``tool.uv.environments`` in pyproject.toml) and marks the lines that differ. Wheels only; the output names no registry.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flashmoe.errors import FlashmoeError, LockError
from flashmoe_build.environments.environment import MACHINES, ROOT, explain_failure, find_uv, run_logged
from flashmoe_build.environments.lock import (
    Pin,
    check_lock,
    input_digest,
    marker_environment,
    parse_lock,
    read_inputs,
    read_lock,
    read_text,
    recorded_digest,
)

ORDER = ("launcher", "build", "test", "bench", "lint", "container")  # test is constrained by build, the rest by both
OPTIONS = (
    "--universal",
    "--python-version=3.10",
    "--generate-hashes",
    "--only-binary=:all:",
    "--no-header",
    "--no-emit-index-url",
    "--no-emit-find-links",
)
LAUNCHER_OPTIONS = ("--no-config",)  # the launcher runs under any Python from 3.10, so it has no upper bound
COMPILE_TIMEOUT_S = 600.0
# The supported Pythons: for each of them, on each machine, the pins must satisfy every requirement.
PYTHONS = ("3.10", "3.11", "3.12")


def options_of(lock: str) -> tuple[str, ...]:
    return OPTIONS + (LAUNCHER_OPTIONS if lock == "launcher" else ())


def changes(lock: str, before: Sequence[Pin], after: Sequence[Pin]) -> list[str]:
    """The effect of a rewrite, one line per version; other markers or hashes of the same version count as a change."""
    old, new = ({(pin.name, pin.version, str(pin.marker), pin.hashes) for pin in pins} for pins in (before, after))
    rows = [(name, version, sign) for sign, only in (("-", old - new), ("+", new - old)) for name, version, *_ in only]
    return [
        f"{lock}: {sign}{name}=={version}"
        for name, version, sign in sorted(rows, key=lambda row: (row[0], row[2] == "+"))
    ]


def check(folder: Path) -> list[str]:
    """What is wrong with the locks, checked offline. Empty if nothing is."""
    problems = []
    shared: dict[tuple[str, str], tuple[str, Pin]] = {}
    for lock in ORDER:
        text, source = read_text(folder / f"{lock}.txt"), folder / f"{lock}.in"
        if recorded_digest(text) != input_digest(source, options_of(lock)):
            problems.append(f"{lock}.txt was not written from the current {lock}.in; run `nox -s lock`")
        problems += [f"{lock}.txt names a location: {line.strip()}" for line in text.splitlines() if "://" in line]
        pins = parse_lock(text, f"{lock}.txt")
        for python, machine in itertools.product(PYTHONS, MACHINES):
            environment = marker_environment(f"{python}.0", machine)
            try:
                check_lock(read_inputs(source), pins, environment)
            except LockError as error:
                problems.append(f"for Python {python} on {machine}: {error}")
            if lock != "launcher":
                applied = [pin for pin in pins if pin.applies(environment)]
                problems += _disagreements(lock, f"{python} {machine}", applied, shared)
    return list(dict.fromkeys(problems))


def _disagreements(
    lock: str, where: str, pins: Sequence[Pin], shared: dict[tuple[str, str], tuple[str, Pin]]
) -> list[str]:
    """Pins of ``lock`` that differ from an earlier lock's pin of the same package; adds the new ones to ``shared``."""
    found = []
    for pin in pins:
        first, known = shared.setdefault((where, pin.name), (lock, pin))
        if (known.version, sorted(known.hashes)) != (pin.version, sorted(pin.hashes)):
            found.append(f"{pin.name} differs between {first}.txt and {lock}.txt; run `nox -s lock`")
    return found


def compile_locks(root: Path, upgrade: bool) -> dict[str, str]:
    """The new text of every lock. Works in a copy, so that a failure midway changes nothing."""
    texts = {}
    with tempfile.TemporaryDirectory(prefix="flashmoe-lock-") as temporary:
        copy = Path(temporary)
        shutil.copytree(root / "lockfiles", copy / "lockfiles")
        shutil.copy(root / "pyproject.toml", copy)
        for lock in ORDER:
            target = copy / "lockfiles" / f"{lock}.txt"
            command = [
                find_uv(),
                "--directory",
                str(copy),
                "--no-python-downloads",
                "pip",
                "compile",
                *options_of(lock),
            ]
            command += ["--upgrade"] if upgrade else []
            command += [f"lockfiles/{lock}.in", "--output-file", f"lockfiles/{lock}.txt"]
            status, stderr = run_logged(command, f"resolving {lock}.in", COMPILE_TIMEOUT_S)
            if status:
                raise LockError(explain_failure(stderr, f"{lock}.in").replace("installing", "resolving"))
            digest = input_digest(root / "lockfiles" / f"{lock}.in", options_of(lock))
            body = target.read_text(encoding="utf-8")
            body = body[body.index("\n") + 1 :] if body.startswith("# Written by") else body
            texts[lock] = f"# Written by `nox -s lock` from {lock}.in: do not edit.\n# inputs sha256:{digest}\n{body}"
            target.write_text(texts[lock], encoding="utf-8")
    return texts


def rewrite(root: Path, *, upgrade: bool) -> list[str]:
    """Rewrite every lock file; returns what changed."""
    folder = root / "lockfiles"
    changed: list[str] = []
    texts = compile_locks(root, upgrade)
    for lock, text in texts.items():
        path = folder / f"{lock}.txt"
        before = read_lock(path) if path.is_file() else ()
        changed += changes(f"{lock}.txt", before, parse_lock(text, path.name))
    for lock, text in texts.items():
        temporary = folder / f".{lock}.txt.new"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / f"{lock}.txt")
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="nox -s lock --", description=__doc__.splitlines()[0])
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--check", action="store_true", help="write nothing; fail if the locks do not match the .in files"
    )
    group.add_argument("--upgrade", action="store_true", help="take the newest versions that the .in files allow")
    options = parser.parse_args(arguments)
    try:
        if not options.check:
            print("\n".join(rewrite(ROOT, upgrade=options.upgrade)) or "nothing changed")
        problems = check(ROOT / "lockfiles")
    except FlashmoeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(
        "\n".join(problems)
        or f"lockfiles/: {', '.join(ORDER)} match their .in files, agree with each other, and name no registry"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
