"""The hunt's record: a report of the result for each mutant, from which a later hunt continues."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashmoe_build.emulation.mutation.hunt import NOT_COMPILED, SAME_CODE, Kill
from flashmoe_build.emulation.mutation.planted import Mutant
from flashmoe_tools.report import Check, Report, Verdict, host_environment, read_report

KIND = "emulation-mutants"


def report(mutants: Sequence[Mutant], kills: Mapping[str, Kill], started: str, seconds: float) -> Report:
    """The results so far, in the order of ``mutants``; mutants that were not hunted are only counted."""
    hunted = [mutant for mutant in mutants if mutant.name in kills]
    return Report(
        KIND,
        tuple(_check(mutant, kills[mutant.name]) for mutant in hunted),
        data={
            "left": len(mutants) - len(hunted),
            "found": dict(Counter(_kind(kills[mutant.name]) for mutant in hunted).most_common()),
            "survivors": [mutant.name for mutant in hunted if kills[mutant.name].survived],
            "kills": [_row(mutant, kills[mutant.name]) for mutant in hunted],
        },
        environment=host_environment(),
        started=started,
        seconds=seconds,
    )


def read(path: Path, mutants: Sequence[Mutant]) -> dict[str, Kill]:
    """Results in a report, by name, for mutants whose patch is unchanged; empty if there is no report."""
    if not path.is_file():
        return {}
    digests = {mutant.name: mutant.digest for mutant in mutants}
    known: dict[str, Kill] = {}
    for row in read_report(path).data.get("kills", []):
        if digests.get(row["name"]) == row.get("digest"):
            known[row["name"]] = Kill(**{name: row[name] for name in Kill.__dataclass_fields__})
    return known


def markdown(mutants: Sequence[Mutant], kills: Mapping[str, Kill]) -> str:
    """The kill table."""
    hunted = [mutant for mutant in mutants if mutant.name in kills]
    killed = sum(kills[mutant.name].killed for mutant in hunted)
    lines = [
        "# Planted bugs and what the emulated kernels made of them",
        "",
        f"{killed} of {len(hunted)} killed. Written by `python -m flashmoe_build.emulation.mutants`. *Runs*: emulated",
        "launches until the first failure.",
        "",
        "| mutant | bug | file | found as | runs | first failing case |",
        "|---|---|---|---|---|---|",
    ]
    for mutant in hunted:
        kill = kills[mutant.name]
        found = kill.by if kill.by else "**survived**"
        what = mutant.what.replace("|", "\\|")
        lines.append(f"| {mutant.name} | {what} | {mutant.file} | {found} | {kill.runs} | {kill.case} |")
    return "\n".join(lines) + "\n"


def _kind(kill: Kill) -> str:
    return kill.by or "survived"


def _check(mutant: Mutant, kill: Kill) -> Check:
    by_rule = mutant.at is not None
    nothing_to_notice = by_rule and kill.by in (NOT_COMPILED, SAME_CODE)
    return Check(
        mutant.name,
        Verdict.PASS if kill.killed else Verdict.SKIP if nothing_to_notice else Verdict.FAIL,
        found=_kind(kill),
        expected="a failure or a wrong result",
        why=mutant.what,
        next_step=""
        if kill.killed or nothing_to_notice
        else f"extend the suite of {', '.join(mutant.kernels[:3])}"
        + (", or say in generated.toml why no test can notice it" if by_rule else ""),
    )


def _row(mutant: Mutant, kill: Kill) -> dict[str, Any]:
    return {
        **asdict(kill),
        "seconds": round(kill.seconds, 1),
        "what": mutant.what,
        "file": mutant.file,
        "digest": mutant.digest,
    }
