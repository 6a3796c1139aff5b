"""One step of a bisection: climb some rungs on the commit that is checked out, and tell git what came of it.

Exit code 0: good; 1: bad; 125: this commit cannot be judged (it does not build, or the numbers decide nothing).
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashmoe_build.gate.climb import Budget, Climb, find_places
from flashmoe_build.gate.history import commit_of
from flashmoe_build.gate.ladder import Places, Rung, read_ladder, select
from flashmoe_tools.report import Report, Verdict, read_report, write_report

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


def speed_word(here: Report, good: Report, case: str, bad: Report | None = None) -> str:
    """Whether ``case`` is slower here than on the good commit.

    The ends are told apart by the rule for two runs. Between them it is enough to know which end a commit is like: on
    which side of their geometric middle its whole interval lies. Noise that forbids SAME need not hide a regression.
    """
    from flashmoe_tools.bench.compare import compare_reports  # scipy: only this gate waits for it

    compared = compare_reports(good, here)
    rows = [row for row in compared.data["changes"] if row["case"] == case]
    if not rows:
        return "skip"
    if any(check.found.startswith("wrong in B") for check in compared.checks):
        return "bad"
    if bad is not None:
        ends = {
            row["subject"]: row["value"] for row in compare_reports(good, bad).data["changes"] if row["case"] == case
        }
        return _nearer_end(rows, ends)
    verdicts = {row["verdict"] for row in rows}
    if "SLOWER" in verdicts:
        return "bad"
    return "skip" if verdicts == {"AMBIGUOUS"} else "good"


def _nearer_end(rows: Sequence[Mapping[str, Any]], ends: Mapping[str, float]) -> str:
    """``rows`` compare the good end with this commit; ``ends`` says how fast each subject is at the bad end."""
    judged = [(row["interval"], math.sqrt(ends[row["subject"]])) for row in rows if ends.get(row["subject"], 1.0) < 1.0]
    if any(high is not None and high < middle for (_, high), middle in judged):
        return "bad"
    return "good" if judged and all(low is not None and low > middle for (low, _), middle in judged) else "skip"


def timed(rung: Rung, suite: str, case: str) -> Rung:
    """The baseline rung for one case alone, with all its samples."""
    words = ("{python}", "-m", "flashmoe", "bench", "--suite", suite, "--case", case)
    return replace(rung, command=(*words, "--time-budget", str(SPEED_SECONDS), "--json", "{report}"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rungs", required=True)
    parser.add_argument("--ladder", type=Path, required=True)
    parser.add_argument("--reports", type=Path, required=True)
    parser.add_argument("--against", type=Path, help="the bench report of the good end")
    parser.add_argument("--bad", type=Path, help="the bench report of the bad end, once there is one")
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
    bad = arguments.bad if arguments.bad and arguments.bad.name != f"{commit}.baseline.json" else None
    far = read_report(bad) if bad is not None and bad.is_file() else None
    return speed_word(here, read_report(arguments.against), arguments.case, far)


if __name__ == "__main__":
    raise SystemExit(main())
