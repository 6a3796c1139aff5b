"""flash_attn 2's functions on the grid of its own tests (lengths, heads, windows, softcap, packing, caches), compared with fp32 torch."""

import importlib.util
import inspect
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe.compat.flash_attn as names
from flashmoe.compat import bert_padding, flash_attn_gpu, install_as_flash_attn, rotary, uninstall_flash_attn
from flashmoe.errors import ArgumentError, ShapeError

flash_attn: Any = names  # Any: result types depend on the arguments
LENGTHS = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (1, 147), (33, 33)]
WINDOWS = [(-1, -1), (17, 5)]


def expected(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int] = (-1, -1), softcap: float = 0.0
) -> Tensor:
    """[B, S, H, D] in float32, mask aligned bottom-right."""
    q, k, v = (t.float().transpose(1, 2) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = scores.shape[-2:]
    position = torch.arange(rows, device=q.device).unsqueeze(1) + keys - rows
    key = torch.arange(keys, device=q.device)
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device=q.device)
    if window[0] >= 0:
        hidden |= key < position - window[0]
    right = 0 if causal else window[1]
    if right >= 0:
        hidden |= key > position + right
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


def tensors(device: str, rows: int, keys: int, heads: tuple[int, int] = (6, 2), dim: int = 64) -> list[Tensor]:
    dtype = torch.float16 if device == "cuda" else torch.float32
    torch.manual_seed(rows * keys)
    shapes = [(2, rows, heads[0], dim), (2, keys, heads[1], dim), (2, keys, heads[1], dim)]
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]


def close(found: Tensor, wanted: Tensor, factor: float = 1.0) -> bool:
    limit = (4e-3 if found.dtype == torch.float16 else 2e-5) * factor
    return torch.allclose(found.float(), wanted.float(), atol=limit, rtol=limit)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_flash_attn_func(device: str, lengths: tuple[int, int], causal: bool, window: tuple[int, int]) -> None:
    q, k, v = tensors(device, *lengths)
    softcap = 15.0 if lengths == LENGTHS[0] else 0.0
    out, lse, nothing = flash_attn.flash_attn_func(
        q, k, v, causal=causal, window_size=window, softcap=softcap, deterministic=True, return_attn_probs=True
    )
    wanted = expected(q, k, v, causal, window, softcap)
    assert nothing is None
    assert lse.shape == (2, 6, lengths[0])
    assert close(out, wanted)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), upstream)
    gradients = torch.autograd.grad(wanted, (q, k, v), upstream.float())
    assert all(close(a, b, 4) for a, b in zip(found, gradients, strict=True))


def test_packed_forms_give_the_same_bits(device: str) -> None:
    q, k, v = (t.detach() for t in tensors(device, 65, 65, (4, 4)))
    plain = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True), plain)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), 0.0, None, True), plain)
    with pytest.raises(ShapeError, match=r"qkv has shape .* needed: \[batch, length, 3, heads, head_dim\]"):
        flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k), 2))


# flash_attn 2.8's documented interface: these options, and what precedes them in every function except the one for caches.
OPTIONS = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
LENGTH_NAMES = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q k v {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv {OPTIONS}",
    "flash_attn_kvpacked_func": f"q kv {OPTIONS}",
    "flash_attn_varlen_func": f"q k v {LENGTH_NAMES} {OPTIONS} block_table",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {OPTIONS}",
    "flash_attn_varlen_kvpacked_func": f"q kv {LENGTH_NAMES} {OPTIONS}",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
    "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
}


def test_signatures_are_those_of_flash_attn() -> None:
    """In flash_attn's order, because code passes them by position and libraries query the keywords."""
    assert set(SIGNATURES) == set(flash_attn.__all__)
    for name, words in SIGNATURES.items():
        assert list(inspect.signature(getattr(flash_attn, name)).parameters) == words.split(), name


