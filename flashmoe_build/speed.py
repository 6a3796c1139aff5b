"""The speed tables in README.md and docs/: rows from this file, numbers from the newest reports in docs/results."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from flashmoe.errors import ReportError

REPORTS = "docs/results/*-{gpu}/bench"  # one folder per day, so that the last of a name is the newest
GPUS = {"h100": "H100", "h200": "H200"}
PREFILL_GPUS = ("h200", "h100")  # the table by case and the figure show the first of these that has a report


@dataclass(frozen=True)
class Line:
    """A row's title and the source of its numbers: a report's name and a contender in it."""

    title: str
    report: str
    subject: str = "flashmoe"


ATTENTION = (
    Line(
        "`llm-prefill`, bf16: 16384 tokens, head dim 64, 128, 256, causal and full, S 512 to 16384", "llm-prefill-bf16"
    ),
    Line("`llm-train`: the backward pass of the same cases, bf16; ours is deterministic, cuDNN's is not", "llm-train"),
    Line(
        "`mla-prefill`: 192 columns of q and k, 128 of v, 128 heads, S 512 to 8192, bf16; FlashAttention-3 built without a tile for it",
        "mla-prefill",
    ),
    Line(
        "`mla-train`: the backward pass of the same cases, likewise; ours is deterministic, cuDNN's is not", "mla-train"
    ),
    Line(
        "`ragged`: forward over sequences without padding, 16384 tokens; torch only where lengths are equal", "ragged"
    ),
    Line("`train-step`: a step of 8 layers of 2048, 16 heads on 4, S=4096, B=2, bf16, eager", "train-step"),
    Line("`latency`: B=1, H=8, D=64, fp16, S 32 to 512, in a CUDA graph", "latency"),
    Line("`chunked-prefill`: 512 queries, 8192 and 32768 keys; cuDNN lacks that mask", "chunked-prefill"),
    Line("`chunks`: 2 to 2048 queries, 2048 to 65536 keys, in CUDA graphs", "chunks"),
    Line("`decode`: one query, 32 heads on 8", "decode"),
    Line("`serving`: the same from pages of 16 to 256, 1 to 256 sequences; torch reads dense caches", "serving"),
    Line("`serving-graph`: the same in CUDA graphs, caches larger than the L2 but in one case", "serving-graph"),
)
CACHES = (
    Line("`mla-decode`: latent attention, 8 to 128 heads, pages of 64", "mla-decode"),
    Line("`serving-fp8`: decoding and chunks over caches in e4m3, pages of 64", "serving-fp8"),
    Line("`prefill-fp8`: q, k and v in e4m3, head dim 64, 128 and 256, S 1024 to 32768", "prefill-fp8"),
)
HEADLINE = (
    Line("forward, 36 cases: D 64 to 256, S 512 to 16384, causal and full", "llm-prefill-bf16"),
    Line("backward, the same cases; ours is deterministic, the others are not", "llm-train"),
    Line("decoding from pages, 1 to 256 sequences", "serving"),
    Line("the same in CUDA graphs", "serving-graph"),
    Line("decoding and chunks over caches in e4m3, D 64 to 256", "serving-fp8"),
    Line("forward of q, k and v in e4m3, D 64 to 256, S 1024 to 32768", "prefill-fp8"),
)
EXPERTS = (
    Line("`moe-decode`: 1 to 512 tokens", "moe-decode"),
    Line("`moe-prefill`: 2048 to 32768 tokens", "moe-prefill"),
    Line("`moe-train`: forward and backward", "moe-train"),
    Line("`moe-fp8`: e4m3 weights, 1 to 32768 tokens; of DeepGEMM and vLLM the two products alone", "moe-fp8"),
)
ATTENTION_BASELINES = {
    "sdpa-flash": "to SDPA FLASH",
    "sdpa-cudnn": "to SDPA cuDNN",
    "flash-attn-3": "to FlashAttention-3",
    "sdpa": "to SDPA's default",
}
CACHE_BASELINES = {
    "flash-mla": "to FlashMLA",
    "flashmoe-16-bit": "to our 16 bits",
    "flash-attn-3": "to FlashAttention-3",
    "sdpa-cudnn": "to cuDNN",
    "torch": "to torch",
}
# Peers' names in the 8-bit suites.
PEERS = {"flash-attn-3-e4m3": "flash-attn-3", "cudnn": "sdpa-cudnn"}
EXPERT_BASELINES = {
    "torch-grouped-compiled": "to torch's `grouped_mm`, compiled",
    "torch-grouped": "the same, eager",
    "deepgemm": "to DeepGEMM",
    "vllm": "to vLLM's two Triton products",
}


def headline_rows(root: Path) -> tuple[Sequence[str], list[Sequence[str]]]:
    columns = {"sdpa-flash": "to SDPA FLASH", "sdpa-cudnn": "to cuDNN", "flash-attn-3": "to FlashAttention-3"}
    return _rows(root, HEADLINE, {**columns, "flashmoe-16-bit": CACHE_BASELINES["flashmoe-16-bit"]}, root)


def attention_rows(root: Path) -> tuple[Sequence[str], list[Sequence[str]]]:
    return _rows(root, ATTENTION, ATTENTION_BASELINES, root / "docs")


def expert_rows(root: Path) -> tuple[Sequence[str], list[Sequence[str]]]:
    return _rows(root, EXPERTS, EXPERT_BASELINES, root / "docs")


def cache_rows(root: Path) -> tuple[Sequence[str], list[Sequence[str]]]:
    return _rows(root, CACHES, CACHE_BASELINES, root / "docs")


def prefill_rows(root: Path) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Every case of the forward grid in bfloat16: TFLOP/s of each side, ours in percent of the matrix product, ratios."""
    rivals = {"sdpa-cudnn": "cuDNN", "flash-attn-3": "FlashAttention-3"}
    _, whole, _ = aggregates(root, "llm-prefill-bf16", gpus=PREFILL_GPUS)
    product = whole["data"]["ceilings"]["matmul_tflops"]["bf16"]
    header = ("D", "mask", "S", "TFLOP/s", "%", *rivals.values(), *(f"to {name}" for name in rivals.values()))
    rows: list[Sequence[str]] = []
    for names, rate, others in _by_case(whole, rivals):
        rows.append((*names, f"{rate:.0f}", f"{100 * rate / product:.0f}", *others))
    return header, rows


