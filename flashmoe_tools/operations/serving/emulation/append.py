"""The kernel that appends keys and values to a cache, on the emulated machine, against a plain copy."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flashmoe_build.emulation.compare import DTYPES
from flashmoe_build.emulation.runner import Buffer, Launch, NamedProblem, Runner, Trial
from flashmoe_tools.tables import Unit

HEADS = 2
SPARE_PAGES = 2


@dataclass(frozen=True)
class AppendProblem(NamedProblem):
    """``new_keys`` keys after the first ``held[b]`` of sequence b, in a cache with ``room`` keys per sequence."""

    dtype: str
    held: tuple[int, ...]
    new_keys: int
    room: int
    page_size: int  # 0: dense
    head_dim: int
    head_dim_v: int
    data_seed: int = 0


def problems(unit: Unit) -> Iterator[AppendProblem]:
    """Dense and paged, rows of complete 16-byte chunks and others; keys past the room, negative lengths, invalid pages."""
    dense = AppendProblem("dense", unit.dtype, (0, 3, 6), 2, 8, 0, 264, 8)
    paged = AppendProblem("paged", unit.dtype, (0, 5, 15), 3, 16, 4, 64, 40)
    yield dense
    yield replace(dense, name="past the room", held=(7, 8, -1, 2**31 - 1), new_keys=3)
    yield replace(dense, name="odd columns", head_dim=37, head_dim_v=5)
    yield paged
    yield replace(paged, name="pages of one key", page_size=1, room=20, held=(16, 0, 19), head_dim_v=64)


def _table(p: AppendProblem) -> torch.Tensor | None:
    """Pages in random order; the last page of the last sequence is not in the cache."""
    if p.page_size == 0:
        return None
    generator = torch.Generator().manual_seed(p.data_seed)
    count = len(p.held) * math.ceil(p.room / p.page_size)
    table = torch.randperm(count, generator=generator).view(len(p.held), -1).to(torch.int32)
    table[-1, -1] = count + SPARE_PAGES
    return table


class Stored:
    """What a cache stores for new rows: the rows themselves."""

    def prepare(self, name: str, cache: torch.Tensor, new: torch.Tensor, *, is_paged: bool) -> torch.Tensor:
        """The empty cache that replaces ``cache``, which is that of "k" or "v"; may change ``new``."""
        return cache

    def row(self, name: str, row: torch.Tensor, sequence: int, page: int) -> torch.Tensor:
        """[heads, columns]"""
        return row

    def values(self, values: dict[str, Any]) -> dict[str, Any]:
        """The kernel's parameters, given those that both kernels share."""
        return values


def expect(
    p: AppendProblem,
    cache: torch.Tensor,
    new: torch.Tensor,
    table: torch.Tensor | None,
    stored: Callable[[torch.Tensor, int, int], torch.Tensor],
) -> torch.Tensor:
    """The cache afterwards."""
    result = cache.clone()
    for sequence, held in enumerate(p.held):
        for index in range(p.new_keys):
            key = held + index
            if not 0 <= key < p.room:
                continue
            if table is None:
                result[sequence, :, key] = stored(new[sequence, :, index], sequence, 0)
                continue
            page = int(table[sequence, key // p.page_size])
            if page < cache.shape[0]:
                result[page, key % p.page_size] = stored(new[sequence, :, index], sequence, page)
    return result


def trial(unit: Unit, p: AppendProblem) -> Trial:
    return trial_on(unit, p, Stored())


def trial_on(unit: Unit, p: AppendProblem, stored: Stored) -> Trial:
    generator = torch.Generator().manual_seed(p.data_seed + 5)
    table, batch = _table(p), len(p.held)
    rows = (batch, HEADS, p.room) if table is None else (table.numel() + SPARE_PAGES, p.page_size, HEADS)
    caches, expected = {}, {}
    values: dict[str, Any] = {}
    for name, columns in (("k", p.head_dim), ("v", p.head_dim_v)):
        cache = torch.full((*rows, columns), -1.0, dtype=DTYPES[p.dtype])
        new = torch.randn(batch, p.new_keys, HEADS, columns, generator=generator).to(cache.dtype).transpose(1, 2)
        cache = stored.prepare(name, cache, new, is_paged=table is not None)
        expected[name], caches[name] = expect(p, cache, new, table, partial(stored.row, name)), cache
        stride = cache.stride() if table is None else (cache.stride(0), cache.stride(2), cache.stride(1))
        values[f"{name}_cache"] = Buffer(cache, writable=True)
        values[f"{name}_cache_stride"] = {"batch": stride[0], "head": stride[1], "row": stride[2]}
        values[f"{name}_new"] = new
    values |= {
        "cache_seqlens": torch.tensor(p.held, dtype=torch.int64).to(torch.int32),
        "block_table": table,
        "page_size": p.page_size,
        "num_pages": 0 if table is None else rows[0],
        "batch": batch,
        "heads_kv": HEADS,
        "new_keys": p.new_keys,
        "room": p.room,
        "head_dim": p.head_dim,
        "head_dim_v": p.head_dim_v,
        "is_aligned": p.head_dim % 8 == 0 and p.head_dim_v % 8 == 0,
    }

    def check() -> list[str]:
        wrong = [
            name
            for name, cache in caches.items()
            if not cache.view(torch.uint8).equal(expected[name].view(torch.uint8))
        ]
        return [f"the cache of {name} is not what a copy gives" for name in wrong]

    return Trial(
        [Launch(stored.values(values), math.ceil(2 * batch * p.new_keys * HEADS / unit.row.warps))],
        check,
        {name: cache.view(torch.uint8) if cache.element_size() == 1 else cache for name, cache in caches.items()},
    )


RUNNER = Runner(problems, trial)
