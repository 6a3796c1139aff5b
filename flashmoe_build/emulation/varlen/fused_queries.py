"""The emulated kernels before and after the fused backward kernel of ragged and banded attention."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import torch

from flashmoe_build.emulation.attention import Outcome, launch_registers, load, mapped
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import UNIT_ROUNDOFF
from flashmoe_build.emulation.varlen.backward import (
    SCORE_UNIT,
    entries_disagreements,
    expect,
    row_dot_disagreements,
)
from flashmoe_build.emulation.varlen.fused import expected_turns, make_sums, rows_of_entry
from flashmoe_build.emulation.varlen.problem import Keys, Rows, VarlenProblem
from flashmoe_build.emulation.varlen.run import _add, _strides
from flashmoe_build.emulation.varlen.tensors import NAN, build
from flashmoe_tools.descriptors import Header
from flashmoe_tools.tables import Unit

VarlenFusedQueryParams = structure(Header("VarlenFusedQueryParams", "attention/params/fused_backward.h"), (CSRC,))


def problems(unit: Unit) -> Iterator[VarlenProblem]:
    dim = unit.row.axes["head_dim"]
    # Entries without rows, without keys, of whole pieces and one past them, of rows that see no key.
    ragged = VarlenProblem(
        "ragged", unit.dtype, (65, 0, 64, 130, 3), (200, 7, 0, 4, 7), 2, 1, dim // 2 + 8, dim // 2 - 8
    )
    yield replace(ragged, right=0)
    if unit.dtype == "bf16":  # the float16 kernel with other conversions
        return
    dense = VarlenProblem("dense", unit.dtype, (70, 70), (130, 9), 2, 2, 64, 40, left=3, right=0, wants_lse=False)
    yield replace(dense, rows_layout=Rows.DENSE, keys_layout=Keys.DENSE)
    # More entries than the lanes that search: two steps.
    rows = tuple((index % 7 == 0) + 66 * (index == 90) for index in range(100))
    yield VarlenProblem("many", unit.dtype, rows, (1,) * 100, 1, 1, 16, 16)


def width_of(problem: VarlenProblem) -> int:
    """Columns of the fused kernel."""
    return 64 if max(problem.head_dim, problem.head_dim_v) <= 64 else 128


def run(unit: Unit, problem: VarlenProblem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares."""
    p, symbol = problem, unit.entries[0].symbol
    library = load(kernel_library(unit, options))
    tensors = build(p)
    given, expected = expect(p, tensors, shares_weights=False, score_unit=SCORE_UNIT["sm90"])
    sums = make_sums(p, tensors, width_of(p))
    dots, dq = torch.full_like(given.row_dot, NAN), torch.full_like(tensors.q, NAN)
    prepares = unit.row.operation.endswith("prepare")
    if prepares:
        sums.turns.fill_(-1)
    else:
        sums.turns.copy_(expected_turns(p, sums).expand_as(sums.turns))
        had = sums.turns > 0
        sums.pieces[had] = torch.randn(sums.pieces[had].shape, generator=torch.Generator().manual_seed(7))
    named = {"out": given.out, "dout": given.dout, "dq": dq}
    with mapped(library):
        size = sums.memory.numel() * 4
        params = VarlenFusedQueryParams(
            **{name: _add(library, tensor, name, writable=name == "dq") for name, tensor in named.items()},
            **{f"{name}_stride": _strides(p, tensor, is_query=True) for name, tensor in named.items()},
            lse=_add(library, given.lse, "lse"),
            dlse=_add(library, given.dlse, "dlse"),
            row_dot=_add(library, dots, "row_dot", writable=True),
            sums=library.add_buffer(
                sums.memory.data_ptr(), size, writable=prepares, initialised=not prepares, name="sums of dq"
            ),
            cu_seqlens_q=_add(library, tensors.cu_seqlens_q, "cu_seqlens_q"),
            rows_total=tensors.q.shape[0] if p.rows_layout is Rows.RAGGED else 0,
            batch=len(p.rows),
            heads=p.heads_q,
            rows=p.most_rows,
            head_dim=p.head_dim,
            head_dim_v=p.head_dim_v,
            width=width_of(p),
            scale=p.scale,
        )
        geometry = Geometry(
            sums.turns.numel(), unit.row.threads, unit.row.smem_bytes(unit.dtype), launch_registers(unit)
        )
        report = library.launch(symbol, (ctypes.addressof(params),), geometry, settings)
    wrong: list[str] = []
    if not report.failure and prepares:
        wrong += row_dot_disagreements(p, tensors, dots, given, expected)
        if sums.turns.any():
            wrong.append("the turns are not all zero")
    elif not report.failure:
        values = [p.scale * rows_of_entry(p, sums, entry).double() for entry in range(len(p.rows))]
        bounds = [UNIT_ROUNDOFF[p.dtype] * value.abs() + 1e-6 for value in values]
        wrong += entries_disagreements(p, tensors, "dq", dq, values, bounds)
    return Outcome(problem, symbol, report, tuple(wrong), dots if prepares else dq, given.lse)
