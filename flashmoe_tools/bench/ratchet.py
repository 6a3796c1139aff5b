"""Marks that may only rise: one TOML file per GPU model, checked against a bench report.

A mark is broken if the whole interval of the present ratio is more than ``fail_below`` under it. A ratio that beats it
by more than ``propose_above``, with its whole interval above the mark, becomes the proposed new mark. Proposals are
written next to the file (``*.proposed.toml``), because a person decides when a mark moves.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashmoe.errors import ReportError
from flashmoe_tools.bench.record import QUIET
from flashmoe_tools.bench.thresholds import RatchetThresholds, load_thresholds
from flashmoe_tools.report import Check, Report, Verdict, overall
from flashmoe_tools.toml import tomllib

SCHEMA = 1


@dataclass(frozen=True)
class Mark:
    """The best ratio (baseline time / subject time) that was shown for a case."""

    case: str
    subject: str
    baseline: str
    ratio: float
    since: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.subject, self.baseline


@dataclass(frozen=True)
class RatchetResult:
    checks: tuple[Check, ...]
    proposed: tuple[Mark, ...]  # every mark, with the proposals applied
    changed: int


def device_name(report: Report) -> str:
    """The GPU's name, or ``cpu``: what a ratchet file is for.

    The architecture is not enough: its cards differ in clock, memory and power.
    """
    gpu = report.environment.get("gpu")
    return str(gpu["name"]) if gpu else "cpu"


def architecture(report: Report) -> str:
    """The GPU's architecture as named in arch.toml; empty without a GPU.

    Nightly runs use it to find runners for these marks.
    """
    capability = (report.environment.get("gpu") or {}).get("capability", "")
    return f"sm{capability.replace('.', '')}" if capability else ""


def marks_file(path: Path, report: Report) -> Path:
    """``path``, or if it is a folder, the file in it for the report's GPU, such as ratchet-nvidia-h200.toml."""
    return path / f"ratchet-{device_name(report).lower().replace(' ', '-')}.toml" if path.is_dir() else path


def read_marks(path: Path) -> tuple[str, tuple[Mark, ...]]:
    """Reads (GPU, marks). Raises ReportError with the field that is wrong."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if table["schema"] != SCHEMA:
            msg = f"{path.name} has schema {table['schema']!r}; this flashmoe reads {SCHEMA}"
            raise ReportError(msg)
        return str(table["gpu"]), tuple(Mark(**row) for row in table.get("mark", []))
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        msg = f"{path.name} is not a ratchet file: {error!r}"
        raise ReportError(msg) from error


def write_marks(path: Path, name: str, marks: Sequence[Mark], arch: str = "") -> None:
    lines = ["# Ratios (baseline time / ours) that may only rise. Checked by `python -m flashmoe bench --ratchet`."]
    lines += [f"schema = {SCHEMA}", f"gpu = {json.dumps(name)}"]
    lines += [f"arch = {json.dumps(arch)}"] if arch else []
    for mark in sorted(marks, key=lambda one: one.key):
        lines += ["", "[[mark]]", f"case = {json.dumps(mark.case)}", f"subject = {json.dumps(mark.subject)}"]
        lines += [
            f"baseline = {json.dumps(mark.baseline)}",
            f"ratio = {mark.ratio:.4f}",
            f"since = {json.dumps(mark.since)}",
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def evaluate(marks: Sequence[Mark], report: Report, limits: RatchetThresholds | None = None) -> RatchetResult:
    """Checks every mark against the report's comparisons; cases without a mark are proposed as they are."""
    limits = limits or load_thresholds().ratchet
    ours = {row["name"] for row in report.data["contenders"] if row["ours"]}
    found = {
        (cell["case"]["key"], row["subject"], row["baseline"]): row
        for cell in report.data["cells"]
        for row in cell["comparisons"]
        if row["subject"] in ours or not ours
    }
    busy = any(check.name == QUIET and check.verdict is Verdict.WARN for check in report.checks)
    checks, proposed, changed = [], [], 0
    for mark in marks:
        check, ratio = _judge(mark, found.pop(mark.key, None), limits)
        if busy and (ratio is not None or check.verdict is Verdict.FAIL):
            check = replace(check, verdict=Verdict.WARN, why="the machine was busy: repeat when it is idle")
            ratio = None
        checks.append(check)
        changed += ratio is not None
        proposed.append(mark if ratio is None else Mark(*mark.key, ratio, report.started))
    fresh = {key: row for key, row in found.items() if row["verdict"] != "AMBIGUOUS" and not busy}
    proposed += [Mark(*key, row["ratio"], report.started) for key, row in fresh.items()]
    return RatchetResult(tuple(checks), tuple(proposed), changed + len(fresh))


def _judge(mark: Mark, row: Mapping[str, Any] | None, limits: RatchetThresholds) -> tuple[Check, float | None]:
    """(check, proposed new ratio or None)."""
    name = f"{mark.case} {mark.subject} / {mark.baseline}"
    if row is None:
        return Check(name, Verdict.SKIP, "not measured in this run", f"mark {mark.ratio:.3f}"), None
    low, high = row["interval"]
    text = f"{row['ratio']:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else "")
    floor = mark.ratio * (1.0 - limits.fail_below)
    expected = f"mark {mark.ratio:.3f}, at least {floor:.3f}"
    if high is not None and high < floor:
        step = f"find the commit since {mark.since}: python -m flashmoe bisect --help"
        return Check(name, Verdict.FAIL, text, expected, "slower than the mark, with evidence", step), None
    if row["ratio"] < floor:
        why = "below the mark, but the interval reaches it"
        return Check(name, Verdict.WARN, text, expected, why, "measure more: --repeats"), None
    if low is not None and low > mark.ratio and row["ratio"] > mark.ratio * (1.0 + limits.propose_above):
        return Check(name, Verdict.PASS, f"{text}: new mark proposed", expected), float(row["ratio"])
    return Check(name, Verdict.PASS, text, expected), None


def check_ratchet(path: Path, report: Report) -> int:
    """Prints the outcome and writes proposals next to ``path``. Without a file all is proposed and nothing passes."""
    here, path = device_name(report), marks_file(path, report)
    marks: tuple[Mark, ...] = ()
    if path.exists():
        belongs, marks = read_marks(path)
        if belongs != here:
            msg = f"{path.name} belongs to {belongs}, this run was on {here}"
            raise ReportError(msg)
    result = evaluate(marks, report)
    for check in result.checks:
        print(f"{check.verdict} {check.name}: {check.found} ({check.expected})")
    if result.changed:
        target = path.with_suffix(".proposed.toml")
        write_marks(target, here, result.proposed, architecture(report))
        print(f"{result.changed} new marks proposed in {target.name}; rename it over {path.name} to accept them")
    summary = Report("bench-ratchet", result.checks)
    print(f"ratchet {here}: {overall(result.checks)}")
    return int(summary.exit_code)
