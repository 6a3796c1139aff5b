"""One cell: inputs, reference, a check of every contender, then interleaved samples of those that passed."""

import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashmoe_tools.bench.contenders import Contender, Prepared
from flashmoe_tools.bench.plan import block_orders, plan_samples
from flashmoe_tools.bench.sampling import (
    SUSTAINED_SECONDS,
    Sampler,
    SustainedSampler,
    call_time_ns,
    make_sampler,
    peak_bytes,
    warm_up,
)
from flashmoe_tools.bench.telemetry import Load, Reading, Telemetry
from flashmoe_tools.bench.verify import verify
from flashmoe_tools.operations import Inputs, Problem, Reference, Verification

WARM_UP_SECONDS = {"cuda": 0.05, "cpu": 0.02}
# Checking a large case can cost more than its samples; they still get this share of the cell's time.
MIN_SHARE = 0.25
# Interval between readings of clocks and power: NVML updates them no faster, and a reading costs as much as a small
# slot.
READ_SECONDS = 0.05


@dataclass(frozen=True)
class Settings:
    """How a run measures; the same for all its cells."""

    device: str
    timing: str
    repeats: int
    block: int
    flush_l2: bool
    seed: int
    floor: int


@dataclass
class Timing:
    """Raw samples of one contender in one cell (ns), block by block in the order in which they were taken."""

    blocks: list[list[int]] = field(default_factory=list)
    cpu_ns: list[int] = field(default_factory=list)
    peak_bytes: int | None = None
    load: list[Load] = field(default_factory=list)  # one per sample with sustained timing, else empty


@dataclass
class Cell:
    """The results for one case.

    ``unsupported`` holds the contenders that refused it, with their reason; ``references`` the problems of contenders
    that compute another problem.
    """

    case: Problem
    timing: str = ""
    coverage: float = 0.0
    verified: dict[str, Verification] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    references: dict[str, Problem] = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    seconds: float = 0.0
    seconds_before_samples: float = 0.0
    skipped: str = ""


@dataclass(frozen=True)
class _Entrant:
    contender: Contender
    prepared: Prepared


Note = Callable[[str], None]


def check_cell(cell: Cell, contenders: Sequence[Contender], settings: Settings, note: Note) -> None:
    """Checks the contenders' results without timing anything."""
    inputs = cell.case.make_inputs(settings.device, settings.seed)
    reference = cell.case.make_reference(inputs)
    cell.coverage = reference.coverage
    _admit(cell, contenders, inputs, reference, note)


def run_cell(
    cell: Cell,
    contenders: Sequence[Contender],
    settings: Settings,
    telemetry: Telemetry,
    share: float | None,
    note: Note,
) -> None:
    """Fills ``cell`` step by step, so results from before an interruption are kept."""
    started = time.perf_counter()
    try:
        note(f"{cell.case.key}: reference")
        inputs = cell.case.make_inputs(settings.device, settings.seed)
        reference = cell.case.make_reference(inputs)
        cell.coverage = reference.coverage
        entrants = _admit(cell, contenders, inputs, reference, note)
        del reference
        if entrants:
            cell.seconds_before_samples = time.perf_counter() - started
            left = None if share is None else max(share - cell.seconds_before_samples, MIN_SHARE * share)
            _measure(cell, entrants, settings, telemetry, left, note)
    except torch.OutOfMemoryError as error:
        cell.skipped = f"out of memory: {str(error).splitlines()[0]}"
    finally:
        cell.seconds = time.perf_counter() - started
        if settings.device == "cuda":
            torch.cuda.empty_cache()


