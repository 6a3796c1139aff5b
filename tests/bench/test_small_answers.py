"""Small functions of the benchmark harness: a missing interval, a clock, a size, words at an edge."""

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench import (
    ceilings,
    cli,
    compare,
    models,
    page,
    ratchet,
    runner,
    suites,
    summaries,
    summary,
    telemetry,
)
from flashmoe_tools.bench.markdown import ratio_text
from flashmoe_tools.bench.statistics import Interval
from flashmoe_tools.bench.thresholds import load_thresholds
from flashmoe_tools.report import Report, Verdict, host_environment, utc_now, write_report
from tests.bench.synthetic import synthetic_report

ROW = {"subject": "flashmoe", "ratio": 1.25, "verdict": "FASTER"}


@pytest.mark.parametrize("interval", [(1.2, 1.3), (1.2, None), (None, None)])
def test_a_ratio_without_an_interval(interval: tuple[float | None, float | None]) -> None:
    text = ratio_text({**ROW, "interval": interval})
    assert text.startswith("1.250 [1.200, 1.300]" if None not in interval else "1.250 ")
    assert ("[" in text) is (None not in interval)
    assert ratio_text(None) == "-"


@pytest.mark.parametrize(
    ("interval", "words"), [((1.2, 1.3), "1.250 [1.200, 1.300]"), ((None, None), "1.250 [no interval]")]
)
def test_a_change_without_an_interval_in_markdown(interval: tuple[float | None, float | None], words: str) -> None:
    change = {"case": "c", "subject": "flashmoe", "against": None, "interval": interval, "value": 1.25}
    data = {"changes": [{**change, "verdict": "FASTER", "reason": "r"}]}
    report = Report("compare", (), data, host_environment(), (), utc_now())
    assert f"| raw time | {words} |" in compare.compare_markdown(report)


@pytest.mark.parametrize("interval", [(None, None), (0.0, 2.0), (1.0, None), (1.0, 2.0)])
def test_the_reach_of_an_interval_that_is_none(interval: tuple[float | None, float | None]) -> None:
    cell = {"comparisons": [], "summaries": {"flashmoe": {"median_us": 4.0, "interval_us": interval, "blocks": 7}}}
    value, reach, blocks = compare._speed(cell, "flashmoe", "")
    assert (value, blocks) == (0.25, 7)
    assert reach == (pytest.approx(0.34657359) if all(interval) else float("inf"))


@pytest.mark.parametrize(
    ("low", "high", "reason"),
    [(0.5, 2.0, "INTERVAL_SPANS_ONE"), (1.0, 2.0, "INTERVAL_SPANS_ONE"), (0.5, 1.0, "INTERVAL_SPANS_ONE"),
     (1.001, 1.9, "INSIDE_RUN_MARGIN"), (0.6, 0.999, "INSIDE_RUN_MARGIN")],
)  # fmt: skip
def test_why_a_change_is_not_decided(low: float, high: float, reason: str) -> None:
    interval, limits = Interval(low, high, "t"), load_thresholds().compare
    assert compare.decide_change(interval, 20, 5, 0.05, limits).reason.name == reason


@pytest.mark.parametrize(("low", "blocks", "has_interval"), [(1000.0, 2, True), (0.0, 2, False), (1000.0, 1, False)])
def test_an_interval_that_says_nothing_gives_no_rates(
    monkeypatch: pytest.MonkeyPatch, low: float, blocks: int, has_interval: bool
) -> None:
    """An interval of one block, or one that reaches down to zero time."""
    numbers = dict.fromkeys(("median", "mean", "p95", "p99", "minimum", "spread", "samples"), 2000.0)
    found = SimpleNamespace(interval=Interval(low, 3000.0, "t"), blocks=blocks, **numbers)
    monkeypatch.setattr(summary, "locate", lambda *_, **__: found)
    monkeypatch.setattr(summary, "rates", lambda case, median, interval, ceilings: {"given": interval})
    message = summary.timing_summary(None, None, None)  # type: ignore[arg-type]
    assert message["given"] == ((low, 3000.0) if has_interval else None)
    assert message["interval_us"] == [low / 1e3, 3.0]


