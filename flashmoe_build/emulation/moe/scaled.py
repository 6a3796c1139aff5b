"""Runs small problems on the emulated kernels of e4m3 operands with scales: the products, plain and gated, against fp64 of what the
operands stand for, and the quantisation against torch's own, bit for bit."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from flashmoe.moe.scaled import BLOCK, E4M3, quantize
from flashmoe_build.emulation.attention import (
    EMULATED_MULTIPROCESSORS,
    Outcome,
    launch_registers,
    load,
    mapped,
    tensor_map_arguments,
)
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, Settings
from flashmoe_build.emulation.moe.gemm import (
    ACTIVATIONS,
    UNTOUCHED,
    Buffers,
    GemmParams,
    GemmProblem,
    Routing,
    activated,
    counter_is_zero,
    left_alone,
    route,
)
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import DTYPES, UNIT_ROUNDOFF, worst_place
from flashmoe_tools.descriptors import Header
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.tables import Unit

ScaledGemmParams, QuantizeParams = (
    structure(Header(name, "moe/params/scaled.h"), (CSRC,)) for name in ("ScaledGemmParams", "QuantizeParams")
)
EARLY_SLOTS = 32  # up to which the host gives a gated product for few rows the choices themselves
PADDING = 16  # values after each row, which strides skip
# wgmma's sums over 128 of k keep 13 bits behind the leading one of the largest product; those of mma.sync are float32's.
SUM_ROUNDOFF, MMA_ROUNDOFF = 2.0**-12, 1e-5
FEW_ROWS = ("grouped_gemm_scaled_few_rows", "grouped_gemm_gated_scaled_few_rows")
PRODUCTS = ("grouped_gemm_scaled", "grouped_gemm_gated_scaled", *FEW_ROWS)


@dataclass(frozen=True)
class QuantizeProblem:
    rows: int
    columns: int
    dtype: str
    is_early: bool = False
    causal: bool = False
    huge: bool = False

    def __str__(self) -> str:
        return f"r{self.rows}-c{self.columns}{'-early' if self.is_early else ''}"


def problems(unit: Unit) -> Iterator[GemmProblem | QuantizeProblem]:
    """Tails in rows and columns; experts without rows and with most of them; NaN next door; a ring that comes round."""
    if unit.row.operation == "moe_quantize":
        for rows, columns, is_early in ((5, 384, False), (1, 128, True), (9, 256, True)):
            yield QuantizeProblem(rows, columns, unit.dtype, is_early)
        return
    m = unit.row.block_m
    is_gated = "gated" in unit.row.operation

    def make(rows: tuple[int, ...], n: int, k: int, seed: int, activation: str, **changes: object) -> GemmProblem:
        words = activation if is_gated else ""
        return GemmProblem(rows, n, k, "nk", unit.dtype, words, data_seed=seed, **changes)  # type: ignore[arg-type]

    if unit.row.operation in FEW_ROWS:
        # Tails of rows and of the last stage, the choices known early; the ring more than once round; experts in each other's way.
        yield make((m + 2, 0, 3), 256, 384, 1, "swiglu", has_nan=True, unrouted=5)
        yield make((0, 5, 3 * m + 1), 128, 1664, 2, "geglu", has_nan=True, has_counter=False)
        yield make((2, 1), 384, 128, 3, "clamped_swiglu", top_k=1)
        yield make((0, 0), 128, 128, 4, "reglu", unrouted=4)
        return
    yield make((m + 2, 0, 3), 384, 256, 1, "swiglu", has_nan=True, unrouted=5)
    yield make((0, 70, m + 64, 9), 256, 640, 2, "geglu", has_nan=True, has_counter=False)
    yield make((2 * m + 66, 1), 128, 128, 3, "clamped_swiglu", top_k=1)
    yield make((0, 0), 128, 128, 4, "reglu", unrouted=4)


@dataclass(frozen=True)
class Scaled:
    """e4m3 values [..., rows, k] and the scales of their blocks."""

    values: torch.Tensor
    scales: torch.Tensor

    def numbers(self) -> torch.Tensor:
        """fp64."""
        block_rows = 1 if self.scales.shape[-2] == self.values.shape[-2] else BLOCK
        scales = self.scales.double().repeat_interleave(block_rows, -2).repeat_interleave(BLOCK, -1)
        return self.values.double() * scales[..., : self.values.shape[-2], :]


@dataclass(frozen=True)
class Inputs:
    routing: Routing
    a: Scaled
    weights: Scaled


def _values(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Of every magnitude that e4m3 has."""
    return (torch.randn(shape, generator=generator) * 60).clamp(-448, 448).to(E4M3)