def _admit(
    cell: Cell, contenders: Sequence[Contender], inputs: Inputs, reference: Reference, note: Note
) -> list[_Entrant]:
    """Returns the contenders whose result is right.

    A refusal is recorded with its reason, a wrong result as a failure.
    """
    admitted = []
    others: dict[str, Reference] = {}
    for contender in contenders:
        note(f"{cell.case.key}: checking {contender.name}")
        try:
            with contender.context():
                prepared = contender.prepare(inputs)
                expected = reference
                if prepared.own is not None:
                    problem = cell.references[contender.name] = prepared.own.problem
                    expected = others.get(problem.key) or problem.make_reference(prepared.own)
                    others[problem.key] = expected
                outcome = verify(prepared, inputs, expected)
        except torch.OutOfMemoryError:
            cell.unsupported[contender.name] = "out of memory"
            continue
        except Exception as error:  # a contender may raise anything: torch refuses, our driver fails
            _refused(cell, contender, error, reference.tolerance)
            continue
        cell.verified[contender.name] = outcome
        if outcome.passed:
            admitted.append(_Entrant(contender, prepared))
    return admitted


def _refused(cell: Cell, contender: Contender, error: Exception, tolerance: float) -> None:
    """Records an error: for a foreign contender a reason to skip it, for ours a failure."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    if contender.ours:
        cell.verified[contender.name] = Verification(False, float("inf"), tolerance, None, 0.0, text)
    else:
        cell.verified.pop(contender.name, None)
        cell.unsupported[contender.name] = text


def _measure(
    cell: Cell, entrants: list[_Entrant], settings: Settings, telemetry: Telemetry, left: float | None, note: Note
) -> None:
    sampler = make_sampler(settings.device, settings.timing, flush=settings.flush_l2, telemetry=telemetry)
    cell.timing = sampler.timing
    started = time.perf_counter()
    ready: dict[str, tuple[_Entrant, Any]] = {}
    costs = []
    for entrant in entrants:
        name = entrant.contender.name
        note(f"{cell.case.key}: warming {name}")
        try:
            prepared, timing, cost = _warm(entrant, sampler, settings.device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # for example, a contender that cannot be captured into a graph
            _refused(cell, entrant.contender, error, cell.verified[name].tolerance)
            continue
        ready[name] = (entrant, prepared)
        cell.timings[name] = timing
        costs.append(cost)
    if not ready:
        return
    warmed = time.perf_counter() - started
    cell.seconds_before_samples += warmed
    if left is not None:
        left = max(0.0, left - warmed)
    plan = plan_samples(settings.repeats, settings.block, costs, left, settings.floor, sampler.untimed)
    note(f"{cell.case.key}: {plan.samples} samples per contender")
    seed = settings.seed ^ zlib.crc32(cell.case.key.encode())
    last_read = -math.inf
    for order in block_orders(list(ready), plan.blocks, seed):
        for name in order:
            cell.timings[name].blocks.append(_slot(sampler, *ready[name], plan.block))
            if isinstance(sampler, SustainedSampler):
                cell.timings[name].load += sampler.load
        if time.perf_counter() - last_read >= READ_SECONDS:
            last_read = time.perf_counter()
            reading = telemetry.read()
            if reading is not None:
                cell.readings.append(reading)


def _warm(entrant: _Entrant, sampler: Sampler, device: str) -> tuple[Any, Timing, float]:
    """(call in the sampler's form, its timing record with CPU time and peak memory, seconds of one sample)."""
    call = entrant.prepared.call
    with entrant.contender.context():
        prepared = sampler.prepare(call)
        is_warm = isinstance(sampler, SustainedSampler)  # its prepare() replays the graph
        cost = SUSTAINED_SECONDS if is_warm else warm_up(sampler, prepared, WARM_UP_SECONDS[device])
        cpu_ns = call_time_ns(call, device) if device == "cuda" else []
        return prepared, Timing(cpu_ns=cpu_ns, peak_bytes=peak_bytes(call, device)), cost


def _slot(sampler: Sampler, entrant: _Entrant, prepared: Any, count: int) -> list[int]:
    with entrant.contender.context():
        return sampler.slot(prepared, count)
