"""flashmoe.mla_decode with indices: attention over the listed keys, for both caches, with the bits of a dense cache of those keys."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashmoe
from flashmoe.errors import ArgumentError, ArgumentTypeError, FlashmoeError
from tests.mla.coded import KEY_BYTES, dequantized
from tests.mla.test_decode import BF16, BOUNDS, F16, F32, LSE_BOUND, SCALE
from tests.mla.test_decode_codes import code, families


@dataclass(frozen=True)
class Case:
    """``topk`` indices per token, a share of ``missing`` of them -1; repeats occur by chance."""

    batch: int
    heads: int
    topk: int
    tokens: int = 1
    pages: int = 6
    page_size: int = 16
    dtype: torch.dtype = BF16
    has_codes: bool = False
    missing: float = 0.2
    sinks: bool = False
    num_splits: int = 0


def make(case: Case, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """(q, cache, the cache in 16 bits, keyword arguments); rows that no index lists hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(case.batch, case.tokens, case.heads, 576, generator=generator).to(case.dtype)
    rows = case.pages * case.page_size
    indices = torch.randint(0, rows, (case.batch, case.tokens, case.topk), generator=generator, dtype=torch.int32)
    indices[torch.rand(indices.shape, generator=generator) < case.missing] = -1
    cache = torch.full((rows, 576), float("nan"))
    named = indices[indices >= 0].long().unique()
    cache[named] = torch.randn(len(named), 576, generator=generator)
    wide = cache.view(case.pages, case.page_size, 576).to(case.dtype)
    given = wide
    if case.has_codes:
        given = code(wide, seed=seed)
        wide = dequantized(given, case.dtype)
    options: dict[str, Any] = {"indices": indices.to(device), "scale": SCALE, "num_splits": case.num_splits}
    if case.sinks:
        options["sinks"] = (torch.randn(case.heads, generator=generator) * 2).to(device)
    return q.to(device), given.to(device), wide.to(device), options


def expected(q: Tensor, wide: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """out and lse in float64, head by head from the definition."""
    rows, indices = wide.cpu().double().flatten(0, 1), options["indices"].cpu()
    out = torch.zeros(*q.shape[:3], 512, dtype=torch.float64)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float64)
    for sequence, token in torch.cartesian_prod(torch.arange(q.shape[0]), torch.arange(q.shape[1])).tolist():
        keys = torch.stack([rows[index] for index in indices[sequence, token].tolist() if index >= 0] or [rows[0] * 0])
        keys = keys if (indices[sequence, token] >= 0).any() else keys[:0]
        for head, query in enumerate(q[sequence, token].cpu().double()):
            terms = keys @ query * options["scale"]
            sink = [] if "sinks" not in options else [options["sinks"][head].cpu().double()]
            every = torch.cat([terms, *(one[None] for one in sink)])
            if not len(every):
                continue
            total = torch.logsumexp(every, 0)
            lse[sequence, head, token] = total
            out[sequence, token, head] = torch.exp(terms - total) @ keys[:, :512]
    return out, lse


def check(case: Case, device: str, seed: int = 0) -> None:
    q, cache, wide, options = make(case, device, seed)
    out, lse = flashmoe.mla_decode(q, cache, **options, return_lse=True)
    want, want_lse = expected(q, wide, options)
    assert out.shape == want.shape
    assert lse.shape == want_lse.shape
    bound = BOUNDS[case.dtype] * max(1.0, want.abs().max().item() if want.numel() else 1.0)
    assert (out.cpu().double() - want).abs().nan_to_num(nan=1e9).max() <= bound, case
    found = lse.cpu().double()
    assert (((found - want_lse).abs() <= 4 * LSE_BOUND) | (found == want_lse)).all(), case


CASES = (
    Case(3, heads=16, topk=77, tokens=2),
    Case(2, heads=128, topk=64, page_size=5, dtype=F16, sinks=True),
    Case(4, heads=5, topk=200, missing=0.95, sinks=True),
    Case(2, heads=40, topk=33, tokens=3, missing=1.0),
    Case(1, heads=64, topk=300, pages=2, page_size=64, missing=0.0, num_splits=1),
    Case(2, heads=3, topk=1, dtype=F16, num_splits=3),
)
both = pytest.mark.parametrize("has_codes", [False, True], ids=["16-bit", "fp8"])


@both
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"h{case.heads}-q{case.tokens}-k{case.topk}")
def test_it_is_attention_over_the_named_keys(device: str, case: Case, has_codes: bool) -> None:
    check(Case(**{**case.__dict__, "has_codes": has_codes}), device)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    draw = data.draw
    has_codes = draw(st.booleans())
    case = Case(
        batch=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 40)),
        topk=draw(st.integers(0, 100)),
        tokens=draw(st.integers(1, 3)),
        page_size=draw(st.sampled_from((1, 7, 16, 64))),
        dtype=draw(st.sampled_from((F16, BF16) if has_codes else (F16, BF16, F32))),
        has_codes=has_codes,
        missing=draw(st.sampled_from((0.0, 0.3, 1.0))),
        sinks=draw(st.booleans()),
        num_splits=draw(st.integers(0, 3)),
    )
    seed = draw(st.integers(0, 99))
    check(case, "cpu", seed)
    if torch.cuda.is_available() and case.dtype != F32:
        check(case, "cuda", seed)


