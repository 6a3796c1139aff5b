"""Tables of docs/kernels/attention-varlen.md: rows from this file, numbers from the newest reports in docs/results."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashmoe_build.speed import PREFILL_GPUS as GPUS
from flashmoe_build.speed import aggregates, ratio
from flashmoe_tools.operations import problem_from_json
from flashmoe_tools.operations.serving.problem import MIXED, SHORT, ServingProblem

Cell = dict[str, Any]
Table = tuple[Sequence[str], list[Sequence[str]]]
HEADS = ((16, 16), (32, 8))
CUDNN, FA3, EFFICIENT, FLEX = "sdpa-cudnn", "flash-attn-3", "sdpa-efficient", "flex-attention"


def ragged_table(root: Path) -> Table:
    """TFLOP/s of causal prefill at D=128 by lengths: ours, our dense kernel and FA3, the latter two each with our relative speed."""
    rows: dict[str, dict[tuple[int, int], list[str]]] = {}
    for problem, cell in _serving(root, "ragged"):
        if problem.head_dim == 128 and problem.causal and not problem.page_size:
            heads = (problem.heads_q, problem.heads_kv)
            rates = [_rate(cell, "flashmoe"), *(_with_ratio(cell, side) for side in ("flashmoe-dense", FA3))]
            rows.setdefault(_lengths(problem), {})[heads] = rates
    header = ("lengths, causal", *(word for q, kv in HEADS for word in (f"{q} heads on {kv}", "dense", "FA3")))
    return header, [(name, *(one for heads in HEADS for one in row.get(heads, [""] * 3))) for name, row in rows.items()]


def head_dim_table(root: Path) -> Table:
    """TFLOP/s of our ragged and our dense kernel, 16 heads, by lengths and head dim."""
    rows: dict[str, dict[int, str]] = {}
    for problem, cell in _serving(root, "ragged"):
        if problem.heads_q == 16 and not problem.page_size:
            name = f"{_lengths(problem)}{'' if problem.causal else ', full'}"
            ours, dense = _rate(cell, "flashmoe"), _with_ratio(cell, "flashmoe-dense")
            rows.setdefault(name, {})[problem.head_dim] = f"{ours} of {dense}" if dense else ours
    return _spread(rows, "lengths")


def pages_table(root: Path) -> Table:
    """TFLOP/s of prefill from pages: ours and FA3."""
    cells = [(problem, cell) for problem, cell in _serving(root, "ragged") if problem.page_size]
    return ("keys in a page", "flashmoe", "dense caches", "FA3"), [
        (
            f"{problem.page_size}",
            _rate(cell, "flashmoe"),
            *(_with_ratio(cell, side) for side in ("flashmoe-dense", FA3)),
        )
        for problem, cell in cells
    ]


def scores_table(root: Path) -> Table:
    """Windows, sinks and masks: TFLOP/s of visible work, and our speed relative to kernels that compute the same or no such option."""
    sides = {"flashmoe-plain": "without", FA3: "FA3", FLEX: "FlexAttention", EFFICIENT: "efficient", CUDNN: "cuDNN"}
    cells = [(problem, cell) for problem, cell in _serving(root, "masks") if not problem.softcap]
    return _scores(cells, sides)


def backward_scores_table(root: Path) -> Table:
    """The same for the backward pass, with softcaps."""
    sides = {"flashmoe-plain": "without", FLEX: "FlexAttention", EFFICIENT: "efficient", CUDNN: "cuDNN"}
    cells = [(problem, cell) for problem, cell in _serving(root, "masks-train") if problem != problem.plain]
    return _scores(cells, sides)


def learned_table(root: Path) -> Table:
    """A learned mask, us, ours and FlexAttention: forward and backward in a CUDA graph."""
    rows: list[Sequence[str]] = []
    for problem, cell in _serving(root, "masks-train-graph"):
        size = f"{problem.batch} x {problem.seq_k}"
        rows.append((size, _heads(problem), _time(cell, "flashmoe"), _time(cell, FLEX), _ratio(cell, FLEX)))
    return ("mask", "heads, D", "us", "FlexAttention", "its time to ours"), rows


def _scores(cells: Sequence[tuple[ServingProblem, Cell]], sides: dict[str, str]) -> Table:
    rows: list[Sequence[str]] = []
    ratios = [side for side in sides if side != FA3]
    for problem, cell in cells:
        dtype = "" if problem.dtype == "bf16" else f", {_dtype(problem)}"
        title = f"{_lengths(problem)}{problem.describe_scores()}{dtype}"
        rates = [_rate(cell, side) for side in ("flashmoe", *sides)]
        rows.append((_heads(problem), title, *rates, *(_ratio(cell, base) for base in ratios)))
    return ("heads, D", "case", "flashmoe", *sides.values(), *(f"to {sides[side]}" for side in ratios)), rows


def _dtype(problem: ServingProblem) -> str:
    return {"f16": "fp16"}.get(problem.dtype, problem.dtype)


def decode_table(root: Path) -> Table:
    """Decoding in CUDA graphs, us: ours, FA3 on the same pages, cuDNN on dense caches, and our time relative to theirs."""
    rows: list[Sequence[str]] = []
    for problem, cell in _serving(root, "serving-graph"):
        times = (_time(cell, side) for side in ("flashmoe", FA3, "flashmoe-dense", CUDNN))
        name = f"{_keys(problem)}, {problem.heads_q} heads, pages of {problem.page_size}"
        rows.append((name, *times, _time_ratio(cell, FA3), _time_ratio(cell, CUDNN)))
    header = ("sequences x keys", "flashmoe", "FA3", "flashmoe, dense", "cuDNN, dense", "of FA3's", "of cuDNN's")
    return header, rows


def copy_table(root: Path) -> Table:
    """Decoding from pages, 32 heads on 8: percent of the copy bandwidth as a range over page sizes, by sequences and keys."""
    _, whole, _ = aggregates(root, "serving", gpus=GPUS)
    copy = whole["data"]["ceilings"]["copy_gbps"]
    found: dict[int, dict[int, list[float]]] = {}
    for problem, cell in _serving(root, "serving"):
        if problem.spread == "equal" and problem.heads_q == 32:
            share = problem.bytes_moved / cell["contenders"]["flashmoe"]["median_us"] / copy / 10
            found.setdefault(problem.batch, {}).setdefault(problem.seq_k, []).append(share)
    keys = sorted({count for row in found.values() for count in row})
    rows = [(f"{batch}", *(_range(row.get(count, ())) for count in keys)) for batch, row in found.items()]
    return ("sequences", *(f"{count} keys" for count in keys)), [*rows]


def _range(values: Sequence[float]) -> str:
    """Smallest and largest, or a single number if both round to it."""
    bounds = sorted({f"{min(values):.0f}", f"{max(values):.0f}"}, key=int) if values else []
    return " to ".join(bounds)


def shared_table(root: Path) -> Table:
    """Decoding if all sequences share the same pages: us, and the kernel's rate of keys, counted once per sequence."""
    rows: list[Sequence[str]] = []
    for problem, cell in _serving(root, "serving"):
        if problem.spread == "shared":
            taken = replace(problem, spread="equal").bytes_moved / cell["contenders"]["flashmoe"]["median_us"] / 1e6
            times = (_time(cell, side) for side in ("flashmoe", FA3))
            rows.append((_keys(problem), f"{problem.head_dim}", *times, _time_ratio(cell, FA3), f"{taken:.1f}"))
    return ("sequences x keys", "D", "flashmoe", "FA3", "of FA3's", "TB/s of keys"), rows


