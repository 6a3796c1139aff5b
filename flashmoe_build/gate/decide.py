"""What the baseline's numbers call for. Pure: a bench report in, checks out."""

from collections.abc import Mapping
from typing import Any

from flashmoe_tools.bench.summary import speed_word
from flashmoe_tools.bench.thresholds import Thresholds, load_thresholds
from flashmoe_tools.report import Check, Report, Verdict

WORDS: Mapping[str, tuple[Verdict, str]] = {
    "stop": (Verdict.FAIL, "stop and profile: do not tune before it is known where the time goes"),
    "caution": (Verdict.WARN, "profile the slowest case before the next change"),
    "go on": (Verdict.PASS, ""),
    "next bottleneck": (Verdict.PASS, "this is no longer the bottleneck: look at what surrounds it"),
}


def decide(report: Report, thresholds: Thresholds | None = None) -> tuple[Check, ...]:
    """One check of the speed against the suite's baseline, then warnings about memory, bandwidth and launches."""
    limits = thresholds or load_thresholds()
    data = report.data
    rows = [row for row in data["aggregates"] if row["baseline"] == data["baseline"] and row["subject"] in _ours(data)]
    if not rows:
        why = "a baseline without our kernel, or our kernel without a baseline, decides nothing"
        return (Check("speed", Verdict.SKIP, "no ratio of ours to the baseline", "at least one", why),)
    checks = [_speed(row, limits) for row in rows]
    for cell in data["cells"]:
        for name in _ours(data):
            if name in cell["summaries"]:
                checks += _cell(cell, name, data, limits)
    return tuple(checks)


def _ours(data: Mapping[str, Any]) -> list[str]:
    return [row["name"] for row in data["contenders"] if row["ours"]]


def _speed(row: Mapping[str, Any], limits: Thresholds) -> Check:
    word = speed_word(row["geometric_mean"], limits)
    verdict, step = WORDS[word]
    found = (
        f"{row['geometric_mean']:.2f}x of {row['baseline']} over {row['cells']} cases, worst {row['worst']:.2f}x "
        f"({row['worst_case']}): {word}"
    )
    speed = limits.speed
    expected = f"stop below {speed.stop:g}x, caution below {speed.caution:g}x, done above {speed.next_bottleneck:g}x"
    return Check(f"speed of {row['subject']}", verdict, found, expected, next_step=step)


def _cell(cell: Mapping[str, Any], name: str, data: Mapping[str, Any], limits: Thresholds) -> list[Check]:
    key = cell["case"]["key"]
    summary = cell["summaries"][name]
    checks = []
    if _memory_bound(cell, data) and (summary["share_of_copy"] or 1.0) < limits.speed.memory_bandwidth:
        found = f"{summary['share_of_copy']:.0%} of the measured copy"
        checks.append(Check(f"bandwidth {key}", Verdict.WARN, found, f"at least {limits.speed.memory_bandwidth:.0%}"))
    if cell["timing"] == "events" and summary["launch_bound"]:
        why = f"under {limits.speed.launch_bound_us:g} us the launch dominates; time it inside a graph"
        checks.append(Check(f"launch {key}", Verdict.WARN, f"{summary['median_us']:.1f} us", why=why))
    error = cell["verification"][name]["max_error"]
    if error is not None and error > limits.error.max_difference_to_sdpa:
        allowed = f"below {limits.error.max_difference_to_sdpa:g}; the correctness rule itself holds"
        checks.append(Check(f"error {key}", Verdict.WARN, f"max difference {error:.3g}", allowed))
    return checks


def _memory_bound(cell: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
    """Whether the case is left of the ridge of the measured roofline. Never on a CPU, which keeps such cases in cache."""
    ceilings = data["ceilings"]
    peak = (ceilings or {}).get("matmul_tflops", {}).get(cell["case"]["dtype"])
    if not peak or data["settings"]["device"] != "cuda":
        return False
    return bool(cell["flops"] / cell["bytes"] < peak * 1e3 / ceilings["copy_gbps"])
