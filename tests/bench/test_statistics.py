"""The statistics against samples with known truth, and against their definitions."""

import math

import numpy as np
import pytest

from flashmoe_tools.bench.plan import block_orders, plan_samples, share_of_budget
from flashmoe_tools.bench.statistics import (
    Interval,
    Ratio,
    cliffs_delta,
    geometric_mean,
    lag_one,
    locate,
    paired_ratio,
    signed_rank_p,
)
from flashmoe_tools.bench.suites import load_suite
from flashmoe_tools.bench.summary import CeilingRates, timing_summary
from flashmoe_tools.bench.verdict import Reason, Speed, decide
from tests.bench.figures import SCENES, TWO_RUNS, Scene, TwoRuns, two_run_shares, verdict_shares

RUNS = 240
# With RUNS draws at a true rate of 5%, more than this many occur less than once in a thousand.
MOST_FALSE = 25


@pytest.mark.parametrize("scene", [one for one in SCENES if one.change == 0.0], ids=lambda scene: scene.name)
def test_equal_contenders_are_rarely_told_apart(scene: Scene) -> None:
    runs, most = (RUNS, MOST_FALSE) if scene.blocks <= 30 else (RUNS // 6, MOST_FALSE // 3)  # many blocks: slow to draw
    shares = verdict_shares(scene, runs)
    assert (shares["FASTER"] + shares["SLOWER"]) * runs <= most


@pytest.mark.parametrize("change", [0.02, -0.02, 0.05, -0.03])
def test_true_changes_are_found_and_have_the_right_sign(change: float) -> None:
    shares = verdict_shares(Scene("changed", change), 40)
    assert shares["FASTER" if change > 0 else "SLOWER"] >= 0.95
    assert shares["SLOWER" if change > 0 else "FASTER"] == 0.0
    assert shares["covered"] >= 0.8


def test_unpaired_order_would_be_fooled_by_the_same_drift() -> None:
    """The simulated machine is hostile enough to matter: samples of one side, then of the other, differ."""
    from tests.bench.synthetic import machine_noise

    rng = np.random.default_rng(3)
    fooled = 0
    for _ in range(40):
        noise = np.exp(machine_noise(600, rng, sigma=0.01, drift=0.1, phi=0.9)) * 100.0
        fooled += decide(paired_ratio(noise[:300].reshape(30, 10), noise[300:].reshape(30, 10))).verdict in (
            Speed.FASTER,
            Speed.SLOWER,
        )
    assert fooled >= 35


def ratio(value: float, low: float, high: float, p: float = 0.001, blocks: int = 30) -> Ratio:
    return Ratio(value, Interval(low, high, "BCa"), 0.01, p, 0.0, blocks)


@pytest.mark.parametrize(
    ("measured", "verdict", "reason"),
    [
        (ratio(2.0, 1.9, 2.1, blocks=3), Speed.AMBIGUOUS, Reason.FEW_BLOCKS),
        (ratio(1.002, 1.001, 1.003), Speed.SAME, Reason.INSIDE_MARGIN),
        (ratio(1.0, 0.98, 1.02), Speed.AMBIGUOUS, Reason.INTERVAL_SPANS_ONE),
        (ratio(1.03, 1.01, 1.05, p=0.2), Speed.AMBIGUOUS, Reason.TEST_DISAGREES),
        (ratio(1.03, 1.01, 1.05), Speed.FASTER, Reason.INTERVAL_EXCLUDES_ONE),
        (ratio(0.97, 0.95, 0.985), Speed.SLOWER, Reason.INTERVAL_EXCLUDES_ONE),
        (ratio(1.3, 1.2, 1.4), Speed.FASTER, Reason.LARGE_GAIN),
        (ratio(0.7, 0.6, 0.8), Speed.SLOWER, Reason.LARGE_GAIN),
        (ratio(1.3, -math.inf, math.inf), Speed.AMBIGUOUS, Reason.INTERVAL_SPANS_ONE),
    ],
)
def test_a_verdict_is_undecided_until_shown(measured: Ratio, verdict: Speed, reason: Reason) -> None:
    decision = decide(measured)
    assert (decision.verdict, decision.reason) == (verdict, reason)
    if verdict is Speed.AMBIGUOUS:
        assert "measure more" in decision.advice


def test_location_is_the_median_with_its_tails() -> None:
    samples = np.arange(1.0, 301.0).reshape(30, 10)
    place = locate(samples.tolist())
    assert place.median == pytest.approx(150.5)
    assert place.p95 == pytest.approx(np.percentile(samples, 95))
    assert place.p99 == pytest.approx(np.percentile(samples, 99))
    assert place.interval.low < 150.5 < place.interval.high
    assert (place.samples, place.blocks, place.minimum) == (300, 30, 1.0)


def test_one_disturbed_block_moves_nothing() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(100, 0.5, (30, 10))
    ours = rng.normal(80, 0.5, (30, 10))
    ours[7] *= 40
    found = paired_ratio(ours.tolist(), base.tolist())
    assert found.value == pytest.approx(1.25, rel=0.005)
    assert decide(found).verdict is Speed.FASTER


def test_degenerate_samples_do_not_break_anything() -> None:
    same = [[5.0, 5.0]] * 12
    found = paired_ratio(same, same)
    assert (found.value, found.p_value, found.interval.method) == (1.0, 1.0, "constant")
    assert decide(found).verdict is Speed.SAME
    single = paired_ratio([[4.0]], [[8.0]])
    assert single.value == pytest.approx(2.0)
    assert decide(single).reason is Reason.FEW_BLOCKS
    two_values = locate([[1.0], [1.0], [1.0], [2.0]])
    assert math.isfinite(two_values.interval.low)


def test_an_unfinished_pair_of_blocks_is_left_out() -> None:
    assert paired_ratio([[1.0]] * 10, [[2.0]] * 9).blocks == 9


def test_cliffs_delta_by_its_definition() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 9, 40).astype(float), rng.integers(2, 9, 30).astype(float)
    expected = np.mean([np.sign(y - x) for x in a for y in b])
    assert cliffs_delta(a, b) == pytest.approx(float(expected))
    assert cliffs_delta(a, a + 100) == 1.0
    assert cliffs_delta(np.array([]), b) == 0.0


