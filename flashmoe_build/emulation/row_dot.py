"""Runs one problem on an emulated kernel that computes row_dot alone, and compares with fp64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import torch

from flashmoe_build.emulation.attention import Outcome, Strides, launch_registers, load, mapped, place
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import DTYPES, Layout, Problem, Shape, Values, worst_place
from flashmoe_tools.descriptors import Header
from flashmoe_tools.tables import Unit

RowDotParams = structure(Header("RowDotParams", "attention/params/row_dot.h"), (CSRC,))


def problems(unit: Unit) -> Iterator[Problem]:
    """Rows for less than a block and for several, head dims of no whole quad, every layout; with and without a gradient of lse."""
    sizes = ((1, 8, Layout.ROWS), (33, 40, Layout.BSHD), (70, 256, Layout.BHSD), (3, 128, Layout.FAR))
    widest = unit.row.axes.get("head_dim", 256)
    for index, (rows, head_dim, layout) in enumerate(sizes):
        shape = Shape(2, 3, 1, rows, 1, min(widest, head_dim))
        yield Problem(shape, unit.dtype, False, layout, Values.NORMAL, index, wants_lse=index != 1)


def run(unit: Unit, problem: Problem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares. Some rows see no key; ``wants_lse`` says whether there is
    a gradient of lse."""
    library = load(kernel_library(unit, options))
    shape = problem.shape
    sizes = (shape.batch, shape.heads_q, shape.seq_q)
    generator = torch.Generator().manual_seed(problem.data_seed + 9)
    out, dout = (torch.randn(*sizes, shape.head_dim, generator=generator).to(DTYPES[problem.dtype]) for _ in range(2))
    lse, dlse = torch.randn(*sizes, generator=generator), torch.randn(*sizes, generator=generator)
    lse[:, 1, -1] = -math.inf
    row_dot = torch.full(sizes, math.nan)
    with mapped(library):

        def add(tensor: torch.Tensor, name: str, *, writable: bool = False) -> int:
            size = tensor.numel() * 4
            return library.add_buffer(tensor.data_ptr(), size, writable=writable, initialised=not writable, name=name)

        placed = {
            name: place(library, tensor, problem.layout, name, output=False)
            for name, tensor in (("out", out), ("dout", dout))
        }
        params = RowDotParams(
            **{name: item.address for name, item in placed.items()},
            **{f"{name}_stride": Strides(*item.strides) for name, item in placed.items()},
            lse=add(lse, "lse"),
            dlse=add(dlse, "dlse") if problem.wants_lse else 0,
            row_dot=add(row_dot, "row_dot", writable=True),
            batch=shape.batch,
            heads=shape.heads_q,
            rows=shape.seq_q,
            head_dim=shape.head_dim,
        )
        grid = math.ceil(math.prod(sizes) * 4 / unit.row.threads)
        geometry = Geometry(grid, unit.row.threads, unit.row.smem_bytes(unit.dtype), launch_registers(unit))
        report = library.launch(unit.entries[0].symbol, (ctypes.addressof(params),), geometry, settings)
    products = out.double() * dout.double()
    expected = products.sum(-1) - (dlse.double() if problem.wants_lse else 0.0)
    expected = expected.masked_fill(lse == -math.inf, 0.0)
    bound = 1e-5 * products.abs().sum(-1) + 1e-6
    wrong = [] if report.failure else worst_place("row_dot", row_dot, expected, bound)
    return Outcome(problem, unit.entries[0].symbol, report, tuple(wrong), row_dot, lse)
