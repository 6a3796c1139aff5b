"""Plants bugs by rule in host code, the CPU backend, Python and tools. A bug survives if the tests of its folder pass.

nox -s mutants                                                a sample of every folder of folders.toml, and its score
nox -s mutants -- --folder flashmoe_tools/audit --most 0      every bug that the rules make in one folder
nox -s mutants -- flashmoe/checks.py --oracle 'python -m pytest -q -x tests/attention/test_misuse.py'

nox -s mutants -- --jobs 14 --minutes 7 --most 0              14 bugs at once, alternating between folders, none started after 7 minutes

The tests run in copies of the checkout's tracked files and of build/lib, with one bug at a time; for C++ bugs the library is rebuilt. For Python
bugs the tests that reach the changed lines run first, and all tests of the folder only if those pass.
A hunt continues from the report given with --json; `python -m flashmoe_tools.report` makes the summary that docs/results keeps.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import chain, zip_longest
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from types import MappingProxyType

from flashmoe.errors import ExitCode
from flashmoe_build.emulation.build import REPOSITORY
from flashmoe_build.emulation.mutation import reached
from flashmoe_build.emulation.mutation.operators import edits
from flashmoe_build.emulation.mutation.site import Edit
from flashmoe_build.emulation.mutation.source import Source
from flashmoe_tools.report import Check, Report, Verdict, host_environment, read_report, utc_now, write_report
from flashmoe_tools.toml import tomllib

TABLE = Path(__file__).with_name("folders.toml")
NEEDED = 0.9  # share of each folder's bugs that the tests must notice
SECONDS = 600  # for one test run; a longer one is a kill if the tests end without the bug
FIRST_SECONDS = 10  # for the tests that reach a bug's lines, which run first
PYTEST = "-m pytest -n 0 -q -p no:cacheprovider"
NO_TESTS = 5  # pytest's exit status
BUILT = "build/planted"  # kept apart from the library without a bug, which the Python tests need
ASK_FOR_TILES = (158, 0x1023, 18)  # arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
TIMED_OUT = "timed out"
NOT_COMPILED = "does not compile"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", re.MULTILINE)

_SHIFTED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
}


Site = tuple["Folder", str, Edit]


@dataclass(frozen=True)
class Planted:
    """A context in which a file contains a bug; ``lifted`` removes the bug temporarily."""

    path: Path
    sound: str
    bug: str

    def __enter__(self) -> None:
        self.path.write_text(self.bug, encoding="utf-8")

    def __exit__(self, *raised: object) -> None:
        self.path.write_text(self.sound, encoding="utf-8")

    @contextmanager
    def lifted(self) -> Iterator[None]:
        self.path.write_text(self.sound, encoding="utf-8")
        try:
            yield
        finally:
            self.path.write_text(self.bug, encoding="utf-8")


def edits_of(path: Path, choices: Sequence[str] = ()) -> list[Edit]:
    """Every edit that a rule makes in the file, except in the C++ functions named in ``choices``."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return list(_python_edits(text))
    source = Source(text)
    return [edit for function in source.functions if function.name not in choices for edit in edits(source, function)]


