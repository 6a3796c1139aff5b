"""Ragged and paged batches, caches, windows, softcap, sinks and masks against float64; unused memory holds NaN."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashmoe

from .drawn import lengths
from .reference import DTYPES, assert_ran_here
from .varlen_reference import Band, Ragged, by_definition, call_ragged, check_ragged, compare, to_pages

BANDS = {
    "full": Band(),
    "causal": Band(causal=True),
    "window": Band(causal=True, window=(20, 0)),
    "both sides": Band(window=(5, 9)),
    "right side": Band(window=(-1, 3)),
    "softcap": Band(causal=True, softcap=4.0),
    "softcapped window": Band(window=(70, 0), softcap=2.5, scale=0.3),
    "negative scale": Band(causal=True, scale=-0.2, softcap=3.0),
    "no scale": Band(window=(4, 4), scale=0.0),
}
every_band = pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
# Lengths longer than a block, of one token, of none, more rows than keys, only keys, only rows.
USUAL = Ragged((65, 1, 0, 130, 7, 40, 3), (65, 90, 4, 130, 200, 10, 0), spare=3)


@every_band
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_ragged(band: Band, with_sinks: bool, device: str) -> None:
    for dtype in DTYPES[device][-1:] if with_sinks else DTYPES[device]:
        check_ragged(USUAL, band, device, dtype, with_sinks=with_sinks)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 40), (33, 256), (128, 128), (8, 1), (59, 59)])
def test_head_dims(head_dim: int, head_dim_v: int, device: str) -> None:
    ragged = Ragged((70, 2, 33), (70, 150, 129), 6, 2, head_dim, head_dim_v)
    dtypes = DTYPES[device]
    check_ragged(ragged, Band(causal=True), device, dtypes[head_dim % len(dtypes)])
    check_ragged(ragged, Band(window=(40, 3), softcap=5.0), device, dtypes[head_dim_v % len(dtypes)], with_sinks=True)


_RAGGED = st.lists(lengths(least=0, most=200), min_size=1, max_size=5)
_SIDES = st.sampled_from([-1, -1, 0, 1, 5, 33, 100, 500])
_BANDS = st.builds(Band, st.booleans(), st.tuples(_SIDES, _SIDES), st.sampled_from([0.0, 0.0, 1.5]))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(sizes=_RAGGED, band=_BANDS, heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]), with_sinks=st.booleans())
def test_any_lengths(
    sizes: list[tuple[int, int]], band: Band, heads: tuple[int, int], with_sinks: bool, device: str
) -> None:
    rows, keys = zip(*sizes, strict=True)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    check_ragged(Ragged(rows, keys, *heads, 40, 24), band, device, dtype, with_sinks=with_sinks)


@pytest.mark.parametrize("heads", [(8, 2), (7, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_rows_over_many_keys(heads: tuple[int, int], head_dim: int, device: str) -> None:
    """Several blocks may share a row's keys: each row sees its own keys, with the same bits in a second call."""
    ragged = Ragged((130, 1, 0, 33, 64), (4000, 700, 9, 33, 1100), *heads, head_dim, head_dim)
    dtype = DTYPES[device][-1]
    for band in (Band(causal=True), Band(window=(300, 0))):
        first = check_ragged(ragged, band, device, dtype, with_sinks=True)
        _, _, again = call_ragged(ragged, band, device, dtype, with_sinks=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_sequences_are_dense_calls(causal: bool, device: str) -> None:
    """Bit for bit on the CPU; on a GPU the tiles may differ."""
    ragged = Ragged((33, 1, 257, 90), (33, 140, 257, 120))
    for dtype in DTYPES[device]:
        q, k, v = ragged.tensors(device, dtype)
        out, lse = flashmoe.attention_varlen(
            q, k, v, *ragged.cu_seqlens(device), *ragged.longest, causal=causal, return_lse=True
        )
        first_q = first_k = 0
        for rows, keys in zip(ragged.lengths_q, ragged.lengths_k, strict=True):
            parts = (q[first_q : first_q + rows], k[first_k : first_k + keys], v[first_k : first_k + keys])
            dense = [part.transpose(0, 1).unsqueeze(0) for part in parts]
            wanted, wanted_lse = flashmoe.attention(*dense, causal=causal, return_lse=True)
            found, found_lse = out[first_q : first_q + rows].transpose(0, 1), lse[:, first_q : first_q + rows]
            close = {"rtol": 0, "atol": 0 if device == "cpu" else 1e-2}
            torch.testing.assert_close(found, wanted[0], **close)
            torch.testing.assert_close(found_lse, wanted_lse[0], rtol=0, atol=0 if device == "cpu" else 1e-4)
            first_q, first_k = first_q + rows, first_k + keys


def _dense(
    device: str, dtype: torch.dtype, lengths: tuple[int, ...], rows: int, room: int, head_dim_v: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, 4, rows, 64], k and v [B, 2, longest + room, ..]; keys past the lengths are NaN."""
    generator = torch.Generator().manual_seed(5)
    longest = max(lengths) + room
    q = torch.randn(len(lengths), 4, rows, 64, generator=generator)
    k, v = (torch.randn(len(lengths), 2, longest, d, generator=generator) for d in (64, head_dim_v))
    for entry, length in enumerate(lengths):
        k[entry, :, length:] = v[entry, :, length:] = math.nan
    q, k, v = (t.to(dtype).to(device) for t in (q, k, v))
    return q, k, v


def _cached(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], band: Band, sinks: Tensor | None, device: str, found: Any
) -> None:
    """Compares (out, lse) [B, ..] with the reference on each sequence's own keys."""
    for entry, length in enumerate(lengths):
        parts = (q[entry], k[entry, :, :length], v[entry, :, :length])
        wide = by_definition(*(part.double() for part in parts), band, sinks)
        plain = by_definition(*parts, band, sinks)[0]
        compare((found[0][entry], found[1][entry]), wide, plain, device, ran=any(lengths))


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256, 528])
def test_pages(page_size: int, rows: int, device: str) -> None:
    """Shuffled pages, NaN in unused ones and after each sequence's last key; heads that fold, and more rows."""
    lengths = (300, 0, 17, 129)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 0.0], device=device)
    dtypes = DTYPES[device]
    for index, (band, sink) in enumerate(((Band(), None), (Band(causal=True, window=(33, 0), softcap=3.0), sinks))):
        q, k, v = _dense(device, dtypes[(page_size + index) % len(dtypes)], lengths, rows, 0, 40)
        pages = to_pages(k, v, lengths, page_size)
        used = torch.tensor(lengths, dtype=torch.int32, device=device)
        result = flashmoe.attention_with_kvcache(
            q,
            pages.k,
            pages.v,
            cache_seqlens=used,
            block_table=pages.block_table,
            sinks=sink,
            return_lse=True,
            **band.options,
        )
        _cached(q, k, v, lengths, band, sink, device, result)
        if page_size == 16:
            dense = flashmoe.attention_with_kvcache(
                q, k, v, cache_seqlens=used, sinks=sink, return_lse=True, **band.options
            )
            _cached(q, k, v, lengths, band, sink, device, dense)


