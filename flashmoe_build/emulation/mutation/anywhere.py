"""Hunts bugs by rule in host code, the CPU backend, Python and tools: a bug that the tests of its folder pass has survived.

nox -s mutants                                                a sample of every folder of folders.toml, and its score
nox -s mutants -- --folder flashmoe_tools/audit --most 0      all that the rules make of one folder
nox -s mutants -- flashmoe/checks.py --oracle 'python -m pytest -q -x tests/attention/test_misuse.py'

The tests run in a copy of the checkout's tracked files, and of build/lib, with one bug at a time; C++ is built again for each.
A hunt goes on from the report that --json names.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from flashmoe.errors import ExitCode
from flashmoe_build.emulation.build import REPOSITORY
from flashmoe_build.emulation.mutation.operators import edits
from flashmoe_build.emulation.mutation.site import Edit
from flashmoe_build.emulation.mutation.source import Source
from flashmoe_tools.report import Check, Report, Verdict, host_environment, read_report, utc_now, write_report

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).with_name("folders.toml")
NEEDED = 0.9  # of the bugs of each folder
SECONDS = 600  # of one judgement; longer is a kill

_SHIFTED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
}


def edits_of(path: Path) -> list[Edit]:
    """Every edit that a rule makes of the file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return list(_python_edits(text))
    source = Source(text)
    return [edit for function in source.functions for edit in edits(source, function)]


def _python_edits(text: str) -> Iterator[Edit]:
    """Conditions are forced, comparisons shifted, one side of ``and``, ``or``, + and - is dropped, raises become nothing."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data = text.encode()

    def edit(operator: str, node: ast.expr | ast.stmt, replacement: str) -> Edit:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = len(data[: starts[node.lineno - 1] + node.col_offset].decode())
        end = len(data[: starts[node.end_lineno - 1] + node.end_col_offset].decode())
        return Edit(operator, begin, end, replacement, f"line {node.lineno}: {operator}: {ast.unparse(node)[:80]}", 1)

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If | ast.IfExp):
            yield edit("condition-true", node.test, "True")
            yield edit("condition-false", node.test, "False")
        elif isinstance(node, ast.Raise):
            yield edit("remove-raise", node, "pass")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SHIFTED:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield edit("boundary", node, f"({left} {_SHIFTED[type(node.ops[0])]} {right})")
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                rest = [ast.unparse(other) for other in node.values if other is not value]
                word = " and " if isinstance(node.op, ast.And) else " or "
                yield edit("drop-predicate", node, f"({word.join(rest)})")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv | ast.Mod):
            yield edit("drop-operand", node, ast.unparse(node.left))


def copy_checkout(target: Path) -> None:
    """The tracked files, and the library that was built last."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)
    if (REPOSITORY / "build" / "lib").is_dir():
        shutil.copytree(REPOSITORY / "build" / "lib", target / "build" / "lib")


@dataclass(frozen=True)
class Folder:
    """What is hunted together: files by patterns, and the tests that have to notice. ``library``: they need the last build's;
    ``build``: one of the sources with the bug. ``judges``: patterns of files with tests of their own; the first that fits counts."""

    name: str
    files: tuple[str, ...]
    tests: str
    library: bool = False
    build: bool = False
    judges: tuple[tuple[str, str], ...] = ()
    command: str = ""  # in place of the tests

    def oracle(self, file: str) -> str:
        """A command that exits with 0 when it finds nothing wrong with the file."""
        if self.command:
            return self.command
        tests = next((tests for pattern, tests in self.judges if fnmatchcase(file, pattern)), self.tests)
        python = sys.executable
        make = f"{python} -m flashmoe_build --archs none --library-only && "
        judge = f"{python} -m pytest -n 0 -q -x -p no:cacheprovider {tests}"
        given = "FLASHMOE_LIBRARY=$PWD/build/lib/libflashmoe.so " if self.library or self.build else ""
        return (make if self.build else "") + given + judge


@dataclass(frozen=True)
class Found:
    """One bug: where, what, and whether it survived; ``why`` nothing can notice it, where folders.toml says so."""

    folder: str
    file: str
    what: str
    survived: bool
    seconds: float
    why: str = ""


def folders(table: Path = TABLE) -> tuple[tuple[Folder, ...], Mapping[tuple[str, str], str]]:
    """The folders, and the reasons of bugs that nothing can notice, by file and description without its line."""
    read = tomllib.loads(table.read_text(encoding="utf-8"))
    rows = [
        Folder(
            row["name"],
            tuple(row["files"]),
            row["tests"],
            row.get("library", False),
            row.get("build", False),
            tuple(row.get("judges", {}).items()),
        )
        for row in read["folder"]
    ]
    return tuple(rows), {(row["file"], row["what"]): row["why"] for row in read.get("equivalent", ())}


def sites_of(checkout: Path, folder: Folder, most: int, seed: int) -> list[tuple[str, Edit]]:
    """A sample of ``most`` edits of the folder's files (0: all), the same for the same seed."""
    names = sorted({str(p.relative_to(checkout)) for pattern in folder.files for p in checkout.glob(pattern)})
    sites = [(name, edit) for name in names for edit in edits_of(checkout / name)]
    return random.Random(seed).sample(sites, min(most, len(sites))) if most else sites


