"""The backward kernels of ragged attention with score options on the emulated machine: dq, dk and dv, and fused.

Every row and key that belongs to no sequence is NaN, also in dout and the statistics; their gradients must be zero.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmoe_build.emulation.compare import UNIT_ROUNDOFF, Expected, touched, worst_element
from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, counter, output
from flashmoe_tools.operations.attention_backward.emulation.backward import shares_weights
from flashmoe_tools.operations.serving.emulation import bool_mask
from flashmoe_tools.operations.serving.emulation.forward import (
    score_options,
    sizes,
    strides,
    with_dropout,
    with_loadable_mask,
)
from flashmoe_tools.operations.serving.emulation.problem import SPARE_ROWS, UNBOUNDED, Keys, Rows, VarlenProblem
from flashmoe_tools.operations.serving.emulation.reference import attend
from flashmoe_tools.operations.serving.emulation.tensors import NAN, Tensors, build
from flashmoe_tools.operations.serving_backward.emulation.cases import DROPOUT_FUSED, FUSED, MASK_FUSED, problems
from flashmoe_tools.operations.serving_backward.emulation.fused import RaggedPartials
from flashmoe_tools.tables import Unit

CLEARING_SLOTS = 4  # kClearingSlots of attention/params/backward.h
RESULTS = {
    "attention_varlen_backward_dq": ("dq",),
    "attention_varlen_backward_dkv": ("dk", "dv"),
    "attention_dropout_backward_dq": ("dq",),
    "attention_dropout_backward_dkv": ("dk", "dv"),
    FUSED: ("dk", "dv"),  # plus the partials of dq
    DROPOUT_FUSED: ("dk", "dv"),
    MASK_FUSED: ("dk", "dv"),
}
# Error of a score per unit of its size. Turing's products sum 8 columns at a time and truncate.
SCORE_UNIT = {"sm90": 8e-7, "sm80": 8e-7, "sm75": 3e-6}


@dataclass(frozen=True)
class Inputs:
    """What the kernels read besides q, k and v, as stored; NaN for rows that belong to no sequence."""

    out: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None
    row_dot: torch.Tensor


def expect(
    p: VarlenProblem, tensors: Tensors, *, shares_weights: bool, score_unit: float
) -> tuple[Inputs, list[Expected]]:
    """The kernels' other inputs, and the gradients and row_dot of each sequence in fp64.

    Gradients are [heads, rows or keys, columns] and computed from the 16-bit tensors that the kernels read.
    """
    generator = torch.Generator().manual_seed(p.data_seed * 101 + 3)
    out = torch.full((*tensors.q.shape[:-1], p.head_dim_v), NAN, dtype=tensors.q.dtype)
    dout = torch.full_like(out, NAN)
    lse, dlse, row_dot = (torch.full(tensors.statistics(p), NAN) for _ in range(3))
    expected: list[Expected] = []
    views = zip(
        *(tensors.of_rows(p, tensor) for tensor in (out, dout)),
        *(tensors.of_statistic(p, tensor) for tensor in (lse, dlse, row_dot)),
        strict=True,
    )
    for sequence, (out_view, dout_view, lse_view, dlse_view, row_dot_view) in enumerate(views):
        dout_view.copy_(torch.randn(dout_view.shape, generator=generator))
        dlse_view.copy_(torch.randn(dlse_view.shape, generator=generator) if p.wants_lse else torch.zeros(()))
        scores, own_lse = attend(p, tensors, sequence)
        out_view.copy_((scores.weights * scores.factors) @ scores.v)
        lse_view.copy_(own_lse)
        products = dout_view.double() * out_view.double()
        dot = (products.sum(-1) - dlse_view.double()).masked_fill(torch.isinf(own_lse), 0.0)
        row_dot_view.copy_(dot)
        gradients = scores.gradients(
            *(dout_view.double(), dot, p.scale, p.heads_kv, p.dtype),
            score_unit=score_unit,
            shares_weights=shares_weights,
        )
        expected.append({**gradients, "row_dot": (dot, 1e-5 * products.abs().sum(-1) + 1e-5)})
    return Inputs(out, dout, lse, dlse if p.wants_lse else None, row_dot), expected


def blocks_of(p: VarlenProblem, unit: Unit) -> int:
    """Upper bound of the tiles of all heads, which the host computes without reading lengths."""
    if unit.row.operation.endswith("_backward_dq"):
        heads, block, is_dense, most = p.heads_q, unit.row.block_m, p.rows_layout is Rows.DENSE, p.max_rows
        total = sum(p.rows) + 2 * SPARE_ROWS
    else:
        heads, block, is_dense, most = p.heads_kv, unit.row.block_n, p.keys_layout is Keys.DENSE, p.max_keys
        total = max(1, sum(p.keys) + p.spare_keys * len(p.keys))
    of_longest = math.ceil(most / block) * len(p.rows)
    # Each sequence ends with at most one partial tile, and so do the two regions that belong to no sequence.
    tiles = of_longest if is_dense else math.ceil(total / block) + len(p.rows) + 2
    if not is_dense and unit.row.schedule != "persistent":
        tiles = min(tiles, of_longest + CLEARING_SLOTS)
    return tiles * heads


def trial(unit: Unit, problem: VarlenProblem) -> Trial:
    tensors = build(problem)
    if unit.row.operation == MASK_FUSED:
        tensors = with_loadable_mask(tensors, problem)
    score_unit = SCORE_UNIT[unit.row.family]
    given, expected = expect(problem, tensors, shares_weights=shares_weights(unit), score_unit=score_unit)
    return trial_on(unit, problem, tensors, given, expected)


def trial_on(unit: Unit, p: VarlenProblem, tensors: Tensors, given: Inputs, expected: list[Expected]) -> Trial:
    """Runs on tensors that the caller may have changed; results are NaN before."""
    like = {"dq": tensors.q, "dk": tensors.k, "dv": tensors.v}
    results = {name: torch.full_like(like[name], NAN) for name in RESULTS[unit.row.operation]}
    named = {"q": tensors.q, "k": tensors.k, "v": tensors.v, "out": given.out, "dout": given.dout, **results}
    own = {name: strides(p, t, is_query=name in ("q", "out", "dout", "dq")) for name, t in named.items()}
    if "dq" in results:
        results["row_dot"] = torch.full_like(given.row_dot, NAN)
    values: dict[str, Any] = {
        **sizes(p, tensors),
        **named,
        **{f"{name}_stride": stride for name, stride in own.items()},
        "lse": given.lse,
        "dlse": given.dlse,
        "row_dot": given.row_dot,
        **{name: output(tensor) for name, tensor in results.items()},
        "tile_counter": counter() if p.has_counter else None,
        "sequence_rows": {name: s["batch"] // s["row"] for name, s in own.items() if name != "out"},
    }
    partials = None
    if unit.row.operation in (FUSED, DROPOUT_FUSED, MASK_FUSED):
        partials = RaggedPartials.of(p, tensors, unit.row.axes["head_dim"])
        values |= {
            "dq": Buffer(partials.memory, writable=True, name="partials of dq"),
            "dq_stride": {"batch": 0, "head": 0, "row": 0},
        }

    scores = None
    visible = None
    if p.hides_blocks:
        mask = bool_mask.own_matrices(p, tensors)
        visible = bool_mask.visible_blocks(mask.isfinite())
        read = bool_mask.tile_ranges(visible).mT.repeat_interleave(bool_mask.TILE_BLOCKS, -1)
        poisoned = replace(tensors, mask=bool_mask.poisoned(mask, read))
        values["score_options"] = score_options(p, with_loadable_mask(poisoned, p))
    if unit.row.operation == MASK_FUSED:
        row = math.ceil(p.max_keys / 8) * 8
        if unit.row.options["gradient"]:
            scores = torch.full((len(p.rows), p.heads_q, p.max_rows, row), NAN, dtype=tensors.q.dtype)
            if p.right < UNBOUNDED or min(p.keys) < p.max_keys or p.hides_blocks:
                scores[..., : p.max_keys] = 0.0  # tiles may be skipped
        gradient = None if scores is None else output(scores)
        values = {
            "backward": values,
            "scores_gradient": gradient,
            "scores_gradient_row": row,
            "visible": bool_mask.tiles_member(visible),
        }

    def check() -> list[str]:
        wrong = [text for name, found in results.items() for text in disagreements(p, tensors, name, found, expected)]
        if scores is not None:
            wrong += _wrong_scores(p, tensors, given, unit, scores)
        return wrong if partials is None else wrong + _wrong_partials(p, partials, expected, visible)

    compared = results if scores is None else {**results, "scores": scores}
    return Trial([Launch(with_dropout(p, "backward", values), blocks_of(p, unit))], check, compared)


def score_gradient(
    p: VarlenProblem, tensors: Tensors, given: Inputs, sequence: int, unit: Unit
) -> tuple[torch.Tensor, torch.Tensor]:
    """dS and the bound of its error [heads, rows, keys]: as for other gradients, but without rounding to the type."""
    scores, _ = attend(p, tensors, sequence)
    dout, dot = given.dout[sequence].double(), given.row_dot[sequence].double()[..., None]
    d_weights = scores.factors * (dout @ scores.v.mT)
    reach = scores.factors * (dout.abs() @ scores.v.abs().mT) + dot.abs()
    exponent = 3e-5 + SCORE_UNIT[unit.row.family] * scores.magnitude
    return scores.weights * (d_weights - dot), scores.weights * exponent * reach


def _wrong_scores(p: VarlenProblem, tensors: Tensors, given: Inputs, unit: Unit, scores: torch.Tensor) -> Iterator[str]:
    """Checks dS [batch, heads, rows, keys and padding]."""
    for sequence, (rows, keys) in enumerate(zip(p.rows, p.keys, strict=True)):
        if keys == 0:
            continue
        value, bound = score_gradient(p, tensors, given, sequence, unit)
        own = scores[sequence, :, :rows, :keys]
        bound = bound + UNIT_ROUNDOFF[p.dtype] * value.abs() + 1e-6
        yield from worst_element(f"dS of sequence {sequence}", own, value, bound)
    yield from touched("what is behind the keys of dS", scores[..., p.max_keys :], NAN)


def _wrong_partials(
    p: VarlenProblem, partials: RaggedPartials, expected: list[Expected], visible: torch.Tensor | None
) -> list[str]:
    found: list[str] = []
    ranks = partials.expected_ranks(p)
    if visible is not None:
        inside = bool_mask.tile_ranges(visible).sum(-2, dtype=torch.int32)  # [batch, heads, row blocks]
        ranks = inside.expand(len(p.rows), p.heads_q, -1).transpose(0, 1).flatten(1)
    for sequence, own in enumerate(expected):
        dq = p.scale / (1.0 - p.dropout_p) * partials.rows_of(p, sequence)
        if dq.numel() > 0:
            found += worst_element(f"partials of sequence {sequence}", dq, *own["dq"])
    if not partials.all.ranks.eq(ranks).all():
        found.append("some tile that the rows of a partial see has not added to it, or another one has")
    return found


def disagreements(
    p: VarlenProblem, tensors: Tensors, name: str, result: torch.Tensor, expected: Sequence[Expected]
) -> list[str]:
    """What is wrong with a gradient or row_dot; rows and keys that belong to no sequence must be zero."""
    views = {"row_dot": tensors.of_statistic, "dq": tensors.of_rows}.get(name, tensors.of_keys)
    rest = result.clone()
    found: list[str] = []
    for sequence, (own, other) in enumerate(zip(views(p, result), views(p, rest), strict=True)):
        if own.numel() > 0:
            found += worst_element(f"{name} of sequence {sequence}", own, *expected[sequence][name])
        other.zero_()
    return found + touched(f"{name}, where no sequence is and zeros must be,", rest, 0.0)


RUNNER = Runner(problems, trial)
