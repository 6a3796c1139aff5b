"""The kernel that combines partial results, on the emulated machine, with partial results computed in fp64."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, preceding
from flashmoe_tools.operations.mla_decode.emulation.plan import Segment
from flashmoe_tools.operations.mla_decode.emulation.problem import (
    LOG2E,
    NAN,
    MlaProblem,
    Tensors,
    build,
    partial_results,
    plan,
    rows_of,
    values_of,
)
from flashmoe_tools.operations.mla_decode.problem import HEAD_DIM, LATENT_DIM
from flashmoe_tools.operations.mla_decode.reference import scores_of
from flashmoe_tools.tables import Unit

TILE_ROWS, BLOCK_KEYS = 16, 32  # of the decoding kernel that runs before it
COLUMN_UNITS = 32  # per 8 rows
BLOCKS_HELD = 2  # blocks per sequence, at most: each then processes several units


def problems(unit: Unit) -> Iterator[MlaProblem]:
    """Sequences split into many partials and into two, unsplit ones between them; rows without a key in any partial."""
    n = BLOCK_KEYS
    base = MlaProblem("combine", unit.dtype, (41 * n + 5, 3, 0, n, 4 * n), 3, parts=40)
    yield base
    # Exponents of the partials so far apart that only the largest of them is a usable reference.
    yield replace(base, name="warps share sums", warps_per_sum=8, magnitude=300.0, data_seed=1)
    yield replace(base, name="one pair of tiles, two warps", warps_per_sum=2, sum_pieces=1, heads=11)
    yield replace(
        base,
        name="tokens, sinks",
        tokens=7,
        keys=(3 * n + 1, 5 * n),
        parts=4,
        sum_pieces=1,
        has_sinks=True,
        data_seed=2,
    )
    yield replace(base, name="rows without keys", tokens=3, heads=9, keys=(2 * n, 1), parts=5, wants_lse=False)
    many = tuple(index % 4 * n for index in range(50))
    yield replace(base, name="many", keys=(*many, 5 * n), heads=1, parts=9)
    sequences = tuple(index % 5 * n for index in range(40))
    yield replace(base, name="fewer sequences than parts", keys=(*sequences, 6 * n), heads=2, parts=60)


def fill(tensors: Tensors, found: list[Segment], partial: dict[str, torch.Tensor]) -> None:
    """What the decoding kernel leaves: results of unsplit sequences, partial results of the others."""
    p = tensors.problem
    for segment in found:
        own = segment.sequence
        if segment.is_whole:
            tensors.out[own], tensors.lse[own] = (
                tensors.expected[own][0].to(tensors.out.dtype),
                tensors.expected[own][1],
            )
            continue
        q, values = tensors.q[own].double(), tensors.keys[own].double()
        scores = scores_of(q, values, HEAD_DIM**-0.5, is_causal=p.is_causal).flatten(0, 1)
        keys = slice(segment.begin * BLOCK_KEYS, segment.end * BLOCK_KEYS)
        exponents = scores[:, keys] * LOG2E
        shift = exponents.amax(-1)
        weights = torch.exp2(exponents - shift.nan_to_num(neginf=0.0)[:, None])
        out = weights @ values[keys, :LATENT_DIM]
        columns = rows_of(partial["out_partial"][segment.slot])
        columns.copy_(
            functional.pad(out.float(), (0, 0, 0, columns[..., 0, 0].numel() - p.rows), value=NAN).view_as(columns)
        )
        state = torch.stack((shift, weights.sum(-1)), -1)
        partial["state_partial"][segment.slot].flatten(0, 1)[: p.rows] = state.float()


def trial(unit: Unit, p: MlaProblem) -> Trial:
    tensors, found, partial = build(p), plan(p, BLOCK_KEYS), partial_results(p, TILE_ROWS)
    fill(tensors, found, partial)
    values = values_of(tensors, TILE_ROWS, BLOCK_KEYS, {})
    # The lengths were written before the decoding kernel; its results of unsplit sequences must not change.
    values["cache_seqlens"] = torch.tensor(p.keys, dtype=torch.int32)
    values |= {
        name: Buffer(getattr(tensors, name), writable=True) for name in ("out", "lse") if values[name] is not None
    }
    values |= {name: preceding(tensor) for name, tensor in partial.items()}
    sums = unit.row.block_m // p.warps_per_sum
    blocks = min(len(p.keys), p.parts) * min(BLOCKS_HELD, -(-p.rows // 8 * COLUMN_UNITS // (sums * p.sum_pieces)))
    return Trial([Launch(values, blocks)], tensors.disagreements, {"out": tensors.out, "lse": tensors.lse})


RUNNER = Runner(problems, trial)
