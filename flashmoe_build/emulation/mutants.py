"""Planted bugs: textual patches of kernel sources, each of which the emulated suite must find.

python -m flashmoe_build.emulation.mutants [--only TEXT] [--json PATH] [--markdown PATH]
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flashmoe.errors import BuildError, ExitCode, TableError
from flashmoe_tools.progress import Progress
from flashmoe_tools.report import Check, Report, Verdict, host_environment, utc_now, write_report
from flashmoe_tools.tables import load_tables

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from flashmoe_build.emulation.build import CACHE, CSRC, REPOSITORY, Options, jobs
from flashmoe_build.emulation.cases import Case, run_case, suite
from flashmoe_build.emulation.runner import TensorMapError

MUTANTS = tuple(sorted((REPOSITORY / "tests" / "emulation").glob("mutants/*.toml")))
EXTRA_SEEDS = 4  # a bug of timing may need more than the suite's own seed of each case
CASE_SECONDS = 240  # a case that takes longer hangs; all of a survivor's may take much longer

# Workers are forks of a server that has imported torch once.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["flashmoe_build.emulation.cases"])


@dataclass(frozen=True)
class Mutant:
    """One planted bug. ``anchor`` stands exactly once in ``file`` (relative to csrc, white space aside)
    and becomes ``replacement``."""

    name: str
    what: str
    file: str
    anchor: str
    replacement: str
    kernels: tuple[str, ...]  # names of the units whose suite must notice
    fast: bool = False  # part of the test run, not only of the whole table


@dataclass(frozen=True)
class Kill:
    """What the suite made of a mutant. ``by`` is the kind of failure, "wrong result", "crash", "timeout" or "" (survived)."""

    name: str
    by: str
    detail: str
    case: str
    runs: int
    seconds: float

    @property
    def killed(self) -> bool:
        return self.by not in ("", "does not compile")


def load_mutants(paths: Sequence[Path] = MUTANTS) -> tuple[Mutant, ...]:
    rows = [row for path in paths for row in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]
    return tuple(Mutant(**{**row, "kernels": tuple(row["kernels"])}) for row in rows)


def anchor_pattern(anchor: str) -> re.Pattern[str]:
    """The anchor, whatever a formatter does to its white space."""
    words = (re.escape(word).replace(r"\(", r"\(\s*") for word in anchor.split())
    return re.compile(r"\s+".join(words))


def patched(mutant: Mutant) -> str:
    """The source with the bug in it; raises TableError when the anchor is not there exactly once."""
    text = (CSRC / mutant.file).read_text(encoding="utf-8")
    matches = list(anchor_pattern(mutant.anchor).finditer(text))
    if len(matches) != 1:
        msg = (
            f"mutant {mutant.name}: its anchor stands {len(matches)} times in csrc/{mutant.file}; "
            "bring tests/emulation/mutants/ up to date"
        )
        raise TableError(msg)
    start, end = matches[0].span()
    return text[:start] + mutant.replacement + text[end:]


def overlay(mutant: Mutant) -> Path:
    """A folder that holds the patched file under its own name."""
    folder = CACHE / "mutants" / mutant.name
    target = folder / mutant.file
    target.parent.mkdir(parents=True, exist_ok=True)
    text = patched(mutant)
    if not target.is_file() or target.read_text(encoding="utf-8") != text:
        target.write_text(text, encoding="utf-8")
    return folder


def cases_for(mutant: Mutant) -> Iterator[Case]:
    """The suite of the mutant's kernels, then the same with further seeds."""
    chosen = [case for case in suite(load_tables(), whole=True) if case.kernel.unit.name in mutant.kernels]
    yield from chosen
    for extra in range(1, EXTRA_SEEDS + 1):
        yield from (replace(case, seed=case.seed + 100 * extra) for case in chosen)


def hunt(mutant: Mutant, tell: Callable[[int], None] = lambda runs: None) -> Kill:
    """Runs cases until one fails; ``tell`` hears of each that begins."""
    begin = time.monotonic()
    options = Options(overlay=overlay(mutant))
    runs = 0
    for case in cases_for(mutant):
        runs += 1
        tell(runs)
        try:
            outcome = run_case(case, options)
        except BuildError as error:
            return Kill(
                mutant.name, "does not compile", str(error)[:2000], case.identity, runs, time.monotonic() - begin
            )
        except TensorMapError as error:
            return Kill(mutant.name, "refused map", str(error), case.identity, runs, time.monotonic() - begin)
        if not outcome.passed:
            failure = outcome.report.failure
            by = "wrong result" if failure is None else failure.kind
            return Kill(mutant.name, by, outcome.explain()[:500], case.identity, runs, time.monotonic() - begin)
    return Kill(mutant.name, "", "", "", runs, time.monotonic() - begin)


