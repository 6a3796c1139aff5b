"""From raw samples to the numbers of a report: times, rates, shares of the ceilings, ratios, verdicts.

Uses neither torch nor a clock. Everything here can be recomputed from a report's raw samples; ``summarise_cell`` is a
pure function of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flashmoe_tools.bench.statistics import Interval, Ratio, geometric_mean, lag_one, locate, log_ratios, paired_ratio
from flashmoe_tools.bench.thresholds import Thresholds, load_thresholds
from flashmoe_tools.bench.verdict import decide
from flashmoe_tools.operations import Problem

Blocks = list[list[int]]


@dataclass(frozen=True)
class CeilingRates:
    """TFLOP/s of a matrix product by dtype, GB/s of a copy (read plus written)."""

    matmul_tflops: Mapping[str, float]
    copy_gbps: float


def timing_summary(case: Problem, blocks: Blocks, ceilings: CeilingRates | None) -> dict[str, Any]:
    """Median with interval (us), tails, TFLOP/s, GB/s and the shares of the measured ceilings."""
    found = locate(blocks, confidence=load_thresholds().verdict.confidence)
    interval = (found.interval.low, found.interval.high) if found.interval.low > 0 and found.blocks > 1 else None
    return {
        "median_us": found.median / 1e3,
        "interval_us": [found.interval.low / 1e3, found.interval.high / 1e3],
        "interval_method": found.interval.method,
        "mean_us": found.mean / 1e3,
        "p95_us": found.p95 / 1e3,
        "p99_us": found.p99 / 1e3,
        "min_us": found.minimum / 1e3,
        "spread": found.spread,
        "samples": found.samples,
        "blocks": found.blocks,
        **rates(case, found.median, interval, ceilings),
    }


def rates(
    case: Problem, median: float, interval: tuple[float, float] | None, ceilings: CeilingRates | None
) -> dict[str, Any]:
    """Rates that follow from a median and its interval (ns)."""
    tflops = case.flops / median / 1e3
    gbps = case.bytes_moved / median
    peak = ceilings.matmul_tflops.get(case.dtype) if ceilings else None
    return {
        "tflops": tflops,
        "tflops_interval": [case.flops / bound / 1e3 for bound in reversed(interval)] if interval else None,
        "gbps": gbps,
        "share_of_matmul": tflops / peak if peak else None,
        "share_of_copy": gbps / ceilings.copy_gbps if ceilings else None,
        "launch_bound": median / 1e3 < load_thresholds().speed.launch_bound_us,
    }


def compare_blocks(subject: str, baseline: str, left: Blocks, right: Blocks, work: float = 1.0) -> dict[str, Any]:
    """The paired comparison of two contenders of one cell, with its verdict.

    ``work``: the subject's number of operations divided by the baseline's.
    """
    scaled = right if work == 1.0 else [[round(sample * work) for sample in block] for block in right]
    ratio = paired_ratio(left, scaled, confidence=load_thresholds().verdict.confidence)
    decision = decide(ratio)
    return {
        "subject": subject,
        "baseline": baseline,
        "ratio": ratio.value,
        "interval": [ratio.interval.low, ratio.interval.high],
        "interval_method": ratio.interval.method,
        "standard_error": ratio.standard_error,
        "p_value": ratio.p_value,
        "cliffs_delta": ratio.cliffs_delta,
        "blocks": ratio.blocks,
        "lag_one": lag_one(log_ratios(left, scaled)),
        "verdict": decision.verdict.value,
        "reason": decision.reason.value,
        "advice": decision.advice,
    }


def pairs_to_compare(names: Sequence[str], ours: set[str], baseline: str) -> list[tuple[str, str]]:
    """Pairs (subject, baseline): ours against everything else; without ours, everything against the suite's baseline."""
    subjects = [name for name in names if name in ours]
    if subjects:
        return [(subject, other) for subject in subjects for other in names if other not in ours]
    base = baseline if baseline in names else (names[0] if names else "")
    return [(name, base) for name in names if name != base]


def summarise_cell(
    case: Problem,
    timings: Mapping[str, Blocks],
    ours: set[str],
    baseline: str,
    ceilings: CeilingRates | None,
    references: Mapping[str, Problem] = MappingProxyType({}),
) -> dict[str, Any]:
    """``{"timings": {name: summary}, "comparisons": [...]}`` of the contenders that have samples.

    ``references`` compute another problem than the case; their rates count that problem's work, and ratios are of
    rates.
    """
    measured = {name: blocks for name, blocks in timings.items() if blocks}
    problems = {name: references.get(name, case) for name in measured}
    comparisons = [
        compare_blocks(subject, base, measured[subject], measured[base], problems[subject].flops / problems[base].flops)
        for subject, base in pairs_to_compare(list(measured), ours, baseline)
    ]
    return {
        "summaries": {name: timing_summary(problems[name], blocks, ceilings) for name, blocks in measured.items()},
        "comparisons": comparisons,
    }


def aggregate(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Geometric mean of each (subject, baseline) ratio over the cells, its worst cell, and the count of each verdict."""
    grouped: dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for cell in cells:
        for row in cell["comparisons"]:
            grouped.setdefault((row["subject"], row["baseline"]), []).append((cell["case"]["key"], row))
    return [_aggregate_row(subject, base, rows) for (subject, base), rows in grouped.items()]


def _aggregate_row(subject: str, baseline: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    ratios = [ratio_from_json(row) for _, row in rows]
    value, interval = geometric_mean(ratios)
    worst_key, worst = min(rows, key=lambda item: float(item[1]["ratio"]))
    verdicts = [row["verdict"] for _, row in rows]
    return {
        "subject": subject,
        "baseline": baseline,
        "geometric_mean": value,
        "interval": [interval.low, interval.high if math.isfinite(interval.high) else None],
        "worst": worst["ratio"],
        "worst_case": worst_key,
        "cells": len(rows),
        "verdicts": {word: verdicts.count(word) for word in sorted(set(verdicts))},
    }


def ratio_from_json(row: Mapping[str, Any]) -> Ratio:
    """The ratio in a JSON row. JSON cannot represent infinity, so a bound or error of None means unbounded."""
    low, high = row["interval"]
    error = row["standard_error"]
    return Ratio(
        value=row["ratio"],
        interval=Interval(0.0 if low is None else low, math.inf if high is None else high, row["interval_method"]),
        standard_error=math.inf if error is None else error,
        p_value=row["p_value"],
        cliffs_delta=row["cliffs_delta"],
        blocks=row["blocks"],
    )


def speed_word(ratio: float, thresholds: Thresholds | None = None) -> str:
    """What to do about a speedup: ``stop``, ``caution``, ``go on`` or ``next bottleneck``."""
    speed = (thresholds or load_thresholds()).speed
    if ratio < speed.stop:
        return "stop"
    if ratio < speed.caution:
        return "caution"
    return "next bottleneck" if ratio > speed.next_bottleneck else "go on"
