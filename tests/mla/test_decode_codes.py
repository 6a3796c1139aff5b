"""flashmoe.mla_decode over a cache of 8-bit floats: the bits of the 16-bit kernel on the dequantised cache, and float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashmoe
from flashmoe.errors import DtypeError, FlashmoeError, ShapeError
from tests.mla.coded import KEY_BYTES, VALUES, dequantized
from tests.mla.test_decode import BF16, BOUNDS, CASES, F16, LSE_BOUND, SCALE, Case, expected, make

E4M3 = torch.float8_e4m3fn
FAMILY = "FLASHMOE_KERNEL"
CODED = tuple(replace(case, dtype=F16 if case.dtype == F16 else BF16) for case in CASES)
either = pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])


def code(cache: Tensor, *, is_exact: bool = True, seed: int = 0) -> Tensor:
    """[..., 656] uint8: random codes and scales where ``cache`` [..., 576] has keys, NaN where it has NaN; its rotary values."""
    generator = torch.Generator().manual_seed(seed)
    held, sizes = cache.cpu(), cache.shape[:-1]
    is_empty = held[..., :1].isnan()
    codes = torch.randint(0, 256, (*sizes, 512), generator=generator, dtype=torch.uint8)
    codes = torch.where((codes & 0x7F) > 0x6F, codes & 0x8F, codes)  # up to 208, and no NaN
    scales = 2.0 ** torch.randint(-9, -5, (*sizes, 4), generator=generator).float()
    if not is_exact:
        scales *= torch.rand(*sizes, 4, generator=generator) + 0.5
    coded = torch.cat([codes, scales.view(torch.uint8), held[..., 512:].contiguous().view(torch.uint8)], -1)
    return coded.masked_fill(is_empty, 0x7F).to(cache.device)


def both(
    case: Case, device: str, *, is_exact: bool = True, view: torch.dtype = torch.uint8, seed: int = 0
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(out, lse) on the coded cache, on the dequantised one with the same kernel family, and in float64."""
    q, cache, options = make(case, device, seed)
    coded = code(cache, is_exact=is_exact, seed=seed)
    wide = dequantized(coded, case.dtype).to(device)
    of_codes = flashmoe.mla_decode(q, coded.view(view), **options, return_lse=True)
    of_elements = flashmoe.mla_decode(q, wide, **options, return_lse=True)
    return of_codes, of_elements, expected(q, wide, options)


def check(case: Case, device: str, **how: Any) -> None:
    of_codes, of_elements, want = both(case, device, **how)
    for one, other in zip(of_codes, of_elements, strict=True):
        assert torch.equal(one, other), case
    scale = max(1.0, want[0].abs().max().item() if want[0].numel() else 1.0)
    assert (of_codes[0].cpu().double() - want[0]).abs().max() <= BOUNDS[case.dtype] * scale, case
    found = of_codes[1].cpu().double()
    assert (((found - want[1]).abs() <= LSE_BOUND * scale) | (found == want[1])).all(), case


def families() -> tuple[str, ...]:
    """The kernel families that the GPU runs; ("",) without a GPU."""
    if not torch.cuda.is_available():
        return ("",)
    return ("", "sm80", "sm90") if torch.cuda.get_device_capability() == (9, 0) else ("sm80",)


