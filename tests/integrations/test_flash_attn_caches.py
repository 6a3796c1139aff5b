"""flash_attn's caches and private functions: the options in its own tests (rotary embedding, left padding, another batch order,
pages, windows of any integers), compared with float32 torch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe.compat.flash_attn as fa2
import flashmoe.compat.flash_attn_3 as fa3
from flashmoe.compat import flash_attn_gpu, install_as_flash_attn_3, rotary, uninstall_flash_attn
from flashmoe.errors import ArgumentError, ShapeError

ROOM, PAGE = 64, 16


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """out [Sq, H, D], lse [H, Sq] for one sequence: q [Sq, H, D], k and v [Sk, Hkv, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
    scores = q.float().transpose(0, 1) @ k.mT / math.sqrt(q.shape[-1])
    rows, keys = scores.shape[-2:]
    distance = torch.arange(keys, device=q.device) - torch.arange(rows, device=q.device).unsqueeze(1) - (keys - rows)
    hidden = (
        (distance > 0) if causal else (distance > window[1] if window[1] >= 0 else torch.zeros_like(distance).bool())
    )
    if window[0] >= 0:
        hidden = hidden | (distance < -window[0])
    scores = scores.masked_fill(hidden, -math.inf)
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ v).transpose(0, 1), torch.logsumexp(scores, -1)


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: list[int], interleaved: bool) -> Tensor:
    """Rotary embedding of x [S, H, D], element by element: complex numbers times exp(i angle), in float64."""
    half = cos.shape[1]
    result = x.double().clone()
    for row, position in enumerate(positions):
        for c in range(half):
            low, high = (2 * c, 2 * c + 1) if interleaved else (c, c + half)
            z = torch.complex(x[row, :, low].double(), x[row, :, high].double())
            z = z * torch.complex(cos[position, c].double(), sin[position, c].double())
            result[row, :, low], result[row, :, high] = z.real, z.imag
    return result.to(x.dtype)


def close(found: Tensor, wanted: Tensor) -> bool:
    limit = 4e-3 if found.dtype == torch.float16 else 2e-5
    return torch.allclose(found.float(), wanted.float(), atol=limit, rtol=limit)


def dtype_of(device: str) -> torch.dtype:
    return torch.float16 if device == "cuda" else torch.float32


# rows, new keys, rotated share of the columns, interleaved, left padding, batch order, pages, causal, window
CACHES = [
    (1, 1, 1.0, False, True, False, False, True, (-1, -1)),
    (1, 1, 0.5, True, False, True, False, False, (-1, -1)),
    (5, 5, 1.0, True, False, False, True, True, (-1, -1)),
    (5, 3, 0.5, False, True, True, False, False, (9, 2)),
    (3, 3, 0.5, False, False, False, True, False, (-1, -1)),
    (4, 0, 0.0, False, True, False, False, False, (7, 1)),
    (4, 0, 0.0, False, True, False, True, True, (-1, -1)),
]