def test_the_bytes_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 64})
    monkeypatch.setattr(ceilings, "_times", lambda *_: [1])
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda n, **given: made.append(4 * n) or arange(n, **given))
    ceilings._copy("cpu")
    assert made == [64]


@pytest.mark.parametrize(("reading", "power"), [(None, 100.0), (SimpleNamespace(sm_clock=1500.0), None)])
def test_half_a_reading_is_none(reading: Any, power: float | None) -> None:
    half: Any = SimpleNamespace(read=lambda: reading, power_now=lambda: power)
    watch = telemetry.Watch(half)
    waits = iter((False, True))
    watch._done = SimpleNamespace(wait=lambda _: next(waits))  # type: ignore[assignment]
    watch._read()
    assert watch._readings == []


def test_the_two_kinds_of_model() -> None:
    transformers = pytest.importorskip("transformers")
    size = next(iter(models.SIZES.values()))
    assert isinstance(size.config("dense"), transformers.LlamaConfig)
    mixture = size.config("mixture")
    assert isinstance(mixture, transformers.Qwen3MoeConfig)
    assert mixture.num_experts == size.experts


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_the_dtype_of_a_model(monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype) -> None:
    given: list[Any] = []
    generation = SimpleNamespace()
    made = SimpleNamespace(generation_config=generation)
    factory = SimpleNamespace(from_config=lambda _, dtype: given.append(dtype) or made)
    monkeypatch.setattr(models, "import_module", lambda _: SimpleNamespace(AutoModelForCausalLM=factory))
    monkeypatch.setattr(models, "register", lambda: None)
    monkeypatch.setattr(torch, "device", lambda _: torch.no_grad())
    assert models.build(SimpleNamespace(config=lambda _: None), "dense", device) is made  # type: ignore[arg-type]
    assert given == [dtype]


def test_the_bars_of_a_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the ratio down to the interval's start and up to its end; none if there is no interval."""
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn: list[Any] = []
    original = Axes.errorbar

    def errorbar(self: Axes, *given: Any, yerr: Any, **look: Any) -> Any:
        drawn.append([list(part) for part in yerr])
        return original(self, *given, yerr=yerr, **look)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    rows = [{**ROW, "baseline": "sdpa", "interval": interval} for interval in ((1.0, 1.5), (None, None), (1.3, 1.4))]
    page.draw({"suite": {"title": "t"}, "cells": [{"comparisons": [row]} for row in rows]})
    ((below, above),) = drawn
    assert below == pytest.approx([0.25, 0.0, 0.0])
    assert above == pytest.approx([0.25, 0.0, 0.15])


@pytest.mark.parametrize("bounds", [(0.5, 2.0), (None, 2.0), (0.5, None)])
def test_a_ratio_that_json_cannot_say(bounds: tuple[float | None, float | None]) -> None:
    low, high = bounds
    row = {"ratio": 1.0, "interval": bounds, "interval_method": "t", "p_value": 0.5, "cliffs_delta": 0.0, "blocks": 3}
    read = summary.ratio_from_json({**row, "standard_error": low})
    assert read.interval == Interval(0.0 if low is None else low, math.inf if high is None else high, "t")
    assert read.standard_error == (math.inf if low is None else low)


def test_a_quick_run_has_the_quick_parts_and_all_where_none_is() -> None:
    workloads = tuple(SimpleNamespace(key=key) for key in "ab")
    cases = tuple(SimpleNamespace(key=key) for key in "cd")
    made = suites.Suite("mine", "", cases, workloads=workloads)  # type: ignore[arg-type]
    for keys, left in (("a", ("a", "cd")), ("d", ("ab", "d")), ("", ("ab", "cd")), ("bc", ("b", "c"))):
        quick = replace(made, quick_keys=frozenset(keys)).quick()
        assert ("".join(one.key for one in quick.workloads), "".join(one.key for one in quick.cases)) == left


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"gpu": {"name": "G"}, "processor": "P"}, "G"),
        ({"gpu": None, "processor": "P"}, "P"),
        ({"processor": "P"}, "P"),
    ],
)
def test_the_device_of_a_report(environment: dict[str, Any], message: str) -> None:
    here, other = (Report("bench", (), environment=given) for given in (environment, {"processor": "Q"}))
    (check,) = compare._environment_checks(here, other)
    assert (check.found, check.verdict) == (f"A on {message}, B on Q", Verdict.WARN)
    assert compare._environment_checks(here, here) == []


