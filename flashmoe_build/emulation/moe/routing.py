"""The kernels around the grouped products on the emulated machine: which problems each is run on, and how."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from flashmoe_build.emulation.attention import Outcome, launch_registers, load, mapped
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, KernelLibrary, LaunchReport, Settings
from flashmoe_build.emulation.moe import routing_reference as reference
from flashmoe_build.emulation.moe.routing_problems import (
    SCALARS,
    SCORINGS,
    BiasGradientProblem,
    CombineProblem,
    GatherProblem,
    RouteProblem,
    SortProblem,
    bias_gradient_problems,
    combine_problems,
    gather_problems,
    route_problems,
    sort_problems,
)
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import DTYPES, UNIT_ROUNDOFF, NamedProblem, worst_place
from flashmoe_tools.descriptors import Header
from flashmoe_tools.tables import Unit

HEADER = "moe/params/routing.h"
PARAMS = {
    name: structure(Header(name, HEADER), (CSRC,))
    for name in ("RouteParams", "SortParams", "CombineParams", "BiasGradientParams", "GatherParams")
}
NAN = float("nan")


@dataclass(frozen=True)
class Memory:
    """Maps tensors for the kernel. Whatever a kernel reads may come from the grid in front of it."""

    library: KernelLibrary
    kept: list[torch.Tensor] = field(default_factory=list)  # until the launch is over

    def given(self, tensor: torch.Tensor | None, name: str, *, end: int | None = None) -> int:
        return 0 if tensor is None else self._add(tensor, name, end, writable=False)

    def written(self, tensor: torch.Tensor | None, name: str, *, end: int | None = None) -> int:
        return 0 if tensor is None else self._add(tensor, name, end, writable=True)

    def rewritten(self, tensor: torch.Tensor, name: str) -> int:
        """Read and written, with what the grid in front has written."""
        self.kept.append(tensor)
        address = self.counted(tensor, name)
        return self.library.expect_from_grid_in_front(address)

    def counted(self, tensor: torch.Tensor, name: str) -> int:
        """Written, and with a value from the start."""
        return self.library.add_buffer(tensor.data_ptr(), _bytes(tensor), writable=True, initialised=True, name=name)

    def _add(self, tensor: torch.Tensor, name: str, end: int | None, *, writable: bool) -> int:
        """`end`: the tensor is the last part of an array of so many elements, the rest of which is address space alone."""
        self.kept.append(tensor)
        options = {"writable": writable, "initialised": not writable, "name": name}
        if end is None:
            address = self.library.add_buffer(tensor.data_ptr(), _bytes(tensor), **options)  # type: ignore[arg-type]
            return address if writable else self.library.expect_from_grid_in_front(address)
        base = self.library.reserve(end * tensor.element_size())
        first = base + (end - tensor.numel()) * tensor.element_size()
        self.library.map_buffer(first, tensor.data_ptr(), _bytes(tensor), **options)  # type: ignore[arg-type]
        if not writable:
            self.library.expect_from_grid_in_front(first)
        return base


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Launch:
    """An emulated kernel that can be started."""

    unit: Unit
    library: KernelLibrary
    settings: Settings

    def __call__(self, params: ctypes.Structure, grid: int, *words: str, only_block: int | None = None) -> LaunchReport:
        row = self.unit.row
        geometry = Geometry(grid, row.threads, row.smem_bytes(self.unit.dtype), launch_registers(self.unit), only_block)
        return self.library.launch(self.unit.symbol(*words), (ctypes.addressof(params),), geometry, self.settings)


def _outcome(
    launch: Launch, problem: NamedProblem, report: LaunchReport, wrong: list[str], *results: torch.Tensor
) -> Outcome:
    out, other = (*results, results[0])[:2]
    return Outcome(problem, launch.unit.name, report, () if report.failure else tuple(wrong), out, other)


def run_route(launch: Launch, problem: RouteProblem) -> Outcome:
    logits, bias = problem.logits(), problem.bias()
    end = problem.huge_tokens
    rows = logits.shape[0]
    weights = torch.full((rows, problem.top_k), NAN)
    ids = torch.full((rows, problem.top_k), -7, dtype=torch.int32)
    counts = torch.zeros(problem.experts, dtype=torch.int32)
    tokens = end or rows
    with mapped(launch.library):
        memory = Memory(launch.library)
        params = PARAMS["RouteParams"](
            logits=memory.given(logits, "logits", end=end and end * logits.shape[1]),
            bias=memory.given(bias, "bias"),
            weights=memory.written(weights, "weights", end=end and end * problem.top_k),
            ids=memory.written(ids, "ids", end=end and end * problem.top_k),
            counts=memory.counted(counts, "counts"),
            logits_stride=logits.shape[1],
            logits_dtype=SCALARS[logits.dtype],
            scoring=SCORINGS.index(problem.scoring),
            tokens=tokens,
            experts=problem.experts,
            top_k=problem.top_k,
            groups=problem.groups,
            topk_groups=problem.topk_groups,
            renormalize=problem.renormalize,
            scale=problem.scale,
        )
        blocks = math.ceil(tokens / launch.unit.row.warps)
        grid = blocks if end else min(blocks, 3)
        report = launch(params, grid, only_block=blocks - 1 if end else None)
    wrong = reference.route_disagreements(problem, logits, bias, weights, ids, counts)
    return _outcome(launch, problem, report, wrong, weights, ids.float())


def run_sort(launch: Launch, problem: SortProblem) -> Outcome:
    inputs = problem.inputs()
    slots, experts = inputs.ids.numel(), problem.experts

    def blank(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((size,), -77, dtype=dtype)

    results = reference.Sorted(blank(experts + 1), blank(slots), blank(slots), blank(slots, torch.float32))
    block_counts = blank(problem.blocks * experts)
    with mapped(launch.library):
        memory = Memory(launch.library)
        params = PARAMS["SortParams"](
            ids=memory.given(inputs.ids, "ids"),
            topk_weights=memory.given(inputs.weights, "topk_weights"),
            expert_map=memory.given(inputs.expert_map, "expert_map"),
            expert_offsets=memory.written(results.expert_offsets, "expert_offsets"),
            row_slots=memory.written(results.row_slots, "row_slots") if slots else 0,
            slot_rows=memory.written(results.slot_rows, "slot_rows") if slots else 0,
            row_weights=memory.written(results.row_weights, "row_weights") if slots else 0,
            ids_dtype=SCALARS[inputs.ids.dtype],
            weights_dtype=SCALARS[inputs.weights.dtype],
            slots=slots,
            experts=experts,
            ids_end=experts if inputs.expert_map is None else inputs.expert_map.numel(),
        )
        if problem.blocks == 1:
            report = launch(params, 1, "one")
        else:
            params.block_counts = memory.written(block_counts, "block_counts")
            report = launch(params, problem.blocks, "count")
            if report.failure is None:
                params.block_counts = memory.given(block_counts, "block_counts")
                params.slot_rows = memory.rewritten(results.slot_rows, "ranks")
                report = launch(params, problem.blocks, "place")
    wrong = reference.sort_disagreements(problem, inputs, results)
    return _outcome(launch, problem, report, wrong, results.row_weights, results.row_slots.float())


def run_combine(launch: Launch, problem: CombineProblem) -> Outcome:
    inputs = problem.inputs(DTYPES[launch.unit.dtype])
    is_backward = launch.unit.row.operation == "moe_combine_backward"
    tokens, columns, top_k = problem.tokens, problem.columns, problem.top_k
    slots = tokens * top_k
    all_tokens = problem.huge_tokens or tokens
    end = problem.huge_tokens and problem.huge_tokens * columns
    end_slots = problem.huge_tokens and problem.huge_tokens * top_k
    first = all_tokens * top_k - slots  # rows are the last ones, too
    stride = columns if end else columns + 8
    out = torch.full((tokens, stride), NAN, dtype=DTYPES[launch.unit.dtype])
    dweights = torch.full((slots,), NAN)
    rows = inputs.slot_rows + first * (inputs.slot_rows >= 0)
    with mapped(launch.library):
        memory = Memory(launch.library)
        params = PARAMS["CombineParams"](
            rows=memory.given(inputs.rows, "rows", end=end_slots and end_slots * columns),
            slot_rows=memory.given(rows.int(), "slot_rows", end=end_slots),
            out=memory.written(out, "out", end=end) if problem.wants_out else 0,
            out_stride=stride,
            tokens=all_tokens,
            top_k=top_k,
            columns=columns,
            experts=problem.experts,
        )
        if is_backward:
            params.row_dots = _map_dots(memory, inputs.row_dots, all_tokens * top_k)
            params.dot_tiles = inputs.row_dots.shape[0]
            params.dweights = memory.written(dweights, "dweights", end=end_slots) if problem.wants_dweights else 0
            if inputs.bias is not None:
                params.bias = memory.given(inputs.bias, "bias")
                params.dout = memory.given(inputs.dout, "dout", end=end)
                params.dout_stride = columns
                offsets = inputs.expert_offsets + first * (inputs.expert_offsets > 0)
                params.expert_offsets = memory.given(offsets.int(), "expert_offsets")
        else:
            params.row_weights = memory.given(inputs.row_weights, "row_weights", end=end_slots)
            params.shared = memory.given(inputs.shared, "shared", end=end)
            params.shared_stride = columns
        report = launch(params, all_tokens * problem.blocks, only_block=all_tokens - 1 if end else None)
    if is_backward:
        wrong = reference.combine_backward_disagreements(problem, inputs, out[:, :columns], dweights)
    else:
        wrong = reference.combine_disagreements(problem, inputs, out[:, :columns])
    if not torch.isnan(out[:, columns:]).all():
        wrong.append("something was written past the columns of out")
    return _outcome(launch, problem, report, wrong, out[:, :columns], dweights)


def _map_dots(memory: Memory, row_dots: torch.Tensor, slots: int) -> int:
    """[tiles][slots], of which the last columns exist."""
    tiles, existing = row_dots.shape
    base = memory.library.reserve(tiles * slots * 4)
    for tile in range(tiles):
        address = base + ((tile + 1) * slots - existing) * 4
        memory.library.map_buffer(
            address, row_dots[tile].data_ptr(), existing * 4, writable=False, initialised=True, name=f"row_dots[{tile}]"
        )
        memory.library.expect_from_grid_in_front(address)
    return base


def run_bias_gradient(launch: Launch, problem: BiasGradientProblem) -> Outcome:
    dtype = DTYPES[launch.unit.dtype]
    inputs = problem.inputs(dtype)
    d = torch.full((problem.experts, problem.columns), NAN, dtype=dtype)
    with mapped(launch.library):
        memory = Memory(launch.library)
        params = PARAMS["BiasGradientParams"](
            a=memory.given(inputs.a, "a", end=problem.huge_rows and problem.huge_rows * inputs.a.shape[1]),
            d=memory.written(d, "d"),
            row_weights=memory.given(inputs.row_weights, "row_weights"),
            expert_offsets=memory.given(inputs.expert_offsets, "expert_offsets"),
            a_slots=memory.given(inputs.a_slots, "a_slots"),
            a_stride=inputs.a.shape[1],
            experts=problem.experts,
            top_k=problem.top_k,
            columns=problem.columns,
        )
        report = launch(params, problem.experts * math.ceil(problem.columns / 64))
    expected, bound = reference.bias_gradient(problem, inputs, UNIT_ROUNDOFF[launch.unit.dtype])
    return _outcome(launch, problem, report, worst_place("d", d, expected, bound), d)


def run_gather(launch: Launch, problem: GatherProblem) -> Outcome:
    inputs = problem.inputs(DTYPES[launch.unit.dtype])
    columns = problem.columns
    rows = torch.full((problem.tokens * problem.top_k, columns), 7.0, dtype=inputs.a.dtype)
    end = problem.first_row and (problem.first_row + rows.shape[0]) * columns
    with mapped(launch.library):
        memory = Memory(launch.library)
        params = PARAMS["GatherParams"](
            a=memory.given(inputs.a, "a"),
            rows=memory.written(rows, "rows", end=end or None),
            slot_rows=memory.given(inputs.slot_rows, "slot_rows"),
            a_stride=inputs.a.shape[1],
            tokens=problem.tokens,
            top_k=problem.top_k,
            columns=columns,
        )
        report = launch(params, math.ceil(problem.tokens / launch.unit.row.warps))
    wrong = []
    if not torch.equal(rows[: problem.count], inputs.a[inputs.sources, :columns]):
        wrong.append("rows are not those of a")
    if not (rows[problem.count :] == 7.0).all():
        wrong.append("rows past the last were written")
    return _outcome(launch, problem, report, wrong, rows)


@dataclass(frozen=True)
class _Operation:
    problems: Callable[[], Iterator[NamedProblem]]
    run: Callable[..., Outcome]


OPERATIONS: Mapping[str, _Operation] = {
    "moe_route": _Operation(route_problems, run_route),
    "moe_sort": _Operation(sort_problems, run_sort),
    "moe_combine": _Operation(lambda: combine_problems(is_backward=False), run_combine),
    "moe_combine_backward": _Operation(lambda: combine_problems(is_backward=True), run_combine),
    "moe_gather": _Operation(gather_problems, run_gather),
    "moe_bias_gradient": _Operation(bias_gradient_problems, run_bias_gradient),
}


def problems(unit: Unit) -> Iterator[NamedProblem]:
    """The suite of one kernel."""
    return OPERATIONS[unit.row.operation].problems()


def run(unit: Unit, problem: NamedProblem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares with the reference."""
    launch = Launch(unit, load(kernel_library(unit, options)), settings)
    return OPERATIONS[unit.row.operation].run(launch, problem)