def _scales(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Far enough from each other that a neighbour's shows."""
    return 2.0 ** torch.randint(-9, -5, shape, generator=generator) * (1 + torch.rand(shape, generator=generator))


def _make_inputs(problem: GemmProblem) -> Inputs:
    generator = torch.Generator().manual_seed(problem.data_seed * 7919 + 31)
    is_gated, experts, count, nan = bool(problem.activation), len(problem.rows), sum(problem.rows), float("nan")
    routing = route(problem.rows, problem.slots, generator)
    slots = routing.row_slots[:count].long()
    used = slots // problem.top_k if is_gated else torch.arange(count)
    rows = problem.slots // (problem.top_k if is_gated else 1)
    a, a_scale = _values((rows, problem.k), generator), _scales((rows, problem.k // BLOCK), generator)
    unused = torch.ones(rows, dtype=torch.bool)
    unused[used] = False
    a_scale[unused] = nan
    a.view(torch.uint8)[unused] = 0x7F
    if problem.has_nan:
        starts = [int(start) for start, rows_ in zip(routing.offsets, problem.rows, strict=False) if rows_][1:]
        a.view(torch.uint8)[used[starts], 3] = 0xFF
    columns = problem.n * (2 if is_gated else 1)
    weights = _values((experts, columns, problem.k), generator)
    w_scale = _scales((experts, columns // BLOCK, problem.k // BLOCK), generator)
    nobody = [expert for expert, rows_ in enumerate(problem.rows) if rows_ == 0]
    weights.view(torch.uint8)[nobody] = 0x7F
    w_scale[nobody] = nan
    return Inputs(routing, Scaled(a, a_scale), Scaled(weights, w_scale))


def _padded(values: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*values.shape[:-1], values.shape[-1] + PADDING), 0x7F, dtype=torch.uint8)
    wide[..., : values.shape[-1]] = values.view(torch.uint8)
    return wide


def _sums(problem: GemmProblem, inputs: Inputs, roundoff: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every row, in fp64, and how far the kernel's may be from them."""
    a, weights = inputs.a.numbers()[: problem.slots], inputs.weights.numbers()
    count = sum(problem.rows)
    a = a[inputs.routing.row_slots[:count].long() // problem.top_k] if problem.activation else a[:count]
    sums = torch.zeros((count, weights.shape[1]), dtype=torch.float64)
    error = torch.zeros_like(sums)
    for expert, (begin, end) in enumerate(pairwise(inputs.routing.offsets.tolist())):
        if begin < end:
            sums[begin:end] = a[begin:end] @ weights[expert].mT
            error[begin:end] = a[begin:end].abs() @ weights[expert].abs().mT
    return sums, roundoff * error


def _choices(problem: GemmProblem, routing: Routing) -> torch.Tensor:
    """The expert of each slot, of those without a row none of the layer's; of one type or the other."""
    experts, count = len(problem.rows), sum(problem.rows)
    ids = torch.full((problem.slots,), -1 if problem.data_seed % 2 else experts)
    ids[routing.row_slots[:count].long()] = torch.repeat_interleave(torch.arange(experts), torch.tensor(problem.rows))
    return ids if problem.data_seed % 2 else ids.int()


def _check_quantised(value: torch.Tensor, bound: torch.Tensor, found: Scaled) -> list[str]:
    """Of rows of the activation: each block's scale, and every value within half a unit of its last place."""
    blocks = value.unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    scale_bound = bound.unflatten(1, (-1, BLOCK)).amax(-1) / 448 + 1e-6 * largest
    is_number = ~largest.isnan()
    scales = torch.where(is_number, found.scales.double(), largest)
    wrong = worst_place("d_scale", scales, largest / 448, scale_bound + 1e-30)
    steps = found.scales.double().repeat_interleave(BLOCK, 1) * 2.0**-10
    return wrong + worst_place("d", found.numbers(), value, 1.01 * bound + 2.0**-4 * (value.abs() + bound) + steps)


def run(unit: Unit, problem: GemmProblem | QuantizeProblem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares."""
    if isinstance(problem, QuantizeProblem):
        return _run_quantize(unit, problem, settings, options)
    library = load(kernel_library(unit, options))
    inputs, count, is_gated = _make_inputs(problem), sum(problem.rows), bool(problem.activation)
    has_few_rows = unit.row.operation in FEW_ROWS
    makes_e4m3 = is_gated and not has_few_rows
    width = problem.n + (PADDING if makes_e4m3 else 8)
    dtype = torch.uint8 if makes_e4m3 else torch.float32 if is_gated else DTYPES[problem.dtype]
    out = torch.full((problem.slots, width), int(UNTOUCHED) if makes_e4m3 else UNTOUCHED, dtype=dtype)
    out_scale = torch.full((problem.slots, problem.n // BLOCK), UNTOUCHED)
    counter = torch.zeros(1, dtype=torch.int32)
    a, weights = _padded(inputs.a.values), _padded(inputs.weights.values)
    n = problem.n * (2 if is_gated else 1)
    ids = _choices(problem, inputs.routing)
    with mapped(library):
        buffers = Buffers(library)
        gemm = GemmParams(
            a=buffers.add("a", a, from_grid_in_front=True),
            b=buffers.add("weights", weights),
            d=buffers.add("d", out, writable=True, readable=False),
            expert_offsets=buffers.add(
                "expert_offsets", inputs.routing.offsets, from_grid_in_front=is_gated or not has_few_rows
            ),
            a_slots=buffers.add("row_slots", inputs.routing.row_slots, from_grid_in_front=True) if is_gated else 0,
            ids=buffers.add("ids", ids) if is_gated and has_few_rows and problem.slots <= EARLY_SLOTS else 0,
            id_bytes=ids.element_size(),
            tile_counter=buffers.add("tile_counter", counter, writable=True) if problem.has_counter else 0,
            a_stride=a.stride(0) // 2,
            b_stride=weights.stride(1) // 2,
            b_expert_stride=weights.stride(0) // 2,
            d_stride=width // 2 if makes_e4m3 else width,
            experts=len(problem.rows),
            slots=problem.slots,
            tokens=problem.slots // problem.top_k,
            top_k=problem.top_k,
            n=n,
            k=problem.k // 2,
            activation=ACTIVATIONS.index(problem.activation) if is_gated else 0,
        )
        params = ScaledGemmParams(
            gemm=gemm,
            a_scale=buffers.add("a_scale", inputs.a.scales, from_grid_in_front=True),
            b_scale=buffers.add("b_scale", inputs.weights.scales),
            d_scale=buffers.add("d_scale", out_scale, writable=True, readable=False) if makes_e4m3 else 0,
        )
        maps, keep = tensor_map_arguments(unit, library, params)
        columns = unit.row.block_n // (2 if is_gated else 1)
        tiles = math.ceil(problem.slots / unit.row.block_m) + min(len(problem.rows), problem.slots)
        grid = min(tiles * math.ceil(problem.n / columns), EMULATED_MULTIPROCESSORS)
        geometry = Geometry(grid, unit.row.threads, unit.row.smem_bytes(unit.dtype), launch_registers(unit))
        report = library.launch(unit.symbol(), (ctypes.addressof(params), *maps), geometry, settings)
        del keep
    wrong: list[str] = []
    if not report.failure:
        sums, error = _sums(problem, inputs, MMA_ROUNDOFF if has_few_rows else SUM_ROUNDOFF)
        found = out[:count, : problem.n]
        if makes_e4m3:
            wrong += _check_quantised(*activated(problem, sums, error), Scaled(found.view(E4M3), out_scale[:count]))
            wrong += left_alone("d_scale's rows", out_scale[count:])
        elif is_gated:
            wrong += worst_place("d", found, *activated(problem, sums, error))
        else:
            wrong += worst_place("d", found, sums, error + UNIT_ROUNDOFF[problem.dtype] * sums.abs())
        wrong += left_alone("d's columns", out[:, problem.n :]) + left_alone("d's rows", out[count:])
        wrong += counter_is_zero(counter)
    return Outcome(problem, unit.symbol(), report, tuple(wrong), out, out_scale)  # type: ignore[arg-type]


def _run_quantize(unit: Unit, problem: QuantizeProblem, settings: Settings, options: Options) -> Outcome:
    library = load(kernel_library(unit, options))
    generator = torch.Generator().manual_seed(problem.rows)
    x = torch.randn((problem.rows, problem.columns + 8), generator=generator).to(TORCH_DTYPES[problem.dtype])
    x[:, problem.columns :] = float("nan")
    x[0, :BLOCK] = 0.0
    x[-1, 5] = 1000.0
    x[-1, 7] = float("nan")
    values = torch.full((problem.rows + 1, problem.columns), int(UNTOUCHED), dtype=torch.uint8)
    scales = torch.full((problem.rows + 1, problem.columns // BLOCK), UNTOUCHED)
    with mapped(library):
        buffers = Buffers(library)
        params = QuantizeParams(
            x=buffers.add("x", x, from_grid_in_front=not problem.is_early),
            values=buffers.add("values", values, writable=True, readable=False),
            scales=buffers.add("scales", scales, writable=True, readable=False),
            x_stride=x.stride(0),
            rows=problem.rows,
            columns=problem.columns,
            is_early=int(problem.is_early),
        )
        grid = math.ceil(problem.rows * problem.columns / BLOCK / (2 * unit.row.warps))
        geometry = Geometry(grid, unit.row.threads, 0, launch_registers(unit))
        report = library.launch(unit.symbol(), (ctypes.addressof(params),), geometry, settings)
    wrong: list[str] = []
    if not report.failure:
        expected, expected_scales = quantize(x[:, : problem.columns])
        if not torch.equal(scales[:-1], expected_scales):
            wrong.append("scales are not torch's")
        # torch keeps a NaN's sign, the conversion does not.
        same = (values[:-1] == expected.view(torch.uint8)) | (values[:-1] == 0x7F) & expected.float().isnan()
        if not same.all():
            wrong.append(f"{int((~same).sum())} values are not torch's, first at {(~same).nonzero()[0].tolist()}")
        wrong += left_alone("values", values[-1]) + left_alone("scales", scales[-1])
    return Outcome(problem, unit.symbol(), report, tuple(wrong), values, scales)  # type: ignore[arg-type]
