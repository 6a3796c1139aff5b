"""The ladder climbed: rungs in order within a budget, stopped at the first that fails, one report at the end."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import flashmoe
from flashmoe_build.gate.execute import Outcome, execute, judge
from flashmoe_build.gate.ladder import Places, Rung
from flashmoe_tools.progress import Progress
from flashmoe_tools.report import Check, Report, Verdict, host_environment, utc_now, write_report

DATA_SCHEMA = "flashmoe.gate/1"


@dataclass(frozen=True)
class Budget:
    """Seconds that the ladder may take, and what an hour of the machine costs."""

    seconds: float
    rate_per_hour: float

    def cost(self, seconds: float) -> float:
        return seconds / 3600.0 * self.rate_per_hour


@dataclass
class Climb:
    """The state of a climb; ``report`` is valid at any time."""

    rungs: Sequence[Rung]
    places: Places
    budget: Budget
    python: str = sys.executable
    command: tuple[str, ...] = ()
    ladder: Sequence[Rung] = ()  # that the rungs were chosen from
    clock: Callable[[], float] = time.monotonic
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    stopped_at: str = ""
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.started = utc_now()
        self._begin = self.clock()

    @property
    def elapsed(self) -> float:
        return self.clock() - self._begin

    def run(self) -> Report:
        """Climbs until a rung fails, the budget is used up, or a signal comes."""
        with Progress("gate", len(self.rungs)) as progress:
            try:
                for rung in self.rungs:
                    if self.stopped_at and rung.after_failed != self.stopped_at:
                        continue
                    progress.note(rung.name)
                    outcome = self._climb(rung)
                    self.outcomes[rung.name] = outcome
                    progress.advance(
                        f"{rung.name} {outcome.verdict}, {self.elapsed:.0f} of {self.budget.seconds:.0f} s"
                    )
                    if outcome.verdict is Verdict.FAIL and not self.stopped_at:
                        self.stopped_at = rung.name
            except KeyboardInterrupt:
                self.interrupted = True
        return self.report()

    def _climb(self, rung: Rung) -> Outcome:
        if rung.needs and not self.places.checkout:
            return Outcome(Verdict.SKIP, "only installed files here; this rung needs a checkout", 0.0)
        if rung.needs == "compiler" and shutil.which(os.environ.get("CXX", "g++")) is None:
            return Outcome(Verdict.SKIP, "no C++ compiler here: install g++, or set CXX", 0.0)
        if rung.makes == "library" and self.places.given:
            return Outcome(Verdict.SKIP, f"built elsewhere: {self.places.library.name} was given", 0.0)
        if rung.decision_of:
            return self._decision(rung)
        left = self.budget.seconds - self.elapsed
        if left <= 0.0:
            return Outcome(
                Verdict.FAIL, f"the budget of {self.budget.seconds / 60:.1f} minutes was used up before it", 0.0
            )
        if "{artifact}" in rung.command and not self.places.artifact.is_file():
            return Outcome(Verdict.FAIL, f"there is no {self.places.artifact.name} to look at", 0.0)
        return self._execute(rung, left)

    def _execute(self, rung: Rung, left: float) -> Outcome:
        budget = min(rung.budget_seconds, left)
        return execute(
            self.places.fill(rung.command, rung, self.python, budget),
            self.places.report_of(rung, self.python, budget),
            folder=self.places.root,
            environment=self._environment(rung),
            limit=min(rung.limit_seconds, left),
            ignore=rung.ignore,
        )

    def _environment(self, rung: Rung) -> dict[str, str]:
        """The checkout's package and the library just built come first."""
        variables = {"PYTHONUNBUFFERED": "1"}
        if self.places.checkout:
            variables["PYTHONPATH"] = os.pathsep.join(
                filter(None, [str(self.places.root), os.environ.get("PYTHONPATH")])
            )
            variables["FLASHMOE_LIBRARY"] = str(self.places.library)
        names, values = list(rung.environment), list(rung.environment.values())
        filled = self.places.fill(values, rung, self.python, 0.0)
        variables.update(zip(names, filled, strict=True))
        if rung.name in ("environment", "build"):
            variables.pop("FLASHMOE_LIBRARY", None)
        return variables

    def _decision(self, rung: Rung) -> Outcome:
        below = self.outcomes.get(rung.decision_of)
        if below is None or below.report is None:
            return Outcome(Verdict.FAIL, f"rung {rung.decision_of} left no report to decide over", 0.0)
        from flashmoe_build.gate.decide import decide  # scipy: a ladder without a decision need not wait for it

        begin = self.clock()
        report = Report("decision", decide(below.report), {}, host_environment(), (), utc_now())
        report = replace(report, seconds=self.clock() - begin)
        write_report(self.places.reports / f"{rung.name}.json", report)
        verdict, found = judge(report, ())
        speed = report.checks[0].found
        return Outcome(verdict, found if speed in found else f"{speed}; {found}", report.seconds, report)

    @property
    def known_good(self) -> list[str]:
        """The rungs that hold; none while a proof is missing."""
        if self._unproven:
            return []
        return [name for name, one in self.outcomes.items() if one.verdict in (Verdict.PASS, Verdict.WARN)]

    @property
    def _unproven(self) -> list[str]:
        proofs = [rung.name for rung in self.ladder or self.rungs if rung.proof]
        passed = [name for name, one in self.outcomes.items() if one.verdict is Verdict.PASS]
        return [name for name in proofs if name not in passed]

    @property
    def not_checked(self) -> list[str]:
        """What this climb says nothing about, in words."""
        here = [rung.name for rung in self.rungs]
        others = [rung.name for rung in self.ladder if rung.name not in here and not rung.after_failed]
        words = [f"{', '.join(others)} (./nox -s gate)"] if others else []
        for name, one in self.outcomes.items():
            if one.verdict is Verdict.SKIP or (name in self._unproven and one.verdict is Verdict.WARN):
                words.append(f"{name}: {one.found}")
        if self._gpu() is None and self.outcomes:
            words.append("any kernel on a GPU: there is none here")
        return words

    def report(self) -> Report:
        checks = tuple(self._check(rung) for rung in self.rungs)
        if self.interrupted:
            checks += (Check("interrupted", Verdict.FAIL, f"after {self.elapsed:.0f} s", "the whole ladder"),)
        data = {
            "schema": DATA_SCHEMA,
            "rungs": [self._row(rung) for rung in self.rungs],
            "stopped_at": self.stopped_at,
            "known_good": self.known_good,
            "unproven": self._unproven,
            "not_checked": self.not_checked,
            "budget_seconds": self.budget.seconds,
            "rate_per_hour": self.budget.rate_per_hour,
            "cost": self.budget.cost(self.elapsed),
            "decision": self._decision_row(),
            "gpu": self._gpu(),
        }
        return Report("gate", checks, data, host_environment(), self.command, self.started, self.elapsed)

    def _check(self, rung: Rung) -> Check:
        outcome = self.outcomes.get(rung.name)
        if outcome is None:
            why = "interrupted" if self.interrupted else f"the ladder ended at {self.stopped_at}"
            return Check(rung.name, Verdict.SKIP, "not climbed", why=why)
        bad = outcome.verdict in (Verdict.FAIL, Verdict.WARN)
        step = " ".join(self.places.fill([rung.next_step], rung, "python", 0.0)) if bad else ""
        return Check(rung.name, outcome.verdict, outcome.found, why=rung.why if bad else "", next_step=step)

    def _row(self, rung: Rung) -> dict[str, Any]:
        outcome = self.outcomes.get(rung.name)
        if outcome is None:
            return {
                "name": rung.name,
                "verdict": Verdict.SKIP.value,
                "seconds": 0.0,
                "cost": 0.0,
                "found": "not climbed",
            }
        return {
            "name": rung.name,
            "verdict": outcome.verdict.value,
            "seconds": outcome.seconds,
            "cost": self.budget.cost(outcome.seconds),
            "found": outcome.found,
        }

    def _gpu(self) -> dict[str, Any] | None:
        """The GPU that a rung told of: the import rung, or the baseline's report."""
        reports = [one.report for one in self.outcomes.values() if one.report is not None]
        told = [report.data.get("gpu") or report.environment.get("gpu") for report in reports]
        return next((one for one in told if one), None)

    def _decision_row(self) -> dict[str, Any] | None:
        """The geometric means that the decision was taken over, for the history."""
        for rung in self.rungs:
            below = self.outcomes.get(rung.decision_of) if rung.decision_of else None
            if below is not None and below.report is not None:
                return {"aggregates": below.report.data.get("aggregates", []), "environment": below.report.environment}
        return None


def find_places(root: Path, library: Path | None, reports: Path | None) -> Places:
    """Where a ladder finds things, in a checkout or beside an installed package."""
    checkout = (root / "flashmoe_build").is_dir() or (root / ".git").exists()
    build = root / "build"
    given = library is not None
    if library is None:
        installed = Path(flashmoe.__file__).resolve().parent / "libflashmoe.so"
        library = build / "lib" / "libflashmoe.so" if checkout else installed
    return Places(root, build, library, reports or build / "reports" / "gate", checkout, given)
