"""Runs small problems on the emulated grouped products of a mixture of experts, plain and gated, and checks them against fp64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch.nn import functional

from flashmoe_build.emulation.attention import (
    EMULATED_MULTIPROCESSORS,
    Outcome,
    launch_registers,
    load,
    mapped,
    tensor_map_arguments,
)
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, KernelLibrary, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import DTYPES, UNIT_ROUNDOFF, worst_place
from flashmoe_tools.descriptors import Header
from flashmoe_tools.tables import Unit

GemmParams = structure(Header("GemmParams", "moe/params/gemm.h"), (CSRC,))
UNTOUCHED = 7.0  # what stands where a result must leave memory alone
PADDING = 8  # elements after each row, which strides skip
ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")  # the order of enum class Activation


@dataclass(frozen=True)
class GemmProblem:
    """One grouped product. Gated: ``n`` columns of gate and as many of up, rows of A gathered."""

    rows: tuple[int, ...]  # by expert
    n: int  # columns of the result
    k: int
    weights: str  # a word of the axis
    dtype: str
    activation: str = ""  # gated: which
    is_interleaved: bool = False
    keeps: bool = False  # gated: the pre-activation is wanted
    has_bias: bool = False
    top_k: int = 2
    unrouted: int = 0  # slots without a row, at least
    has_nan: bool = False  # in the first rows of experts
    has_counter: bool = True
    data_seed: int = 0
    causal: bool = False  # what every problem of the suite has: there is one mask
    huge: bool = False

    @property
    def slots(self) -> int:
        return math.ceil((sum(self.rows) + self.unrouted) / self.top_k) * self.top_k

    def __str__(self) -> str:
        rows = ".".join(map(str, self.rows)) if len(self.rows) < 9 else f"{sum(self.rows)}of{len(self.rows)}"
        flags = {
            "interleaved": self.is_interleaved,
            "keep": self.keeps,
            "bias": self.has_bias,
            "nan": self.has_nan,
            "nocounter": not self.has_counter,
        }
        words = [self.weights, f"r{rows}", f"n{self.n}", f"k{self.k}", self.activation]
        return "-".join([*filter(None, words), *(name for name, is_set in flags.items() if is_set)])


def plain_problems(unit: Unit) -> Iterator[GemmProblem]:
    """Tails in rows, n and k; experts without rows, at the ends too; one hot expert; both ways the weights may lie."""
    m, n = unit.row.block_m, unit.row.block_n
    make = GemmProblem
    yield make((m + 2, 0, 3, 64), n + 72, 136, "nk", unit.dtype, has_bias=True, has_nan=True, unrouted=5, data_seed=1)
    yield make((0, m, 0), n, 64, "kn", unit.dtype, data_seed=2)  # whole tiles; experts without rows at both ends
    yield make((0, 3 * m + 66, 1), 2 * n + 8, 72, "kn", unit.dtype, has_bias=True, top_k=1, data_seed=3)
    yield make((m - 1, 2 * m, 9), n + 8, 200, "nk", unit.dtype, has_counter=False, has_nan=True, data_seed=4)
    yield make((0, 0), 40, 16, "nk", unit.dtype, unrouted=4, data_seed=5)  # nobody chose these experts
    # Several windows of experts, some without rows; a sum over k that is shorter than one block.
    some = tuple(3 if expert in (0, 31, 40, 95) else 0 for expert in range(97))
    yield make(some, 8, 8, "kn", unit.dtype, has_nan=True, data_seed=6)
    yield make((5, 2048 + 70), n + 8, 8, "nk", unit.dtype, top_k=1, data_seed=7)  # more than a group of row tiles


def gated_problems(unit: Unit) -> Iterator[GemmProblem]:
    """As above, with each activation, each way the weights may lie, and the pre-activation wanted or not."""
    m, n = unit.row.block_m, unit.row.block_n // 2
    base = GemmProblem((), 0, 0, "nk", unit.dtype)

    def make(rows: tuple[int, ...], columns: int, k: int, seed: int, **changes: object) -> GemmProblem:
        return replace(base, rows=rows, n=columns, k=k, data_seed=seed, **changes)  # type: ignore[arg-type]

    yield make((m + 2, 0, 3), n + 72, 136, 11, activation="swiglu", keeps=True, has_nan=True, unrouted=5)
    # Gate and up in turn.
    yield make(
        *((0, 2 * m - 30, 40), n + 24, 72, 12),
        activation="clamped_swiglu",
        is_interleaved=True,
        keeps=True,
        has_bias=True,
        has_nan=True,
    )
    yield make((m, 64), n, 64, 13, weights="kn", activation="geglu", keeps=True, has_bias=True, top_k=1)
    yield make(
        *((70, m + 1), n + 40, 80, 14),
        weights="kn_pairs",
        is_interleaved=True,
        activation="geglu_tanh",
        keeps=True,
        has_bias=True,
    )
    yield make((3 * m + 66, 0), n + 8, 200, 15, activation="reglu", has_counter=False, top_k=3, unrouted=7)
    yield make((0, 0), 40, 16, 16, activation="swiglu", unrouted=4, keeps=True)
    some = tuple(3 if expert in (1, 31, 40, 95) else 0 for expert in range(97))
    yield make(some, 16, 8, 17, weights="kn_pairs", is_interleaved=True, activation="swiglu", has_nan=True)


@dataclass(frozen=True)
class Routing:
    """Which slot each row is, the experts' rows one after another."""

    offsets: torch.Tensor  # int32 [experts + 1]
    row_slots: torch.Tensor  # int32 [slots], -1 past the last row


