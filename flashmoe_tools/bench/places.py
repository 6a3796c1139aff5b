"""Where a case belongs in a picture or a table: which line, how far along it, and who is in front of others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashmoe_tools.operations import Problem
from flashmoe_tools.operations.attention.problem import AttentionProblem
from flashmoe_tools.operations.moe.problem import MoeProblem

FORCED = re.compile(r"flashmoe-sm\d+")  # one family of ours, on a GPU whose own is another


@dataclass(frozen=True)
class Place:
    """Cases of one ``line`` differ in ``length`` alone, and in batch, which grids trade for length."""

    line: str
    kind: str  # what has a roofline of its own: a head dim, a layer
    axis: str  # what ``length`` counts
    length: int
    column: str  # ``length`` as a column's head; longer where it does not say all


def place_of(case: Problem) -> Place:
    if isinstance(case, AttentionProblem):
        line = f"{case.dtype} D={case.head_dim} {case.mask}{heads_text(case)}"
        column = f"{case.seq_k}" if case.seq_q == case.seq_k else f"{case.seq_q} x {case.seq_k}"
        return Place(line, f"{case.dtype}, D = {case.head_dim}", "sequence length", case.seq_k, column)
    if isinstance(case, MoeProblem):
        sizes = f"{case.dtype} E={case.experts} k={case.top_k} H={case.hidden} I={case.intermediate}"
        return Place(f"{sizes} {case.routing}", sizes, "tokens", case.tokens, f"{case.tokens}")
    return Place(case.title, case.title, "", 0, "one case")


def heads_text(case: AttentionProblem) -> str:
    return f", {case.heads_q} on {case.heads_kv} heads" if case.heads_q != case.heads_kv else ""


def in_front(data: Mapping[str, Any]) -> set[str]:
    """Contenders that a reader looks for: ours unless a family is forced, the baseline, and what is the fastest somewhere.

    The others, forced families and references that lose everywhere, are folded away. Those in front are never none.
    """
    ours = {row["name"] for row in data["contenders"] if row["ours"]}
    front = {name for name in ours if not FORCED.fullmatch(name)} | {data["baseline"]}
    for cell in data["cells"]:
        times = {name: row["median_us"] for name, row in cell["summaries"].items() if name not in ours}
        if times:
            front.add(min(times, key=lambda name: times[name]))
    everyone = {row["name"] for row in data["contenders"]}
    return front & everyone or everyone
