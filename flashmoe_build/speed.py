"""The tables of README.md that say how fast: rows of this file, numbers of the newest reports under docs/results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flashmoe.errors import ReportError

REPORTS = "docs/results/*-h100/bench"  # a folder for each day, so that the last of a name is the newest


@dataclass(frozen=True)
class Line:
    """What a row is called, and whose numbers it shows: a report's name and a contender in it."""

    title: str
    report: str
    subject: str = "flashmoe"


ATTENTION = (
    Line(
        "`llm-prefill`, bf16: 16384 tokens, head dim 64, 128, 256, causal and full, S 512 to 16384", "llm-prefill-bf16"
    ),
    Line("the same, fp16", "llm-prefill-f16"),
    Line("`llm-train`: the backward pass of the same cases, bf16; ours is deterministic, cuDNN's is not", "llm-train"),
    Line(
        "`ragged`: forward over sequences without padding, 16384 tokens; torch only where lengths are equal", "ragged"
    ),
    Line("`train-step`: a step of 8 layers of 2048, 16 heads on 4, S=4096, B=2, bf16, eager", "train-step"),
    Line("`science`: B=8, H=8, S 128 to 2048", "science"),
    Line("`latency`: B=1, H=8, D=64, fp16, S 32 to 512, in a CUDA graph", "latency"),
    Line("`chunked-prefill`: 512 queries, 8192 and 32768 keys; cuDNN lacks that mask", "chunked-prefill"),
    Line("`decode`: one query, 32 heads on 8", "decode"),
    Line("`serving`: the same from pages of 16 to 256, 1 to 256 sequences; torch reads dense caches", "serving"),
)
EXPERTS = (
    Line("`moe-decode`: 1 to 512 tokens", "moe-decode"),
    Line("`moe-prefill`: 2048 to 32768 tokens", "moe-prefill"),
    Line("`moe-train`: forward and backward", "moe-train"),
    Line("`moe-fp8`: e4m3 weights, 1 to 8192 tokens; torch dequantises them", "moe-fp8"),
)
ATTENTION_BASELINES = {
    "sdpa-flash": "to SDPA FLASH",
    "sdpa-cudnn": "to SDPA cuDNN",
    "flash-attn-3": "to FlashAttention-3",
    "sdpa": "to SDPA's default",
}
EXPERT_BASELINES = {
    "torch-grouped-compiled": "to torch's `grouped_mm`, compiled",
    "torch-grouped": "the same, eager",
}


def attention_rows(root: Path) -> tuple[Sequence[str], list[Sequence[str]]]:
    return _rows(root, ATTENTION, ATTENTION_BASELINES)


def expert_rows(root: Path) -> tuple[Sequence[str], list[Sequence[str]]]:
    return _rows(root, EXPERTS, EXPERT_BASELINES)


def prefill_rows(root: Path) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Every case of the forward grid in bfloat16: TFLOP/s of each side, ours in percent of the matrix product, ratios."""
    rivals = {"sdpa-cudnn": "cuDNN", "flash-attn-3": "FlashAttention-3"}
    _, whole, _ = aggregates(root, "llm-prefill-bf16")
    product = whole["data"]["ceilings"]["matmul_tflops"]["bf16"]
    header = ("D", "mask", "S", "TFLOP/s", "%", *rivals.values(), *(f"to {name}" for name in rivals.values()))
    rows: list[Sequence[str]] = []
    for cell in whole["data"]["cells"]:
        case, times = cell["case"], {name: side["median_us"] for name, side in cell["contenders"].items()}
        operations = 4 * case["batch"] * case["heads_q"] * case["seq_q"] * case["seq_k"] * case["head_dim"]
        visible = operations / 2 if case["causal"] else operations
        rate = {name: visible / time / 1e6 for name, time in times.items()}
        ratios = [cell["comparisons"].get(f"flashmoe / {rival}") for rival in rivals]
        rows.append(
            (
                f"{case['head_dim']}",
                "causal" if case["causal"] else "full",
                f"{case['seq_q']}",
                f"{rate['flashmoe']:.0f}",
                f"{100 * rate['flashmoe'] / product:.0f}",
                *(f"{rate[rival]:.0f}" if rival in rate else "" for rival in rivals),
                *(f"{found['ratio']:.2f}" if found else "" for found in ratios),
            )
        )
    return header, rows


def aggregates(root: Path, report: str, subject: str = "flashmoe") -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The newest report of that name with that contender: its file, the whole of it, aggregates by baseline."""
    for path in sorted(root.glob(f"{REPORTS}/{report}.json"), reverse=True):
        whole = _read(path)
        found = {row["baseline"]: row for row in whole["data"]["aggregates"] if row["subject"] == subject}
        if found:
            return path, whole, found
    msg = f"no {report}.json in {REPORTS} has {subject}; add the report, or take the row out of flashmoe_build/speed.py"
    raise ReportError(msg)


@lru_cache(maxsize=32)
def _read(path: Path) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return whole


def _rows(root: Path, lines: Sequence[Line], baselines: dict[str, str]) -> tuple[Sequence[str], list[Sequence[str]]]:
    header = ("geometric mean and worst case", "cases", *baselines.values(), "measured")
    return header, [row_cells(root, line, list(baselines)) for line in lines]


def row_cells(root: Path, line: Line, baselines: Sequence[str]) -> Sequence[str]:
    path, whole, found = aggregates(root, line.report, line.subject)
    ran = max(row["cells"] for name, row in found.items() if name in baselines)
    planned = whole["data"]["suite"]["cases"]
    commit = whole["environment"].get("commit", "")[:7]  # reports have one since 2026-11-22
    day = f"[{whole['started'][:10]}]({path.relative_to(root).as_posix()})"
    return (
        line.title,
        f"{ran}" if ran == planned else f"{ran} of {planned}",
        *(ratio(found.get(baseline)) for baseline in baselines),
        f"{day}, {commit}" if commit else day,
    )


def ratio(row: dict[str, Any] | None) -> str:
    """Mean and worst case; of one case the one number; empty where the contender did not take part."""
    if row is None:
        return ""
    mean, worst = f"{row['geometric_mean']:.2f}", f"{row['worst']:.2f}"
    return mean if row["cells"] == 1 else f"{mean}, worst {worst}"
