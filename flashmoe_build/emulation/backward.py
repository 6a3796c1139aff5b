"""Runs one attention problem on an emulated backward kernel, dq's or that of dk and dv, and checks the gradients."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flashmoe_build.emulation.attention import (
    EMULATED_MULTIPROCESSORS,
    Outcome,
    Strides,
    arranged,
    launch_registers,
    load,
    mapped,
    place,
    tensor_map_arguments,
)
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.fused_queries import make_sums, rows_of_sums, tiles_of_pieces
from flashmoe_build.emulation.machine import Geometry, KernelLibrary, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import UNIT_ROUNDOFF, Layout, Problem, Shape, Values, make_inputs, worst_place
from flashmoe_tools.descriptors import Header
from flashmoe_tools.operations.attention.reference import weigh
from flashmoe_tools.tables import Unit

BackwardParams = structure(Header("BackwardParams", "attention/params/backward.h"), (CSRC,))
RESULTS = {
    "attention_backward_dq": ("dq",),
    "attention_backward_dkv": ("dk", "dv"),
    "attention_backward_fused": ("dk", "dv"),  # and the sums of dq
}
QUERY_TENSORS = ("q", "out", "dout", "dq")  # the others are laid out as keys are
# Of the problems below, those that a bfloat16 kernel of a family without tensor maps is run on: it is the float16 kernel with
# other conversions, and its targets share the source.
FEW_PROBLEMS = (0, 3, 7)
# Error of a score for each unit of it. Turing's products add up 8 columns at a time, and cut off at each of the 32 of D=256.
SCORE_UNIT = 4e-7
TURING_SCORE_UNIT = 2e-6


@dataclass(frozen=True)
class Expected:
    """What the kernels are given beside q, k and v, and in fp64 what they must return, with the error bound of each."""

    given: dict[str, torch.Tensor]  # out and dout in the problem's dtype; lse, dlse and row_dot in float32
    gradients: dict[str, torch.Tensor]
    bounds: dict[str, torch.Tensor]


def problems(unit: Unit) -> Iterator[Problem]:
    """The edges of the kernel's own tile and stream, both masks, grouped heads, narrow head dims, every layout."""
    m, n, dim = unit.row.block_m, unit.row.block_n, unit.row.axes["head_dim"]
    sizes: tuple[tuple[int, int, int, int, int, int, Layout, Values], ...] = (
        # seq_q, seq_k, head dim, heads, key heads, batch, layout, values
        (m + 1, 2 * n + 1, dim, 2, 1, 1, Layout.BSHD, Values.SHIFTED),  # one past a tile, both ways; grouped heads
        (m, n, dim, 1, 1, 2, Layout.BHSD, Values.NORMAL),  # whole tiles, two batches, a gradient of lse
        (3, n + 3, dim // 2 + 8, 2, 2, 1, Layout.ROWS, Values.LARGE),  # fewer columns than the kernel has
        (m + 7, 5, dim, 1, 1, 1, Layout.BHSD, Values.NORMAL),  # causal rows without a key
        (5, n + 70, dim, 1, 1, 1, Layout.BHSD, Values.NORMAL),  # fewer queries than keys
        (1, 2 * n - 1, dim, 4, 2, 2, Layout.BSHD, Values.OUTLIER),  # one query, grouped heads; without a tile counter
        (36, 40, dim, 2, 1, 1, Layout.FAR, Values.NORMAL),  # offsets past 2^31 elements
        (70, n + 9, dim, 1, 1, 1, Layout.ROWS, Values.LOW),  # logits near -120: exp(0 - lse) of a padded key is inf
        (2 * m + 70, 2 * n + 30, dim, 3, 1, 1, Layout.BHSD, Values.SHIFTED),  # more tiles than blocks; a group of three
    )
    takes_turns = unit.row.operation == "attention_backward_fused"  # its tiles are always drawn
    if takes_turns:  # eight tiles a block: six heads from the last keys on; causal, seven downwards. The first tile's keys end with a block's last row
        sizes += ((m + 9, n + 9, dim, 13, 13, 1, Layout.BSHD, Values.NORMAL),)
    for causal in (mask == "causal" for mask in unit.row.words["mask"]):
        for index, (seq_q, seq_k, columns, heads, key_heads, batch, layout, values) in enumerate(sizes):
            if unit.row.schedule == "grid" and unit.dtype == "bf16" and index not in FEW_PROBLEMS:
                continue
            shape = Shape(batch, heads, key_heads, seq_q, seq_k, columns)
            problem = Problem(shape, unit.dtype, causal, layout, values, index)
            yield replace(problem, wants_lse=index == 1, has_counter=takes_turns or index != 5)


def expect(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    shares_weights: bool = False,
    score_unit: float = SCORE_UNIT,
) -> Expected:
    """The gradients in fp64 from the 16-bit tensors that the kernels read.

    Bounds: u for P and dS rounded to the type and for the result; 2e-5 and ``score_unit`` a unit of score, relative to P, for
    the approximate exponential of an fp32 score; 1e-5 of the sums of magnitudes for fp32 accumulation; 2^-25 a term for f16
    weights below 2^-14. ``wants_lse`` says whether there is a gradient of lse; ``shares_weights``, whether dS is made from P
    that was rounded to the type (a warpgroup gets it from another one).
    """
    shape, unit = problem.shape, UNIT_ROUNDOFF[problem.dtype]
    generator = torch.Generator().manual_seed(problem.data_seed + 31)
    dout = torch.randn(q.shape, generator=generator).to(q.dtype)
    dlse = torch.randn(q.shape[:3], generator=generator) if problem.wants_lse else None
    repeat = shape.heads_q // shape.heads_kv
    keys, values = (t.double().repeat_interleave(repeat, dim=1) for t in (k, v))
    scores = (q.double() @ keys.mT) * problem.scale
    magnitude = scores.abs()
    weights, lse = weigh(scores, causal=problem.causal)
    out = (weights @ values).to(q.dtype)
    row_dot = (dout.double() * out.double()).sum(-1) - (0.0 if dlse is None else dlse.double())
    row_dot = row_dot.masked_fill(torch.isinf(lse), 0.0)
    upstream = dout.double()
    d_weights = upstream @ values.mT
    d_scores = weights * (d_weights - row_dot[..., None])
    exponent = 2e-5 + score_unit * magnitude
    noise = weights * (1e-5 + exponent) * (upstream.abs() @ values.abs().mT + row_dot.abs()[..., None])
    small = 2.0**-25 if problem.dtype == "f16" else 0.0
    score_error = unit * d_scores.abs() + noise
    if shares_weights:
        score_error += unit * d_scores.abs() + small * (d_weights.abs() + row_dot.abs()[..., None])

    def of_keys(tensor: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = tensor.unflatten(1, (shape.heads_kv, repeat)).sum(2)
        return summed

    scale = problem.scale
    gradients = {
        "dq": scale * d_scores @ keys,
        "dk": scale * of_keys(d_scores.mT @ q.double()),
        "dv": of_keys(weights.mT @ upstream),
    }
    bounds = {
        "dq": scale * (score_error + small) @ keys.abs(),
        "dk": scale * of_keys((score_error + small).mT @ q.double().abs()),
        "dv": of_keys(((unit + exponent) * weights + small).mT @ upstream.abs()),
    }
    for name, value in gradients.items():
        bounds[name] += unit * value.abs() + 1e-6
    given = {"out": out, "dout": dout, "lse": lse.float(), "row_dot": row_dot.float()}
    return Expected({**given, **({} if dlse is None else {"dlse": dlse})}, gradients, bounds)


def geometry(unit: Unit, problem: Problem) -> Geometry:
    """Grid, threads, shared memory and registers at launch, as csrc/attention/host/backward.cpp chooses them."""
    row, shape = unit.row, problem.shape
    tiles = math.ceil(shape.seq_q / row.block_m) * shape.heads_q
    if row.operation != "attention_backward_dq":
        tiles = math.ceil(shape.seq_k / row.block_n) * shape.heads_kv
    grid = tiles * shape.batch
    if row.schedule == "persistent":
        grid = min(grid, EMULATED_MULTIPROCESSORS)
    return Geometry(grid, row.threads, row.smem_bytes(unit.dtype), launch_registers(unit))


def run_backward(unit: Unit, problem: Problem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares with fp64. ``out`` and ``lse`` of the outcome are the
    first gradient and row_dot."""
    library = load(kernel_library(unit, options))
    symbol = unit.symbol("causal" if problem.causal else "full")
    inputs = make_inputs(problem)
    expected = expect(
        problem,
        inputs.q,
        inputs.k,
        inputs.v,
        shares_weights=_shares_weights(unit),
        score_unit=TURING_SCORE_UNIT if unit.row.family == "sm75" else SCORE_UNIT,
    )
    names = RESULTS[unit.row.operation]
    results = {name: torch.full_like(inputs.q if name in QUERY_TENSORS else inputs.k, float("nan")) for name in names}
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **results}
    tensors |= {name: expected.given[name] for name in ("out", "dout")}
    tensors = {name: arranged(tensor, _layout(name, problem)) for name, tensor in tensors.items()}
    writes_row_dot = unit.row.operation == "attention_backward_dq"
    row_dot = torch.full_like(expected.given["row_dot"], float("nan")) if writes_row_dot else expected.given["row_dot"]
    counter = torch.zeros(1, dtype=torch.int32)
    with mapped(library):
        params = _params(library, problem, tensors, expected, (row_dot, writes_row_dot), counter)
        memory, pieces, turns = make_sums(problem, unit.row.axes["head_dim"])
        if unit.row.operation == "attention_backward_fused":
            params.dq = library.add_buffer(
                memory.data_ptr(), memory.numel() * 4, writable=True, initialised=True, name="sums of dq"
            )
        maps, keep = tensor_map_arguments(unit, library, params)
        report = library.launch(symbol, (ctypes.addressof(params), *maps), geometry(unit, problem), settings)
        del keep
    wrong: list[str] = []
    if not report.failure:
        for name in names:
            wrong += worst_place(name, tensors[name], expected.gradients[name], expected.bounds[name])
        if unit.row.operation == "attention_backward_fused":
            dq = problem.scale * rows_of_sums(problem, pieces, turns)
            wrong += worst_place("dq", dq, expected.gradients["dq"], expected.bounds["dq"])
            if not turns.eq(tiles_of_pieces(problem)).all():
                wrong.append("not every tile that a piece's rows see had a turn there")
        error = 1e-5 * expected.given["dout"].double().abs().mul(expected.given["out"].double().abs()).sum(-1) + 1e-6
        wrong += worst_place("row_dot", row_dot, expected.given["row_dot"].double(), error)
        if int(counter[0]) != 0:
            wrong.append(f"tile_counter is {int(counter[0])} after the launch; the next launch needs 0")
    return Outcome(problem, symbol, report, tuple(wrong), tensors[names[0]], row_dot)


def _shares_weights(unit: Unit) -> bool:
    """Whether dS is made from P that another warp computed and rounded to the type."""
    if unit.row.operation != "attention_backward_dkv":
        return False
    return unit.row.block_n == 64 if unit.row.family == "sm90" else unit.row.options.get("roles") != 1


def _layout(name: str, problem: Problem) -> Layout:
    """dout is laid out unlike out wherever both are whole buffers: strides of one are not those of the other."""
    unlike = {Layout.BSHD: Layout.BHSD, Layout.BHSD: Layout.BSHD}
    return unlike.get(problem.layout, problem.layout) if name == "dout" else problem.layout


def _params(
    library: KernelLibrary,
    problem: Problem,
    tensors: dict[str, torch.Tensor],
    expected: Expected,
    row_dot: tuple[torch.Tensor, bool],
    counter: torch.Tensor,
) -> ctypes.Structure:
    """Maps everything and fills the kernel's parameters. What the kernel has no part in stays null."""
    shape = problem.shape
    outputs = ("dq", "dk", "dv")
    # The maps of a kernel name only its own gradients, but the host describes all tensors of its kind.
    placed = {
        name: place(library, tensor, _layout(name, problem), name, output=name in outputs)
        for name, tensor in tensors.items()
    }

    def add(tensor: torch.Tensor, name: str, *, writable: bool, initialised: bool = True) -> int:
        return library.add_buffer(
            tensor.data_ptr(), tensor.numel() * 4, writable=writable, initialised=initialised, name=name
        )

    dlse = expected.given.get("dlse")
    return BackwardParams(
        **{name: item.address for name, item in placed.items()},
        **{f"{name}_stride": Strides(*item.strides) for name, item in placed.items()},
        lse=add(expected.given["lse"], "lse", writable=False),
        dlse=0 if dlse is None else add(dlse, "dlse", writable=False),
        row_dot=add(row_dot[0], "row_dot", writable=row_dot[1], initialised=not row_dot[1]),
        tile_counter=add(counter, "tile_counter", writable=True) if problem.has_counter else 0,
        batch=shape.batch,
        heads_q=shape.heads_q,
        heads_kv=shape.heads_kv,
        seq_q=shape.seq_q,
        seq_k=shape.seq_k,
        head_dim=shape.head_dim,
        scale=problem.scale,
        scale_log2=problem.scale_log2,
    )
