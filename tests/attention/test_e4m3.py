"""Caches of float8_e4m3fn: compared bit for bit with the same call on the dequantised cache, and with float64; unused memory holds NaN."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe.attn.e4m3 import split_scale
from flashmoe.errors import ArgumentError, ArgumentTypeError, DifferentiationError, DtypeError, ShapeError

from .reference import assert_ran_here
from .varlen_reference import Band, by_definition

E4M3 = torch.float8_e4m3fn
NAN_CODE = 0x7F
DTYPES = (torch.float16, torch.bfloat16)
LENGTHS = (170, 1, 0, 300, 65)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one split": {"num_splits": 1},
    "window": {"window": (37, 0)},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "ALiBi": {"alibi": True, "softcap": 5.0},
    "consistent ALiBi": {"alibi": True, "rows": 4, "causal": True, "consistent": True},
    "rows": {"rows": 4, "causal": True},
    "more rows": {"rows": 5, "causal": True},  # more than 16 rows per key head
    "of one split": {"rows": 5, "causal": True, "num_splits": 1},
}
either = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dataclass
class Case:
    """``keys`` and ``values`` of each sequence, [Hkv, Sk, D] in float32: codes times scales. ``call``: on codes, or on a 16-bit cache."""

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    call: Callable[..., tuple[Tensor, Tensor]]


def _quantized(values: Tensor) -> Tensor:
    return values.to(E4M3)


def _scale(kind: str, is_exact: bool, rows: int, heads: int, generator: torch.Generator) -> Tensor:
    sizes = {"one": (), "heads": (heads,), "sequences": (rows, heads), "pages": (rows, 1, heads, 1)}[kind]
    if is_exact:
        return 2.0 ** torch.randint(-3, 4, sizes, generator=generator).float()
    return torch.rand(sizes, generator=generator) * 1.7 + 0.05


def make(
    layout: str,
    kind: str,
    dtype: torch.dtype,
    device: str,
    *,
    head_dim: int = 64,
    page_size: int = 16,
    is_exact: bool = True,
    rows: int = 1,
    **options: Any,
) -> Case:
    """Five sequences of 8 heads on 2 key heads; pages or dense caches; all unused memory is NaN, including scales of unused pages."""
    generator = torch.Generator().manual_seed(11)
    heads, heads_kv, batch = 8, 2, len(LENGTHS)
    q = torch.randn(batch, heads, rows, head_dim, generator=generator).to(dtype)
    pages = -(-max(LENGTHS) // page_size)
    table = torch.randperm(batch * pages + 3, generator=generator)[: batch * pages].view(batch, pages).to(torch.int32)
    count = batch * pages + 3 if kind == "pages" else batch
    scales = {name: _scale(kind, is_exact, count, heads_kv, generator) for name in ("k_scale", "v_scale")}
    shape = (batch * pages + 3, page_size, heads_kv) if layout == "pages" else (batch, heads_kv, max(LENGTHS))
    caches, wide, sequences = [], [], []
    for scale in scales.values():
        cache = torch.full((*shape, head_dim), NAN_CODE, dtype=torch.uint8).view(E4M3)
        dequantized = torch.full(cache.shape, math.nan, dtype=dtype)
        used = torch.zeros(shape[0], dtype=torch.bool)
        own = []
        for index, length in enumerate(LENGTHS):
            codes = _quantized(torch.randn(heads_kv, length, head_dim, generator=generator))
            rows_of = torch.ones(heads_kv, length, 1)
            if kind == "pages":
                page = table[index, torch.arange(length) // page_size].long()
                rows_of, used[page] = scale[page, 0, :, 0].T[..., None], True
            else:
                rows_of = rows_of * (scale[index] if kind == "sequences" else scale.expand(heads_kv))[:, None, None]
            values = codes.float() * rows_of
            for key in range(length):
                place = (
                    (int(table[index, key // page_size]), key % page_size)
                    if layout == "pages"
                    else (index, slice(None), key)
                )
                cache.view(torch.uint8)[place] = codes[:, key].view(torch.uint8)
                dequantized[place] = values[:, key].to(dtype)
            own.append(values)
        if kind == "pages":
            scale[~used] = math.nan
        caches.append(cache.to(device))
        wide.append(dequantized.to(device))
        sequences.append(own)
    scales = {name: scale.to(device) for name, scale in scales.items()}
    lengths, q = torch.tensor(LENGTHS, dtype=torch.int32, device=device), q.to(device)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(heads, generator=generator).to(device)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.rand(heads, generator=generator).to(device)

    def call(*, has_codes: bool, sequences: slice = slice(None)) -> tuple[Tensor, Tensor]:
        k, v = caches if has_codes else wide
        given = dict(scales) if has_codes else {}
        if kind == "sequences":
            given = {name: scale[sequences] for name, scale in given.items()}
        if layout == "pages":
            options["block_table"] = table.to(device)[sequences]
        else:
            k, v = k[sequences], v[sequences]
        with torch.no_grad():
            result: tuple[Tensor, Tensor] = flashmoe.attention_with_kvcache(
                q[sequences], k, v, cache_seqlens=lengths[sequences], return_lse=True, **given, **options
            )
        assert_ran_here(device)
        return result

    return Case(q, sequences[0], sequences[1], call)


@either
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("layout", "kind"), [("pages", "pages"), ("pages", "sequences"), ("dense", "heads"), ("dense", "one")]
)
def test_powers_of_two_give_the_bits_of_the_dequantised_cache(
    layout: str, kind: str, options: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    case = make(layout, kind, dtype, device, **options)
    of_codes, of_elements = (case.call(has_codes=has_codes) for has_codes in (True, False))
    assert not any(tensor.isnan().any() for tensor in of_codes)
    assert all(torch.equal(one, other) for one, other in zip(of_codes, of_elements, strict=True))


@either
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"window": (37, 0)}, {"sinks": True}, {"head_dim": 24}, {"alibi": True}], ids=str
)
@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize(("layout", "kind"), [("pages", "pages"), ("dense", "sequences"), ("dense", "one")])
def test_many_rows(
    layout: str, kind: str, is_exact: bool, options: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    """On a GPU a chunk kernel reads the codes or, if pages have scales, a copy of the cache in 16 bits."""
    given = {"head_dim": 128, **options}
    case = make(layout, kind, dtype, device, rows=40, causal=True, is_exact=is_exact, **given)
    (of_codes, lse), (of_elements, lse_of_elements) = case.call(has_codes=True), case.call(has_codes=False)
    assert not of_codes.isnan().any()
    if is_exact:
        assert torch.equal(of_codes, of_elements)
        assert torch.equal(lse, lse_of_elements)
        return
    last_bit = 2.0**-10 if dtype is torch.float16 else 2.0**-7
    difference = (of_codes.double() - of_elements.double()).square().mean().sqrt()
    assert difference <= last_bit * of_elements.double().square().mean().sqrt()
    assert torch.allclose(lse, lse_of_elements, atol=0.02)


@either
@pytest.mark.parametrize(("layout", "kind"), [("pages", "pages"), ("pages", "one"), ("dense", "heads")])
@pytest.mark.parametrize("head_dim", [128, 80, 256])
def test_more_rows_than_a_chunk_makes_elements_for(
    head_dim: int, layout: str, kind: str, dtype: torch.dtype, device: str
) -> None:
    """More than eight tiles per key head: on a GPU with a 16-bit copy of the cache, with calls of other sizes in between."""
    case = make(layout, kind, dtype, device, rows=300, causal=True, head_dim=head_dim)
    (of_codes, lse), (of_elements, lse_of_elements) = case.call(has_codes=True), case.call(has_codes=False)
    for sequences in (slice(0, 1), slice(3, 5), slice(None)):
        again, _ = case.call(has_codes=True, sequences=sequences)
        torch.testing.assert_close(again, of_codes[sequences], atol=0.02, rtol=0.0)
    assert torch.equal(again, of_codes)
    assert torch.equal(of_codes, of_elements)
    assert torch.equal(lse, lse_of_elements)


@either
@pytest.mark.parametrize("has_pages", [False, True])
def test_a_window_of_a_long_cache(has_pages: bool, dtype: torch.dtype, device: str) -> None:
    """Keys before the window are not copied, nor are pages that the table no longer lists: their contents do not matter."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 4, 300, 16, generator=generator).to(device, dtype)
    lengths, left = torch.tensor([3000, 900], dtype=torch.int32), 500
    codes = [_quantized(torch.randn(2, 1, 3008, 16, generator=generator)) for _ in range(2)]
    given: dict[str, Any] = {"cache_seqlens": lengths.to(device), "window": (left, 0)}
    if has_pages:
        table = torch.arange(1, 95, dtype=torch.int32).view(2, 47)
        unused = torch.full((1, 64, 1, 16), NAN_CODE, dtype=torch.uint8).view(E4M3)
        pages = [one.transpose(1, 2).reshape(94, 64, 1, 16) for one in codes]
        codes = [torch.cat([one.view(torch.uint8) for one in (unused, own)]).view(E4M3) for own in pages]
        for sequence, length in enumerate(lengths.tolist()):
            table[sequence, : (length - 300 - left) // 64] = -1
        given["block_table"] = table.to(device)
    codes = [one.to(device) for one in codes]
    wide = [one.to(dtype) for one in codes]
    expected = flashmoe.attention_with_kvcache(q, *wide, **given)
    freed = [torch.full((2, 1, 3008, 16), math.nan, dtype=dtype, device=device) for _ in range(2)]
    del freed
    found = flashmoe.attention_with_kvcache(q, *codes, **given)
    assert not found.isnan().any()
    assert torch.equal(found, expected)


@either
@pytest.mark.parametrize("has_page_scales", [False, True])
def test_many_rows_of_pages_with_less_room_than_max_seqlen_k(
    has_page_scales: bool, dtype: torch.dtype, device: str
) -> None:
    """The number of keys is limited by the pages, whatever max_seqlen_k is; also for a 16-bit cache."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(80, 8, 64, generator=generator).to(device, dtype)
    k, v = (_quantized(torch.randn(4, 16, 2, 64, generator=generator)).to(device) for _ in range(2))
    ends, lengths = (torch.tensor(values, dtype=torch.int32, device=device) for values in ((0, 40, 80), (30, 32)))
    table = torch.tensor([[1, 0], [2, 3]], dtype=torch.int32, device=device)
    pages = {"seqused_k": lengths, "block_table": table, "k_scale": 0.5, "v_scale": 2.0}
    if has_page_scales:
        pages["k_scale"] = torch.full((4, 1, 1, 1), 0.5, device=device)
    out, more = (flashmoe.attention_varlen(q, k, v, ends, None, 40, most, **pages) for most in (32, 1000))
    # A chunk kernel may split more keys into more parts.
    torch.testing.assert_close(out, more, atol=0.02, rtol=0.0)


@either
@pytest.mark.parametrize("head_dim", [8, 40, 80, 128, 256])
def test_head_dims(head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Including rows whose size is not a multiple of 16 bytes."""
    case = make("pages", "pages", dtype, device, head_dim=head_dim, page_size=48)
    assert torch.equal(case.call(has_codes=True)[0], case.call(has_codes=False)[0])


@either
@pytest.mark.parametrize("kind", ["one", "sequences", "pages"])
def test_other_scales_are_closer_to_float64_than_the_dequantised_cache(
    kind: str, dtype: torch.dtype, device: str
) -> None:
    case = make("pages", kind, dtype, device, is_exact=False, head_dim=128)
    errors = []
    for has_codes in (True, False):
        results = [one.double().cpu() for one in case.call(has_codes=has_codes)]
        squares: list[list[Tensor]] = [[], []]
        for index, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
            if LENGTHS[index] == 0:
                continue
            k, v = (tensor.double().repeat_interleave(4, dim=0) for tensor in (keys, values))
            expected = by_definition(case.q[index].double().cpu(), k, v, Band())
            for kept, mine, other in zip(squares, results, expected, strict=True):
                kept.append((mine[index] - other).square().flatten())
        errors.append([torch.cat(kept).mean().sqrt().item() for kept in squares])
    (out, lse), (out_of_elements, lse_of_elements) = errors
    assert out <= 1.02 * out_of_elements, errors  # both round the output; the remaining error comes from the cache
    assert device != "cpu" or lse <= 0.1 * lse_of_elements, errors  # lse is not rounded


@either
@pytest.mark.parametrize("rows", [1, 40, 400])
def test_a_cache_that_sequences_or_heads_share(rows: int, dtype: torch.dtype, device: str) -> None:
    """A stride of 0, in each of the kernels: decoding, chunk, and with a 16-bit copy."""
    q, lengths = torch.randn(2, 8, rows, 64, dtype=dtype, device=device), torch.tensor([1000, 990], dtype=torch.int32)
    for shape in ((1, 2, 1000, 64), (2, 1, 1000, 64)):
        k, v = (torch.randn(shape, device=device).to(E4M3).expand(2, 2, 1000, 64) for _ in range(2))
        given = {"causal": True, "cache_seqlens": lengths.to(device)}
        out = flashmoe.attention_with_kvcache(q, k, v, **given)
        assert torch.equal(out, flashmoe.attention_with_kvcache(q, k.contiguous(), v.contiguous(), **given))


def test_one_scale_for_all_pages_goes_with_pages_of_any_size() -> None:
    q, cache = torch.randn(1, 2, 1, 64, dtype=torch.bfloat16), torch.ones(3, 12, 2, 64).to(E4M3)
    used = {
        "cache_seqlens": torch.tensor([30], dtype=torch.int32),
        "block_table": torch.tensor([[2, 0, 1]], dtype=torch.int32),
    }
    out = flashmoe.attention_with_kvcache(q, cache, cache, **used, k_scale=1.0, v_scale=torch.full((1, 1, 1, 1), 2.0))
    assert torch.equal(out, torch.full_like(out, 2.0))
    with pytest.raises(ArgumentError, match="found 12"):
        flashmoe.attention_with_kvcache(q, cache, cache, **used, k_scale=1.0, v_scale=torch.ones(3, 1, 1, 1))


@either
def test_ragged_queries_and_keys(dtype: torch.dtype, device: str) -> None:
    """The arguments of attention_varlen: ragged rows and scales per sequence."""
    generator = torch.Generator().manual_seed(5)
    rows, keys = (3, 1, 0, 7), (40, 1, 5, 130)
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
        for lengths in (rows, keys)
    )
    q = torch.randn(sum(rows), 4, 64, generator=generator).to(dtype).to(device)
    k, v = (torch.randn(sum(keys), 2, 64, generator=generator).to(E4M3).to(device) for _ in range(2))
    scale = (2.0 ** torch.randint(-2, 3, (4, 2), generator=generator)).float().to(device)
    of_keys = scale.repeat_interleave(torch.tensor(keys, device=device), dim=0)[..., None]
    lengths = (cu_q, cu_k, 7, 130)
    got = flashmoe.attention_varlen(q, k, v, *lengths, causal=True, k_scale=scale, v_scale=scale)
    wide = [(codes.float() * of_keys).to(dtype) for codes in (k, v)]
    assert torch.equal(got, flashmoe.attention_varlen(q, *wide, *lengths, causal=True))
    with pytest.raises(ArgumentError, match="alibi_slopes with torch"):
        flashmoe.attention_varlen(q, k, v, *lengths, alibi_slopes=torch.ones(4, device=device))


