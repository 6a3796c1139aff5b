"""Runs the steps in order within a time budget, stopping at the first that fails; one report at the end."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flashmoe
from flashmoe._version import WHEEL_PREFIX
from flashmoe_build.gate.execute import Outcome, execute, verdict_of
from flashmoe_build.gate.steps import DECISION, PROOF, STEPS, Step
from flashmoe_tools.progress import Progress
from flashmoe_tools.report import Check, Report, Verdict, host_environment, typed_command, utc_now, write_report

DATA_SCHEMA = "flashmoe.gate/2"
NOT_RUN = Outcome(Verdict.SKIP, "not run", 0.0)


@dataclass(frozen=True)
class Paths:
    """Values for the placeholders in a step's command."""

    root: Path
    build: Path
    library: Path
    reports: Path
    checkout: bool
    given: bool = False  # the caller named the library: it was not built here

    @property
    def artifact(self) -> Path:
        """The checkout's newest wheel; the library if no wheel was built or the caller named a library."""
        wheels = [] if self.given or not self.checkout else list((self.root / "dist").glob(f"{WHEEL_PREFIX}*.whl"))
        return max(wheels, key=lambda path: path.stat().st_mtime, default=self.library)

    def report_of(self, step: Step) -> Path:
        return Path(*self.fill([step.report], step)) if step.report else self.reports / f"{step.name}.json"

    def fill(self, command: Sequence[str], step: Step, *, python: str = "python", budget: float = 0.0) -> list[str]:
        """``words`` with the placeholders filled in; a word that is then empty is dropped."""
        objects, artifact = self.build / "objects", self.artifact
        table = {
            "python": python,
            "root": self.root,
            "build": self.build,
            "reports": self.reports,
            "report": self.reports / f"{step.name}.json",
            "artifact": artifact,
            "objects": f"--objects={objects}" if objects.is_dir() and artifact.suffix == ".whl" else "",
            "budget": f"{budget:.0f}",
        }
        return [filled for word in command if (filled := word.format(**table))]


def find_paths(root: Path, library: Path | None = None) -> Paths:
    """The paths in a checkout, or of an installed package."""
    checkout = (root / "flashmoe_build").is_dir() or (root / ".git").exists()
    build = root / "build"
    own = build / "lib" if checkout else Path(flashmoe.__file__).resolve().parent
    chosen = library or own / "libflashmoe.so"
    return Paths(root, build, chosen, build / "reports" / "gate", checkout, given=library is not None)


