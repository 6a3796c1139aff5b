"""flashmoe.mla_decode against attention by its definition in float64: layouts, lengths, masks, sinks, bits, graphs, errors."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashmoe
from flashmoe import _extension
from flashmoe.errors import (
    ArgumentError,
    ArgumentTypeError,
    DifferentiationError,
    DtypeError,
    FlashmoeError,
    ShapeError,
)

SCALE = 192**-0.5
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Bounds for results of normal values: rounding of P and of the result; for lse: of exponents.
BOUNDS = {F16: 2e-3, BF16: 1.6e-2, F32: 1e-4}
LSE_BOUND = 1e-3
GARBAGE = 10**6


@dataclass(frozen=True)
class Case:
    """``lengths``: keys of each sequence; pages of ``page_size`` in random order, or 0 for a dense cache."""

    lengths: tuple[int, ...]
    heads: int
    tokens: int = 1
    page_size: int = 16
    dtype: torch.dtype = BF16
    causal: bool = True
    sinks: bool = False
    num_splits: int = 0


def make(case: Case, device: str, seed: int = 0) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """q, the cache and the keyword arguments; NaN after the keys, invalid page numbers after the pages."""
    generator = torch.Generator().manual_seed(seed)
    batch, page = len(case.lengths), case.page_size
    q = torch.randn(batch, case.tokens, case.heads, 576, generator=generator)
    options: dict[str, Any] = {"scale": SCALE, "causal": case.causal, "num_splits": case.num_splits}
    if page == 0:
        cache = torch.full((batch, max(case.lengths) + 5, 576), float("nan"))
        for own, length in zip(cache, case.lengths, strict=True):
            own[:length] = torch.randn(length, 576, generator=generator)
    else:
        counts = [-(-length // page) for length in case.lengths]
        order = torch.randperm(sum(counts) + 2, generator=generator)
        cache = torch.full((len(order), page, 576), float("nan"))
        table = torch.full((batch, max(counts) + 1), GARBAGE, dtype=torch.int32)
        used = 0
        for sequence, (count, length) in enumerate(zip(counts, case.lengths, strict=True)):
            table[sequence, :count] = order[used : used + count]
            for index in range(count):
                rows = min(page, length - index * page)
                cache[order[used + index], :rows] = torch.randn(rows, 576, generator=generator)
            used += count
        options["block_table"] = table.to(device)
    if case.sinks:
        options["sinks"] = (torch.randn(case.heads, generator=generator) * 2).to(device)
    options["cache_seqlens"] = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    return q.to(device, case.dtype), cache.to(device, case.dtype), options


def expected(q: Tensor, cache: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """out and lse in float64, row by row from the definition."""
    q, cache, table = q.cpu().double(), cache.cpu().double(), options.get("block_table")
    outs, lses = [], []
    for sequence, length in enumerate(options["cache_seqlens"].tolist()):
        if table is None:
            keys = cache[sequence, :length]
        else:
            pages = table[sequence, : -(-length // cache.shape[1])].cpu().long()
            keys = cache[pages].flatten(0, 1)[:length]
        for token, rows in enumerate(q[sequence]):
            seen = max(0, length - (q.shape[1] - 1 - token)) if options["causal"] else length
            terms = rows @ keys[:seen].mT * options["scale"]
            sinks = options.get("sinks")
            if sinks is not None:
                terms = torch.cat([terms, sinks.cpu().double()[:, None]], dim=1)
            lse = torch.logsumexp(terms, dim=1) if terms.shape[1] else torch.full((q.shape[2],), -torch.inf).double()
            weights = torch.exp(terms[:, :seen] - torch.where(lse == -torch.inf, 0.0, lse)[:, None])
            outs.append(weights @ keys[:seen, :512])
            lses.append(lse)
    shape = q.shape[:3]
    return torch.stack(outs).view(*shape, 512), torch.stack(lses).view(shape).transpose(1, 2)


def check(case: Case, device: str, seed: int = 0) -> Tensor:
    q, cache, options = make(case, device, seed)
    out, lse = flashmoe.mla_decode(q, cache, **options, return_lse=True)
    want, want_lse = expected(q, cache, options)
    assert out.shape == want.shape
    assert lse.shape == want_lse.shape
    assert out.dtype == case.dtype
    error = (out.cpu().double() - want).abs().max().item()
    assert error <= BOUNDS[case.dtype], f"{case}: {error}"
    found = lse.cpu().double()
    close = ((found - want_lse).abs() <= LSE_BOUND) | (found == want_lse)
    assert close.all(), f"{case}: lse"
    return out


CASES = (
    Case((300, 0, 17, 64), heads=16),
    Case((129, 5), heads=128, tokens=2, page_size=64, sinks=True),
    Case((77, 1, 2), heads=5, tokens=3, page_size=48, dtype=F16),
    Case((200, 64), heads=40, page_size=0, causal=False, num_splits=1),
    Case((64,) * 5, heads=64, page_size=32, dtype=F16, num_splits=3),
    Case((0, 0), heads=3, page_size=16, sinks=True),
    Case((900,), heads=1, page_size=128),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"h{case.heads}-q{case.tokens}-p{case.page_size}")
def test_it_is_attention_over_the_latents(device: str, case: Case) -> None:
    check(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["", "sm80", "sm90"], ids=["chosen", "sm80", "sm90"])
def test_every_family_is_right(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows and many, keys for part of a tile and for hundreds of tiles, few splits and as many as possible."""
    if family == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU does not run the family")
    monkeypatch.setenv("FLASHMOE_KERNEL", family)
    for case in CASES:
        check(case, "cuda")
    check(Case((20000, 3, 700), heads=128, page_size=64), "cuda")
    check(Case(tuple(37 * index for index in range(70)), heads=64), "cuda")
    check(Case((2300,) * 5, heads=128, page_size=64), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [0, 1])
