"""What this machine reaches, in this run: a large matrix product (FLOP/s) and a large copy (bytes/s)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from flashmoe.tools.bench.sampling import make_sampler
from flashmoe.tools.problems.dtypes import TORCH_DTYPES

PRODUCT_SIZE = {"cuda": 8192, "cpu": 1536}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
SECONDS = {"cuda": 0.3, "cpu": 0.2}


@dataclass(frozen=True)
class Ceilings:
    """Matrix product in TFLOP/s by dtype and copy in GB/s (read plus written), medians; samples in ns."""

    matmul_tflops: dict[str, float]
    copy_gbps: float
    samples: dict[str, list[int]]


def measure_ceilings(device: str, dtypes: Iterable[str]) -> Ceilings:
    size = PRODUCT_SIZE[device]
    tflops: dict[str, float] = {}
    samples: dict[str, list[int]] = {}
    for dtype in sorted(set(dtypes)):
        times = _product(device, dtype, size)
        samples[f"matmul-{dtype}"] = times
        tflops[dtype] = 2 * size**3 / _typical(times) / 1e3
    times = _copy(device)
    samples["copy"] = times
    return Ceilings(tflops, 2 * COPY_BYTES[device] / _typical(times), samples)


def _typical(times: Sequence[int]) -> float:
    return float(statistics.median(times))


def _product(device: str, dtype: str, size: int) -> list[int]:
    a = torch.randn(size, size, device=device, dtype=TORCH_DTYPES[dtype])
    b = torch.randn(size, size, device=device, dtype=TORCH_DTYPES[dtype])
    out = torch.empty_like(a)
    return _times(device, lambda: torch.matmul(a, b, out=out))


def _copy(device: str) -> list[int]:
    source = torch.arange(COPY_BYTES[device] // 4, device=device, dtype=torch.int32)
    target = torch.empty_like(source)
    return _times(device, lambda: target.copy_(source))


def _times(device: str, call: Callable[[], torch.Tensor]) -> list[int]:
    """Samples for about SECONDS, at least three after one that is thrown away."""
    sampler = make_sampler(device, "events", flush=False)
    prepared = sampler.prepare(call)
    sampler.slot(prepared, 1)
    first = sampler.slot(prepared, 1)[0]
    return sampler.slot(prepared, max(3, min(100, int(SECONDS[device] * 1e9 / max(first, 1)))))
