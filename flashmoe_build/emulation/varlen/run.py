"""Runs one ragged, paged or banded problem on an emulated forward kernel and checks the result."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

from flashmoe_build.emulation.attention import (
    EMULATED_MULTIPROCESSORS,
    HEADER,
    ForwardParams,
    Outcome,
    Strides,
    launch_registers,
    load,
    mapped,
    tensor_map_arguments,
)
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, KernelLibrary, LaunchReport, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import worst_place
from flashmoe_build.emulation.varlen.problem import LOG2E, Keys, MaskTensor, Rows, VarlenProblem
from flashmoe_build.emulation.varlen.reference import reference
from flashmoe_build.emulation.varlen.tensors import Tensors, build
from flashmoe_tools.operations import Header
from flashmoe_tools.tables import Unit

Batch = structure(Header("Batch", HEADER), (CSRC,))
ScoreOptions = structure(Header("ScoreOptions", HEADER), (CSRC,))


@dataclass(frozen=True)
class Results:
    """Host memory that the kernel writes beside ``out``; NaN before. Rows are those of Sequence::result_head."""

    lse: torch.Tensor  # [batch, heads, rows], or [heads, rows of all]
    out_partial: torch.Tensor  # [splits, rows, head_dim_v]
    lse_partial: torch.Tensor
    counter: torch.Tensor


def _results(p: VarlenProblem, tensors: Tensors) -> Results:
    sizes = (len(p.rows), p.heads_q, p.rows[0]) if p.rows_layout is Rows.DENSE else (p.heads_q, tensors.q.shape[0])
    rows = math.prod(sizes)
    nan = float("nan")
    return Results(
        lse=torch.full(sizes, nan),
        out_partial=torch.full((p.splits, rows, p.head_dim_v), nan),
        lse_partial=torch.full((p.splits, rows), nan),
        counter=torch.zeros(1, dtype=torch.int32),
    )


def row_blocks(p: VarlenProblem, block_m: int) -> int:
    """Row blocks of a head, at most: what the host knows without reading lengths."""
    if p.rows_layout is Rows.DENSE:
        return math.ceil(p.most_rows / block_m) * len(p.rows)
    total = sum(p.rows) + 2 * 3  # with the rows of no entry
    return min(math.ceil(total / block_m) + len(p.rows), math.ceil(p.most_rows / block_m) * len(p.rows))


def geometry(unit: Unit, p: VarlenProblem) -> Geometry:
    """Grid, threads, shared memory and registers at launch, as csrc/attention/host/varlen.cpp chooses them."""
    row = unit.row
    heads = p.heads_kv if p.is_folded else p.heads_q
    tiles = row_blocks(p, row.block_m) * heads * p.splits
    grid = min(tiles, EMULATED_MULTIPROCESSORS) if row.schedule == "persistent" else tiles
    return Geometry(grid, row.threads, row.smem_bytes(unit.dtype), launch_registers(unit))


def _strides(p: VarlenProblem, tensor: torch.Tensor, *, is_query: bool) -> ctypes.Structure:
    """Of (batch, head, row). Ragged: no batch. Paged: batch is the page's. Folded: see Band::folded_heads."""
    stride = tensor.stride()
    if tensor.dim() == 3:
        batch, head, row = 0, stride[1], stride[0]
    elif is_query or p.keys_layout is Keys.DENSE:
        batch, head, row = stride[0], stride[1], stride[2]
    else:
        batch, head, row = stride[0], stride[2], stride[1]
    if is_query and p.is_folded:
        head, row = head * p.group, head
    return Strides(batch, head, row)


def _band(library: KernelLibrary, p: VarlenProblem, tensors: Tensors) -> ctypes.Structure:
    mask = tensors.mask
    strides = (0, 0, 0, 0) if mask is None else mask.stride()
    batch, head, row, key = strides
    if p.is_folded:
        head, row = head * p.group, head
    factors = (p.scale / p.softcap, 1.0 / p.softcap) if p.softcap > 0 else (0.0, 1.0 / p.scale)
    return ScoreOptions(
        left=p.left,
        right=p.right,
        score_factor=factors[0],
        mask_factor=factors[1],
        sinks=_add(library, tensors.sinks, "sinks"),
        mask=_add(library, mask, "mask"),
        mask_stride_batch=batch,
        mask_stride_head=head,
        mask_stride_row=row,
        mask_stride_key=key,
        mask_type=list(MaskTensor).index(p.mask),
        folded_heads=p.group if p.is_folded else 1,
    )


def _add(library: KernelLibrary, tensor: torch.Tensor | None, name: str, *, writable: bool = False) -> int:
    if tensor is None:
        return 0
    size = tensor.untyped_storage().nbytes()
    return library.add_buffer(tensor.data_ptr(), size, writable=writable, initialised=not writable, name=name)


