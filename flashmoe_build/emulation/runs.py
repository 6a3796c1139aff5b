"""Runs cases one after another while the next kernels compile; the results so far are valid at any time."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from flashmoe_build.emulation.build import Options, jobs, kernel_library
from flashmoe_build.emulation.cases import NOT_EMULATED, Case, run_case
from flashmoe_build.emulation.runner import Outcome
from flashmoe_tools.interpreter import runnable
from flashmoe_tools.progress import Progress
from flashmoe_tools.report import Check, Verdict

NAMED = 3  # kernels that the summary of a kind names


def check_of(case: Case, outcome: Outcome) -> Check:
    if outcome.passed:
        return Check(case.identity, Verdict.PASS)
    return Check(
        case.identity,
        Verdict.FAIL,
        found=outcome.explain(),
        expected="no failure of the machine, and results within the fp64 bounds",
        why="the kernel is wrong, or correct only by luck of timing",
        next_step=case.command(),
    )


def kind_of(outcome: Outcome) -> str:
    """Failures of one kind at one source location have one cause: ``race at csrc/attention/tile.cuh:31``."""
    failure = outcome.report.failure
    if failure is None:
        return "wrong result"
    return f"{failure.kind} at {failure.file}:{failure.line}" if failure.line else failure.kind


@dataclass
class Runs:
    """The requested cases and the results of those that ran. ``stopped``: why the others did not run."""

    cases: Sequence[Case]
    checks: list[Check] = field(default_factory=list)
    totals: dict[str, int] = field(
        default_factory=lambda: {
            "matrix_products": 0, "warpgroup_products": 0, "multiply_adds": 0, "launch_microseconds": 0,
        }
    )  # fmt: skip
    failures: dict[str, list[Case]] = field(default_factory=dict)  # by kind
    stopped: str = ""
    interrupted: bool = False

    def add(self, case: Case, outcome: Outcome) -> None:
        """Counts one run; the first failure of a kind is printed in full."""
        self.checks.append(check_of(case, outcome))
        for name in self.totals:
            self.totals[name] += outcome.report.statistics.get(name, 0)
        self.totals["launch_microseconds"] += int(outcome.report.seconds * 1e6)
        if outcome.passed:
            return
        alike = self.failures.setdefault(kind_of(outcome), [])
        alike.append(case)
        if len(alike) == 1:
            print(f"FAIL {case.identity}\n{outcome.explain()}\nrepeat: {runnable(case.command())}", flush=True)

    @property
    def passed_kernels(self) -> list[Case]:
        """One case of each kernel whose cases have all run and passed."""
        done = list(zip(self.cases, self.checks, strict=False))
        bad = {case.kernel.label for case, check in done if check.verdict is not Verdict.PASS}
        bad |= {case.kernel.label for case in self.cases[len(done) :]}
        return list({case.kernel.label: case for case, _ in done if case.kernel.label not in bad}.values())

    @property
    def not_reached(self) -> list[str]:
        """Kernels none of whose cases ran."""
        reached = {case.kernel.label for case in self.cases[: len(self.checks)]}
        return list(dict.fromkeys(case.kernel.label for case in self.cases if case.kernel.label not in reached))

    def summary(self) -> list[str]:
        """One line per kind of failure: how many runs, of which kernels."""
        lines = []
        for kind, cases in sorted(self.failures.items(), key=lambda item: -len(item[1])):
            labels = list(dict.fromkeys(case.kernel.label for case in cases))
            more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
            lines.append(f"{len(cases)} x {kind}: {', '.join(labels[:NAMED])}{more}")
        return lines


def run_cases(
    cases: Sequence[Case], options: Options, changes: Mapping[str, object], until: float | None = None
) -> Runs:
    """Runs the cases until all are done, the time ``until`` (monotonic clock) is reached, or Ctrl-C.

    Cases of one kernel must be consecutive; libraries are compiled in that order, ``jobs()`` at a time.
    """
    runs = Runs(cases)
    units = {case.kernel.label: case.kernel.unit for case in cases if case.problem is not NOT_EMULATED}
    pool = ThreadPoolExecutor(jobs())
    with Progress("emulating", len(cases)) as progress:
        try:
            libraries = {label: pool.submit(kernel_library, unit, options) for label, unit in units.items()}
            for label, of_one in groupby(cases, key=lambda case: case.kernel.label):
                if label in libraries:
                    progress.note(f"{label} compiles")
                    _wait(libraries[label], until)
                for case in of_one:
                    if until is not None and time.monotonic() > until:
                        raise NotYet
                    runs.add(case, run_case(case, options, **changes))
                    progress.advance(label)
        except NotYet:
            runs.stopped = "the time limit was reached"
        except KeyboardInterrupt:
            runs.stopped, runs.interrupted = "interrupted", True
        finally:
            pool.shutdown(wait=not runs.stopped, cancel_futures=True)
    return runs


def _wait(library: Future[Path], until: float | None) -> None:
    library.result(timeout=None if until is None else max(0.0, until - time.monotonic()))


def summarised(cases: Sequence[Case], checks: Sequence[Check]) -> list[Check]:
    """Condenses many runs: one check for all passed runs of a kernel, and one for every failed run."""
    runs = Counter(
        case.kernel.label for case, check in zip(cases, checks, strict=False) if check.verdict is Verdict.PASS
    )
    passed = [Check(label, Verdict.PASS, found=f"{count} runs without a failure") for label, count in runs.items()]
    return passed + [check for check in checks if check.verdict is not Verdict.PASS]