def _python_edits(text: str) -> Iterator[Edit]:
    """Forces conditions, shifts comparisons, drops one side of ``and``, ``or``, + and -, and removes raises."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data = text.encode()

    def edit(operator: str, node: ast.expr | ast.stmt, replacement: str, part: str = "") -> Edit:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = len(data[: starts[node.lineno - 1] + node.col_offset].decode())
        end = len(data[: starts[node.end_lineno - 1] + node.end_col_offset].decode())
        return Edit(
            operator, begin, end, replacement, f"line {node.lineno}: {operator}: {part}{ast.unparse(node)[:80]}", 1
        )

    for node in ast.walk(ast.parse(text)):
        test = node.test if isinstance(node, ast.If) else node
        if isinstance(test, ast.expr) and re.match(r"TYPE_CHECKING$|sys\.version_info ", ast.unparse(test)):
            continue  # imports for a type checker only, or for one interpreter, while the tests run under one
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
                yield edit("drop-predicate", node, f"({word.join(rest)})", f"{ast.unparse(value)[:80]}, of ")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv | ast.Mod):
            yield edit("drop-operand", node, ast.unparse(node.left))


def copy_checkout(target: Path) -> None:
    """Copies the tracked files and the last library built."""
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
    """A group of files, by patterns, with the tests that must notice their bugs. ``library``: the tests need the last build's library;
    ``build``: they need one built from the sources with the bug. ``judges``: patterns of files that have other tests; the first match counts."""

    name: str
    files: tuple[str, ...]
    tests: str
    library: bool = False
    build: bool = False
    judges: tuple[tuple[str, str], ...] = ()
    command: str = ""  # instead of the tests

    def oracle(self, file: str, only: Sequence[str] = ()) -> str:
        """A command that exits with 0 if it finds nothing wrong with the file; pytest options may be appended. ``only``: run just these tests."""
        if self.command:
            return self.command
        tests = next((tests for pattern, tests in self.judges if fnmatchcase(file, pattern)), self.tests)
        tests = shlex.join(only) or tests
        out = BUILT if self.build else "build"
        given = f"FLASHMOE_LIBRARY=$PWD/{out}/lib/libflashmoe.so " if self.library or self.build else ""
        return f"{given}{sys.executable} {PYTEST} {tests}"

    @property
    def oracle_of_all(self) -> str:
        """The tests of all its files, each once."""
        words = dict.fromkeys(" ".join((self.tests, *(tests for _, tests in self.judges))).split())
        return self.oracle("", list(words))

    def alone(self, oracle: str, test: str) -> str:
        """The oracle with its tests replaced by one test."""
        return f"{oracle[: oracle.index(PYTEST)]}{PYTEST} {shlex.quote(test)}"

    @property
    def make(self) -> str:
        """A command that compiles the library with the bug."""
        return f"{sys.executable} -m flashmoe_build --archs none --library-only --out {BUILT}" if self.build else "true"


@dataclass(frozen=True)
class Found:
    """One bug: where, what, and whether it survived; ``why`` no test can notice it, if folders.toml says so."""

    folder: str
    file: str
    what: str
    survived: bool
    seconds: float
    why: str = ""
    note: str = ""  # TIMED_OUT or NOT_COMPILED


class Reasons(dict[tuple[str, str], str]):
    """Why no test can notice a bug, by file and description without the line; for a single bug, or by a rule for many."""

    rules: tuple[tuple[str, str, str], ...] = ()  # (files, regular expression for what, why)
    choices: Mapping[str, Sequence[str]] = MappingProxyType({})  # by file, functions whose decisions affect only speed

    def __missing__(self, bug: tuple[str, str]) -> str:
        fits = (why for files, what, why in self.rules if fnmatchcase(bug[0], files) and re.fullmatch(what, bug[1]))
        return next(fits, "")


def folders(table: Path = TABLE) -> tuple[tuple[Folder, ...], Reasons]:
    """The folders, and the reasons for bugs that no test can notice."""
    read = tomllib.loads(table.read_text(encoding="utf-8"))
    rows = []
    for row in read["folder"]:
        tests, *judges = (
            f"{one} {row.get('everywhere', '')}".strip() for one in (row["tests"], *row.get("judges", {}).values())
        )
        own = tuple(zip(row.get("judges", {}), judges, strict=True))
        rows.append(
            Folder(row["name"], tuple(row["files"]), tests, row.get("library", False), row.get("build", False), own)
        )
    reasons = Reasons({(file, what): why for file, rows in read["equivalent"].items() for what, why in rows})
    reasons.rules = tuple((file, what, why) for file, rows in read["rule"].items() for what, why in rows)
    reasons.choices = {row["file"]: row["functions"] for row in read.get("choice", ())}
    return tuple(rows), reasons


def runs_here(path: Path) -> bool:
    """Whether this machine has the instruction set in the name of a CPU backend file: otherwise no test here can judge its bugs."""
    words = path.stem.split("_")
    if platform.machine() != "x86_64":
        return not {"sse2", "avx2", "avx512", "amx"} & set(words)
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    needed = {"avx2": "avx2", "avx512": "avx512f", "amx": "amx_bf16", "neon": "neon"}
    is_allowed = "amx" not in words or ctypes.CDLL(None).syscall(*ASK_FOR_TILES) == 0  # a sandbox may refuse it
    return is_allowed and all(flag in flags for word, flag in needed.items() if word in words)


def sites_of(checkout: Path, folder: Folder, most: int, seed: int, reasons: Reasons) -> list[Site]:
    """A sample of ``most`` edits (0: all) of the folder's files that run here and that a test could notice; deterministic for a seed."""
    found = {path for pattern in folder.files for path in checkout.glob(pattern) if runs_here(path)}
    names = sorted(str(path.relative_to(checkout)) for path in found)
    every = ((name, edit) for name in names for edit in edits_of(checkout / name, reasons.choices.get(name, ())))
    sites = [(folder, name, edit) for name, edit in every if not reasons[name, _unplaced(edit.what)]]
    return random.Random(seed).sample(sites, min(most, len(sites))) if most else sites


