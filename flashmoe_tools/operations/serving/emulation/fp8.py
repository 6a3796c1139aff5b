"""The forward kernels of ragged 8-bit float batches on the emulated machine."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmoe_build.emulation.compare import UNIT_ROUNDOFF, touched, worst_element
from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, counter
from flashmoe_tools.operations.attention.e4m3 import BLOCK, E4M3, Codes, Expected, attend
from flashmoe_tools.operations.attention.emulation.e4m3 import NAN_CODE, transposed
from flashmoe_tools.operations.serving.emulation.forward import row_blocks, values_of
from flashmoe_tools.operations.serving.emulation.problem import VarlenProblem
from flashmoe_tools.operations.serving.emulation.tensors import NAN, Tensors, build
from flashmoe_tools.tables import Unit

FACTOR = 2.0  # constant factor next to scales in memory


@dataclass(frozen=True)
class Fp8Problem(VarlenProblem):
    """``scales``: number of dimensions of the scales in memory."""

    scales: int = 0


def problems(unit: Unit) -> Iterator[Fp8Problem]:
    """What the dense kernels do not cover: lengths, offsets, per-sequence scales, tiles shared by heads."""
    m, n, dim = unit.row.block_m, unit.row.block_n, unit.row.axes["head_dim"]

    def problem(name: str, rows: tuple[int, ...], keys: tuple[int, ...], **more: Any) -> Fp8Problem:
        return Fp8Problem(
            name, unit.dtype, rows, keys, **{"heads_q": 2, "heads_kv": 1, "head_dim": dim, "head_dim_v": dim, **more}
        )

    # Sequences without rows, without keys, with fewer keys than rows (rows that see none), one past a tile both ways.
    yield problem("ragged", (m + 1, 0, 5, 9, 3), (2 * n + 1, n, 0, 4, 7), right=0, scales=2)
    # No mask; fewer columns than the kernel's, another number for values; bounds that exceed the sequences.
    narrow = {"head_dim": dim // 2 + 16, "head_dim_v": dim // 2 - 16}
    yield problem("full", (7, m, 0), (n + 3, 2 * n, 0), heads_q=3, heads_kv=3, slack=70, wants_lse=False, **narrow)
    # Complete blocks, after which the next sequence's block begins one later; fewer used keys than room.
    yield problem("whole blocks", (m - 5, 3, 2), (2 * n, n, n), right=0, scales=1, has_counter=False)
    yield problem("used keys", (m - 64, 9), (3 * n + 9, n - 5), spare_keys=7, scales=2, heads_q=4, heads_kv=2)
    if unit.dtype == "bf16":
        return
    # Every pipeline stage is reused within a tile.
    yield problem("long", (m + 9,), (m + 9 * n + 21,), right=0, heads_q=1)
    # More sequences than a warp has lanes.
    lengths = tuple(index % 3 for index in range(70))
    yield problem("many", (*lengths, m + 5), (*lengths, 9), right=0, heads_q=1, scales=2)
    # Query heads that share keys share a tile.
    yield problem("shared tiles", (9, m // 2, 0, 64, 1), (n + 5, 2 * n + 1, 4, 0, n), right=0, heads_q=10, scales=2)


def _scale(p: Fp8Problem, heads: int, generator: torch.Generator) -> torch.Tensor:
    """[sequences, heads]"""
    sizes = {0: (1, 1), 1: (1, heads), 2: (len(p.rows), heads)}[p.scales]
    return (torch.rand(sizes, generator=generator) + 0.5).expand(len(p.rows), heads)


def scale_struct(p: Fp8Problem, scale: torch.Tensor) -> dict[str, Any]:
    """BlockScale."""
    if p.scales == 0:
        return {"factor": float(scale[0, 0])}
    values = scale.contiguous() / FACTOR
    return {"values": values, "stride": scale.shape[1] if p.scales == 2 else 0, "head_stride": 1, "factor": FACTOR}


def values_in_blocks(p: Fp8Problem, tensors: Tensors, v: torch.Tensor, rows: int) -> torch.Tensor:
    """V as the preceding kernel leaves it, but with NaN in blocks of no sequence: [key heads, blocks, rows, 128]."""
    assert tensors.cu_seqlens_k is not None
    blocks = torch.full((p.heads_kv, v.shape[0] // BLOCK + len(p.rows), rows, BLOCK), NAN_CODE, dtype=torch.uint8)
    for sequence, (own, first) in enumerate(zip(tensors.of_keys(p, v), tensors.cu_seqlens_k.tolist(), strict=False)):
        of_sequence = transposed(own[None], rows, at_least=1)[0].view(torch.uint8)
        begin = first // BLOCK + sequence
        blocks[:, begin : begin + of_sequence.shape[1]] = of_sequence
    return blocks.view(E4M3)


def trial(unit: Unit, p: Fp8Problem) -> Trial:
    generator = torch.Generator().manual_seed(p.data_seed * 31 + 5)
    tensors = build(p)
    q, k, v = (tensor.float().to(E4M3) for tensor in (tensors.q, tensors.k, tensors.v))
    scales = [_scale(p, heads, generator) for heads in (p.heads_q, p.heads_kv, p.heads_kv)]
    rows = unit.row.axes["head_dim"]
    blocks = values_in_blocks(p, tensors, v, rows)
    coded = replace(tensors, q=q, k=k, v=v)
    lse = torch.full(tensors.statistics(p), NAN)
    forward = values_of(p, coded, lse, tile_counter=counter() if p.has_counter else None)
    forward["v"] = Buffer(blocks, is_from_preceding_grid=True)
    forward["v_stride"] = {"batch": 0, "head": 0, "row": 0}
    values = {
        "forward": forward,
        **{f"{name}_scale": scale_struct(p, scale) for name, scale in zip("qkv", scales, strict=True)},
        "value_blocks": blocks.shape[1],
        "value_rows": rows,
    }

    def expected(sequence: int) -> Expected:
        if p.keys[sequence] == 0:
            lse = torch.full((1, p.heads_q, p.rows[sequence]), -torch.inf, dtype=torch.double)
            nothing = torch.zeros(*lse.shape, p.head_dim_v, dtype=torch.double)
            return Expected(nothing, nothing, lse, torch.zeros_like(lse))
        of = (coded.of_rows(p, q), coded.of_keys(p, k), coded.of_keys(p, v))
        own_q, own_k, own_v = (
            Codes(one[sequence][None], scale[sequence : sequence + 1]) for one, scale in zip(of, scales, strict=True)
        )
        return attend(own_q, own_k, own_v, p.scale, causal=p.right == 0, roundoff=UNIT_ROUNDOFF[p.dtype])

    def check() -> list[str]:
        found: list[str] = []
        views = zip(tensors.of_rows(p, tensors.out), tensors.of_statistic(p, lse), strict=True)
        for sequence, (out, own_lse) in enumerate(views):
            if p.rows[sequence] == 0:
                continue
            wanted = expected(sequence)
            found += worst_element(f"out of sequence {sequence}", out, wanted.out[0], wanted.out_bound[0])
            if p.wants_lse:
                found += worst_element(f"lse of sequence {sequence}", own_lse, wanted.lse[0], wanted.lse_bound[0])
        cu = tensors.cu_seqlens_q
        assert cu is not None
        beside = torch.cat([tensors.out[: int(cu[0])], tensors.out[int(cu[-1]) :]])
        return found + touched("the rows of out that belong to a sequence", beside, NAN)

    tiles = row_blocks(p, unit.row.block_m) * p.heads_q
    return Trial([Launch(values, tiles)], check, {"out": tensors.out, "lse": lse})


RUNNER = Runner(problems, trial)
