"""Cells and runs as the ``data`` of a report, and the checks derived from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from flashmoe_tools.bench.summary import CeilingRates, speed_word, summarise_cell
from flashmoe_tools.bench.telemetry import summarise
from flashmoe_tools.bench.thresholds import load_thresholds
from flashmoe_tools.report import Check, Verdict

if TYPE_CHECKING:  # imports torch, which reading and comparing reports does not need
    from flashmoe_tools.bench.runner import Cell

DATA_SCHEMA = "flashmoe.bench/1"
QUIET = "quiet machine"


def cell_record(cell: Cell, ours: set[str], baseline: str, ceilings: CeilingRates | None) -> dict[str, Any]:
    """One cell with raw samples, summaries and comparisons."""
    blocks = {name: timing.blocks for name, timing in cell.timings.items()}
    record = {
        "case": cell.case.to_json(),
        "flops": cell.case.flops,
        "bytes": cell.case.bytes_moved,
        "timing": cell.timing,
        "skipped": cell.skipped,
        "seconds": cell.seconds,
        "checked_share": cell.coverage,
        "verification": {name: finite(asdict(outcome)) for name, outcome in cell.verified.items()},
        "unsupported": dict(cell.unsupported),
        "samples_ns": blocks,
        "call_cpu_ns": {name: timing.cpu_ns for name, timing in cell.timings.items() if timing.cpu_ns},
        "peak_bytes": {
            name: timing.peak_bytes for name, timing in cell.timings.items() if timing.peak_bytes is not None
        },
        "telemetry": summarise(cell.readings),
        **({"load": loads} if (loads := _loads(cell)) else {}),
        **({"yardsticks": {name: one.to_json() for name, one in cell.references.items()}} if cell.references else {}),
        **summarise_cell(cell.case, blocks, ours, baseline, ceilings, cell.references),
    }
    result: dict[str, Any] = finite(record)
    return result


def _loads(cell: Cell) -> dict[str, dict[str, float | None]]:
    """Median clock (MHz) and power (W) of each contender's samples, if taken under sustained load."""
    found = {}
    for name, timing in cell.timings.items():
        if timing.load:
            rows = [asdict(one) for one in timing.load]
            known = {key: [row[key] for row in rows if row[key] is not None] for key in rows[0]}
            found[name] = {key: median(values) if values else None for key, values in known.items()}
    return found


def finite(value: Any) -> Any:
    """``value`` with NaN and infinities replaced by None: JSON cannot represent them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, (list, tuple)) else value


def cell_checks(record: Mapping[str, Any], ours: set[str], baseline: str, *, smoke: bool = False) -> list[Check]:
    """The verdict on each contender of a cell.

    A wrong result is FAIL, but WARN for another library if ours is right. Refused or not measured is SKIP. Ours slow or
    using much memory is WARN. The rest is PASS.
    """
    key = record["case"]["key"]
    if smoke:
        return [_smoke_check(key, name, outcome) for name, outcome in record["verification"].items()]
    if record["skipped"]:
        return [Check(key, Verdict.SKIP, record["skipped"], "samples", "nothing was proved about this case")]
    checks = [
        Check(f"{key} {name}", Verdict.SKIP, reason, "a result", "this contender does not support the case")
        for name, reason in record["unsupported"].items()
    ]
    outcomes = record["verification"]
    own = [name for name in outcomes if name in ours or name.startswith("flashmoe")]  # our 16 bits beside our 8 too
    is_judged = bool(own) and all(outcomes[name]["passed"] for name in own)  # our result agrees with the reference
    for name, outcome in outcomes.items():
        warning = _warning(record, name, baseline) if name in ours else ""
        memory = _memory(record, name, baseline) if name in ours else ""
        wrong = Verdict.WARN if is_judged and name not in own else Verdict.FAIL
        checks.append(_contender_check(record, f"{key} {name}", name, outcome, warning, memory, wrong))
    return checks


def _smoke_check(key: str, name: str, outcome: Mapping[str, Any]) -> Check:
    """The check of the smallest problem, which is never timed."""
    title = f"smoke {key} {name}"
    if outcome["passed"]:
        return Check(title, Verdict.PASS, f"max error {outcome['max_error']:.2g}")
    return Check(title, Verdict.FAIL, outcome["reason"], "a right result", "larger problems cannot be right either")


def _contender_check(
    record: Mapping[str, Any],
    title: str,
    name: str,
    outcome: Mapping[str, Any],
    warning: str,
    memory: str,
    wrong: Verdict,
) -> Check:
    if not outcome["passed"]:
        step = "run the correctness tests of this head dim and mask"
        why = "a wrong result is never timed"
        if wrong is Verdict.WARN:
            why, step = f"{why}; ours is right by the same reference", "look for the error in the other library"
        return Check(title, wrong, outcome["reason"], f"max error at most {outcome['tolerance']:.3g}", why, step)
    if name not in record["summaries"]:
        return Check(title, Verdict.SKIP, "no samples", "samples", "stopped before timing")
    median = record["summaries"][name]["median_us"]
    if warning:
        return Check(title, Verdict.WARN, warning, "", "thresholds.toml [speed]", "python -m flashmoe gate")
    found = [f"{median:.1f} us", f"max error {outcome['max_error']:.2g}", memory]
    return Check(title, Verdict.PASS, ", ".join(filter(None, found)))


def _memory(record: Mapping[str, Any], name: str, baseline: str) -> str:
    """Bytes that a call needs beyond its inputs, as text: for ours and for the baseline."""
    peaks = record["peak_bytes"]
    if not peaks.get(name):
        return ""
    found = f"peak memory {peaks[name] / 1e6:.1f} MB"
    return f"{found} ({baseline} {peaks[baseline] / 1e6:.1f} MB)" if name != baseline and peaks.get(baseline) else found


def _warning(record: Mapping[str, Any], name: str, baseline: str) -> str:
    speed = load_thresholds().speed
    for row in record["comparisons"]:
        if row["subject"] == name and row["baseline"] == baseline and row["verdict"] == "SLOWER":
            word = speed_word(row["ratio"])
            if word == "stop":
                return f"{row['ratio']:.2f}x of {baseline}, below {speed.stop}: stop and profile"
    own, other = record["peak_bytes"].get(name, 0), record["peak_bytes"].get(baseline, 0)
    if other and own > speed.peak_memory * other and own - other > speed.peak_memory_spare:
        return f"{_memory(record, name, baseline)}, {own / other:.1f}x, above {speed.peak_memory:g}x"
    return ""


def quiet_check(device: str, cpu_busy: float | None, gpu_busy: float | None) -> Check | None:
    """A warning if the device was busy with other work when the run began; None if it was idle or this is unknown."""
    limits = load_thresholds().machine
    busy, limit = (gpu_busy, limits.gpu_busy) if device == "cuda" else (cpu_busy, limits.cpu_busy)
    if busy is None or busy <= limit:
        return None
    why = "others take time from both sides of a ratio, unequally; intervals grow, and a verdict may reflect them"
    found = f"{device} busy {busy:.0%} of the time before the run"
    return Check(QUIET, Verdict.WARN, found, f"at most {limit:.0%}", why, "repeat when nothing else runs")


def effective_baseline(names: Sequence[str], ours: set[str], requested: str) -> str:
    """The suite's baseline if it takes part, else the first contender that is not ours."""
    if requested in names:
        return requested
    return next((name for name in names if name not in ours), "")
