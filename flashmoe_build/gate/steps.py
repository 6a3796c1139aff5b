"""The steps of the gate, in order. Each runs an existing program and is judged by the report that it writes."""

from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe.errors import ArgumentError

FLASHMOE = ("{python}", "-m", "flashmoe")
PROOF = "emulation"  # unless it passes, nothing is called known good
DECISION = "decision"


@dataclass(frozen=True)
class Step:
    """``command`` contains placeholders, which :class:`flashmoe_build.gate.pipeline.Paths` fills in; the decision has no command.

    ``needs`` "checkout": skipped if there are only installed files; "compiler": also skipped without g++.
    ``ignore`` names checks of the report that another step judges. ``after_failed`` names a step whose failure does not
    prevent this one.
    """

    name: str
    command: tuple[str, ...]
    why: str = ""
    next_step: str = ""
    report: str = ""  # default: {reports}/NAME.json
    limit_seconds: float = 300.0  # limited by the remaining budget
    budget_seconds: float = 120.0  # {budget}
    needs: str = ""
    ignore: tuple[str, ...] = ()
    after_failed: str = ""


STEPS = (
    Step(
        "environment",
        (*FLASHMOE, "doctor", "--json", "{report}"),
        why="a wrong environment fails later, and far from its cause",
        next_step="python -m flashmoe doctor",
        limit_seconds=60,
        ignore=("extension", "loads", "smoke", "gpus", "variables"),
    ),
    # Before the build: a wrong mask can also cost registers, and a spill reported first would hide the wrong result.
    Step(
        PROOF,
        ("{python}", "-m", "flashmoe_build.emulation", "--changed", "--quick", "--seconds", "{budget}", "--json", "{report}"),
        why="only the emulation sees a race that does not happen to strike, and without a GPU nothing else runs a kernel",
        next_step="./nox -s emulate -- --changed",
        limit_seconds=180,
        budget_seconds=45,
        needs="compiler",
    ),
    Step(
        "build",
        ("{python}", "-m", "flashmoe_build", "--dist", "{root}/dist"),
        why="what does not compile cannot be measured",
        next_step="./nox -s build; or name a library built elsewhere: gate --library FILE.so",
        report="{build}/reports/build.json",
        limit_seconds=3600,
        needs="checkout",
    ),
    Step(
        "symbols",
        (*FLASHMOE, "audit", "{artifact}", "{objects}", "--json", "{report}"),
        why="an undefined symbol or a spill found here costs no GPU time",
        next_step="python -m flashmoe audit {artifact}",
        limit_seconds=120,
    ),
    Step(
        "import",
        ("{python}", "-m", "flashmoe_build.gate.load", "--json", "{report}"),
        why="a library that does not load has no speed",
        next_step="python -m flashmoe doctor",
        limit_seconds=120,
    ),
    Step(
        "smoke",
        ("{python}", "-m", "flashmoe_tools.smoke", "--json", "{report}"),
        why="wrong on a small problem is wrong on all",
        next_step="python -m flashmoe_tools.smoke",
        limit_seconds=180,
    ),
    Step(
        "correctness",
        ("{python}", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "{root}/tests/attention/test_correctness.py"),
        why="a fast wrong kernel is worth nothing",
        next_step="./nox -s test -- tests/attention",
        limit_seconds=900,
        needs="checkout",
    ),
    Step(
        "baseline",
        (*FLASHMOE, "bench", "--quick", "--time-budget", "{budget}", "--json", "{report}"),
        why="without torch's backends in the same run there is nothing to compare with",
        next_step="python -m flashmoe bench --quick",
        limit_seconds=600,
        budget_seconds=180,
    ),
    Step(
        DECISION,
        (),
        why="below half of the baseline, more tuning without a profile is guessing",
        next_step="python -m flashmoe profile",
    ),
    Step(
        "profile",
        (*FLASHMOE, "profile", "--bench", "{reports}/baseline.json", "--build", "{build}/reports/build.json", "--json", "{report}"),
        why="says where the time goes before anything is changed",
        next_step="python -m flashmoe profile",
        after_failed=DECISION,
    ),
)  # fmt: skip


def select(names: Sequence[str], steps: Sequence[Step] = STEPS) -> tuple[Step, ...]:
    """The named steps, in the gate's order; all if no name is given. An unknown name is an ArgumentError."""
    known = [step.name for step in steps]
    for name in names:
        if name not in known:
            msg = f"no step {name!r}; the gate has {', '.join(known)}"
            raise ArgumentError(msg)
    return tuple(step for step in steps if not names or step.name in names)
