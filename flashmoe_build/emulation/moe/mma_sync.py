"""The grouped products of the sm80 and sm75 families on the emulated machine: small problems, and their results against fp64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from flashmoe_build.emulation.attention import EMULATED_MULTIPROCESSORS, Outcome, launch_registers, load, mapped
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, KernelLibrary, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import DTYPES, UNIT_ROUNDOFF, worst_place
from flashmoe_tools.descriptors import Header
from flashmoe_tools.tables import Unit

GemmParams = structure(Header("GemmParams", "moe/params/gemm.h"), (CSRC,))
ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")
ELEMENT = 2  # bytes
PADDING = 8  # elements between rows: a chunk past the end of a row is out of bounds
FAR = 2**28 + 8  # elements between rows: the ninth row is past 2^31
COLUMN_TILE = 128  # of row_dots
BACKWARD, GATED = "grouped_gemm_gated_backward", "grouped_gemm_gated"
GRADIENT = "grouped_gemm_weight_gradient"
OPERATIONS = ("grouped_gemm", GATED, BACKWARD, GRADIENT)
FAMILIES = ("sm75", "sm80")


@dataclass(frozen=True)
class Problem:
    """One product. ``n`` and ``k`` as in GemmParams."""

    operation: str
    weights: str  # the axis's word; "": it has none
    dtype: str
    counts: tuple[int, ...]  # rows of each expert
    n: int
    k: int
    unrouted: int = 0  # slots without an expert
    top_k: int = 1
    gathers: bool = True  # a (weight gradient: b) by slots; False: by rows
    activation: str = "swiglu"
    interleaved: bool = False
    has_bias: bool = False
    keeps: bool = False  # z is wanted
    has_nan: bool = False
    is_far: bool = False  # offsets past 2^31 elements
    has_counter: bool = True
    scale: float = 1.0
    seed: int = 0
    causal: bool = False  # what every problem of the suite has: there is one mask
    huge: bool = False

    @property
    def rows(self) -> int:
        return sum(self.counts)

    @property
    def slots(self) -> int:
        total = self.rows + self.unrouted
        return -(-total // self.top_k) * self.top_k

    def __str__(self) -> str:
        flags = ("gathers", "interleaved", "has_bias", "keeps", "has_nan", "is_far", "has_counter")
        told = (name.removeprefix("has_").removeprefix("is_") for name in flags if getattr(self, name))
        size = f"e{len(self.counts)}.r{self.rows}.n{self.n}.k{self.k}"
        return "-".join(filter(None, (self.weights, size, self.activation, *told)))


@dataclass(frozen=True)
class Inputs:
    """What the kernel is given; ``b`` [experts, n, k] whatever the layout, of a weight gradient [rows of b, k]."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor  # [experts, n]
    z: torch.Tensor  # [slots, 2 n]
    row_weights: torch.Tensor
    offsets: torch.Tensor
    row_slots: torch.Tensor


def problems(unit: Unit) -> Iterator[Problem]:
    """Edges of the kernel's tile, empty and hot experts, more experts than the tile table has parts, every layout."""
    operation, m = unit.row.operation, unit.row.block_m
    make = partial(Problem, operation, dtype=unit.dtype)
    if operation == GRADIENT:
        yield make("", counts=(70, 0, 3, 33), n=m + 8, k=136, unrouted=2, top_k=2)
        yield make("", counts=(1, 32, 160), n=8, k=8, gathers=False, has_counter=False)
        yield make("", counts=(5, 9, 12), n=24, k=40, top_k=3, has_nan=True)
        yield make("", counts=(10, 2), n=40, k=16, is_far=True)
        yield make("", counts=(0, 0), n=16, k=8, unrouted=3)
        return
    step = 16 if operation == GATED else 8  # of n
    wide = 128 + step  # past a column tile
    words = unit.row.words["weights"]
    pairs = "kn_pairs" if "kn_pairs" in words else "kn"
    for word in words:  # tails of all three sizes, an expert without rows, slots without an expert
        tails = make(word, counts=(m + 1, 0, 3, m), n=wide, k=200, unrouted=3, top_k=2, keeps=True, seed=len(word))
        yield replace(tails, interleaved=word != "kn", has_bias=operation != BACKWARD)
    by_rows = make("nk", counts=(5, 1), n=128 + 2 * step, k=40, gathers=False, activation="clamped_swiglu", scale=4.0)
    yield replace(by_rows, has_bias=operation != BACKWARD)
    # A hot expert: more row tiles than go side by side.
    yield make("nk", counts=(0, 17 * m + 3, 1), n=wide, k=8, activation="geglu", has_counter=False)
    # Two experts in a part of the tile table, most of them empty.
    yield make("kn", counts=(0,) * 3 + (1, 0, 2, 0) * 20, n=32, k=32, top_k=4, activation="reglu", keeps=True)
    yield make("nk", counts=(0, 0), n=16, k=8, unrouted=6, top_k=2)
    yield make("nk", counts=(7, 9, 4), n=48, k=72, top_k=5, activation="geglu_tanh", has_nan=True, keeps=True)
    far = make(pairs, counts=(11, 0, 10), n=48, k=64, is_far=True, keeps=True)
    yield replace(far, interleaved=pairs == "kn_pairs")
    yield replace(far, weights="nk", interleaved=True, seed=1)


