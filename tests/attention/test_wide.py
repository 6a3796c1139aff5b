"""Head dims above 256: which calls support them, and the errors of those that do not."""

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe import _extension
from flashmoe.errors import ShapeError

from . import reference, varlen_reference
from .gradients import make_leaves
from .reference import DTYPES, check_attention
from .varlen_reference import Band, Ragged, check_ragged, compare, to_pages

MOST = 512
# Untyped, because tensors are passed as generators here.
by_definition: Any = varlen_reference.by_definition
plain_attention: Any = reference.plain_attention
ours: Any = flashmoe
# batch, heads, key heads, rows, keys, head dim
SHAPES = (
    (1, 2, 2, 130, 130, 512),
    (2, 4, 1, 70, 201, 512),
    (1, 2, 1, 200, 131, 512),  # rows that see no key
    (3, 1, 1, 65, 33, 264),
    (1, 3, 3, 33, 65, 300),  # not a multiple of 16 bytes
    (2, 8, 1, 1, 1100, 512),  # one position: its heads are the rows
    (1, 32, 1, 1, 1100, 320),  # more heads than a tile of few rows holds
    (1, 2, 1, 40, 1300, 512),  # a block of rows over many keys
    (1, 2, 2, 7, 3, 511),
)


def is_measured_gpu() -> bool:
    return torch.cuda.get_device_capability() == (9, 0) and not os.environ.get("FLASHMOE_KERNEL")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense(shape: tuple[int, ...], causal: bool, device: str) -> None:
    batch, heads, heads_kv, rows, keys, head_dim = shape
    for seed, dtype in enumerate(DTYPES[device]):
        generator = torch.Generator().manual_seed(seed)
        sizes = ((heads, rows), (heads_kv, keys), (heads_kv, keys))
        tensors = [torch.randn(batch, *size, head_dim, generator=generator) for size in sizes]
        q, k, v = (tensor.to(dtype).to(device) for tensor in tensors)
        out, lse = check_attention(q, k, v, causal)
        if device == "cuda":
            assert "_d512" in _extension.last_kernel()
        strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        again = ours.attention(*strided, causal=causal, return_lse=True)
        assert all(torch.equal(one, other) for one, other in zip(again, (out, lse), strict=True))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(512, 512), (512, 128), (64, 512), (320, 264)])
def test_ragged(head_dim: int, head_dim_v: int, device: str) -> None:
    ragged = Ragged((65, 1, 0, 100, 7), (65, 90, 4, 100, 200), 4, 2, head_dim, head_dim_v, spare=3)
    dtypes = DTYPES[device]
    check_ragged(ragged, Band(causal=True), device, dtypes[-1])
    check_ragged(ragged, Band(window=(40, 3), softcap=5.0), device, dtypes[0], with_sinks=True)
    check_ragged(ragged, Band(scale=-0.1), device, dtypes[-1])


@pytest.mark.parametrize(("rows", "page_size"), [(1, 0), (1, 3), (1, 64), (3, 16), (40, 0), (40, 16)])
def test_caches(rows: int, page_size: int, device: str) -> None:
    """Dense and in shuffled pages, with NaN after each sequence's last key; heads that fold, and keys that are split."""
    lengths = (1400 if device == "cuda" else 300, 0, 17, 129)
    sinks = torch.linspace(-1, 2, 8, device=device)
    for seed, band in enumerate((Band(), Band(causal=True, window=(230, 0), softcap=3.0))):
        dtype, sink = DTYPES[device][seed], sinks if seed else None
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(4, 8, rows, MOST, generator=generator)
        k, v = (torch.randn(4, 2, max(lengths), MOST, generator=generator) for _ in range(2))
        for entry, length in enumerate(lengths):
            k[entry, :, length:] = v[entry, :, length:] = math.nan
        q, k, v = (t.to(dtype).to(device) for t in (q, k, v))
        used = torch.tensor(lengths, dtype=torch.int32, device=device)
        caches: tuple[Tensor, Tensor] = (k, v)
        table = None
        if page_size:
            pages = to_pages(k, v, lengths, page_size)
            caches, table = (pages.k, pages.v), pages.block_table
        given = {"cache_seqlens": used, "block_table": table, "sinks": sink, "return_lse": True, **band.options}
        found = ours.attention_with_kvcache(q, *caches, **given)
        whole = ours.attention_with_kvcache(q, *caches, num_splits=1, **given)
        for out, lse in (found, whole):
            for entry, length in enumerate(lengths):
                parts = (q[entry], k[entry, :, :length], v[entry, :, :length])
                wide = by_definition(*(part.double() for part in parts), band, sink)
                compare((out[entry], lse[entry]), wide, by_definition(*parts, band, sink)[0], device)
        # num_splits=1: the same bits in any batch.
        alone = ours.attention_with_kvcache(
            q[3:], *(caches if page_size else (k[3:], v[3:])), num_splits=1,
            **{**given, "cache_seqlens": used[3:], "block_table": None if table is None else table[3:]},
        )  # fmt: skip
        assert torch.equal(alone[0], whole[0][3:])


