"""Runs the multi-GPU suite on this rank; rank 0 has the report."""

import os
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from flashmoe._version import __version__
from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.distributed.contenders import CODES, AttentionCalls, ExpertsCalls, RaggedCalls, captured
from flashmoe_tools.bench.distributed.measure import Ranks, counted, link_rates, median
from flashmoe_tools.bench.distributed.model import Attention, Rates, context_parallel
from flashmoe_tools.bench.distributed.workloads import AttentionWorkload, ExpertsWorkload
from flashmoe_tools.bench.record import DATA_SCHEMA
from flashmoe_tools.bench.suites import Suite
from flashmoe_tools.report import Check, Report, Verdict, host_environment, utc_now

LIMIT = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # relative to the largest element
CODES_LIMIT = 0.04  # root mean square of the output's error against one GPU, relative to the output's
EXCHANGES = 1.3  # multiple of the time that a dispatch's or combine's bytes need at the measured rate
MODEL = 0.10  # allowed relative difference between the paper model and the measurement
START = "torchrun --standalone --nproc-per-node 2 -m flashmoe bench --suite {name}"


def measure_distributed(
    suite: Suite, requested: str, command: tuple[str, ...], budget: float | None = None
) -> Report | None:
    """Measures the suite; returns the report on rank 0 and None on the others.

    After ``budget`` seconds no further workload is started. Raises ArgumentError if torchrun did not start this process.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        msg = f"suite {suite.name} runs as one process per GPU; start it with: {START.format(name=suite.name)}"
        raise ArgumentError(msg)
    if int(os.environ["WORLD_SIZE"]) < 2:
        msg = f"suite {suite.name} needs at least two ranks; start it with: {START.format(name=suite.name)}"
        raise ArgumentError(msg)
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    device = torch.device("cuda", local) if requested == "cuda" else torch.device("cpu")
    if requested == "cuda":
        if torch.cuda.device_count() <= local:
            msg = f"rank {local} has no GPU; this host has {torch.cuda.device_count()}; start one process per GPU"
            raise ArgumentError(msg)
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"device_id": device} if requested == "cuda" else {}
    dist.init_process_group("nccl" if requested == "cuda" else "gloo", timeout=timedelta(minutes=5), **options)
    try:
        return _measure(suite, Ranks(device), command, budget)
    finally:
        dist.destroy_process_group()


def _measure(suite: Suite, ranks: Ranks, command: tuple[str, ...], budget: float | None = None) -> Report | None:
    started, clock = utc_now(), time.monotonic()
    links = link_rates(ranks)
    rows, checks = [], []
    for work in suite.workloads:
        if budget is not None and max(ranks.everywhere(time.monotonic() - clock)) > budget:
            checks.append(Check(work.key, Verdict.SKIP, f"not begun: {budget:g} s had passed"))
            continue
        if ranks.rank == 0:
            print(f"{work.key} ...", flush=True)
        row, found = (
            _attention(work, ranks, suite.repeats, links)
            if isinstance(work, AttentionWorkload)
            else _experts(work, ranks, suite.repeats, links)
        )
        rows.append(row)
        checks += found
        if ranks.is_gpu:
            torch.cuda.empty_cache()
    if ranks.rank != 0:
        return None
    data = {
        "schema": DATA_SCHEMA,
        "suite": {"name": suite.name, "title": suite.title, "repeats": suite.repeats},
        "ranks": ranks.size,
        "links_gbps": links,
        "parts": rows,
    }
    environment = {**host_environment(), "flashmoe": __version__, "torch": torch.__version__}
    if ranks.is_gpu:
        environment |= {"gpu": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return Report("bench-distributed", tuple(checks), data, environment, command, started, time.monotonic() - clock)


def _right(work: AttentionWorkload | ExpertsWorkload, error: float, ranks: Ranks) -> Check:
    limit = LIMIT[torch.bfloat16 if ranks.is_gpu else torch.float32]
    worst = max(ranks.everywhere(error))
    word = Verdict.PASS if worst <= limit else Verdict.FAIL
    return Check(f"{work.key} result", word, f"{worst:.2g} of the largest element", f"at most {limit:g} from one GPU's")


def _attention(
    work: AttentionWorkload, ranks: Ranks, repeats: int, links: dict[str, float]
) -> tuple[dict[str, Any], list[Check]]:
    calls = RaggedCalls(work, ranks) if work.sequences else AttentionCalls(work, ranks)
    checks = [_right(work, calls.error(), ranks)]
    with counted(ranks) as sent:
        calls.divided("ring")
    with calls.calls() as (timed, absent):
        times = ranks.interleaved(timed, work.repeats or repeats)
        medians = {name: median(samples) for name, samples in times.items()}
        sustained = ranks.sustained(timed, medians)
    element = 2 if ranks.is_gpu else 4
    least = work.min_bytes(ranks.size, element)
    overlaps = ranks.overlap(lambda: calls.divided("ring"))
    row = {
        "key": work.key,
        "ms": medians,
        "samples": times,
        "sustained_ms": sustained,
        "of_one": {name: sustained["one"] / value for name, value in sustained.items() if name != "one"},
        "ideal_ms": medians["one"] / ranks.size,
        "bytes_sent": sent.sent,
        "bytes_least": least,
        "overlap": overlaps,
        "without": absent,
    }
    linear, single = (_of_linear(found, ranks.size) for found in (sustained, medians))
    found = f"{linear:.3f} of linear, {single:.3f} for single calls"
    word = Verdict.PASS if linear >= work.at_least else Verdict.WARN
    checks.append(Check(f"{work.key} speed", word, found, f"at least {work.at_least:g}" if work.at_least else ""))
    if ranks.is_gpu:
        checks.append(_model(work, ranks, medians, links, row))
    return row, checks


def _of_linear(times: dict[str, float], size: int) -> float:
    return times["one"] / size / min(times[name] for name in ("ring", "all_gather") if name in times)


def problem_of(work: AttentionWorkload) -> Attention:
    """The workload as the paper model describes it."""
    squares = sum((b - a) ** 2 for a, b in pairwise(work.ends())) if work.sequences else 0
    return Attention(work.length, work.heads, work.heads_kv, work.head_dim, squares)


def _model(
    work: AttentionWorkload, ranks: Ranks, medians: dict[str, float], links: dict[str, float], row: dict[str, Any]
) -> Check:
    problem = problem_of(work)
    rates = Rates(attention=problem.products() / medians["one"] / 1e9, link=links["message"])
    told = context_parallel(problem, ranks.size, rates).together
    row["model_ms"] = told
    off = told / medians["ring"] - 1
    word = Verdict.PASS if abs(off) <= MODEL else Verdict.WARN
    return Check(f"{work.key} model", word, f"{told:.2f} ms, {off:+.1%}", f"within {MODEL:.0%} of the ring")


def _experts(
    work: ExpertsWorkload, ranks: Ranks, repeats: int, links: dict[str, float]
) -> tuple[dict[str, Any], list[Check]]:
    calls = ExpertsCalls(work, ranks)
    checks = [_right(work, calls.error(), ranks)]
    with counted(ranks) as sent:
        calls.divided("experts")
    timed = calls.calls()
    if ranks.is_gpu:
        padded = [name for name in timed if name.startswith("padded")]
        timed |= {f"{name}, graph": calls.graph(name) for name in padded}
    times = ranks.interleaved(timed, work.repeats or 4 * repeats)
    medians = {name: median(samples) for name, samples in times.items()}
    ways = 4 if work.backward else 2  # there and back, and the same for gradients
    least = ways * calls.rows_sent * work.hidden * calls.x.element_size()
    travel = max(ranks.everywhere(least)) / links["all_to_all"] / 1e6
    # Relative to the busiest rank's work; with two ranks and uniform routing that is about one GPU's time for its own
    # tokens.
    sustained = ranks.sustained(timed, medians)
    of, single = (
        {name: value / (found["share"] + travel) for name, value in found.items() if name not in ("one", "share")}
        for found in (sustained, medians)
    )
    row = {
        "key": work.key,
        "ms": medians,
        "samples": times,
        "sustained_ms": sustained,
        "rows_ms": travel,
        "of_compute_and_rows": of,
        "bytes_sent": sent.sent,
        "bytes_least": least,
        "overlap": ranks.overlap(lambda: calls.divided("experts")),
    }
    if not work.backward:
        row["exchanges"] = _exchanges(calls, ranks, repeats, links)
        of_bytes = {name: found["ms"] / found["bytes_ms"] for name, found in row["exchanges"].items()}
        word = Verdict.PASS if not work.at_most or max(of_bytes.values()) <= EXCHANGES else Verdict.WARN
        told = ", ".join(f"{name} {share:.2f}" for name, share in of_bytes.items()) + " of the bytes' time"
        checks.append(Check(f"{work.key} exchanges", word, told, f"at most {EXCHANGES:g}" if work.at_most else ""))
    if work.codes:
        row["root_mean_squares"] = calls.root_mean_squares()
        worst = max(max(ranks.everywhere(off)) for name, off in row["root_mean_squares"].items() if CODES in name)
        word = Verdict.PASS if worst <= CODES_LIMIT else Verdict.FAIL
        checks.append(
            Check(f"{work.key} e4m3", word, f"off by {worst:.2%}", f"at most {CODES_LIMIT:.0%} by root mean square")
        )
    ours = [name for name in of if name != "torch" and CODES not in name]
    best = min(ours, key=lambda name: of[name])
    word = Verdict.PASS if not work.at_most or of[best] <= work.at_most else Verdict.WARN
    found = f"{of[best]:.2f} ({best}: {sustained[best]:.3f} ms; experts {sustained['share']:.3f}, rows {travel:.3f}); single {single[best]:.2f}"
    checks.append(Check(f"{work.key} speed", word, found, f"at most {work.at_most:g}" if work.at_most else ""))
    return row, checks


def _exchanges(calls: ExpertsCalls, ranks: Ranks, repeats: int, links: dict[str, float]) -> dict[str, dict[str, float]]:
    """Milliseconds of the padded form's dispatch and combine as back-to-back graphs, and of its bytes at link rate."""
    sent = calls.exchanges()
    timed = {name: captured(call) if ranks.is_gpu else call for name, (call, _) in sent.items()}
    medians = {name: median(samples) for name, samples in ranks.interleaved(timed, 4 * repeats).items()}
    return {
        name: {"ms": found, "bytes_ms": sent[name][1] / links["all_to_all"] / 1e6}
        for name, found in ranks.sustained(timed, medians).items()
    }