def fp8_rows(root: Path) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Every case of prefill in 8 bits; no rows without a report."""
    rivals = {"flashmoe-16-bit": "16 bits", "flash-attn-3": "FlashAttention-3"}
    header = ("D", "mask", "S", "scales", "TFLOP/s", *rivals.values(), *(f"to {name}" for name in rivals.values()))
    gpus = [gpu for gpu in PREFILL_GPUS if any(root.glob(f"{REPORTS.format(gpu=gpu)}/prefill-fp8.json"))]
    if not gpus:
        return header, []
    _, whole, _ = aggregates(root, "prefill-fp8", gpus=gpus)
    scales = [cell["case"].get("scales", "none") for cell in whole["data"]["cells"]]
    cases = zip(scales, _by_case(whole, rivals), strict=True)
    return header, [(*names, scale, f"{rate:.0f}", *others) for scale, (names, rate, others) in cases]


def mxfp4_rows(root: Path) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Packed experts by number of tokens, us: ours, triton_kernels' and our 16-bit layer's, for layers with 128 and with 32 experts."""
    sides = {"flashmoe-packed": "ours", "triton-kernels": "triton_kernels", "flashmoe-bf16": "our 16 bits"}
    _, whole, _ = aggregates(root, "moe-mxfp4", "flashmoe-packed", PREFILL_GPUS)
    times: dict[int, list[str]] = {}
    for cell in sorted(whole["data"]["cells"], key=lambda cell: (cell["case"]["tokens"], -cell["case"]["experts"])):
        found = [cell["contenders"].get(side, {}) for side in sides]
        times.setdefault(cell["case"]["tokens"], []).extend(
            f"{side['median_us']:.4g}" if "median_us" in side else "wrong" if "max_error" in side else ""
            for side in found
        )
    header = ("tokens", *(f"{layer}: {name}" for layer in ("120b", "20b") for name in sides.values()))
    return header, [(f"{tokens}", *row) for tokens, row in times.items()]


