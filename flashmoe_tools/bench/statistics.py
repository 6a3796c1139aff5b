"""Numbers from samples: medians, bootstrap intervals over blocks, paired ratios. Uses neither torch nor a clock.

A block holds a few samples of each contender, taken close together in an order drawn at random for that block. Slow
changes (clocks, temperature, a neighbour) affect both sides of a block alike and cancel in its ratio. Because the order
is random, under "no difference" each block's log ratio is as likely positive as negative, whatever the noise does over
time. The sign-based test relies only on that; the bootstrap interval says how large the difference is.
"""

import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped,unused-ignore]

from flashmoe_tools.bench.thresholds import StatisticsSettings, load_thresholds

Array = NDArray[np.float64]
Blocks = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Interval:
    low: float
    high: float
    method: str

    def inside(self, low: float, high: float) -> bool:
        return low <= self.low and self.high <= high


@dataclass(frozen=True)
class Location:
    """Median and spread of one contender's samples (in their unit)."""

    median: float
    interval: Interval
    mean: float
    p95: float
    p99: float
    minimum: float
    spread: float  # interquartile range / median
    samples: int
    blocks: int


@dataclass(frozen=True)
class Ratio:
    """Baseline time / subject time over paired blocks: above 1 the subject is faster."""

    value: float
    interval: Interval
    standard_error: float  # of log(value)
    p_value: float
    cliffs_delta: float  # P(subject below baseline) - P(above), over all pairs of samples
    blocks: int


def locate(blocks: Blocks, settings: StatisticsSettings | None = None, confidence: float = 0.95) -> Location:
    """Median of all samples; its interval resamples complete blocks, because samples within one are not independent."""
    settings = settings or load_thresholds().statistics
    samples = np.concatenate([np.asarray(block, dtype=np.float64) for block in blocks])
    medians = np.asarray([np.median(np.asarray(block, dtype=np.float64)) for block in blocks])
    interval, _ = bootstrap_interval(medians, np.median, confidence, settings)
    quartiles = np.percentile(samples, [25, 50, 75, 95, 99])
    return Location(
        median=float(quartiles[1]),
        interval=interval,
        mean=float(samples.mean()),
        p95=float(quartiles[3]),
        p99=float(quartiles[4]),
        minimum=float(samples.min()),
        spread=float((quartiles[2] - quartiles[0]) / quartiles[1]) if quartiles[1] else 0.0,
        samples=len(samples),
        blocks=len(blocks),
    )


def log_ratios(subject: Blocks, baseline: Blocks) -> Array:
    """log(median of the baseline's samples / median of the subject's) for each block; complete pairs of blocks only."""
    pairs = zip(subject, baseline, strict=False)
    return np.asarray(
        [math.log(float(np.median(base)) / float(np.median(sub))) for sub, base in pairs], dtype=np.float64
    )


def paired_ratio(
    subject: Blocks, baseline: Blocks, settings: StatisticsSettings | None = None, confidence: float = 0.95
) -> Ratio:
    """How many times faster the subject is, from interleaved blocks. Needs at least one pair of blocks."""
    settings = settings or load_thresholds().statistics
    logs = log_ratios(subject, baseline)
    interval, error = bootstrap_interval(logs, trimmed_mean(settings.trim), confidence, settings)
    return Ratio(
        value=math.exp(float(stats.trim_mean(logs, settings.trim))),
        interval=Interval(math.exp(interval.low), math.exp(interval.high), interval.method),
        standard_error=error,
        p_value=signed_rank_p(logs),
        cliffs_delta=cliffs_delta(
            np.concatenate([np.ravel(b) for b in subject]), np.concatenate([np.ravel(b) for b in baseline])
        ),
        blocks=len(logs),
    )


def trimmed_mean(share: float) -> Any:
    def statistic(values: Array, axis: int = -1) -> Any:
        return stats.trim_mean(values, share, axis=axis)

    return statistic


def bootstrap_interval(
    values: Array, statistic: Any, confidence: float, settings: StatisticsSettings
) -> tuple[Interval, float]:
    """(BCa interval, standard error) of ``statistic`` over ``values``.

    If BCa is undefined (all values equal, or a jackknife without variance), the percentile interval is used and the
    interval's ``method`` says so. A single value gets an infinite interval.
    """
    if len(values) < 2:
        return Interval(-math.inf, math.inf, "none"), math.inf
    if np.ptp(values) == 0.0:
        return Interval(float(values[0]), float(values[0]), "constant"), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy's DegenerateDataWarning: handled below
        result = stats.bootstrap(
            (values,),
            statistic,
            confidence_level=confidence,
            n_resamples=settings.resamples,
            method="BCa",
            vectorized=True,
            **seeded(settings.seed),
        )
    low, high = (float(bound) for bound in result.confidence_interval)
    if math.isfinite(low) and math.isfinite(high):
        return Interval(low, high, "BCa"), float(result.standard_error)
    tail = 100.0 * (1.0 - confidence) / 2.0
    low, high = (float(bound) for bound in np.percentile(result.bootstrap_distribution, [tail, 100.0 - tail]))
    return Interval(low, high, "percentile"), float(result.standard_error)


def seeded(seed: int) -> dict[str, Any]:
    """scipy's argument for a random generator: ``rng`` since 1.15, ``random_state`` before."""
    word = "rng" if "rng" in inspect.signature(stats.bootstrap).parameters else "random_state"
    return {word: np.random.default_rng(seed)}


def signed_rank_p(logs: Array) -> float:
    """Two-sided Wilcoxon signed-rank p-value of "the log ratios are symmetric about zero"; 1 when all are zero."""
    moved = logs[logs != 0.0]
    if len(moved) == 0:
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ties with the exact method: the normal approximation is used
        return float(stats.wilcoxon(moved).pvalue)


def cliffs_delta(subject: Array, baseline: Array) -> float:
    """P(subject < baseline) - P(subject > baseline): 1 when every subject sample is below every baseline sample."""
    if len(subject) == 0 or len(baseline) == 0:
        return 0.0
    order = np.sort(baseline)
    above = len(order) - np.searchsorted(order, subject, side="right")
    below = np.searchsorted(order, subject, side="left")
    return float((above.sum() - below.sum()) / (len(subject) * len(baseline)))


def geometric_mean(ratios: Sequence[Ratio], confidence: float = 0.95) -> tuple[float, Interval]:
    """Geometric mean of independent ratios and its normal interval in log space."""
    logs = [math.log(ratio.value) for ratio in ratios]
    error = math.sqrt(sum(ratio.standard_error**2 for ratio in ratios)) / len(ratios)
    width = float(stats.norm.ppf(0.5 + confidence / 2.0)) * error
    centre = sum(logs) / len(logs)
    return math.exp(centre), Interval(math.exp(centre - width), math.exp(centre + width), "normal")


def lag_one(values: Array) -> float:
    """Autocorrelation of successive values; 0 for fewer than three values or constant ones."""
    if len(values) < 3 or np.ptp(values) == 0.0:
        return 0.0
    centred = values - values.mean()
    return float((centred[1:] * centred[:-1]).sum() / (centred**2).sum())
