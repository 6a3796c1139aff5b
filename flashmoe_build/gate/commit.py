"""The program that ``git bisect run`` starts for each commit: runs a gate's steps on the tree in the current folder.

Exit code 0: good; 1: bad; 125: this commit cannot be judged (it does not build, or its numbers are inconclusive).
"""

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashmoe_build.gate.history import commit_of
from flashmoe_build.gate.pipeline import NOT_RUN, Pipeline, find_paths
from flashmoe_build.gate.steps import FLASHMOE, Step, select
from flashmoe_tools.report import Report, Verdict, read_report, write_report

CODES = {"good": 0, "bad": 1, "skip": 125}
# The steps of each gate; the last one decides. A commit that fails an earlier one cannot be judged.
GATES = {
    "symbols": ("build", "symbols"),
    "correctness": ("build", "import", "correctness"),
    "speed": ("build", "import", "baseline"),
}
COMMIT_SECONDS = 1800.0
SPEED_SECONDS = 60
WORDS = "words.jsonl"  # one line per judged commit


def steps_of(gate: str) -> tuple[Step, ...]:
    """The steps of a gate, or the single step of that name. An unknown name is an ArgumentError."""
    return select(GATES.get(gate, (gate,)))


def word_of(done: Pipeline) -> str:
    """good, bad or skip, according to the last step."""
    last = done.steps[-1].name
    verdict = done.outcomes.get(last, NOT_RUN).verdict
    if verdict is Verdict.SKIP or done.stopped_at not in ("", last):
        return "skip"
    return "bad" if verdict is Verdict.FAIL else "good"


def speed_word(here: Report, good: Report, case: str, bad: Report | None = None) -> str:
    """Whether ``case`` is slower here than on the good commit.

    The two ends are compared by the rule for two runs. For a commit between them it is enough to know which end it resembles: on
    which side of their geometric mean its whole interval is. Noise that rules out SAME need not hide a regression.
    """
    from flashmoe_tools.bench.compare import compare_reports  # scipy: only imported for this gate

    compared = compare_reports(good, here)
    rows = [row for row in compared.data["changes"] if row["case"] == case]
    if not rows:
        return "skip"
    if any(check.found.startswith("wrong in B") for check in compared.checks):
        return "bad"
    if bad is not None:
        ends = [row for row in compare_reports(good, bad).data["changes"] if row["case"] == case]
        return _nearer_end(rows, {row["subject"]: row["value"] for row in ends})
    verdicts = {row["verdict"] for row in rows}
    if "SLOWER" in verdicts:
        return "bad"
    return "skip" if verdicts == {"AMBIGUOUS"} else "good"


def _nearer_end(rows: Sequence[Mapping[str, Any]], ends: Mapping[str, float]) -> str:
    """``rows`` compare the good end with this commit; ``ends`` is each subject's relative speed at the bad end."""
    judged = [(row["interval"], math.sqrt(ends[row["subject"]])) for row in rows if ends.get(row["subject"], 1.0) < 1.0]
    if any(high is not None and high < middle for (_, high), middle in judged):
        return "bad"
    return "good" if judged and all(low is not None and low > middle for (low, _), middle in judged) else "skip"


def timed(step: Step, suite: str, case: str) -> Step:
    """The baseline step for a single case, with all its samples."""
    words = ("bench", "--suite", suite, "--case", case, "--time-budget", str(SPEED_SECONDS), "--json", "{report}")
    return replace(step, command=(*FLASHMOE, *words))


def baseline_of(reports: Path, commit: str) -> Path:
    return reports / f"{commit}.baseline.json"


def judge_speed(here: Report | None, commit: str, options: argparse.Namespace) -> str:
    """The good end is judged first: the others are compared with its report."""
    if here is None:
        return "skip"
    write_report(baseline_of(options.reports, commit), here)
    if commit == options.good:
        return "good"
    bad = baseline_of(options.reports, options.bad)
    far = read_report(bad) if commit != options.bad and bad.is_file() else None
    return speed_word(here, read_report(baseline_of(options.reports, options.good)), options.case, far)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--gate", required=True)
    parser.add_argument("--reports", type=Path, required=True)
    for name in ("good", "bad", "case", "suite"):
        parser.add_argument(f"--{name}", default="")
    options = parser.parse_args()
    # The steps must import this commit's package; the first folder is that of the program that started the search.
    os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "").partition(os.pathsep)[2]
    root = Path.cwd()
    commit, steps = commit_of(root).rstrip("+"), steps_of(options.gate)
    is_speed = options.gate == "speed"
    if is_speed:
        steps = (*steps[:-1], timed(steps[-1], options.suite, options.case))
    done = Pipeline(steps, replace(find_paths(root), checkout=True), COMMIT_SECONDS)
    write_report(options.reports / f"{commit}.json", done.run())
    word = word_of(done)
    if is_speed and word == "good":
        word = judge_speed(done.outcomes[steps[-1].name].report, commit, options)
    with (options.reports / WORDS).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"commit": commit, "word": word}) + "\n")
    return CODES[word]


if __name__ == "__main__":
    raise SystemExit(main())
