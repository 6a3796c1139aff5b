"""Which kernels differ from those of a commit, and the quick suite: few problems, one kernel per variant.

A kernel differs if the emulator's input for it does: its source, its numbers, or a file that it includes.
"""

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from flashmoe.errors import ArgumentError, TableError
from flashmoe_build.compile.cache import content_key, include_closure
from flashmoe_build.compile.codegen import unit_source
from flashmoe_build.emulation.build import CSRC, REPOSITORY, Options, library_file
from flashmoe_build.emulation.cases import Case, Kernel, is_huge, kernels, suite
from flashmoe_tools.tables import Unit, load_tables

QUICK_EVERY = 2  # the quick suite runs one in this many problems of a kernel
UPSTREAMS = ("@{upstream}", "origin/HEAD", "origin/main")


@dataclass(frozen=True)
class Changes:
    """Kernels that differ from ``base`` (a description of the commit; empty: nothing to compare with, so all kernels)."""

    base: str
    kernels: tuple[Kernel, ...]


def find_changes(against: str = "", options: Options | None = None, root: Path = REPOSITORY) -> Changes:
    """What differs from the commit ``against``; by default from where this branch left its upstream, which CI has tested.

    A commit that does not exist is an ArgumentError.
    """
    every = kernels(load_tables())
    commit, words = _named(root, against) if against else _upstream(root)
    if not commit:
        return Changes("", every)
    done = _git(root, "archive", "--format=tar", commit, "csrc")
    if done.returncode != 0:
        return Changes("", every)
    with tempfile.TemporaryDirectory(prefix="flashmoe-base-") as name:
        subprocess.run(["tar", "-x", "-C", name], input=done.stdout, check=True)
        csrc = Path(name) / "csrc"
        try:
            old = kernels(load_tables(csrc))
        except TableError:  # tables that this version cannot read
            return Changes(words, every)
        before = set(_keys(old, csrc, (csrc / "emulation" / "include", csrc)))
    keys = _keys(every, CSRC, (options or Options()).roots())
    return Changes(words, tuple(kernel for kernel, key in zip(every, keys, strict=True) if key not in before))


def _keys(every: Sequence[Kernel], csrc: Path, roots: Sequence[Path]) -> list[tuple[str, str]]:
    """Per kernel: its source, and a hash over everything included, which is the same for all kernels with the same header."""
    headers: dict[str, str] = {}
    for kernel in every:
        header = kernel.unit.row.descriptor.header
        if header not in headers:
            closure = include_closure(unit_source(kernel.unit), roots)
            headers[header] = content_key(header, closure, csrc.resolve(), {})
    return [(unit_source(kernel.unit), headers[kernel.unit.row.descriptor.header]) for kernel in every]


def _named(root: Path, name: str) -> tuple[str, str]:
    done = _git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if done.returncode != 0:
        msg = f"--changed {name}: git knows no such commit here; leave it out to compare with the upstream branch"
        raise ArgumentError(msg)
    return done.stdout.decode().strip(), name


def _upstream(root: Path) -> tuple[str, str]:
    """(commit, description) of where HEAD left its upstream; empty without git or an upstream."""
    for name in UPSTREAMS:
        done = _git(root, "merge-base", "HEAD", name)
        if done.returncode == 0:
            commit = done.stdout.decode().strip()
            return commit, f"{commit[:12]} (upstream)"
    return "", ""


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["git", "-c", "safe.directory=*", "-C", str(root), *words], capture_output=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return subprocess.CompletedProcess(words, 1, b"", b"")


def variants(chosen: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """One kernel per path through the source: operation, family, schedule, options, and ring or single buffer.

    Alternates between the families of all operations, so that a run that is cut short has covered some of each.
    """
    groups: dict[tuple[str, str], dict[object, Kernel]] = {}
    for kernel in chosen:
        row = kernel.unit.row
        path = (row.schedule, row.stages > 1, tuple(sorted(row.options.items())))
        groups.setdefault((row.operation, row.family), {}).setdefault(path, kernel)
    turns = zip_longest(*(paths.values() for paths in groups.values()))
    return tuple(kernel for turn in turns for kernel in turn if kernel is not None)


def quick_cases(chosen: Sequence[Kernel]) -> Iterator[Case]:
    """Every second problem of each kernel's suite, alternating between the two masks; the one past 2^31 only runs in the full suite."""
    tables = load_tables()
    for kernel in chosen:
        few = [case for case in suite(tables, kernel.label) if not is_huge(case.problem)]
        yield from few[::QUICK_EVERY]


def stamp(unit: Unit, options: Options) -> Path:
    """The file that exists once this exact library, compiled from these sources, has passed the quick suite."""
    return library_file(unit, options).with_suffix(".passed")
