"""How often a verdict is wrong, and how often a true change is found, on samples with known truth.

python -m tests.bench.figures --runs 2000 --json statistics.json
"""

import argparse
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from flashmoe_tools.bench.compare import decide_change, difference
from flashmoe_tools.bench.statistics import log_ratios, paired_ratio
from flashmoe_tools.bench.thresholds import load_thresholds
from flashmoe_tools.bench.verdict import decide
from flashmoe_tools.report import write_json
from tests.bench.synthetic import interleaved_samples


@dataclass(frozen=True)
class Scene:
    """One kind of measurement: ``change`` is the subject's true gain, the rest is the machine's behaviour."""

    name: str
    change: float
    blocks: int = 30
    block: int = 10
    sigma: float = 0.01
    drift: float = 0.1
    phi: float = 0.9


SCENES = (
    Scene("equal, white noise", 0.0, drift=0.0, phi=0.0),
    Scene("equal, drift 10% and a jump", 0.0, phi=0.0),
    Scene("equal, drift and autocorrelation 0.9", 0.0),
    Scene("equal, drift and autocorrelation 0.99", 0.0, phi=0.99),
    Scene("equal, noise 5%, drift, autocorrelation 0.9", 0.0, sigma=0.05),
    Scene("equal, 300 blocks of 1 (large problems), drift, autocorrelation 0.9", 0.0, blocks=300, block=1),
    Scene("equal, 10 blocks of 3 (time budget), drift, autocorrelation 0.9", 0.0, blocks=10, block=3),
    Scene("2% faster, drift and autocorrelation 0.9", 0.02),
    Scene("2% slower, drift and autocorrelation 0.9", -0.02),
    Scene("3% slower, drift and autocorrelation 0.9", -0.03),
    Scene("5% faster, drift and autocorrelation 0.9", 0.05),
    Scene("2% faster, noise 5%, 30 blocks of 10, autocorrelation 0.99", 0.02, sigma=0.05, phi=0.99),
    Scene(
        "2% faster, noise 5%, 300 blocks of 1, autocorrelation 0.99", 0.02, blocks=300, block=1, sigma=0.05, phi=0.99
    ),
    Scene("2% faster, 10 blocks of 3", 0.02, blocks=10, block=3),
    Scene("5% faster, 10 blocks of 3", 0.05, blocks=10, block=3),
    Scene("2% faster, noise 5%", 0.02, sigma=0.05),
    Scene("5% faster, noise 5%", 0.05, sigma=0.05),
)


@dataclass(frozen=True)
class TwoRuns:
    """Two runs with 300 samples per contender; ``shift`` is the ratio's standard deviation between runs."""

    name: str
    change: float
    shift: float = 0.0
    blocks: int = 30
    block: int = 10
    sigma: float = 0.01
    drift: float = 0.1
    phi: float = 0.9


TWO_RUNS = (
    TwoRuns("two runs, equal", 0.0),
    TwoRuns("two runs, equal, ratios of runs 0.5% apart", 0.0, shift=0.005),
    TwoRuns("two runs, equal, ratios of runs 1% apart", 0.0, shift=0.01),
    TwoRuns("two runs, equal, noise 5%", 0.0, sigma=0.05),
    TwoRuns("two runs, equal, noise 5%, 300 blocks of 1", 0.0, blocks=300, block=1, sigma=0.05),
    TwoRuns("two runs, 3% slower, ratios of runs 0.25% apart", -0.03, shift=0.0025),
    TwoRuns("two runs, 5% slower, ratios of runs 0.25% apart", -0.05, shift=0.0025),
)


def two_run_shares(scene: TwoRuns, runs: int, seed: int = 7) -> dict[str, float]:
    """Share of ``runs`` simulated pairs of runs that end in each verdict of `bench --compare`."""
    rng = np.random.default_rng(seed)
    limits = load_thresholds()
    counts: Counter[str] = Counter()
    for _ in range(runs):
        logs = [
            log_ratios(
                *interleaved_samples(
                    (1.0 + change) * float(np.exp(rng.normal(0.0, scene.shift))) - 1.0,
                    rng,
                    blocks=scene.blocks,
                    block=scene.block,
                    sigma=scene.sigma,
                    drift=scene.drift,
                    phi=scene.phi,
                )
            )
            for change in (0.0, scene.change)
        ]
        _, interval = difference(logs[0], logs[1], limits.verdict.confidence, limits.statistics)
        margin = limits.compare.normalised_margin
        counts[
            decide_change(interval, scene.blocks, limits.verdict.min_blocks, margin, limits.compare).verdict.value
        ] += 1
    return {word: counts[word] / runs for word in ("FASTER", "SLOWER", "SAME", "AMBIGUOUS")}


def verdict_shares(scene: Scene, runs: int, seed: int = 7) -> dict[str, float]:
    """Share of ``runs`` simulated measurements that end in each verdict, and of intervals that hold the truth."""
    rng = np.random.default_rng(seed)
    counts: Counter[str] = Counter()
    for _ in range(runs):
        subject, baseline = interleaved_samples(
            scene.change,
            rng,
            blocks=scene.blocks,
            block=scene.block,
            sigma=scene.sigma,
            drift=scene.drift,
            phi=scene.phi,
        )
        ratio = paired_ratio(subject, baseline)
        counts[decide(ratio).verdict.value] += 1
        counts["covered"] += ratio.interval.low <= 1.0 + scene.change <= ratio.interval.high
    return {word: counts[word] / runs for word in ("FASTER", "SLOWER", "SAME", "AMBIGUOUS", "covered")}


def main() -> int:
    """Writes the figures of every scene as JSON and prints them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    for scene in SCENES:
        shares = verdict_shares(scene, arguments.runs)
        rows.append({**asdict(scene), "samples_a_side": scene.blocks * scene.block, **shares})
        print(f"{scene.name}: {shares}", flush=True)
    for pair in TWO_RUNS:
        shares = two_run_shares(pair, arguments.runs)
        rows.append({**asdict(pair), "samples_a_side": pair.blocks * pair.block, **shares})
        print(f"{pair.name}: {shares}", flush=True)
    write_json(arguments.json, {"schema": "flashmoe.bench-figures/1", "runs": arguments.runs, "scenes": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
