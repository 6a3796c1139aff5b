"""What a repository keeps of a benchmark: medians, intervals, ratios, verdicts, environment; no samples.

A summary is a bench report whose cells hold only what cannot be computed from the rest. ``expand`` computes the rest,
so a summary can be rendered, compared and checked against marks like the report that it was made from.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flashmoe.errors import ReportError
from flashmoe_tools.bench.record import DATA_SCHEMA
from flashmoe_tools.bench.summary import CeilingRates, rates
from flashmoe_tools.bench.verdict import ADVICE, Reason
from flashmoe_tools.operations import problem_from_json
from flashmoe_tools.report import Report, fold_checks, rounded

SUMMARY_SCHEMA = "flashmoe.bench-summary/1"
COMPARISON = ("ratio", "interval", "verdict", "reason")


def summarise_bench(report: Report) -> Report:
    """``report`` without samples, with numbers rounded to five significant digits."""
    data = report.data
    ceilings = data["ceilings"] and {key: value for key, value in data["ceilings"].items() if key != "samples"}
    cells = [rounded(_cell(cell)) for cell in data["cells"]]
    kept = {**data, "schema": SUMMARY_SCHEMA, "ceilings": rounded(ceilings), "cells": cells}
    kept["aggregates"] = rounded(data["aggregates"])
    return replace(fold_checks(report), data=kept)


def _cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell as one row per contender and one per comparison."""
    times, comparisons = cell["summaries"], cell["comparisons"]
    row: dict[str, Any] = {"case": cell["case"], "timing": cell["timing"]}
    for count in ("samples", "blocks"):  # per contender; after an interruption, of the one with the fewest
        row[count] = min((one[count] for one in times.values()), default=0)
    row["contenders"] = {
        name: {key: times[name][key] for key in ("median_us", "interval_us") if name in times}
        | {key: outcome[key] for key in ("max_error", "reason") if outcome[key]}
        | ({"yardstick": cell["yardsticks"][name]["key"]} if name in cell.get("yardsticks", {}) else {})
        for name, outcome in cell["verification"].items()
    }
    row["comparisons"] = {
        f"{one['subject']} / {one['baseline']}": {key: one[key] for key in COMPARISON} for one in comparisons
    }
    return row | {key: cell[key] for key in ("unsupported", "skipped", "load") if cell.get(key)}


def expand(report: Report) -> Report:
    """Expands a summary to a report whose cells have no samples. Raises ReportError with the field that is missing."""
    data = report.data
    try:
        table = data["ceilings"]
        ceilings = CeilingRates(table["matmul_tflops"], table["copy_gbps"]) if table else None
        cells = [_expanded(cell, ceilings) for cell in data["cells"]]
    except (KeyError, TypeError, ValueError) as error:
        msg = f"the summary has a missing or invalid field of {SUMMARY_SCHEMA}: {error!r}"
        raise ReportError(msg) from error
    return replace(report, data={**data, "schema": DATA_SCHEMA, "cells": cells})


def _expanded(row: Mapping[str, Any], ceilings: CeilingRates | None) -> dict[str, Any]:
    case, contenders = problem_from_json(row["case"]), row["contenders"]
    counts = {key: row[key] for key in ("samples", "blocks")}
    summaries, references = {}, {}
    for name, found in contenders.items():
        if "median_us" in found:
            low, high = found["interval_us"]
            interval = (1e3 * low, 1e3 * high) if low and high else None
            times = {"median_us": found["median_us"], "interval_us": [low, high], "p95_us": None, "p99_us": None}
            own = case
            if "yardstick" in found:
                own = case.from_key(found["yardstick"])
                references[name] = own.to_json()
            summaries[name] = times | counts | rates(own, 1e3 * found["median_us"], interval, ceilings)
    return {
        "case": row["case"],
        "flops": case.flops,
        "bytes": case.bytes_moved,
        "timing": row["timing"],
        "skipped": row.get("skipped", ""),
        "unsupported": row.get("unsupported", {}),
        "verification": {
            name: {
                "passed": "reason" not in found,
                "max_error": found.get("max_error"),
                "reason": found.get("reason", ""),
            }
            for name, found in contenders.items()
        },
        "samples_ns": {},
        "call_cpu_ns": {},
        "peak_bytes": {},
        "summaries": summaries,
        "comparisons": [_comparison(pair, one, row["blocks"]) for pair, one in row["comparisons"].items()],
        **({"yardsticks": references} if references else {}),
        **({"load": row["load"]} if "load" in row else {}),
    }


def _comparison(pair: str, row: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    subject, baseline = pair.split(" / ")
    advice = ADVICE.get(Reason(row["reason"]), "")
    return {"subject": subject, "baseline": baseline, **row, "blocks": blocks, "advice": advice}
