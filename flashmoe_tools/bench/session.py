"""A complete run over all cells; its report is valid whenever it stops."""

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from flashmoe._extension import library_path
from flashmoe.errors import ArgumentError, ExtensionError
from flashmoe_tools.bench.call_cost import TIMING, share_checks, shares
from flashmoe_tools.bench.ceilings import measure_ceilings
from flashmoe_tools.bench.contenders import KERNEL_VARIABLE, Contender, choose, package_versions
from flashmoe_tools.bench.plan import MIN_SAMPLES, share_of_budget
from flashmoe_tools.bench.record import DATA_SCHEMA, cell_checks, cell_record, effective_baseline, quiet_check
from flashmoe_tools.bench.runner import Cell, Settings, check_cell, run_cell
from flashmoe_tools.bench.stopping import stop_signals
from flashmoe_tools.bench.suites import Suite
from flashmoe_tools.bench.summary import CeilingRates, aggregate
from flashmoe_tools.bench.telemetry import Telemetry, cpu_busy
from flashmoe_tools.operations import problem_type
from flashmoe_tools.progress import Progress
from flashmoe_tools.report import Check, Report, Verdict, built_commit, host_environment, utc_now

SAVE_EVERY_SECONDS = 20.0


@dataclass(frozen=True)
class Options:
    """The options of a suite that the command line may change."""

    device: str
    baseline_only: bool = False
    time_budget: float | None = None
    seed: int = 0
    command: tuple[str, ...] = ()


