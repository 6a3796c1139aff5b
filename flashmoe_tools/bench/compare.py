"""Compares two reports: what became faster or slower from A to B by more than two runs of the same code differ.

Samples of two runs are not paired. If both runs timed the same baseline, the ratios to it are compared, so the clocks
of each run cancel. Raw times are compared only if there is no common baseline, against a wider margin.
"""

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy import stats  # type: ignore[import-untyped,unused-ignore]

from flashmoe.errors import ReportError
from flashmoe_tools.bench.record import DATA_SCHEMA, QUIET
from flashmoe_tools.bench.statistics import Array, Interval, log_ratios, seeded, trimmed_mean
from flashmoe_tools.bench.summaries import SUMMARY_SCHEMA, expand
from flashmoe_tools.bench.thresholds import CompareThresholds, StatisticsSettings, load_thresholds
from flashmoe_tools.bench.verdict import ADVICE, Decision, Reason, Speed
from flashmoe_tools.report import Check, Report, Verdict, host_environment, read_report, utc_now

# The values of ``--fail-on``, and the verdicts that make it fail. ``not-same`` requires that equality was shown, not
# only that no change was found.
FAIL_ON: Mapping[str, tuple[Speed, ...]] = MappingProxyType(
    {
        "slower": (Speed.SLOWER,),
        "changed": (Speed.SLOWER, Speed.FASTER),
        "not-same": (Speed.SLOWER, Speed.FASTER, Speed.AMBIGUOUS),
    }
)
MARKS = {"FASTER": "+", "SLOWER": "-", "SAME": "=", "AMBIGUOUS": "?"}


@dataclass(frozen=True)
class Change:
    """Speed of ``subject`` in B divided by its speed in A for one case; above 1, B is faster."""

    case: str
    subject: str
    against: str  # the baseline of both runs that times were divided by; empty: raw times
    value: float
    interval: Interval
    blocks: int
    decision: Decision


def read_bench(path: Path) -> Report:
    """A benchmark's report, or its summary with the derived values filled in."""
    report = read_report(path)
    if report.kind == "bench" and report.data.get("schema") == SUMMARY_SCHEMA:
        return expand(report)
    if report.kind != "bench" or report.data.get("schema") != DATA_SCHEMA:
        found = f"a {report.kind!r} report with data {report.data.get('schema')!r}"
        msg = f"{path} holds {found}; expected a bench report with {DATA_SCHEMA} or {SUMMARY_SCHEMA}"
        raise ReportError(msg)
    return report


def compare_files(a: Path, b: Path, fail_on: str | None = None) -> Report:
    """The comparison of report A with report B; FAIL if a result became wrong, and for what ``fail_on`` names."""
    return compare_reports(read_bench(a), read_bench(b), fail_on)


def compare_reports(a: Report, b: Report, fail_on: str | None = None) -> Report:
    started = utc_now()
    busy = any(check.name == QUIET and check.verdict is Verdict.WARN for check in (*a.checks, *b.checks))
    changes = find_changes(a.data, b.data, busy=busy)
    checks = [*_became_wrong(a.data, b.data), *_environment_checks(a, b)]
    checks += [_check(change, fail_on) for change in changes]
    if not changes:
        checks = [one for one in checks if one.verdict is Verdict.FAIL]
        checks.append(Check("cases", Verdict.SKIP, "the two reports have no case in common", "at least one"))
    else:
        checks += _vanished(a.data, b.data)
    data = {
        "schema": "flashmoe.bench-compare/1",
        "a": _identity(a),
        "b": _identity(b),
        "verdicts": dict(Counter(change.decision.verdict.value for change in changes)),
        "changes": [_change_json(change) for change in changes],
    }
    return Report("bench-compare", tuple(checks), data, host_environment(), (), started)


def _vanished(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Check]:
    return [
        Check(f"{case} {name}", Verdict.WARN, "only in A", "in both reports", "a missing case may hide a regression")
        for case, name in sorted(_measured(a) - _measured(b))
    ]


def find_changes(a: Mapping[str, Any], b: Mapping[str, Any], *, busy: bool = False) -> list[Change]:
    """Changes of our contenders that both reports have; if there are none, of every contender that both timed."""
    cells_b = {cell["case"]["key"]: cell for cell in b["cells"]}
    ours = {row["name"] for data in (a, b) for row in data["contenders"] if row["ours"]}
    changes = []
    for cell in a["cells"]:
        other = cells_b.get(cell["case"]["key"])
        if other is None or cell["timing"] != other["timing"]:
            continue
        common = [name for name in cell["summaries"] if name in other["summaries"]]
        subjects = [name for name in common if name in ours] or common
        base = a["baseline"] if a["baseline"] == b["baseline"] and a["baseline"] in common else ""
        changes += [_change(cell, other, name, "" if name == base else base, busy=busy) for name in subjects]
    return changes