def parameters(library: KernelLibrary, p: VarlenProblem, tensors: Tensors, results: Results) -> ctypes.Structure:
    """Maps everything and fills the kernel's parameters."""
    is_ragged_q, is_paged = p.rows_layout is Rows.RAGGED, p.keys_layout is Keys.PAGED
    table = tensors.block_table
    entries = Batch(
        cu_seqlens_q=_add(library, tensors.cu_seqlens_q, "cu_seqlens_q"),
        cu_seqlens_k=_add(library, tensors.cu_seqlens_k, "cu_seqlens_k"),
        seqused_k=_add(library, tensors.seqused_k, "seqused_k"),
        block_table=_add(library, table, "block_table"),
        block_table_stride=0 if table is None else table.stride(0),
        page_size=p.page_size if is_paged else 0,
        num_pages=tensors.k.shape[0] if is_paged else 0,
        rows_total=tensors.q.shape[0] if is_ragged_q else 0,
        keys_total=tensors.k.shape[0] if p.keys_layout is Keys.RAGGED else 0,
    )
    size = results.counter.nbytes
    counter = library.add_buffer(results.counter.data_ptr(), size, writable=True, initialised=True, name="tile_counter")
    names = ("out_partial", "lse_partial") if p.splits > 1 else ()
    partial = {name: _add(library, getattr(results, name), name, writable=True) for name in names}
    return ForwardParams(
        q=_add(library, tensors.q, "q"),
        k=_add(library, tensors.k, "k"),
        v=_add(library, tensors.v, "v"),
        out=_add(library, tensors.out, "out", writable=True),
        lse=_add(library, results.lse, "lse", writable=True) if p.wants_lse else 0,
        **partial,
        tile_counter=counter if p.has_counter else 0,
        q_stride=_strides(p, tensors.q, is_query=True),
        k_stride=_strides(p, tensors.k, is_query=False),
        v_stride=_strides(p, tensors.v, is_query=False),
        out_stride=_strides(p, tensors.out, is_query=True),
        batch=len(p.rows),
        heads_q=p.heads_kv if p.is_folded else p.heads_q,
        heads_kv=p.heads_kv,
        seq_q=p.most_rows,
        seq_k=p.most_keys,
        head_dim=p.head_dim,
        num_splits=p.splits,
        scale=p.scale,
        scale_log2=(p.softcap if p.softcap > 0 else p.scale) * LOG2E,
        head_dim_v=p.head_dim_v,
        sequences=entries,
        score_options=_band(library, p, tensors),
    )


def merge(p: VarlenProblem, tensors: Tensors, results: Results) -> None:
    """Puts the whole output and log-sum-exp together, in fp64, from those of the splits. A split that the plan does not use writes
    nothing: NaN, which counts as -inf. The sink is in split 0's."""
    lse_partial = results.lse_partial.double()
    lse_partial = lse_partial.masked_fill(torch.isnan(lse_partial), float("-inf"))
    lse = torch.logsumexp(lse_partial, dim=0)
    weights = torch.exp(lse_partial - lse.masked_fill(torch.isinf(lse), 0.0))[..., None]
    out = torch.where(weights > 0, weights * results.out_partial.double(), 0.0).sum(dim=0)
    results.lse.copy_(lse.view_as(results.lse))
    is_ragged = p.rows_layout is Rows.RAGGED
    shape = (*results.lse.shape, p.head_dim_v)
    tensors.out.copy_(out.view(shape).transpose(0, 1) if is_ragged else out.view(shape))


def disagreements(p: VarlenProblem, tensors: Tensors, lse: torch.Tensor) -> list[str]:
    """What is wrong with a kernel's results; empty when nothing is."""
    found: list[str] = []
    cu = tensors.cu_seqlens_q
    for entry, out in enumerate(tensors.outputs(p)):
        if p.rows[entry] == 0:
            continue
        expected, expected_lse, bound = reference(p, tensors, entry)
        found += worst_place(f"out of entry {entry}", out[None], expected[None], bound[None])
        if p.wants_lse:
            own = lse[entry] if cu is None else lse[:, int(cu[entry]) : int(cu[entry + 1])]
            own = torch.where(torch.isinf(expected_lse) & (own == expected_lse), 0.0, own)
            expected_lse = expected_lse.masked_fill(torch.isinf(expected_lse), 0.0)
            tolerance = 2e-4 + 1e-6 * expected_lse.abs()
            found += worst_place(f"lse of entry {entry}", own[None], expected_lse[None], tolerance[None])
    if cu is not None and p.splits == 1:
        spare = torch.cat([tensors.out[: int(cu[0])], tensors.out[int(cu[-1]) :]])
        if not torch.isnan(spare).all():
            found.append("rows of out that belong to no entry were written")
    return found


def run(unit: Unit, problem: VarlenProblem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares with fp64."""
    return run_on(unit, problem, build(problem), settings, options)


def run_on(unit: Unit, problem: VarlenProblem, tensors: Tensors, settings: Settings, options: Options) -> Outcome:
    """The same on tensors that the caller may have changed."""
    report, results = launch(unit, problem, tensors, settings, options)
    wrong: list[str] = []
    if not report.failure:
        if problem.splits > 1:
            merge(problem, tensors, results)
        wrong = disagreements(problem, tensors, results.lse)
        if int(results.counter[0]) != 0:
            wrong.append(f"tile_counter is {int(results.counter[0])} after the launch; the next launch needs 0")
    return Outcome(problem, unit.entries[0].symbol, report, tuple(wrong), tensors.out, results.lse)


def launch(
    unit: Unit, problem: VarlenProblem, tensors: Tensors, settings: Settings, options: Options
) -> tuple[LaunchReport, Results]:
    """One launch, whatever comes of it."""
    library = load(kernel_library(unit, options))
    results = _results(problem, tensors)
    with mapped(library):
        params = parameters(library, problem, tensors, results)
        maps, keep = tensor_map_arguments(unit, library, params)
        arguments = (ctypes.addressof(params), *maps)
        report = library.launch(unit.entries[0].symbol, arguments, geometry(unit, problem), settings)
        del keep
    return report, results