@dataclass
class Session:
    """The state of a run; ``report`` can be called at any time and is always valid."""

    suite: Suite
    options: Options
    registry: Mapping[str, Contender]
    started: str = field(default_factory=utc_now)
    records: list[dict[str, Any]] = field(default_factory=list)
    ceilings: dict[str, Any] | None = None
    stopped: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    quiet: Check | None = None

    def __post_init__(self) -> None:
        self._clock = time.monotonic()
        self.smoke = Cell(problem_type(self.suite.operation).smallest())
        options = self.options
        chosen = choose(self.registry, self.suite.contenders, options.device, baseline_only=options.baseline_only)
        for contender in chosen:
            reason = contender.available(options.device)
            if reason:
                self.absent[contender.name] = reason
        self.contenders = [one for one in chosen if one.name not in self.absent]
        self.ours = {one.name for one in chosen if one.ours}
        self.baseline = effective_baseline([one.name for one in self.contenders], self.ours, self.suite.baseline)
        if not self.contenders:
            reasons = self.absent or "none named"
            msg = f"suite {self.suite.name!r} has no contender that runs on {options.device}: {reasons}"
            raise ArgumentError(msg)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._clock

    def run(self, save: Callable[[Report], None]) -> Report:
        """Times every case, or as many as the budget allows; on SIGINT or SIGTERM it ends with what was measured."""
        telemetry = self._describe_device()
        with stop_signals(), Progress(f"bench {self.suite.name}", len(self.suite.cases)) as progress:
            try:
                progress.note("smoke")
                check_cell(self.smoke, self.contenders, self._settings(), progress.note)
                wrong = [name for name, outcome in self.smoke.verified.items() if not outcome.passed]
                if wrong:
                    self.stopped = f"{', '.join(wrong)} is wrong on the smallest problem; nothing was timed"
                    return self.report()
                progress.note("ceilings")
                measured = measure_ceilings(self.options.device, (case.dtype for case in self.suite.cases))
                self.ceilings = asdict(measured)
                self._cells(progress, telemetry, save)
            except KeyboardInterrupt:
                self.stopped = "interrupted"
        if self.stopped == "interrupted":
            print("interrupted: writing the report of what was measured", file=sys.stderr)
        return self.report()

    def _cells(self, progress: Progress, telemetry: Telemetry, save: Callable[[Report], None]) -> None:
        saved = time.monotonic()
        before_samples: list[float] = []
        for number, case in enumerate(self.suite.cases):
            cells_left = len(self.suite.cases) - number
            budget = self.options.time_budget
            if budget is not None and self.elapsed >= budget:
                self.stopped = f"the time budget of {budget:g} s was used up with {cells_left} cases left"
                return
            cell = Cell(case)
            try:
                work_left = [one.flops for one in self.suite.cases[number:]]
                usual = statistics.fmean(before_samples) if before_samples else 0.0
                share = share_of_budget(budget, self.elapsed, work_left, usual)
                run_cell(cell, self.contenders, self._settings(), telemetry, share, progress.note)
            finally:
                self.records.append(self._record(cell))
            before_samples.append(cell.seconds_before_samples)
            progress.advance(f"{case.key}, {remaining_text(self.elapsed, number + 1, cells_left - 1, budget)}")
            if time.monotonic() - saved >= SAVE_EVERY_SECONDS:
                save(self.report())
                saved = time.monotonic()

    def _record(self, cell: Cell) -> dict[str, Any]:
        rates = CeilingRates(self.ceilings["matmul_tflops"], self.ceilings["copy_gbps"]) if self.ceilings else None
        return cell_record(cell, self.ours, self.baseline, rates)

    def _settings(self) -> Settings:
        suite = self.suite
        return Settings(
            device=self.options.device,
            timing=suite.timing,
            repeats=suite.repeats,
            block=suite.block,
            flush_l2=suite.flush_l2,
            seed=self.options.seed,
            floor=MIN_SAMPLES,
        )

    def _describe_device(self) -> Telemetry:
        self.environment = {**host_environment(), "packages": package_versions(), "device": self.options.device}
        with contextlib.suppress(ExtensionError):  # a source tree without a library: only torch's backends
            self.environment["commit"] = built_commit(library_path())
        if os.environ.get(KERNEL_VARIABLE):
            self.environment["forced_family"] = os.environ[KERNEL_VARIABLE]
        self.environment["torch_threads"] = torch.get_num_threads()
        self.environment["cpu_busy"] = cpu_busy()
        if self.options.device != "cuda":
            self.quiet = quiet_check("cpu", self.environment["cpu_busy"], None)
            return Telemetry("no GPU in this run")
        cudnn: Any = torch.backends.cudnn  # untyped
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        telemetry = Telemetry.of_gpu(str(getattr(properties, "uuid", "")), torch.cuda.current_device())
        self.environment["gpu"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "cuda": torch.version.cuda,
            "cudnn": cudnn.version(),
            **telemetry.limits(),
        }
        self.environment["telemetry"] = telemetry.reason or "NVML"
        self.quiet = quiet_check("cuda", None, telemetry.busy())
        return telemetry

    def report(self) -> Report:
        checks = cell_checks(self._record(self.smoke), self.ours, self.baseline, smoke=True)
        checks += [self.quiet] if self.quiet else []
        checks += [check for record in self.records for check in cell_checks(record, self.ours, self.baseline)]
        checks += share_checks(self.records, self.ours, self.baseline, self.options.device)
        checks += [
            Check(f"contender {name}", Verdict.FAIL if name in self.ours else Verdict.SKIP, reason, "usable here")
            for name, reason in self.absent.items()
        ]
        done = {record["case"]["key"] for record in self.records}
        checks += [
            Check(case.key, Verdict.SKIP, self.stopped or "not reached", "samples")
            for case in self.suite.cases
            if case.key not in done
        ]
        return Report(
            kind="bench",
            checks=tuple(checks),
            data=self._data(),
            environment=self.environment,
            command=self.options.command,
            started=self.started,
            seconds=self.elapsed,
        )

    def _data(self) -> dict[str, Any]:
        suite = self.suite
        return {
            "schema": DATA_SCHEMA,
            "suite": {"name": suite.name, "title": suite.title, "cases": len(suite.cases)},
            "settings": {**asdict(self._settings()), "time_budget": self.options.time_budget},
            "partial": self.stopped,
            "baseline": self.baseline,
            "contenders": [{"name": one.name, "title": one.title, "ours": one.ours} for one in self.contenders],
            "absent": self.absent,
            "ceilings": self.ceilings,
            "cells": self.records,
            "aggregates": aggregate(self.records),
            **({"call_shares": shares(self.records, self.baseline)} if suite.timing == TIMING else {}),
        }


def remaining_text(elapsed: float, done: int, left: int, budget: float | None) -> str:
    """An estimate: the mean time of the finished cells, capped by the budget."""
    guess = elapsed / done * left
    if budget is not None:
        guess = min(guess, max(0.0, budget - elapsed))
    return f"about {guess:.0f} s left" if left else "done"
