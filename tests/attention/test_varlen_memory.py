"""Ragged and paged attention with tensors in any memory layout: packed projections, pages of any kind, lengths that the host never reads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashmoe

from .gradients import make_leaves
from .reference import DTYPES, assert_ran_here
from .varlen_reference import Band, Ragged, by_definition, compare, to_pages


def _ints(device: str, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


_SIDES = st.sampled_from([-1, -1, 0, 7, 40])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 260), min_size=1, max_size=4),
    rows=st.sampled_from([1, 2, 17]),
    page_size=st.sampled_from([1, 3, 8, 16, 48, 64, 100]),
    shared=st.integers(0, 3),
    band=st.builds(Band, st.booleans(), st.tuples(_SIDES, _SIDES), st.sampled_from([0.0, 2.0])),
    with_sinks=st.booleans(),
)
def test_any_pages(
    lengths: list[int], rows: int, page_size: int, shared: int, band: Band, with_sinks: bool, device: str
) -> None:
    """Shuffled pages, the first ones shared; everything that no row may see holds NaN, and pages before a window have invalid numbers."""
    dtype = DTYPES[device][-1]
    counts = tuple(lengths)
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(len(counts), 4, rows, 40, generator=generator).to(dtype).to(device)
    k, v = (torch.randn(len(counts), 2, max(*counts, 1), d, generator=generator) for d in (40, 24))
    k, v = (tensor.to(dtype).to(device) for tensor in (k, v))
    same = min(shared * page_size, min(counts))
    k[:, :, :same], v[:, :, :same] = k[:1, :, :same], v[:1, :, :same]
    pages = to_pages(k, v, counts, page_size, shared=same // page_size)
    left = band.options["window"][0]
    for entry, length in enumerate(counts if left >= 0 else ()):
        behind = max(0, length - rows - left) // page_size
        pages.block_table[entry, :behind] = -1
    sinks = torch.linspace(-1, 1, 4, device=device) if with_sinks else None
    out, lse = flashmoe.attention_with_kvcache(
        *(q, pages.k, pages.v),
        cache_seqlens=_ints(device, *counts),
        block_table=pages.block_table,
        sinks=sinks,
        return_lse=True,
        **band.options,
    )
    for entry, length in enumerate(counts):
        parts = (q[entry], k[entry, :, :length], v[entry, :, :length])
        wide = by_definition(*(part.double() for part in parts), band, sinks)
        compare((out[entry], lse[entry]), wide, by_definition(*parts, band, sinks)[0], device, ran=max(counts) > 0)


def test_pages_that_a_window_has_left_behind(device: str) -> None:
    """Prefill in chunks: the cache manager has reused these pages, and they would share a key block with visible pages."""
    dtype = DTYPES[device][0]
    q, k = (torch.randn(2, heads, 130, 64, device=device).to(dtype) for heads in (4, 2))
    q = q[:, :, :90].transpose(1, 2).flatten(0, 1)
    pages = to_pages(k, k, (130, 100), 16)
    lengths = (_ints(device, 0, 90, 180), None, 90, 130)
    options: dict[str, Any] = {"causal": True, "window": (4, 0), "seqused_k": _ints(device, 130, 100)}
    wanted = flashmoe.attention_varlen(q, pages.k, pages.v, *lengths, block_table=pages.block_table, **options)
    nobodys = min(set(range(pages.k.shape[0])) - set(pages.block_table.flatten().tolist()))
    for page in (-1, nobodys) if device == "cpu" else (-1,):
        pages.block_table[0, :2] = page
        found = flashmoe.attention_varlen(q, pages.k, pages.v, *lengths, block_table=pages.block_table, **options)
        assert torch.equal(found, wanted)


def test_packed_projections(device: str) -> None:
    """q, k and v as slices of one projection's rows, with unused room after each sequence's keys; gradients too."""
    ragged = Ragged((70, 0, 33, 5), (70, 6, 140, 9), 4, 2, 64, 64)
    used = _ints(device, 60, 0, 140, 9)
    for dtype in DTYPES[device]:
        q, k, v = ragged.tensors(device, dtype)
        together = torch.zeros(max(q.shape[0], k.shape[0]), 8, 64, dtype=dtype, device=device)
        packed = [together[: t.shape[0], first : first + t.shape[1]] for t, first in ((q, 0), (k, 4), (v, 6))]
        for part, tensor in zip(packed, (q, k, v), strict=True):
            part.copy_(tensor)
        results = []
        for tensors in ((q, k, v), packed):
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            out = flashmoe.attention_varlen(
                *leaves, *ragged.cu_seqlens(device), *ragged.longest, causal=True, window=(50, 0), seqused_k=used
            )
            results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert not results[0][2][60:70].any()


def test_strided_pages_and_tables(device: str) -> None:
    """K and V of a page side by side, heads before a page's keys in memory, a table with unused columns, every other row of a table."""
    dtype, lengths = DTYPES[device][0], (90, 0, 41)
    for rows in (1, 30):
        q, k, v = (
            torch.randn(3, heads, size, 64, device=device).to(dtype) for heads, size in ((4, rows), *[(2, 90)] * 2)
        )
        pages = to_pages(k, v, lengths, 16)
        table = torch.full((6, 9), -1, dtype=torch.int32, device=device)
        table[::2, : pages.block_table.shape[1]] = pages.block_table
        side_by_side = torch.stack((pages.k, pages.v), 1)
        heads_outside = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (pages.k, pages.v)]
        used = _ints(device, *lengths)
        wanted = flashmoe.attention_with_kvcache(
            q, pages.k, pages.v, cache_seqlens=used, block_table=pages.block_table, causal=True
        )
        for caches in (side_by_side.unbind(1), heads_outside):
            found = flashmoe.attention_with_kvcache(q, *caches, cache_seqlens=used, block_table=table[::2], causal=True)
            assert torch.equal(found, wanted)