def as_text(report: Report) -> str:
    """The report as text."""
    links = report.data["links_gbps"]
    lines = [
        f"{report.data['ranks']} ranks; GB/s each way: {links['message']:.0f} to the next, {links['all_to_all']:.0f} all to all"
    ]
    for row in report.data["parts"]:
        lines.append(row["key"])
        lines += [
            f"  {name:<14} {value:10.3f} ms, sustained {row['sustained_ms'][name]:10.3f}  {_relative(row, name)}"
            for name, value in row["ms"].items()
        ]
        lines.append(f"  sent {row['bytes_sent'] / 1e6:.1f} MB per rank, at least {row['bytes_least'] / 1e6:.1f}")
        for rank, found in enumerate(row["overlap"]):
            share = f"messages {found['messages']:.2f} ms, {found['share']:.0%} of it hidden; computing {found['computing']:.2f}"
            lines.append(f"  rank {rank} profiled: {found['span']:.2f} ms, {share}")
        if "root_mean_squares" in row:
            lines.append(
                "  off by " + ", ".join(f"{off:.2%} ({name})" for name, off in row["root_mean_squares"].items())
            )
        lines += [f"  without {name}: {reason}" for name, reason in row.get("without", {}).items()]
    lines += [
        f"{check.verdict} {check.name}: {check.found} {f'({check.expected})' if check.expected else ''}"
        for check in report.checks
    ]
    return "\n".join(lines)


def _relative(row: dict[str, Any], name: str) -> str:
    if name in row.get("of_one", {}):
        return f"{row['of_one'][name]:.2f} of one GPU"
    if name in row.get("of_compute_and_rows", {}):
        return f"{row['of_compute_and_rows'][name]:.2f} of compute and rows"
    return ""
