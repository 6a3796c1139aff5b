"""Small answers of the benchmark's harness: an interval that is missing, a clock, a size, a word at its edge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_tools.bench import ceilings, compare, models, page, summary, telemetry
from flashmoe_tools.bench.markdown import ratio_text
from flashmoe_tools.bench.statistics import Interval
from flashmoe_tools.bench.thresholds import load_thresholds
from flashmoe_tools.report import Report, host_environment, utc_now

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


@pytest.mark.parametrize("interval", [(None, None), (0.0, 2.0), (1.0, 2.0)])
def test_the_reach_of_an_interval_that_is_none(interval: tuple[float | None, float | None]) -> None:
    cell = {"comparisons": [], "summaries": {"flashmoe": {"median_us": 4.0, "interval_us": interval, "blocks": 7}}}
    value, reach, blocks = compare._speed(cell, "flashmoe", "")
    assert (value, blocks) == (0.25, 7)
    assert reach == (pytest.approx(0.34657359) if interval[0] else float("inf"))


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
    """Of one block, or one that reaches to no time at all."""
    numbers = dict.fromkeys(("median", "mean", "p95", "p99", "minimum", "spread", "samples"), 2000.0)
    found = SimpleNamespace(interval=Interval(low, 3000.0, "t"), blocks=blocks, **numbers)
    monkeypatch.setattr(summary, "locate", lambda *_, **__: found)
    monkeypatch.setattr(summary, "rates", lambda case, median, interval, ceilings: {"given": interval})
    told = summary.timing_summary(None, None, None)  # type: ignore[arg-type]
    assert told["given"] == ((low, 3000.0) if has_interval else None)
    assert told["interval_us"] == [low / 1e3, 3.0]


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
    """From the ratio down to the interval's beginning and up to its end; none where there is no interval."""
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