def _change(a: Mapping[str, Any], b: Mapping[str, Any], subject: str, base: str, *, busy: bool) -> Change:
    limits = load_thresholds()
    if a["samples_ns"] and b["samples_ns"]:
        logs_a, logs_b = _speeds(a, subject, base), _speeds(b, subject, base)
        value, interval = difference(logs_a, logs_b, limits.verdict.confidence, limits.statistics)
        blocks = min(len(logs_a), len(logs_b))
    else:
        base = base if all(_paired(cell, subject, base) for cell in (a, b)) else ""
        value, interval, blocks = summary_difference(a, b, subject, base)
    margin = limits.compare.normalised_margin if base else limits.compare.absolute_margin
    decision = decide_change(interval, blocks, limits.verdict.min_blocks, margin, limits.compare, busy=busy)
    return Change(a["case"]["key"], subject, base, value, interval, blocks, decision)


def _speeds(cell: Mapping[str, Any], subject: str, base: str) -> Array:
    """Log speed of each block, relative to the baseline of the same block or computed from the raw median."""
    blocks = cell["samples_ns"][subject]
    if base:
        return log_ratios(blocks, cell["samples_ns"][base])
    return np.asarray([-math.log(float(np.median(block))) for block in blocks], dtype=np.float64)


def difference(a: Array, b: Array, confidence: float, settings: StatisticsSettings) -> tuple[float, Interval]:
    """exp(location of b - location of a), with a bootstrap interval that resamples the blocks of both."""
    centre = trimmed_mean(settings.trim)
    value = math.exp(float(centre(b)) - float(centre(a)))
    if min(len(a), len(b)) < 2:
        return value, Interval(0.0, math.inf, "none")
    if np.ptp(a) == 0.0 and np.ptp(b) == 0.0:
        return value, Interval(value, value, "constant")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # degenerate jackknife: replaced by the percentile interval below
        result = stats.bootstrap(
            (a, b),
            lambda x, y, axis=-1: centre(y, axis=axis) - centre(x, axis=axis),
            confidence_level=confidence,
            n_resamples=settings.resamples,
            method="percentile",
            vectorized=True,
            **seeded(settings.seed),
        )
    low, high = result.confidence_interval
    return value, Interval(math.exp(low), math.exp(high), "percentile")


def _paired(cell: Mapping[str, Any], subject: str, base: str) -> Mapping[str, Any] | None:
    rows = (row for row in cell["comparisons"] if (row["subject"], row["baseline"]) == (subject, base))
    return next(rows, None)


def summary_difference(
    a: Mapping[str, Any], b: Mapping[str, Any], subject: str, base: str
) -> tuple[float, Interval, int]:
    """Like ``difference``, for when one side has no samples: the ratio is the same; interval lengths add up like errors."""
    (speed_a, reach_a, blocks_a), (speed_b, reach_b, blocks_b) = (_speed(cell, subject, base) for cell in (a, b))
    value, reach = speed_b / speed_a, math.hypot(reach_a, reach_b)
    high = value * math.exp(reach) if math.isfinite(reach) else math.inf
    return value, Interval(value * math.exp(-reach), high, "normal"), min(blocks_a, blocks_b)


def _speed(cell: Mapping[str, Any], subject: str, base: str) -> tuple[float, float, int]:
    """(speed, half the length of its log interval, blocks); speed is relative to the baseline, or 1 / raw time."""
    row = _paired(cell, subject, base)
    summary = cell["summaries"][subject]
    value, (low, high) = (
        (row["ratio"], row["interval"]) if row else (1.0 / summary["median_us"], summary["interval_us"])
    )
    reach = math.log(high / low) / 2.0 if low and high else math.inf
    return value, reach, row["blocks"] if row else summary["blocks"]