def test_an_entry_is_the_same_in_every_batch(device: str) -> None:
    """num_splits=1, chunks of a prompt and single rows: neighbours, their number and the longest sequence do not change a bit."""
    ragged = Ragged((1, 40, 130, 1, 3, 16, 17), (700, 90, 130, 5, 300, 900, 900))
    for dtype in DTYPES[device]:
        q, k, v = ragged.tensors(device, dtype)
        cu_q, cu_k = ragged.cu_seqlens(device)
        options: dict[str, Any] = {"causal": True, "num_splits": 1}
        together = flashmoe.attention_varlen(q, k, v, cu_q, cu_k, *ragged.longest, **options)
        for entry, (rows, keys) in enumerate(zip(ragged.lengths_q, ragged.lengths_k, strict=True)):
            own_q, own_k = (slice(int(cu[entry]), int(cu[entry + 1])) for cu in (cu_q, cu_k))
            own = (_ints(device, 0, rows), _ints(device, 0, keys))
            for longest in (ragged.longest, (rows, keys)):
                alone = flashmoe.attention_varlen(q[own_q], k[own_k], v[own_k], *own, *longest, **options)
                assert torch.equal(alone, together[own_q])


def _calls() -> dict[str, Callable[[], Any]]:
    """Every kind of call on a GPU; each has already run once."""
    ragged = Ragged((70, 0, 33), (70, 9, 140))
    leaves = make_leaves(*ragged.tensors("cuda", torch.bfloat16))
    cu_seqlens, longest = ragged.cu_seqlens("cuda"), ragged.longest
    sinks = torch.zeros(4, device="cuda", requires_grad=True)

    def train() -> tuple[Tensor, ...]:
        out = flashmoe.attention_varlen(*leaves, *cu_seqlens, *longest, causal=True, window=(50, 0), sinks=sinks)
        return torch.autograd.grad(out, (*leaves, sinks), torch.ones_like(out))

    q, k = (torch.randn(3, heads, size, 64, device="cuda").bfloat16() for heads, size in ((4, 2), (2, 160)))
    pages = to_pages(k, k, (160,) * 3, 16)
    used, mask = _ints("cuda", 70, 0, 140), torch.rand(2, 160, device="cuda") > 0.3

    def serve() -> Tensor:
        new = k[:, :, :2]
        return flashmoe.attention_with_kvcache(
            q, pages.k, pages.v, new, new, cache_seqlens=used, block_table=pages.block_table, softcap=9.0
        )

    def masked() -> Tensor:
        return flashmoe.attention(q, k, k, attn_mask=mask, window=(90, 0))

    calls: dict[str, Callable[[], Any]] = {"train": train, "serve": serve, "masked": masked}
    for call in calls.values():
        call()
    return calls


@pytest.mark.gpu
def test_no_call_waits_for_the_gpu() -> None:
    """All of them return while the kernel that was launched before them still runs."""
    calls = _calls()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # half a second
    delayed = torch.cuda.Event()
    delayed.record()
    for name, call in calls.items():
        call()
        assert not delayed.query(), f"{name} waited for the GPU"
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_training_graph_is_replayed_with_other_lengths() -> None:
    """Forward and backward captured once; lengths up to the maxima, including 0, change between replays."""
    tokens = torch.randn(300, 8, 64, device="cuda", dtype=torch.bfloat16)
    tensors = (*(part.contiguous() for part in tokens.split((4, 2, 2), 1)), torch.zeros(4, device="cuda"))
    cu_q, cu_k = _ints("cuda", 0, 100, 200, 300), _ints("cuda", 0, 100, 200, 300)

    def call() -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]  # created on this call's stream
        out = flashmoe.attention_varlen(*leaves[:3], cu_q, cu_k, 150, 200, causal=True, softcap=5.0, sinks=leaves[3])
        return out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for of_q, of_k in (((0, 150, 151, 300), (0, 200, 203, 300)), ((0, 0, 30, 30), (0, 5, 5, 150))):
        cu_q.copy_(torch.tensor(of_q))
        cu_k.copy_(torch.tensor(of_k))
        graph.replay()
        out, *gradients = [tensor.clone() for tensor in captured]
        wanted, *wanted_gradients = call()
        assert torch.equal(out[: of_q[-1]], wanted[: of_q[-1]])
        assert all(torch.equal(a, b) for a, b in zip(gradients, wanted_gradients, strict=True))
        assert_ran_here("cuda")
