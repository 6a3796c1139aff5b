"""Runs small problems on the emulated kernels of the backward pass of a mixture of experts: the weight gradient, and the
product that ends in the gradient of the activation."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flashmoe_build.emulation.attention import (
    EMULATED_MULTIPROCESSORS,
    Outcome,
    launch_registers,
    load,
    mapped,
    tensor_map_arguments,
)
from flashmoe_build.emulation.build import Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, Settings
from flashmoe_build.emulation.moe.gemm import (
    ACTIVATIONS,
    FORMULAS,
    PADDING,
    UNTOUCHED,
    Buffers,
    GemmParams,
    Routing,
    counter_is_zero,
    left_alone,
    route,
)
from flashmoe_build.emulation.problem import DTYPES, UNIT_ROUNDOFF, worst_place
from flashmoe_tools.tables import Unit

DOT_COLUMNS = 128  # kDotColumns


@dataclass(frozen=True)
class WeightGradientProblem:
    """d[e] = a^T b over the rows of expert e."""

    rows: tuple[int, ...]  # by expert
    n: int
    k: int
    dtype: str
    top_k: int = 2
    unrouted: int = 0  # slots without a row, at least
    has_nan: bool = False  # in the first row of experts
    has_counter: bool = True
    data_seed: int = 0
    causal: bool = False  # what every problem of the suite has: there is one mask
    huge: bool = False

    @property
    def slots(self) -> int:
        return math.ceil((sum(self.rows) + self.unrouted) / self.top_k) * self.top_k

    def __str__(self) -> str:
        words = ["r" + ".".join(map(str, self.rows)), f"n{self.n}", f"k{self.k}"]
        return "-".join([*words, *(["nan"] if self.has_nan else []), *([] if self.has_counter else ["nocounter"])])


def weight_gradient_problems(unit: Unit) -> Iterator[WeightGradientProblem]:
    """Tails in n, k and rows; experts without rows and with most of them; NaN next door."""
    m, n = unit.row.block_m, unit.row.block_n
    make = WeightGradientProblem
    yield make((70, 0, 129, 1), m + 8, n + 72, unit.dtype, has_nan=True, data_seed=1)
    yield make((64, 63, 128, 5, 0), m - 8, n, unit.dtype, unrouted=5, has_nan=True, data_seed=2)
    yield make((9, 450, 0), m, 72, unit.dtype, top_k=1, has_counter=False, data_seed=3)  # the ring comes round
    yield make((0, 0), 40, 2 * n + 8, unit.dtype, unrouted=4, data_seed=4)  # nobody chose these experts
    yield make((33, 100), 2 * m + 8, 136, unit.dtype, has_nan=True, data_seed=5)
    yield make((5, 3), 8 * m + 8, n + 8, unit.dtype, top_k=1, data_seed=6)  # more than one section of tiles


def run_weight_gradient(unit: Unit, problem: WeightGradientProblem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares with fp64."""
    library = load(kernel_library(unit, options))
    generator = torch.Generator().manual_seed(problem.data_seed)
    routing = route(problem.rows, problem.slots, generator)
    experts, dtype = len(problem.rows), DTYPES[problem.dtype]
    columns = {"a": problem.n, "b": problem.k}
    tensors: dict[str, torch.Tensor] = {}
    by_row: dict[str, torch.Tensor] = {}
    starts = [int(start) for start, count in zip(routing.offsets, problem.rows, strict=False) if count][1:]
    for name, width in columns.items():
        tensor = torch.randn((problem.slots, width + PADDING), generator=generator).to(dtype)
        tensor[:, width:] = float("nan")  # padding, which the strides skip
        if problem.has_nan:
            tensor[starts, 3] = float("nan")
        tensor[sum(problem.rows) :] = float("nan")  # nothing writes rows past the last
        tensors[name] = tensor
        by_row[name] = tensor[: sum(problem.rows), :width]
    out = torch.full((experts, problem.n, problem.k + PADDING), UNTOUCHED, dtype=dtype)
    out[..., : problem.k] = float("nan")
    counter = torch.zeros(1, dtype=torch.int32)
    tiles = math.ceil(problem.n / unit.row.block_m) * math.ceil(problem.k / unit.row.block_n) * experts
    with mapped(library):
        buffers = Buffers(library)
        params = GemmParams(
            a=buffers.add("a", tensors["a"], from_grid_in_front=True),
            b=buffers.add("b", tensors["b"], from_grid_in_front=True),
            d=buffers.add("d", out, writable=True),
            expert_offsets=buffers.add("expert_offsets", routing.offsets, from_grid_in_front=True),
            tile_counter=buffers.add("tile_counter", counter, writable=True) if problem.has_counter else 0,
            **{f"{name}_stride": tensor.stride(0) for name, tensor in tensors.items()},
            d_stride=out.stride(1),
            experts=experts,
            slots=problem.slots,
            n=problem.n,
            k=problem.k,
        )
        maps, keep = tensor_map_arguments(unit, library, params)
        grid = min(tiles, EMULATED_MULTIPROCESSORS)
        geometry = Geometry(grid, unit.row.threads, unit.row.smem_bytes(unit.dtype), launch_registers(unit))
        report = library.launch(unit.symbol(), (ctypes.addressof(params), *maps), geometry, settings)
        del keep
    wrong: list[str] = []
    if not report.failure:
        expected = torch.zeros((experts, problem.n, problem.k), dtype=torch.float64)
        magnitude = torch.zeros_like(expected)
        for expert in range(experts):
            span = slice(int(routing.offsets[expert]), int(routing.offsets[expert + 1]))
            a, b = by_row["a"][span].double(), by_row["b"][span].double()
            expected[expert] = a.mT @ b
            magnitude[expert] = a.abs().mT @ b.abs()
        bound = UNIT_ROUNDOFF[problem.dtype] * expected.abs() + 1e-5 * magnitude + 1e-6
        wrong += worst_place("d", out[..., : problem.k], expected, bound)
        wrong += left_alone("d", out[..., problem.k :])
        wrong += counter_is_zero(counter)
    return Outcome(problem, unit.symbol(), report, tuple(wrong), out, out)  # type: ignore[arg-type]


