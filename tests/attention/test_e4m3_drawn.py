"""Caches of float8_e4m3fn: drawn lengths, pages, heads and scales against attention by definition, in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashmoe

from .drawn import lengths
from .varlen_reference import Band, by_definition

E4M3 = torch.float8_e4m3fn
BANDS = (Band(), Band(causal=True), Band(causal=True, window=(20, 0)), Band(causal=True, softcap=8.0))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=st.lists(lengths(), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (8, 1)]),
    head_dim=st.sampled_from([16, 64, 96, 128, 256]),
    page_size=st.sampled_from([0, 7, 8, 48, 64]),
    scales=st.tuples(*[st.sampled_from(["one", "heads", "sequences", "pages"])] * 2),
    exponent=st.integers(-20, 20),
    band=st.sampled_from(BANDS),
    seed=st.integers(0, 99),
)
def test_any_cache(
    sizes: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    scales: tuple[str, str],
    exponent: int,
    band: Band,
    seed: int,
    device: str,
) -> None:
    """As many rows of each sequence; scales around 2^-20 to 2^20, those of keys the other way about, and queries too, so that scores are as ever."""
    generator = torch.Generator().manual_seed(seed)
    rows, most, batch = sizes[0][0], max(keys for _, keys in sizes), len(sizes)
    q = torch.randn(batch, heads[0], rows, head_dim, generator=generator)
    codes = [torch.randn(batch, heads[1], most, head_dim, generator=generator).to(E4M3) for _ in "kv"]
    pages = -(-most // page_size) if page_size else 1
    table = torch.randperm(batch * pages, generator=generator).view(batch, pages).to(torch.int32)
    has_scales = page_size > 0 and page_size % 16 == 0  # of pages
    kinds = ["sequences" if kind == "pages" and not has_scales else kind for kind in scales]
    shapes = {
        "one": (1, 1, 1),
        "heads": (1, heads[1], 1),
        "sequences": (batch, heads[1], 1),
        "pages": (batch, heads[1], pages),
    }
    factors = [
        2.0 ** (sign * exponent) * (torch.rand(shapes[kind], generator=generator) + 0.5)
        for kind, sign in zip(kinds, (-1, 1), strict=True)
    ]
    q = (q * 2.0**exponent).to(torch.bfloat16)
    given_scales, of_keys = [], []
    for kind, factor in zip(kinds, factors, strict=True):
        of_pages = torch.empty(batch * pages, 1, heads[1], 1)
        of_pages[table.flatten().long()] = factor.expand(batch, heads[1], pages).transpose(1, 2).reshape(of_pages.shape)
        plain: dict[str, tuple[int, ...]] = {"one": (), "heads": (heads[1],), "sequences": (batch, heads[1])}
        given_scales.append(of_pages if kind == "pages" else factor.view(plain[kind]))
        of_keys.append(factor.repeat_interleave(page_size if kind == "pages" else 1, dim=2).expand(batch, heads[1], -1))
    caches = codes
    if page_size:
        caches = []
        for one in codes:
            cache = torch.full((batch * pages, page_size, heads[1], head_dim), 0x7F, dtype=torch.uint8)
            for sequence, (_, keys) in enumerate(sizes):
                for key in range(keys):
                    page = int(table[sequence, key // page_size])
                    cache[page, key % page_size] = one.view(torch.uint8)[sequence, :, key]
            caches.append(cache.view(E4M3))
    used = torch.tensor([keys for _, keys in sizes], dtype=torch.int32)
    out, lse = flashmoe.attention_with_kvcache(
        q.to(device),
        *(one.to(device) for one in caches),
        cache_seqlens=used.to(device),
        block_table=table.to(device) if page_size else None,
        k_scale=given_scales[0].to(device),
        v_scale=given_scales[1].to(device),
        causal=band.causal,
        window=band.window,
        softcap=band.softcap,
        return_lse=True,
    )
    for sequence, (_, keys) in enumerate(sizes):
        k, v = (
            (one[sequence, :, :keys].double() * factor[sequence, :, :keys, None]).repeat_interleave(
                heads[0] // heads[1], dim=0
            )
            for one, factor in zip(codes, of_keys, strict=True)
        )
        expected, expected_lse = by_definition(q[sequence].double(), k, v, band)
        error = (out[sequence].double().cpu() - expected).square().mean().sqrt()
        assert error <= 0.01 * v.square().mean().sqrt()
        seen = ~expected_lse.isinf()
        assert torch.allclose(lse[sequence].double().cpu()[seen], expected_lse[seen], atol=0.02, rtol=1e-3)
