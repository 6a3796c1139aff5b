"""Ratios as heat maps: one for each pair, a row for each kind of problem, a column for each length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flashmoe_tools.bench.markdown import MARKS
from flashmoe_tools.bench.places import place_of
from flashmoe_tools.operations import problem_from_json
from flashmoe_tools.operations.attention.problem import AttentionProblem

STEP = 0.25  # of log2 of the ratio: a shade; 1.19 times, and four make twice
SHADES = 4


def heat_rows(data: Mapping[str, Any]) -> dict[str, Any]:
    """``groups``: by pair, row and column the text, shade and verdict of a cell; ``columns``: of each pair its own.

    Batch is part of a column's name where one length has several.
    """
    groups: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
    columns: dict[str, dict[str, int]] = {}
    cases = [problem_from_json(cell["case"]) for cell in data["cells"]]
    batches: dict[tuple[str, str], set[int]] = {}
    for case in cases:
        if isinstance(case, AttentionProblem):
            at = place_of(case)
            batches.setdefault((at.line, at.column), set()).add(case.batch)
    axis = ""
    for case, cell in zip(cases, data["cells"], strict=True):
        at = place_of(case)
        axis, column = axis or at.axis, at.column
        if isinstance(case, AttentionProblem) and (case.seq_q != case.seq_k or len(batches[at.line, column]) > 1):
            column += f" (B={case.batch})"
        for row in cell["comparisons"]:
            pair = f"{row['subject']} / {row['baseline']}"
            columns.setdefault(pair, {}).setdefault(column, at.length)
            groups.setdefault(pair, {}).setdefault(at.line, {})[column] = {
                "text": f"{row['ratio']:.2f}",
                "mark": MARKS[row["verdict"]],
                "level": heat_level(row["ratio"], row["verdict"]),
                "title": f"{row['verdict']} ({row['reason']})",
            }
    return {
        "axis": axis,
        "columns": {pair: sorted(found, key=found.__getitem__) for pair, found in columns.items()},
        "groups": groups,
    }


def heat_level(ratio: float, verdict: str) -> str:
    """The shade of a cell, on a logarithmic scale: half is as far from 1 as twice. Only a shown difference is coloured."""
    if verdict in ("SAME", "AMBIGUOUS"):
        return "even"
    shade = min(SHADES, max(1, math.ceil(abs(math.log2(ratio)) / STEP)))
    return f"{'up' if ratio > 1.0 else 'down'}{shade}"


def legend() -> list[tuple[str, str]]:
    """(class, words) of each shade, from slow to fast."""
    bounds = [2.0 ** (STEP * shade) for shade in range(SHADES)]
    up = [(f"up{at + 1}", f"over {low:.2f}" if at else "over 1") for at, low in enumerate(bounds)]
    down = [(f"down{at + 1}", f"under {1 / low:.2f}" if at else "under 1") for at, low in enumerate(bounds)]
    return [*reversed(down), ("even", "no difference shown"), *up]