def route(rows: tuple[int, ...], slots: int, generator: torch.Generator) -> Routing:
    """Slots for the rows at random, ascending inside an expert."""
    chosen = torch.randperm(slots, generator=generator)[: sum(rows)]
    parts = [part.sort().values for part in chosen.split(list(rows))]
    row_slots = torch.full((slots,), -1, dtype=torch.int32)
    row_slots[: sum(rows)] = torch.cat(parts).int()
    return Routing(torch.tensor([0, *rows]).cumsum(0).int(), row_slots)


class Buffers:
    """Maps host tensors into the machine and keeps them alive."""

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library
        self._kept: list[torch.Tensor] = []

    def add(
        self,
        name: str,
        tensor: torch.Tensor | None,
        *,
        writable: bool = False,
        readable: bool = True,
        from_grid_in_front: bool = False,
    ) -> int:
        """The tensor's address on the machine; 0 for none."""
        if tensor is None:
            return 0
        self._kept.append(tensor)
        size = tensor.numel() * tensor.element_size()
        address = self._library.add_buffer(tensor.data_ptr(), size, writable=writable, initialised=readable, name=name)
        return self._library.expect_from_grid_in_front(address) if from_grid_in_front else address


@dataclass(frozen=True)
class Inputs:
    """What a problem's kernel is given. Everything that it must not read into a result is NaN."""

    routing: Routing
    a: torch.Tensor  # [tokens or slots, k + PADDING]
    weights: torch.Tensor  # [experts, n or k, k or n, + PADDING]; gated: 2 n
    bias: torch.Tensor | None

    def rows_of_a(self, problem: GemmProblem) -> torch.Tensor:
        """A by row, fp64."""
        count = sum(problem.rows)
        if not problem.activation:
            return self.a[:count, : problem.k].double()
        tokens = self.routing.row_slots[:count].long() // problem.top_k
        return self.a[tokens, : problem.k].double()


