"""The two kernels that decode with the bits of a prefill, on the emulated machine: scores, then softmax and values.

Each is checked against fp64 and, for integers, against the recurrence that every prefill kernel matches bit for bit. So
together they give a prefill's bits.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from flashmoe_build.emulation.compare import worst_element
from flashmoe_build.emulation.runner import Launch, Runner, Trial, output, preceding
from flashmoe_tools.operations.attention.reference import ScoreOptions
from flashmoe_tools.operations.serving.emulation.cases import SMALLEST
from flashmoe_tools.operations.serving.emulation.decode import BLOCKS
from flashmoe_tools.operations.serving.emulation.forward import disagreements, other_bits, values_of
from flashmoe_tools.operations.serving.emulation.problem import UNBOUNDED, Keys, Rows, VarlenProblem
from flashmoe_tools.operations.serving.emulation.tensors import NAN, Tensors, build
from flashmoe_tools.tables import Unit

GROUP = 16  # keys per product
COLUMNS = 32  # columns per block of the second kernel
# Of a group's keys: four for each lane of a quad
ORDER = [8 * (i // 2) + 2 * t + i % 2 for t in range(4) for i in range(4)]
SPLITS = 1 << 20  # what the host passes to the first kernel: the smallest possible shares
REDUCED = ("exact", "exact, ragged")
ERROR = 1e-5  # error of a score in fp32, relative to the sum of its terms' magnitudes


def problems(unit: Unit) -> Iterator[VarlenProblem]:
    """Shares inside items, reused rings; every layout; windows that skip the first block; rows without keys."""
    n, stages, dim = unit.row.block_n, unit.row.stages, unit.row.axes["head_dim"]
    keys = ((stages + 2) * n + 7, 3, 0, n, 2 * n + 1)
    base = VarlenProblem("decode", unit.dtype, (1,) * 5, keys, 8, 2, dim, dim, Rows.DENSE, Keys.PAGED, 16)
    base = replace(base, is_decoding=True, is_consistent=True, splits=SPLITS)
    ragged = replace(base, name="ragged", rows=(3, 1, 0, 7), keys=(4 * n + 1, n + 2, 5, 2), heads_q=2, heads_kv=1)
    ragged = replace(ragged, rows_layout=Rows.RAGGED, keys_layout=Keys.RAGGED, page_size=0, right=0)
    one = replace(base, rows=(1,), keys=(9 * n + 5,), heads_q=8, heads_kv=1)
    every = (
        base,
        ragged,
        replace(base, name="exact", is_exact=True, has_sinks=True),
        replace(one, name="exact, one", is_exact=True, heads_q=3),
        replace(ragged, name="exact, ragged", is_exact=True, spare_keys=3),
        replace(base, name="exact window", is_exact=True, left=2 * n + 3, right=0, page_size=3, wants_lse=True),
        replace(base, name="odd pages", page_size=24, head_dim=dim // 2 + 8, head_dim_v=dim // 2 - 8, wants_lse=False),
        replace(
            one, name="equal", rows=(1,) * 3, keys=(2 * n,) * 3, keys_layout=Keys.DENSE, page_size=0, has_sinks=True
        ),
        # A partial second slice of the values' columns.
        replace(ragged, name="rows", rows=(18, 5), keys=(2 * n + 7, n), left=3 * n // 2, head_dim_v=dim // 2 + 8),
        # Keys whose weight is more than 16 bits below another's.
        replace(one, name="far scores", heads_q=3, magnitude=30.0),
        replace(ragged, name="no rows", rows=(0, 0), keys=(n, 3), slack=2),
    )
    for seed, problem in enumerate(every):
        if (unit.dtype == "f16" and dim == SMALLEST) or problem.name in REDUCED:
            yield replace(problem, data_seed=seed)


def _exact_scores(p: VarlenProblem, tensors: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(scores, sums of their terms' magnitudes) per sequence, float32 [key heads, rows, keys].

    The heads of a position are adjacent rows.
    """
    left, right = (-1 if side == UNBOUNDED else side for side in (p.left, p.right))
    found = []
    for q, k, _ in tensors.sequences:
        own = k.repeat_interleave(p.group, dim=0).double().mT
        hidden = ScoreOptions(window=(left, right)).hidden(q.shape[1], k.shape[1], q.device)
        both = [(q.double() @ own), (q.double().abs() @ own.abs())]
        if hidden is not None:
            both = [one.masked_fill(hidden, -torch.inf) for one in both]
        rows = [one.unflatten(0, (p.heads_kv, p.group)).transpose(1, 2).flatten(1, 2).float() for one in both]
        found.append((rows[0], rows[1]))
    return found


