"""The verdict on a ratio: undecided at first, changed only by evidence, with a reason code."""

from dataclasses import dataclass
from enum import Enum

from flashmoe_tools.bench.statistics import Ratio
from flashmoe_tools.bench.thresholds import load_thresholds


class Speed(str, Enum):
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    AMBIGUOUS = "AMBIGUOUS"

    def __str__(self) -> str:
        return self.value


class Reason(str, Enum):
    """Why a verdict was reached, or why none was."""

    FEW_BLOCKS = "few-blocks"  # too little was measured to decide anything
    INSIDE_MARGIN = "inside-margin"  # the whole interval is inside the margin that counts as equal
    LARGE_GAIN = "large-gain"  # at least the change that is accepted by itself, and the interval agrees
    INTERVAL_EXCLUDES_ONE = "interval-excludes-one"  # smaller, but interval and sign test both exclude equality
    INTERVAL_SPANS_ONE = "interval-spans-one"  # could be either way: measure more
    TEST_DISAGREES = "test-disagrees"  # the interval excludes equality, the sign test does not
    BUSY_MACHINE = "busy-machine"  # two runs, one of them next to other work, which may explain the difference
    INSIDE_RUN_MARGIN = "inside-run-margin"  # two runs that differ by no more than runs of the same code do

    def __str__(self) -> str:
        return self.value


ADVICE = {
    Reason.FEW_BLOCKS: "measure more: --repeats, or a longer --time-budget",
    Reason.INTERVAL_SPANS_ONE: "measure more (--repeats), on a quieter machine",
    Reason.TEST_DISAGREES: "measure more (--repeats); a few disturbed blocks carry the difference",
    Reason.BUSY_MACHINE: "repeat both runs on an idle machine",
    Reason.INSIDE_RUN_MARGIN: "time both builds in one run, side by side, to tell them apart",
}


@dataclass(frozen=True)
class Decision:
    verdict: Speed
    reason: Reason

    @property
    def advice(self) -> str:
        return ADVICE.get(self.reason, "")


def decide(ratio: Ratio) -> Decision:
    """FASTER or SLOWER only when the bootstrap interval and the sign test agree; SAME only when shown to be.

    Both must hold, so the chance of a wrong FASTER or SLOWER is at most that of the sign test, 1 - confidence.
    """
    limits = load_thresholds().verdict
    interval = ratio.interval
    if ratio.blocks < limits.min_blocks:
        return Decision(Speed.AMBIGUOUS, Reason.FEW_BLOCKS)
    if interval.inside(1.0 / (1.0 + limits.same_margin), 1.0 + limits.same_margin):
        return Decision(Speed.SAME, Reason.INSIDE_MARGIN)
    if interval.low <= 1.0 <= interval.high:
        return Decision(Speed.AMBIGUOUS, Reason.INTERVAL_SPANS_ONE)
    if ratio.p_value > 1.0 - limits.confidence:
        return Decision(Speed.AMBIGUOUS, Reason.TEST_DISAGREES)
    gain = max(ratio.value, 1.0 / ratio.value) - 1.0
    reason = Reason.LARGE_GAIN if gain >= limits.large_gain else Reason.INTERVAL_EXCLUDES_ONE
    return Decision(Speed.FASTER if ratio.value > 1.0 else Speed.SLOWER, reason)
