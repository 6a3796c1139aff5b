"""The verdict on the CPU cost of an eager call: our share of SDPA's time, against the limit in thresholds.toml."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flashmoe_tools.bench.thresholds import load_thresholds
from flashmoe_tools.report import Check, Verdict

TIMING = "call"


def shares(records: Sequence[Mapping[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """For each subject compared with ``baseline``: its share of the baseline's time, as geometric mean and worst case.

    A share is 1 / ratio: below 1 the subject's call costs less.
    """
    found: dict[str, list[tuple[float, str]]] = {}
    for record in records:
        if record["timing"] != TIMING:
            continue
        for row in record["comparisons"]:
            if row["baseline"] == baseline:
                found.setdefault(row["subject"], []).append((1.0 / row["ratio"], record["case"]["key"]))
    rows = []
    for subject, cells in found.items():
        worst, worst_case = max(cells)
        mean = math.exp(sum(math.log(share) for share, _ in cells) / len(cells))
        rows.append(
            {
                "subject": subject,
                "baseline": baseline,
                "geometric_mean": mean,
                "worst": worst,
                "worst_case": worst_case,
                "cells": len(cells),
            }
        )
    return rows


def share_checks(records: Sequence[Mapping[str, Any]], ours: set[str], baseline: str, device: str) -> list[Check]:
    """One check per contender of ours; PASS if every case is under the limit.

    On a CPU there is no limit, so nothing is proved.
    """
    bar = load_thresholds().call.max_share
    checks = []
    for row in shares(records, baseline):
        if row["subject"] not in ours:
            continue
        name = f"CPU time of a call of {row['subject']}"
        found = (
            f"{row['geometric_mean']:.2f}x of {baseline} by geometric mean of {row['cells']} cases, "
            f"at worst {row['worst']:.2f}x ({row['worst_case']})"
        )
        if device != "cuda":
            checks.append(
                Check(name, Verdict.SKIP, found, "", "the bar is for GPUs: on a CPU a call is its attention, too")
            )
            continue
        verdict = Verdict.PASS if row["worst"] <= bar else Verdict.WARN
        next_step = (
            "" if verdict is Verdict.PASS else f"python -m flashmoe bench --suite call-cost --case {row['worst_case']}"
        )
        checks.append(
            Check(name, verdict, found, f"at most {bar:g}x in every case", "thresholds.toml [call]", next_step)
        )
    return checks