def _by_case(
    whole: dict[str, Any], rivals: Iterable[str]
) -> Iterator[tuple[tuple[str, str, str], float, Sequence[str]]]:
    """D, mask and S; our TFLOP/s; the rivals' TFLOP/s, and our speed relative to theirs."""
    for cell in whole["data"]["cells"]:
        case, times = cell["case"], {name: side["median_us"] for name, side in cell["contenders"].items()}
        operations = 4 * case["batch"] * case["heads_q"] * case["seq_q"] * case["seq_k"] * case["head_dim"]
        visible = operations / 2 if case["causal"] else operations
        rate = {name: visible / time / 1e6 for name, time in times.items()}
        ratios = [cell["comparisons"].get(f"flashmoe / {rival}") for rival in rivals]
        names = (f"{case['head_dim']}", "causal" if case["causal"] else "full", f"{case['seq_q']}")
        others = [f"{rate[rival]:.0f}" if rival in rate else "" for rival in rivals]
        yield names, rate["flashmoe"], [*others, *(f"{found['ratio']:.2f}" if found else "" for found in ratios)]


def narrow_rows(root: Path) -> tuple[Sequence[str], list[Sequence[str]]]:
    """TFLOP/s of each side for values with fewer columns than keys, and ratios; no rows without a report."""
    rivals = {"sdpa-cudnn": "cuDNN", "flash-attn-3": "FlashAttention-3"}
    header = ("pass", "mask", "S", "TFLOP/s", *rivals.values(), *(f"to {name}" for name in rivals.values()))
    rows: list[Sequence[str]] = []
    for word, report, of_keys, of_values in (("forward", "mla-prefill", 1, 1), ("backward", "mla-train", 3, 2)):
        if not any(any(root.glob(f"{REPORTS.format(gpu=gpu)}/{report}.json")) for gpu in GPUS):
            continue
        for cell in aggregates(root, report, gpus=PREFILL_GPUS)[1]["data"]["cells"]:
            case, found = cell["case"], cell["comparisons"]
            columns = of_keys * case["head_dim"] + of_values * case["value_dim"]
            work = 2 * case["batch"] * case["heads_q"] * case["seq_q"] * case["seq_k"] * columns
            visible = work / 2 if case["causal"] else work
            rate = {name: f"{visible / side['median_us'] / 1e6:.0f}" for name, side in cell["contenders"].items()}
            ratios = [found.get(f"flashmoe / {rival}") for rival in rivals]
            mask = "causal" if case["causal"] else "full"
            numbers = [rate.get(name, "") for name in ("flashmoe", *rivals)]
            rows.append(
                (word, mask, f"{case['seq_q']}", *numbers, *(f"{one['ratio']:.2f}" if one else "" for one in ratios))
            )
    return header, rows


COLOURS = {"flashmoe": "#2f6fde", "flash-attn-3": "#e08a2e", "sdpa-cudnn": "#76b041"}
_BAR, _HEIGHT, _BASE = 18, 200, 240  # pixels: width of a bar, height of _FULL, y of the base line
_FULL = 800.0  # TFLOP/s


