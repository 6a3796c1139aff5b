"""Tables of docs/kernels/moe.md with layers beside other libraries: rows of this file, numbers of the newest summary.

The summaries (docs/results/*-h100/moe-peers.json) come from a driver outside of this repository, as those libraries need
environments of their own. Times are medians in us, of a layer in a CUDA graph.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashmoe.errors import ReportError

SUMMARIES = "docs/results/*-h100/moe-peers.json"
LAYERS = ("Qwen3-30B", "Mixtral", "gpt-oss-120b", "OLMoE")
LIBRARIES = {"vllm": "vLLM", "sonicmoe_256": "Sonic", "sonicmoe_192": "Sonic"}
Case = dict[str, Any]
Table = tuple[Sequence[str], list[Sequence[str]]]


def forward_table(root: Path) -> Table:
    """Our time, in brackets the fastest other library's, and ours over it, with even routing."""
    even = [case for case in _newest(root)["forward"] if case["routing"] == "even"]
    return _by_tokens(even, _beside)


def skew_table(root: Path) -> Table:
    """Our time with skewed routing over that with even routing: Zipf, and all tokens to the same experts."""
    times = {
        (case["layer"], case["tokens"], case["routing"]): case["sides"]["flashmoe"]["us"]
        for case in _newest(root)["forward"]
    }

    def cell(case: Case) -> str:
        even, zipf, hot = (times[case["layer"], case["tokens"], routing] for routing in ("even", "zipf", "hot"))
        return f"{zipf / even:.2f}, {hot / even:.2f}"

    return _by_tokens([case for case in _newest(root)["forward"] if case["routing"] == "zipf"], cell)


def step_table(root: Path) -> Table:
    """Forward and backward in ms, as in the forward table."""

    def cell(case: Case) -> str:
        ours, _, theirs = _fastest(case)
        return f"{ours['us'] / 1000:.2f} ({theirs['us'] / 1000:.2f}) {ours['us'] / theirs['us']:.2f}"

    return _by_tokens(_newest(root)["step"], cell)


def step_memory_table(root: Path) -> Table:
    """Peak memory of forward and backward beyond inputs and weights, MiB, and the other library's."""

    def cell(case: Case) -> str:
        ours, _, theirs = _fastest(case)
        return f"{ours['peak_mib']} ({theirs['peak_mib']})"

    return _by_tokens(_newest(root)["step"], cell)


def _newest(root: Path) -> dict[str, list[Case]]:
    paths = sorted(root.glob(SUMMARIES))
    if not paths:
        msg = f"no file matches {SUMMARIES}; add the summary, or take its tables out of docs/kernels/moe.md"
        raise ReportError(msg)
    whole: dict[str, list[Case]] = json.loads(paths[-1].read_text(encoding="utf-8"))
    return whole


def _by_tokens(cases: Sequence[Case], cell: Callable[[Case], str]) -> Table:
    found = {(case["layer"], case["tokens"]): cell(case) for case in cases}
    tokens = sorted({case["tokens"] for case in cases})
    return ("T", *LAYERS), [(str(count), *(found.get((layer, count), "") for layer in LAYERS)) for count in tokens]


def _fastest(case: Case) -> tuple[Case, str, Case]:
    """Our times, the fastest other library's name, and its times."""
    others = {name: times for name, times in case["sides"].items() if name != "flashmoe"}
    name = min(others, key=lambda side: others[side]["us"])
    return case["sides"]["flashmoe"], name, others[name]


def _beside(case: Case) -> str:
    ours, name, theirs = _fastest(case)
    return f"{_us(ours['us'])} ({LIBRARIES[name]} {_us(theirs['us'])}) {ours['us'] / theirs['us']:.2f}"


def _us(time: float) -> str:
    return f"{time:.1f}" if time < 100 else f"{time:.0f}"
