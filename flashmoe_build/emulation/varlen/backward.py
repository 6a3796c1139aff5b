"""Runs one ragged or banded problem on an emulated backward kernel, dq's or that of dk and dv, and checks the gradients with fp64.

NaN stands in every row and key that belongs to no entry, of dout and the statistics too; their gradients must be zero.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmoe_build.emulation.attention import (
    EMULATED_MULTIPROCESSORS,
    Outcome,
    launch_registers,
    load,
    mapped,
    tensor_map_arguments,
)
from flashmoe_build.emulation.backward import BackwardParams
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, KernelLibrary, LaunchReport, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import UNIT_ROUNDOFF, worst_place
from flashmoe_build.emulation.varlen.fused import Sums, expected_turns, make_sums, rows_of_entry
from flashmoe_build.emulation.varlen.problem import LOG2E, Keys, MaskTensor, Rows, VarlenProblem
from flashmoe_build.emulation.varlen.reference import visible
from flashmoe_build.emulation.varlen.run import Batch, _add, _band, _strides
from flashmoe_build.emulation.varlen.tensors import NAN, SPARE_ROWS, Tensors, _entries_of_rows, build
from flashmoe_tools.operations import Header
from flashmoe_tools.tables import Unit

SequenceRows = structure(Header("SequenceRows", "attention/params/backward.h"), (CSRC,))
CLEARING_SLOTS = 4  # kClearingSlots of attention/params/backward.h
FUSED = "attention_varlen_backward_fused"
RESULTS = {
    "attention_varlen_backward_dq": ("dq",),
    "attention_varlen_backward_dkv": ("dk", "dv"),
    FUSED: ("dk", "dv"),  # and the sums of dq
}
FEW = (
    "ragged",
    "window",
    "soft softcap",
)  # what a bf16 kernel is run on: it is the float16 kernel with other conversions
# Error of a score for each unit of it; Turing's products add up 8 columns at a time, and cut off.
SCORE_UNIT = {"sm90": 8e-7, "sm80": 8e-7, "sm75": 3e-6}


def problems(unit: Unit) -> Iterator[VarlenProblem]:
    """In the order of what they need: lengths, the band, scores."""
    for seed, problem in enumerate(_problems(unit)):
        if _is_for(unit, problem) and (unit.dtype == "f16" or problem.name in FEW):
            yield replace(problem, data_seed=seed, has_counter=problem.has_counter or unit.row.operation == FUSED)


def _is_for(unit: Unit, problem: VarlenProblem) -> bool:
    """Of a family with kernels of their own for what bends scores, those have such problems and the others the rest."""
    functions = 0 if unit.row.operation == FUSED else unit.row.options.get("scores")
    bends = problem.softcap > 0 or problem.mask is not MaskTensor.NONE
    return functions is None or bends == bool(functions)


def _problems(unit: Unit) -> Iterator[VarlenProblem]:
    m, n, dim = unit.row.block_m, unit.row.block_n, unit.row.axes["head_dim"]

    def base(name: str, rows: tuple[int, ...], keys: tuple[int, ...]) -> VarlenProblem:
        return VarlenProblem(name, unit.dtype, rows, keys, 2, 1, dim, dim)

    # Entries without rows, without keys, with fewer keys than rows (rows that see none), one past a tile both ways.
    yield replace(base("ragged", (m + 1, 0, 5, 9, 3), (2 * n + 1, 7, 0, 4, 7)), right=0)
    # Every key; columns short of the kernel's, those of the values by another number; bounds that exceed the entries.
    full = base("full", (7, m, 0), (n + 3, n, 0))
    yield replace(
        full, heads_q=3, heads_kv=3, head_dim=dim // 2 + 8, head_dim_v=dim // 2 - 8, slack=70, wants_lse=False
    )
    # The window's left end inside a tile, its right end before and behind the diagonal; a sink.
    window = base("window", (2 * m + 9, 4), (2 * m + 2 * n, n + 9))
    yield replace(window, left=n // 2 + 3, right=5, has_sinks=True)
    narrow = base("narrow window", (m + 70, 3), (n, 9))
    yield replace(narrow, left=1, right=0, has_sinks=True, has_counter=False)
    # A window that some blocks lie inside of.
    yield replace(base("wide window", (m + 9,), (m + 5 * n,)), left=3 * max(n, 64) + 7, right=0, heads_q=1)
    # Keys that no query sees, in front of the window, for whole tiles; a group of three.
    yield replace(base("unseen keys", (5, 1), (2 * n + 70, n + 1)), left=3, right=0, heads_q=3)
    # More rows than keys, with a sink: rows without a key have it alone.
    yield replace(base("sinks", (m + 7, 2), (5, 0)), right=0, has_sinks=True, heads_q=4, heads_kv=2)
    # Scores on both sides of where tanh bends.
    softcap = replace(base("softcap", (37, 2), (n + 3, 9)), softcap=7.0, magnitude=6.0)
    yield replace(softcap, mask=MaskTensor.ADDITIVE, mask_broadcast=(True, False, True))
    soft = replace(softcap, name="soft softcap", softcap=50.0, magnitude=1.0, rows=(m + 3, 2), keys=(m + 9, 3))
    yield replace(soft, left=m + 6, right=0, has_sinks=True)  # the first keys are in the window of a whole block
    # Whole blocks of values that lie side by side in memory, and tails.
    masked = replace(base("mask", (70, 70), (n + 10, n + 10)), rows_layout=Rows.DENSE, keys_layout=Keys.DENSE)
    yield replace(masked, mask=MaskTensor.BOOL, mask_broadcast=(False, True, False))
    yield replace(masked, name="additive mask", mask=MaskTensor.ADDITIVE, right=0, heads_q=4, heads_kv=2)
    # Dense rows and keys with room behind the used ones; more tiles than blocks.
    dense = base("dense", (m + 3,) * 3, (n, n + 1, 0))
    yield replace(dense, rows_layout=Rows.DENSE, keys_layout=Keys.DENSE, spare_keys=n // 2 + 1, right=3)
    # Ragged keys with room behind the used ones.
    yield replace(base("spare keys", (9, 5), (n - 3, 2)), spare_keys=7, left=40)
    # Logits so far below 0 that the weight of a score of 0, as a missing key has, is infinite: dq of all keys is one product.
    if unit.row.operation == FUSED:
        yield replace(base("low", (9, 3), (1, 2)), magnitude=100.0)
    # More entries than a warp has lanes.
    rows = tuple(index % 3 for index in range(70))
    yield replace(base("many", (*rows, m + 5), (*rows, 9)), right=0, heads_q=1)
    # As many slots for every entry: some without a tile, and zeros in front of all, behind them and beyond the most keys.
    if unit.row.schedule == "grid":
        short = base("equal slots", (m, 5, m - 3, 0, m), (n, 7, n - 1, 0, n))
        yield replace(short, right=0, spare_keys=n // 2 + 1)
        pairs = base("equal slots, two tiles", (2 * m, 2 * m - 1, m + 5, 2 * m), (2 * n, n - 1, 2 * n - 1, 2 * n))
        yield replace(pairs, heads_q=3, heads_kv=3)
    # Tiles that take turns: the last head of the one long entry goes down, the others up.
    if unit.row.operation == FUSED:
        both = base("both directions", (n + 9, 3, m), (2 * n + 5, 3, n))
        yield replace(both, right=0, heads_q=3, heads_kv=3)


@dataclass(frozen=True)
class Given:
    """What the kernels read beside q, k and v, as it lies in memory; NaN where it belongs to no entry."""

    out: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor  # [batch, heads, rows], or [heads, rows of all]
    dlse: torch.Tensor | None
    row_dot: torch.Tensor


@dataclass(frozen=True)
class Expected:
    """Of one entry: gradients, error bounds and row_dot in fp64, [heads, rows or keys, columns]."""

    gradients: dict[str, torch.Tensor]
    bounds: dict[str, torch.Tensor]
    row_dot: torch.Tensor


def _statistic_entries(p: VarlenProblem, tensors: Tensors, statistic: torch.Tensor) -> list[torch.Tensor]:
    """[heads, rows] of each entry."""
    cu = tensors.cu_seqlens_q
    if cu is None:
        return list(statistic)
    return [statistic[:, first : first + rows] for first, rows in zip(cu.tolist(), p.rows, strict=False)]


def _entries_of_keys(p: VarlenProblem, tensor: torch.Tensor, cu: torch.Tensor | None) -> list[torch.Tensor]:
    """Views of the used keys, one for each entry: [heads, keys, columns]."""
    if cu is None:
        return [own[:, :keys] for own, keys in zip(tensor, p.keys, strict=True)]
    return [tensor[first : first + keys].transpose(0, 1) for first, keys in zip(cu.tolist(), p.keys, strict=False)]


def expect(
    p: VarlenProblem, tensors: Tensors, *, shares_weights: bool, score_unit: float
) -> tuple[Given, list[Expected]]:
    """Gradients in fp64 from the 16-bit tensors that the kernels read; the bounds are those of the dense kernels
    (flashmoe_build/emulation/backward.py), with the fp32 error of the score functions."""
    generator = torch.Generator().manual_seed(p.data_seed * 101 + 3)
    sizes = (*tensors.q.shape[:-1],)
    statistics = (len(p.rows), p.heads_q, p.rows[0]) if p.rows_layout is Rows.DENSE else (p.heads_q, sizes[0])
    out = torch.full((*sizes, p.head_dim_v), NAN, dtype=tensors.q.dtype)
    dout = torch.full_like(out, NAN)
    lse, dlse, row_dot = (torch.full(statistics, NAN) for _ in range(3))
    expected = []
    views = zip(
        *(_entries_of_rows(p, tensor, tensors.cu_seqlens_q) for tensor in (out, dout)),
        *(_statistic_entries(p, tensors, tensor) for tensor in (lse, dlse, row_dot)),
        strict=True,
    )
    for entry, (out_view, dout_view, lse_view, dlse_view, row_dot_view) in enumerate(views):
        dout_view.copy_(torch.randn(dout_view.shape, generator=generator))
        dlse_view.copy_(torch.randn(dlse_view.shape, generator=generator) if p.wants_lse else torch.zeros(()))
        values = _Entry.of(p, tensors, entry)
        out_view.copy_(values.weights @ values.v)
        lse_view.copy_(values.lse)
        dot = (dout_view.double() * out_view.double()).sum(-1) - dlse_view.double()
        dot = dot.masked_fill(torch.isinf(values.lse), 0.0)
        row_dot_view.copy_(dot)
        noise_unit = score_unit * values.magnitude + 2e-5
        expected.append(_gradients(p, values, dout_view.double(), dot, noise_unit, shares_weights=shares_weights))
    return Given(out, dout, lse, dlse if p.wants_lse else None, row_dot), expected


@dataclass(frozen=True)
class _Entry:
    """One entry in fp64, keys and values repeated for each query head."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    weights: torch.Tensor
    derivative: torch.Tensor  # of the softcap
    magnitude: torch.Tensor  # of the exponents
    lse: torch.Tensor

    @classmethod
    def of(cls, p: VarlenProblem, tensors: Tensors, entry: int) -> _Entry:
        q, k, v = (tensor.double() for tensor in tensors.entries[entry])
        k, v = (tensor.repeat_interleave(p.group, dim=0) for tensor in (k, v))
        rows, keys = q.shape[1], k.shape[1]
        scores = q @ k.mT * p.scale
        magnitude, derivative = scores.abs(), torch.ones_like(scores)
        if p.softcap > 0:
            bent = torch.tanh(scores / p.softcap)
            scores, derivative, magnitude = p.softcap * bent, 1.0 - bent * bent, magnitude + p.softcap
        if tensors.mask is not None:
            mask = tensors.mask[entry, :, :rows, :keys]
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, float("-inf"))
            else:
                scores = scores + mask.double()
                magnitude = magnitude + mask.double().abs().nan_to_num(posinf=0.0)
        scores = scores.masked_fill(~visible(p, rows, keys), float("-inf"))
        terms = scores
        if tensors.sinks is not None:
            terms = torch.cat([scores, tensors.sinks.double()[:, None, None].expand(-1, rows, 1)], dim=-1)
        lse = torch.logsumexp(terms, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(torch.isinf(lse), 0.0)[..., None])
        return cls(q, k, v, weights, derivative, magnitude, lse)