def test_few_rows_have_a_kernel_of_their_own(num_splits: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU has no such kernel")
    for rows, kernel in (
        (8, "few_sm90_bf16_m8"),
        (9, "few_sm90_bf16_m16"),
        (16, "few_sm90_bf16_m16"),
        (17, "sm90_bf16"),
    ):
        check(Case((4096, 700), heads=rows, page_size=64, num_splits=num_splits), "cuda")
        assert _extension.last_kernel() == f"flashmoe_mla_decode_{kernel}", rows
    for rows in (17, 32, 33):
        case = Case((1100, 700), heads=rows, page_size=64, sinks=True, num_splits=num_splits)
        assert torch.equal(check(case, "cuda"), check(case, "cuda"))
        kernel = "few_sm90_bf16_m16" if rows < 33 and num_splits != 1 else "sm90_bf16"
        assert _extension.last_kernel() == f"flashmoe_mla_decode_{kernel}", rows


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    draw = data.draw
    case = Case(
        lengths=tuple(draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))),
        heads=draw(st.integers(1, 20)),
        tokens=draw(st.integers(1, 3)),
        page_size=draw(st.sampled_from((0, 16, 48, 64))),
        dtype=draw(st.sampled_from((F16, BF16, F32))),
        causal=draw(st.booleans()),
        sinks=draw(st.booleans()),
        num_splits=draw(st.integers(0, 3)),
    )
    check(case, "cpu", seed=draw(st.integers(0, 99)))
    if torch.cuda.is_available() and case.dtype != F32:
        check(case, "cuda")


def test_two_halves_merge(device: str) -> None:
    """One of the halves is empty for a sequence: its lse is -inf."""
    q, cache, options = make(Case((96, 40), heads=4, page_size=0, causal=False), device)
    whole, whole_lse = flashmoe.mla_decode(q, cache, **options, return_lse=True)
    parts = []
    for begin, lengths in ((0, (64, 40)), (64, (32, 0))):
        options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
        out, lse = flashmoe.mla_decode(q, cache[:, begin:], **options, return_lse=True)
        parts += [out.transpose(1, 2), lse]
    merged, merged_lse = flashmoe.merge_attention(*parts)
    assert torch.allclose(merged.transpose(1, 2).float(), whole.float(), atol=2e-2)
    assert torch.allclose(merged_lse, whole_lse, atol=1e-3)


