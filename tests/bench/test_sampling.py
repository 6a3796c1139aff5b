"""How samples are taken, with an artificial clock and GPU, and options that are not possible.

Tests what is waited for, overwritten, and divided by what.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench import runner, sampling
from flashmoe_tools.bench.cli import fit_suite, merge, only_cases, only_dtypes, resolve_device
from flashmoe_tools.bench.contenders import setting
from flashmoe_tools.bench.runner import Cell, Settings, Telemetry, _Entrant, _measure, _warm
from flashmoe_tools.bench.sampling import (
    FLUSH_BYTES,
    GRAPH_CALLS,
    GRAPH_SECONDS,
    SUSTAINED_SECONDS,
    EventSampler,
    GraphSampler,
    SustainedSampler,
    WallSampler,
    call_time_ns,
    graph_calls,
    make_sampler,
    peak_bytes,
    warm_up,
)
from flashmoe_tools.bench.stopping import stop_signals
from flashmoe_tools.bench.suites import BUILD_COST, SuiteError, load_suite
from flashmoe_tools.bench.telemetry import Load
from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention.problem import AttentionProblem
from tests.bench.test_record import _options as options


class FakeGpu:
    """A queue whose clock advances when something is queued, in milliseconds; graphs replay what they recorded."""

    def __init__(self) -> None:
        self.now, self.recording, self.log = 0.0, [], list[str]()
        self.is_recording = False

    def work(self, milliseconds: float) -> Callable[[], None]:
        def call() -> None:
            if self.is_recording:
                self.recording.append(milliseconds)
                return
            self.log.append("call")
            self.now += milliseconds

        return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = fake.now

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class Graph:
        def __init__(self) -> None:
            self.milliseconds = 0.0

        def replay(self) -> None:
            fake.log.append("replay")
            fake.now += self.milliseconds

    @contextmanager
    def graph(target: Graph, stream: Any) -> Iterator[None]:
        assert stream is sampling.capture_stream()
        fake.is_recording, fake.recording = True, []
        yield
        target.milliseconds, fake.is_recording = sum(fake.recording), False

    stream = SimpleNamespace(wait_stream=lambda _: fake.log.append("wait for stream"))
    monkeypatch.setattr(sampling, "_cuda", SimpleNamespace(Event=Event))
    monkeypatch.setattr(sampling, "capture_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.log.append("wait"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return fake


@pytest.mark.parametrize("flush", [False, True])
def test_events_time_each_call_alone_behind_one_that_counts_for_nothing(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, flush: bool
) -> None:
    def empty(count: int, **given: Any) -> Any:
        assert (4 * count, given["dtype"]) == (FLUSH_BYTES, torch.int32)
        return SimpleNamespace(zero_=lambda: gpu.log.append("flush") or setattr(gpu, "now", gpu.now + 50.0))

    monkeypatch.setattr(torch, "empty", empty)
    sampler = EventSampler(flush=flush)
    call = gpu.work(2.0)
    assert sampler.slot(sampler.prepare(call), 3) == [2_000_000] * 3
    assert gpu.log == ["call", *(["flush"] * flush + ["call"]) * 3, "wait"]
    assert FLUSH_BYTES == 2**28


def test_a_graph_is_divided_by_its_calls(gpu: FakeGpu) -> None:
    sampler = GraphSampler()
    for milliseconds, calls in ((0.1, GRAPH_CALLS), (1.0, 5), (9.0, 1)):
        prepared = sampler.prepare(gpu.work(milliseconds))
        assert prepared[1] == calls
        gpu.log.clear()
        assert sampler.slot(prepared, 2) == [round(1e6 * milliseconds)] * 2
        assert gpu.log == ["replay"] * 3 + ["wait"]
    assert graph_calls(0.0) == GRAPH_CALLS
    assert graph_calls(GRAPH_SECONDS) == 1


def test_sustained_load_is_a_time_of_calls_and_a_clock(gpu: FakeGpu) -> None:
    loads = iter([Load(1.0, 2.0), Load(3.0, 4.0)])

    class Watched:
        @contextmanager
        def watch(self) -> Iterator[Any]:
            yield SimpleNamespace(load=next(loads))

    sampler = SustainedSampler(Watched())  # type: ignore[arg-type]
    prepared = sampler.prepare(gpu.work(1.0))
    assert prepared[1:] == (5, round(SUSTAINED_SECONDS / 0.005))
    gpu.log.clear()
    assert sampler.slot(prepared, 2) == [1_000_000] * 2
    assert sampler.load == [Load(1.0, 2.0), Load(3.0, 4.0)]
    assert gpu.log == (["replay"] * (1 + prepared[2]) + ["wait"]) * 2
    assert sampler.prepare(gpu.work(1000.0))[2] == 1


def test_the_sampler_of_each_kind_of_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, **__: "scratch")
    kinds = {"events": EventSampler, "graph": GraphSampler, "sustained": SustainedSampler, "wall": WallSampler}
    for timing, kind in kinds.items():
        assert type(make_sampler("cuda", timing, flush=False)) is kind
        assert type(make_sampler("cpu", timing, flush=False)) is WallSampler
    telemetry = Telemetry("a reason")
    made: Any = make_sampler("cuda", "sustained", flush=False, telemetry=telemetry)
    assert made._telemetry is telemetry
    with made._telemetry.watch() as watch:
        pass
    assert watch.load == Load(None, None)
    flushing: Any = make_sampler("cuda", "events", flush=True)
    assert flushing._scratch == "scratch"


@pytest.mark.parametrize(("device", "waits"), [("cpu", []), ("cuda", ["wait"])])
def test_cpu_time_begins_with_an_empty_queue(gpu: FakeGpu, device: str, waits: list[str]) -> None:
    assert len(call_time_ns(gpu.work(1.0), device, 3)) == 3
    assert gpu.log == [*waits, *["call"] * 3, *waits]


def test_peak_memory_is_what_a_call_adds(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: gpu.log.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 130)
    assert peak_bytes(gpu.work(1.0), "cuda") == 30
    assert gpu.log == ["wait", "reset", "call", "wait"]
    assert peak_bytes(gpu.work(1.0), "cpu") is None


@pytest.mark.parametrize(("untimed", "cost"), [(0, 2.0), (1, 1.0)])
def test_warming_ends_with_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch, untimed: int, cost: float) -> None:
    now, slots = [0.0], []
    monkeypatch.setattr(sampling, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slot(_: Any, count: int) -> None:
        slots.append(count)
        now[0] += 2.0

    sampler: Any = SimpleNamespace(untimed=untimed, slot=slot)
    assert warm_up(sampler, None, 6.0) == cost
    assert slots == [1] * 3
    assert warm_up(sampler, None, 0.0) == cost
    assert len(slots) == 5


# The runner with such a sampler


def _settings(**changes: Any) -> Settings:
    return Settings(
        **{"device": "cpu", "timing": "wall", "repeats": 10, "block": 1, "flush_l2": False, "seed": 0, "floor": 1}
        | changes
    )


def _entrant(name: str, call: Callable[[], Any]) -> Any:
    contender = SimpleNamespace(name=name, ours=False, context=nullcontext)
    return _Entrant(contender, SimpleNamespace(call=call))  # type: ignore[arg-type]


def test_memory_that_ends_while_warming_is_of_the_case() -> None:
    case = AttentionProblem(16, 16, 16, 1, 1, 1, False, "f32")
    cell = Cell(case, verified={"a": Verification(True, 0.0, 1.0, None, 0.0, "")})

    def full() -> None:
        msg = "full"
        raise torch.OutOfMemoryError(msg)

    with pytest.raises(torch.OutOfMemoryError):
        _measure(cell, [_entrant("a", full)], _settings(), Telemetry(""), None, lambda _: None)
    assert cell.unsupported == {}


@pytest.mark.parametrize(("share", "left"), [(None, None), (8.0, 5.0), (4.0, 1.0), (2.0, 0.5)])
def test_samples_get_what_checking_has_left_but_a_quarter(
    monkeypatch: pytest.MonkeyPatch, share: float | None, left: float | None
) -> None:
    now, seen = iter((0.0, 3.0, 4.0)), []
    monkeypatch.setattr(runner.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(runner, "_admit", lambda *_: ["an entrant"])
    monkeypatch.setattr(runner, "_measure", lambda *given: seen.append(given[4]))
    cell = Cell(AttentionProblem(16, 16, 16, 1, 1, 1, False, "f32"))
    runner.run_cell(cell, [], _settings(), Telemetry(""), share, lambda _: None)
    assert seen == [left]
    assert (cell.seconds_before_samples, cell.seconds) == (3.0, 4.0)


def test_sustained_calls_are_warm_when_they_are_prepared(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
    monkeypatch.setattr("flashmoe_tools.bench.runner.peak_bytes", lambda *_: None)
    warmed: list[float] = []
    monkeypatch.setattr("flashmoe_tools.bench.runner.warm_up", lambda _, __, seconds: warmed.append(seconds) or 7.0)
    _, timing, cost = _warm(_entrant("a", gpu.work(1.0)), SustainedSampler(Telemetry("")), "cuda")
    assert (cost, warmed, len(timing.cpu_ns)) == (SUSTAINED_SECONDS, [], sampling.CPU_TIME_CALLS)
    _, timing, cost = _warm(_entrant("a", gpu.work(1.0)), WallSampler(), "cpu")
    assert (cost, warmed, timing.cpu_ns) == (7.0, [0.02], [])


def test_a_variable_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_VARIABLE", raising=False)
    for before in (None, "old"):
        if before:
            monkeypatch.setenv("SOME_VARIABLE", before)
        with setting("SOME_VARIABLE", "new")():
            assert os.environ["SOME_VARIABLE"] == "new"
        assert os.environ.get("SOME_VARIABLE") == before


def test_a_request_to_end_is_an_interruption_in_the_main_thread_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stop_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    seen: list[Any] = []

    def elsewhere() -> None:
        with stop_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


# Impossible options


def test_options_that_a_suite_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    science, cpu = load_suite("science"), load_suite("cpu")
    with pytest.raises(ArgumentError, match="--sustained follows a GPU's clock and power; this run is on cpu"):
        fit_suite(science, options("--sustained"), "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "unknown")
    for words, repeats in (((), 10), (("--repeats", "7"), 7)):
        found = fit_suite(science, options("--sustained", *words), "cuda")
        assert (found.timing, found.flush_l2, found.block, found.repeats) == ("sustained", False, 1, repeats)
    assert fit_suite(science, options("--repeats", "1"), "cpu").repeats == 1
    with pytest.raises(ArgumentError, match="--repeats 0: at least 1"):
        fit_suite(science, options("--repeats", "0"), "cpu")
    with pytest.raises(ArgumentError, match="suite cpu has no case of dtype bf17; it has "):
        only_dtypes(cpu, ["bf17"])
    dtype = cpu.cases[0].dtype
    assert {case.dtype for case in fit_suite(cpu, options("--dtype", dtype), "cpu").cases} == {dtype}
    assert {case.dtype for case in only_dtypes(cpu, [dtype]).quick_only} <= {dtype}
    with pytest.raises(ArgumentError, match="suite cpu has no case 'nothing'; it has "):
        only_cases(cpu, [cpu.cases[0].key, "nothing"])
    with pytest.raises(ArgumentError, match="this suite runs on cuda, not on cpu"):
        resolve_device("cpu", [load_suite("llm-prefill")])
    with pytest.raises(SuiteError, match="needs a checkout"):
        load_suite(BUILD_COST)


def test_suites_of_two_operations_are_not_one() -> None:
    from flashmoe_tools.bench.suites import suite_names

    science = load_suite("science")
    other = next(
        one
        for one in map(load_suite, (name for name in suite_names() if name != BUILD_COST))
        if one.operation != science.operation
    )
    with pytest.raises(ArgumentError, match=f"are of {science.operation} and {other.operation}; run them one by one"):
        merge([science, other])