def _gradients(
    p: VarlenProblem,
    values: _Entry,
    dout: torch.Tensor,
    row_dot: torch.Tensor,
    noise_unit: torch.Tensor,
    *,
    shares_weights: bool,
) -> Expected:
    unit, scale = UNIT_ROUNDOFF[p.dtype], p.scale
    small = 2.0**-25 if p.dtype == "f16" else 0.0
    d_weights = dout @ values.v.mT
    d_scores = values.weights * values.derivative * (d_weights - row_dot[..., None])
    reach = dout.abs() @ values.v.abs().mT + row_dot.abs()[..., None]
    score_error = unit * d_scores.abs() + values.weights * (1e-5 + noise_unit) * reach
    if shares_weights:
        score_error = score_error + unit * d_scores.abs() + small * (d_weights.abs() + row_dot.abs()[..., None])

    def of_keys(tensor: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = tensor.unflatten(0, (p.heads_kv, p.group)).sum(1)
        return summed

    gradients = {
        "dq": scale * d_scores @ values.k,
        "dk": scale * of_keys(d_scores.mT @ values.q),
        "dv": of_keys(values.weights.mT @ dout),
    }
    bounds = {
        "dq": scale * (score_error + small) @ values.k.abs(),
        "dk": scale * of_keys((score_error + small).mT @ values.q.abs()),
        "dv": of_keys(((unit + noise_unit) * values.weights + small).mT @ dout.abs()),
    }
    for name, value in gradients.items():
        bounds[name] += unit * value.abs() + 1e-6
    return Expected(gradients, bounds, row_dot)


def own_blocks(p: VarlenProblem, unit: Unit) -> int:
    """Tiles of a head, at most: what the host knows without reading lengths."""
    if unit.row.operation == "attention_varlen_backward_dq":
        block, is_dense, most = unit.row.block_m, p.rows_layout is Rows.DENSE, p.most_rows
        total = sum(p.rows) + 2 * SPARE_ROWS
    else:
        block, is_dense, most = unit.row.block_n, p.keys_layout is Keys.DENSE, p.most_keys
        total = max(1, sum(p.keys) + p.spare_keys * len(p.keys))
    of_longest = math.ceil(most / block) * len(p.rows)
    # Each entry ends with a broken tile at most, and so do the two with what belongs to none.
    tiles = of_longest if is_dense else math.ceil(total / block) + len(p.rows) + 2
    return tiles if is_dense or unit.row.schedule == "persistent" else min(tiles, of_longest + CLEARING_SLOTS)


def geometry(unit: Unit, p: VarlenProblem) -> Geometry:
    """Grid, threads, shared memory and registers at launch, as csrc/attention/host/backward_varlen.cpp chooses them."""
    row = unit.row
    tiles = own_blocks(p, unit) * (p.heads_q if row.operation == "attention_varlen_backward_dq" else p.heads_kv)
    grid = min(tiles, EMULATED_MULTIPROCESSORS) if row.schedule == "persistent" else tiles
    return Geometry(grid, row.threads, row.smem_bytes(unit.dtype), launch_registers(unit))


def _params(
    library: KernelLibrary,
    p: VarlenProblem,
    tensors: Tensors,
    given: Given,
    results: dict[str, torch.Tensor],
    counter: torch.Tensor,
) -> ctypes.Structure:
    """Maps everything and fills the kernel's parameters. What the kernel has no part in stays null."""
    named = {"q": tensors.q, "k": tensors.k, "v": tensors.v, "out": given.out, "dout": given.dout, **results}
    row_dot = named.pop("row_dot", None)
    queries = ("q", "out", "dout", "dq")
    strides: dict[str, Any] = {name: _strides(p, tensor, is_query=name in queries) for name, tensor in named.items()}
    entries = Batch(
        cu_seqlens_q=_add(library, tensors.cu_seqlens_q, "cu_seqlens_q"),
        cu_seqlens_k=_add(library, tensors.cu_seqlens_k, "cu_seqlens_k"),
        seqused_k=_add(library, tensors.seqused_k, "seqused_k"),
        rows_total=tensors.q.shape[0] if p.rows_layout is Rows.RAGGED else 0,
        keys_total=tensors.k.shape[0] if p.keys_layout is Keys.RAGGED else 0,
    )
    at = library.add_buffer(counter.data_ptr(), 4, writable=True, initialised=True, name="tile_counter")
    return BackwardParams(
        **{name: _add(library, tensor, name, writable=name in results) for name, tensor in named.items()},
        **{f"{name}_stride": stride for name, stride in strides.items()},
        lse=_add(library, given.lse, "lse"),
        dlse=_add(library, given.dlse, "dlse"),
        row_dot=_add(library, given.row_dot if row_dot is None else row_dot, "row_dot", writable=row_dot is not None),
        tile_counter=at if p.has_counter else 0,
        batch=len(p.rows),
        heads_q=p.heads_q,
        heads_kv=p.heads_kv,
        seq_q=p.most_rows,
        seq_k=p.most_keys,
        head_dim=p.head_dim,
        scale=p.scale,
        scale_log2=(p.softcap if p.softcap > 0 else p.scale) * LOG2E,
        head_dim_v=p.head_dim_v,
        sequences=entries,
        score_options=_band(library, p, tensors),
        sequence_rows=SequenceRows(**{name: s.batch // s.row for name, s in strides.items() if name != "out"}),
    )


def _shares_weights(unit: Unit) -> bool:
    """Whether dS is made from P that another warp computed and rounded to the type."""
    if unit.row.operation != "attention_varlen_backward_dkv":
        return False
    return unit.row.block_n == 64 if unit.row.family == "sm90" else unit.row.options.get("roles") != 1


@dataclass(frozen=True)
class Launched:
    report: LaunchReport
    results: dict[str, torch.Tensor]
    sums: Sums | None
    counter: torch.Tensor


def launch(
    unit: Unit, problem: VarlenProblem, tensors: Tensors, given: Given, settings: Settings, options: Options
) -> Launched:
    """Compiles (or finds) the kernel and runs it; results are NaN before."""
    library = load(kernel_library(unit, options))
    like = {"dq": tensors.q, "dk": tensors.k, "dv": tensors.v}
    results = {name: torch.full_like(like[name], NAN) for name in RESULTS[unit.row.operation]}
    if "dq" in results:
        results["row_dot"] = torch.full_like(given.row_dot, NAN)
    counter = torch.zeros(1, dtype=torch.int32)
    sums = make_sums(problem, tensors, unit.row.axes["head_dim"]) if unit.row.operation == FUSED else None
    with mapped(library):
        params = _params(library, problem, tensors, given, results, counter)
        if sums is not None:
            size = sums.memory.numel() * 4
            params.dq = library.add_buffer(
                sums.memory.data_ptr(), size, writable=True, initialised=True, name="sums of dq"
            )
        maps, keep = tensor_map_arguments(unit, library, params)
        arguments = (ctypes.addressof(params), *maps)
        report = library.launch(unit.entries[0].symbol, arguments, geometry(unit, problem), settings)
        del keep
    return Launched(report, results, sums, counter)


def run(unit: Unit, problem: VarlenProblem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares with fp64. ``out`` and ``lse`` of the outcome are the
    first gradient and row_dot."""
    symbol = unit.entries[0].symbol
    tensors = build(problem)
    score_unit = SCORE_UNIT[unit.row.family]
    given, expected = expect(problem, tensors, shares_weights=_shares_weights(unit), score_unit=score_unit)
    launched = launch(unit, problem, tensors, given, settings, options)
    report, results, sums, counter = launched.report, launched.results, launched.sums, launched.counter
    names = RESULTS[unit.row.operation]
    wrong: list[str] = []
    if not report.failure:
        for name in names:
            values, bounds = ([getattr(own, kind)[name] for own in expected] for kind in ("gradients", "bounds"))
            wrong += entries_disagreements(problem, tensors, name, results[name], values, bounds)
        if sums is not None:
            wrong += _wrong_sums(problem, sums, expected)
        if "row_dot" in results:
            wrong += row_dot_disagreements(problem, tensors, results["row_dot"], given, expected)
        if int(counter[0]) != 0:
            wrong.append(f"tile_counter is {int(counter[0])} after the launch; the next launch needs 0")
    return Outcome(problem, symbol, report, tuple(wrong), results[names[0]], results.get("row_dot", given.row_dot))


def _wrong_sums(p: VarlenProblem, sums: Sums, expected: list[Expected]) -> list[str]:
    found: list[str] = []
    for entry in range(len(p.rows)):
        dq = p.scale * rows_of_entry(p, sums, entry)
        if dq.numel() > 0:
            own = expected[entry]
            found += worst_place(f"sums of entry {entry}", dq[None], own.gradients["dq"][None], own.bounds["dq"][None])
    if not sums.turns.eq(expected_turns(p, sums)).all():
        found.append("not every tile that a piece's rows see had a turn there, or another one had")
    return found


def entries_disagreements(
    p: VarlenProblem,
    tensors: Tensors,
    name: str,
    gradient: torch.Tensor,
    values: list[torch.Tensor],
    bounds: list[torch.Tensor],
) -> list[str]:
    """What is wrong with a gradient; rows and keys of no entry must have zero."""
    found: list[str] = []
    rest = gradient.clone()
    views, rests = (
        _entries_of_rows(p, tensor, tensors.cu_seqlens_q)
        if name == "dq"
        else _entries_of_keys(p, tensor, tensors.cu_seqlens_k)
        for tensor in (gradient, rest)
    )
    for entry, (own, other) in enumerate(zip(views, rests, strict=True)):
        if own.numel() > 0:
            found += worst_place(f"{name} of entry {entry}", own[None], values[entry][None], bounds[entry][None])
        other.zero_()
    if not bool((rest == 0).all()):
        found.append(f"{name} of rows that belong to no entry is not zero everywhere")
    return found


def row_dot_disagreements(
    p: VarlenProblem, tensors: Tensors, row_dot: torch.Tensor, given: Given, expected: list[Expected]
) -> list[str]:
    found: list[str] = []
    rest = row_dot.clone()
    views = zip(
        _statistic_entries(p, tensors, row_dot),
        _statistic_entries(p, tensors, rest),
        _entries_of_rows(p, given.out, tensors.cu_seqlens_q),
        _entries_of_rows(p, given.dout, tensors.cu_seqlens_q),
        strict=True,
    )
    for entry, (own, other, out, dout) in enumerate(views):
        if own.numel() > 0:
            error = 1e-5 * (out.double() * dout.double()).abs().sum(-1) + 1e-5
            found += worst_place(f"row_dot of entry {entry}", own[None], expected[entry].row_dot[None], error[None])
        other.zero_()
    if not bool((rest == 0).all()):
        found.append("row_dot of rows that belong to no entry is not zero everywhere")
    return found
