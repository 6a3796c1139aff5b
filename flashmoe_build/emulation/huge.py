"""Problems whose offsets pass 2^31: contiguous tensors of terabytes, as address space only. The last block of the launch
runs, and what it may touch is mapped; an offset that was cut to 32 bits leads elsewhere and is out of bounds."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace

import torch

from flashmoe_build.emulation.attention import (
    ForwardParams,
    Outcome,
    Strides,
    launch_registers,
    load,
    mapped,
    tensor_map_arguments,
)
from flashmoe_build.emulation.build import Options, kernel_library
from flashmoe_build.emulation.combine import expected, make_partials
from flashmoe_build.emulation.machine import Geometry, KernelLibrary, Settings
from flashmoe_build.emulation.problem import (
    DTYPES,
    Inputs,
    Problem,
    Shape,
    Values,
    disagreements,
    make_inputs,
    reference,
)
from flashmoe_tools.tables import Unit

NAN = float("nan")
COMBINED_ROWS = 4  # of a block of the combine kernel


def huge_problem(unit: Unit, causal: bool) -> Problem:
    """2^26 heads of 40 rows: 2.7e9 rows of queries, more than an int32 counts. One tile a head; with splits, the second
    of two has the keys from block_n on."""
    keys = unit.row.block_n + 40
    shape = Shape(2**13, 2**13, 2**12, 40, keys, unit.row.axes["head_dim"])
    is_split = bool(unit.row.options.get("split")) or unit.row.operation == "attention_combine"
    return Problem(shape, unit.dtype, causal, values=Values.NORMAL, data_seed=9, splits=2 if is_split else 1, huge=True)


@dataclass(frozen=True)
class _Space:
    """Address space of a contiguous array, and the ends of it that exist."""

    library: KernelLibrary
    base: int
    size: int  # bytes of an element

    def map(self, tensor: torch.Tensor, end: int, name: str, *, output: bool) -> None:
        """``tensor`` holds the elements before element ``end``."""
        address = self.base + (end - tensor.numel()) * self.size
        bytes_ = tensor.numel() * self.size
        self.library.map_buffer(
            address, tensor.data_ptr(), bytes_, writable=output, initialised=not output, name=f"the last rows of {name}"
        )


def _space(library: KernelLibrary, elements: int, size: int) -> _Space:
    return _Space(library, library.reserve(elements * size), size)


def _place_last(library: KernelLibrary, tensor: torch.Tensor, elements: int, name: str, *, output: bool = False) -> int:
    """Maps ``tensor`` as the end of an array of that many elements; the array's address."""
    space = _space(library, elements, tensor.element_size())
    space.map(tensor, elements, name, output=output)
    return space.base


def _params(problem: Problem, **pointers: int) -> ctypes.Structure:
    s = problem.shape

    def strides(heads: int, rows: int) -> ctypes.Structure:
        return Strides(heads * rows * s.head_dim, rows * s.head_dim, s.head_dim)

    query, key = strides(s.heads_q, s.seq_q), strides(s.heads_kv, s.seq_k)
    return ForwardParams(
        **pointers,
        **{f"{name}_stride": query if name in ("q", "out") else key for name in ("q", "k", "v", "out")},
        **{name: getattr(s, name) for name in ("batch", "heads_q", "heads_kv", "seq_q", "seq_k", "head_dim")},
        num_splits=problem.splits,
        scale=problem.scale,
        scale_log2=problem.scale_log2,
    )


def _one_head(problem: Problem, first_key: int) -> tuple[Inputs, Problem, Inputs]:
    """The inputs of the last head; the problem that its last block solves, and that one's inputs."""
    whole = replace(problem, shape=replace(problem.shape, batch=1, heads_q=1, heads_kv=1), splits=1)
    inputs = make_inputs(whole)
    part = replace(whole, shape=replace(whole.shape, seq_k=whole.shape.seq_k - first_key))
    return inputs, part, Inputs(inputs.q, inputs.k[:, :, first_key:], inputs.v[:, :, first_key:])


