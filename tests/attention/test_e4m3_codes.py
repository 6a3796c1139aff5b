"""Caches in e4m3: every code, scales, queries and weights of any range, and appended values."""

import math

import pytest
import torch

import flashmoe

from .test_e4m3 import E4M3, NAN_CODE, _quantized, either, make


@either
@pytest.mark.parametrize("rows", [1, 48, 300])
@pytest.mark.parametrize("exponent", [-20, -7, 0, 20])
def test_every_code(exponent: int, rows: int, dtype: torch.dtype, device: str) -> None:
    """256 sequences of one key, in each of the kernels (decoding, chunk, with a copy). The result is the key's value, the log-sum-exp its score."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    k = torch.zeros(256, 1, 1, 64, dtype=torch.uint8).view(E4M3)
    k.view(torch.uint8)[:, 0, 0, 5] = codes.view(torch.uint8)
    v = torch.stack([codes.view(torch.uint8).roll(-index)[:64] for index in range(256)]).view(E4M3)[:, None, None]
    heads = 1 if rows == 1 else 4
    q = torch.zeros(256, heads, rows, 64, dtype=dtype)
    q[..., 5] = 2.0
    scale = 2.0**exponent
    of_keys = scale if device == "cpu" else 1.0  # on a GPU keys times their scale may not be representable in the type
    out, lse = flashmoe.attention_with_kvcache(
        *(tensor.to(device) for tensor in (q, k, v)),
        cache_seqlens=torch.ones(256, dtype=torch.int32, device=device),
        k_scale=of_keys * 2.0**-6,
        v_scale=scale,
        scale=1.0 / of_keys,
        return_lse=True,
    )
    values, score = (v.float() * scale).expand(out.shape), codes.float() * 2.0**-5
    assert torch.equal(lse.isnan().cpu(), score.isnan()[:, None, None].expand(lse.shape))
    seen = ~score.isnan()
    expected_lse = score[seen][:, None, None].expand(-1, heads, rows)
    # On tensor cores a weight in float16 has 16 bits, and its sum adds it in that form.
    assert torch.allclose(lse.cpu()[seen], expected_lse, atol=2.0**-16, rtol=1e-6)
    expected = values[seen].to(dtype)
    last_bit = 2.0**-24 if dtype is torch.float16 else 0.0  # for subnormal numbers: half of it may round either way
    assert torch.equal(out.cpu()[seen].isnan(), expected.isnan())
    assert torch.allclose(out.cpu()[seen].float().nan_to_num(), expected.float().nan_to_num(), rtol=0.0, atol=last_bit)


@either
@pytest.mark.parametrize("change", ["zeros", "tiny", "huge", "subnormal"])
def test_queries_of_any_range(change: str, dtype: torch.dtype, device: str) -> None:
    """If a kernel has a special form for queries of a small range, it must detect their range."""
    case = make("pages", "heads", dtype, device, head_dim=128)
    least, most = (-14.0, 15.0) if dtype is torch.float16 else (-126.0, 100.0)
    if change == "zeros":
        case.q[:, :4] = 0.0
    elif change == "tiny":
        case.q[..., ::7] *= 2.0 ** (least / 4)
    elif change == "huge":
        case.q[:, 2:, :, 9] = 2.0 ** (most / 5)
    else:
        case.q[:, ::2] = (case.q[:, ::2].float() * 2.0 ** (least - 3)).to(dtype)
    for of_codes, of_elements in zip(case.call(has_codes=True), case.call(has_codes=False), strict=True):
        assert torch.equal(of_codes, of_elements)


@either
@pytest.mark.parametrize("gap", [4, 12, 22, 44])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_weights_of_any_range(gap: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    """A key that outweighs the others by e^gap and whose values are 0: what remains of the others shows every bit of their weights."""
    generator = torch.Generator().manual_seed(5)
    q = torch.zeros(2, 8, 1, head_dim, dtype=dtype)
    q[..., 0] = math.sqrt(head_dim)
    k, v = (_quantized(torch.randn(2, 2, 300, head_dim, generator=generator)) for _ in range(2))
    for place in (0, 299):
        k[..., place, 0], v[..., place, :] = float(gap), 0.0
        wide = [codes.to(dtype).to(device) for codes in (k, v)]
        lengths = torch.tensor([300, 300], dtype=torch.int32, device=device)
        outs = [
            flashmoe.attention_with_kvcache(q.to(device), *cache, cache_seqlens=lengths)
            for cache in ([k.to(device), v.to(device)], wide)
        ]
        assert torch.equal(*outs)
        assert outs[0].isfinite().all()


def test_a_page_without_values_and_one_with_many(device: str) -> None:
    """A scale of zero, as some quantisers give for zeros, and scales 2^40 apart, in one sequence."""
    v = torch.full((3, 16, 1, 64), 1.0).to(E4M3).to(device)
    scale = torch.tensor([0.0, 2.0**-20, 2.0**20], device=device).view(3, 1, 1, 1)
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 1]):
        out = flashmoe.attention_with_kvcache(
            torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device=device),
            *(v, v),
            cache_seqlens=torch.tensor([48], dtype=torch.int32, device=device),
            block_table=torch.tensor([order], dtype=torch.int32, device=device),
            v_scale=scale,
        )
        expected = sum(float(scale[page]) for page in order) / 3
        assert torch.allclose(out.float(), torch.full_like(out, expected).float(), rtol=2**-7)


@either
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_appending_rounds_every_number(scale: float, dtype: torch.dtype, device: str) -> None:
    """All bit patterns: rounded to nearest even, saturating, NaN kept."""
    new = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(4, 2, 64, 128)
    cache = torch.zeros(4, 2, 70, 128, dtype=torch.uint8).view(E4M3).to(device)
    other = torch.zeros_like(cache)
    held = torch.tensor([0, 6, 3, 1], dtype=torch.int32, device=device)
    flashmoe.attention_with_kvcache(
        torch.zeros(4, 2, 1, 128, dtype=dtype, device=device),
        *(cache, other, new.to(device), new.to(device)),
        cache_seqlens=held,
        k_scale=scale,
        v_scale=torch.tensor([scale, scale], device=device),
    )
    divided = new.float() / scale
    codes = divided.clamp(-448.0, 448.0).to(E4M3).view(torch.uint8).masked_fill(divided.isnan(), NAN_CODE)
    expected = torch.zeros(4, 2, 70, 128, dtype=torch.uint8)
    for index, first in enumerate(held.tolist()):
        expected[index, :, first : first + 64] = codes[index]
    for written in (cache, other):
        assert torch.equal(written.view(torch.uint8).cpu(), expected)


@pytest.mark.parametrize("kind", ["heads", "sequences", "pages"])
def test_appended_keys_are_attended_to(kind: str, device: str) -> None:
    """A cache to which new keys are appended gives the same result as a cache that already has them."""
    generator = torch.Generator().manual_seed(3)
    new = torch.randn(2, 2, 5, 64, generator=generator).half().to(device)
    q = torch.randn(2, 4, 1, 64, generator=generator).half().to(device)
    sizes = {"heads": (2,), "sequences": (2, 2), "pages": (4, 1, 2, 1)}[kind]
    scale = (torch.rand(sizes, generator=generator) + 0.5).to(device)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=device)
    held = torch.tensor([14, 3], dtype=torch.int32, device=device)
    caches = [torch.randn(4, 16, 2, 64, generator=generator).to(E4M3).to(device) for _ in range(2)]
    whole = [cache.clone() for cache in caches]
    for index, first in enumerate(held.tolist()):
        for key in range(first, first + 5):
            page = int(table[index, key // 16])
            own = scale if kind == "heads" else scale[index if kind == "sequences" else page].flatten()
            for cache in whole:
                cache[page, key % 16] = (new[index, :, key - first].float() / own[:, None]).to(E4M3)
    options = {"block_table": table, "k_scale": scale, "v_scale": scale}
    grown = flashmoe.attention_with_kvcache(q, *caches, new, new, cache_seqlens=held, **options)
    assert torch.equal(grown, flashmoe.attention_with_kvcache(q, *whole, cache_seqlens=held + 5, **options))