@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
@pytest.mark.parametrize("case", CACHES, ids=lambda case: "-".join(map(str, case)).replace(" ", ""))
def test_a_cache_with_everything(device: str, case: tuple[Any, ...], module: Any) -> None:
    rows, new, share, interleaved, has_left, has_order, paged, causal, window = case
    torch.manual_seed(rows + new)
    make = lambda *shape: torch.randn(*shape, device=device, dtype=dtype_of(device))  # noqa: E731
    q, stored = make(2, rows, 6, 64), (4 if has_order else 2)
    caches = [make(stored, ROOM, 2, 64), make(stored, ROOM, 2, 64)]
    fresh = [make(2, new, 2, 64), make(2, new, 2, 64)] if new else [None, None]
    angle = torch.rand(ROOM, int(32 * share), device=device) * 6.3
    cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
    used, left = [40, 7], ([11, 3] if has_left else [0, 0])
    order = torch.tensor([3, 1] if has_order else [0, 1], device=device)
    wanted, wanted_lse, wanted_keys = [], [], []
    for b in range(2):
        keys, values = (cache[order[b]].clone() for cache in caches)
        first, rotated = used[b], q[b]
        if new:
            positions = list(range(first, first + new))
            keys[first : first + new] = turned(fresh[0][b], cos, sin, positions, interleaved) if share else fresh[0][b]
            values[first : first + new] = fresh[1][b]
            step = 1 if causal or window != (-1, -1) else 0
            rotated = turned(q[b], cos, sin, [first + i * step for i in range(rows)], interleaved) if share else rotated
        span = slice(left[b], first + new)
        out, lse = softmax_attention(rotated, keys[span], values[span], causal, window)
        wanted.append(out)
        wanted_lse.append(lse)
        wanted_keys.append(keys[: first + new])
    table = None
    given = caches
    if paged:
        table = torch.randperm(2 * ROOM // PAGE, device=device).view(2, -1).int()
        given = [torch.empty(2 * ROOM // PAGE, PAGE, 2, 64, device=device, dtype=q.dtype) for _ in caches]
        for target, cache in zip(given, caches, strict=True):
            target[table.flatten().long()] = cache.reshape(-1, PAGE, 2, 64)
    options: dict[str, Any] = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved} if share else {}
    if has_order:
        options["cache_batch_idx"] = order.int()
    if has_left:
        options["cache_leftpad"] = torch.tensor(left, device=device, dtype=torch.int32)
    options["block_table" if module is fa2 else "page_table"] = table
    lengths = torch.tensor(used, device=device, dtype=torch.int32)
    out, lse, *_ = module.flash_attn_with_kvcache(
        q,
        *given,
        *fresh,
        cache_seqlens=lengths,
        causal=causal,
        window_size=torch.tensor(window),
        return_softmax_lse=True,
        **options,
    )
    assert close(out, torch.stack(wanted))
    assert torch.allclose(lse, torch.stack(wanted_lse), atol=4e-3)
    assert lengths.tolist() == used
    for b in range(2 if new else 0):
        stored_keys = given[0][table[b].long()].flatten(0, 1) if paged else given[0][order[b]]
        assert torch.allclose(stored_keys[: used[b] + new].float(), wanted_keys[b].float(), atol=1e-3, rtol=1e-3)


def test_ragged_rows_over_a_cache_and_packed_heads() -> None:
    q, cu = torch.randn(5, 4, 32), torch.tensor([0, 2, 5], dtype=torch.int32)
    caches = [torch.randn(2, ROOM, 2, 32) for _ in range(2)]
    lengths = torch.tensor([30, 9], dtype=torch.int32)
    out = fa3.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, cu_seqlens_q=cu, max_seqlen_q=3, causal=True)
    for b, (begin, end) in enumerate([(0, 2), (2, 5)]):
        keys, values = (cache[b, : int(lengths[b])] for cache in caches)
        assert close(out[begin:end], softmax_attention(q[begin:end], keys, values, True, (-1, -1))[0])
    qkv = torch.randn(1, 9, 8, 32)
    packed = fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
    assert close(packed[0], softmax_attention(*qkv[0].split([4, 2, 2], 1), True, (-1, -1))[0])


def test_windows_of_any_integers(device: str) -> None:
    q = torch.randn(1, 40, 2, 32, device=device, dtype=dtype_of(device))
    plain = fa2.flash_attn_func(q, q, q, window_size=(7, 3))
    for window in (torch.tensor([7, 3]), tuple(torch.tensor([7, 3], device=device)), [7, torch.tensor(3)]):
        assert torch.equal(fa2.flash_attn_func(q, q, q, window_size=window), plain)
        assert torch.equal(fa3.flash_attn_func(q, q, q, window_size=window), plain)
    with pytest.raises(ArgumentError, match=r"must be an integer; found 1\.5"):
        fa2.flash_attn_func(q, q, q, window_size=(1.5, 2))


@pytest.mark.parametrize("window", [(-1, -1), (9, 4)])
@pytest.mark.parametrize("ragged", [False, True])
def test_ring_attention_puts_parts_together(device: str, ragged: bool, window: tuple[int, int]) -> None:
    """Two halves of the keys: merges outputs by their lse, and computes each half's gradients with the complete out and lse."""
    torch.manual_seed(3)
    q, k, v, grad = (torch.randn(2, 48, 4, 64, device=device, dtype=dtype_of(device)) for _ in range(4))
    scale, halves = 64**-0.5, [slice(0, 16), slice(16, 48)]
    if window != (-1, -1):  # a window applies to a single tensor: nothing to divide
        halves = [slice(0, 48)]
    cu = lambda n: torch.tensor([0, n, 2 * n], device=device, dtype=torch.int32)  # noqa: E731
    flat = (lambda t: t.flatten(0, 1).contiguous()) if ragged else (lambda t: t.contiguous())
    parts = []
    for half in halves:
        keys, values, n = flat(k[:, half]), flat(v[:, half]), half.stop - half.start
        scores = (0.0, scale, False, *window, 0.0, None, False)
        if ragged:
            parts.append(fa2._flash_attn_varlen_forward(flat(q), keys, values, cu(48), cu(n), 48, n, *scores))
        else:
            parts.append(fa2._flash_attn_forward(q, keys, values, *scores))
    lses = torch.stack([part[1] for part in parts])
    lse = torch.logsumexp(lses, 0)
    weight = (lses - lse).exp().mT if ragged else (lses - lse).exp().transpose(-1, -2)
    out = sum(part[0].float() * w.unsqueeze(-1) for part, w in zip(parts, weight, strict=True)).to(q.dtype)
    leaves = [t.detach().float().requires_grad_() for t in (q, k, v)]
    wanted = torch.stack([softmax_attention(*(t[b] for t in leaves), False, window)[0] for b in range(2)])
    gradients = torch.autograd.grad(wanted, leaves, grad.float())
    assert close(out, flat(wanted))
    dq = torch.zeros(*flat(q).shape, device=device)
    for half in halves:
        keys, values, n = flat(k[:, half]), flat(v[:, half]), half.stop - half.start
        found = [torch.empty_like(t) for t in (flat(q), keys, values)]
        scores = (0.0, scale, False, *window, 0.0, None, False)
        if ragged:
            tensors = (flat(grad), flat(q), keys, values, out, lse, *found, cu(48), cu(n), 48, n)
            row_dot = fa2._flash_attn_varlen_backward(*tensors, *scores)
        else:
            row_dot = fa2._flash_attn_backward(grad, q, keys, values, out, lse, *found, *scores)
        dq += found[0].float()
        assert torch.allclose(found[1].float(), flat(gradients[1][:, half]), atol=2e-2, rtol=2e-2)
        assert torch.allclose(found[2].float(), flat(gradients[2][:, half]), atol=2e-2, rtol=2e-2)
    assert torch.allclose(dq, flat(gradients[0]), atol=2e-2, rtol=2e-2)
    assert row_dot.shape == lse.shape


def test_forward_over_left_padding_and_pages_of_the_private_function() -> None:
    q, k, v = torch.randn(4, 2, 32), torch.randn(30, 2, 32), torch.randn(30, 2, 32)
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 1, 4], [0, 10, 30]))
    left, fixed = torch.tensor([4, 0], dtype=torch.int32), (3, 20, 0.0, 0.2, False)
    out = fa2._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, *fixed, leftpad_k=left)[0]
    scaled = q * 0.2 * math.sqrt(32)
    assert close(out[:1], softmax_attention(scaled[:1], k[4:10], v[4:10], False, (-1, -1))[0])
    assert close(out[1:], softmax_attention(scaled[1:], k[10:], v[10:], False, (-1, -1))[0])
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        fa2._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, *fixed, num_splits=2)