def test_ragged_rows_over_pages(device: str) -> None:
    """Prefill of several sequences into a paged cache, with the first page shared by all."""
    ragged = Ragged((70, 1, 33), (150, 64, 100), spare=2)
    for dtype in DTYPES[device]:
        q, tokens, _ = ragged.tensors(device, dtype)
        k = torch.nn.utils.rnn.pad_sequence(
            list(tokens[: sum(ragged.lengths_k)].split(ragged.lengths_k)), batch_first=True
        )
        k = k.transpose(1, 2).contiguous()
        k[:, :, :32] = k[:1, :, :32]
        pages = to_pages(k, k, ragged.lengths_k, 32, shared=1)
        cu_seqlens, _ = ragged.cu_seqlens(device)
        used = torch.tensor(ragged.lengths_k, dtype=torch.int32, device=device)
        out, lse = flashmoe.attention_varlen(
            *(q, pages.k, pages.v, cu_seqlens, None, *ragged.longest),
            causal=True,
            seqused_k=used,
            block_table=pages.block_table,
            return_lse=True,
        )
        for entry, (first, rows) in enumerate(zip(cu_seqlens.tolist(), ragged.lengths_q, strict=False)):
            parts = (q[first : first + rows].transpose(0, 1), *(k[entry, :, : ragged.lengths_k[entry]],) * 2)
            wide = by_definition(*(part.double() for part in parts), Band(causal=True))
            found = out[first : first + rows].transpose(0, 1), lse[:, first : first + rows]
            compare(found, wide, by_definition(*parts, Band(causal=True))[0], device)


