"""What a mask hides in whole blocks, as the kernels that stream masks get it, and the kernels that find it, on the emulated machine.

Written from the definition: a matrix of visible blocks, not words.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from flashmoe_build.emulation.compare import DTYPES, different
from flashmoe_build.emulation.runner import Buffer, Launch, NamedProblem, Runner, Trial, output
from flashmoe_tools.operations.attention.emulation.merge import FAR
from flashmoe_tools.operations.serving.emulation.problem import VarlenProblem
from flashmoe_tools.operations.serving.emulation.tensors import MASK_BLOCK, Tensors
from flashmoe_tools.tables import Unit

OPERATION = "attention_bool_mask"
TILES = "attention_bool_mask_tiles"
WORD_BLOCKS = 4  # kMaskWordBlocks
TILE_BLOCKS = 2  # kMaskTileKeys / kMaskBlock


def visible_blocks(seen: torch.Tensor) -> torch.Tensor:
    """[..., row blocks, key blocks]: whether some row of a block sees some key of it. ``seen``: bool [..., rows, keys]."""
    *outer, rows, keys = seen.shape
    padded = torch.nn.functional.pad(seen, (0, -keys % MASK_BLOCK, 0, -rows % MASK_BLOCK))
    return padded.view(*outer, -(-rows // MASK_BLOCK), MASK_BLOCK, -(-keys // MASK_BLOCK), MASK_BLOCK).any(-1).any(-2)


def own_matrices(p: VarlenProblem, tensors: Tensors) -> torch.Tensor:
    """The mask without repetitions: [batch or 1, heads or 1, rows, keys]."""
    assert tensors.mask is not None
    return tensors.mask[: 1 if p.mask_broadcast[0] else None, : 1 if p.mask_broadcast[1] else None]


def words_of(visible: torch.Tensor) -> torch.Tensor:
    """A byte for each block, of 1 where it is visible: int32 [..., row blocks, words]."""
    padded = torch.nn.functional.pad(visible, (0, -visible.shape[-1] % WORD_BLOCKS))
    return padded.to(torch.uint8).contiguous().view(torch.int32)


def matrices_of(visible: torch.Tensor) -> dict[str, int]:
    batch, heads = visible.shape[:2]
    return {"per_sequence": heads if batch > 1 else 0, "per_head": int(heads > 1)}


def hull(visible: torch.Tensor) -> torch.Tensor:
    """The same matrix, with every block between the first and the last visible one of a row."""
    return visible.int().cummax(-1).values.bool() & visible.int().flip(-1).cummax(-1).values.flip(-1).bool()


def poisoned(own: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """A copy of the mask, NaN in the blocks that no kernel may need; ``read`` [batch, heads, row blocks, key blocks]."""
    every = read.repeat_interleave(MASK_BLOCK, 2).repeat_interleave(MASK_BLOCK, 3)
    return own.masked_fill(~every[:, :, : own.shape[2], : own.shape[3]], math.nan)


def blocks_member(visible: torch.Tensor | None) -> dict[str, Any]:
    """The members of VisibleBlocks."""
    if visible is None:
        return {"words": None, "row_blocks": 0, "key_words": 0, "per_sequence": 0, "per_head": 0}
    words = words_of(visible)
    return {"words": words, "row_blocks": words.shape[-2], "key_words": words.shape[-1], **matrices_of(visible)}


def tile_ranges(visible: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tiles, row blocks]: whether a row block is between the first and the last that see a tile of two key blocks."""
    padded = torch.nn.functional.pad(visible, (0, -visible.shape[-1] % TILE_BLOCKS))
    return hull(padded.unflatten(-1, (-1, TILE_BLOCKS)).any(-1).mT)


