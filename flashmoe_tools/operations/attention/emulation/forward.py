"""The dense forward kernels on the emulated machine, with and without splits."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from flashmoe_build.emulation.compare import DTYPES
from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, counter, output
from flashmoe_tools.operations.attention.emulation import recurrence
from flashmoe_tools.operations.attention.emulation.problem import (
    Inputs,
    Layout,
    Problem,
    Shape,
    Values,
    custom,
    drawn_lengths,
    make_inputs,
    reference,
)
from flashmoe_tools.tables import Unit

NAN = float("nan")


def problems(unit: Unit) -> Iterator[Problem]:
    """The edges of the kernel's own tile, both masks, grouped heads, narrow head dims, every layout."""
    m, n, dim = unit.row.block_m, unit.row.block_n, unit.row.axes["head_dim"]
    narrow = dim // 2 + 8  # a multiple of 8 inside a 64-column segment; with 256 columns the last segment is outside
    splits = (3, 2) if unit.row.options.get("split") else (1,)
    sizes: tuple[tuple[int, int, int, int, int, int, Layout, Values], ...] = (
        # seq_q, seq_k, head dim, heads, key heads, batch, layout, values
        # One past a tile in both directions: shows an index inside the tile used in place of the problem's index.
        (m + 1, 2 * n + 1, dim, 2, 1, 1, Layout.BSHD, Values.SHIFTED),
        # Complete tiles, two batches; the log-sum-exp is not requested.
        (m, n, dim, 1, 1, 2, Layout.BHSD, Values.NORMAL),
        # A maximum that moves from tile to tile.
        (65, 3 * n + 7, dim, 1, 1, 1, Layout.ROWS, Values.RISING),
        # Fewer columns than the kernel has.
        (3, n + 3, narrow, 2, 2, 1, Layout.ROWS, Values.LARGE),
        # Fewer keys than rows: causal rows without a key.
        (m + 7, 5, dim, 1, 1, 1, Layout.BHSD, Values.NORMAL),
        # Decode with grouped heads, without a tile counter.
        (1, 2 * n - 1, dim, 4, 2, 2, Layout.BSHD, Values.OUTLIER),
        # Row and head offsets past 2^31 elements.
        (36, 40, dim, 2, 1, 1, Layout.FAR, Values.NORMAL),
        # Equal scores far from 0: if the maximum does not move, the old sums must not change.
        (20, 3 * n + 7, dim, 1, 1, 1, Layout.BHSD, Values.LEVEL),
        # NaN in the inputs, including the last key, which most causal rows do not see.
        (20, n + 9, dim, 2, 2, 1, Layout.BHSD, Values.NAN),
    )
    if splits == (1,):
        # A chunk of a longer sequence, with a tile whose rows see blocks that their neighbours do not.
        sizes += ((m + 9, m + 4 * n + 21, dim, 2, 1, 1, Layout.BHSD, Values.EXACT),)
    if unit.row.schedule == "persistent":
        sizes += (
            # Eight tiles for three blocks: every buffer is reused.
            (m * 3 + 70, n + 30, dim, 2, 1, 1, Layout.BHSD, Values.SHIFTED),
            # Causal: the first 64 rows of a tile see one key block, the others two; with two splits these rows see none
            # of one.
            (m, m + n - 64, dim, 6, 2, 1, Layout.BHSD, Values.SHIFTED),
        )
    sizes += ((*drawn_lengths(unit), dim, 1, 1, 1, Layout.BHSD, Values.NORMAL),)
    for causal in (mask == "causal" for mask in unit.row.words["mask"]):
        for index, (seq_q, seq_k, columns, heads, key_heads, batch, layout, values) in enumerate(sizes):
            problem = Problem(
                Shape(batch, heads, key_heads, seq_q, seq_k, columns),
                unit.dtype,
                causal,
                layout,
                values,
                index,
                splits[index % len(splits)],
            )
            yield replace(problem, wants_lse=index != 1, has_counter=index != 5)
        yield huge_problem(unit, causal=causal)


def huge_problem(unit: Unit, *, causal: bool) -> Problem:
    """2^26 heads of 40 rows: 2.7e9 rows of queries, which do not fit an int32.

    One tile per head; with splits, the second of two has the keys from block_n on.
    """
    keys = unit.row.block_n + 40
    shape = Shape(2**13, 2**13, 2**12, 40, keys, unit.row.axes["head_dim"])
    is_split = bool(unit.row.options.get("split")) or unit.row.operation == "attention_combine"
    return Problem(shape, unit.dtype, causal, values=Values.NORMAL, data_seed=9, splits=2 if is_split else 1, huge=True)