def test_signed_rank_and_autocorrelation() -> None:
    assert signed_rank_p(np.zeros(10)) == 1.0
    assert signed_rank_p(np.linspace(0.1, 1.0, 10)) == pytest.approx(2 / 2**10)
    assert lag_one(np.array([1.0, 1.0, 1.0])) == 0.0
    assert lag_one(np.sin(np.linspace(0, 3, 60))) > 0.8
    assert lag_one(np.array([1.0, -1.0] * 20)) < -0.8


def test_geometric_mean_interval() -> None:
    value, interval = geometric_mean([ratio(2.0, 1.9, 2.1), ratio(0.5, 0.4, 0.6)])
    assert value == pytest.approx(1.0)
    assert interval.high == pytest.approx(math.exp(1.959964 * 0.01 * math.sqrt(2) / 2), rel=1e-6)


def test_sampling_plans() -> None:
    assert plan_samples(300, 10, [0.1, 0.1], None).samples == 300
    short = plan_samples(300, 10, [0.01, 0.01], 2.0)
    assert (short.blocks, short.block) == (10, 10)
    least = plan_samples(300, 10, [0.01, 0.01], 0.0)
    assert (least.samples, least.blocks) == (30, 10)
    slow = plan_samples(300, 10, [0.1, 0.1], 0.0, untimed=1)
    assert (slow.samples, slow.blocks) == (10, 10)
    assert plan_samples(5, 10, [1.0], None).samples == 5
    assert share_of_budget(None, 3.0, [1.0]) is None
    assert share_of_budget(100.0, 40.0, [1.0] * 6) == pytest.approx(10.0)
    assert share_of_budget(100.0, 140.0, [1.0]) == 0.0
    small, large = share_of_budget(100.0, 0.0, [1.0, 9.0]), share_of_budget(100.0, 0.0, [9.0, 1.0])
    assert small is not None
    assert large is not None
    assert 10.0 < small < large < 90.0
    assert small + large == pytest.approx(100.0)
    assert share_of_budget(100.0, 40.0, [1.0] * 6, 8.0) == pytest.approx(10.0)
    assert share_of_budget(100.0, 40.0, [1.0] * 6, 80.0) == pytest.approx(10.0)
    late, early = share_of_budget(100.0, 0.0, [1.0, 9.0], 20.0), share_of_budget(100.0, 0.0, [9.0, 1.0], 20.0)
    assert late is not None
    assert early is not None
    assert (late - 20.0) / (early - 20.0) == pytest.approx(small / large)
    assert late + early == pytest.approx(100.0)


def test_orders_are_drawn_block_by_block() -> None:
    orders = block_orders(["a", "b", "c"], 600, seed=1)
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    first = [order[0] for order in orders]
    assert all(150 < first.count(name) < 250 for name in "abc")
    assert orders != block_orders(["a", "b", "c"], 600, seed=2)
    assert orders == block_orders(["a", "b", "c"], 600, seed=1)


@pytest.mark.parametrize("scene", TWO_RUNS, ids=lambda scene: scene.name)
def test_two_runs_of_one_thing_are_rarely_told_apart_and_a_change_is_found(scene: TwoRuns) -> None:
    shares = two_run_shares(scene, 30)
    assert shares["FASTER"] <= 0.1
    if scene.change < -0.04:
        assert shares["SLOWER"] >= 0.9
    elif scene.change == 0.0:
        assert shares["SLOWER"] <= 0.1


def test_shares_and_intervals_are_stated_where_they_are_known() -> None:
    case = load_suite("science").cases[0]
    ceilings = CeilingRates({case.dtype: 100.0}, 1000.0)
    known = timing_summary(case, [[1_000_000, 1_100_000], [1_050_000, 1_000_000]] * 4, ceilings)
    assert known["share_of_matmul"] == pytest.approx(known["tflops"] / 100)
    assert len(known["tflops_interval"]) == 2
    assert timing_summary(case, [[1_000_000, 1_100_000]], None)["tflops_interval"] is None
    assert timing_summary(case, [[1_000_000, 1_100_000]], CeilingRates({}, 1000.0))["share_of_matmul"] is None
