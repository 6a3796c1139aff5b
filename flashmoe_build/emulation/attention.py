"""Runs one attention problem on an emulated forward kernel and checks the result."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from flashmoe.errors import InternalError
from flashmoe_build.compile.codegen import map_parameters
from flashmoe_build.emulation.build import CSRC, MAP_BYTES, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, KernelLibrary, LaunchReport, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import Layout, NamedProblem, Problem, disagreements, make_inputs, reference
from flashmoe_tools.descriptors import Header
from flashmoe_tools.tables import Unit

ELEMENT = 2  # bytes
# Rows this many elements apart put the 32nd row past 2^31 elements.
FAR_ROW = 2**26 + 8
EMULATED_MULTIPROCESSORS = 3  # blocks of a persistent grid: few, so that each takes several tiles


HEADER = "attention/params/forward.h"
Strides = structure(Header("Strides", HEADER), (CSRC,))
ForwardParams = structure(Header("ForwardParams", HEADER), (CSRC,))


class TensorMapError(InternalError):
    """cuTensorMapEncodeTiled would refuse what the host describes."""


@dataclass(frozen=True)
class Placed:
    """A tensor as the kernel sees it: address and element strides of (batch, head, row)."""

    address: int
    strides: tuple[int, int, int]


@dataclass(frozen=True)
class Outcome:
    """What came of one emulated run. Of a split kernel, ``out`` and ``lse`` are merged in fp64 from the partial results."""

    problem: Problem | NamedProblem
    symbol: str
    report: LaunchReport
    wrong: tuple[str, ...]
    out: torch.Tensor
    lse: torch.Tensor
    out_partial: torch.Tensor | None = None
    lse_partial: torch.Tensor | None = None

    @property
    def passed(self) -> bool:
        return self.report.failure is None and not self.wrong

    def explain(self) -> str:
        """What failed, in words; empty when nothing did."""
        failure = [] if self.report.failure is None else [str(self.report.failure)]
        return "\n".join([*failure, *self.wrong])


load = lru_cache(maxsize=64)(KernelLibrary)


def place(library: KernelLibrary, tensor: torch.Tensor, layout: Layout, name: str, *, output: bool = False) -> Placed:
    """Maps a contiguous [batch, heads, rows, head_dim] tensor in the given layout. BSHD keeps the values of ``tensor`` in
    [batch, rows, heads, head_dim] order, so the caller passes it with that memory."""
    batch, heads, rows, dim = tensor.shape
    if layout in (Layout.BHSD, Layout.BSHD):
        stride = tensor.stride()
        address = library.add_buffer(
            tensor.data_ptr(), tensor.numel() * ELEMENT, writable=output, initialised=not output, name=name
        )
        return Placed(address, (stride[0], stride[1], stride[2]))
    row_stride = FAR_ROW if layout is Layout.FAR else (dim + 7) // 8 * 8 + 8
    strides = (heads * rows * row_stride, rows * row_stride, row_stride)
    base = library.reserve(batch * strides[0] * ELEMENT)
    for index in range(batch * heads * rows):
        library.map_buffer(
            base + index * row_stride * ELEMENT,
            tensor.data_ptr() + index * dim * ELEMENT,
            dim * ELEMENT,
            writable=output,
            initialised=not output,
            name=f"{name} row {index % rows} of head {index // rows % heads} of batch {index // rows // heads}",
        )
    return Placed(base, strides)


def arranged(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor in the memory order of the layout."""
    if layout is Layout.BSHD:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor.contiguous()