def decide_change(
    interval: Interval, blocks: int, min_blocks: int, margin: float, limits: CompareThresholds, *, busy: bool = False
) -> Decision:
    """FASTER or SLOWER if the whole interval is beyond the run-to-run margin, SAME if it is inside the margin.

    A run on a busy machine differs from others by more than its own blocks show, so only large changes count there.
    """
    margin = max(margin, limits.busy_margin) if busy else margin
    same = max(limits.same_margin, margin)
    if blocks < min_blocks:
        return Decision(Speed.AMBIGUOUS, Reason.FEW_BLOCKS)
    if interval.low > 1.0 + margin:
        return Decision(Speed.FASTER, Reason.INTERVAL_EXCLUDES_ONE)
    if interval.high < 1.0 / (1.0 + margin):
        return Decision(Speed.SLOWER, Reason.INTERVAL_EXCLUDES_ONE)
    if busy:
        return Decision(Speed.AMBIGUOUS, Reason.BUSY_MACHINE)
    if interval.inside(1.0 / (1.0 + same), 1.0 + same):
        return Decision(Speed.SAME, Reason.INSIDE_MARGIN)
    spans = interval.low <= 1.0 <= interval.high
    return Decision(Speed.AMBIGUOUS, Reason.INTERVAL_SPANS_ONE if spans else Reason.INSIDE_RUN_MARGIN)


def _check(change: Change, fail_on: str | None) -> Check:
    verdict = change.decision.verdict
    word = Verdict.WARN if verdict is Speed.SLOWER else Verdict.PASS
    if verdict is Speed.AMBIGUOUS:
        word = Verdict.SKIP
    if verdict in FAIL_ON.get(fail_on or "", ()):
        word = Verdict.FAIL
    low, high = change.interval.low, change.interval.high
    found = f"{change.value:.3f} [{low:.3f}, {high:.3f}] {verdict} ({change.decision.reason})"
    against = f" against {change.against}" if change.against else " in raw time"
    return Check(
        f"{change.case} {change.subject}{against}", word, found, next_step=ADVICE.get(change.decision.reason, "")
    )


def _became_wrong(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Check]:
    """Contenders whose result was right in A and is wrong in B."""
    before = {
        (cell["case"]["key"], name)
        for cell in a["cells"]
        for name, row in cell["verification"].items()
        if row["passed"]
    }
    return [
        Check(f"{cell['case']['key']} {name}", Verdict.FAIL, f"wrong in B: {row['reason']}", "right, as in A")
        for cell in b["cells"]
        for name, row in cell["verification"].items()
        if not row["passed"] and (cell["case"]["key"], name) in before
    ]


def _environment_checks(a: Report, b: Report) -> list[Check]:
    def device(report: Report) -> str:
        return str((report.environment.get("gpu") or {}).get("name") or report.environment.get("processor"))

    if device(a) == device(b):
        return []
    why = "ratios on different devices say nothing about a change in the code"
    return [Check("device", Verdict.WARN, f"A on {device(a)}, B on {device(b)}", "one device", why)]


def _measured(data: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {(cell["case"]["key"], name) for cell in data["cells"] for name in cell["summaries"]}


def _identity(report: Report) -> dict[str, Any]:
    return {"started": report.started, "command": list(report.command), "environment": dict(report.environment)}


def _change_json(change: Change) -> dict[str, Any]:
    finite = math.isfinite(change.interval.high)
    return {
        "case": change.case,
        "subject": change.subject,
        "against": change.against,
        "value": change.value,
        "interval": [change.interval.low, change.interval.high if finite else None],
        "blocks": change.blocks,
        "verdict": change.decision.verdict.value,
        "reason": change.decision.reason.value,
    }


def compare_markdown(report: Report) -> str:
    """The changes as a Markdown table, then what failed."""
    lines = [
        f"## B against A: {report.verdict}",
        "",
        "| case | contender | against | B/A speed | verdict |",
        "|---|---|---|---|---|",
    ]
    for row in report.data["changes"]:
        low, high = row["interval"]
        interval = f"[{low:.3f}, {high:.3f}]" if high is not None else "[no interval]"
        verdict = f"{MARKS[row['verdict']]} {row['verdict']} ({row['reason']})"
        cells = (row["case"], row["subject"], row["against"] or "raw time", f"{row['value']:.3f} {interval}", verdict)
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *_counts([row["verdict"] for row in report.data["changes"]])]
    lines += [
        f"- {check.verdict} {check.name}: {check.found}"
        for check in report.checks
        if check.verdict in (Verdict.FAIL, Verdict.WARN)
    ]
    return "\n".join(lines) + "\n"


def _counts(verdicts: Sequence[str]) -> list[str]:
    words = ", ".join(f"{verdicts.count(word)} {word}" for word in sorted(set(verdicts)))
    return [words or "the two reports have no case in common", ""]