def make_inputs(p: Problem) -> Inputs:
    """Fresh random inputs, the same for the same problem."""
    generator = torch.Generator().manual_seed(p.seed * 7919 + p.n + p.k)
    dtype = DTYPES[p.dtype]

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    experts = torch.repeat_interleave(torch.arange(len(p.counts)), torch.tensor(p.counts))
    of_slot = torch.full((p.slots,), len(p.counts))
    of_slot[: p.rows] = experts
    of_slot = of_slot[torch.randperm(p.slots, generator=generator)]
    row_slots = torch.sort(of_slot, stable=True).indices.to(torch.int32)
    row_slots[p.rows :] = -1
    tokens = p.slots // p.top_k
    scale = p.scale / math.sqrt(p.k)
    if p.operation == GRADIENT:
        a, b = normal(p.slots, p.n), normal(tokens if p.gathers else p.slots, p.k)
    else:
        a, b = normal(tokens if p.gathers else p.slots, p.k), normal(len(p.counts), p.n, p.k, scale=scale)
    if p.has_nan:  # where the first expert's last row comes from, and in the weights of the last
        row = p.counts[0] - 1
        source = int(row_slots[row]) // p.top_k if p.gathers and p.operation != GRADIENT else row
        a[source, p.k // 2 if p.operation != GRADIENT else 3] = float("nan")
        if p.operation != GRADIENT:
            b[-1, 5, p.k - 1] = float("nan")
    offsets = torch.cumsum(torch.tensor((0, *p.counts)), 0).to(torch.int32)
    return Inputs(
        a,
        b,
        normal(len(p.counts), p.n),
        normal(p.slots, 2 * p.n, scale=2 * p.scale),
        torch.rand(p.slots, generator=generator),
        offsets,
        row_slots,
    )


def activate(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The activation by torch's own functions."""
    functional = torch.nn.functional
    forms: dict[str, Callable[[], torch.Tensor]] = {
        "swiglu": lambda: functional.silu(gate) * up,
        "geglu": lambda: functional.gelu(gate) * up,
        "geglu_tanh": lambda: functional.gelu(gate, approximate="tanh") * up,
        "reglu": lambda: functional.relu(gate) * up,
        "clamped_swiglu": lambda: (low := gate.clamp(max=7)) * torch.sigmoid(1.702 * low) * (up.clamp(-7, 7) + 1),
    }
    return forms[name]()


def split_gate(z: torch.Tensor, *, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    half = z.shape[-1] // 2
    return (z[..., 0::2], z[..., 1::2]) if interleaved else (z[..., :half], z[..., half:])


def join_gate(gate: torch.Tensor, up: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    return torch.stack((gate, up), -1).flatten(-2) if interleaved else torch.cat((gate, up), -1)


Expected = dict[str, tuple[torch.Tensor, torch.Tensor]]  # fp64 result and bound of its error


def reference(p: Problem, given: Inputs) -> Expected:
    """Of each result, in fp64, its rows that are written. Bounds: 1e-5 of the sum of magnitudes for fp32 accumulation and the
    approximate exponential, and the result's rounding."""
    unit = UNIT_ROUNDOFF[p.dtype]
    rows = given.row_slots[: p.rows].long()
    sources = rows // p.top_k if p.gathers else torch.arange(p.rows)
    experts = torch.repeat_interleave(torch.arange(len(p.counts)), torch.tensor(p.counts))
    a, b = given.a.double(), given.b.double()
    if p.operation == GRADIENT:
        sums = torch.zeros(len(p.counts), p.n, p.k, dtype=torch.float64)
        spread = torch.zeros_like(sums)
        for expert in range(len(p.counts)):
            own = experts == expert
            left, right = a[: p.rows][own], b[sources[own]]
            sums[expert], spread[expert] = left.mT @ right, left.nan_to_num().abs().mT @ right.abs()
        return {"d": (sums, unit * sums.abs() + 1e-5 * spread + 1e-7)}
    left, own = a[sources], b[experts]
    sums = torch.einsum("rk,rnk->rn", left, own)
    error = 1e-5 * torch.einsum("rk,rnk->rn", left.nan_to_num().abs(), own.nan_to_num().abs()) + 1e-6
    if p.has_bias:
        sums = sums + given.bias.double()[experts]
    if p.operation == BACKWARD:
        return _backward_reference(p, given, sums, error)
    plain = {"d": (sums, unit * sums.abs() + error)}
    if p.operation != GATED:
        return plain
    gate, up = split_gate(sums, interleaved=p.interleaved)
    gate_error, up_error = split_gate(error, interleaved=p.interleaved)
    value = activate(p.activation, gate, up)
    slope = 1.7 * (1 + up.abs()) * gate_error + 1.2 * gate.abs() * up_error
    expected = {"d": (value, unit * value.abs() + slope + 1e-5 * (gate * (1 + up.abs())).abs() + 1e-6)}
    return {**expected, "preactivation": plain["d"]} if p.keeps else expected


def _backward_reference(p: Problem, given: Inputs, s: torch.Tensor, error: torch.Tensor) -> Expected:
    unit = UNIT_ROUNDOFF[p.dtype]
    z = given.z[: p.rows].double()
    gate, up = (t.detach().clone().requires_grad_() for t in split_gate(z, interleaved=p.interleaved))
    value = activate(p.activation, gate, up)
    by_gate, by_up = torch.autograd.grad(value.sum(), (gate, up))
    value = value.detach()
    weight = given.row_weights[: p.rows].double()[:, None]
    gradient = join_gate(weight * s * by_gate, weight * s * by_up, interleaved=p.interleaved)
    slopes = join_gate(by_gate, by_up, interleaved=p.interleaved).abs()
    size = 1e-5 * (1 + up.detach().abs()) * (1 + gate.detach().abs())  # of the slopes' own error
    slope_error = join_gate(size, size, interleaved=p.interleaved)
    both = torch.cat((s.abs(), s.abs()), -1) if not p.interleaved else s.abs().repeat_interleave(2, -1)
    spread = torch.cat((error, error), -1) if not p.interleaved else error.repeat_interleave(2, -1)
    weighted = weight * value
    tiles = range(0, p.n, COLUMN_TILE)
    dots = torch.stack([(value * s)[:, start : start + COLUMN_TILE].sum(-1) for start in tiles])
    dot_error = value.abs() * error + (1e-5 * value.abs() + size) * s.abs() + 1e-6
    dot_bounds = torch.stack([dot_error[:, start : start + COLUMN_TILE].sum(-1) for start in tiles])
    return {
        "d": (gradient, unit * gradient.abs() + weight * (slopes * spread + slope_error * both) + 1e-6),
        "weighted_activation": (weighted, unit * weighted.abs() + weight * size + 1e-6),
        "row_dots": (dots, dot_bounds),
    }


class _Memory:
    """Host tensors as the kernel sees them."""

    def __init__(self, library: KernelLibrary, problem: Problem) -> None:
        self._library = library
        self._problem = problem
        self._kept: list[torch.Tensor] = []

    def given(self, tensor: torch.Tensor, name: str) -> int:
        """Something that a kernel in front has written."""
        return self._library.expect_from_grid_in_front(self._add(tensor, name, writable=False, initialised=True))

    def written(self, tensor: torch.Tensor, name: str, *, initialised: bool = False) -> int:
        return self._add(tensor, name, writable=True, initialised=initialised)

    def _add(self, tensor: torch.Tensor, name: str, *, writable: bool, initialised: bool) -> int:
        size = tensor.numel() * tensor.element_size()
        return self._library.add_buffer(tensor.data_ptr(), size, writable=writable, initialised=initialised, name=name)

    def rows(self, tensor: torch.Tensor, name: str, count: int, *, output: bool = False) -> tuple[int, int]:
        """Address and stride of a [rows, columns] tensor whose first ``count`` rows are buffers of their own; the others are
        not there."""
        return self.chosen_rows(tensor, name, range(count), output=output)

    def chosen_rows(
        self, tensor: torch.Tensor, name: str, chosen: Iterable[int], *, output: bool = False
    ) -> tuple[int, int]:
        self._kept.append(tensor)
        rows, columns = tensor.shape
        stride = FAR if self._problem.is_far else columns + PADDING
        base = self._library.reserve(max(1, rows) * stride * ELEMENT)
        for row in chosen:
            address, memory = base + row * stride * ELEMENT, tensor.data_ptr() + row * columns * ELEMENT
            self._library.map_buffer(
                address, memory, columns * ELEMENT, writable=output, initialised=not output, name=f"{name} row {row}"
            )
        return base, stride


def make_results(p: Problem) -> dict[str, torch.Tensor]:
    """What a kernel may write, NaN before."""
    width = {GATED: p.n // 2, BACKWARD: 2 * p.n}.get(p.operation, p.n)
    shapes = {
        "d": (len(p.counts) * p.n, p.k) if p.operation == GRADIENT else (p.slots, width),
        "preactivation": (p.slots, p.n),
        "weighted_activation": (p.slots, p.n),
    }
    nan = float("nan")
    results = {name: torch.full(shape, nan, dtype=DTYPES[p.dtype]) for name, shape in shapes.items()}
    return {**results, "row_dots": torch.full((math.ceil(p.n / COLUMN_TILE), p.slots), nan)}


def _weights(p: Problem, given: Inputs, memory: _Memory) -> dict[str, int]:
    """b of the parameters. Weights of an expert without rows are not there."""
    if p.operation == GRADIENT:
        b, stride = memory.rows(given.b, "b", len(given.b))
        return {"b": b, "b_stride": stride}
    weights = given.b if p.weights == "nk" else given.b.mT.contiguous()
    per_expert = weights.shape[1]
    used = (row for row in range(len(p.counts) * per_expert) if p.counts[row // per_expert] > 0)
    b, stride = memory.chosen_rows(weights.flatten(0, 1), "weights", used)
    return {"b": b, "b_stride": stride, "b_expert_stride": stride * per_expert}


def _params(
    p: Problem, given: Inputs, results: dict[str, torch.Tensor], counter: torch.Tensor, memory: _Memory
) -> ctypes.Structure:
    """Maps everything and fills the kernel's parameters. What the kernel has no part in stays null."""
    is_gradient = p.operation == GRADIENT
    d, d_stride = memory.rows(results["d"], "d", len(results["d"]) if is_gradient else p.rows, output=True)
    a, a_stride = memory.rows(given.a, "a", len(given.a))
    fields = {"d": d, "d_stride": d_stride, "a": a, "a_stride": a_stride, **_weights(p, given, memory)}
    if p.gathers:
        fields["b_slots" if is_gradient else "a_slots"] = memory.given(given.row_slots, "row_slots")
    if p.has_bias:
        fields["bias"] = memory.given(given.bias, "bias")
    if p.has_counter:
        fields["tile_counter"] = memory.written(counter, "tile_counter", initialised=True)
    if p.operation == BACKWARD:
        fields["preactivation"] = memory.given(given.z, "preactivation")
        fields["row_weights"] = memory.given(given.row_weights, "row_weights")
        for name in ("weighted_activation", "row_dots"):
            fields[name] = memory.written(results[name], name)
    elif p.keeps and p.operation == GATED:
        fields["preactivation"] = memory.written(results["preactivation"], "preactivation")
    return GemmParams(
        **fields,
        expert_offsets=memory.given(given.offsets, "expert_offsets"),
        experts=len(p.counts),
        slots=p.slots,
        tokens=p.slots // p.top_k,
        top_k=p.top_k,
        n=p.n,
        k=p.k,
        activation=ACTIVATIONS.index(p.activation),
        is_interleaved=int(p.interleaved),
    )


def run(unit: Unit, p: Problem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares with fp64."""
    library = load(kernel_library(unit, options))
    given, results, counter = make_inputs(p), make_results(p), torch.zeros(1, dtype=torch.int32)
    symbol = unit.symbol(*filter(None, (p.weights,)))
    memory = _Memory(library, p)
    with mapped(library):
        params = _params(p, given, results, counter, memory)
        report = library.launch(symbol, (ctypes.addressof(params),), geometry(unit, p), settings)
    wrong: list[str] = []
    if report.failure is None:
        for name, (value, bound) in reference(p, given).items():
            wrong += worst_place(name, _rows_of(p, name, results[name]), value, bound)
        if int(counter[0]) != 0:
            wrong.append(f"tile_counter is {int(counter[0])} after the launch; the next launch needs 0")
    return Outcome(p, symbol, report, tuple(wrong), results["d"], results["row_dots"])  # type: ignore[arg-type]


def _rows_of(p: Problem, name: str, result: torch.Tensor) -> torch.Tensor:
    """The part of a result that the kernel writes, in the shape of the reference."""
    if p.operation == GRADIENT:
        return result.view(len(p.counts), p.n, p.k)
    return result[:, : p.rows] if name == "row_dots" else result[: p.rows]


def geometry(unit: Unit, p: Problem) -> Geometry:
    """Grid, threads, shared memory and registers at launch, as the host chooses them: a bound for the number of tiles."""
    row = unit.row
    if p.operation == GRADIENT:
        tiles = len(p.counts) * math.ceil(p.n / row.block_m) * math.ceil(p.k / row.block_n)
    else:
        tiles = (math.ceil(p.slots / row.block_m) + min(len(p.counts), p.slots)) * math.ceil(p.n / row.block_n)
    grid = min(tiles, EMULATED_MULTIPROCESSORS)
    return Geometry(grid, row.threads, row.smem_bytes(unit.dtype), launch_registers(unit))
