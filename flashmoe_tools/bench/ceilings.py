"""What this machine reaches in this run: the fastest of several matrix products (FLOP/s) and a large copy (bytes/s).

No single product is the ceiling of a kernel: libraries are better at some shapes than at others, and a CPU library may
have no fast path for a dtype at all. So several are measured, and each rate is reported with the product that reached
it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from flashmoe_tools.bench.sampling import make_sampler
from flashmoe_tools.operations.dtypes import TORCH_DTYPES

PRODUCT_SIZE = {"cuda": 8192, "cpu": 1536}  # largest size; half of it is tried too, with B as it is and transposed
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
SECONDS = {"cuda": 0.3, "cpu": 0.2}
SLOW = 1e9  # ns: a slower product has no fast path; it gets one sample, and larger ones none


@dataclass(frozen=True)
class Product:
    """A [size, size] @ B [size, size], with B transposed in memory or not."""

    dtype: str
    size: int
    transposed: bool

    @property
    def title(self) -> str:
        return f"{self.dtype} {self.size} x {self.size} x {self.size}{', B transposed' if self.transposed else ''}"

    @property
    def flops(self) -> int:
        return 2 * self.size**3


@dataclass(frozen=True)
class Ceilings:
    """Fastest sample of the fastest matrix product in TFLOP/s by dtype, and of a copy in GB/s (read plus written).

    ``matmul_of`` names the fastest product; ``samples`` are in ns.
    """

    matmul_tflops: dict[str, float]
    copy_gbps: float
    samples: dict[str, list[int]]
    matmul_of: dict[str, str] = field(default_factory=dict)


def measure_ceilings(device: str, dtypes: Iterable[str]) -> Ceilings:
    wanted = sorted(set(dtypes))
    samples: dict[str, list[int]] = {}
    best: dict[str, tuple[float, str]] = {}  # by the dtype of a kernel
    for dtype in sorted({one for kernel in wanted for one in product_dtypes(device, kernel)}):
        for product, times in _products(device, dtype):
            samples[f"matmul {product.title}"] = times
            rate = product.flops / min(times) / 1e3
            for kernel in wanted:
                if dtype in product_dtypes(device, kernel):
                    best[kernel] = max(best.get(kernel, (0.0, "")), (rate, product.title))
    samples["copy"] = _copy(device)
    copy = 2 * COPY_BYTES[device] / min(samples["copy"])
    rates = {dtype: rate for dtype, (rate, _) in best.items()}
    return Ceilings(rates, copy, samples, {dtype: title for dtype, (_, title) in best.items()})


def product_dtypes(device: str, dtype: str) -> tuple[str, ...]:
    """Dtypes of the matrix products that bound a kernel of ``dtype``.

    On a CPU a 16-bit kernel may compute in another format. mxfp4 weights are multiplied as bfloat16.
    """
    if device == "cpu" and dtype != "f32":
        return ("bf16", "f16", "f32")
    return ("bf16" if dtype == "mxfp4" else dtype,)


def _products(device: str, dtype: str) -> Iterator[tuple[Product, list[int]]]:
    """Small products first: if these are slow, larger ones would take minutes."""
    for size in (PRODUCT_SIZE[device] // 2, PRODUCT_SIZE[device]):
        for transposed in (True,) if dtype == "e4m3" else (False, True):  # torch only supports this order
            product = Product(dtype, size, transposed)
            times = _product(device, product)
            yield product, times
            if min(times) > SLOW:
                return


def _product(device: str, product: Product) -> list[int]:
    shape = (product.size, product.size)
    if product.dtype == "e4m3":
        return _scaled_product(device, shape)
    a = torch.randn(shape, device=device, dtype=TORCH_DTYPES[product.dtype])
    b = torch.randn(shape, device=device, dtype=TORCH_DTYPES[product.dtype])
    out, right = torch.empty_like(a), b.mT if product.transposed else b
    return _times(device, lambda: torch.matmul(a, right, out=out))


def _scaled_product(device: str, shape: tuple[int, int]) -> list[int]:
    """An e4m3 product into bfloat16 with one scale per operand; torch has no faster one."""
    a, b = (torch.randn(shape, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    product = partial(
        torch._scaled_mm, a, b.mT, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return _times(device, product)


def _copy(device: str) -> list[int]:
    source = torch.arange(COPY_BYTES[device] // 4, device=device, dtype=torch.int32)
    target = torch.empty_like(source)
    return _times(device, lambda: target.copy_(source))


def _times(device: str, call: Callable[[], torch.Tensor]) -> list[int]:
    """Samples for about SECONDS: at least three, after one discarded; for a slow call only that one."""
    sampler = make_sampler(device, "events", flush=False)
    prepared = sampler.prepare(call)
    thrown_away = sampler.slot(prepared, 1)
    if thrown_away[0] > SLOW:
        return thrown_away
    first = sampler.slot(prepared, 1)[0]
    return sampler.slot(prepared, max(3, min(100, int(SECONDS[device] * 1e9 / max(first, 1)))))
