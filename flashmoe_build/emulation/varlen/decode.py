"""Runs one problem on an emulated decoding kernel, which puts its splits together itself, and checks the result."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from flashmoe_build.emulation.attention import Outcome, launch_registers, load, mapped
from flashmoe_build.emulation.build import Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, Settings
from flashmoe_build.emulation.varlen.problem import Keys, MaskTensor, Rows, VarlenProblem
from flashmoe_build.emulation.varlen.run import Results, disagreements, parameters
from flashmoe_build.emulation.varlen.tensors import Tensors, build
from flashmoe_tools.tables import Unit

BLOCKS = 19  # of the grid: shares end inside items, and items inside shares; more than are added up at once
# The f16 kernel of the smallest head dim meets every problem; the others, the same source with other sizes or conversions, some.
FEW = ("decode", "shared by all")
ONE = ("decode",)
SMALLEST = 64  # head dim
MANY = 40  # entries: more than a warp has lanes


def problems(unit: Unit) -> Iterator[VarlenProblem]:
    """Shares that begin and end inside items; every layout of rows and keys; band, scores; whole items."""
    n, dim = unit.row.block_n, unit.row.axes["head_dim"]
    keys = (5 * n + 7, 3, 0, n, 2 * n + 1)
    base = VarlenProblem("decode", unit.dtype, (1,) * 5, keys, 8, 2, dim, dim, Rows.DENSE, Keys.PAGED, 16)
    base = replace(base, is_folded=True, splits=32)
    one = replace(base, rows=(1,), heads_q=4, heads_kv=1)
    few = replace(base, name="ragged", rows=(3, 1, 0, 2), keys=(4 * n + 1, n + 2, 5, 1), heads_q=2, heads_kv=1)
    few = replace(few, rows_layout=Rows.RAGGED, keys_layout=Keys.RAGGED, page_size=0, is_folded=False)
    many = tuple(index % 5 for index in range(MANY))
    every = (
        base,
        # One item for all blocks, more splits than are added at once, and maxima among the last; then at most three splits of it.
        replace(one, name="shared by all", keys=(17 * n + 5,), data_seed=21),
        replace(one, name="three splits", keys=(9 * n + 5,), splits=3, has_counter=True),
        # Equal entries without an array of lengths, as many as fill two rounds: whole items.
        replace(one, name="equal", rows=(1,) * 27, keys=(n,) * 27, keys_layout=Keys.DENSE, page_size=0),
        # Shares that grow from 19 tiles to a third of an item: 6 of 60 tiles for 19 blocks.
        replace(one, name="equal parts", rows=(1,) * 6, heads_q=2, keys=(60 * n,) * 6),
        replace(base, name="one split", splits=1),
        replace(base, name="odd pages", page_size=3, head_dim=dim // 2 + 8, head_dim_v=dim // 2 - 8),
        replace(base, name="window", left=n + 5, right=0, has_sinks=True, softcap=20.0, magnitude=3.0, page_size=48),
        replace(few, right=0, has_sinks=True, spare_keys=3),
        replace(few, name="ragged, one split", right=1, left=n, splits=1, wants_lse=False),
        # Seventeen rows of a group, and rows of one head: two items of a head.
        replace(
            one,
            name="wide group",
            rows=(1, 1),
            keys=(n + 1, 2 * n),
            heads_q=17,
            keys_layout=Keys.RAGGED,
            has_sinks=True,
        ),
        replace(few, name="rows", rows=(18, 5), keys=(2 * n + 7, n), right=0, left=3 * n // 2, heads_q=4, heads_kv=2),
        replace(few, name="mask", rows=(3, 3), keys=(n + 9, 2 * n), rows_layout=Rows.DENSE, mask=MaskTensor.BOOL),
        replace(one, name="additive mask", rows=(1, 1), keys=(n + 9, 3), keys_layout=Keys.DENSE, page_size=0),
        replace(few, name="many", rows=many, keys=(*(3 * rows for rows in many[:-1]), n + 9), right=0, heads_q=1),
        # More blocks than are added at once, the first of which has another item's end, too.
        replace(one, name="shared by most", rows=(1, 1), keys=(n, 35 * n - 3)),
        replace(few, name="no rows", rows=(0, 0, 0), keys=(n, 0, 5), slack=2),
        # Whole items, and entries without rows in front of the ones that a block finds.
        replace(few, name="many, one split", rows=many, keys=many, heads_q=1, splits=1),
        # Equal entries without an array of lengths, in parts; sinks, since entries lie as heads do.
        replace(
            one,
            name="equal, in parts",
            rows=(1,) * 3,
            keys=(9 * n,) * 3,
            keys_layout=Keys.DENSE,
            page_size=0,
            has_sinks=True,
        ),
    )
    for seed, problem in enumerate(every):
        made = problem
        if problem.name == "additive mask":
            made = replace(problem, mask=MaskTensor.ADDITIVE, mask_broadcast=(False, True, True), spare_keys=5)
        names = ONE if unit.dtype == "bf16" and dim > SMALLEST else FEW
        if (unit.dtype == "f16" and dim == SMALLEST) or made.name in names:
            yield replace(made, data_seed=made.data_seed or seed)


def geometry(unit: Unit, p: VarlenProblem) -> Geometry:
    """Of a machine that holds ``BLOCKS`` blocks."""
    row = unit.row
    heads = p.heads_kv if p.is_folded else p.heads_q
    items = math.ceil(p.most_rows / row.block_m) * heads * len(p.rows)
    tiles = items * (1 if p.splits == 1 else math.ceil(p.most_keys / row.block_n) + 1)
    return Geometry(min(tiles, BLOCKS), row.threads, row.smem_bytes(unit.dtype), launch_registers(unit))


def run(unit: Unit, problem: VarlenProblem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares with fp64."""
    return run_on(unit, problem, build(problem), settings, options)


def run_on(unit: Unit, problem: VarlenProblem, tensors: Tensors, settings: Settings, options: Options) -> Outcome:
    """The same on tensors that the caller may have changed."""
    library = load(kernel_library(unit, options))
    symbol = unit.entries[0].symbol
    grid = geometry(unit, problem)
    slots, nan = (2 * grid.grid, min(unit.row.block_m, problem.most_rows)), float("nan")
    lse = (len(problem.rows), problem.heads_q, problem.rows[0])
    results = Results(
        lse=torch.full(lse if problem.rows_layout is Rows.DENSE else (problem.heads_q, tensors.q.shape[0]), nan),
        out_partial=torch.full((*slots, unit.row.axes["head_dim"]), nan),
        lse_partial=torch.full((*slots, 2), nan),
        counter=torch.zeros(grid.grid, dtype=torch.int32),
    )
    with mapped(library):
        params = parameters(library, problem, tensors, results)
        report = library.launch(symbol, (ctypes.addressof(params),), grid, settings)
    wrong: list[str] = []
    if not report.failure:
        wrong = disagreements(problem, tensors, results.lse)
        if results.counter.any():
            wrong.append(f"the counters are {results.counter.tolist()} after the launch; the next launch needs zeros")
    return Outcome(problem, symbol, report, tuple(wrong), tensors.out, results.lse)
