"""One slot: a few timed calls of one contender. Everything is in nanoseconds.

events  CUDA events around each call, L2 overwritten before it; the queue is kept full, so launches cost no GPU time
sustained  CUDA graphs of calls back to back for ``SUSTAINED_SECONDS``, as in training and serving: a GPU at its power limit
        ranks kernels differently than in bursts; each sample has its own mean clock and watts
graph   a CUDA graph of several calls, replayed: the time of a call inside a graph, with warm caches
        (both: each slot begins with one untimed call, because the first call after another contender is up to 6% slower)
wall    perf_counter_ns around each call (CPU)
call    CPU time of an eager call, on a CPU or a GPU: the queue is empty at first and never fills
"""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch

from flashmoe_tools.bench.contenders import Call
from flashmoe_tools.bench.telemetry import Load, Telemetry

_cuda: Any = torch.cuda  # its classes are untyped
GRAPH_CALLS = 20
SUSTAINED_SECONDS = 0.4
GRAPH_SECONDS = 0.005  # a graph that takes this long holds fewer calls: a replay's start costs microseconds
CALL_CALLS = 50  # far below the thousand launches that a GPU's queue holds
CPU_TIME_CALLS = 8
# Twice the largest existing L2, and long enough on every GPU for the CPU to queue the next call meanwhile.
FLUSH_BYTES = 256 * 2**20


class Sampler(Protocol):
    """Prepares a call once per cell, then takes samples of it."""

    timing: str
    untimed: int  # untimed calls at the beginning of a slot

    def prepare(self, call: Call) -> Any: ...

    def slot(self, prepared: Any, count: int) -> list[int]: ...


class WallSampler:
    """CPU timing: one sample per call."""

    timing = "wall"
    untimed = 0

    def prepare(self, call: Call) -> Call:
        return call

    def slot(self, prepared: Call, count: int) -> list[int]:
        clock = time.perf_counter_ns
        samples = []
        for _ in range(count):
            start = clock()
            prepared()
            samples.append(clock() - start)
        return samples


class CallSampler:
    """Time of a call on the calling thread until it returns; a sample is the mean of ``CALL_CALLS`` calls in a row."""

    timing = "call"
    untimed = 1

    def __init__(self, device: str) -> None:
        self._wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else _nothing

    def prepare(self, call: Call) -> Call:
        return call

    def slot(self, prepared: Call, count: int) -> list[int]:
        clock = time.perf_counter_ns
        samples = []
        for _ in range(count):
            self._wait()
            prepared()  # the first call after a wait also pays for waking the driver
            start = clock()
            for _ in range(CALL_CALLS):
                prepared()
            samples.append(round((clock() - start) / CALL_CALLS))
        self._wait()
        return samples


def _nothing() -> None:
    """A CPU has no queue to wait for."""


class EventSampler:
    """GPU timing of eager calls. ``flush`` overwrites L2 before each call, as real work between two calls would."""

    timing = "events"
    untimed = 1

    def __init__(self, *, flush: bool) -> None:
        self._scratch = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda") if flush else None

    def prepare(self, call: Call) -> Call:
        return call

    def slot(self, prepared: Call, count: int) -> list[int]:
        events = [(_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)) for _ in range(count)]
        prepared()
        for start, end in events:
            if self._scratch is not None:
                self._scratch.zero_()
            start.record()
            prepared()
            end.record()
        torch.cuda.synchronize()
        return [round(start.elapsed_time(end) * 1e6) for start, end in events]


class GraphSampler:
    """GPU timing inside a CUDA graph of up to ``GRAPH_CALLS`` calls; a sample is one replay divided by the calls."""

    timing = "graph"
    untimed = 1

    def prepare(self, call: Call) -> tuple[torch.cuda.CUDAGraph, int]:
        side = capture_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
            start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        calls = graph_calls(start.elapsed_time(end) / 1e3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(calls):
                call()
        return graph, calls

    def slot(self, prepared: tuple[torch.cuda.CUDAGraph, int], count: int) -> list[int]:
        graph, calls = prepared
        events = [(_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)) for _ in range(count)]
        graph.replay()  # the first replay after other work also pays for warming the caches
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [round(start.elapsed_time(end) * 1e6 / calls) for start, end in events]


class SustainedSampler:
    """GPU timing under continuous load; a sample is the mean time of the calls in ``SUSTAINED_SECONDS``."""

    timing = "sustained"
    untimed = 0

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self.load: list[Load] = []  # of the last slot, one per sample

    def prepare(self, call: Call) -> tuple[torch.cuda.CUDAGraph, int, int]:
        """(graph, calls in it, replays per sample)."""
        bursts = GraphSampler()
        graph, calls = bursts.prepare(call)
        replay_seconds = calls * max(bursts.slot((graph, calls), 3)) / 1e9
        return graph, calls, max(1, round(SUSTAINED_SECONDS / replay_seconds))

    def slot(self, prepared: tuple[torch.cuda.CUDAGraph, int, int], count: int) -> list[int]:
        graph, calls, replays = prepared
        samples, self.load = [], []
        for _ in range(count):
            start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
            graph.replay()  # as in GraphSampler
            with self._telemetry.watch() as watch:
                start.record()
                for _ in range(replays):
                    graph.replay()
                end.record()
                torch.cuda.synchronize()
            samples.append(round(start.elapsed_time(end) * 1e6 / calls / replays))
            self.load.append(watch.load)
        return samples


@lru_cache(maxsize=1)
def capture_stream() -> Any:
    """The stream on which graphs are captured.

    Autograd runs a backward pass on the forward pass's stream, so views that are created once must be created on this
    one.
    """
    return _cuda.Stream()


def graph_calls(call_seconds: float) -> int:
    """How many calls a graph holds, given the time of one call outside it."""
    return max(1, min(GRAPH_CALLS, round(GRAPH_SECONDS / max(call_seconds, 1e-9))))


def make_sampler(device: str, timing: str, *, flush: bool, telemetry: Telemetry | None = None) -> Sampler:
    """The sampler for a suite's ``timing``; on a CPU attention is always timed by the wall clock."""
    if timing == "call":
        return CallSampler(device)
    if device == "cpu" or timing == "wall":
        return WallSampler()
    if timing == "sustained":
        return SustainedSampler(telemetry or Telemetry("not requested"))
    return GraphSampler() if timing == "graph" else EventSampler(flush=flush)


def call_time_ns(call: Call, device: str, count: int = CPU_TIME_CALLS) -> list[int]:
    """CPU time of eager calls until each returns; the queue is empty at first and never fills."""
    if device == "cuda":
        torch.cuda.synchronize()
    samples = WallSampler().slot(call, count)
    if device == "cuda":
        torch.cuda.synchronize()
    return samples


def peak_bytes(call: Call, device: str) -> int | None:
    """Memory that one call needs beyond what is already allocated; None if torch does not count it (CPU)."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def warm_up(sampler: Sampler, prepared: Any, seconds: float) -> float:
    """Calls for about ``seconds`` (at least twice); returns the wall time of one call in seconds, measured last."""
    started = time.perf_counter()
    sampler.slot(prepared, 1)
    cost = 0.0
    while True:
        before = time.perf_counter()
        sampler.slot(prepared, 1)
        cost = (time.perf_counter() - before) / (1 + sampler.untimed)
        if time.perf_counter() - started >= seconds:
            return cost