def test_flash_attn_3_combines_splits() -> None:
    q, k, v = (torch.randn(1, 20, 2, 32) for _ in range(3))
    parts = [fa3._flash_attn_forward(q, k[:, s], v[:, s]) for s in (slice(0, 7), slice(7, 20))]
    lse = torch.stack([part[1].transpose(1, 2) for part in parts])
    out, total = fa3.flash_attn_combine(torch.stack([part[0] for part in parts]), lse)
    wanted, wanted_lse = softmax_attention(q[0], k[0], v[0], False, (-1, -1))
    assert close(out[0], wanted)
    assert torch.allclose(total[0].T, wanted_lse, atol=1e-5)
    empty = fa3.flash_attn_combine(torch.full((2, 1, 1, 1, 4), math.nan), torch.full((2, 1, 1, 1), -math.inf))
    assert (empty[0].tolist(), empty[1].item()) == ([[[[0.0] * 4]]], -math.inf)


@pytest.mark.parametrize("new", [0, 1])
def test_lengths_past_the_block_table_are_a_runtime_error(device: str, new: int) -> None:
    pages = [torch.randn(4, PAGE, 1, 64, device=device, dtype=dtype_of(device)) for _ in range(2)]
    q, fresh = pages[0][:1, :1], (pages[1][:1, :1] if new else None)
    table = torch.zeros(1, 1, device=device, dtype=torch.int32)
    full = torch.full((1,), PAGE + 1 - new, device=device, dtype=torch.int32)
    with pytest.raises(
        RuntimeError, match=r"17 keys.* 1 pages of 16, room for 16; pass a block_table with more columns"
    ):
        fa2.flash_attn_with_kvcache(q, *pages, k=fresh, v=fresh, cache_seqlens=full, block_table=table)
    out = fa2.flash_attn_with_kvcache(q, *pages, cache_seqlens=full - 1 + new, block_table=table)
    assert close(out[0], softmax_attention(q[0], pages[0][0], pages[1][0], False, (-1, -1))[0])