def test_strided_and_expanded_inputs(device: str) -> None:
    q, cache, options = make(Case((70, 33), heads=6, tokens=2), device)
    want = flashmoe.mla_decode(q, cache, **options)
    wide = torch.zeros(2, 6, 2, 600, dtype=q.dtype, device=device)
    wide[..., 8:584] = q.transpose(1, 2)
    table = options["block_table"]
    padded = torch.cat([table, torch.full_like(table, GARBAGE)], dim=1)[:, : table.shape[1]]
    spread = torch.full((cache.shape[0], 16, 640), float("nan"), dtype=q.dtype, device=device)
    spread[..., :576] = cache
    options["block_table"] = padded
    assert torch.equal(flashmoe.mla_decode(wide[..., 8:584].transpose(1, 2), spread[..., :576], **options), want)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 32, 128])
def test_bits_repeat_and_do_not_depend_on_the_batch(heads: int) -> None:
    case = Case((5000, 63, 1200, 64, 0, 777), heads=heads, page_size=64)
    q, cache, options = make(case, "cuda")
    first = flashmoe.mla_decode(q, cache, **options)
    for _ in range(200):
        assert torch.equal(flashmoe.mla_decode(q, cache, **options), first)
    options["num_splits"] = 1
    together = flashmoe.mla_decode(q, cache, **options)
    for index in range(len(case.lengths)):
        one = {**options, "cache_seqlens": options["cache_seqlens"][index : index + 1]}
        one["block_table"] = options["block_table"][index : index + 1]
        assert torch.equal(flashmoe.mla_decode(q[index : index + 1], cache, **one)[0], together[index])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_a_graph_is_replayed_with_other_lengths(heads: int) -> None:
    q, cache, options = make(Case((900, 640, 33), heads=heads, page_size=64), "cuda")
    flashmoe.mla_decode(q, cache, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashmoe.mla_decode(q, cache, **options)
    for lengths in ((900, 640, 33), (1, 0, 33), (64, 639, 2)):
        options["cache_seqlens"].copy_(torch.tensor(lengths))
        graph.replay()
        want, _ = expected(q, cache, options)
        assert (captured.cpu().double() - want).abs().max() <= BOUNDS[BF16]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"value_dim": 448}, ArgumentError, "found 448"),
        ({"cache_seqlens": torch.tensor([70, 1000], dtype=torch.int32)}, ArgumentError, r"cache_seqlens\[1\] is 1000"),
        ({"cache_seqlens": torch.tensor([-1, 3], dtype=torch.int32)}, ArgumentError, "is -1"),
        ({"cache_seqlens": [70, 33]}, ArgumentTypeError, "found list"),
        ({"block_table": torch.full((2, 9), 77, dtype=torch.int32)}, ArgumentError, r"block_table\[0, 0\] is 77"),
        ({"causal": 1}, ArgumentTypeError, "causal must be True or False"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], error: type[FlashmoeError], words: str) -> None:
    q, cache, options = make(Case((70, 33), heads=4), "cpu")
    with pytest.raises(error, match=words):
        flashmoe.mla_decode(q, cache, **{**options, **change})


def test_a_wrong_tensor_is_named() -> None:
    q, cache, options = make(Case((70, 33), heads=4), "cpu")
    for q_wrong, cache_wrong, error, words in (
        (q[0], cache, ShapeError, r"found \[1, 4, 576\]"),
        (q, cache.unsqueeze(2), ShapeError, r"squeeze\(2\)"),
        (q.double(), cache.double(), DtypeError, "no kernel for torch.float64"),
    ):
        with pytest.raises(error, match=words):
            flashmoe.mla_decode(q_wrong, cache_wrong, **options)
    with pytest.raises(DifferentiationError, match="no gradient"):
        flashmoe.mla_decode(q.requires_grad_(), cache, **options)


def test_it_compiles_whole(device: str) -> None:
    q, cache, options = make(Case((70, 33), heads=4), device)
    want = flashmoe.mla_decode(q, cache, **options)
    compiled = torch.compile(
        lambda q: flashmoe.mla_decode(q, cache, **options) * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q), want * 2)
    torch.library.opcheck(
        torch.ops.flashmoe.mla_decode.default,
        (q, cache, options["cache_seqlens"], options["block_table"], None, SCALE, True, 0, None),
        test_utils=("test_schema", "test_faketensor"),
    )
