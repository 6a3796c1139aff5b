"""The emulated kernels before and after the fused backward kernel: row_dot with zero turns, and the sums of dq to dq."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from flashmoe_build.emulation import row_dot
from flashmoe_build.emulation.attention import Outcome, Strides, launch_registers, load, mapped, place
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import DTYPES, UNIT_ROUNDOFF, Problem, worst_place
from flashmoe_tools.descriptors import Header
from flashmoe_tools.tables import Unit

FusedQueryParams = structure(Header("FusedQueryParams", "attention/params/fused_backward.h"), (CSRC,))
PIECE_ROWS = 64
TILE_KEYS = 128


def make_sums(problem: Problem, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For a fused kernel of ``width`` columns: the whole memory, its pieces (NaN), and a turn for each behind them (zeros)."""
    shape = problem.shape
    pieces = (shape.batch, shape.heads_q, math.ceil(shape.seq_q / PIECE_ROWS))
    memory = torch.full((math.prod(pieces) * (PIECE_ROWS * width + 1),), math.nan)
    sums, turns = memory.split([math.prod(pieces) * PIECE_ROWS * width, math.prod(pieces)])
    turns.zero_()
    return memory, sums.view(*pieces, width // 8, 4, 8, 4, 2, 2), turns.view(torch.int32).view(*pieces)


def rows_of_sums(problem: Problem, pieces: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """[batch, heads, rows, head_dim]: at [j, w, g, t, half, i] of a piece is row 16 w + 8 half + g, column 8 j + 2 t + i.

    Zeros where no tile has had a turn."""
    pieces = pieces.masked_fill((turns == 0).view(*turns.shape, *[1] * 6), 0.0)
    rows = pieces.permute(0, 1, 2, 4, 7, 5, 3, 6, 8).flatten(2, 5).flatten(3)
    return rows[:, :, : problem.shape.seq_q, : problem.shape.head_dim]


def problems(unit: Unit) -> Iterator[Problem]:
    """Those of row_dot; of several pieces, the first sees no key."""
    for problem in row_dot.problems(unit):
        causal = problem.shape.seq_q > PIECE_ROWS
        yield replace(problem, causal=causal, shape=replace(problem.shape, seq_k=1 if causal else TILE_KEYS + 2))


def tiles_of_pieces(problem: Problem) -> torch.Tensor:
    """For each piece of a head: how many key tiles its last row sees."""
    shape = problem.shape
    rows = torch.arange(PIECE_ROWS, shape.seq_q + PIECE_ROWS, PIECE_ROWS).clamp(max=shape.seq_q)
    keys = (rows + shape.seq_k - shape.seq_q).clamp(min=0) if problem.causal else torch.full_like(rows, shape.seq_k)
    return -(-keys // TILE_KEYS)


def run(unit: Unit, problem: Problem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares. ``wants_lse`` says whether there is a gradient of lse."""
    library = load(kernel_library(unit, options))
    shape, dtype = problem.shape, DTYPES[problem.dtype]
    sizes = (shape.batch, shape.heads_q, shape.seq_q)
    generator = torch.Generator().manual_seed(problem.data_seed + 9)
    out, dout = (torch.randn(*sizes, shape.head_dim, generator=generator).to(dtype) for _ in range(2))
    lse, dlse = torch.randn(*sizes, generator=generator), torch.randn(*sizes, generator=generator)
    lse[:, -1, -1] = -math.inf
    dots, dq = torch.full(sizes, math.nan), torch.full((*sizes, shape.head_dim), math.nan, dtype=dtype)
    memory, pieces, turns = make_sums(problem, unit.row.axes["head_dim"])
    prepares = unit.row.operation.endswith("prepare")
    if prepares:
        turns.fill_(-1)
    else:
        turns.copy_(tiles_of_pieces(problem).expand_as(turns))
        pieces[turns > 0] = torch.randn(pieces[turns > 0].shape, generator=generator)
    with mapped(library):

        def add(tensor: torch.Tensor, name: str, *, writable: bool = False) -> int:
            size = tensor.numel() * 4
            return library.add_buffer(tensor.data_ptr(), size, writable=writable, initialised=not writable, name=name)

        tensors = {"out": out, "dout": dout, "dq": dq}
        placed = {
            name: place(library, tensor, problem.layout, name, output=name == "dq") for name, tensor in tensors.items()
        }
        params = FusedQueryParams(
            **{name: item.address for name, item in placed.items()},
            **{f"{name}_stride": Strides(*item.strides) for name, item in placed.items()},
            lse=add(lse, "lse"),
            dlse=add(dlse, "dlse") if problem.wants_lse else 0,
            row_dot=add(dots, "row_dot", writable=True),
            sums=add(memory, "sums of dq", writable=prepares),
            batch=shape.batch,
            heads=shape.heads_q,
            rows=shape.seq_q,
            head_dim=shape.head_dim,
            keys=shape.seq_k,
            row_keys=shape.seq_k - shape.seq_q + 1 if problem.causal else shape.seq_k,
            scale=problem.scale,
        )
        grid = math.prod(pieces.shape[:3])
        geometry = Geometry(grid, unit.row.threads, unit.row.smem_bytes(unit.dtype), launch_registers(unit))
        report = library.launch(unit.entries[0].symbol, (ctypes.addressof(params),), geometry, settings)
    wrong: list[str] = []
    if not report.failure and prepares:
        products = out.double() * dout.double()
        expected = products.sum(-1) - (dlse.double() if problem.wants_lse else 0.0)
        expected = expected.masked_fill(lse == -math.inf, 0.0)
        wrong += worst_place("row_dot", dots, expected, 1e-5 * products.abs().sum(-1) + 1e-6)
        if turns.any():
            wrong.append("the turns are not all zero")
    elif not report.failure:
        expected = problem.scale * rows_of_sums(problem, pieces, turns).double()
        wrong += worst_place("dq", dq, expected, UNIT_ROUNDOFF[problem.dtype] * expected.abs() + 1e-6)
    return Outcome(problem, unit.entries[0].symbol, report, tuple(wrong), dq if not prepares else dots, lse)
