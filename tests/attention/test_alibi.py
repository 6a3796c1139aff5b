"""ALiBi in every function: compared with a bias added by torch in float64, forward and gradients; and what ALiBi must not change."""

import math

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe.errors import ArgumentError, DeviceError, DifferentiationError, ShapeError
from flashmoe_tools.operations.attention.reference import ScoreOptions, attend

from .reference import DTYPES, LSE_TOLERANCE, assert_ran_here, reference_dtype, tolerance


def bias_of(slopes: Tensor, batch: int, rows: int, keys: int) -> Tensor:
    """[B, Hq, Sq, Sk] in float64, from the definition."""
    own = torch.arange(rows, device=slopes.device).unsqueeze(1) + keys - rows
    distance = (own - torch.arange(keys, device=slopes.device)).abs().double()
    return -slopes.double().expand(batch, -1)[:, :, None, None] * distance


# heads, rows, keys, head dim, options, separate slopes per sequence
CASES = [
    ((4, 2), 70, 133, 64, ScoreOptions(causal=True), True),
    ((3, 3), 97, 40, 40, ScoreOptions(), False),
    ((2, 1), 130, 130, 128, ScoreOptions(causal=True, softcap=15.0), True),
    ((2, 2), 200, 211, 111, ScoreOptions(window=(33, 5)), False),
    ((2, 2), 65, 300, 256, ScoreOptions(causal=True), False),
    ((8, 2), 1, 700, 64, ScoreOptions(), True),
    ((2, 2), 3, 259, 192, ScoreOptions(causal=True), False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"q{case[1]}k{case[2]}d{case[3]}")
def test_dense_attention_and_its_gradients(
    device: str, case: tuple[tuple[int, int], int, int, int, ScoreOptions, bool]
) -> None:
    (heads_q, heads_kv), rows, keys, dim, options, own_slopes = case
    for dtype in DTYPES[device]:
        make = lambda heads, length: torch.randn(2, heads, length, dim, device=device).to(dtype).requires_grad_()  # noqa: B023, E731
        q, k, v = make(heads_q, rows), make(heads_kv, keys), make(heads_kv, keys)
        slopes = torch.rand(*((2,) if own_slopes else ()), heads_q, device=device) * 0.3 - 0.02
        keywords = {"causal": options.causal, "window": options.window, "softcap": options.softcap}
        out, lse = flashmoe.attention(q, k, v, **keywords, alibi_slopes=slopes, return_lse=True)
        assert_ran_here(device)
        bias = bias_of(slopes, 2, rows, keys)
        high = reference_dtype(q.device)
        exact = [t.detach().to(high).requires_grad_() for t in (q, k, v)]
        plain = [t.detach().requires_grad_() for t in (q, k, v)]
        wanted, wanted_lse = attend(*exact, options, mask=bias.to(high))
        usual, _ = attend(*plain, options, mask=bias.to(dtype))
        assert (out.detach() - wanted.detach()).abs().max().item() <= tolerance(wanted.detach(), usual.detach())
        assert torch.allclose(lse.detach().to(high), wanted_lse, atol=LSE_TOLERANCE, rtol=LSE_TOLERANCE)
        upstream = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, k, v), upstream)
        expected = torch.autograd.grad(wanted, exact, upstream.to(high))
        rough = torch.autograd.grad(usual, plain, upstream)
        for name, a, b, c in zip("qkv", found, expected, rough, strict=True):
            assert (a - b).abs().max().item() <= tolerance(b, c) + 2e-5, name


