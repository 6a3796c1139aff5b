"""The decoding kernels on the emulated machine; partial results of split sequences are combined here, in fp64."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from flashmoe_build.emulation.runner import Launch, Runner, Trial
from flashmoe_tools.operations.mla_decode.emulation.plan import Segment
from flashmoe_tools.operations.mla_decode.emulation.problem import (
    MlaProblem,
    Tensors,
    build,
    partial_results,
    plan,
    rows_of,
    values_of,
)
from flashmoe_tools.operations.mla_decode.problem import LATENT_DIM
from flashmoe_tools.tables import Unit


def few_rows(unit: Unit) -> Iterator[MlaProblem]:
    """The same problems with at most the rows of one tile, or of two where the kernel has two."""
    most = 32 if unit.row.block_m == 16 else unit.row.block_m
    for problem in problems(unit):
        tokens = min(problem.tokens, unit.row.block_m // 3)
        yield replace(problem, tokens=tokens, heads=min(problem.heads, most // tokens))


def problems(unit: Unit) -> Iterator[MlaProblem]:
    """Splits that begin and end inside sequences; length 0; rows without a key; page sizes with different TMA boxes."""
    m, n = unit.row.block_m, unit.row.block_n
    has_codes = bool(unit.row.options.get("codes"))
    base = MlaProblem("decode", unit.dtype, (3 * n + 7, 3, 0, n, 2 * n + 1), min(m, 16), has_codes=has_codes)
    if unit.row.options.get("sparse"):
        yield from _sparse(unit, replace(base, is_causal=False, topk=3 * n + 11))
        return
    yield base
    yield replace(base, name="tokens, sinks", heads=6, tokens=m // 6 + 1, has_sinks=True, page_size=32, data_seed=1)
    if unit.dtype == "bf16":
        return
    yield replace(base, name="dense", page_size=0, heads=m + 3, keys=(2 * n + 5, n - 1), parts=3, wants_lse=False)
    yield replace(base, name="one split", num_splits=1, page_size=48, is_causal=False, tokens=2, heads=5)
    yield replace(base, name="large pages", page_size=2 * n, keys=(5 * n + 1,), heads=1, parts=2, magnitude=6.0)
    if has_codes:
        yield replace(base, name="keys apart", spare=16, keys=(2 * n + 21, n - 1), parts=3)
    yield replace(base, name="few keys", keys=(1, 2, 3), tokens=3, heads=3, parts=2, has_sinks=True)
    many = tuple(index % 3 * n for index in range(37))
    yield replace(base, name="many", keys=(*many, 3 * n), heads=2, parts=5, data_seed=3)
    yield replace(base, name="equal", keys=(2 * n,) * 4, heads=3, parts=2)
    yield replace(base, name="cut alike", keys=(5 * n, 5 * n - 3), heads=3, parts=4)
    yield replace(base, name="cut alike, three splits", keys=(8 * n,) * 2, heads=3, parts=8, num_splits=3)
    yield replace(base, name="three splits", keys=(9 * n, n), heads=3, parts=9, num_splits=3)
    yield replace(base, name="long shares", keys=(4 * n + 3, 9), heads=2, parts=6, least_share=3)


def _sparse(unit: Unit, base: MlaProblem) -> Iterator[MlaProblem]:
    """Blocks whose keys are partly or all absent; tokens without any key; few indices; a split that ends inside a token."""
    m, n = unit.row.block_m, unit.row.block_n
    yield base
    yield replace(base, name="sinks", heads=m + 3, keys=(5, 0, 2 * n), has_sinks=True, page_size=32, data_seed=1)
    if unit.dtype == "bf16":
        return
    yield replace(base, name="dense", page_size=0, heads=3, keys=(2 * n + 5, n - 1), parts=3, wants_lse=False)
    yield replace(base, name="one split", num_splits=1, page_size=48, heads=5, keys=(2 * n, n, 3), topk=2 * n)
    yield replace(base, name="few indices", keys=(1, 2, 0), heads=3, parts=2, topk=3, has_sinks=True)
    yield replace(base, name="many", keys=tuple(index % 3 for index in range(37)), heads=2, parts=5, topk=n + 1)


def combine(tensors: Tensors, found: list[Segment], partial: dict[str, torch.Tensor]) -> None:
    """Combines the partial results of split sequences into their output."""
    p = tensors.problem
    for sequence in {segment.sequence for segment in found if not segment.is_whole}:
        own = [segment.slot for segment in found if segment.sequence == sequence]
        rows = partial["state_partial"][own].flatten(1, 2)[:, : p.rows].double()
        shift, sums = rows[..., 0], rows[..., 1]
        largest = shift.amax(0)
        weights = torch.where(largest.isneginf(), 0.0, torch.exp2(shift - largest)) * (shift > -torch.inf)
        sums = torch.where(shift > -torch.inf, sums, 0.0)
        columns = rows_of(partial["out_partial"][own]).reshape(len(own), -1, LATENT_DIM)[:, : p.rows]
        out = (weights[..., None] * columns.double()).sum(0)
        total, top = (weights * sums).sum(0), largest * math.log(2)
        if tensors.sinks is not None:
            sinks = tensors.sinks.double().repeat(p.tokens)
            highest = torch.maximum(top, sinks)
            scale = torch.exp(top - highest)
            out, total, top = out * scale[:, None], total * scale + torch.exp(sinks - highest), highest
        finished = torch.where(total[:, None] > 0, out / total[:, None], 0.0)
        tensors.out[sequence] = finished.view(p.tokens, p.heads, -1).to(tensors.out.dtype)
        tensors.lse[sequence] = (top + total.log()).view(p.tokens, p.heads).mT.float()


def trial(unit: Unit, p: MlaProblem) -> Trial:
    return trial_on(unit, build(p))


def trial_on(unit: Unit, tensors: Tensors) -> Trial:
    p, row = tensors.problem, unit.row
    found, partial = plan(p, row.block_n), partial_results(p, row.block_m)
    values = values_of(tensors, row.block_m, row.block_n, partial)

    def check() -> list[str]:
        combine(tensors, found, partial)
        return tensors.disagreements()

    blocks = values["num_sm_parts"] * values["row_tiles"]
    return Trial([Launch(values, blocks)], check, {"out": tensors.out, "lse": tensors.lse})


RUNNER = Runner(problems, trial)
FEW_ROWS = Runner(few_rows, trial)