def prefill_figure(root: Path) -> str:
    """The figure of README.md, as SVG: causal forward attention at head dim 128 by sequence length, TFLOP/s."""
    header, rows = prefill_rows(root)
    gpu = GPUS[gpu_of(aggregates(root, "llm-prefill-bf16", gpus=PREFILL_GPUS)[0])]
    columns = {"flashmoe": "TFLOP/s", "flash-attn-3": "FlashAttention-3", "sdpa-cudnn": "cuDNN"}
    cases = [dict(zip(header, row, strict=True)) for row in rows if row[0] == "128" and row[1] == "causal"]
    width = 72 + len(cases) * (4 * _BAR + 8)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="290" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="290" fill="white"/>',
        f'<text x="50" y="16">Causal forward, bf16, head dim 128, one {gpu}: TFLOP/s by sequence length</text>',
    ]
    for mark in range(0, 801, 200):
        y = _BASE - mark / _FULL * _HEIGHT
        parts.append(
            f'<path d="M48 {y:.0f}H{width}" stroke="#ddd"/><text x="42" y="{y + 4:.0f}" text-anchor="end">{mark}</text>'
        )
    for place, case in enumerate(cases):
        left = 56 + place * (4 * _BAR + 8)
        for index, (name, column) in enumerate(columns.items()):
            height = float(case[column]) / _FULL * _HEIGHT
            x, top = left + index * _BAR, _BASE - height
            parts.append(
                f'<rect x="{x}" y="{top:.1f}" width="{_BAR - 2}" height="{height:.1f}" fill="{COLOURS[name]}"/>'
            )
        parts.append(f'<text x="{left + 1.5 * _BAR:.0f}" y="256" text-anchor="middle">{case["S"]}</text>')
    for index, (name, column) in enumerate(columns.items()):
        title = "flashmoe" if name == "flashmoe" else column
        parts.append(f'<rect x="{56 + 150 * index}" y="268" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{74 + 150 * index}" y="279">{title}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


Found = tuple[Path, dict[str, Any], dict[str, Any]]


def aggregates(root: Path, report: str, subject: str = "flashmoe", gpus: Sequence[str] = tuple(GPUS)) -> Found:
    """The newest report of that name with that contender, for the first of ``gpus`` that has one: its file, its full content, and its
    aggregates by baseline."""
    paths = (sorted(root.glob(f"{REPORTS.format(gpu=gpu)}/{report}.json"), reverse=True) for gpu in gpus)
    for path in chain.from_iterable(paths):
        whole = _read(path)
        found = {row["baseline"]: row for row in whole["data"]["aggregates"] if row["subject"] == subject}
        if found:
            return path, whole, found
    where = " or ".join(REPORTS.format(gpu=gpu) for gpu in gpus)
    msg = f"no {report}.json in {where} has {subject}; add the report, or take the row out of flashmoe_build/speed.py"
    raise ReportError(msg)


def gpu_of(report: Path) -> str:
    """The key of GPUS, from the name of the report's day folder."""
    return report.parents[1].name.rsplit("-", 1)[1]


@lru_cache(maxsize=32)
def _read(path: Path) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return whole


def _rows(
    root: Path, lines: Sequence[Line], baselines: dict[str, str], folder: Path
) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Header and rows; links are relative to a page in ``folder``."""
    header = ("geometric mean and worst case", "GPU", "cases", *baselines.values(), "measured")
    rows: list[Sequence[str]] = []
    for line in lines:
        has = [gpu for gpu in GPUS if any(root.glob(f"{REPORTS.format(gpu=gpu)}/{line.report}.json"))]
        rows += [row_cells(root, line, list(baselines), folder, gpu) for gpu in has]
    return header, rows


def row_cells(root: Path, line: Line, baselines: Sequence[str], folder: Path, gpu: str) -> Sequence[str]:
    path, whole, found = aggregates(root, line.report, line.subject, (gpu,))
    found = {PEERS.get(name, name): row for name, row in found.items()}
    ran = max(row["cells"] for name, row in found.items() if name in baselines)
    planned = whole["data"]["suite"]["cases"]
    commit = whole["environment"].get("commit", "")[:7]  # in reports since 2026-11-22
    day = f"[{whole['started'][:10]}]({os.path.relpath(path, folder)})"
    return (
        line.title,
        GPUS[gpu],
        f"{ran}" if ran == planned else f"{ran} of {planned}",
        *(ratio(found.get(baseline)) for baseline in baselines),
        f"{day}, {commit}" if commit else day,
    )


def ratio(row: dict[str, Any] | None) -> str:
    """Mean and worst case; a single number for one case; empty if the contender did not run."""
    if row is None:
        return ""
    mean, worst = f"{row['geometric_mean']:.2f}", f"{row['worst']:.2f}"
    return mean if row["cells"] == 1 else f"{mean}, worst {worst}"
