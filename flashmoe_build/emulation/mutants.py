"""Hunts planted bugs: generated and hand-written patches of kernel sources, each of which the emulated suite must find.

python -m flashmoe_build.emulation.mutants [--generated | --by-hand] [--only TEXT] [--json PATH] [--jobs N] [--budget-minutes M]
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from flashmoe.errors import ExitCode
from flashmoe_build.emulation.build import jobs
from flashmoe_build.emulation.mutation import record
from flashmoe_build.emulation.mutation.generate import generated
from flashmoe_build.emulation.mutation.hunt import Kill, hunt_in_process
from flashmoe_build.emulation.mutation.planted import Mutant, load_mutants, patched
from flashmoe_tools.progress import Progress
from flashmoe_tools.report import utc_now, write_report

WRITE_SECONDS = 60  # between two writes of the report during the hunt


def round_robin(mutants: Sequence[Mutant]) -> list[Mutant]:
    """The first mutant of every file, then the second of every file, so that a hunt that ends early has covered all files."""
    position: Counter[str] = Counter()
    order: list[tuple[int, Mutant]] = []
    for mutant in sorted(mutants, key=lambda mutant: mutant.rank):  # synchronisation first
        order.append((position[mutant.file], mutant))
        position[mutant.file] += 1
    return [mutant for _, mutant in sorted(order, key=lambda item: item[0])]


def hunt_all(mutants: Sequence[Mutant], workers: int, end: float, progress: Progress) -> Iterator[tuple[Mutant, Kill]]:
    """Yields each result as it arrives, until the time ``end``."""

    def one(mutant: Mutant) -> Kill | None:
        return hunt_in_process(mutant, end) if time.monotonic() < end else None

    with ThreadPoolExecutor(workers) as pool:
        waiting = {pool.submit(one, mutant): mutant for mutant in mutants}
        for future in as_completed(waiting):
            kill = future.result()
            if kill is not None:
                progress.advance(f"{kill.name}: {kill.by or 'SURVIVED'}")
                yield waiting[future], kill


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for torch in each worker
    wanted = [
        *(() if arguments.generated or arguments.every else load_mutants()),
        *(() if arguments.by_hand else generated(every=arguments.every)),
    ]
    chosen = [mutant for mutant in wanted if arguments.only in mutant.name]
    if not chosen:
        print(f"no mutant matches {arguments.only!r}", file=sys.stderr)
        return ExitCode.NOTHING_CHECKED
    if arguments.list:
        print("\n".join(f"{mutant.name}: {mutant.what}" for mutant in chosen))
        return ExitCode.OK
    for mutant in chosen:
        patched(mutant)  # fail on stale anchors now, not after an hour of work
    started, begin = utc_now(), time.monotonic()
    kills = record.read(arguments.json, chosen) if arguments.json is not None else {}
    left = [mutant for mutant in chosen if mutant.name not in kills]
    end = begin + 60 * arguments.budget_minutes if arguments.budget_minutes else float("inf")
    written = begin
    with Progress("mutants", len(left)) as progress:
        for _, kill in hunt_all(round_robin(left), arguments.jobs or jobs(), end, progress):
            kills[kill.name] = kill
            if arguments.json is not None and time.monotonic() > written + WRITE_SECONDS:
                written = time.monotonic()
                write_report(arguments.json, record.report(chosen, kills, started, written - begin))
    return _finish(arguments, chosen, kills, started, time.monotonic() - begin)


def _finish(
    arguments: argparse.Namespace, chosen: Sequence[Mutant], kills: dict[str, Kill], started: str, seconds: float
) -> int:
    report = record.report(chosen, kills, started, seconds)
    for name in [mutant.name for mutant in chosen if mutant.name in kills]:
        if not kills[name].killed:
            print(
                f"{name}: {kills[name].by or 'survived'} after {kills[name].runs} runs\n{kills[name].detail}".rstrip()
            )
    killed = sum(kill.killed for kill in kills.values())
    print(f"{killed} of {len(kills)} mutants killed, {len(chosen) - len(kills)} left, {seconds:.0f} s")
    if arguments.json is not None:
        write_report(arguments.json, report)
    if arguments.markdown is not None:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(record.markdown(chosen, kills), encoding="utf-8")
    return report.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashmoe_build.emulation.mutants", description=__doc__
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--generated", action="store_true", help="those by rule only")
    which.add_argument("--by-hand", action="store_true", help="those by hand only")
    which.add_argument("--every", action="store_true", help="every edit that the rules can make; use with --only")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name contains TEXT")
    parser.add_argument("--list", action="store_true", help="print them and stop")
    parser.add_argument("--jobs", type=int, metavar="N", help="hunts at once; default: MAX_JOBS, else at most 2")
    parser.add_argument("--budget-minutes", type=float, metavar="M", help="stop after that time")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write a report; bugs in an existing one are not hunted again"
    )
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the kill table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