def test_the_extension_s_generator_is_refused() -> None:
    q = torch.randn(1, 1, 2, 8)
    with pytest.raises(RuntimeError, match="generator` argument is no longer supported"):
        flash_attn_gpu.fwd(q, q, q, None, None, 0.0, 0.3, True, -1, -1, 0.0, False, torch.empty(1))
    with pytest.raises(RuntimeError, match="generator` argument is no longer supported"):
        flash_attn_gpu.bwd(q, q, q, q, q, q, None, None, None, None, 0.0, 0.3, True, -1, -1, 0.0, False, q, None)


def test_rotary_of_ragged_rows_its_gradient_and_its_errors() -> None:
    x, angle = torch.randn(7, 2, 12, dtype=torch.float64, requires_grad=True), torch.rand(20, 4) * 6.3
    cos, sin, cu = angle.cos(), angle.sin(), torch.tensor([0, 3, 7], dtype=torch.int32)
    offsets = torch.tensor([5, 11], dtype=torch.int32)
    out = rotary.apply_rotary_emb(x, cos, sin, True, seqlen_offsets=offsets, cu_seqlens=cu)
    assert torch.allclose(out, turned(x, cos, sin, [5, 6, 7, 11, 12, 13, 14], True), atol=1e-5)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert torch.allclose(gradient, turned(torch.ones_like(x), cos, -sin, [5, 6, 7, 11, 12, 13, 14], True), atol=1e-5)
    dense = x.detach().float().unsqueeze(0)
    again = rotary.apply_rotary_emb(dense, cos, sin, inplace=True, seqlen_offsets=2)
    assert again is dense
    assert torch.allclose(dense[0], turned(x.detach().float(), cos, sin, list(range(2, 9)), False), atol=1e-5)
    with pytest.raises(ShapeError, match=r"at most 6 columns; found \[20, 4\]"):
        rotary.apply_rotary_emb(dense[..., :6], cos, sin)
    with pytest.raises(ArgumentError, match="have 20 positions; 25 are needed"):
        rotary.apply_rotary_emb(dense, cos, sin, seqlen_offsets=18)