def test_a_scale_of_a_sequence_without_keys_changes_nothing() -> None:
    """On the CPU, where inexact scales use another code path; keys after the last sequence belong to no sequence."""
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(12, 4, 64, generator=generator).half()
    k, v = (torch.randn(90, 2, 64, generator=generator).to(E4M3) for _ in range(2))
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ((0, 9, 12), (0, 40, 40)))
    scale = torch.tensor([[0.5, 0.25], [0.3, 0.7]])
    got = flashmoe.attention_varlen(q, k, v, cu_q, cu_k, 9, 40, k_scale=scale, v_scale=scale)
    alone = flashmoe.attention_varlen(q[:9], k, v, cu_q[:2], cu_k[:2], 9, 40, k_scale=scale[:1], v_scale=scale[:1])
    assert torch.equal(got[:9], alone)


@either
def test_a_sequence_has_its_bits_in_any_batch(dtype: torch.dtype, device: str) -> None:
    case = make("pages", "pages", dtype, device, is_exact=False, num_splits=1)
    alone = case.call(has_codes=True, sequences=slice(3, 4))
    for whole, one in zip(case.call(has_codes=True), alone, strict=True):
        assert torch.equal(whole[3:4], one)


def test_repeated_calls_have_the_same_bits(device: str) -> None:
    case = make("pages", "pages", torch.bfloat16, device, is_exact=False, head_dim=128)
    first = case.call(has_codes=True)[0]
    for _ in range(3 if device == "cpu" else 200):
        assert torch.equal(case.call(has_codes=True)[0], first)