def hunt(checkout: Path, folder: Folder, sites: Sequence[tuple[str, Edit]], seconds: int) -> Iterator[Found]:
    """Each bug in turn, judged by its file's tests. Raises ValueError where they fail without one."""
    tried: set[str] = set()
    for number, (name, edit) in enumerate(sites, start=1):
        oracle = folder.oracle(name)
        if oracle not in tried and not _passes(checkout, oracle, seconds):
            msg = f"{folder.name}: its tests fail without a bug, so they can judge nothing: {oracle}"
            raise ValueError(msg)
        tried.add(oracle)
        path, begin = checkout / name, time.monotonic()
        text = path.read_text(encoding="utf-8")
        path.write_text(text[: edit.start] + edit.replacement + text[edit.end :], encoding="utf-8")
        survived = _passes(checkout, oracle, seconds)
        path.write_text(text, encoding="utf-8")
        found = Found(folder.name, name, edit.what, survived, round(time.monotonic() - begin, 1))
        print(f"{number}/{len(sites)} {'SURVIVED' if survived else 'killed'} {name} {edit.what}", flush=True)
        yield found


def _passes(checkout: Path, oracle: str, seconds: int) -> bool:
    # Compiled Python is known by time and size, which the next bug may share.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(checkout)}
    try:
        done = subprocess.run(
            oracle, shell=True, cwd=checkout, capture_output=True, check=False, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def judged(found: Sequence[Found], reasons: Mapping[tuple[str, str], str]) -> Report:
    """One check a folder: how many of its bugs that can be noticed were. Survivors are listed with their reasons."""
    rows = [Found(**{**asdict(one), "why": reasons.get((one.file, _unplaced(one.what)), "")}) for one in found]
    checks = []
    for name in dict.fromkeys(row.folder for row in rows):
        own = [row for row in rows if row.folder == name]
        counted = [row for row in own if not (row.survived and row.why)]
        killed = sum(not row.survived for row in counted)
        verdict = Verdict.PASS if counted and killed >= NEEDED * len(counted) else Verdict.FAIL
        told = f"{killed} of {len(counted)} killed" + (
            f", {len(own) - len(counted)} equivalent" if own != counted else ""
        )
        why = "; ".join(f"{row.file} {row.what}" for row in counted if row.survived)
        step = "a test for each survivor, or a line in folders.toml that says why nothing can notice it"
        checks.append(
            Check(name, verdict, told, f"at least {NEEDED:.0%}", why, "" if verdict is Verdict.PASS else step)
        )
    operators = Counter(f"{row.folder}: {'survived' if row.survived else 'killed'}" for row in rows)
    data = {"bugs": [asdict(row) for row in rows], "counts": dict(operators)}
    return Report("mutants", tuple(checks), data, host_environment(), (), utc_now())


def _unplaced(what: str) -> str:
    """The description without the line, which edits above it move."""
    return what.split(": ", 1)[1] if what.startswith("line ") else what


def known(path: Path | None) -> list[Found]:
    """What an earlier hunt found."""
    if path is None or not path.is_file():
        return []
    return [Found(**row) for row in read_report(path).data["bugs"]]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="./nox -s mutants --", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="relative to the checkout; with --oracle")
    parser.add_argument("--oracle", metavar="COMMAND", help="exits with 0 when it finds nothing wrong with the files")
    parser.add_argument("--folder", action="append", metavar="NAME", help="of folders.toml (default: all)")
    parser.add_argument(
        "--most", type=int, default=20, metavar="N", help="bugs of each folder, drawn; 0: all (default 20)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument("--seconds", type=int, default=SECONDS, metavar="S", help="of one judgement; longer is a kill")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report; what it holds is not hunted again")
    arguments = parser.parse_args(words)
    table, reasons = folders()
    if arguments.files:
        chosen = [Folder("given", tuple(arguments.files), "", command=arguments.oracle or "false")]
    else:
        chosen = [folder for folder in table if not arguments.folder or folder.name in arguments.folder]
    if not chosen:
        print(f"no such folder; there are {', '.join(folder.name for folder in table)}", file=sys.stderr)
        return ExitCode.USAGE
    found = known(arguments.json)
    with tempfile.TemporaryDirectory(prefix="flashmoe-hunt-") as place:
        checkout = Path(place)
        copy_checkout(checkout)
        for folder in chosen:
            done = {(one.file, one.what) for one in found}
            sites = sites_of(checkout, folder, arguments.most, arguments.seed)
            left = [(name, edit) for name, edit in sites if (name, edit.what) not in done]
            try:
                for one in hunt(checkout, folder, left, arguments.seconds):
                    found.append(one)
                    if arguments.json is not None:
                        write_report(arguments.json, judged(found, reasons))
            except ValueError as error:
                print(error, file=sys.stderr)
                return ExitCode.USAGE
    report = judged([one for one in found if one.folder in {folder.name for folder in chosen}], reasons)
    for check in report.checks:
        print(f"{check.verdict}  {check.name}: {check.found}" + (f"\n      survived: {check.why}" if check.why else ""))
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
