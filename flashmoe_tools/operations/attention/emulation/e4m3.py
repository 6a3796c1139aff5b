"""The 8-bit float attention kernels on the emulated machine: V's transpose, and the forward pass that reads it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmoe_build.emulation.compare import DTYPES, UNIT_ROUNDOFF, different, worst_element
from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, counter, output
from flashmoe_tools.operations.attention.e4m3 import BLOCK, E4M3, Codes, attend
from flashmoe_tools.operations.attention.emulation.problem import (
    Layout,
    Problem,
    Shape,
    Values,
    drawn_lengths,
    make_inputs,
)
from flashmoe_tools.tables import Unit

NAN = float("nan")
NAN_CODE = 0x7F


@dataclass(frozen=True)
class E4m3Problem(Problem):
    """A dense problem in 8-bit floats.

    ``scales``: number of dimensions of the scales in memory; 3 means one per block of ``block_rows``.
    ``has_every_code``: all three tensors hold every code except NaN. ``has_nan_scale``: the scale of the last block of
    keys is NaN.
    """

    scales: int = 0
    block_rows: int = BLOCK
    has_every_code: bool = False
    has_nan_scale: bool = False

    @property
    def name(self) -> str:
        scales = f"{self.scales}" if self.scales < 3 else f"-of-{self.block_rows}"
        words = ("-codes" if self.has_every_code else "") + ("-nan" if self.has_nan_scale else "")
        return f"{super().name}-scales{scales}{words}"

    @property
    def command_words(self) -> str:
        return f"--mask {self.mask} --problem {self.name}"


def problems(unit: Unit) -> Iterator[E4m3Problem]:
    """The edges of the tile, both masks, grouped heads, narrow head dims, every layout, every kind of scale."""
    m, n, dim = unit.row.block_m, unit.row.block_n, unit.row.axes["head_dim"]
    sizes: tuple[tuple[int, int, int, int, int, int, Layout, Values, int], ...] = (
        # seq_q, seq_k, head dim, heads, key heads, batch, layout, values, dimensions of the scales
        (m + 1, 2 * n + 1, dim, 2, 1, 1, Layout.BSHD, Values.SHIFTED, 1),
        (m, n, dim, 2, 1, 2, Layout.BHSD, Values.NORMAL, 2),
        (65, 3 * n + 7, dim, 1, 1, 1, Layout.BHSD, Values.RISING, 0),
        (3, n + 3, dim // 2 + 16, 2, 2, 1, Layout.BHSD, Values.LARGE, 1),
        (m + 7, 5, dim, 1, 1, 1, Layout.BHSD, Values.NORMAL, 0),
        (1, 2 * n - 1, dim, 4, 2, 2, Layout.BSHD, Values.OUTLIER, 2),
        (20, n + 9, dim, 2, 2, 1, Layout.BHSD, Values.NAN, 1),
        (m * 3 + 70, n + 30, dim, 2, 1, 1, Layout.BHSD, Values.SHIFTED, 0),
        (m, m + n - 64, dim, 6, 2, 1, Layout.BHSD, Values.SHIFTED, 1),
        # Every pipeline stage is reused within a tile.
        (m + 9, m + 9 * n + 21, dim, 2, 1, 1, Layout.BHSD, Values.SHIFTED, 0),
        (*drawn_lengths(unit), dim, 1, 1, 1, Layout.BHSD, Values.NORMAL, 0),
    )
    if unit.row.options["block_scales"]:  # the rest is the same as in the kernel without them
        sizes = sizes[:2]
    for causal in (mask == "causal" for mask in unit.row.words["mask"]):
        for index, (seq_q, seq_k, columns, heads, key_heads, batch, layout, values, scales) in enumerate(sizes):
            shape = Shape(batch, heads, key_heads, seq_q, seq_k, columns)
            problem = E4m3Problem(shape, unit.dtype, causal, layout, values, index, scales=scales)
            yield replace(problem, wants_lse=index != 1, has_counter=index != 5)
        shape = Shape(1, 1, 1, 40, 2 * n, dim)
        yield E4m3Problem(shape, unit.dtype, causal, data_seed=20, has_every_code=True)
        if not unit.row.options["block_scales"]:
            continue
        for block_rows, seq_q, seq_k in (
            (BLOCK, m + 70, 3 * n + 7),
            (BLOCK // 2, 100, 2 * n + 70),
            (BLOCK // 2, m, n + 40),
        ):
            shape = Shape(2, 2, 1, seq_q, seq_k, dim)
            yield E4m3Problem(shape, unit.dtype, causal, data_seed=21, scales=3, block_rows=block_rows)
        # More blocks than the lanes hold scales for; and, with a causal mask, rows that do not see the NaN.
        shape = Shape(1, 1, 1, 40, 17 * n + 70, dim)
        yield E4m3Problem(shape, unit.dtype, causal, data_seed=22, scales=3, block_rows=BLOCK // 2)
        shape = Shape(1, 1, 1, 2 * n, 2 * n, dim)
        yield E4m3Problem(shape, unit.dtype, causal, data_seed=23, scales=3, has_nan_scale=True)


def quantize(p: E4m3Problem, tensor: torch.Tensor, generator: torch.Generator, block_rows: int = BLOCK) -> Codes:
    codes = tensor.to(E4M3)
    if p.has_every_code:
        drawn = torch.randint(0, 256, codes.shape, generator=generator, dtype=torch.uint8)
        codes = torch.where((drawn & NAN_CODE) == NAN_CODE, 0, drawn).view(E4M3)
    batch, heads, rows = codes.shape[:3]
    if p.scales == 3:
        blocks = torch.rand(batch, heads, -(-rows // block_rows), generator=generator) * 2 + 0.1
        return Codes(codes, blocks.repeat_interleave(block_rows, dim=2)[..., :rows])
    sizes = {0: (1, 1), 1: (1, heads), 2: (batch, heads)}[p.scales]
    return Codes(codes, (torch.rand(sizes, generator=generator) + 0.5).expand(batch, heads))


def scale_struct(p: E4m3Problem, scale: torch.Tensor, block_rows: int) -> dict[str, Any]:
    """The members of BlockScale."""
    if p.scales == 3:
        values = scale[..., ::block_rows].contiguous() / 2.0
        strides = dict(zip(("stride", "head_stride", "block_stride"), values.stride(), strict=True))
        return {"values": values, **strides, "block_shift": block_rows.bit_length() - 1, "factor": 2.0}
    if p.scales == 0:
        return {"factor": float(scale[0, 0])}
    values = scale.contiguous() / 2.0
    return {"values": values, "stride": values.stride(0) if p.scales == 2 else 0, "head_stride": 1, "factor": 2.0}


def transposed(v: torch.Tensor, rows: int, at_least: int = 0) -> torch.Tensor:
    """V as the forward kernel reads it: [batch, heads, blocks, rows, 128 keys], keys ordered as in transpose.cuh."""
    batch, heads, keys, columns = v.shape
    blocks = max(at_least, -(-keys // BLOCK))
    whole = torch.zeros(batch, heads, blocks * BLOCK, rows, dtype=torch.uint8)
    whole[:, :, :keys, :columns] = v.view(torch.uint8)
    h, u, t, c = 2, 2, 4, 2  # 32 keys in their own order: 16h + 8u + 2t + c
    split = whole.view(batch, heads, blocks, BLOCK // 32, h, u, t, c, rows)
    ordered = split.permute(0, 1, 2, 8, 3, 4, 6, 5, 7)  # 16h + 4t + 2u + c
    return ordered.reshape(batch, heads, blocks, rows, BLOCK).contiguous().view(E4M3)


def trial(unit: Unit, p: E4m3Problem) -> Trial:
    shape = p.shape
    generator = torch.Generator().manual_seed(p.data_seed * 31 + 5)
    inputs = make_inputs(replace(p, dtype="bf16"))
    block_rows = {"q": p.block_rows, "k": p.block_rows, "v": BLOCK}  # if scales are per block
    q, k, v = (quantize(p, getattr(inputs, name), generator, rows) for name, rows in block_rows.items())
    if p.has_nan_scale:
        k.scale[..., -BLOCK:] = NAN
    rows = unit.row.axes["head_dim"]
    v_rows = transposed(v.codes, rows)
    out = p.laid_out(torch.full(inputs.q.shape, NAN, dtype=DTYPES[p.dtype]))
    lse = torch.full(p.rows, NAN)
    forward = {
        **p.sizes(),
        "head_dim_v": shape.head_dim,
        "q": p.placed(p.laid_out(q.codes)),
        "k": p.placed(p.laid_out(k.codes)),
        "v": Buffer(v_rows, is_from_preceding_grid=True),
        "v_stride": {"batch": 0, "head": 0, "row": 0},
        "out": p.placed(out, is_output=True),
        "lse": output(lse) if p.wants_lse else None,
        "tile_counter": counter() if p.has_counter else None,
        "num_splits": 1,
    }
    values = {
        "forward": forward,
        **{
            f"{name}_scale": scale_struct(p, one.scale, block_rows[name])
            for name, one in (("q", q), ("k", k), ("v", v))
        },
        "value_blocks": v_rows.shape[2],
        "value_rows": rows,
    }

    def check() -> list[str]:
        expected = attend(q, k, v, p.scale, causal=p.causal, roundoff=UNIT_ROUNDOFF[p.dtype])
        found = worst_element("out", out, expected.out, expected.out_bound)
        return found + (worst_element("lse", lse, expected.lse, expected.lse_bound) if p.wants_lse else [])

    tiles = math.ceil(shape.seq_q / unit.row.block_m) * shape.heads_q * shape.batch
    return Trial([Launch(values, tiles, (p.mask,))], check, {"out": out, "lse": lse})


@dataclass(frozen=True)
class TransposeProblem:
    """V [batch, heads, keys, columns] for a kernel of ``rows`` columns.

    With ``lengths`` ragged: one sequence per length, followed by room for ``spare`` more keys.
    """

    batch: int
    heads: int
    keys: int
    columns: int
    rows: int
    layout: Layout
    lengths: tuple[int, ...] = ()
    spare: int = 0

    @property
    def name(self) -> str:
        if self.lengths:
            return f"ragged{len(self.lengths)}.h{self.heads}.d{self.columns}-rows{self.rows}-spare{self.spare}"
        return f"b{self.batch}.h{self.heads}.k{self.keys}.d{self.columns}-rows{self.rows}-{self.layout.value}"

    @property
    def command_words(self) -> str:
        return f"--problem {self.name}"


def transpose_problems(_unit: Unit) -> Iterator[TransposeProblem]:
    yield TransposeProblem(1, 1, 128, 128, 128, Layout.BHSD)
    yield TransposeProblem(2, 3, 129, 64, 64, Layout.BSHD)
    yield TransposeProblem(1, 2, 31, 80, 128, Layout.ROWS)
    yield TransposeProblem(2, 1, 300, 256, 256, Layout.BHSD)
    yield TransposeProblem(1, 1, 36, 64, 64, Layout.FAR)
    # Complete blocks, none, partial ones; the last sequence's blocks are at the end.
    yield TransposeProblem(1, 2, 0, 64, 64, Layout.BSHD, lengths=(128, 0, 1, 300, 0, 0, 127, 256, 5))
    yield TransposeProblem(1, 1, 0, 48, 64, Layout.BSHD, lengths=(130, 3, 120), spare=9)


def ragged_transpose_trial(unit: Unit, p: TransposeProblem) -> Trial:
    ends = torch.tensor([0, *p.lengths]).add(torch.tensor([0] + [p.spare] * len(p.lengths))).cumsum(0).to(torch.int32)
    keys = int(ends[-1])
    drawn = torch.randint(0, 256, (keys, p.heads, p.columns), dtype=torch.uint8)
    expected = torch.zeros(p.heads, keys // BLOCK + len(p.lengths), p.rows, BLOCK, dtype=torch.uint8)
    for sequence, (first, length) in enumerate(zip(ends.tolist(), p.lengths, strict=False)):
        own = drawn[first : first + length].transpose(0, 1)[None].view(E4M3)
        blocks = transposed(own, p.rows)[0].view(torch.uint8)
        begin = first // BLOCK + sequence
        expected[:, begin : begin + blocks.shape[1]] = blocks
    out = torch.full(expected.shape, 0x55, dtype=torch.uint8)
    values = {
        "v": drawn,
        "v_stride": {"batch": 0, "head": p.columns, "row": p.heads * p.columns},
        "out": output(out),
        "batch": len(p.lengths),
        "heads_kv": p.heads,
        "seq_k": max(p.lengths),
        "head_dim_v": p.columns,
        "value_blocks": expected.shape[1],
        "value_rows": p.rows,
        "sequences": {
            "cu_seqlens_k": ends,
            "seqused_k": torch.tensor(p.lengths, dtype=torch.int32) if p.spare else None,
            "keys_total": keys,
        },
    }
    threads = p.heads * expected.shape[1] * (BLOCK // 32) * (p.rows // 4)
    grid = -(-threads // (32 * unit.row.warps))
    return Trial([Launch(values, grid)], lambda: different("transposed V", out, expected), {"out": out})


def transpose_trial(unit: Unit, p: TransposeProblem) -> Trial:
    if p.lengths:
        return ragged_transpose_trial(unit, p)
    shape = Shape(p.batch, p.heads, p.heads, p.keys, p.keys, p.columns)
    placing = Problem(shape, "f16", causal=False, layout=p.layout)
    drawn = torch.randint(0, 256, (p.batch, p.heads, p.keys, p.columns), dtype=torch.uint8)
    v = placing.laid_out(drawn)
    expected = transposed(drawn.view(E4M3), p.rows).view(torch.uint8)
    out = torch.full(expected.shape, 0x55, dtype=torch.uint8)
    values = {
        "v": placing.placed(v),
        "out": output(out),
        "batch": p.batch,
        "heads_kv": p.heads,
        "seq_k": p.keys,
        "head_dim_v": p.columns,
        "value_blocks": expected.shape[2],
        "value_rows": p.rows,
    }
    threads = p.batch * p.heads * expected.shape[2] * (BLOCK // 32) * (p.rows // 4)
    blocks = -(-threads // (32 * unit.row.warps))
    return Trial([Launch(values, blocks)], lambda: different("transposed V", out, expected), {"out": out})


RUNNER = Runner(problems, trial)
TRANSPOSE_RUNNER = Runner(transpose_problems, transpose_trial)