def make_inputs(problem: GemmProblem) -> Inputs:
    generator = torch.Generator().manual_seed(problem.data_seed * 7919 + 29)
    dtype, experts, nan = DTYPES[problem.dtype], len(problem.rows), float("nan")
    routing = route(problem.rows, problem.slots, generator)
    used = (
        routing.row_slots[: sum(problem.rows)].long() // problem.top_k
        if problem.activation
        else slice(sum(problem.rows))
    )
    a = torch.full((problem.slots // (problem.top_k if problem.activation else 1), problem.k + PADDING), nan)
    values = torch.randn((a.shape[0], problem.k), generator=generator)
    a[used, : problem.k] = values[used]
    if problem.has_nan:
        starts = [int(start) for start, count in zip(routing.offsets, problem.rows, strict=False) if count][1:]
        a[[int(routing.row_slots[s]) // problem.top_k for s in starts] if problem.activation else starts, 3] = nan
    columns = problem.n * (2 if problem.activation else 1)
    weights = torch.randn((experts, columns, problem.k), generator=generator) * (2.0 if problem.activation else 1.0)
    bias = torch.randn((experts, columns), generator=generator)
    nobody = [expert for expert, count in enumerate(problem.rows) if count == 0]
    weights[nobody], bias[nobody] = nan, nan
    if problem.weights != "nk":
        weights = weights.mT
    weights = functional.pad(weights, (0, PADDING), value=nan)
    return Inputs(routing, a.to(dtype), weights.to(dtype).contiguous(), bias.to(dtype) if problem.has_bias else None)


def gelu_of_clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


FORMULAS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "geglu": lambda gate, up: functional.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "reglu": lambda gate, up: functional.relu(gate) * up,
    "clamped_swiglu": gelu_of_clamped,
}


def products(problem: GemmProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of every row, with bias, in fp64, and how far fp32 sums may be from them."""
    a = inputs.rows_of_a(problem)
    width = problem.n * (2 if problem.activation else 1)
    sums, error = torch.zeros((len(a), width), dtype=torch.float64), torch.zeros((len(a), width), dtype=torch.float64)
    for expert, (begin, end) in enumerate(pairwise(inputs.routing.offsets.tolist())):
        if begin == end:
            continue
        weights = inputs.weights[expert].double()
        weights = weights[:, : problem.k] if problem.weights == "nk" else weights[:, :width].mT
        sums[begin:end] = a[begin:end] @ weights.mT
        error[begin:end] = a[begin:end].abs() @ weights.abs().mT
        if inputs.bias is not None:
            sums[begin:end] += inputs.bias[expert].double()
    return sums, 1e-5 * error + 1e-6


def activated(problem: GemmProblem, sums: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation in fp64, and how far it may be off in fp32."""
    if problem.is_interleaved:
        gate, up, gate_error, up_error = sums[:, 0::2], sums[:, 1::2], error[:, 0::2], error[:, 1::2]
    else:
        (gate, up), (gate_error, up_error) = sums.split(problem.n, dim=1), error.split(problem.n, dim=1)
    formula = FORMULAS[problem.activation]
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    value = formula(gate, up)
    by_gate, by_up = torch.autograd.grad(value.sum(), (gate, up))
    bound = by_gate.abs() * gate_error + by_up.abs() * up_error + 4e-6 * (1 + gate.abs()) * (1 + up.abs())
    return value.detach(), bound.detach()


def run_gemm(unit: Unit, problem: GemmProblem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares with fp64."""
    library = load(kernel_library(unit, options))
    inputs = make_inputs(problem)
    dtype, count = DTYPES[problem.dtype], sum(problem.rows)
    out = torch.full((problem.slots, problem.n + PADDING), UNTOUCHED, dtype=dtype)
    kept = torch.full((problem.slots, 2 * problem.n), UNTOUCHED, dtype=dtype) if problem.keeps else None
    counter = torch.zeros(1, dtype=torch.int32)
    symbol = unit.symbol(problem.weights)
    with mapped(library):
        params = _params(Buffers(library), problem, inputs, out, kept, counter)
        maps, keep = tensor_map_arguments(unit, library, params)
        report = library.launch(symbol, (ctypes.addressof(params), *maps), _geometry(unit, problem), settings)
        del keep
    wrong: list[str] = []
    if not report.failure:
        sums, error = products(problem, inputs)
        unit_roundoff = UNIT_ROUNDOFF[problem.dtype]
        if kept is not None:
            wrong += worst_place("preactivation", kept[:count], sums, error + unit_roundoff * sums.abs())
            wrong += left_alone("the pre-activation's rows", kept[count:])
        value, bound = activated(problem, sums, error) if problem.activation else (sums, error)
        wrong += worst_place("d", out[:count, : problem.n], value, bound + unit_roundoff * value.abs())
        wrong += left_alone("d's columns", out[:, problem.n :])
        wrong += left_alone("d's rows", out[count:])
        wrong += counter_is_zero(counter)
    return Outcome(problem, symbol, report, tuple(wrong), out, out)  # type: ignore[arg-type]


def _geometry(unit: Unit, problem: GemmProblem) -> Geometry:
    row = unit.row
    columns = row.block_n // (2 if problem.activation else 1)
    tiles = (math.ceil(problem.slots / row.block_m) + min(len(problem.rows), problem.slots)) * math.ceil(
        problem.n / columns
    )
    grid = min(tiles, EMULATED_MULTIPROCESSORS)
    return Geometry(grid, row.threads, row.smem_bytes(unit.dtype), launch_registers(unit))


def _params(
    buffers: Buffers,
    problem: GemmProblem,
    inputs: Inputs,
    out: torch.Tensor,
    kept: torch.Tensor | None,
    counter: torch.Tensor,
) -> ctypes.Structure:
    """Maps everything and fills the kernel's parameters."""
    is_gated = bool(problem.activation)
    return GemmParams(
        a=buffers.add("a", inputs.a, from_grid_in_front=True),
        b=buffers.add("weights", inputs.weights),
        d=buffers.add("d", out, writable=True, readable=False),
        bias=buffers.add("bias", inputs.bias),
        preactivation=buffers.add("preactivation", kept, writable=True, readable=False),
        expert_offsets=buffers.add("expert_offsets", inputs.routing.offsets, from_grid_in_front=True),
        a_slots=buffers.add("row_slots", inputs.routing.row_slots, from_grid_in_front=True) if is_gated else 0,
        tile_counter=buffers.add("tile_counter", counter, writable=True) if problem.has_counter else 0,
        a_stride=inputs.a.stride(0),
        b_stride=inputs.weights.stride(1),
        b_expert_stride=inputs.weights.stride(0),
        d_stride=out.stride(0),
        experts=len(problem.rows),
        slots=problem.slots,
        tokens=problem.slots // problem.top_k,
        top_k=problem.top_k,
        n=problem.n * (2 if is_gated else 1),
        k=problem.k,
        activation=ACTIVATIONS.index(problem.activation) if is_gated else 0,
        is_interleaved=problem.is_interleaved,
    )


def left_alone(name: str, place: torch.Tensor) -> list[str]:
    """What stands beside a result must stay."""
    changed = int((place != UNTOUCHED).sum())
    return [f"{changed} elements beside {name} were written"] if changed else []


def counter_is_zero(counter: torch.Tensor) -> list[str]:
    value = int(counter[0])
    return [f"tile_counter is {value} after the launch; the next launch needs 0"] if value else []