def trial(unit: Unit, problem: Problem) -> Trial:
    """Runs one problem; a split kernel's partial results are merged in fp64."""
    if problem.huge:
        return _huge_trial(unit, problem)
    shape, splits = problem.shape, problem.splits
    inputs = make_inputs(problem)
    tensors = {name: problem.laid_out(getattr(inputs, name)) for name in "qkv"}
    results = {"out": torch.full_like(tensors["q"], NAN), "lse": torch.full(problem.rows, NAN)}
    partial = {
        "out_partial": torch.full((splits, *problem.rows, shape.head_dim), NAN),
        "lse_partial": torch.full((splits, *problem.rows), NAN),
    }
    values = {
        **problem.sizes(),
        **{name: problem.placed(tensor) for name, tensor in tensors.items()},
        "out": problem.placed(results["out"], is_output=True),
        "lse": output(results["lse"]) if problem.wants_lse else None,
        **({name: output(tensor) for name, tensor in partial.items()} if splits > 1 else {}),
        "tile_counter": counter() if problem.has_counter else None,
        "num_splits": splits,
    }

    def check() -> list[str]:
        if splits > 1:
            for name, merged in merge(**partial).items():
                results[name] = merged
        found = reference(problem, inputs).disagreements(problem, results["out"], results["lse"])
        if problem.values is not Values.EXACT:
            return found
        return found + _other_bits(unit, problem, inputs, results)

    tiles = math.ceil(shape.seq_q / unit.row.block_m) * shape.heads_q * shape.batch * splits
    return Trial([Launch(values, tiles, (problem.mask,))], check, partial if splits > 1 else results)


def _other_bits(unit: Unit, problem: Problem, inputs: Inputs, results: Mapping[str, torch.Tensor]) -> list[str]:
    s, found = problem.shape, []
    seen = torch.ones(s.seq_q, s.seq_k).tril(s.seq_k - s.seq_q) if problem.causal else torch.ones(s.seq_q, s.seq_k)
    for batch, head in itertools.product(range(s.batch), range(s.heads_q)):
        keys = inputs.k[batch, head // (s.heads_q // s.heads_kv)]
        scores = (inputs.q[batch, head].float() @ keys.float().T).masked_fill(seen == 0, -torch.inf)
        name, own = f" of batch {batch}, head {head}", (results["out"][batch, head], results["lse"][batch, head])
        found += recurrence.disagreements(name, *own, scores, width=unit.row.block_n, scale_log2=problem.scale_log2)
    return found


def merge(out_partial: torch.Tensor, lse_partial: torch.Tensor) -> dict[str, torch.Tensor]:
    """Merges the splits' outputs and log-sum-exps in fp64. A split without keys (-inf) has weight 0."""
    lse = torch.logsumexp(lse_partial.double(), dim=0)
    weights = torch.exp(lse_partial.double() - lse.masked_fill(torch.isinf(lse), 0.0))[..., None]
    return {"out": (weights * out_partial.double()).sum(dim=0), "lse": lse}


def huge_sizes(problem: Problem) -> Mapping[str, Any]:
    """Sizes, and strides of contiguous tensors that are mostly unbacked address space."""
    s = problem.shape

    def strides(heads: int, rows: int) -> dict[str, int]:
        return {"batch": heads * rows * s.head_dim, "head": rows * s.head_dim, "row": s.head_dim}

    query, key = strides(s.heads_q, s.seq_q), strides(s.heads_kv, s.seq_k)
    named = {f"{name}_stride": query if name in ("q", "out") else key for name in ("q", "k", "v", "out")}
    return {**problem.sizes(), **named, "num_splits": problem.splits}


def _huge_trial(unit: Unit, problem: Problem) -> Trial:
    """Runs only the last head of the last batch, and its last split. An offset truncated to 32 bits is out of bounds."""
    s, is_split = problem.shape, problem.splits > 1
    whole = replace(problem, shape=replace(s, batch=1, heads_q=1, heads_kv=1), splits=1)
    inputs = make_inputs(whole)
    first_key = unit.row.block_n if is_split else 0
    own = replace(whole, shape=replace(whole.shape, seq_k=s.seq_k - first_key))
    rows, keys = s.batch * s.heads_q * s.seq_q, s.batch * s.heads_kv * s.seq_k
    out = torch.full(inputs.q.shape, NAN, dtype=torch.float32 if is_split else DTYPES[problem.dtype])
    lse = torch.full(inputs.q.shape[:3], NAN)
    copies = rows * (problem.splits if is_split else 1)
    results = {"out": output(out, end=copies * s.head_dim), "lse": output(lse, end=copies)}
    if is_split:  # it writes only partial results, but TMA needs an address for the output
        results = {f"{name}_partial": buffer for name, buffer in results.items()}
        results["out"] = output(torch.empty(0, 1, dtype=DTYPES[problem.dtype]), row_stride=rows * s.head_dim)
    values = {
        **huge_sizes(problem),
        "q": Buffer(inputs.q, end=rows * s.head_dim),
        "k": Buffer(inputs.k, end=keys * s.head_dim),
        "v": Buffer(inputs.v, end=keys * s.head_dim),
        **results,
    }
    given = Inputs(inputs.q, inputs.k[:, :, first_key:], inputs.v[:, :, first_key:])
    blocks = s.batch * s.heads_q * problem.splits
    return Trial(
        [Launch(values, blocks, (problem.mask,), only_block=blocks - 1)],
        lambda: reference(own, given).disagreements(own, out, lse),
        {"out": out, "lse": lse},
    )


RUNNER = Runner(problems, trial, custom)