@pytest.fixture(autouse=True, params=families())
def _one_family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test with the default family for both caches, and with each family forced."""
    monkeypatch.setenv(FAMILY, request.param)


@pytest.mark.parametrize("case", CODED, ids=lambda case: f"h{case.heads}-q{case.tokens}-p{case.page_size}")
@pytest.mark.parametrize("is_exact", [True, False], ids=["powers", "any"])
def test_the_bits_of_the_dequantised_cache(device: str, case: Case, is_exact: bool) -> None:
    check(case, device, is_exact=is_exact)
    check(case, device, is_exact=is_exact, view=E4M3, seed=1)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    draw = data.draw
    case = Case(
        lengths=tuple(draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))),
        heads=draw(st.integers(1, 40)),
        tokens=draw(st.integers(1, 3)),
        page_size=draw(st.sampled_from((0, 16, 48, 64))),
        dtype=draw(st.sampled_from((F16, BF16))),
        causal=draw(st.booleans()),
        sinks=draw(st.booleans()),
        num_splits=draw(st.integers(0, 3)),
    )
    how = {"seed": draw(st.integers(0, 99)), "is_exact": draw(st.booleans())}
    check(case, "cpu", **how)
    if torch.cuda.is_available():
        check(case, "cuda", **how)


@pytest.mark.gpu
@either
def test_long_sequences_and_many(dtype: torch.dtype) -> None:
    check(Case((20000, 3, 700), heads=128, page_size=64, dtype=dtype), "cuda")
    check(Case(tuple(37 * index for index in range(70)), heads=16, dtype=dtype), "cuda")
    check(Case((9000, 8191, 64), heads=8, page_size=64, dtype=dtype, num_splits=1), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2])
def test_few_rows_of_every_number(tokens: int) -> None:
    for lengths, page_size in (((4096, 700, 63, 0), 64), ((1025,), 0)):
        q, cache, options = make(Case(lengths, 16, tokens, page_size), "cuda")
        coded = code(cache)
        wide = dequantized(coded, BF16).to("cuda")
        for heads in range(1, 17):
            options["num_splits"] = heads % 3
            of_codes, of_elements = (
                flashmoe.mla_decode(q[:, :, :heads], held, **options, return_lse=True) for held in (coded, wide)
            )
            for one, other in zip(of_codes, of_elements, strict=True):
                assert torch.equal(one, other), (heads, lengths)


@pytest.mark.gpu
def test_keys_that_lie_apart() -> None:
    q, cache, options = make(Case((700, 33), heads=8, page_size=64), "cuda")
    coded = code(cache)
    spread = torch.full((*coded.shape[:2], KEY_BYTES + 48), 0x7F, dtype=torch.uint8, device="cuda")[..., :KEY_BYTES]
    spread.copy_(coded)
    assert torch.equal(flashmoe.mla_decode(q, spread, **options), flashmoe.mla_decode(q, coded, **options))


def test_sequences_that_share_a_memory(device: str) -> None:
    """A stride of 0, which the copy engine does not support: the bits of a separate cache per sequence."""
    for heads in (8, 40):
        q, cache, options = make(Case((70, 64), heads=heads, page_size=0), device)
        shared = code(cache)[:1].expand(2, -1, -1)
        wide = dequantized(shared, BF16).to(device)
        for one in (shared.contiguous(), wide, wide[:1].expand(2, -1, -1)):
            out = flashmoe.mla_decode(q, shared, **options)
            assert torch.equal(out, flashmoe.mla_decode(q, one, **options)), heads


@either
def test_every_code(dtype: torch.dtype, device: str) -> None:
    """256 sequences of one key, whose value is the result."""
    coded = torch.zeros(256, 1, KEY_BYTES, dtype=torch.uint8)
    coded[:, 0, :512] = (torch.arange(256)[:, None] + torch.arange(512)) % 256
    coded[:, 0, 512:528] = torch.tensor([2.0**-6, 1.0, 2.0**3, 2.0**-9]).view(torch.uint8)
    q = torch.zeros(256, 1, 3, 576, dtype=dtype, device=device)
    lengths = torch.ones(256, dtype=torch.int32, device=device)
    coded_values = VALUES[coded[:, 0, :512].long()]
    is_nan = coded_values.isnan()
    coded[:, 0, :512][is_nan] = 0  # 0 * NaN, in the scores, is NaN in all columns
    out = flashmoe.mla_decode(q, coded.to(device), cache_seqlens=lengths, scale=1.0).cpu()
    want = dequantized(coded[:, 0], dtype)[:, :512]
    assert torch.equal(out, want[:, None, None].expand(256, 1, 3, 512))
    coded[7, 0, 200] = 0x7F
    out = flashmoe.mla_decode(q, coded.to(device), cache_seqlens=lengths, scale=1.0).cpu()
    assert out[7].isnan().all()
    assert not out[:7].isnan().any()


@either
def test_appended_latents_are_attended_to(dtype: torch.dtype, device: str) -> None:
    """Written in chunks and all at once, by lengths and by slots."""
    generator = torch.Generator().manual_seed(4)
    latents = torch.randn(2, 40, 576, generator=generator).to(dtype).to(device)
    q = torch.randn(2, 2, 16, 576, generator=generator).to(dtype).to(device)
    table = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32, device=device)
    caches = [torch.zeros(6, 16, KEY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    for first, count in ((0, 30), (30, 1), (31, 9)):
        held = torch.full((2,), first, dtype=torch.int32, device=device)
        new = latents[:, first : first + count]
        flashmoe.mla_append(new, caches[0], cache_seqlens=held, block_table=table)
    keys = torch.arange(40, device=device)
    flashmoe.mla_append(latents, caches[1], slots=table[:, keys // 16].long() * 16 + keys % 16)
    assert torch.equal(*caches)
    lengths = torch.full((2,), 40, dtype=torch.int32, device=device)
    options: dict[str, Any] = {"cache_seqlens": lengths, "block_table": table, "scale": SCALE}
    out = flashmoe.mla_decode(q, caches[0], **options)
    whole = dequantized(caches[0], dtype)
    assert torch.equal(out, flashmoe.mla_decode(q, whole.to(device), **options))
    error = (whole.to(device)[table[0].long()].flatten(0, 1)[:40] - latents[0]).float().abs().max()
    assert error <= 0.07 * latents.float().abs().max()  # half a step of 3 fraction bits
    assert error > 0


@pytest.mark.gpu
def test_bits_repeat_and_do_not_depend_on_the_batch() -> None:
    case = Case((5000, 63, 1200, 64, 0, 777), heads=16, page_size=64)
    q, cache, options = make(case, "cuda")
    coded = code(cache)
    first = flashmoe.mla_decode(q, coded, **options)
    for _ in range(200):
        assert torch.equal(flashmoe.mla_decode(q, coded, **options), first)
    options["num_splits"] = 1
    together = flashmoe.mla_decode(q, coded, **options)
    for index in range(len(case.lengths)):
        one = {**options, "cache_seqlens": options["cache_seqlens"][index : index + 1]}
        one["block_table"] = options["block_table"][index : index + 1]
        assert torch.equal(flashmoe.mla_decode(q[index : index + 1], coded, **one)[0], together[index])


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_lengths() -> None:
    q, cache, options = make(Case((900, 640, 33), heads=64, page_size=64), "cuda")
    coded = code(cache)
    flashmoe.mla_decode(q, coded, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashmoe.mla_decode(q, coded, **options)
    for lengths in ((900, 640, 33), (1, 0, 33), (64, 639, 2)):
        options["cache_seqlens"].copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(captured, flashmoe.mla_decode(q, coded, **options))


def test_a_wrong_cache_is_named() -> None:
    q, cache, options = make(Case((70, 33), heads=4), "cpu")
    coded = code(cache)
    wrong: tuple[tuple[Tensor, Tensor, type[FlashmoeError], str], ...] = (
        (q, coded.unsqueeze(2), ShapeError, r"squeeze\(2\)"),
        (q, coded.view(torch.int8), DtypeError, "torch.uint8 or torch.float8_e4m3fn"),
    )
    for q_wrong, cache_wrong, error, words in wrong:
        with pytest.raises(error, match=words):
            flashmoe.mla_decode(q_wrong, cache_wrong, **options)


@pytest.mark.gpu
def test_a_cache_off_16_bytes_is_named() -> None:
    q, cache, options = make(Case((70, 33), heads=4), "cuda")
    coded = code(cache)
    moved = torch.zeros(coded.numel() + 16, dtype=torch.uint8, device="cuda")[1 : 1 + coded.numel()]
    with pytest.raises(ShapeError, match="an address 1 bytes past such a multiple"):
        flashmoe.mla_decode(q, moved.view(coded.shape), **options)


def test_autocast_leaves_codes_alone(device: str) -> None:
    q, cache, options = make(Case((70, 33), heads=4), device)
    coded = code(cache).view(E4M3)
    want = flashmoe.mla_decode(q, coded, **options)
    with torch.autocast(device, dtype=BF16):
        assert torch.equal(flashmoe.mla_decode(q.float(), coded, **options), want)


def test_it_compiles_whole(device: str) -> None:
    q, cache, options = make(Case((70, 33), heads=4), device)
    coded = code(cache)
    want = flashmoe.mla_decode(q, coded, **options)
    compiled = torch.compile(
        lambda q: flashmoe.mla_decode(q, coded, **options) * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q), want * 2)