@pytest.mark.parametrize("scale_base", [None, 16.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_in_place(device: str, interleaved: bool, scale_base: float | None) -> None:
    module = rotary.RotaryEmbedding(8, 100.0, interleaved, scale_base, device).half()  # the tables keep float32 angles
    qkv = torch.randn(2, 5, 3, 4, 12, device=device)
    column = torch.arange(0, 8, 2, dtype=torch.float64)
    longest = torch.arange(9, dtype=torch.float64).unsqueeze(1)
    z = (column + 0.4 * 8) / (1.4 * 8)

    def wanted(x: Tensor, offsets: list[int], length: int, sign: int) -> Tensor:
        angle = longest * 100.0 ** (-column / 8)
        factor = torch.ones(9, 4) if scale_base is None else z ** (sign * (longest - length // 2) / scale_base)
        cos, sin = ((table * factor).float().to(device) for table in (angle.cos(), angle.sin()))
        return torch.stack(
            [turned(row, cos, sin, list(range(o, o + 5)), interleaved) for row, o in zip(x, offsets, strict=False)]
        )

    given = qkv.clone()
    assert module(given, seqlen_offset=2) is given  # the tables have 7 rows
    assert torch.allclose(given[:, :, 0], wanted(qkv[:, :, 0], [2, 2], 7, 1), atol=1e-5)
    assert torch.allclose(given[:, :, 1], wanted(qkv[:, :, 1], [2, 2], 7, -1), atol=1e-5)
    assert torch.equal(given[:, :, 2], qkv[:, :, 2])
    grouped = qkv.flatten(2, 3)[:, :, :8].clone()  # four query heads, two of k, two of v
    q, kv = qkv[:, :, 0].clone(), torch.stack((qkv[:, :, 1, :2], qkv[:, :, 1, 2:]), 2)
    offsets = torch.tensor([1, 4], device=device)
    again = module(q, kv, offsets, max_seqlen=9)
    assert again[0] is q
    assert again[1] is kv
    assert torch.allclose(q, wanted(qkv[:, :, 0], [1, 4], 9, 1), atol=1e-5)
    assert torch.allclose(kv[:, :, 0], wanted(qkv[:, :, 1, :2], [1, 4], 9, -1), atol=1e-5)
    assert torch.equal(module(grouped, seqlen_offset=offsets, num_heads_q=4), torch.cat((q, kv.flatten(2, 3)), 2))
    rows = (
        torch.stack([module._cos_cached[o : o + 5] for o in (1, 4)]),
        torch.stack([module._sin_cached[o : o + 5] for o in (1, 4)]),
    )
    assert torch.allclose(rotary.apply_rotary_emb_torch(qkv[:, :, 0], *rows, interleaved), q, atol=1e-6)
    with pytest.raises(ShapeError, match=r"qkv has shape \[2, 5, 8, 12\] and num_heads_q is None"):
        module(grouped)
    with pytest.raises(ArgumentError, match="seqlen_offset is a tensor; pass max_seqlen"):
        rotary.RotaryEmbedding(8)(qkv, seqlen_offset=offsets)


def test_a_gradient_passes_rotary_embedding_in_place() -> None:
    leaf = torch.randn(1, 5, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    module = rotary.RotaryEmbedding(8)
    (gradient,) = torch.autograd.grad(module(leaf * 1.0).square().sum(), leaf)  # a rotation preserves lengths
    assert torch.allclose(gradient, 2.0 * leaf, atol=1e-5)


@pytest.mark.parametrize("name", ["k_descale", "q_descale"])
def test_what_flash_attn_3_has_more_is_refused_by_name(name: str) -> None:
    q = torch.randn(1, 4, 2, 32)
    with pytest.raises(ArgumentError, match=f"{name} is .* flashmoe does not support {name} .flash_attn 3"):
        fa3.flash_attn_func(q, q, q, **{name: torch.ones(1)})


def test_code_that_imports_flash_attn_3_gets_these() -> None:
    install_as_flash_attn_3()
    install_as_flash_attn_3()
    import flash_attn_interface

    assert flash_attn_interface is fa3
    q, k = torch.randn(2, 5, 4, 32), torch.randn(2, 7, 2, 32)
    out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, k, is_causal=True)
    inputs = [tensor.clone().requires_grad_() for tensor in (q, k, k)]
    again: Any = fa3.flash_attn_func(inputs[0], inputs[1], inputs[2], causal=True)
    assert torch.equal(out, again)
    wanted = torch.autograd.grad(again, inputs, out)
    found = torch.ops.flash_attn_3.bwd(out, q, k, k, out, lse, is_causal=True)
    assert len(found) == 8
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=False))
    combined, _ = torch.ops.flash_attn_3.fwd_combine(torch.stack((out, out)), torch.stack((lse.mT, lse.mT)))
    assert torch.allclose(combined, out, atol=1e-6)
    lengths = torch.ones(2, dtype=torch.int32)
    assert torch.ops.flash_attn_3.get_scheduler_metadata(2, 1, 8, 4, 2, 32, 32, torch.float16, lengths).numel() == 0
    uninstall_flash_attn()
    assert not hasattr(torch.ops.flash_attn_3, "fwd")