@pytest.mark.parametrize("table", [None, {}, {"matmul_tflops": {"f16": 7.0}, "copy_gbps": 3.0}])
def test_the_ceilings_of_a_summary(monkeypatch: pytest.MonkeyPatch, table: dict[str, Any] | None) -> None:
    monkeypatch.setattr(summaries, "_expanded", lambda cell, ceilings: ceilings)
    (found,) = summaries.expand(Report("bench", (), {"ceilings": table, "cells": [{}]})).data["cells"]
    assert found == (summaries.CeilingRates({"f16": 7.0}, 3.0) if table else None)


def test_warming_is_taken_from_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class PlannedError(Exception):
        pass

    def plan(repeats: int, block: int, costs: Any, left: float | None, *_: Any) -> None:
        raise PlannedError(left)

    monkeypatch.setattr(runner, "plan_samples", plan)
    monkeypatch.setattr(runner, "_warm", lambda *_: time.sleep(0.01) or (None, None, 1.0))
    monkeypatch.setattr(runner, "make_sampler", lambda *_, **__: SimpleNamespace(timing="wall", untimed=0))
    settings: Any = SimpleNamespace(device="cpu", timing="wall", flush_l2=False, repeats=3, block=1, floor=1)
    for left, after in ((None, None), (0.005, 0.0)):
        cell: Any = SimpleNamespace(case=SimpleNamespace(key="c"), timings={}, seconds_before_samples=0.0)
        entrant: Any = SimpleNamespace(contender=SimpleNamespace(name="a"))
        with pytest.raises(PlannedError) as caught:
            runner._measure(cell, [entrant], settings, None, left, lambda _: None)  # type: ignore[arg-type]
        assert caught.value.args == (after,)
        assert cell.seconds_before_samples >= 0.01


def test_a_summary_keeps_no_samples() -> None:
    report = synthetic_report()
    assert "samples" in report.data["ceilings"]
    kept = summaries.summarise_bench(report).data["ceilings"]
    assert kept == {name: report.data["ceilings"][name] for name in ("matmul_tflops", "copy_gbps")}


def test_a_rendered_report_is_held_against_marks_where_that_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(tmp_path / "a.json", synthetic_report())
    monkeypatch.setattr(ratchet, "check_ratchet", lambda *_: 7)
    words: Any = {"render": tmp_path / "a.json", "json": None, "markdown": None, "summary": None, "html": None}
    args = SimpleNamespace(**{**vars(parsed("--render", str(tmp_path / "a.json"))), **words})
    assert cli._render(args) == 0  # type: ignore[arg-type]
    assert "flashmoe" in capsys.readouterr().out
    args.ratchet = tmp_path
    assert cli._render(args) == 7  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


def test_a_suite_of_several_gpus_runs_alone() -> None:
    with pytest.raises(ArgumentError, match="a multi-GPU suite cannot be combined with other suites"):
        cli._measure_distributed(parsed(), [suites.load_suite("distributed")] * 2, "cuda")


def test_a_gpu_without_nvml_tells_nothing() -> None:
    silent = telemetry.Telemetry.__new__(telemetry.Telemetry)
    silent._handle = None
    assert (silent.busy(), silent.limits(), silent.power_now()) == (None, {}, None)


@pytest.mark.parametrize(
    ("interval", "given"), [([0.0, 5.0], None), ([None, None], None), ([4.0, None], None), ([4.0, 5.0], (4e3, 5e3))]
)
def test_an_interval_from_no_time_gives_no_rates(monkeypatch: pytest.MonkeyPatch, interval: Any, given: Any) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(summaries, "rates", lambda case, median, interval, ceilings: seen.append(interval) or {})
    report = summaries.summarise_bench(synthetic_report())
    for cell in report.data["cells"]:
        for found in cell["contenders"].values():
            found["interval_us"] = interval
    summaries.expand(report)
    assert seen
    assert set(seen) == {given}


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(words)