def test_masks(device: str) -> None:
    for dtype in DTYPES[device]:
        q, k, v = (torch.randn(2, 4, length, MOST, device=device).to(dtype) for length in (33, 90, 90))
        shown = torch.randn(2, 1, 33, 90, device=device) > -0.5
        added = torch.randn(33, 90, device=device).to(dtype)
        for mask in (shown, added):
            out, lse = ours.attention(q, k, v, attn_mask=mask, return_lse=True)
            wide = by_definition(*(t.double() for t in (q, k, v)), Band(), None, _double(mask))
            compare((out, lse), wide, by_definition(q, k, v, Band(), None, mask)[0], device)


def _double(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask.double()


def test_consistent_rows_have_the_same_bits(device: str) -> None:
    """One causal pass, its last rows in separate calls, and the same rows in a ragged batch."""
    for dtype in DTYPES[device]:
        q, k, v = (torch.randn(1, heads, 150, MOST, device=device).to(dtype) for heads in (4, 2, 2))
        whole = ours.attention(q, k, v, causal=True, consistent=True)
        for rows in (1, 5, 33):
            last = ours.attention(q[:, :, -rows:], k, v, causal=True, consistent=True)
            assert torch.equal(last, whole[:, :, -rows:])
        tokens = [t[0].transpose(0, 1) for t in (q, k, v)]
        lengths = torch.tensor([0, 150], dtype=torch.int32, device=device)
        ragged = ours.attention_varlen(*tokens, lengths, lengths, 150, 150, causal=True, consistent=True)
        assert torch.equal(ragged.transpose(0, 1), whole[0])


@pytest.mark.parametrize("rows", [1, 130])
def test_every_run_has_the_same_bits(rows: int, device: str) -> None:
    q, k, v = (torch.randn(2, heads, n, MOST, device=device).bfloat16() for heads, n in ((8, rows), (2, 700), (2, 700)))
    first = ours.attention(q, k, v, return_lse=True)
    for _ in range(100 if device == "cuda" else 3):
        again = ours.attention(q, k, v, return_lse=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_dense_gradients(causal: bool, device: str) -> None:
    """On a GPU by torch's matrix products, block by block; within twice the error of 16-bit torch."""
    for dtype in DTYPES[device]:
        tensors = [torch.randn(1, heads, 90, MOST, device=device).to(dtype) for heads in (4, 2, 2)]
        grad_out = torch.randn(1, 4, 90, MOST, device=device).to(dtype)
        results = []
        ways: Any = (
            (dtype, lambda *own: ours.attention(*own, causal=causal)),
            (torch.float64, lambda *own: plain_attention(*own, causal)[0]),
            (dtype, lambda *own: plain_attention(*own, causal)[0]),
        )
        for kind, attend in ways:
            own = make_leaves(*tensors, dtype=kind)
            out = attend(*own)
            results.append(torch.autograd.grad(out, own, grad_out.to(kind)))
        for found, exact, half in zip(*results, strict=True):
            error, allowed = ((tensor.double() - exact).abs().max().item() for tensor in (found, half))
            assert error <= 2 * (allowed + torch.finfo(dtype).eps * exact.abs().max().item())


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "dropout": ("dropout supports head dims up to 256 on a GPU; found 512", {"dropout_p": 0.1}),
    "ALiBi": ("ALiBi supports head dims up to 256 on a GPU; found 512", {"alibi_slopes": True}),
    "gradient": (
        "the gradient of packed or windowed attention supports head dims up to 256 on a GPU; found 512",
        {"window": (9, 0)},
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gpu_lacks_is_named(name: str) -> None:
    if not is_measured_gpu():
        pytest.skip("not run: the refusal names a forced family, or an older GPU, instead")
    message, options = REFUSED[name]
    if "alibi_slopes" in options:
        options = {"alibi_slopes": torch.rand(2, device="cuda")}
    q = torch.randn(70, 2, MOST, device="cuda", dtype=torch.float16, requires_grad=name == "gradient")
    lengths = torch.tensor([0, 70], dtype=torch.int32, device="cuda")
    with pytest.raises(ShapeError, match=message):
        ours.attention_varlen(q, q, q, lengths, lengths, 70, 70, **options).sum().backward()


def test_sdpa(device: str) -> None:
    q, k, v = (torch.randn(2, 4, n, MOST, device=device).bfloat16() for n in (70, 90, 90))
    options: dict[str, Any] = {"attn_mask": torch.randn(70, 90, device=device).bfloat16()}
    assert ours.explain(q, k, v, **options).path == "flashmoe"
    out = ours.scaled_dot_product_attention(q, k, v, **options)
    wide = by_definition(*(t.double() for t in (q, k, v)), Band(), None, options["attn_mask"].double())[0]
    half = by_definition(q, k, v, Band(), None, options["attn_mask"])[0]
    assert (out.double() - wide).abs().max() <= 2 * (half.double() - wide).abs().max() + 1e-3
    leaf = q.clone().requires_grad_()
    for call in (options, {}, {"is_causal": True}):
        route = ours.explain(leaf, k, v, **call)
        assert route.path == ("flashmoe" if device == "cpu" else "torch")
        assert device == "cpu" or route.reason == "gradients support head dims up to 256 on a GPU, not 512"
        ours.scaled_dot_product_attention(leaf, k, v, **call).sum().backward()
    assert leaf.grad is not None