def test_ragged_rows_pages_and_a_cache_agree_with_dense_calls(device: str) -> None:
    dtype = DTYPES[device][0]
    lengths_q, lengths_k, page = (5, 33, 1), (70, 33, 129), 16
    slopes = torch.rand(3, 4, device=device) * 0.2
    q, k, v = (torch.randn(sum(n), 4, 64, device=device).to(dtype) for n in (lengths_q, lengths_k, lengths_k))
    cu_q, cu_k = (torch.tensor([0, *n], device=device).cumsum(0).int() for n in (lengths_q, lengths_k))
    out = flashmoe.attention_varlen(q, k, v, cu_q, cu_k, 33, 129, causal=True, alibi_slopes=slopes)
    tables = torch.randperm(3 * 9, device=device).int().view(3, 9)
    pages = [torch.zeros(27, page, 4, 64, device=device, dtype=dtype) for _ in range(2)]
    caches = [torch.zeros(3, 4, 144, 64, device=device, dtype=dtype) for _ in range(2)]
    for b, keys in enumerate(lengths_k):
        for source, target, cache in zip((k, v), pages, caches, strict=True):
            own = source[cu_k[b] : cu_k[b + 1]]
            cache[b, :, :keys] = own.transpose(0, 1)
            padded = torch.nn.functional.pad(own, (0, 0, 0, 0, 0, 144 - keys))
            target[tables[b].long()] = padded.view(9, page, 4, 64)
    used = torch.tensor(lengths_k, device=device, dtype=torch.int32)
    paged = flashmoe.attention_varlen(
        q, *pages, cu_q, None, 33, 129, seqused_k=used, block_table=tables, causal=True, alibi_slopes=slopes
    )
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = [t[s].transpose(0, 1).unsqueeze(0) for t, s in ((q, rows), (k, keys), (v, keys))]
        dense = flashmoe.attention(*own, causal=True, alibi_slopes=slopes[b])
        for found in (out, paged):
            assert torch.allclose(found[rows].transpose(0, 1), dense[0], atol=4e-3, rtol=4e-3)
    last = torch.stack([q[cu_q[b + 1] - 1] for b in range(3)]).unsqueeze(2)
    for given, table in ((caches, None), (pages, tables)):
        step = flashmoe.attention_with_kvcache(last, *given, cache_seqlens=used, block_table=table, alibi_slopes=slopes)
        wanted = torch.stack([out[cu_q[b + 1] - 1] for b in range(3)]).unsqueeze(2)
        assert torch.allclose(step, wanted, atol=4e-3, rtol=4e-3)


def test_a_row_s_bits_do_not_depend_on_its_batch(device: str) -> None:
    dtype = DTYPES[device][0]
    q, k, v = (torch.randn(3, 4, 200, 64, device=device).to(dtype) for _ in range(3))
    slopes = torch.rand(3, 4, device=device)
    out = flashmoe.attention(q, k, v, causal=True, alibi_slopes=slopes)
    alone = flashmoe.attention(q[1:2, 2:3], k[1:2, 2:3], v[1:2, 2:3], causal=True, alibi_slopes=slopes[1:2, 2:3])
    assert torch.equal(out[1:2, 2:3], alone)
    again = flashmoe.attention(q, k, v, causal=True, alibi_slopes=slopes)
    assert torch.equal(out, again)


