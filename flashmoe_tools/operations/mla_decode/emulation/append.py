"""The kernel that appends latents to an 8-bit float cache, on the emulated machine, against Python numbers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmoe_build.emulation.compare import DTYPES
from flashmoe_build.emulation.runner import Buffer, Launch, NamedProblem, Runner, Trial
from flashmoe_tools.operations.mla_decode.codes import quantize_row
from flashmoe_tools.operations.mla_decode.problem import HEAD_DIM, KEY_BYTES
from flashmoe_tools.tables import Unit

SPARE_PAGES = 2
EDGES = (
    448.0,
    449.0,
    465.0,
    6e4,
    -6e4,
    math.inf,
    -math.inf,
    math.nan,
    2.0**-10,
    3 * 2.0**-14,
    2.0**-24,
    1.0625,
    1.1875,
)
UNTOUCHED = 0xA5


@dataclass(frozen=True)
class AppendProblem(NamedProblem):
    """``tokens`` new ones after the first ``held[b]`` of sequence b; or ``slots``, drawn from all rows of the pages."""

    dtype: str
    held: tuple[int, ...]
    tokens: int
    room: int
    page_size: int  # 0: dense
    has_slots: bool = False
    row_pad: int = 0  # bytes after each row
    data_seed: int = 0


def problems(unit: Unit) -> Iterator[AppendProblem]:
    """Dense, paged and by slots; tokens past the capacity, negative lengths and slots, invalid pages."""
    paged = AppendProblem("paged", unit.dtype, (0, 15, 30), 3, 48, 16)
    yield paged
    yield replace(paged, name="dense", page_size=0, room=7, held=(0, 5, 7, -1, 2**31 - 1), row_pad=32)
    yield replace(paged, name="slots", has_slots=True, tokens=4, page_size=5, room=10)


def _rows(p: AppendProblem, table: torch.Tensor | None, slots: torch.Tensor | None, pages: int) -> Iterator[Any]:
    """(sequence, token, page, row) of the tokens that fit into the cache."""
    for sequence, held in enumerate(p.held):
        for token in range(p.tokens):
            if slots is not None:
                slot = int(slots[sequence, token])
                if 0 <= slot < pages * p.page_size:
                    yield sequence, token, *divmod(slot, p.page_size)
                continue
            key = held + token
            if not 0 <= key < p.room:
                continue
            page, row = (sequence, key) if table is None else divmod(key, p.page_size)
            page = page if table is None else int(table[sequence, page])
            if 0 <= page < pages:
                yield sequence, token, page, row


def _latents(p: AppendProblem, generator: torch.Generator) -> torch.Tensor:
    """[batch, tokens, 576] whose magnitudes differ from one scale group to the next; edge cases in the first token."""
    sizes = (len(p.held), p.tokens)
    exponents = torch.randint(-18, 6, (*sizes, HEAD_DIM // 64, 1), generator=generator).float()
    values = torch.randn(*sizes, HEAD_DIM // 64, 64, generator=generator) * 2.0**exponents
    latents = values.flatten(2).to(DTYPES[p.dtype])
    latents[0, 0, : len(EDGES)] = torch.tensor(EDGES).to(latents.dtype)
    latents[0, 0, 128:256] = 0.0
    latents[0, 1, :128] = torch.tensor(448.0 * 2.0**-3)
    latents[0, 1, 129] = math.nan
    return latents


def trial(unit: Unit, p: AppendProblem) -> Trial:
    generator = torch.Generator().manual_seed(p.data_seed + 11)
    batch, has_pages = len(p.held), p.page_size > 0
    count = batch * math.ceil(p.room / p.page_size) + SPARE_PAGES if has_pages else batch
    size = p.page_size or p.room
    memory = torch.full((count, size, KEY_BYTES + p.row_pad), UNTOUCHED, dtype=torch.uint8)
    cache = memory[..., :KEY_BYTES]
    table = slots = None
    if p.has_slots:
        slots = torch.randperm(count * size, generator=generator)[: batch * p.tokens].view(batch, p.tokens).clone()
        slots[0, 1], slots[1, 0], slots[1, 1] = -1, count * size, -(2**40)
    elif has_pages:
        table = torch.randperm(count - SPARE_PAGES, generator=generator).view(batch, -1).to(torch.int32)
        table[-1, -1] = count
    latents = _latents(p, generator)
    expected = memory.clone()
    for sequence, token, page, row in _rows(p, table, slots, count):
        expected[page, row, :KEY_BYTES] = quantize_row(latents[sequence, token])
    values = {
        "latents": latents,
        "cache": Buffer(cache, writable=True),
        "slots": slots,
        "cache_seqlens": None if slots is not None else torch.tensor(p.held, dtype=torch.int64).to(torch.int32),
        "block_table": table,
        "block_table_stride": 0 if table is None else table.stride(0),
        "latents_stride_batch": latents.stride(0),
        "latents_stride_token": latents.stride(1),
        "page_stride": cache.stride(0),
        "key_stride": cache.stride(1),
        "batch": batch,
        "tokens": p.tokens,
        "page_size": size,
        "num_pages": count,
        "capacity": p.room,
    }

    def check() -> list[str]:
        wrong = (memory != expected).any(-1).nonzero().tolist()
        return [f"row {row} of page {page} is not the quantised latent" for page, row in wrong]

    return Trial([Launch(values, math.ceil(batch * p.tokens / unit.row.warps))], check, {"cache": memory})


RUNNER = Runner(problems, trial)