class Hunt:
    """Runs commands in the given checkouts, one at a time in each, and starts no bug after ``end`` on time.monotonic(). A failing test
    counts only if it passes without the bug, which is checked when it first fails."""

    def __init__(self, checkouts: Sequence[Path], seconds: int, end: float, reached: Path) -> None:
        self._checkouts: SimpleQueue[Path] = SimpleQueue()
        for checkout in checkouts:
            self._checkouts.put(checkout)
        self._jobs, self._seconds, self._end, self._reached = len(checkouts), seconds, end, reached
        self._passes: dict[str, bool] = {}  # without a bug, by command
        self._left_out: dict[str, set[str]] = {}  # tests that fail without a bug, by oracle
        self._locks: dict[str, Lock] = defaultdict(Lock)
        self.begun: list[str] = []  # folder of each bug started; each is finished: survivors take longest
        self.helpless: set[str] = set()  # oracles that fail without a bug and so cannot judge
        self._environment = {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",  # compiled Python is identified by time and size, which the next bug may share
            "FLASHMOE_CACHE_DIR": os.environ.get("FLASHMOE_CACHE_DIR", str(checkouts[0].with_name("cache"))),
        }

    def bugs(self, sites: Sequence[Site]) -> Iterator[Found]:
        """Yields each bug once it is decided."""
        with ThreadPoolExecutor(self._jobs) as threads:
            for future in as_completed([threads.submit(self._decide, site) for site in sites]):
                if found := future.result():
                    yield found

    def _decide(self, site: Site) -> Found | None:
        folder, name, edit = site
        with self._checkout() as checkout:
            oracle, path, note = folder.oracle(name), checkout / name, ""
            text = path.read_text(encoding="utf-8")
            first = self._that_reach(folder, name, text, edit, checkout)
            if oracle in self.helpless or time.monotonic() >= self._end:
                return None
            self.begun.append(folder.name)
            begin = time.monotonic()
            planted = Planted(path, text, text[: edit.start] + edit.replacement + text[edit.end :])
            with planted:
                status, _ = self._run(folder.make, checkout, self._seconds)
                if status:
                    note, is_noticed = NOT_COMPILED, True
                    if not self._is_sound(folder.make, oracle, checkout, planted):
                        print(f"{folder.name}: it does not compile without a bug: {folder.make}")
                        self.helpless.add(oracle)
                else:
                    commands = [folder.oracle(name, first), oracle] if first else [oracle]
                    for command in commands:
                        is_noticed, note = self._notices(command, oracle, checkout, planted, folder)
                        if is_noticed:
                            break
            if oracle in self.helpless:
                return None
            return Found(folder.name, name, edit.what, not is_noticed, round(time.monotonic() - begin, 1), note=note)

    def _notices(self, command: str, oracle: str, checkout: Path, planted: Planted, folder: Folder) -> tuple[bool, str]:
        """Whether a test that fails with the bug passes without it, and TIMED_OUT if the command does not end with the bug."""
        while True:
            out = sorted(self._left_out.get(oracle, ()))
            options = "" if folder.command else "".join(f" --deselect {shlex.quote(name)}" for name in out)
            stops = "" if folder.command else 'PYTEST_ADDOPTS="-x $PYTEST_ADDOPTS" '  # for pytest runs in tests, too
            status, output = self._run(stops + command + options, checkout, self._seconds)
            if status == 0 or (status == NO_TESTS and command != oracle):
                return False, ""
            failed = _FAILED.findall(output) if status == 1 and not folder.command else []
            if not failed:
                is_sound = self._is_sound(command + options, oracle, checkout, planted)
                if not is_sound and command == oracle:
                    self.helpless.add(oracle)
                    what = f"take longer than {self._seconds} s" if status is None else "fail"
                    print(
                        f"{folder.name}: its tests {what} without a bug, so they cannot tell anything: {command}\n{output[-2000:]}"
                    )
                return is_sound, TIMED_OUT if is_sound and status is None else ""
            sound = [name for name in failed if self._is_sound(folder.alone(oracle, name), oracle, checkout, planted)]
            if sound:
                return True, ""
            print(f"ignored, because they fail without a bug: {', '.join(failed)}", flush=True)
            self._left_out.setdefault(oracle, set()).update(failed)

    def _is_sound(self, command: str, oracle: str, checkout: Path, planted: Planted) -> bool:
        """Whether the command passes without the bug; for C++ this uses the last build's library."""
        with self._locks[oracle]:
            if command not in self._passes:
                with planted.lifted():
                    status, _ = self._run(command.replace(BUILT, "build"), checkout, self._seconds)
                self._passes[command] = status == 0
            return self._passes[command]

    def _that_reach(self, folder: Folder, name: str, text: str, edit: Edit, checkout: Path) -> list[str]:
        """The tests that reach the edit's lines, shortest first, up to FIRST_SECONDS in total; none if that is unknown."""
        if folder.build or folder.command:
            return []
        known_as = self._reached / f"{folder.name.replace('/', '-')}.json"
        with self._locks[f"reached {folder.name}"]:
            if not known_as.is_file():
                self._run(reached.command(folder.oracle_of_all, known_as, folder.files), checkout, 4 * self._seconds)
            if not known_as.is_file():
                return []
        lines = range(text.count("\n", 0, edit.start) + 1, text.count("\n", 0, edit.end) + 2)
        return reached.first(json.loads(known_as.read_text(encoding="utf-8")), name, lines, FIRST_SECONDS)

    @contextmanager
    def _checkout(self) -> Iterator[Path]:
        checkout = self._checkouts.get()
        try:
            yield checkout
        finally:
            self._checkouts.put(checkout)

    def _run(self, command: str, checkout: Path, seconds: float) -> tuple[int | None, str]:
        """Exit status (None if it took too long) and output."""
        environment = {**self._environment, "PYTHONPATH": f"{checkout}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")}
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                shell=True,
                cwd=checkout,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return status, output.read()