def test_every_option_of_a_packed_form_arrives() -> None:
    q, k, v = (t.detach() for t in tensors("cpu", 33, 33, (4, 4)))
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (7, 0), "softcap": 9.0, "return_attn_probs": True}
    rows, lengths = [t.flatten(0, 1) for t in (q, k, v)], torch.arange(0, q.shape[0] * 33 + 1, 33, dtype=torch.int32)
    dense, packed = flash_attn.flash_attn_func(q, k, v, **options), (lengths, lengths, 33, 33)
    ragged = flash_attn.flash_attn_varlen_func(*rows, *packed, **options)
    for found, wanted in (
        (flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), **options), dense),
        (flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **options), dense),
        (flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack(rows, 1), lengths, 33, **options), ragged),
        (flash_attn.flash_attn_varlen_kvpacked_func(rows[0], torch.stack(rows[1:], 1), *packed, **options), ragged),
    ):
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("causal", [False, True])
def test_padded_batches_unpad_run_and_pad_again(device: str, causal: bool) -> None:
    q, k, v = (t.detach() for t in tensors(device, 40, 40, (4, 4)))
    valid = torch.arange(40, device=device) < torch.tensor([[40], [17]], device=device)
    rows, indices, cu, longest, used = bert_padding.unpad_input(q, valid)
    assert (longest, used.tolist(), cu.tolist()) == (40, [40, 17], [0, 40, 57])
    keys, values = (bert_padding.unpad_input(t, valid)[0] for t in (k, v))
    again_rows, residual = bert_padding.index_first_axis_residual(q.flatten(0, 1).requires_grad_(), indices)
    assert torch.equal(again_rows, rows)
    assert again_rows.requires_grad
    assert not residual.requires_grad
    packed = flash_attn.flash_attn_varlen_func(rows, keys, values, cu, cu, longest, longest, causal=causal)
    again = flash_attn.flash_attn_varlen_qkvpacked_func(
        torch.stack((rows, keys, values), 1), cu, longest, causal=causal
    )
    third = flash_attn.flash_attn_varlen_kvpacked_func(
        rows, torch.stack((keys, values), 1), cu, cu, longest, longest, causal=causal
    )
    assert torch.equal(packed, again)
    assert torch.equal(packed, third)
    out = bert_padding.pad_input(packed, indices, 2, 40)
    for entry, length in enumerate((40, 17)):
        wanted = expected(
            q[entry : entry + 1, :length], k[entry : entry + 1, :length], v[entry : entry + 1, :length], causal
        )
        assert close(out[entry : entry + 1, :length], wanted)
        assert not out[entry, length:].any()


def test_several_sequences_in_a_row_of_a_padded_batch() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0]])
    states = torch.randn(3, 6, 4, 8)
    rows, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(states, lengths)
    assert (longest, cu.tolist(), cu.dtype) == (6, [0, 2, 5, 11, 14, 16], torch.int32)
    assert torch.equal(rows, torch.cat((states[0, :5], states[1], states[2, :5])))
    padded = bert_padding.pad_input(rows, indices, 3, 6)
    assert torch.equal(padded[:, :5], states[:, :5])
    assert not padded[0, 5:].any()


def test_values_that_switch_an_option_off() -> None:
    """softcap: "anything > 0 activates"; a negative side of a window is infinite."""
    q, k, v = (t.detach() for t in tensors("cpu", 33, 33))
    plain = flash_attn.flash_attn_func(q, k, v)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, softcap=-1.0, window_size=[-7, -2]), plain)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new", [0, 1, 5])
