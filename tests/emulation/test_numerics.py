"""Number formats and the arithmetic of the tensor cores, against torch and against exact sums."""

import ctypes
from fractions import Fraction

import pytest
import torch

from flashmoe_build.emulation.build import Options, library
from flashmoe_build.emulation.hardware import PROBES, probe_library, record_probe
from flashmoe_build.emulation.machine import TENSOR_CORES

TEXT = """
#include "emulation/numerics.h"
using namespace flashmoe::emulation;
extern "C" void round_f16(const float* x, unsigned short* y, int n) { for (int i = 0; i < n; ++i) y[i] = float_to_f16(x[i]); }
extern "C" void round_bf16(const float* x, unsigned short* y, int n) { for (int i = 0; i < n; ++i) y[i] = float_to_bf16(x[i]); }
extern "C" void widen_f16(const unsigned short* x, float* y, int n) { for (int i = 0; i < n; ++i) y[i] = f16_to_float(x[i]); }
extern "C" void product(int block, int bits, int k, float* d, const float* a, const float* b) {
  tensor_core_product({block, bits}, 8, 8, k, d, a, b);
}
"""


@pytest.fixture(scope="module")
def numerics() -> ctypes.CDLL:
    return ctypes.CDLL(str(library("numerics_test", TEXT, "sm80", Options())))


def awkward_floats() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (400_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    ties = torch.arange(0, 2**16, dtype=torch.int32) * 2**15  # halfway between neighbours of either format, and around
    near = torch.cat([ties, ties + 1, ties - 1])
    f16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float().view(torch.int32)
    return torch.cat([bits, near, f16, f16 + 2**12, f16 + 2**12 + 1, f16 - 2**12]).view(torch.float32).contiguous()


@pytest.mark.parametrize(("name", "dtype"), [("round_f16", torch.float16), ("round_bf16", torch.bfloat16)])
def test_rounding_is_torchs(numerics: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    given = awkward_floats()
    out = torch.empty(given.numel(), dtype=torch.int16)
    getattr(numerics, name)(ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(out.data_ptr()), given.numel())
    expected = given.to(dtype)
    numbers = ~torch.isnan(expected)
    assert torch.equal(out[numbers], expected.view(torch.int16)[numbers])
    assert torch.isnan(out.view(dtype)[~numbers]).all()


def test_widening_is_exact(numerics: ctypes.CDLL) -> None:
    given = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    out = torch.empty(2**16)
    numerics.widen_f16(ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(out.data_ptr()), 2**16)
    expected = given.view(torch.float16).float()
    numbers = ~torch.isnan(expected)
    assert torch.equal(out[numbers].view(torch.int32), expected[numbers].view(torch.int32))


def cut(value: Fraction, unit: Fraction) -> Fraction:
    """Truncates toward zero, to a multiple of ``unit``."""
    whole = abs(value) // unit
    return (whole if value >= 0 else -whole) * unit


def exponent(value: float) -> int:
    return torch.frexp(torch.tensor(value, dtype=torch.float64))[1].item() - 1


def model(block: int, extra: int, c: float, a: list[float], b: list[float]) -> float:
    """The same definition in exact arithmetic."""
    total = c
    for start in range(0, len(a), block):
        terms = [(x, y) for x, y in zip(a[start : start + block], b[start : start + block], strict=True) if x and y]
        exponents = [exponent(x) + exponent(y) for x, y in terms] + ([exponent(total)] if total else [])
        if not exponents:
            continue
        unit = Fraction(2) ** (max(exponents) - 23 - extra)
        result = cut(Fraction(total), unit) + sum((cut(Fraction(x) * Fraction(y), unit) for x, y in terms), Fraction(0))
        if result == 0:
            total = 0.0
            continue
        top = max(power for power in range(-400, 400) if Fraction(2) ** power <= abs(result))
        total = float(cut(result, Fraction(2) ** (top - 23)))
    return total


@pytest.mark.parametrize("name", TENSOR_CORES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensor_core_product_is_the_model(numerics: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    core, k = TENSOR_CORES[name], 16
    generator = torch.Generator().manual_seed(2)
    scale = torch.exp2(torch.randint(-6, 7, (8, k), generator=generator).float())
    a = (torch.randn(8, k, generator=generator) * scale).to(dtype).float().contiguous()
    b = torch.randn(k, 8, generator=generator).to(dtype).float().contiguous()
    d = (torch.randn(8, 8, generator=generator) * 4).contiguous()
    a[0, :5] = 0
    d[0, 0] = 0
    expected = [
        [model(core.block, core.extra_bits, d[i, j].item(), a[i].tolist(), b[:, j].tolist()) for j in range(8)]
        for i in range(8)
    ]
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (d, a, b)]
    numerics.product(core.block, core.extra_bits, k, *pointers)
    assert torch.equal(d, torch.tensor(expected))


def test_infinity_and_nan_pass_through_a_product(numerics: ctypes.CDLL) -> None:
    a, b, d = torch.ones(8, 16), torch.ones(16, 8), torch.zeros(8, 8)
    a[0, 3], a[1, 2], d[2, 2] = float("inf"), float("nan"), float("-inf")
    numerics.product(16, 2, 16, *[ctypes.c_void_p(tensor.data_ptr()) for tensor in (d, a, b)])
    assert torch.isposinf(d[0]).all()
    assert torch.isnan(d[1]).all()
    assert torch.isneginf(d[2, 2])
    assert torch.equal(d[3:], torch.full((5, 8), 16.0))


@pytest.mark.parametrize("name", PROBES)
def test_single_instructions_are_close_to_fp64(name: str) -> None:
    """The probes that hardware.py records for the GPU compute what their names say."""
    record = record_probe(probe_library(), name, "")
    given, out = record["tensors"], record["expected"]["d"].double()
    c = given["c"].double()
    functions = {"probe_exp2": torch.exp2, "probe_lg2": torch.log2, "probe_rcp": torch.reciprocal}
    if name in functions:
        assert torch.allclose(out, functions[name](c), rtol=2e-7, atol=1e-37)
        return
    products = given["a"].double() @ given["b"].double().transpose(-1, -2)
    size = given["a"].double().abs() @ given["b"].double().abs().transpose(-1, -2) + c.abs()
    assert ((out - products - c).abs() <= size * 2.0**-21).all()
