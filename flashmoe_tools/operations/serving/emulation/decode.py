"""The decoding kernels, which combine their splits themselves, on the emulated machine."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from flashmoe_build.emulation.runner import Launch, Runner, Trial, counter, output
from flashmoe_tools.operations.serving.emulation.cases import SMALLEST
from flashmoe_tools.operations.serving.emulation.forward import disagreements, values_of
from flashmoe_tools.operations.serving.emulation.problem import Keys, MaskTensor, Rows, VarlenProblem, adds_alibi
from flashmoe_tools.operations.serving.emulation.tensors import NAN, Tensors, build
from flashmoe_tools.tables import Unit

BLOCKS = 19  # grid size: shares end inside items and items inside shares; more than are summed at once
# The f16 kernel with the smallest head dim runs every problem; the others, which are the same source with other sizes
# or conversions, run some.
REDUCED = ("decode", "divided", "shared by all", "lowest mask")
MINIMAL = ("decode",)
MANY = 70  # sequences: more than twice the lanes of a warp


def problems(unit: Unit) -> Iterator[VarlenProblem]:
    """Shares that begin and end inside items; every layout of rows and keys; score options; unsplit items."""
    n, dim = unit.row.block_n, unit.row.axes["head_dim"]
    keys = (5 * n + 7, 3, 0, n, 2 * n + 1)
    base = VarlenProblem("decode", unit.dtype, (1,) * 5, keys, 8, 2, dim, dim, Rows.DENSE, Keys.PAGED, 16)
    base = replace(base, is_decoding=True, splits=32)
    one = replace(base, rows=(1,), heads_q=4, heads_kv=1)
    few = replace(base, name="ragged", rows=(3, 1, 0, 2), keys=(4 * n + 1, n + 2, 5, 1), heads_q=2, heads_kv=1)
    few = replace(few, rows_layout=Rows.RAGGED, keys_layout=Keys.RAGGED, page_size=0)
    many = tuple(index % 5 for index in range(MANY))
    every = (
        base,
        # One item for all blocks, with more splits than are summed at once and the maximum among the last ones; then at
        # most three splits of it.
        replace(one, name="shared by all", keys=(17 * n + 5,), data_seed=21),
        replace(one, name="three splits", keys=(9 * n + 5,), splits=3, has_counter=True),
        # Equal sequences without an array of lengths, enough to fill two rounds: items are not split.
        replace(one, name="equal", rows=(1,) * 27, keys=(n,) * 27, keys_layout=Keys.DENSE, page_size=0),
        # Shares that grow from 19 tiles to a third of an item: 6 items of 60 tiles for 19 blocks.
        replace(one, name="equal parts", rows=(1,) * 6, heads_q=2, keys=(60 * n,) * 6),
        replace(base, name="one split", splits=1),
        replace(base, name="odd pages", page_size=3, head_dim=dim // 2 + 8, head_dim_v=dim // 2 - 8),
        replace(base, name="window", left=n + 5, right=0, has_sinks=True, softcap=20.0, magnitude=3.0, page_size=48),
        replace(few, right=0, has_sinks=True, spare_keys=3),
        replace(few, name="ragged, one split", right=1, left=n, splits=1, wants_lse=False),
        # Seventeen rows of a group, or rows of one head: two items per head.
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
        replace(one, name="lowest mask", rows=(1, 1), keys=(n + 9, 3), keys_layout=Keys.DENSE, page_size=0),
        replace(
            few,
            name="many",
            rows=many,
            keys=(*(3 * rows for rows in many[:-1]), n + 9),
            right=0,
            heads_q=1,
            keys_layout=Keys.PAGED,
            page_size=16,
        ),
        # More blocks than are summed at once; the first of them also has the end of another item.
        replace(one, name="shared by most", rows=(1, 1), keys=(n, 35 * n - 3)),
        replace(few, name="no rows", rows=(0, 0, 0), keys=(n, 0, 5), slack=2),
        # The short sequences of a batch whose long ones are processed by a prefill kernel.
        replace(
            few, name="divided", rows=(3, 40, 0, 16, 17), keys=(n, 90, 5, 40, 2 * n), right=0, max_decode=16, splits=1
        ),
        # Unsplit items, and sequences without rows before those that a block finds.
        replace(few, name="many, one split", rows=many, keys=many, heads_q=1, splits=1),
        # Equal sequences without an array of lengths, split; with sinks, because sequences are ordered like heads. With
        # as many sequences as a warp has lanes, items would not be unsplit either.
        replace(
            one,
            name="equal, in parts",
            rows=(1,) * 2,
            heads_q=12,
            heads_kv=3,
            keys=(9 * n,) * 2,
            keys_layout=Keys.DENSE,
            page_size=0,
            has_sinks=True,
        ),
    )
    for seed, problem in enumerate(every):
        made = problem
        if problem.name == "additive mask":
            made = replace(problem, mask=MaskTensor.ADDITIVE, mask_broadcast=(False, True, True), spare_keys=5)
        if problem.name == "lowest mask":
            made = replace(problem, mask=MaskTensor.ADDITIVE, mask_broadcast=(False, True, False), spare_keys=5)
            made = replace(made, has_lowest=True, wants_lse=False)
        if adds_alibi(unit.row.options):
            if made.has_mask_tensor or made.name == "many":
                continue
            made = replace(made, mask=MaskTensor.ALIBI, mask_broadcast=(seed % 2 == 1, False, False))
        names = MINIMAL if unit.dtype == "bf16" and dim > SMALLEST else REDUCED
        if (unit.dtype == "f16" and dim == SMALLEST) or made.name in names:
            yield replace(made, data_seed=made.data_seed or seed)


def trial(unit: Unit, problem: VarlenProblem) -> Trial:
    return trial_on(unit, problem, build(problem))


def trial_on(unit: Unit, p: VarlenProblem, tensors: Tensors) -> Trial:
    """Runs on tensors that the caller may have changed, on a machine that holds ``BLOCKS`` blocks."""
    row = unit.row
    max_rows = p.max_rows * p.group
    items = math.ceil(max_rows / row.block_m) * p.heads_kv * len(p.rows)
    blocks = min(items * (1 if p.splits == 1 else math.ceil(p.max_keys / row.block_n) + 1), BLOCKS)
    slots = (2 * blocks, min(row.block_m, max_rows))
    lse = torch.full(tensors.statistics(p), NAN)
    partial = {"out_partial": (*slots, row.axes["head_dim"]), "lse_partial": (*slots, 2)} if p.splits > 1 else {}
    values = values_of(p, tensors, lse, tile_counter=counter(blocks) if p.has_counter else None)
    values |= {name: output(torch.full(size, NAN)) for name, size in partial.items()}
    results = {"out": tensors.out, "lse": lse}
    return Trial([Launch(values, blocks, max_blocks=BLOCKS)], lambda: disagreements(p, tensors, lse), results)


RUNNER = Runner(problems, trial)