def _memory(unit: Unit, p: VarlenProblem) -> torch.Tensor:
    """[sequences, key heads, row blocks, groups of keys, rows, 16]"""
    rows, width = unit.row.block_m, unit.row.block_n
    max_rows = p.max_rows * p.group
    groups = math.ceil(p.max_keys / width) * width // GROUP
    sizes = (len(p.rows), p.heads_kv, math.ceil(max_rows / rows), groups, min(rows, max_rows), GROUP)
    return torch.full(sizes, NAN)


def _blocks(unit: Unit, scores: torch.Tensor) -> tuple[int, int]:
    """The key range of the blocks that some row sees."""
    width = unit.row.block_n
    seen = (~torch.isneginf(scores)).any(0).any(0).nonzero()
    if len(seen) == 0:
        return 0, 0
    return int(seen[0]) // width * width, (int(seen[-1]) // width + 1) * width


def _lay_out(unit: Unit, scores: torch.Tensor, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(row block, [heads, groups, rows, 16]) of scores [heads, rows, keys], padded with -inf up to ``end``."""
    whole = torch.full((*scores.shape[:2], end), -torch.inf)
    whole[..., : min(end, scores.shape[2])] = scores[..., :end]
    grouped = whole.unflatten(2, (-1, GROUP))[..., ORDER].transpose(1, 2)
    for block in range(math.ceil(scores.shape[1] / unit.row.block_m)):
        yield block, grouped[:, :, block * unit.row.block_m : (block + 1) * unit.row.block_m]


def score_trial(unit: Unit, p: VarlenProblem) -> Trial:
    return score_trial_on(unit, p, build(p))


def score_trial_on(unit: Unit, p: VarlenProblem, tensors: Tensors) -> Trial:
    memory = _memory(unit, p)
    values = values_of(p, tensors, torch.zeros(1), out_partial=output(memory))
    values |= {"out": None, "lse": None}
    items = memory.shape[0] * memory.shape[1] * memory.shape[2]
    blocks = min(items * (math.ceil(p.max_keys / unit.row.block_n) + 1), BLOCKS)

    def check() -> list[str]:
        found = []
        for sequence, (scores, sizes) in enumerate(_exact_scores(p, tensors)):
            first, end = _blocks(unit, scores)
            pairs = zip(_lay_out(unit, scores, end), _lay_out(unit, sizes, end), strict=True)
            for (row_block, expected), (_, bound) in pairs:
                own = memory[sequence, :, row_block, first // GROUP : end // GROUP, : expected.shape[2]]
                expected, bound = expected[:, first // GROUP :], bound[:, first // GROUP :]
                name = f"scores of sequence {sequence}, row block {row_block}"
                hidden = torch.isneginf(expected)
                if not hidden.equal(torch.isneginf(own)):
                    found.append(f"{name}: other keys are hidden")
                error = 0.0 if p.is_exact else ERROR
                finite = expected.masked_fill(hidden, 0.0).double()
                found += worst_element(
                    name, own.masked_fill(hidden, 0.0), finite, bound.masked_fill(hidden, 0.0).double() * error
                )
        return found

    return Trial([Launch(values, blocks, max_blocks=BLOCKS)], check, {"scores": memory})


def value_trial(unit: Unit, p: VarlenProblem) -> Trial:
    tensors = build(p)
    memory = _memory(unit, p)
    for sequence, (scores, _) in enumerate(_exact_scores(p, tensors)):
        first, end = _blocks(unit, scores)
        end = max(end, unit.row.block_n) if p.rows[sequence] else end
        for row_block, laid in _lay_out(unit, scores, end):
            memory[sequence, :, row_block, first // GROUP : end // GROUP, : laid.shape[2]] = laid[:, first // GROUP :]
    return value_trial_on(unit, p, tensors, memory)


def value_trial_on(unit: Unit, p: VarlenProblem, tensors: Tensors, memory: torch.Tensor) -> Trial:
    """Runs on the scores in ``memory``."""
    lse = torch.full(tensors.statistics(p), NAN)
    values = values_of(p, tensors, lse, out_partial=preceding(memory))
    slices = unit.row.axes["head_dim"] // COLUMNS
    blocks = memory.shape[0] * memory.shape[1] * memory.shape[2] * slices

    def check() -> list[str]:
        return disagreements(p, tensors, lse) + (other_bits(unit, p, tensors, lse) if p.is_exact else [])

    return Trial([Launch(values, blocks)], check, {"out": tensors.out, "lse": lse})


SCORES = Runner(problems, score_trial)
VALUES = Runner(problems, value_trial)
