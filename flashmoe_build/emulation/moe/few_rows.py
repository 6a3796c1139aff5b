"""Grouped products for few rows an expert on the emulated machine: small problems, and their results against fp64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from flashmoe_build.emulation.attention import EMULATED_MULTIPROCESSORS, launch_registers, load, mapped
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, KernelLibrary, LaunchReport, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import DTYPES, UNIT_ROUNDOFF, worst_place
from flashmoe_tools.descriptors import Header
from flashmoe_tools.tables import Unit

GemmParams = structure(Header("GemmParams", "moe/params/gemm.h"), (CSRC,))
GATED = "grouped_gemm_gated_few_rows"
OPERATIONS = (GATED, "grouped_gemm_few_rows")
ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")  # in the order of enum class Activation
ELEMENT = 2  # bytes
PADDING = 8  # elements between rows, of no buffer: a chunk past the end of a row is out of bounds
FAR = 2**28 + 8  # the ninth row is past 2^31 elements
EARLY_SLOTS = 32  # up to which the host gives a gated product the choices themselves


@dataclass(frozen=True)
class Problem:
    """One product. ``n`` and ``k`` as in GemmParams."""

    operation: str
    weights: str  # the axis's word
    dtype: str
    counts: tuple[int, ...]  # rows of each expert
    n: int
    k: int
    unrouted: int = 0  # slots without an expert
    top_k: int = 1
    gathers: bool = True  # a by slots; False: by rows
    activation: str = "swiglu"
    interleaved: bool = False
    has_bias: bool = False
    keeps: bool = False  # z is wanted
    has_nan: bool = False
    is_far: bool = False
    has_counter: bool = True
    scale: float = 1.0  # of z, about
    seed: int = 0
    causal: bool = False  # these two are attention's
    huge: bool = False

    @property
    def is_gated(self) -> bool:
        return self.operation == GATED

    @property
    def rows(self) -> int:
        return sum(self.counts)

    @property
    def slots(self) -> int:
        return math.ceil((self.rows + self.unrouted) / self.top_k) * self.top_k

    @property
    def identity(self) -> str:
        flags = ("gathers", "interleaved", "has_bias", "keeps", "has_nan", "is_far", "has_counter")
        told = "".join(f"-{name.removeprefix('has_').removeprefix('is_')}" for name in flags if getattr(self, name))
        return f"{self.weights}-e{len(self.counts)}.r{self.rows}.n{self.n}.k{self.k}-{self.activation}{told}"


@dataclass(frozen=True)
class Outcome:
    """What came of one emulated run. ``out`` is d, ``lse`` z (NaN where it was not wanted)."""

    problem: Problem
    symbol: str
    report: LaunchReport
    wrong: tuple[str, ...]
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def passed(self) -> bool:
        return self.report.failure is None and not self.wrong

    def explain(self) -> str:
        failure = [] if self.report.failure is None else [str(self.report.failure)]
        return "\n".join([*failure, *self.wrong])


@dataclass(frozen=True)
class Inputs:
    """What the kernel is given; ``b`` is [experts, n, k] whatever the layout."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor  # [experts, n]
    offsets: torch.Tensor
    row_slots: torch.Tensor
    ids: torch.Tensor  # [slots]; one that is no expert's: no row


