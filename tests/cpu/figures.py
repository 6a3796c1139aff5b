"""What the parts of the AMX kernel cost on one core, their sum at 128 queries and keys, and the time it takes.

python -m tests.cpu.figures --json amx-floor.json

All of it on one thread, which a loaded machine disturbs least; each time is the fastest of many.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import flashmoe
from flashmoe.tools.report import host_environment, write_json

from .backend import FLAGS, SOURCES

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Products of planes (csrc/cpu/amx_tiles.h): for the scores and for the output.
PRODUCTS = {"f32": (6, 6), "f16": (4, 3), "bf16": (1, 1)}
PLANES = {"f32": 3, "f16": 2, "bf16": 1}
HEADS, LENGTH, GROUP, STEP, TILE = 8, 128, 32, 32, 16
VECTOR = 16


def core_figures(folder: Path) -> dict[str, float]:
    """tests/cpu/figures.cpp, compiled and run."""
    program = folder / "figures"
    source = Path(__file__).with_name("figures.cpp")
    subprocess.run(
        [os.environ.get("CXX", "g++"), *FLAGS, f"-I{SOURCES.parent}", str(source), "-o", str(program)], check=True
    )
    text = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(text)
    return figures


def fastest_us(call: Callable[[], Any], seconds: float = 1.0) -> float:
    """The fastest of the calls that fit into ``seconds``, us."""
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter_ns()
        call()
        best = min(best, (time.perf_counter_ns() - start) / 1e3)
    return best


def call_us() -> float:
    """A call with next to nothing to compute, on one thread (us)."""
    tiny = torch.randn(1, 1, 1, 1)
    torch.set_num_threads(1)
    return fastest_us(lambda: flashmoe.attention(tiny, tiny, tiny))


def visible_keys(causal: bool) -> int:
    """Sum over the groups of a head of the keys that its products take, whole steps."""
    groups = LENGTH // GROUP
    return sum((group + 1) * GROUP if causal else LENGTH for group in range(groups))


def parts_us(dtype: str, head_dim: int, causal: bool, core: dict[str, float], call: float) -> dict[str, float]:
    """One thread: tile products; softmax; stores of what misses the L1 cache; a call.

    These are packed Q, K and V and the output; in bf16 the weights and the output, for Q is used where it lies, and what
    is packed of K and V stays in the cache. There the weights' sums are products, too: of 16 x 16 tiles with ones.
    """
    keys = visible_keys(causal)
    tiles = GROUP // TILE * (keys // TILE) * (head_dim // STEP)  # of one product of a head; P V has as many as Q K^T
    products = tiles * sum(PRODUCTS[dtype])
    stored = LENGTH * head_dim * (3 * PLANES[dtype] * 2 + DTYPES[dtype].itemsize)
    if dtype == "bf16":
        products += GROUP // TILE * keys // STEP
        stored = (GROUP * keys + LENGTH * head_dim) * DTYPES[dtype].itemsize
    kilobytes = stored / 1024
    parts = {
        "products": HEADS * products * core["tile_product"] / 1e3,
        "softmax": HEADS * GROUP * keys // VECTOR * core[f"softmax_vector_{dtype}"] / 1e3,
        "stores": HEADS * kilobytes * core["store_kilobyte_l2"] / 1e3,
        "call": call,
    }
    return {**parts, "sum": sum(parts.values())}


def one_thread_us(dtype: str, head_dim: int, causal: bool) -> dict[str, float]:
    """Both on one thread, in turn: the fastest call of each."""
    q, k, v = (torch.randn(1, HEADS, LENGTH, head_dim).to(DTYPES[dtype]) for _ in range(3))
    torch.set_num_threads(1)
    ours, theirs = float("inf"), float("inf")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for _ in range(12):
        ours = min(ours, fastest_us(lambda: flashmoe.attention(q, k, v, causal=causal), 0.04))
        theirs = min(theirs, fastest_us(lambda: sdpa(q, k, v, is_causal=causal), 0.04))
    return {"flashmoe_us": ours, "sdpa_us": theirs}


def main() -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        core = core_figures(Path(folder))
    call = call_us()
    cells = []
    for dtype in DTYPES:
        for head_dim in (64, 128):
            for causal in (False, True):
                name = f"{dtype}-d{head_dim}-{'causal' if causal else 'full'}"
                parts = parts_us(dtype, head_dim, causal, core, call)
                times = one_thread_us(dtype, head_dim, causal)
                ratio, limit = times["sdpa_us"] / times["flashmoe_us"], times["sdpa_us"] / parts["sum"]
                cells.append({"case": name, "parts_us": parts, **times, "ratio": ratio, "ratio_of_parts": limit})
                print(f"{name}: {times}, ratio {ratio:.2f}; parts {parts['sum']:.1f} us, ratio {limit:.2f}", flush=True)
    means = {
        dtype: {
            key: math.exp(sum(math.log(cell[key]) for cell in cells if cell["case"].startswith(dtype)) / 4)
            for key in ("ratio", "ratio_of_parts")
        }
        for dtype in DTYPES
    }
    print(means)
    if arguments.json is not None:
        environment = {**host_environment(), "torch": torch.__version__}
        payload = {"environment": environment, "core_ns": core, "cells": cells, "geometric_means": means}
        write_json(arguments.json, payload)
    return 0


if __name__ == "__main__":
    sys.exit(main())