def judged(found: Sequence[Found], reasons: Reasons, begun: Mapping[str, int] = MappingProxyType({})) -> Report:
    """One check per folder: how many of its noticeable bugs were noticed. Survivors are listed with their reasons, and bugs in
    ``begun`` that were not decided are reported."""
    rows = [Found(**{**asdict(one), "why": reasons[one.file, _unplaced(one.what)]}) for one in found]
    checks, scores = [], {}
    for name in dict.fromkeys(row.folder for row in rows):
        own = [row for row in rows if row.folder == name]
        decided = [row for row in own if row.note != NOT_COMPILED]
        counted = [row for row in decided if not (row.survived and row.why)]
        killed = sum(not row.survived for row in counted)
        scores[name] = {
            "planted": len(own),
            "killed": killed,
            "survived": len(counted) - killed,
            "equivalent": len(decided) - len(counted),
            NOT_COMPILED: len(own) - len(decided),
            TIMED_OUT: sum(row.note == TIMED_OUT for row in own),
            "undecided": max(0, begun.get(name, 0) - len(own)),
        }
        verdict = Verdict.PASS if counted and killed >= NEEDED * len(counted) else Verdict.FAIL
        summary = f"{killed} of {len(counted)} killed" + (
            f", {len(decided) - len(counted)} equivalent" if decided != counted else ""
        )
        why = "; ".join(f"{row.file} {row.what}" for row in counted if row.survived)
        step = "add a test for each survivor, or a line in folders.toml that says why no test can notice it"
        checks.append(
            Check(name, verdict, summary, f"at least {NEEDED:.0%}", why, "" if verdict is Verdict.PASS else step)
        )
    survivors = [f"{row.file} {row.what}" + (f": {row.why}" if row.why else "") for row in rows if row.survived]
    data = {"scores": scores, "survivors": survivors, "bugs": [asdict(row) for row in rows]}
    return Report("mutants", tuple(checks), data, host_environment(), (), utc_now())