def problems(unit: Unit) -> Iterator[Problem]:
    """Edges of the kernel's tile, ring and list of tiles; empty experts, a hot one, every layout."""
    row = unit.row
    m, n, ring = row.block_m, row.block_n, row.stages * row.options["block_k"]
    gated = row.operation == GATED
    edge = 16 if gated else 8  # half a fragment, where that may be
    for index, weights in enumerate(row.words["weights"]):
        in_turn = weights == "kn_pairs" or (gated and weights == "nk")

        def case(counts: tuple[int, ...], columns: int, k: int, **more: object) -> Problem:
            chosen = {"interleaved": weights == "kn_pairs", "gathers": gated, "seed": index, **more}  # noqa: B023
            return Problem(row.operation, weights, unit.dtype, counts, columns, k, **chosen)  # type: ignore[arg-type]  # noqa: B023

        # Tails of all three sizes, an expert without rows, slots without an expert.
        yield case(
            (m + 1, 0, 3, m), n + edge, 200, unrouted=3, top_k=2, has_bias=True, keeps=gated, interleaved=in_turn
        )
        yield case((5, 1), 2 * edge + 16, 40, gathers=not gated, activation="clamped_swiglu", has_bias=True, scale=4.0)
        if unit.dtype == "f16":  # the same but for the products and the rounding
            continue
        # A hot expert, the ring more than once round, the static schedule. In these three: every number of groups of rows.
        yield case((0, 4 * m - 3, 1), edge, ring + 72, activation="geglu", keeps=gated, has_counter=False)
        yield case((7, m // 2 + 5, 4), n - 16, 72, top_k=5, activation="geglu_tanh", has_nan=True)
        yield case((6, 0, m // 4 + 5), n, 64, is_far=True, keeps=gated)
        if index == 0:
            # More experts than threads, most of them empty.
            counts = ((0,) * 5 + (1, 0, 2)) * 10 + (0,) * 620
            yield case(counts, 32, 32, top_k=4, activation="reglu", interleaved=in_turn)
            yield case((0, 0), 16, 8, unrouted=6, top_k=2)


def make_inputs(p: Problem) -> Inputs:
    """Fresh random inputs, the same for the same problem."""
    generator = torch.Generator().manual_seed(p.seed * 7919 + p.n + p.k)
    dtype = DTYPES[p.dtype]

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    of_slot = torch.full((p.slots,), len(p.counts))
    of_slot[: p.rows] = torch.repeat_interleave(torch.arange(len(p.counts)), torch.tensor(p.counts))
    of_slot = of_slot[torch.randperm(p.slots, generator=generator)]
    row_slots = torch.sort(of_slot, stable=True).indices.to(torch.int32)
    row_slots[p.rows :] = -1
    a = normal(p.slots // p.top_k if p.gathers else p.slots, p.k)
    b = normal(len(p.counts), p.n, p.k, scale=p.scale / math.sqrt(p.k))
    if p.has_nan:  # in the first expert's last row, and in the weights of the last: neighbours must not see them
        last = p.counts[0] - 1
        a[int(row_slots[last]) // p.top_k if p.gathers else last, p.k // 2] = float("nan")
        b[-1, 5, p.k - 1] = float("nan")
    offsets = torch.cumsum(torch.tensor((0, *p.counts)), 0).to(torch.int32)
    ids = torch.where(of_slot < len(p.counts), of_slot, -1) if p.seed % 2 else of_slot.int()
    return Inputs(a, b, normal(len(p.counts), p.n), offsets, row_slots, ids)


def activate(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The activation by torch's own functions."""
    functional = torch.nn.functional
    if name == "clamped_swiglu":
        low = gate.clamp(max=7)
        return low * torch.sigmoid(1.702 * low) * (up.clamp(-7, 7) + 1)
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "swiglu": functional.silu,
        "geglu": functional.gelu,
        "geglu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "reglu": functional.relu,
    }
    return forms[name](gate) * up


def halves(z: torch.Tensor, *, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up."""
    half = z.shape[-1] // 2
    return (z[:, 0::2], z[:, 1::2]) if interleaved else (z[:, :half], z[:, half:])


def reference(p: Problem, given: Inputs) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each result (value, bound of its error) in fp64, the rows that are written. Bounds: 1e-5 of the sum of magnitudes for
    fp32 accumulation and the approximate exponential, and the result's rounding."""
    unit = UNIT_ROUNDOFF[p.dtype]
    slots = given.row_slots[: p.rows].long()
    a = given.a.double()[slots // p.top_k if p.gathers else torch.arange(p.rows)]
    experts = torch.repeat_interleave(torch.arange(len(p.counts)), torch.tensor(p.counts))
    z, error = torch.empty(p.rows, p.n).double(), torch.empty(p.rows, p.n).double()
    for expert in set(experts.tolist()):
        own, b = experts == expert, given.b[expert].double()
        z[own] = a[own] @ b.mT
        error[own] = 1e-5 * (a[own].abs() @ b.abs().mT) + 1e-6
    if p.has_bias:
        z = z + given.bias.double()[experts]
    whole = (z, unit * z.abs() + error)
    if not p.is_gated:
        return {"d": whole}
    gate, up = halves(z, interleaved=p.interleaved)
    gate_error, up_error = halves(error, interleaved=p.interleaved)
    value = activate(p.activation, gate, up)
    spread = 1.7 * (1 + up.abs()) * gate_error + 1.2 * gate.abs() * up_error + 1e-5 * gate.abs() * (1 + up.abs())
    expected = {"d": (value, unit * value.abs() + spread + 1e-6)}
    return {**expected, "z": whole} if p.keeps else expected


def _place(
    library: KernelLibrary,
    p: Problem,
    tensor: torch.Tensor,
    name: str,
    keep: Callable[[int], bool],
    *,
    output: bool = False,
) -> tuple[int, int]:
    """Address and stride of a [rows, columns] tensor whose rows are buffers of their own; those that ``keep`` refuses are not
    there."""
    count, columns = tensor.shape
    stride = FAR if p.is_far else columns + PADDING
    base = library.reserve(max(1, count) * stride * ELEMENT)
    for row in filter(keep, range(count)):
        at, memory = base + row * stride * ELEMENT, tensor.data_ptr() + row * columns * ELEMENT
        library.map_buffer(
            at, memory, columns * ELEMENT, writable=output, initialised=not output, name=f"{name} row {row}"
        )
        if name == "a" and not p.is_gated:
            library.expect_from_grid_in_front(at)
    return base, stride


def _params(
    library: KernelLibrary, p: Problem, given: Inputs, weights: torch.Tensor, results: dict[str, torch.Tensor]
) -> ctypes.Structure:
    """Maps everything and fills the kernel's parameters. In front of a gated product stands the sort, of a plain one the product
    that writes a."""

    def whole(tensor: torch.Tensor, name: str, *, output: bool = False) -> int:
        size = tensor.numel() * tensor.element_size()
        initialised = not output or name == "tile_counter"
        at = library.add_buffer(tensor.data_ptr(), size, writable=output, initialised=initialised, name=name)
        return library.expect_from_grid_in_front(at) if p.is_gated and name in ("expert_offsets", "row_slots") else at

    a, a_stride = _place(library, p, given.a, "a", lambda _: True)
    per_expert = weights.shape[1]
    b, b_stride = _place(library, p, weights.flatten(0, 1), "b", lambda row: p.counts[row // per_expert] > 0)
    d, d_stride = _place(library, p, results["d"], "d", lambda row: row < p.rows, output=True)
    return GemmParams(
        a=a,
        b=b,
        d=d,
        bias=whole(given.bias, "bias") if p.has_bias else 0,
        preactivation=whole(results["z"], "preactivation", output=True) if p.keeps else 0,
        expert_offsets=whole(given.offsets, "expert_offsets"),
        a_slots=whole(given.row_slots, "row_slots") if p.gathers else 0,
        ids=whole(given.ids, "ids") if p.is_gated and p.slots <= EARLY_SLOTS else 0,
        id_bytes=given.ids.element_size(),
        tile_counter=whole(results["counter"], "tile_counter", output=True) if p.has_counter else 0,
        a_stride=a_stride,
        b_stride=b_stride,
        b_expert_stride=b_stride * per_expert,
        d_stride=d_stride,
        experts=len(p.counts),
        slots=p.slots,
        tokens=p.slots // p.top_k,
        top_k=p.top_k,
        n=p.n,
        k=p.k,
        activation=ACTIVATIONS.index(p.activation),
        is_interleaved=int(p.interleaved),
    )


def geometry(unit: Unit, p: Problem) -> Geometry:
    """Grid, threads, shared memory and registers at launch: the grid from the host's bound for the number of tiles."""
    row = unit.row
    row_tiles = math.ceil(p.slots / row.block_m) + min(len(p.counts), p.slots)
    grid = min(row_tiles * math.ceil(p.n / row.block_n), EMULATED_MULTIPROCESSORS)
    return Geometry(grid, row.threads, row.smem_bytes(unit.dtype), launch_registers(unit))


def run(unit: Unit, p: Problem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares with fp64."""
    library = load(kernel_library(unit, options))
    symbol = unit.symbol(p.weights)
    given = make_inputs(p)
    dtype = DTYPES[p.dtype]
    results = {
        "d": torch.full((p.slots, p.n // 2 if p.is_gated else p.n), float("nan"), dtype=dtype),
        "z": torch.full((p.slots, p.n), float("nan"), dtype=dtype),
        "counter": torch.zeros(1, dtype=torch.int32),
    }
    weights = given.b if p.weights == "nk" else given.b.mT.contiguous()
    with mapped(library):
        params = _params(library, p, given, weights, results)
        report = library.launch(symbol, (ctypes.addressof(params),), geometry(unit, p), settings)
    wrong: list[str] = []
    if report.failure is None:
        for name, (value, bound) in reference(p, given).items():
            wrong += worst_place(name, results[name][None, None, : p.rows], value[None, None], bound[None, None])
        if int(results["counter"][0]) != 0:
            wrong.append(f"tile_counter is {int(results['counter'][0])} after the launch; the next launch needs 0")
    return Outcome(p, symbol, report, tuple(wrong), results["d"], results["z"])