@pytest.mark.parametrize("page_size", [0, 1, 16, 96])
def test_append(page_size: int, device: str) -> None:
    """New keys are appended after the old ones, in place; nothing else is written; then all of them are seen."""
    lengths, added = (30, 0, 95), 7
    for dtype in DTYPES[device]:
        q, k, v = _dense(device, dtype, lengths, 3, 20, 24)
        used = torch.tensor(lengths, dtype=torch.int32, device=device)
        # In a projection's layout: [B, S, H, D], viewed as [B, H, S, D].
        k_new, v_new = (torch.randn(3, added, 2, d, device=device).to(dtype).transpose(1, 2) for d in (64, 24))
        table = None
        caches = (k.clone(), v.clone())
        if page_size:
            pages = to_pages(k, v, lengths, page_size, room=20)
            caches, table = (pages.k, pages.v), pages.block_table
        before = [cache.clone() for cache in caches]
        band = Band(causal=True)
        result = flashmoe.attention_with_kvcache(
            q, *caches, k_new, v_new, cache_seqlens=used, block_table=table, causal=True, return_lse=True
        )
        for entry, length in enumerate(lengths):
            k[entry, :, length : length + added] = k_new[entry]
            v[entry, :, length : length + added] = v_new[entry]
        totals = tuple(length + added for length in lengths)
        assert used.tolist() == list(lengths)
        _cached(q, k, v, totals, band, None, device, result)
        wanted = (k, v) if not page_size else (before[0], before[1])
        for entry, length in enumerate(lengths if page_size else ()):
            for key in range(length, length + added):
                place = int(table[entry, key // page_size]), key % page_size  # type: ignore[index]
                wanted[0][place], wanted[1][place] = k[entry, :, key], v[entry, :, key]
        for cache, one in zip(caches, wanted, strict=True):
            torch.testing.assert_close(cache, one, rtol=0, atol=0, equal_nan=True)


def _masks(device: str, dtype: torch.dtype, batch: int, heads: int, rows: int, keys: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(batch, heads, rows, keys, generator=generator).to(device)
    finite = whole.to(dtype).masked_fill(whole <= -0.3, torch.finfo(dtype).min)
    shown = whole > -0.3
    shown[0, 0, 2] = False  # a row without a key
    padding = torch.arange(keys, device=device) < torch.tensor([[[[keys]]], [[[keys // 3]]]], device=device)
    bias = whole.to(dtype).masked_fill(~shown, -math.inf)
    wide = torch.empty(batch, heads, keys, 2 * rows, device=device, dtype=dtype)
    wide[..., ::2] = bias.transpose(2, 3)
    return {
        "bool": shown,
        "padding": padding,  # [B, 1, 1, Sk]
        "one for all": shown[1, 1],
        "bias": bias,
        "of a head": bias[:, :1],
        "strided": wide[..., ::2].transpose(2, 3),
        "finite": finite,
    }


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_key_under_a_softcap_is_the_answer(device: str, head_dim: int) -> None:
    for dtype in DTYPES[device]:
        q, k, v = (torch.randn(2, 3, 70, head_dim, device=device).to(dtype) for _ in range(3))
        out = flashmoe.attention(q, k, v, causal=True, softcap=15.0)
        assert torch.equal(out[:, :, 0], v[:, :, 0]), dtype
        alone = flashmoe.attention(q, k[:, :, :1], v[:, :, :1], softcap=15.0)
        assert torch.equal(alone, v[:, :, :1].expand_as(alone)), dtype


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("band", [Band(), Band(causal=True, softcap=5.0), Band(window=(30, 4))], ids=str)
def test_masks(band: Band, rows: int, device: str) -> None:
    sinks = torch.tensor([0.5, -1.0, 1.0, 0.0], device=device)
    tensors = [torch.randn(2, h, s, 64, device=device) for h, s in ((4, rows), (2, 150), (2, 150))]
    for index, dtype in enumerate(DTYPES[device]):
        q, k, v = (tensor.to(dtype) for tensor in tensors)
        masks = list(_masks(device, dtype, 2, 4, rows, 150).items())
        for name, mask in masks[index :: len(DTYPES[device])]:
            sink = sinks if name == "bias" else None
            found = flashmoe.attention(q, k, v, attn_mask=mask, sinks=sink, return_lse=True, **band.options)
            wide = by_definition(q.double(), k.double(), v.double(), band, sink, mask)
            plain = by_definition(q, k, v, band, sink, mask)[0]
            compare((found[0], found[1]), wide, plain, device)


def test_hidden_keys_may_hold_nan(device: str) -> None:
    """Keys that a window hides from every row, and on the CPU keys that a bool mask hides. On a GPU a value hidden by a mask has weight 0 in
    a product, as in torch."""
    for dtype, rows in ((dtype, rows) for dtype in DTYPES[device] for rows in (2, 40)):
        q, k, v = (torch.randn(1, h, s, 64, device=device).to(dtype) for h, s in ((4, rows), (2, 300), (2, 300)))
        shown = torch.ones(300, dtype=torch.bool, device=device)
        shown[100:110] = False
        masked = flashmoe.attention(q, k, v, attn_mask=shown)
        windowed = flashmoe.attention(q, k, v, window=(60, 0))
        k[:, :, 100:110] = v[:, :, 100:110] = math.nan
        assert device == "cuda" or torch.equal(flashmoe.attention(q, k, v, attn_mask=shown), masked)
        assert torch.equal(flashmoe.attention(q, k, v, window=(60, 0)), windowed)


def test_repeats_and_batches(device: str) -> None:
    """The same bits in every call, and with a single split in every batch."""
    ragged = Ragged((1, 1, 1, 1), (1000, 40, 5, 777))
    dtype = torch.bfloat16
    q, k, v = ragged.tensors(device, dtype)
    options: dict[str, Any] = {"window": (700, 0), "softcap": 3.0, "return_lse": True}
    cu_q, cu_k = ragged.cu_seqlens(device)
    first = flashmoe.attention_varlen(q, k, v, cu_q, cu_k, 1, 1000, **options)
    for _ in range(3 if device == "cpu" else 100):
        again = flashmoe.attention_varlen(q, k, v, cu_q, cu_k, 1, 1000, **options)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
    together, lse = flashmoe.attention_varlen(q, k, v, cu_q, cu_k, 1, 1000, num_splits=1, **options)
    for entry in range(4):
        keys = slice(int(cu_k[entry]), int(cu_k[entry + 1]))
        own = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (1, keys.stop - keys.start)]
        alone = flashmoe.attention_varlen(
            q[entry : entry + 1], k[keys], v[keys], *own, 1, 1000, num_splits=1, **options
        )
        assert torch.equal(alone[0][0], together[entry])
        assert torch.equal(alone[1][:, 0], lse[:, entry])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_short_entries(head_dim: int, device: str) -> None:
    """In a large batch a GPU's tile holds several heads of a short sequence, in a call of its own only one: the same bits."""
    rows = (40, 64, 100, 3, 0, 130) * 7  # with ten heads, more than three tiles per multiprocessor (132)
    ragged = Ragged(rows, tuple(length + index % 90 for index, length in enumerate(rows)), 10, 2, head_dim, head_dim)
    check_ragged(ragged, Band(causal=True), device, torch.bfloat16, with_sinks=True)
    q, k, v = ragged.tensors(device, torch.bfloat16)
    cu_q, cu_k = ragged.cu_seqlens(device)
    out, lse = flashmoe.attention_varlen(
        q, k, v, cu_q, cu_k, *ragged.longest, causal=True, num_splits=1, return_lse=True
    )
    for entry in range(12, 18):
        own, keys = (slice(int(cu[entry]), int(cu[entry + 1])) for cu in (cu_q, cu_k))
        cu = [torch.tensor([0, part.stop - part.start], dtype=torch.int32, device=device) for part in (own, keys)]
        options = {"causal": True, "num_splits": 1, "return_lse": True}
        alone = flashmoe.attention_varlen(q[own], k[keys], v[keys], *cu, *ragged.longest, **options)
        assert torch.equal(alone[0], out[own])
        assert torch.equal(alone[1], lse[:, own])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_bits(threads: int) -> None:
    q, k, v = USUAL.tensors("cpu", torch.bfloat16)
    cu_seqlens = USUAL.cu_seqlens("cpu")
    wanted = flashmoe.attention_varlen(q, k, v, *cu_seqlens, *USUAL.longest, window=(50, 0))
    torch.set_num_threads(threads)
    assert torch.equal(flashmoe.attention_varlen(q, k, v, *cu_seqlens, *USUAL.longest, window=(50, 0)), wanted)


def test_no_sequences_and_no_tokens(device: str) -> None:
    dtype = DTYPES[device][0]
    for ragged in (Ragged((), ()), Ragged((0, 0), (0, 5)), Ragged((0,), (0,))):
        out, _ = check_ragged(ragged, Band(causal=True), device, dtype)
        assert out.shape == (0, 4, 64)
    out, lse = check_ragged(Ragged((3, 2), (0, 0)), Band(), device, dtype)
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_lengths() -> None:
    """Captured once; lengths, pages and new keys change between replays."""
    lengths = (200, 30)
    q, k, v = _dense("cuda", torch.bfloat16, lengths, 1, 56)
    k, v = k.nan_to_num(), v.nan_to_num()
    pages = to_pages(k, v, (256, 256), 16)
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    new = torch.randn(2, 2, 1, 64, device="cuda", dtype=torch.bfloat16)

    def call() -> Tensor:
        return flashmoe.attention_with_kvcache(
            q, pages.k, pages.v, new, new, cache_seqlens=used, block_table=pages.block_table, window=(100, 0)
        )

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for one in ((7, 250), (100, 101), (0, 12)):
        used.copy_(torch.tensor(one, dtype=torch.int32))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, call())
        assert_ran_here("cuda")