def run_forward(unit: Unit, problem: Problem, settings: Settings, options: Options) -> Outcome:
    """The last head of the last batch, and of its splits the last."""
    library = load(kernel_library(unit, options))
    s, row = problem.shape, unit.row
    symbol = unit.symbol("causal" if problem.causal else "full")
    inputs, part, part_inputs = _one_head(problem, row.block_n if problem.splits > 1 else 0)
    rows, keys = s.batch * s.heads_q * s.seq_q, s.batch * s.heads_kv * s.seq_k
    is_split = problem.splits > 1
    out = torch.full(inputs.q.shape, NAN, dtype=torch.float32 if is_split else DTYPES[problem.dtype])
    lse = torch.full(inputs.q.shape[:3], NAN)
    with mapped(library):
        copies = rows * (problem.splits if is_split else 1)
        lse_place = _place_last(library, lse, copies, "lse", output=True)
        out_place = _place_last(library, out, copies * s.head_dim, "out", output=True)
        params = _params(
            problem,
            q=_place_last(library, inputs.q, rows * s.head_dim, "q"),
            k=_place_last(library, inputs.k, keys * s.head_dim, "k"),
            v=_place_last(library, inputs.v, keys * s.head_dim, "v"),
            # A split kernel writes partial results alone; TMA wants an address for the output all the same.
            out=library.reserve(rows * s.head_dim * 2) if is_split else out_place,
            out_partial=out_place if is_split else 0,
            lse=0 if is_split else lse_place,
            lse_partial=lse_place if is_split else 0,
        )
        arguments, keep = tensor_map_arguments(unit, library, params)
        blocks = s.batch * s.heads_q * problem.splits
        launch = Geometry(blocks, row.threads, row.smem_bytes(unit.dtype), launch_registers(unit), blocks - 1)
        report = library.launch(symbol, (ctypes.addressof(params), *arguments), launch, settings)
        del keep
    wrong = [] if report.failure else disagreements(part, reference(part, part_inputs), out, lse)
    return Outcome(problem, symbol, report, tuple(wrong), out, lse)


def run_combine(unit: Unit, problem: Problem, settings: Settings, options: Options) -> Outcome:
    """The last rows of the last head."""
    library = load(kernel_library(unit, options))
    s, symbol = problem.shape, unit.entries[0][1]
    rows = s.batch * s.heads_q * s.seq_q
    part = replace(problem, shape=Shape(1, 1, 1, COMBINED_ROWS, s.seq_k, s.head_dim))
    partial, lse_partial = make_partials(part)
    out = torch.full(partial.shape[1:], NAN, dtype=DTYPES[problem.dtype])
    lse = torch.full(lse_partial.shape[1:], NAN)
    with mapped(library):
        out_space = _space(library, problem.splits * rows * s.head_dim, 4)
        lse_space = _space(library, problem.splits * rows, 4)
        for split in range(problem.splits):
            out_space.map(partial[split], (split + 1) * rows * s.head_dim, f"out_partial {split}", output=False)
            lse_space.map(lse_partial[split], (split + 1) * rows, f"lse_partial {split}", output=False)
        params = _params(
            problem,
            out=_place_last(library, out, rows * s.head_dim, "out", output=True),
            lse=_place_last(library, lse, rows, "lse", output=True),
            out_partial=out_space.base,
            lse_partial=lse_space.base,
        )
        blocks = math.ceil(rows / unit.row.block_m)
        launch = Geometry(blocks, unit.row.threads, unit.row.smem_bytes(unit.dtype), 255, blocks - 1)
        report = library.launch(symbol, (ctypes.addressof(params),), launch, settings)
    wrong = [] if report.failure else disagreements(part, expected(part, partial, lse_partial), out, lse)
    return Outcome(problem, symbol, report, tuple(wrong), out, lse)