def _report(mutant: Mutant, channel: Connection) -> None:
    channel.send(hunt(mutant, channel.send))


def hunt_in_process(mutant: Mutant) -> Kill:
    """``hunt`` in a process of its own: a mutant may crash it or never end."""
    begin = time.monotonic()
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_report, args=(mutant, sender))
    process.start()
    sender.close()
    runs = 0
    try:
        while receiver.poll(CASE_SECONDS):
            heard: int | Kill = receiver.recv()
            if isinstance(heard, Kill):
                return heard
            runs = heard
        detail = f"no end of a case within {CASE_SECONDS} s"
        return Kill(mutant.name, "timeout", detail, "", runs, time.monotonic() - begin)
    except EOFError:
        process.join()
        return Kill(mutant.name, "crash", f"exit status {process.exitcode}", "", runs, time.monotonic() - begin)
    finally:
        process.kill()
        process.join()


def markdown(mutants: Sequence[Mutant], kills: Sequence[Kill]) -> str:
    """The kill table."""
    killed = sum(kill.killed for kill in kills)
    lines = [
        "# Planted bugs and what the emulated kernels made of them",
        "",
        f"{killed} of {len(kills)} killed. Written by `python -m flashmoe_build.emulation.mutants`; the patches are in",
        "`tests/emulation/mutants/`. *Runs*: emulated launches until the first failure.",
        "",
        "| mutant | bug | file | found as | runs | first failing case |",
        "|---|---|---|---|---|---|",
    ]
    for mutant, kill in zip(mutants, kills, strict=True):
        found = kill.by if kill.by else "**survived**"
        lines.append(f"| {mutant.name} | {mutant.what} | {mutant.file} | {found} | {kill.runs} | {kill.case} |")
    return "\n".join(lines) + "\n"


def _check(mutant: Mutant, kill: Kill) -> Check:
    return Check(
        mutant.name,
        Verdict.PASS if kill.killed else Verdict.FAIL,
        found=kill.by or "survived",
        expected="a failure or a wrong result",
        why=mutant.what,
        next_step="" if kill.killed else f"sharpen the suite: {', '.join(mutant.kernels)}",
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flashmoe_build.emulation.mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name contains TEXT")
    parser.add_argument("--json", type=Path, help="write a report")
    parser.add_argument("--markdown", type=Path, help="write the kill table")
    arguments = parser.parse_args(words)
    mutants = load_mutants()
    chosen = [mutant for mutant in mutants if arguments.only in mutant.name]
    if not chosen:
        print(f"no mutant matches {arguments.only!r}", file=sys.stderr)
        return ExitCode.NOTHING_CHECKED
    for mutant in chosen:
        patched(mutant)  # stale anchors first, before an hour of work
    started, begin = utc_now(), time.monotonic()
    kills: list[Kill] = []
    with Progress("mutants", len(chosen)) as progress, ThreadPoolExecutor(jobs()) as pool:
        for kill in pool.map(hunt_in_process, chosen):
            kills.append(kill)
            progress.advance(f"{kill.name}: {kill.by or 'SURVIVED'}")
    for kill in kills:
        if not kill.killed:
            print(f"{kill.name}: {kill.by or 'survived'} after {kill.runs} runs\n{kill.detail}")
    report = Report(
        "emulation-mutants",
        tuple(_check(mutant, kill) for mutant, kill in zip(chosen, kills, strict=True)),
        data={"kills": [_row(mutant, kill) for mutant, kill in zip(chosen, kills, strict=True)]},
        environment=host_environment(),
        started=started,
        seconds=time.monotonic() - begin,
    )
    print(f"{sum(kill.killed for kill in kills)} of {len(kills)} mutants killed, {report.seconds:.0f} s")
    if arguments.json is not None:
        write_report(arguments.json, report)
    if arguments.markdown is not None:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(markdown(chosen, kills), encoding="utf-8")
    return report.exit_code


def _row(mutant: Mutant, kill: Kill) -> dict[str, Any]:
    return {**asdict(kill), "what": mutant.what, "file": mutant.file, "kernels": list(mutant.kernels)}


if __name__ == "__main__":
    sys.exit(main())