def means_table(root: Path) -> Table:
    """Geometric means and worst cases of the decoding suites."""
    sides = {"sdpa-flash": "to SDPA FLASH", CUDNN: "to cuDNN", FA3: "to FA3"}
    rows: list[Sequence[str]] = []
    for report in ("serving", "serving-graph", "decode"):
        found = aggregates(root, report, gpus=GPUS)[2]
        rows.append((f"`{report}`", *(ratio(found.get(side)) for side in sides)))
    return ("suite", *sides.values()), rows


def backward_table(root: Path) -> Table:
    """Our ragged backward pass: its time relative to a dense call, and in brackets relative to dense kernels of the same form."""
    rows: dict[str, dict[int, str]] = {}
    for cell in _cells(root, "ragged-train", "flashmoe-ragged"):
        call, split = (_time_ratio(cell, f"flashmoe-dense{form}", "flashmoe-ragged") for form in ("", "-split"))
        name = _backward_name(cell["case"])
        rows.setdefault(name, {})[cell["case"]["head_dim"]] = f"{call} ({split})" if split else call
    return _spread(rows, "backward")


def _backward_name(case: dict[str, Any]) -> str:
    """A dense case in words: 8 x 2048 causal, 16 heads on 4."""
    grouped = "" if case["heads_q"] == case["heads_kv"] else f", {case['heads_q']} heads on {case['heads_kv']}"
    return f"{case['batch']} x {case['seq_q']} {'causal' if case['causal'] else 'full'}{grouped}"