@dataclass
class Pipeline:
    """A run of ``steps``; ``report`` is valid at any time. ``every``: the steps from which they were chosen."""

    steps: Sequence[Step]
    paths: Paths
    budget_seconds: float
    rate_per_hour: float = 0.0
    every: Sequence[Step] = STEPS
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
        """Runs until a step fails, the budget is used up, or a signal comes."""
        with Progress("gate", len(self.steps)) as progress:
            try:
                for step in self.steps:
                    if self.stopped_at and step.after_failed != self.stopped_at:
                        continue
                    progress.note(step.name)
                    outcome = self.outcomes[step.name] = self._run_step(step, progress)
                    spent = f"{self.elapsed:.0f} of {self.budget_seconds:.0f} s"
                    progress.advance(f"{step.name} {outcome.verdict}, {spent}")
                    if outcome.verdict is Verdict.FAIL and not self.stopped_at:
                        self.stopped_at = step.name
            except KeyboardInterrupt:
                self.interrupted = True
        return self.report()

    def _run_step(self, step: Step, progress: Progress) -> Outcome:
        left = self.budget_seconds - self.elapsed
        if reason := self._why_skipped(step):
            return Outcome(Verdict.SKIP, reason, 0.0)
        if step.name == DECISION:
            return self._decide(step)
        if left <= 0.0:
            used = f"the budget of {self.budget_seconds / 60:.1f} minutes was used up before it"
            return Outcome(Verdict.FAIL, used, 0.0)
        if "{artifact}" in step.command and not self.paths.artifact.is_file():
            return Outcome(Verdict.FAIL, f"there is no {self.paths.artifact.name} to look at", 0.0)
        outcome = execute(
            self.paths.fill(step.command, step, python=sys.executable, budget=min(step.budget_seconds, left)),
            self.paths.report_of(step),
            folder=self.paths.root,
            environment=self._environment(step),
            limit=min(step.limit_seconds, left),
            ignore=step.ignore,
            note=lambda line: progress.note(f"{step.name}: {line}"),
        )
        return without_runs(outcome) if step.name == PROOF else outcome

    def _why_skipped(self, step: Step) -> str:
        if step.needs and not self.paths.checkout:
            return "only installed files here; this step needs a checkout"
        if step.needs == "compiler" and shutil.which(os.environ.get("CXX", "g++")) is None:
            return "no C++ compiler here: install g++, or set CXX"
        if step.name == "build" and self.paths.given:
            return f"built elsewhere: {self.paths.library.name} was given"
        return ""

    def _environment(self, step: Step) -> dict[str, str]:
        """Puts the checkout's package and the library just built first."""
        variables = {"PYTHONUNBUFFERED": "1", "FLASHMOE_TEST_REPORT": str(self.paths.report_of(step))}
        if self.paths.checkout:
            folders = [str(self.paths.root), os.environ.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
            if step.name not in ("environment", "build"):
                variables["FLASHMOE_LIBRARY"] = str(self.paths.library)
        return variables

    def _decide(self, step: Step) -> Outcome:
        baseline = self._baseline()
        if baseline is None:
            return Outcome(Verdict.FAIL, "the step baseline left no report to decide on", 0.0)
        from flashmoe_build.gate.decide import decide  # scipy: only imported when there is a decision to make

        report = Report(DECISION, decide(baseline), {}, host_environment(), (), utc_now())
        write_report(self.paths.report_of(step), report)
        verdict, found = verdict_of(report, ())
        speed = report.checks[0].found
        return Outcome(verdict, found if speed in found else f"{speed}; {found}", 0.0, report)

    def _baseline(self) -> Report | None:
        return self.outcomes.get("baseline", NOT_RUN).report

    @property
    def known_good(self) -> list[str]:
        """The steps that passed; none if the proof is missing."""
        if self._unproven:
            return []
        return [name for name, one in self.outcomes.items() if one.verdict in (Verdict.PASS, Verdict.WARN)]

    @property
    def _unproven(self) -> list[str]:
        has_proof = any(step.name == PROOF for step in self.every)
        passed = self.outcomes.get(PROOF, NOT_RUN).verdict is Verdict.PASS
        return [PROOF] if has_proof and not passed else []

    @property
    def not_checked(self) -> list[str]:
        """What this run does not cover, in words."""
        here = [step.name for step in self.steps]
        others = [step.name for step in self.every if step.name not in here and not step.after_failed]
        words = [f"{', '.join(others)} (./nox -s gate)"] if others else []
        for name, one in self.outcomes.items():
            if one.verdict is Verdict.SKIP or (name in self._unproven and one.verdict is Verdict.WARN):
                words.append(f"{name}: {one.found}")
        if self._gpu() is None and self.outcomes:
            words.append("any kernel on a GPU: there is none here")
        return words

    def report(self) -> Report:
        checks = tuple(self._check(step) for step in self.steps)
        if self.interrupted:
            checks += (Check("interrupted", Verdict.FAIL, f"after {self.elapsed:.0f} s", "every step"),)
        baseline = self._baseline()
        data: dict[str, Any] = {
            "schema": DATA_SCHEMA,
            "steps": [self._row(step) for step in self.steps],
            "stopped_at": self.stopped_at,
            "known_good": self.known_good,
            "unproven": self._unproven,
            "not_checked": self.not_checked,
            "budget_seconds": self.budget_seconds,
            "rate_per_hour": self.rate_per_hour,
            "cost": self._cost(self.elapsed),
            "aggregates": baseline.data.get("aggregates", []) if baseline else [],
            "gpu": self._gpu(),
        }
        return Report("gate", checks, data, host_environment(), typed_command(), self.started, self.elapsed)

    def _cost(self, seconds: float) -> float:
        return seconds / 3600.0 * self.rate_per_hour

    def _check(self, step: Step) -> Check:
        outcome = self.outcomes.get(step.name, NOT_RUN)
        if outcome is NOT_RUN:
            why = "interrupted" if self.interrupted else f"the gate stopped at {self.stopped_at}"
            return Check(step.name, Verdict.SKIP, outcome.found, why=why)
        bad = outcome.verdict in (Verdict.FAIL, Verdict.WARN)
        next_step = " ".join(self.paths.fill([step.next_step], step)) if bad else ""
        return Check(step.name, outcome.verdict, outcome.found, why=step.why if bad else "", next_step=next_step)

    def _row(self, step: Step) -> dict[str, Any]:
        one = self.outcomes.get(step.name, NOT_RUN)
        row = {"name": step.name, "verdict": one.verdict.value, "seconds": one.seconds}
        return {**row, "cost": self._cost(one.seconds), "found": one.found}

    def _gpu(self) -> dict[str, Any] | None:
        """The GPU that a step reported: the import step or the baseline."""
        reports = [one.report for one in self.outcomes.values() if one.report is not None]
        return next((gpu for one in reports if (gpu := one.data.get("gpu") or one.environment.get("gpu"))), None)


def without_runs(outcome: Outcome) -> Outcome:
    """An emulation without runs does not PASS, unless everything that differs has passed before and was therefore not rerun."""
    report = outcome.report
    if outcome.verdict is not Verdict.PASS or report is None or report.data.get("runs"):
        return outcome
    found = next((check.found for check in report.checks), "no kernel was chosen")
    if found.startswith("0 of") or not report.checks:
        return Outcome(Verdict.SKIP, f"nothing was emulated: {found}", outcome.seconds, report)
    return Outcome(Verdict.PASS, f"{found}, and passed before", outcome.seconds, report)
