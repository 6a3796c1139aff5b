"""Runs the second pass of split attention on its emulated kernel."""

from __future__ import annotations

import ctypes
import math

import torch

from flashmoe_build.emulation.attention import ForwardParams, Outcome, Strides, load, mapped, place
from flashmoe_build.emulation.build import Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, Settings
from flashmoe_build.emulation.problem import DTYPES, UNIT_ROUNDOFF, Problem, Reference, disagreements
from flashmoe_tools.tables import Unit


def make_partials(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial outputs [splits, batch, heads, rows, head_dim] and log-sum-exps. Some splits saw no key (-inf), and row 0 of
    head 0 has none at all; what such a split left as output is never read, and NaN here."""
    s = problem.shape
    generator = torch.Generator().manual_seed(problem.data_seed + 5)
    rows = (problem.splits, s.batch, s.heads_q, s.seq_q)
    out = torch.randn(*rows, s.head_dim, generator=generator)
    lse = torch.randn(*rows, generator=generator) * 4
    empty = torch.rand(*rows, generator=generator) < 0.25
    empty[:, 0, 0, 0] = True
    lse[empty] = float("-inf")
    out[empty] = float("nan")
    return out.contiguous(), lse.contiguous()


def combine_geometry(unit: Unit, problem: Problem) -> Geometry:
    """One warp a row."""
    rows = problem.shape.batch * problem.shape.heads_q * problem.shape.seq_q
    return Geometry(math.ceil(rows / unit.row.block_m), unit.row.threads, unit.row.smem_bytes(unit.dtype), 255)


def run_combine(unit: Unit, problem: Problem, settings: Settings, options: Options) -> Outcome:
    """Random partial results through the kernel, compared with fp64."""
    library = load(kernel_library(unit, options))
    symbol = unit.entries[0][1]
    shape = problem.shape
    partial, lse_partial = make_partials(problem)
    out = torch.full(
        (shape.batch, shape.heads_q, shape.seq_q, shape.head_dim), float("nan"), dtype=DTYPES[problem.dtype]
    )
    lse = torch.full((shape.batch, shape.heads_q, shape.seq_q), float("nan"))
    with mapped(library):

        def add(tensor: torch.Tensor, name: str, *, writable: bool) -> int:
            size = tensor.numel() * 4
            return library.add_buffer(tensor.data_ptr(), size, writable=writable, initialised=not writable, name=name)

        placed = place(library, out, problem.layout, "out", output=True)
        params = ForwardParams(
            out=placed.address,
            out_stride=Strides(*placed.strides),
            lse=add(lse, "lse", writable=True) if problem.wants_lse else 0,
            out_partial=library.expect_from_grid_in_front(add(partial, "out_partial", writable=False)),
            lse_partial=library.expect_from_grid_in_front(add(lse_partial, "lse_partial", writable=False)),
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
        report = library.launch(symbol, (ctypes.addressof(params),), combine_geometry(unit, problem), settings)
    wrong = [] if report.failure else disagreements(problem, expected(problem, partial, lse_partial), out, lse)
    return Outcome(problem, symbol, report, tuple(wrong), out, lse)


def expected(problem: Problem, partial: torch.Tensor, lse_partial: torch.Tensor) -> Reference:
    """The whole output and log-sum-exp in fp64, and how far a kernel may be from them."""
    partial = partial.nan_to_num(0.0)
    total = torch.logsumexp(lse_partial.double(), dim=0)
    weights = torch.exp(lse_partial.double() - total.masked_fill(torch.isinf(total), 0.0))[..., None]
    out = (weights * partial.double()).sum(dim=0)
    spread = (weights * partial.double().abs()).sum(dim=0)
    return Reference(out, total, UNIT_ROUNDOFF[problem.dtype] * out.abs() + 1e-5 * spread + 1e-7)
