"""One step of a bisection: climb some rungs on the commit that is checked out, and tell git what came of it.

Exit code 0: good; 1: bad; 125: this commit cannot be judged (it does not build, or the numbers decide nothing).
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

from flashmoe.gate.climb import Budget, Climb, find_places
from flashmoe.gate.history import commit_of
from flashmoe.gate.ladder import Places, Rung, read_ladder, select
from flashmoe.report import Report, Verdict, read_report, write_report

CODES = {"good": 0, "bad": 1, "skip": 125}
STEP_SECONDS = 1800.0
SPEED_SECONDS = 60


def climb(rungs: tuple[Rung, ...], places: Places) -> Climb:
    done = Climb(rungs, places, Budget(STEP_SECONDS, 0.0))
    done.run()
    return done


def word_of(outcome: Climb, gate: str) -> str:
    """``skip`` when a rung below the gate failed: the commit says nothing about what is searched."""
    if outcome.stopped_at and outcome.stopped_at != gate:
        return "skip"
    found = outcome.outcomes.get(gate)
    if found is None or found.verdict is Verdict.SKIP:
        return "skip"
    return "bad" if found.verdict is Verdict.FAIL else "good"


def speed_word(here: Report, good: Report, case: str) -> str:
    """Whether ``case`` is slower here than on the good commit, by the rule for two runs."""
    from flashmoe.bench.compare import compare_reports  # scipy: only this gate waits for it

    compared = compare_reports(good, here)
    verdicts = {row["verdict"] for row in compared.data["changes"] if row["case"] == case}
    if not verdicts:
        return "skip"
    if "SLOWER" in verdicts or any(check.found.startswith("wrong in B") for check in compared.checks):
        return "bad"
    return "skip" if verdicts == {"AMBIGUOUS"} else "good"


def timed(rung: Rung, suite: str, case: str) -> Rung:
    """The baseline rung for one case alone, with all its samples."""
    words = ("{python}", "-m", "flashmoe", "bench", "--suite", suite, "--case", case)
    return replace(rung, command=(*words, "--time-budget", str(SPEED_SECONDS), "--json", "{report}"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rungs", required=True)
    parser.add_argument("--ladder", type=Path, required=True)
    parser.add_argument("--reports", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--case", default="")
    parser.add_argument("--suite", default="cpu")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.environ.get("FLASHMOE_STEP_PATH", "")  # the rungs run the worktree's package
    root = Path.cwd()
    commit = commit_of(root).rstrip("+")
    names = arguments.rungs.split(",")
    rungs = select(read_ladder(arguments.ladder), names)
    if arguments.against:
        rungs = tuple(
            timed(rung, arguments.suite, arguments.case) if rung.name == names[-1] else rung for rung in rungs
        )
    outcome = climb(rungs, replace(find_places(root, None, None), checkout=True))
    word = word_of(outcome, names[-1])
    if arguments.against and word == "good":
        word = _against(outcome, names[-1], commit, arguments)
    write_report(arguments.reports / f"{commit}.json", outcome.report())
    with (arguments.reports / "steps.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"commit": commit, "word": word}) + "\n")
    return CODES[word]


def _against(outcome: Climb, gate: str, commit: str, arguments: argparse.Namespace) -> str:
    """The first step judges the good commit: its report is what the others are compared with."""
    here = outcome.outcomes[gate].report
    if here is None:
        return "skip"
    write_report(arguments.reports / f"{commit}.baseline.json", here)
    if arguments.against.name == f"{commit}.baseline.json":
        return "good"
    return speed_word(here, read_report(arguments.against), arguments.case)


if __name__ == "__main__":
    raise SystemExit(main())