def test_slopes_of_zero_are_no_bias_and_far_keys_have_no_weight(device: str) -> None:
    dtype = DTYPES[device][0]
    q, k, v = (torch.randn(1, 2, 300, 64, device=device).to(dtype) for _ in range(3))
    none = flashmoe.attention(q, k, v, window=(-1, -1), causal=True)
    zero = flashmoe.attention(q, k, v, causal=True, alibi_slopes=torch.zeros(2, device=device))
    assert torch.allclose(zero, none, atol=2e-3, rtol=2e-3)
    steep = flashmoe.attention(q, k, v, causal=True, alibi_slopes=torch.full((2,), 1e30, device=device))
    assert torch.equal(steep, v)  # each row sees only its own key


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["low", "high", "rising", "wide"])
def test_rows_whose_maximum_is_not_where_the_bias_leads(device: str, kind: str, causal: bool, head_dim: int) -> None:
    """Keys near a row's own with no weight, distant ones with all the weight, rising scores, and large scores."""
    slopes = torch.tensor([0.7, 0.25, 0.02, 0.0, -0.3, 3.0], device=device)
    rows, keys = 150, 700
    for dtype in DTYPES[device]:
        q, k, v = (torch.randn(1, 6, n, head_dim, device=device) for n in (rows, keys, keys))
        if kind == "wide":
            q = 6 * q
        else:
            at = torch.arange(keys, device=device)
            shapes = {"low": -60.0 * (at > keys - 300), "high": 60.0 * (at < 200), "rising": 60.0 * at / keys}
            q[..., 0], k[..., 0] = 4.0, shapes[kind] * head_dim**0.5 / 4
        q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
        out, lse = flashmoe.attention(q, k, v, causal=causal, alibi_slopes=slopes, return_lse=True)
        scores = q.double() @ k.double().mT * head_dim**-0.5 + bias_of(slopes, 1, rows, keys)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(keys - rows + 1).bool(), -math.inf)
        wanted = torch.softmax(scores, -1) @ v.double()
        limit = {torch.bfloat16: 4e-2, torch.float16: 6e-3}.get(dtype, 1e-4)
        assert (out.double() - wanted).abs().max() < limit, dtype
        assert torch.allclose(lse.double(), torch.logsumexp(scores, -1), atol=1e-3, rtol=1e-3)


def test_transforms_autocast_and_compiled_code(device: str) -> None:
    q, k, v = (torch.randn(2, 4, 50, 32, device=device) for _ in range(3))
    slopes = torch.rand(2, 4, device=device) * 0.3  # values that bfloat16 cannot represent
    with torch.autocast(device, torch.bfloat16):
        out = flashmoe.attention(q, k, v, alibi_slopes=slopes)
    cast = [t.bfloat16() for t in (q, k, v)]
    wanted = flashmoe.attention(*cast, alibi_slopes=slopes)
    assert torch.equal(out, wanted)
    mapped = torch.func.vmap(lambda *t: flashmoe.attention(*(x.unsqueeze(0) for x in t[:3]), alibi_slopes=t[3])[0])
    assert torch.equal(mapped(*cast, slopes), wanted)
    compiled = torch.compile(lambda *t: flashmoe.attention(*t[:3], alibi_slopes=t[3]), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*cast, slopes), wanted)


def test_what_is_refused(device: str) -> None:
    q = torch.randn(2, 4, 8, 32, device=device).to(DTYPES[device][0])
    slopes = torch.rand(4, device=device)
    with pytest.raises(ShapeError, match=r"alibi_slopes must be .* here \[2, 4\]; found \[1, 3\]"):
        flashmoe.attention(q, q, q, alibi_slopes=slopes[:3])
    with pytest.raises(ArgumentError, match="attn_mask and alibi_slopes are both given"):
        flashmoe.attention(q, q, q, alibi_slopes=slopes, attn_mask=torch.ones(8, 8, device=device, dtype=torch.bool))
    with pytest.raises(DifferentiationError, match="no gradient for alibi_slopes"):
        flashmoe.attention(q, q, q, alibi_slopes=slopes.requires_grad_())
    with pytest.raises(ShapeError, match="attn_mask must broadcast"):  # of the shape that slopes would have
        flashmoe.attention(q.float().cpu(), q.float().cpu(), q.float().cpu(), attn_mask=torch.zeros(2, 4))
    if device == "cuda":
        with pytest.raises(DeviceError, match="alibi_slopes must be on q's device"):
            flashmoe.attention(q, q, q, alibi_slopes=slopes.detach().cpu())


def test_the_reference_bias_is_the_published_one() -> None:
    """Press et al., figure 3: for a causal square, 0 on the diagonal and -slope for each step to the left."""
    bias = bias_of(torch.tensor([0.5]), 1, 3, 3)[0, 0]
    assert torch.equal(bias.tril(), torch.tensor([[0.0, 0, 0], [-0.5, 0, 0], [-1.0, -0.5, 0]]).double())
    assert math.isclose(bias[0, 2].item(), -1.0)
