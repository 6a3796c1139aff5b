"""Caches of float8_e4m3fn: random lengths, pages, heads and scales, compared with attention by definition in float64, and bit for bit with
the same call on the dequantised cache."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

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
    """The same number of rows in each sequence; scales from about 2^-20 to 2^20, inverted for keys, with queries scaled to keep scores in range."""
    generator = torch.Generator().manual_seed(seed)
    rows, most, batch = sizes[0][0], max(keys for _, keys in sizes), len(sizes)
    q = torch.randn(batch, heads[0], rows, head_dim, generator=generator)
    codes = [torch.randn(batch, heads[1], most, head_dim, generator=generator).to(E4M3) for _ in "kv"]
    pages = -(-most // page_size) if page_size else 1
    table = torch.randperm(batch * pages, generator=generator).view(batch, pages).to(torch.int32)
    has_scales = page_size > 0 and page_size % 16 == 0  # for pages
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


@dataclass(frozen=True)
class Call:
    """A call on codes whose scales are powers of two, or on their values. ``sizes``: rows and keys of each sequence; dense rows are those of the
    first. ``page_size`` 0: a dense cache. ``mask``: "" for none, its dimensions that are not 1 (bool or additive), or "slopes" for ALiBi."""

    sizes: list[tuple[int, int]]
    is_ragged: bool
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    page_size: int
    kinds: tuple[str, str]
    mask: str
    is_bool: bool
    sinks: bool
    window: tuple[int, int]
    softcap: float
    num_splits: int
    seed: int

    def arguments(self, dtype: torch.dtype, device: str, *, has_codes: bool) -> list[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        (heads, heads_kv), batch, most = self.heads, len(self.sizes), max(keys for _, keys in self.sizes)
        rows = [own for own, _ in self.sizes] if self.is_ragged else [self.sizes[0][0]] * batch
        shape = (sum(rows), heads) if self.is_ragged else (batch, heads, rows[0])
        q = torch.randn(*shape, self.head_dims[0], generator=generator).to(dtype)
        pages = -(-most // self.page_size) if self.page_size else 1
        table = torch.randperm(batch * pages, generator=generator).view(batch, pages).int()
        caches, scales = [], []
        for kind, head_dim in zip(self.kinds, self.head_dims, strict=True):
            codes = torch.randn(batch, pages * (self.page_size or most), heads_kv, head_dim, generator=generator)
            of_pages = kind == "pages" and self.page_size % 16 == 0 and self.page_size > 0
            sizes = (batch, pages, heads_kv) if of_pages else (batch if kind != "heads" else 1, 1, heads_kv)
            factor = 2.0 ** torch.randint(-3, 4, sizes, generator=generator).float()
            values = codes.to(E4M3).float() * factor.repeat_interleave(codes.shape[1] // sizes[1], 1)[..., None]
            lengths = torch.tensor([keys for _, keys in self.sizes])
            unused = (torch.arange(codes.shape[1]) >= lengths[:, None])[..., None, None]
            own = (codes if has_codes else values).masked_fill(unused, math.nan).to(E4M3 if has_codes else dtype)
            if self.page_size:
                own = own.view(torch.uint8 if has_codes else torch.int16)
                paged = torch.empty(batch * pages, self.page_size, heads_kv, head_dim, dtype=own.dtype)
                paged[table.flatten().long()] = own.view(paged.shape)
                own = paged.view(E4M3 if has_codes else dtype)
            else:
                own = own.transpose(1, 2)
            if of_pages:
                placed = torch.empty(batch * pages, 1, heads_kv, 1)
                placed[table.flatten().long()] = factor.view(placed.shape)
                factor = placed
            else:
                factor = factor[:, 0] if kind != "heads" else factor[0, 0]
            caches.append(own.to(device))
            scales.append(factor.to(device))
        ends = torch.tensor([0, *rows]).cumsum(0).int().to(device) if self.is_ragged else None
        used = torch.tensor([keys for _, keys in self.sizes], dtype=torch.int32, device=device)
        room = min(most, pages * self.page_size) if self.page_size else most
        mask = None
        if self.mask == "slopes":
            mask = torch.rand(batch, heads, generator=generator).to(device)
        elif self.mask:
            full = {"b": batch, "h": heads, "q": max(rows), "k": room}
            mask = torch.randn([full[axis] if axis in self.mask else 1 for axis in "bhqk"], generator=generator)
            mask = (mask > -1 if self.is_bool else mask.to(dtype)).to(device)
        lengths = (ends, None, used, table.to(device) if self.page_size else None)
        sinks = torch.randn(heads, generator=generator).to(device) if self.sinks else None
        numbers = (max(rows), room, self.head_dims[0] ** -0.5, *self.window, self.softcap, self.num_splits)
        return [q.to(device), *caches, *lengths, sinks, mask, *numbers, *((*scales, 1.0, 1.0) if has_codes else ())]


def run(arguments: list[Any]) -> tuple[Tensor, Tensor]:
    operators = torch.ops.flashmoe
    has_codes = arguments[1].dtype is E4M3
    with torch.inference_mode():
        found: tuple[Tensor, Tensor] = (
            operators.attention_e4m3_forward if has_codes else operators.attention_varlen_forward
        )(*arguments)
    return found


def calls() -> st.SearchStrategy[Call]:
    head_dim = st.sampled_from([16, 24, 64, 80, 128, 192, 256])
    return st.builds(
        Call,
        sizes=st.lists(
            st.tuples(st.integers(1, 300), st.integers(1, 700) | st.integers(1, 300) | st.just(2300)),
            min_size=1,
            max_size=3,
        ),
        is_ragged=st.booleans(),
        heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (8, 2), (8, 1), (16, 1), (3, 3)]),
        head_dims=st.one_of(head_dim.map(lambda size: (size, size)), st.tuples(head_dim, head_dim)),
        page_size=st.sampled_from([0, 7, 12, 16, 48, 64]),
        kinds=st.tuples(*[st.sampled_from(["heads", "sequences", "pages"])] * 2),
        mask=st.sampled_from(["", "", "", "bhqk", "hk", "qk", "slopes"]),
        is_bool=st.booleans(),
        sinks=st.booleans(),
        window=st.sampled_from([(-1, -1), (-1, 0), (-1, 0), (37, 0), (300, 20)]),
        softcap=st.sampled_from([0.0, 0.0, 5.0]),
        num_splits=st.sampled_from([0, 0, 0, 1, 3]),
        seed=st.integers(0, 99),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(call=calls(), dtype=st.sampled_from([torch.float16, torch.bfloat16]))
def test_the_bits_of_the_dequantised_cache(call: Call, dtype: torch.dtype, device: str) -> None:
    """With every option, for any number of rows: the order of sums is that of the call on 16-bit keys."""
    of_codes, of_elements = (run(call.arguments(dtype, device, has_codes=has_codes)) for has_codes in (True, False))
    assert not of_codes[0].isnan().any()
    assert all(torch.equal(*(one.nan_to_num(7.0) for one in pair)) for pair in zip(of_codes, of_elements, strict=True))