@dataclass(frozen=True)
class GatedBackwardProblem:
    """a[slots, k] times weights of n columns, and what the activation's gradient makes of it."""

    rows: tuple[int, ...]  # by expert
    n: int
    k: int
    activation: str
    weights: str  # "nk" or "kn"
    dtype: str
    is_interleaved: bool = False
    top_k: int = 2
    unrouted: int = 0
    has_nan: bool = False  # in one row of a, and in one of the preactivation
    has_counter: bool = True
    data_seed: int = 0
    causal: bool = False
    huge: bool = False

    @property
    def slots(self) -> int:
        return math.ceil((sum(self.rows) + self.unrouted) / self.top_k) * self.top_k

    def __str__(self) -> str:
        words = ["r" + ".".join(map(str, self.rows)), f"n{self.n}", f"k{self.k}", self.weights, self.activation]
        words += ["interleaved"] if self.is_interleaved else []
        return "-".join([*words, *(["nan"] if self.has_nan else []), *([] if self.has_counter else ["nocounter"])])


def gated_backward_problems(unit: Unit) -> Iterator[GatedBackwardProblem]:
    """Tails in rows, n and k; experts without rows and with most of them; both layouts; each activation; NaN next door."""
    m, n = unit.row.block_m, unit.row.block_n
    for weights in unit.row.words["weights"]:
        make = GatedBackwardProblem
        base = make((m + 2, 0, 65, 1), n + 72, 136, "swiglu", weights, unit.dtype, unrouted=5, has_nan=True)
        yield base
        yield replace(base, activation="clamped_swiglu", is_interleaved=True, data_seed=1)
        if (
            n == 256
        ):  # the tile of both consumers: the epilogue is the other's, which has the rest; the ring comes round
            yield make((m, 10, 10, 70), 264, 328, "reglu", weights, unit.dtype, data_seed=5)
            continue
        yield make((7, 9), 40, 456, "geglu", weights, unit.dtype, top_k=1, has_counter=False, data_seed=2)
        yield make((0, 80), n, 8, "geglu_tanh", weights, unit.dtype, is_interleaved=True, data_seed=3)
        yield make((2 * m + 9, 3), 72, 72, "reglu", weights, unit.dtype, data_seed=4)
        yield make(
            (m, 10, 10, 10, 10, 10, 20), n, 328, "swiglu", weights, unit.dtype, data_seed=5
        )  # the ring comes round