@both
@pytest.mark.parametrize("heads", [3, 8, 16, 24, 128])
@pytest.mark.parametrize("family", families())
def test_the_bits_of_gathered_keys(
    device: str, family: str, heads: int, has_codes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense cache of the listed keys, in their order; trailing -1 equals a shorter sequence."""
    monkeypatch.setenv("FLASHMOE_KERNEL", family if device == "cuda" else "")
    case = Case(4, heads, topk=200, has_codes=has_codes, missing=0.0)
    q, cache, _, options = make(case, device)
    gathered = cache.flatten(0, 1)[options["indices"][:, 0].long()]
    lengths = torch.full((4,), 200, dtype=torch.int32, device=device)
    sparse = flashmoe.mla_decode(q, cache, **options, return_lse=True)
    dense = flashmoe.mla_decode(q, gathered, cache_seqlens=lengths, scale=SCALE, return_lse=True)
    for one, other in zip(sparse, dense, strict=True):
        assert torch.equal(one, other)
    for index, length in enumerate((200, 64, 33, 0)):
        options["indices"][index, :, length:] = -1
        lengths[index] = length
    options["num_splits"] = 1
    sparse = flashmoe.mla_decode(q, cache, **options, return_lse=True)
    dense = flashmoe.mla_decode(q, gathered, cache_seqlens=lengths, scale=SCALE, num_splits=1, return_lse=True)
    for one, other in zip(sparse, dense, strict=True):
        assert torch.equal(one, other)


@both
@pytest.mark.parametrize("heads", [8, 16, 24])
def test_codes_have_the_bits_of_the_dequantised_cache_and_tokens_of_any_batch(
    device: str, heads: int, has_codes: bool
) -> None:
    case = Case(3, heads, topk=130, tokens=2, has_codes=has_codes, num_splits=1)
    q, cache, wide, options = make(case, device)
    out = flashmoe.mla_decode(q, cache, **options)
    assert torch.equal(out, flashmoe.mla_decode(q, wide, **options))
    indices = options.pop("indices")
    one = flashmoe.mla_decode(q[1:2, 1:], cache, indices=indices[1:2, 1:], **options)
    assert torch.equal(one[0, 0], out[1, 1])
    spread = torch.zeros(3, 2, 260, dtype=torch.int32, device=device)[..., ::2]
    spread.copy_(indices)
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(flashmoe.mla_decode(turned, cache, indices=spread, **options), out)


@pytest.mark.gpu
@both
def test_many_keys(has_codes: bool) -> None:
    """2048 of 64k keys, as in DeepSeek's models; the same bits 50 times; rows past the cache are skipped; a graph with other indices."""
    case = Case(8, heads=128, topk=2048, pages=1024, page_size=64, has_codes=has_codes, missing=0.0)
    q, cache, wide, options = make(case, "cuda")
    first = flashmoe.mla_decode(q, cache, **options)
    gathered = wide.flatten(0, 1)[options["indices"][:, 0].long()].double()
    weights = torch.softmax(q[:, 0].double() @ gathered.mT * SCALE, -1)
    want = weights @ gathered[..., :512]
    assert (first[:, 0] - want).abs().max() <= BOUNDS[BF16] * max(1.0, want.abs().max().item())
    for _ in range(50):
        assert torch.equal(flashmoe.mla_decode(q, cache, **options), first)
    options["indices"][::2, :, ::3] = -1
    missing = flashmoe.mla_decode(q, cache, **options)
    kept = options["indices"].clone()
    options["indices"][kept < 0] = 1024 * 64
    assert torch.equal(flashmoe.mla_decode(q, cache, **options), missing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashmoe.mla_decode(q, cache, **options)
    options["indices"].copy_(kept.flip(0))
    graph.replay()
    assert torch.equal(captured, flashmoe.mla_decode(q, cache, **options))


INDICES = torch.tensor([[[0, 95, -1]], [[4, 4, 4]]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"indices": [1]}, ArgumentTypeError, "found list"),
        ({"indices": INDICES + 1}, ArgumentError, r"indices\[0, 0, 1\] is 96; the cache has rows 0 to 95"),
        ({"indices": INDICES - 1}, ArgumentError, r"indices\[0, 0, 2\] is -2"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], error: type[FlashmoeError], words: str) -> None:
    cache = torch.zeros(6, 16, KEY_BYTES, dtype=torch.uint8)
    options: dict[str, Any] = {"scale": SCALE, "indices": INDICES}
    with pytest.raises(error, match=words):
        flashmoe.mla_decode(torch.zeros(2, 1, 4, 576, dtype=BF16), cache, **{**options, **change})


def test_an_empty_cache(device: str) -> None:
    q = torch.zeros(2, 1, 4, 576, dtype=BF16, device=device)
    indices = torch.full((2, 1, 9), -1, dtype=torch.int32, device=device)
    out, lse = flashmoe.mla_decode(
        q, torch.zeros(0, 16, 576, dtype=BF16, device=device), indices=indices, scale=SCALE, return_lse=True
    )
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_it_compiles_whole(device: str) -> None:
    q, cache, _, options = make(Case(2, 4, 20, has_codes=True), device)
    want = flashmoe.mla_decode(q, cache, **options)
    compiled = torch.compile(
        lambda q: flashmoe.mla_decode(q, cache, **options) * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q), want * 2)
    torch.library.opcheck(
        torch.ops.flashmoe.mla_decode.default,
        (q, cache, None, None, None, SCALE, True, 0, options["indices"]),
        test_utils=("test_schema", "test_faketensor"),
    )