def test_a_cache_takes_new_keys_and_is_attended_to(device: str, new: int, paged: bool) -> None:
    rows, room, page = max(new, 1), 64, 16
    q, k_cache, v_cache = (t.detach() for t in tensors(device, rows, room))
    lengths = torch.tensor([40, 7], dtype=torch.int32, device=device)
    fresh = [torch.randn(2, new, 2, 64, device=device, dtype=q.dtype) for _ in range(2)] if new else [None, None]
    wanted = []
    for entry, length in enumerate(lengths.tolist()):
        keys, values = (
            torch.cat([cache[entry, :length]] + ([] if extra is None else [extra[entry]])).unsqueeze(0)
            for cache, extra in zip((k_cache, v_cache), fresh, strict=True)
        )
        wanted.append(expected(q[entry : entry + 1], keys, values, True))
    options = {"k": fresh[0], "v": fresh[1], "cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    caches = [k_cache.clone(), v_cache.clone()]
    table = None
    if paged:
        table = torch.randperm(2 * room // page, device=device).view(2, -1).int()
        pages = [torch.empty(2 * room // page, page, 2, 64, device=device, dtype=q.dtype) for _ in range(2)]
        for target, cache in zip(pages, caches, strict=True):
            target[table.flatten().long()] = cache.reshape(-1, page, 2, 64)
        caches = pages
    out, lse = flash_attn.flash_attn_with_kvcache(q, *caches, block_table=table, **options)
    assert close(out, torch.cat(wanted))
    assert lse.shape == (2, 6, rows)
    if new and not paged:
        assert torch.equal(caches[0][1, 7 : 7 + new], fresh[0][1])


def test_dropout_and_its_signed_probabilities(device: str) -> None:
    """flash_attn's tests take the mask from the signs of S_dmask: plain attention with that mask gives the same output."""
    q, k, v = tensors(device, 33, 50, (4, 2))
    slopes = torch.rand(2, 4, device=q.device)
    options = {"causal": True, "softcap": 20.0, "alibi_slopes": slopes, "return_attn_probs": True}
    torch.manual_seed(1)
    out, lse, signed = flash_attn.flash_attn_func(q, k, v, 0.25, **options)
    assert signed.shape == (2, 4, 33, 50)
    weights = signed.float().abs()
    weights = weights / weights.sum(-1, keepdim=True)
    wanted = (weights * (signed >= 0) / 0.75) @ v.transpose(1, 2).repeat_interleave(2, 1).float()
    assert torch.allclose(out.transpose(1, 2).float(), wanted, atol=1e-2, rtol=1e-2)
    assert torch.allclose(lse, flash_attn.flash_attn_func(q, k, v, **options)[1], atol=1e-4)
    dropped = (signed < 0).sum() / (signed != 0).sum()
    assert abs(dropped.item() - 0.25) < 0.03
    rows, keys = (torch.arange(0, 2 * n + 1, n, dtype=torch.int32, device=q.device) for n in (33, 50))
    torch.manual_seed(1)
    ragged, _, own = flash_attn.flash_attn_varlen_func(
        *(t.flatten(0, 1) for t in (q, k, v)), rows, keys, 33, 50, 0.25, **options
    )
    assert torch.equal(own, signed)
    assert torch.allclose(ragged.view_as(out), out, atol=1e-3)


def test_the_extension_gives_and_takes_the_state_of_dropout(device: str) -> None:
    q, k, v = tensors(device, 33, 33, (4, 2))
    torch.manual_seed(2)
    out = flash_attn.flash_attn_func(q, k, v, 0.25, causal=True)
    upstream = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (q, k, v), upstream)
    plain = [t.detach() for t in (q, k, v)]
    torch.manual_seed(2)
    scores = (0.25, 64**-0.5, True, -1, -1, 0.0)
    found, lse, signed, state = flash_attn_gpu.fwd(*plain, None, None, *scores, True)
    assert torch.equal(found, out)
    assert signed.shape == (2, 4, 33, 33)
    assert state.dtype == torch.int64
    results = [torch.empty_like(t) for t in plain]
    call = (upstream, *plain, found, lse, *results, None, *scores, False)
    flash_attn_gpu.bwd(*call, None, state)
    for a, b in zip(results, wanted, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="pass the rng_state that the forward call returned"):
        flash_attn_gpu.bwd(*call)
    with pytest.raises(RuntimeError, match="only supported when p_dropout > 0"):
        flash_attn_gpu.fwd(*plain, None, None, 0.0, *scores[1:], True)
    with pytest.raises(RuntimeError, match="p_dropout must be at least 0"):
        flash_attn_gpu.fwd(*plain, None, None, 1.0, *scores[1:], False)


@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_alibi_slopes_arrive_everywhere(device: str, softcap: float) -> None:
    """Through every function of flash_attn that has them, and those of its extension."""
    q, k, v = (t.detach() for t in tensors(device, 33, 33, (4, 4)))
    slopes = torch.rand(2, 4, device=device)
    rows, lengths = [t.flatten(0, 1) for t in (q, k, v)], torch.arange(0, 67, 33, dtype=torch.int32, device=device)
    scores = (0.0, None, True, (-1, -1), softcap, slopes)
    wanted = flash_attn.flash_attn_func(q, k, v, *scores)
    plain = flash_attn.flash_attn_func(q, k, v, *scores[:-1])
    assert not close(wanted, plain)
    scale, options = 64**-0.5, {"alibi_slopes": slopes, "softcap": softcap, "causal": True}
    raw = (True, -1, -1, softcap, slopes, False)
    grad = torch.randn_like(wanted)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = flash_attn.flash_attn_func(*leaves, *scores)
    gradients = torch.autograd.grad(out, leaves, grad)
    lse = flash_attn._flash_attn_forward(q, k, v, 0.0, scale, *raw)[1]
    found = [torch.empty_like(t) for t in (q, k, v)]
    flash_attn._flash_attn_backward(grad, q, k, v, wanted, lse, *found, 0.0, scale, *raw)
    assert all(close(a, b) for a, b in zip(found, gradients, strict=True))
    for other in (
        flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), *scores),
        flash_attn.flash_attn_varlen_func(*rows, lengths, lengths, 33, 33, *scores).view_as(q),
        flash_attn._flash_attn_varlen_forward(*rows, lengths, lengths, 33, 33, 0.0, scale, *raw)[0].view_as(q),
        flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=33, **options),
    ):
        assert close(other, wanted)


@pytest.fixture
def installed() -> Iterator[None]:
    install_as_flash_attn()
    yield
    uninstall_flash_attn()


def test_code_that_imports_flash_attn_gets_these(installed: None) -> None:
    install_as_flash_attn()  # idempotent
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import pad_input
    from flash_attn.flash_attn_interface import _flash_attn_forward, flash_attn_gpu, flash_attn_varlen_func
    from flash_attn.layers.rotary import apply_rotary_emb

    assert flash_attn_func is flash_attn.flash_attn_func
    assert flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    assert pad_input is bert_padding.pad_input
    assert apply_rotary_emb is rotary.apply_rotary_emb
    assert _flash_attn_forward is flash_attn._flash_attn_forward
    assert sys.modules["flash_attn_2_cuda"] is flash_attn_gpu
    assert importlib.util.find_spec("flash_attn") is not None  # transformers' check; raises for a module without a spec
    uninstall_flash_attn()
    assert "flash_attn" not in sys.modules


def test_the_real_package_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", type(sys)("flash_attn"))
    with pytest.raises(ArgumentError, match="is installed"):
        install_as_flash_attn()