def activation_gradient(activation: str, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The activation and its derivatives by gate and up, by torch's own autograd."""
    gate, up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    value = FORMULAS[activation](gate, up)
    by_gate, by_up = torch.autograd.grad(value.sum(), (gate, up))
    # torch gives a NaN no gradient where there is a clamp; the kernels pass it on.
    return value.detach(), by_gate.where(~gate.isnan(), by_gate.new_tensor(float("nan"))), by_up


def run_gated_backward(unit: Unit, problem: GatedBackwardProblem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares with fp64."""
    library = load(kernel_library(unit, options))
    generator = torch.Generator().manual_seed(problem.data_seed + 17)
    routing = route(problem.rows, problem.slots, generator)
    n, k, count, dtype = problem.n, problem.k, sum(problem.rows), DTYPES[problem.dtype]
    experts, slots = len(problem.rows), problem.slots

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    dout = normal(slots, k + PADDING)
    dout[:, k:] = float("nan")
    dout[count:] = float("nan")  # nothing writes rows past the last
    weights = normal(experts, n, k) if problem.weights == "nk" else normal(experts, k, n)
    preactivation = (4.0 * normal(slots, 2 * n)).to(dtype)
    row_weights = torch.rand(slots, generator=generator) + 0.1
    # Values on a clamp's border, and far out.
    preactivation[:count:3, : 2 * n : 7] = 7.0
    preactivation[1:count:3, : 2 * n : 5] = -30.0
    preactivation[count:] = float("nan")
    if problem.has_nan:
        dout[3, 5] = float("nan")
        preactivation[4, 2] = float("nan")
        weights[1] = float("nan")  # of the expert that nobody chose
    d_stride = 2 * n + PADDING
    d = torch.full((slots, d_stride), UNTOUCHED, dtype=dtype)
    active = torch.full((slots, n), UNTOUCHED, dtype=dtype)
    n_tiles = math.ceil(n / unit.row.block_n)
    row_dots = torch.full((math.ceil(n / DOT_COLUMNS), slots), UNTOUCHED)
    counter = torch.zeros(1, dtype=torch.int32)
    row_tiles = math.ceil(slots / unit.row.block_m) + min(experts, slots)
    with mapped(library):
        buffers = Buffers(library)
        params = GemmParams(
            a=buffers.add("a", dout, from_grid_in_front=True),
            b=buffers.add("b", weights),
            d=buffers.add("d", d, writable=True),
            preactivation=buffers.add("preactivation", preactivation, from_grid_in_front=True),
            weighted_activation=buffers.add("weighted_activation", active, writable=True),
            row_dots=buffers.add("row_dots", row_dots, writable=True),
            row_weights=buffers.add("row_weights", row_weights, from_grid_in_front=True),
            expert_offsets=buffers.add("expert_offsets", routing.offsets, from_grid_in_front=True),
            tile_counter=buffers.add("tile_counter", counter, writable=True) if problem.has_counter else 0,
            a_stride=dout.stride(0),
            b_stride=weights.stride(1),
            b_expert_stride=weights.stride(0),
            d_stride=d_stride,
            experts=experts,
            slots=slots,
            n=n,
            k=k,
            activation=ACTIVATIONS.index(problem.activation),
            is_interleaved=problem.is_interleaved,
        )
        maps, keep = tensor_map_arguments(unit, library, params)
        grid = min(row_tiles * n_tiles, EMULATED_MULTIPROCESSORS)
        geometry = Geometry(grid, unit.row.threads, unit.row.smem_bytes(unit.dtype), launch_registers(unit))
        report = library.launch(unit.symbol(problem.weights), (ctypes.addressof(params), *maps), geometry, settings)
        del keep
    wrong: list[str] = []
    if not report.failure:
        rows = _Rows(problem, routing, dout, weights, preactivation, row_weights)
        for name, actual in (("d", d[:count, : 2 * n]), ("weighted_activation", active[:count])):
            wrong += worst_place(name, actual, *rows.expected(name))
        for part, dots in enumerate(row_dots[:, :count]):
            span = slice(part * DOT_COLUMNS, (part + 1) * DOT_COLUMNS)
            wrong += worst_place(f"row_dots[{part}]", dots, *rows.dots(span))
        wrong += left_alone("d", d[:, 2 * n :]) + left_alone("d's rows", d[count:])
        wrong += left_alone("weighted_activation", active[count:]) + left_alone("row_dots", row_dots[:, count:])
        wrong += counter_is_zero(counter)
    return Outcome(problem, unit.symbol(problem.weights), report, tuple(wrong), d, row_dots)  # type: ignore[arg-type]


class _Rows:
    """What the rows of a GatedBackwardProblem must come to, in fp64, and how far off they may be.

    Bounds: fp32 sums over k (1e-5 of the magnitudes), approximate exponentials (4e-6 of what multiplies them), rounding to 16 bits.
    """

    def __init__(
        self,
        problem: GatedBackwardProblem,
        routing: Routing,
        dout: torch.Tensor,
        weights: torch.Tensor,
        preactivation: torch.Tensor,
        row_weights: torch.Tensor,
    ) -> None:
        n, k, count = problem.n, problem.k, sum(problem.rows)
        self._unit = UNIT_ROUNDOFF[problem.dtype]
        self._small = 2.0**-24 if problem.dtype == "f16" else 0.0
        self._is_interleaved = problem.is_interleaved
        a = dout[:count, :k].double()
        parts, sizes = [], []
        for expert in range(len(problem.rows)):
            span = slice(int(routing.offsets[expert]), int(routing.offsets[expert + 1]))
            b = (weights[expert].mT if problem.weights == "nk" else weights[expert]).double()
            parts.append(a[span] @ b)
            sizes.append(a[span].abs() @ b.abs())
        self._s, self._s_error = torch.cat(parts), 1e-5 * torch.cat(sizes)
        z = preactivation[:count].double()
        gate, up = (z[:, 0::2], z[:, 1::2]) if problem.is_interleaved else (z[:, :n], z[:, n:])
        self._value, *self._slopes = activation_gradient(problem.activation, gate, up)
        self._reach = (1.0 + gate.abs()) * (1.0 + up.abs())  # bounds value and slopes, up to a factor
        self._w = row_weights[:count, None].double()

    def _merged(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.stack((gate, up), -1).flatten(1) if self._is_interleaved else torch.cat((gate, up), 1)

    def expected(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, bounds) of ``d`` or ``weighted_activation``."""
        if name == "d":
            value = self._merged(*(self._w * self._s * slope for slope in self._slopes))
            errors = (
                self._w * (self._s_error * slope.abs() + 4e-6 * self._s.abs() * self._reach) for slope in self._slopes
            )
            error = self._merged(*errors)
        else:
            value, error = self._w * self._value, 4e-6 * self._w * self._reach
        return value, error + self._unit * value.abs() + self._small + 1e-6

    def dots(self, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        s, value = self._s[:, columns], self._value[:, columns]
        error = (self._s_error[:, columns] * value.abs() + 8e-6 * s.abs() * self._reach[:, columns]).sum(1)
        return (s * value).sum(1), error + 1e-5