@pytest.mark.gpu
def test_a_graph_reads_new_lengths() -> None:
    case = make("dense", "one", torch.float16, "cuda")
    k = torch.randn(2, 2, 300, 64, device="cuda").to(E4M3)
    q, used = case.q[:2], torch.tensor([300, 20], dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        flashmoe.attention_with_kvcache(q, k, k, cache_seqlens=used, k_scale=0.3)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = flashmoe.attention_with_kvcache(q, k, k, cache_seqlens=used, k_scale=0.3)
    for lengths in ([7, 300], [0, 1]):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, flashmoe.attention_with_kvcache(q, k, k, cache_seqlens=used, k_scale=0.3))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"v_scale": torch.ones(4, 2)}, ShapeError, r"v_scale\[:, None, :, None\]"),
        ({"k_scale": "1"}, ArgumentTypeError, "found str"),
        ({"k_cache": torch.zeros(4, 8, 2, 64).half(), "k_scale": 2.0}, (DtypeError, ArgumentError), "torch.float16"),
        ({"v_scale": torch.ones(4, 1, 2, 1)}, ArgumentError, "multiple of 16 keys; found 8"),
        ({"q": torch.zeros(2, 4, 1, 64, requires_grad=True).half()}, DifferentiationError, "no gradient"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    cache = torch.zeros(4, 8, 2, 64).to(E4M3)
    given = {"q": torch.zeros(2, 4, 1, 64).half(), "k_cache": cache, "v_cache": cache}
    table = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(error, match=words):
        flashmoe.attention_with_kvcache(
            **{**given, **change}, cache_seqlens=torch.ones(2, dtype=torch.int32), block_table=table
        )


def test_scales_belong_to_codes() -> None:
    cache = torch.zeros(1, 1, 8, 64).half()
    with pytest.raises(ArgumentError, match=r"k_scale is only used with k and v of torch.float8_e4m3fn"):
        flashmoe.attention_with_kvcache(
            cache[:, :, :1], cache, cache, cache_seqlens=torch.ones(1, dtype=torch.int32), k_scale=2.0
        )


def test_compiled() -> None:
    case = make("dense", "one", torch.float16, "cpu")
    k = torch.randn(5, 2, 20, 64).to(E4M3)
    used = torch.full((5,), 20, dtype=torch.int32)

    def function(q: Tensor) -> Tensor:
        out: Tensor = flashmoe.attention_with_kvcache(q, k, k, cache_seqlens=used, k_scale=0.5)
        return out * 2

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(case.q), function(case.q))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float32, torch.int32])
def test_a_floating_scale_is_handed_on_in_float32(dtype: torch.dtype) -> None:
    """A scale of another dtype is passed on unchanged, for the rule that rejects it."""
    found, factor = split_scale("k_scale", torch.ones(2, dtype=dtype))
    assert found is not None
    assert (found.dtype, factor) == (torch.float32 if dtype.is_floating_point else dtype, 1.0)
