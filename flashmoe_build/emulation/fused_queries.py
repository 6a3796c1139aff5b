"""The emulated kernels before and after the fused backward kernel: row_dot with zero turns, and the sums of dq to dq."""

from __future__ import annotations

import ctypes
import math

import torch

from flashmoe.tools.operations import Header
from flashmoe.tools.tables import Unit
from flashmoe_build.emulation.attention import Outcome, Strides, launch_registers, load, mapped, place
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import DTYPES, UNIT_ROUNDOFF, Problem, worst_place

FusedQueryParams = structure(Header("FusedQueryParams", "attention/params/fused_backward.h"), (CSRC,))
PIECE_ROWS = 64


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


def run(unit: Unit, problem: Problem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares. ``wants_lse`` says whether there is a gradient of lse."""
    library = load(kernel_library(unit, options))
    shape, dtype = problem.shape, DTYPES[problem.dtype]
    sizes = (shape.batch, shape.heads_q, shape.seq_q)
    generator = torch.Generator().manual_seed(problem.data_seed + 9)
    out, dout = (torch.randn(*sizes, shape.head_dim, generator=generator).to(dtype) for _ in range(2))
    lse, dlse = torch.randn(*sizes, generator=generator), torch.randn(*sizes, generator=generator)
    lse[:, -1, -1] = -math.inf
    row_dot, dq = torch.full(sizes, math.nan), torch.full((*sizes, shape.head_dim), math.nan, dtype=dtype)
    memory, pieces, turns = make_sums(problem, unit.row.axes["head_dim"])
    prepares = unit.row.operation.endswith("prepare")
    if prepares:
        turns.fill_(-1)
    else:
        turns[:, :, -1] = 3  # the rows before it see no key
        pieces[:, :, -1] = torch.randn(pieces[:, :, -1].shape, generator=generator)
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
            row_dot=add(row_dot, "row_dot", writable=True),
            sums=add(memory, "sums of dq", writable=prepares),
            batch=shape.batch,
            heads=shape.heads_q,
            rows=shape.seq_q,
            head_dim=shape.head_dim,
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
        wrong += worst_place("row_dot", row_dot, expected, 1e-5 * products.abs().sum(-1) + 1e-6)
        if turns.any():
            wrong.append("the turns are not all zero")
    elif not report.failure:
        expected = problem.scale * rows_of_sums(problem, pieces, turns).double()
        wrong += worst_place("dq", dq, expected, UNIT_ROUNDOFF[problem.dtype] * expected.abs() + 1e-6)
    return Outcome(problem, unit.entries[0].symbol, report, tuple(wrong), dq if not prepares else row_dot, lse)