def launch_registers(unit: Unit) -> int:
    """Registers a thread that __launch_bounds__ leaves."""
    return min(255, 65536 // (unit.row.threads * unit.row.min_blocks) // 8 * 8)


def geometry(unit: Unit, problem: Problem) -> Geometry:
    """Grid, threads, shared memory and registers at launch, as csrc/host/launch.cpp would choose them."""
    row, shape = unit.row, problem.shape
    tiles = math.ceil(shape.seq_q / row.block_m) * shape.heads_q * shape.batch * problem.splits
    grid = min(tiles, EMULATED_MULTIPROCESSORS) if row.schedule == "persistent" else tiles
    return Geometry(grid, row.threads, row.smem_bytes(unit.dtype), launch_registers(unit))


@contextmanager
def mapped(library: KernelLibrary) -> Iterator[None]:
    try:
        yield
    finally:
        library.clear_buffers()


@dataclass(frozen=True)
class _Results:
    """Host memory that a forward kernel writes."""

    out: torch.Tensor
    lse: torch.Tensor
    out_partial: torch.Tensor
    lse_partial: torch.Tensor
    counter: torch.Tensor


def _results(problem: Problem, like: torch.Tensor) -> _Results:
    shape, splits = problem.shape, problem.splits
    rows = (shape.batch, shape.heads_q, shape.seq_q)
    nan = float("nan")
    return _Results(
        out=torch.full_like(like, nan),
        lse=torch.full(rows, nan),
        out_partial=torch.full((splits, *rows, shape.head_dim), nan),
        lse_partial=torch.full((splits, *rows), nan),
        counter=torch.zeros(1, dtype=torch.int32),
    )


def _params(
    library: KernelLibrary, problem: Problem, tensors: tuple[torch.Tensor, ...], results: _Results
) -> ctypes.Structure:
    """Maps everything and fills the kernel's parameters."""
    shape = problem.shape
    names = ("q", "k", "v", "out")
    placed = {
        name: place(library, tensor, problem.layout, name, output=name == "out")
        for name, tensor in zip(names, (*tensors, results.out), strict=True)
    }

    def add(tensor: torch.Tensor, name: str, *, initialised: bool = False) -> int:
        return library.add_buffer(
            tensor.data_ptr(), tensor.numel() * 4, writable=True, initialised=initialised, name=name
        )

    partial = (
        {name: add(getattr(results, name), name) for name in ("out_partial", "lse_partial")}
        if problem.splits > 1
        else {}
    )
    return ForwardParams(
        **{name: item.address for name, item in placed.items()},
        **{f"{name}_stride": Strides(*item.strides) for name, item in placed.items()},
        **partial,
        lse=add(results.lse, "lse") if problem.wants_lse else 0,
        tile_counter=add(results.counter, "tile_counter", initialised=True) if problem.has_counter else 0,
        batch=shape.batch,
        heads_q=shape.heads_q,
        heads_kv=shape.heads_kv,
        seq_q=shape.seq_q,
        seq_k=shape.seq_k,
        head_dim=shape.head_dim,
        num_splits=problem.splits,
        scale=problem.scale,
        scale_log2=problem.scale_log2,
    )


def merge(results: _Results) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole output and log-sum-exp out of those of the splits, in fp64."""
    lse = torch.logsumexp(results.lse_partial.double(), dim=0)
    weights = torch.exp(results.lse_partial.double() - lse.masked_fill(torch.isinf(lse), 0.0))
    return (weights[..., None] * results.out_partial.double()).sum(dim=0), lse


def run_forward(unit: Unit, problem: Problem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares with fp64."""
    library = load(kernel_library(unit, options))
    symbol = unit.symbol("causal" if problem.causal else "full")
    inputs = make_inputs(problem)
    tensors = tuple(arranged(t, problem.layout) for t in (inputs.q, inputs.k, inputs.v))
    results = _results(problem, tensors[0])
    with mapped(library):
        params = _params(library, problem, tensors, results)
        maps, keep = tensor_map_arguments(unit, library, params)
        report = library.launch(symbol, (ctypes.addressof(params), *maps), geometry(unit, problem), settings)
        del keep
    out, lse = merge(results) if problem.splits > 1 else (results.out, results.lse)
    wrong = [] if report.failure else disagreements(problem, reference(problem, inputs), out, lse)
    if not report.failure and int(results.counter[0]) != 0:
        wrong.append(f"tile_counter is {int(results.counter[0])} after the launch; the next launch needs 0")
    partials = (results.out_partial, results.lse_partial) if problem.splits > 1 else (None, None)
    return Outcome(problem, symbol, report, tuple(wrong), out, lse, *partials)


def tensor_map_arguments(
    unit: Unit, library: KernelLibrary, params: ctypes.Structure
) -> tuple[tuple[int, ...], object]:
    """Addresses of the kernel's tensor maps, and what keeps their memory."""
    count = len(map_parameters(unit.row.descriptor))
    if count == 0:
        return (), None
    memory = ctypes.create_string_buffer(count * MAP_BYTES + 64)
    base = (ctypes.addressof(memory) + 63) // 64 * 64
    encode = library.function("emulation_encode_maps")
    encode.restype = ctypes.c_char_p
    encode.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    problem = encode(ctypes.addressof(params), base)
    if problem is not None:
        msg = f"the host's tensor maps are refused: {problem.decode()}"
        raise TensorMapError(msg)
    return tuple(base + MAP_BYTES * index for index in range(count)), memory