def _unplaced(what: str) -> str:
    """The description without the line number, which edits above it change."""
    return what.split(": ", 1)[1] if what.startswith("line ") else what


def known(path: Path | None) -> list[Found]:
    """The results of an earlier hunt."""
    if path is None or not path.is_file():
        return []
    return [Found(**row) for row in read_report(path).data.get("bugs", ())]  # a summary has no bugs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="./nox -s mutants --", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="relative to the checkout; with --oracle")
    parser.add_argument("--oracle", metavar="COMMAND", help="exits with 0 when it finds nothing wrong with the files")
    parser.add_argument("--folder", action="append", metavar="NAME", help="of folders.toml (default: all)")
    parser.add_argument(
        "--most", type=int, default=20, metavar="N", help="sample this many bugs of each folder; 0: all (default 20)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument("--seconds", type=int, default=SECONDS, metavar="S", help="for one test run; longer is a kill")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="bugs at once, each in its own checkout")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), metavar="M", help="start no bug later; finish those started"
    )
    parser.add_argument(
        "--reached", type=Path, metavar="FOLDER", help="keep there which tests reach which lines, for the next hunt"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report; skip the bugs in an existing one")
    arguments = parser.parse_args(argv)
    table, reasons = folders()
    if arguments.files:
        chosen = [Folder("given", tuple(arguments.files), "", command=arguments.oracle or "false")]
    else:
        chosen = [folder for folder in table if not arguments.folder or folder.name in arguments.folder]
    if not chosen:
        print(f"no such folder; there are {', '.join(folder.name for folder in table)}", file=sys.stderr)
        return ExitCode.USAGE
    found, end = known(arguments.json), time.monotonic() + 60 * arguments.minutes
    done = {(one.file, one.what) for one in found}
    with tempfile.TemporaryDirectory(prefix="flashmoe-hunt-") as scratch:
        checkouts = [Path(scratch) / str(number) for number in range(arguments.jobs)]
        for checkout in checkouts:
            checkout.mkdir()
            copy_checkout(checkout)
        drawn = [sites_of(checkouts[0], folder, arguments.most, arguments.seed, reasons) for folder in chosen]
        turns = chain.from_iterable(zip_longest(*drawn))  # a hunt that ends early has then covered every folder
        sites = [site for site in turns if site is not None and (site[1], site[2].what) not in done]
        hunt = Hunt(checkouts, arguments.seconds, end, arguments.reached or Path(scratch))
        hunt.begun += [one.folder for one in found]
        for number, one in enumerate(hunt.bugs(sites), start=1):
            fate = "SURVIVED" if one.survived else one.note or "killed"
            print(f"{number}/{len(sites)} {fate} {one.file} {one.what} ({one.seconds} s)", flush=True)
            found.append(one)
            if arguments.json is not None:
                write_report(arguments.json, judged(found, reasons, Counter(hunt.begun)))
    if hunt.helpless:
        return ExitCode.USAGE
    report = judged([one for one in found if one.folder in {folder.name for folder in chosen}], reasons)
    for check in report.checks:
        print(f"{check.verdict}  {check.name}: {check.found}" + (f"\n      survived: {check.why}" if check.why else ""))
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
