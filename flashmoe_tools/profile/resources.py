"""Without a profiler: what the build's resource table and the benchmark's timings say about one case."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashmoe.errors import ReportError
from flashmoe_tools.operations import Problem, problem_from_json
from flashmoe_tools.report import read_report

OURS = "flashmoe"
SYMBOL = re.compile(r"flashmoe_(?P<operation>\w+?)_(?P<family>sm\d+)_(?P<dtype>f16|bf16)(?P<rest>(_\w+)?)")


def slowest_case(bench: Mapping[str, Any]) -> Problem:
    """The case of a bench report in which ours is slowest against the baseline. Raises ReportError if there is none."""
    rows = [
        (row["ratio"], cell["case"])
        for cell in bench["cells"]
        for row in cell["comparisons"]
        if row["subject"] == OURS and row["baseline"] == bench["baseline"]
    ]
    if not rows:
        msg = "the bench report contains no ratio of ours to its baseline; name a case with --case"
        raise ReportError(msg)
    return problem_from_json(min(rows, key=lambda row: float(row[0]))[1])


def timing_facts(bench: Mapping[str, Any], case: Problem) -> dict[str, float]:
    """Our median for ``case``, percentages of the ceilings, CPU time of the call, and the ratio to the baseline."""
    for cell in bench["cells"]:
        if cell["case"]["key"] != case.key or OURS not in cell["summaries"]:
            continue
        summary = cell["summaries"][OURS]
        facts = {"median_us": summary["median_us"]}
        if bench["settings"]["device"] == "cuda":
            facts["duration_us"] = summary["median_us"]
        facts |= {name: summary[name] for name in ("share_of_matmul", "share_of_copy") if summary[name] is not None}
        calls = sorted(cell["call_cpu_ns"].get(OURS, []))
        if calls:
            facts["call_cpu_us"] = calls[len(calls) // 2] / 1e3
            facts["launch_share"] = facts["call_cpu_us"] / max(facts["call_cpu_us"], summary["median_us"])
        for row in cell["comparisons"]:
            if row["subject"] == OURS and row["baseline"] == bench["baseline"]:
                facts["ratio"] = row["ratio"]
        return facts
    return {}


def build_facts(build: Mapping[str, Any], case: Problem, target: str = "") -> tuple[str, dict[str, float]]:
    """(kernel symbol, registers, spills, stack, shared memory) of the heaviest kernel that a case of this shape uses.

    For attention the narrowest kernel whose head dim is large enough; of several targets the requested one, else the
    first.
    """
    found: list[tuple[int, str, Mapping[str, Any]]] = []
    for unit in build["units"]:
        if target and unit["target"] != target:
            continue
        for kernel in unit["kernels"]:
            width = _serves(kernel["symbol"], case)
            if width is not None:
                found.append((width, kernel["symbol"], kernel))
    if not found:
        return "", {}
    _, symbol, kernel = min(found, key=lambda row: row[0])
    facts = {"registers": float(kernel["registers"]), "stack_bytes": float(kernel["stack"])}
    facts["spill_bytes"] = float(kernel["spill_stores"] + kernel["spill_loads"])
    facts["static_shared_bytes"] = float(kernel["static_shared"])
    return symbol, facts


def _serves(symbol: str, case: Problem) -> int | None:
    """The head dim of a kernel that may run the case (0: it has none); None for other kernels."""
    parts = SYMBOL.fullmatch(symbol)
    if parts is None or parts["operation"] != getattr(case, "heaviest_kernel", ""):
        return None
    if parts["dtype"] != {"f32": "f16", "e4m3": "bf16"}.get(case.dtype, case.dtype):
        return None
    words = parts["rest"].split("_")
    mask, head_dim = getattr(case, "mask", ""), getattr(case, "head_dim", 0)
    width = next((int(word[1:]) for word in words if word[:1] == "d" and word[1:].isdigit()), 0)
    return width if (not mask or mask in words) and width >= head_dim else None


def read_data(path: Path | None, kind: str) -> Mapping[str, Any]:
    """The data of a report; empty if no report was named or it does not exist."""
    if path is None or not path.is_file():
        return {}
    report = read_report(path)
    if report.kind != kind:
        msg = f"{path.name} is a {report.kind!r} report; expected {kind!r}"
        raise ReportError(msg)
    return report.data