def ranges_and_ranks(visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The range of row blocks of each tile [batch, heads, tiles, 2], and how many later tiles' ranges hold a row block
    [batch, heads, tiles, row blocks]; both int32."""
    inside = tile_ranges(visible)
    count = inside.shape[-1]
    # A tile that nothing sees begins and ends after the last block.
    begin = torch.where(inside, torch.arange(count), count).amin(-1)
    later = inside.int().flip(-2).cumsum(-2).flip(-2) - inside.int()
    return torch.stack([begin, begin + inside.sum(-1)], -1).int(), later.int()


def tiles_member(visible: torch.Tensor | None) -> dict[str, Any]:
    """The members of VisibleTiles."""
    if visible is None:
        return {"ranges": None, "ranks": None, "tiles": 0, "row_blocks": 0, "per_sequence": 0, "per_head": 0}
    ranges, ranks = ranges_and_ranks(visible)
    sizes = {"tiles": ranks.shape[-2], "row_blocks": ranks.shape[-1]}
    return {"ranges": ranges, "ranks": ranks, **sizes, **matrices_of(visible)}


class Stored(str, Enum):
    """How a mask is stored."""

    CONTIGUOUS = "contiguous"
    WIDE = "wide"  # rows of whole 8 bytes, with visible keys behind the last one
    ODD = "odd"  # rows at any byte
    SPARSE = "sparse"  # every second byte
    TRANSPOSED = "transposed"  # a column for each row, and a head for each sequence
    FAR_ROWS = "far rows"  # so far apart that offsets need 64 bits
    FAR_KEYS = "far keys"


@dataclass(frozen=True)
class BoolMask(NamedProblem):
    """A bool mask [batch, heads, rows, keys]."""

    name: str
    sizes: tuple[int, int, int, int]
    stored: Stored
    seed: int


def problems(unit: Unit) -> Iterator[BoolMask]:
    yield BoolMask("aligned", (2, 1, 150, 600), Stored.CONTIGUOUS, 1)
    if unit.dtype == "f16":
        yield BoolMask("tail", (1, 2, 70, 299), Stored.WIDE, 2)
        yield BoolMask("odd", (1, 3, 65, 261), Stored.ODD, 3)
        yield BoolMask("sparse", (1, 1, 9, 48), Stored.SPARSE, 4)
        yield BoolMask("transposed", (2, 2, 64, 40), Stored.TRANSPOSED, 5)
        yield BoolMask("far rows", (3, 2, 67, 20), Stored.FAR_ROWS, 6)
        yield BoolMask("far keys", (1, 2, 67, 20), Stored.FAR_KEYS, 7)


def drawn(p: BoolMask) -> torch.Tensor:
    """Blocks of which many elements are visible, about one, and none."""
    generator = torch.Generator().manual_seed(p.seed)
    counts = [-(-size // MASK_BLOCK) for size in p.sizes[2:]]
    densities = torch.tensor([0.0, 1 / MASK_BLOCK**2, 2 / MASK_BLOCK**2, 0.4])
    density = densities[torch.randint(4, (*p.sizes[:2], *counts), generator=generator)]
    density = density.repeat_interleave(MASK_BLOCK, 2).repeat_interleave(MASK_BLOCK, 3)
    seen = torch.rand(p.sizes, generator=generator) < density[:, :, : p.sizes[2], : p.sizes[3]]
    seen[0, 0, -1, -1] = True
    return seen


def memory_of(p: BoolMask, seen: torch.Tensor) -> tuple[torch.Tensor | Buffer, tuple[int, ...]]:
    """(the mask as stored, its strides)."""
    pad = torch.nn.functional.pad
    if p.stored is Stored.FAR_ROWS:
        buffer = Buffer(seen.view(torch.uint8), row_stride=FAR)
        return buffer, (*buffer.strides, 1)
    if p.stored is Stored.FAR_KEYS:
        buffer = Buffer(seen.mT.contiguous().view(torch.uint8), row_stride=FAR)
        batch, head, key = buffer.strides
        return buffer, (batch, head, 1, key)
    stored = {
        Stored.CONTIGUOUS: lambda: seen,
        Stored.WIDE: lambda: pad(seen, (0, -seen.shape[-1] % 8), value=True)[..., : seen.shape[-1]],
        Stored.ODD: lambda: pad(seen, (3, 4))[..., 3:-4],
        Stored.SPARSE: lambda: torch.stack([seen, ~seen], -1)[..., 0],
        Stored.TRANSPOSED: lambda: seen.permute(1, 0, 3, 2).contiguous().permute(1, 0, 3, 2),
    }[p.stored]()
    return stored.view(torch.uint8), stored.stride()


def trial(unit: Unit, p: BoolMask) -> Trial:
    seen = drawn(p)
    batch, heads, rows, keys = p.sizes
    mask, strides = memory_of(p, seen)
    row = -(-keys // 8) * 8
    additive = torch.full((batch, heads, rows, row), math.nan, dtype=DTYPES[unit.dtype])
    expected = torch.zeros_like(additive).masked_fill(
        torch.nn.functional.pad(~seen, (0, row - keys), value=True), -math.inf
    )
    visible = visible_blocks(seen)
    wanted = words_of(visible)
    words = torch.full_like(wanted, -1)
    values = {
        "mask": mask,
        "additive": output(additive),
        "words": output(words),
        **dict(zip(("stride_batch", "stride_head", "stride_row", "stride_key"), strides, strict=True)),
        "additive_row": row,
        "heads": heads,
        "rows": rows,
        "keys": keys,
    }

    def check() -> list[str]:
        return different("words", words, wanted) + different("additive", additive, expected)

    return Trial([Launch(values, wanted.numel())], check, {"additive": additive, "words": words})


@dataclass(frozen=True)
class Tiles(NamedProblem):
    """A mask's visible blocks: [batch, heads, row blocks, key blocks]."""

    name: str
    sizes: tuple[int, int, int, int]
    seed: int = 0


def tiles_problems(unit: Unit) -> Iterator[Tiles]:
    yield Tiles("square", (2, 1, 9, 16), seed=1)
    if unit.dtype == "f16":
        yield Tiles("long", (1, 2, 130, 7), seed=2)
        yield Tiles("wide", (1, 1, 3, 301), seed=3)


def tiles_trial(unit: Unit, p: Tiles) -> Trial:
    generator = torch.Generator().manual_seed(p.seed)
    visible = torch.rand(p.sizes, generator=generator) < 0.25
    visible[..., 2:4] = False  # a tile that nothing sees
    expected = ranges_and_ranks(visible)
    found = [torch.full_like(one, -1) for one in expected]
    values = {
        "blocks": blocks_member(visible),
        "ranges": output(found[0]),
        "ranks": output(found[1]),
        "tiles": expected[0].shape[-2],
    }

    def check() -> list[str]:
        return different("ranges", found[0], expected[0]) + different("ranks", found[1], expected[1])

    blocks = math.prod(expected[0].shape[:-1])
    return Trial([Launch(values, blocks)], check, {"ranges": found[0], "ranks": found[1]})


RUNNER = Runner(problems, trial)
TILES_RUNNER = Runner(tiles_problems, tiles_trial)
