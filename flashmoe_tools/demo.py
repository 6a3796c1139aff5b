"""``flashmoe demo``: compares our attention with torch's in half a minute on any machine: errors, times, and a picture."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashmoe._version import __version__
from flashmoe.errors import ExitCode
from flashmoe_tools.operations.attention.problem import AttentionProblem

if TYPE_CHECKING:
    from flashmoe_tools.operations import Verification

DEFAULT_SECONDS = 20.0
SIDES = {"flashmoe": "ours", "sdpa": "SDPA"}  # two of the benchmark's contenders
LENGTHS = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (128, 256, 512, 1024, 2048)}
HEAD_DIM = 128
BAR = 40  # characters
WARM_UP_SECONDS = 0.1


@dataclass(frozen=True)
class Row:
    """One length: for each side the error against the reference and the median time of a call in nanoseconds."""

    length: int
    kernel: str  # our kernel, as the extension names it
    judged: dict[str, Verification]
    times: dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--seconds", type=float, default=DEFAULT_SECONDS, metavar="N", help="of measuring (default: %(default)g)"
    )


def run(args: argparse.Namespace) -> int:
    import torch

    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    lengths = LENGTHS[device]
    first = problem_for(device, lengths[0])
    print(f"flashmoe {__version__} and torch {torch.__version__} on {describe(device)}")
    print(
        f"causal attention, {first.dtype}, batch {first.batch}, {first.heads_q} heads of {first.head_dim}\n", flush=True
    )
    rows = []
    for length in lengths:
        rows.append(measure(problem_for(device, length), device, args.seconds / len(lengths)))
        print(picture(rows[-1]), flush=True)
    print("\n" + conclusion(rows))
    return ExitCode.OK if all(row.judged["flashmoe"].passed for row in rows) else ExitCode.FAILED


def problem_for(device: str, length: int) -> AttentionProblem:
    """A small layer: a GPU gets the heads of a language model, a CPU two heads in its fastest common dtype."""
    import torch

    if device == "cpu":
        return AttentionProblem(length, length, HEAD_DIM, 2, 2, causal=True, dtype="f32")
    dtype = "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "f16"
    return AttentionProblem(length, length, HEAD_DIM, 16, 16, causal=True, dtype=dtype)


def describe(device: str) -> str:
    import torch

    from flashmoe import _extension

    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"
    _extension.load()
    return f"the CPU ({_extension.cpu_isa()}, {torch.get_num_threads()} threads)"


def measure(problem: AttentionProblem, device: str, seconds: float) -> Row:
    """Checks both sides, then times them alternately for ``seconds``, at least three samples per contender."""
    from flashmoe import _extension
    from flashmoe_tools.bench.contenders import default_registry
    from flashmoe_tools.bench.sampling import make_sampler, warm_up

    inputs = problem.make_inputs(device, seed=0)
    reference = problem.make_reference(inputs)
    registry, sampler = default_registry(), make_sampler(device, "events", flush=False)
    calls: dict[str, Any] = {name: registry[name].prepare(inputs).call for name in SIDES}
    inputs.poison()
    judged = {name: reference.judge(call()) for name, call in calls.items()}
    calls["flashmoe"]()
    kernel = _extension.last_kernel()
    samples: dict[str, list[int]] = {name: [] for name in SIDES}
    for call in calls.values():
        warm_up(sampler, sampler.prepare(call), WARM_UP_SECONDS)
    end = time.monotonic() + seconds
    while time.monotonic() < end or min(map(len, samples.values())) < 3:
        for name, call in calls.items():
            samples[name] += sampler.slot(sampler.prepare(call), 1)
    return Row(problem.seq_q, kernel, judged, {name: statistics.median(found) for name, found in samples.items()})


def picture(row: Row) -> str:
    """Two bars with lengths proportional to the times; the longer one fills the width."""
    slowest = max(row.times.values())
    lines = []
    for index, (name, title) in enumerate(SIDES.items()):
        bar = block() * max(1, round(BAR * row.times[name] / slowest))
        label = f"{row.length:>6} " if index == 0 else " " * 7
        error = f"error {row.judged[name].max_error:.1e}"
        lines.append(f"{label}{title:<5}{bar:<{BAR}} {row.times[name] / 1e6:8.3f} ms  {error}")
    return "\n".join(lines)


def block() -> str:
    """The character that bars are made of, in the encoding of the terminal."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#"
    return "█"


def conclusion(rows: Sequence[Row]) -> str:
    ratios = [row.times["sdpa"] / row.times["flashmoe"] for row in rows]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    bound = max(row.judged["flashmoe"].tolerance for row in rows)
    wrong = [row for row in rows if not row.judged["flashmoe"].passed]
    lines = [
        f"Speed relative to torch's choice of kernel: {mean:.2f} (geometric mean; {min(ratios):.2f} to {max(ratios):.2f}).",
        f"Errors are against plain PyTorch in higher precision; {bound:.1e} is allowed at most.",
        f"Kernel of the last row: {rows[-1].kernel}",
        "A look, not a measurement: `flashmoe bench` takes 300 samples per contender and gives intervals.",
    ]
    lines += [f"WRONG at length {row.length}: {row.judged['flashmoe'].reason}" for row in wrong]
    return "\n".join(lines)
