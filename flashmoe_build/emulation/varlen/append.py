"""Runs one problem on an emulated kernel that puts new keys and values into a cache, and compares with a plain copy."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flashmoe_build.emulation.attention import Outcome, Strides, launch_registers, load, mapped
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, KernelLibrary, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.problem import DTYPES, NamedProblem
from flashmoe_tools.descriptors import Header
from flashmoe_tools.tables import Unit

AppendParams = structure(Header("AppendParams", "attention/params/append.h"), (CSRC,))
HEADS = 2
SPARE_PAGES = 2


@dataclass(frozen=True)
class AppendProblem(NamedProblem):
    """``new_keys`` keys behind the first ``held[b]`` of entry b, in a cache with ``room`` for each."""

    dtype: str
    held: tuple[int, ...]
    new_keys: int
    room: int
    page_size: int  # 0: dense
    head_dim: int
    head_dim_v: int
    data_seed: int = 0


def problems(unit: Unit) -> Iterator[AppendProblem]:
    """Dense and paged, rows of 16-byte pieces and others; keys past the room, negative lengths, pages that are none."""
    dense = AppendProblem("dense", unit.dtype, (0, 3, 6), 2, 8, 0, 264, 8)
    paged = AppendProblem("paged", unit.dtype, (0, 5, 15), 3, 16, 4, 64, 40)
    yield dense
    yield replace(dense, name="past the room", held=(7, 8, -1, 2**31 - 1), new_keys=3)
    yield replace(dense, name="odd columns", head_dim=37, head_dim_v=5)
    yield paged
    yield replace(paged, name="pages of one key", page_size=1, room=20, held=(16, 0, 19), head_dim_v=64)


def _strides(tensor: torch.Tensor, *, is_paged: bool = False) -> ctypes.Structure:
    stride = tensor.stride()
    return Strides(stride[0], stride[2], stride[1]) if is_paged else Strides(stride[0], stride[1], stride[2])


def _cache(p: AppendProblem, table: torch.Tensor | None, columns: int) -> torch.Tensor:
    sizes = (len(p.held), HEADS, p.room) if table is None else (table.numel() + SPARE_PAGES, p.page_size, HEADS)
    return torch.full((*sizes, columns), -1.0, dtype=DTYPES[p.dtype])


def _table(p: AppendProblem) -> torch.Tensor | None:
    """Pages in random order; the last page of the last entry is none of the cache's."""
    if p.page_size == 0:
        return None
    generator = torch.Generator().manual_seed(p.data_seed)
    count = len(p.held) * math.ceil(p.room / p.page_size)
    table = torch.randperm(count, generator=generator).view(len(p.held), -1).to(torch.int32)
    table[-1, -1] = count + SPARE_PAGES
    return table


def expect(p: AppendProblem, cache: torch.Tensor, new: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """The cache afterwards."""
    result = cache.clone()
    for entry, held in enumerate(p.held):
        for index in range(p.new_keys):
            key = held + index
            if not 0 <= key < p.room:
                continue
            if table is None:
                result[entry, :, key] = new[entry, :, index]
                continue
            page = int(table[entry, key // p.page_size])
            if page < cache.shape[0]:
                result[page, key % p.page_size] = new[entry, :, index]
    return result


def run(unit: Unit, problem: AppendProblem, settings: Settings, options: Options) -> Outcome:
    """Compiles (or finds) the kernel, runs the problem on it and compares."""
    library = load(kernel_library(unit, options))
    generator = torch.Generator().manual_seed(problem.data_seed + 5)
    table = _table(problem)
    lengths = torch.tensor(problem.held, dtype=torch.int64).to(torch.int32)
    caches, news, expected = [], [], []
    for columns in (problem.head_dim, problem.head_dim_v):
        cache = _cache(problem, table, columns)
        new = torch.randn(len(problem.held), problem.new_keys, HEADS, columns, generator=generator).to(cache.dtype)
        caches.append(cache)
        news.append(new.transpose(1, 2))
        expected.append(expect(problem, cache, news[-1], table))
    rows = 2 * len(problem.held) * problem.new_keys * HEADS
    grid = Geometry(
        math.ceil(rows / unit.row.warps), unit.row.threads, unit.row.smem_bytes(unit.dtype), launch_registers(unit)
    )
    with mapped(library):
        params = _params(library, problem, (caches, news), lengths, table)
        report = library.launch(unit.entries[0].symbol, (ctypes.addressof(params),), grid, settings)
    wrong = []
    if not report.failure:
        wrong = [
            f"the cache of {name} is not what a copy gives"
            for name, cache, other in zip("kv", caches, expected, strict=True)
            if not cache.equal(other)
        ]
    return Outcome(problem, unit.entries[0].symbol, report, tuple(wrong), caches[0], caches[1])


def _params(
    library: KernelLibrary,
    p: AppendProblem,
    tensors: tuple[list[torch.Tensor], list[torch.Tensor]],
    lengths: torch.Tensor,
    table: torch.Tensor | None,
) -> ctypes.Structure:
    def add(tensor: torch.Tensor, name: str, *, writable: bool = False) -> int:
        size = tensor.untyped_storage().nbytes()
        return library.add_buffer(tensor.data_ptr(), size, writable=writable, initialised=True, name=name)

    is_paged = table is not None
    (k_cache, v_cache), (k_new, v_new) = tensors
    return AppendParams(
        k_cache=add(k_cache, "k_cache", writable=True),
        v_cache=add(v_cache, "v_cache", writable=True),
        k_new=add(k_new, "k_new"),
        v_new=add(v_new, "v_new"),
        k_cache_stride=_strides(k_cache, is_paged=is_paged),
        v_cache_stride=_strides(v_cache, is_paged=is_paged),
        k_new_stride=_strides(k_new),
        v_new_stride=_strides(v_new),
        cache_seqlens=add(lengths, "cache_seqlens"),
        block_table=0 if table is None else add(table, "block_table"),
        block_table_stride=0 if table is None else table.stride(0),
        page_size=p.page_size,
        num_pages=k_cache.shape[0] if is_paged else 0,
        batch=len(p.held),
        heads_kv=HEADS,
        new_keys=p.new_keys,
        room=p.room,
        head_dim=p.head_dim,
        head_dim_v=p.head_dim_v,
        is_aligned=p.head_dim % 8 == 0 and p.head_dim_v % 8 == 0,
    )
