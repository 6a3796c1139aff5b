"""The grouped products of the sm80 and sm75 families on the emulated machine: small problems, and their results against fp64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from flashmoe.tools.operations import Header
from flashmoe.tools.tables import Unit
from flashmoe_build.emulation.attention import EMULATED_MULTIPROCESSORS, launch_registers, load, mapped
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, KernelLibrary, LaunchReport, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import DTYPES, UNIT_ROUNDOFF

GemmParams = structure(Header("GemmParams", "moe/params/gemm.h"), (CSRC,))
ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")
ELEMENT = 2  # bytes
PADDING = 8  # elements between rows: a chunk past the end of a row is out of bounds
FAR = 2**28 + 8  # elements between rows: the ninth row is past 2^31
COLUMN_TILE = 128  # of row_dots
BACKWARD, GATED = "grouped_gemm_gated_backward", "grouped_gemm_gated"
GRADIENT = "grouped_gemm_weight_gradient"


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

    @property
    def rows(self) -> int:
        return sum(self.counts)

    @property
    def slots(self) -> int:
        total = self.rows + self.unrouted
        return -(-total // self.top_k) * self.top_k

    @property
    def identity(self) -> str:
        experts = f"e{len(self.counts)}.r{self.rows}"
        flags = ("gathers", "interleaved", "has_bias", "keeps", "has_nan", "is_far", "has_counter")
        told = "-".join(name.removeprefix("has_").removeprefix("is_") for name in flags if getattr(self, name))
        return f"{self.operation}-{self.weights}-{self.dtype}-{experts}.n{self.n}.k{self.k}-{self.activation}-{told}"


@dataclass(frozen=True)
class Outcome:
    """What came of one emulated run."""

    problem: Problem
    report: LaunchReport
    wrong: tuple[str, ...]
    results: dict[str, torch.Tensor]

    @property
    def passed(self) -> bool:
        return self.report.failure is None and not self.wrong

    def explain(self) -> str:
        failure = [] if self.report.failure is None else [str(self.report.failure)]
        return "\n".join([self.problem.identity, *failure, *self.wrong])


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
    for index, weights in enumerate(unit.row.words.get("weights", ("",))):
        even = 16 if operation == GATED else 8

        def case(
            counts: tuple[int, ...], n: int, k: int, *, weights: str = weights, index: int = index, **more: object
        ) -> Problem:
            chosen = {"interleaved": weights == "kn_pairs", "seed": index, **more}
            if weights == "kn" and operation == GATED:
                chosen["interleaved"] = False
            return Problem(operation, weights, unit.dtype, counts, n, k, **chosen)  # type: ignore[arg-type]

        if operation == GRADIENT:
            yield case((70, 0, 3, 33), m + 8, 136, unrouted=2, top_k=2)
            yield case((1, 32, 160), 8, 8, gathers=False, has_counter=False)
            yield case((5, 9, 12), 24, 40, top_k=3, has_nan=True)
            yield case((10, 2), 40, 16, is_far=True)
            continue
        wide = 128 + even  # one past a column tile
        # Tails of all three sizes, an expert without rows, slots without an expert.
        yield case((m + 1, 0, 3, m), wide, 200, unrouted=3, top_k=2, has_bias=True, keeps=True, interleaved=weights != "kn")
        yield case((5, 1), 128 + 2 * even, 40, gathers=False, activation="clamped_swiglu", has_bias=True, scale=4.0)
        # A hot expert: more row tiles than go side by side.
        yield case((0, 17 * m + 3, 1), wide, 8, activation="geglu", keeps=True, has_counter=False)
        # Two experts in a part of the tile table, most of them empty.
        yield case((0,) * 3 + (1, 0, 2, 0) * 20, 32, 32, top_k=4, activation="reglu", has_bias=True)
        yield case((0, 0), 16, 8, unrouted=6, top_k=2)
        yield case((7, 9, 4), 48, 72, top_k=5, activation="geglu_tanh", has_nan=True, keeps=True)
        yield case((11, 0, 10), 48, 64, is_far=True, interleaved=weights == "nk" or weights == "kn_pairs", keeps=True)


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
        "clamped_swiglu": lambda: (
            (low := gate.clamp(max=7)) * torch.sigmoid(1.702 * low) * (up.clamp(-7, 7) + 1)
        ),
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

    def whole(self, tensor: torch.Tensor, name: str, *, output: bool = False, initialised: bool = False) -> int:
        size = tensor.numel() * tensor.element_size()
        initialised = initialised or not output
        return self._library.add_buffer(tensor.data_ptr(), size, writable=output, initialised=initialised, name=name)

    def rows(self, tensor: torch.Tensor, name: str, keep: Callable[[int], bool], *, output: bool = False) -> tuple[int, int]:
        """A [rows, columns] tensor whose rows are buffers of their own; those that ``keep`` refuses are not there."""
        count, columns = tensor.shape
        stride = FAR if self._problem.is_far else columns + PADDING
        base = self._library.reserve(max(1, count) * stride * ELEMENT)
        for row in filter(keep, range(count)):
            address, memory = base + row * stride * ELEMENT, tensor.data_ptr() + row * columns * ELEMENT
            self._library.map_buffer(
                address, memory, columns * ELEMENT, writable=output, initialised=not output, name=f"{name} row {row}"
            )
        return base, stride


def run(unit: Unit, p: Problem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares with fp64."""
    library = load(kernel_library(unit, options))
    given = make_inputs(p)
    nan = float("nan")
    backward, experts = p.operation == BACKWARD, len(p.counts)
    width = {GATED: p.n // 2, BACKWARD: 2 * p.n}.get(p.operation, p.n)
    like = {"dtype": DTYPES[p.dtype]}
    shape = (experts * p.n, p.k) if p.operation == GRADIENT else (p.slots, width)
    results = {
        "d": torch.full(shape, nan, **like),  # type: ignore[arg-type]
        "preactivation": torch.full((p.slots, p.n), nan, **like),  # type: ignore[arg-type]
        "weighted_activation": torch.full((p.slots, p.n), nan, **like),  # type: ignore[arg-type]
        "row_dots": torch.full((math.ceil(p.n / COLUMN_TILE), p.slots), nan),
    }
    counter = torch.zeros(1, dtype=torch.int32)
    weights = given.b if p.operation == GRADIENT or p.weights == "nk" else given.b.mT.contiguous()
    with mapped(library):
        memory = _Memory(library, p)
        written = (lambda _: True) if p.operation == GRADIENT else (lambda row: row < p.rows)
        d, d_stride = memory.rows(results["d"], "d", written, output=True)
        a, a_stride = memory.rows(given.a, "a", lambda _: True)
        flat = weights.flatten(0, -2)
        per_expert = weights.shape[-2]
        chosen = (lambda _: True) if p.operation == GRADIENT else (lambda row: p.counts[row // per_expert] > 0)
        b, b_stride = memory.rows(flat, "b", chosen)
        slots = memory.whole(given.row_slots, "row_slots")
        fields = {
            "a": a,
            "b": b,
            "d": d,
            "bias": memory.whole(given.bias, "bias") if p.has_bias else 0,
            "expert_offsets": memory.whole(given.offsets, "expert_offsets"),
            "a_slots": slots if p.gathers and p.operation != GRADIENT else 0,
            "b_slots": slots if p.gathers and p.operation == GRADIENT else 0,
            "tile_counter": memory.whole(counter, "tile_counter", output=True, initialised=True) if p.has_counter else 0,
        }
        if backward:
            fields["preactivation"] = memory.whole(given.z, "preactivation")
            fields["row_weights"] = memory.whole(given.row_weights, "row_weights")
            for name in ("weighted_activation", "row_dots"):
                fields[name] = memory.whole(results[name], name, output=True)
        elif p.keeps:
            fields["preactivation"] = memory.whole(results["preactivation"], "preactivation", output=True)
        params = GemmParams(
            **fields,
            a_stride=a_stride,
            b_stride=b_stride,
            b_expert_stride=b_stride * per_expert,
            d_stride=d_stride,
            experts=experts,
            slots=p.slots,
            tokens=p.slots // p.top_k,
            top_k=p.top_k,
            n=p.n,
            k=p.k,
            activation=ACTIVATIONS.index(p.activation),
            is_interleaved=int(p.interleaved),
        )
        symbol = unit.symbol(*filter(None, (p.weights,)))
        report = library.launch(symbol, (ctypes.addressof(params),), geometry(unit, p), settings)
    wrong: list[str] = []
    if report.failure is None:
        if p.operation == GRADIENT:
            results["d"] = results["d"].view(experts, p.n, p.k)
        for name, (value, bound) in reference(p, given).items():
            result = results[name]
            result = result if p.operation == GRADIENT else result[: p.rows] if name != "row_dots" else result[:, : p.rows]
            wrong += _differences(name, result, value, bound)
        if int(counter[0]) != 0:
            wrong.append(f"tile_counter is {int(counter[0])} after the launch; the next launch needs 0")
    return Outcome(p, report, tuple(wrong), results)


def geometry(unit: Unit, p: Problem) -> Geometry:
    """Grid, threads, shared memory and registers at launch, as the host chooses them: a bound for the number of tiles."""
    row = unit.row
    if p.operation == GRADIENT:
        tiles = len(p.counts) * math.ceil(p.n / row.block_m) * math.ceil(p.k / row.block_n)
    else:
        tiles = (math.ceil(p.slots / row.block_m) + min(len(p.counts), p.slots)) * math.ceil(p.n / row.block_n)
    grid = min(tiles, EMULATED_MULTIPROCESSORS)
    return Geometry(grid, row.threads, row.smem_bytes(unit.dtype), launch_registers(unit))


def _differences(name: str, actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> list[str]:
    error = (actual.double() - expected).abs()
    wrong = ~((error <= bound) | (torch.isnan(actual) & torch.isnan(expected)))
    if not wrong.any():
        return []
    worst = (error - bound).nan_to_num(float("inf")).where(wrong, float("-inf"))
    index = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
    return [
        f"{name} is wrong at {int(wrong.sum())} of {wrong.numel()} places; worst at {list(index)}: "
        f"{float(actual[index]):.6g} instead of {float(expected[index]):.6g} (bound {float(bound[index]):.2e})"
    ]