def _spread(rows: dict[str, dict[int, str]], first: str) -> Table:
    dims = sorted({dim for row in rows.values() for dim in row})
    header = (first, *(f"D={dim}" for dim in dims))
    return header, [(name, *(row.get(dim, "") for dim in dims)) for name, row in rows.items()]


def _cells(root: Path, report: str, subject: str = "flashmoe") -> list[Cell]:
    """The timed cells of the newest report of that name."""
    _, whole, _ = aggregates(root, report, subject, GPUS)
    return [cell for cell in whole["data"]["cells"] if "median_us" in cell["contenders"].get(subject, {})]


def _serving(root: Path, report: str) -> Iterator[tuple[ServingProblem, Cell]]:
    for cell in _cells(root, report):
        problem = problem_from_json(cell["case"])
        assert isinstance(problem, ServingProblem)
        yield problem, cell


def _rate(cell: Cell, side: str) -> str:
    """TFLOP/s of the problem that the contender computes; empty if it was not timed."""
    found = cell["contenders"].get(side, {})
    if "median_us" not in found:
        return ""
    problem = problem_from_json(cell["case"])
    own = problem.from_key(found["yardstick"]) if "yardstick" in found else problem
    return f"{own.flops / found['median_us'] / 1e6:.0f}"


def _time(cell: Cell, side: str) -> str:
    time = cell["contenders"].get(side, {}).get("median_us")
    return "" if time is None else f"{time:.1f}" if time < 1000 else f"{time:.0f}"


def _ratio(cell: Cell, base: str) -> str:
    found = cell["comparisons"].get(f"flashmoe / {base}")
    return f"{found['ratio']:.2f}" if found else ""


def _time_ratio(cell: Cell, base: str, subject: str = "flashmoe") -> str:
    """Our time divided by the other's: the reciprocal of the ratio of speeds."""
    found = cell["comparisons"].get(f"{subject} / {base}")
    return f"{1 / found['ratio']:.2f}" if found else ""


def _with_ratio(cell: Cell, side: str) -> str:
    """The other's TFLOP/s, and our relative speed."""
    return f"{_rate(cell, side)}, {_ratio(cell, side)}" if _ratio(cell, side) else ""


def _heads(problem: ServingProblem) -> str:
    heads = f"{problem.heads_q}" if problem.heads_q == problem.heads_kv else f"{problem.heads_q} on {problem.heads_kv}"
    return f"{heads}, {problem.head_dim}"


def _lengths(problem: ServingProblem) -> str:
    """A batch in words: 8 x 2048."""
    if problem.spread == "mixed":
        return f"{problem.seq_k} to {problem.seq_k * MIXED[-1] // MIXED[0]}, {problem.batch}"
    if problem.spread in SHORT:
        return f"{problem.seq_k} and {problem.batch - 1} x {SHORT[problem.spread]}"
    return f"{problem.batch} x {problem.seq_k}" if problem.batch > 1 else f"{problem.seq_k}"


def _keys(problem: ServingProblem) -> str:
    """A batch of caches in words: 8 x 2048, or a description of its lengths."""
    if problem.spread == "ramp":
        return f"{problem.batch} of {problem.lengths_k[0]} to {problem.seq_k}"
    if problem.spread in SHORT:
        return f"{problem.seq_k} among {problem.batch - 1} of {SHORT[problem.spread]}"
    return f"{problem.batch} x {problem.seq_k}"
