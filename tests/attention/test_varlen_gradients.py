"""Gradients of ragged and windowed attention against autograd through the definition, in float64; merging; torch.func."""

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe import _extension
from flashmoe.errors import ArgumentError, DifferentiationError
from flashmoe.variables import CPU_ISAS

from .gradients import make_leaves
from .reference import DTYPES
from .varlen_reference import Band, Ragged, by_definition, check_ragged, expected

# Error relative to the largest gradient, as in tests/cpu/test_backward.py; the derivative of a softcap costs some more.
LIMITS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
BANDS = (
    Band(causal=True),
    Band(window=(20, 0)),
    Band(window=(5, 40), softcap=3.0),
    Band(causal=True, softcap=2.0, scale=-0.3),
)


def _compare(found: Any, wanted: Any, dtype: torch.dtype) -> None:
    largest = max(gradient.abs().max().item() for gradient in wanted)
    for name, ours, theirs in zip(("dq", "dk", "dv", "dsinks"), found, wanted, strict=False):
        error = (ours.double() - theirs).abs().max().item()
        assert error <= LIMITS[dtype] * largest, f"{name}: {error:.3e} of {largest:.3e}"


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_ragged(band: Band, with_sinks: bool, device: str) -> None:
    """The gradients through out and lse, for q, k, v and sinks; tokens that belong to no sequence have zero gradients."""
    _check_ragged(band, device, DTYPES[device][int(with_sinks) :: 2], with_sinks=with_sinks)


@pytest.mark.parametrize("isa", [isa for isa in CPU_ISAS if isa != "amx"])
def test_instruction_sets(isa: str) -> None:
    """The CPU kernels for every instruction set that this machine has, forward and backward."""
    before = _extension.cpu_isa()
    try:
        _extension.set_cpu_isa(isa)
    except ArgumentError:
        pytest.skip(f"not run: this machine has no {isa}")
    try:
        for dtype in (torch.float32, torch.bfloat16):
            ragged = Ragged((65, 1, 40, 3), (65, 90, 10, 300), 4, 2, 72, 40, spare=2)
            check_ragged(ragged, BANDS[2], "cpu", dtype, with_sinks=True)
            _check_ragged(BANDS[2], "cpu", (dtype,), with_sinks=True)
    finally:
        _extension.set_cpu_isa(before)


def _check_ragged(band: Band, device: str, dtypes: Sequence[torch.dtype], *, with_sinks: bool) -> None:
    ragged = Ragged((65, 1, 0, 70, 40), (65, 90, 4, 131, 10), 4, 2, 64, 40, spare=2)
    tokens = sum(ragged.lengths_q)
    for dtype in dtypes:
        q, k, v = (t.nan_to_num() for t in ragged.tensors(device, dtype))
        sinks = [torch.linspace(-1, 1, 4, device=device)] if with_sinks else []
        ours = make_leaves(q, k, v, *sinks)
        theirs = make_leaves(q, k, v, *sinks, dtype=torch.float64)
        grad_out = torch.randn(tokens, 4, 40, device=device).to(dtype)
        grad_lse = torch.randn(4, tokens, device=device)
        out, lse = flashmoe.attention_varlen(
            *ours[:3],
            *ragged.cu_seqlens(device),
            *ragged.longest,
            sinks=ours[3] if with_sinks else None,
            return_lse=True,
            **band.options,
        )
        seen = lse.detach()[:, :tokens] > -math.inf
        grad_lse = grad_lse.masked_fill(~seen, 0.0)
        found = torch.autograd.grad((out[:tokens], lse[:, :tokens]), ours, (grad_out, grad_lse))
        out, lse = expected(ragged, *theirs[:3], band, theirs[3] if with_sinks else None)
        lse = lse.masked_fill(~seen, 0.0)
        wanted = torch.autograd.grad((out, lse), theirs, (grad_out.double(), grad_lse.double()))
        _compare(found, wanted, dtype)
        assert all(gradient.dtype == leaf.dtype for gradient, leaf in zip(found, ours, strict=True))
        assert not found[0][tokens:].any()
        assert not found[1][sum(ragged.lengths_k) :].any()


@pytest.mark.parametrize("kind", ["bool", "additive", "padding"])
def test_masks(kind: str, device: str) -> None:
    """Dense, with a mask of every shape, a window and a softcap."""
    for dtype in DTYPES[device]:
        shapes = ((2, 4, 70, 64), (2, 2, 150, 64), (2, 2, 150, 64))
        tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        mask = torch.rand(2, 4, 70, 150, device=device) > 0.4
        if kind == "additive":
            mask = torch.randn(70, 150, device=device).to(dtype).masked_fill(~mask[0, 0], -math.inf)
        elif kind == "padding":
            mask = (torch.arange(150, device=device) < 77).view(1, 1, 1, 150)
        band = Band(causal=True, softcap=4.0)
        ours, theirs = make_leaves(*tensors), make_leaves(*tensors, dtype=torch.float64)
        grad_out = torch.randn(2, 4, 70, 64, device=device).to(dtype)
        out = flashmoe.attention(*ours, attn_mask=mask, **band.options)
        found = torch.autograd.grad(out, ours, grad_out)
        wanted = torch.autograd.grad(by_definition(*theirs, band, None, mask)[0], theirs, grad_out.double())
        _compare(found, wanted, dtype)


def test_unused_keys(device: str) -> None:
    """Keys past seqused_k, and before every window, hold NaN: their gradients are zero and no other gradient is NaN. On a GPU keys before
    a window share a tile with visible keys, whose products they would reach with weight 0, so they are finite there."""
    dtype = DTYPES[device][0]
    q, k, v = (torch.randn(2, h, s, 64, device=device).to(dtype) for h, s in ((4, 40), (2, 200), (2, 200)))
    used = torch.tensor([200, 150], dtype=torch.int32, device=device)
    for tensor in (k, v):
        tensor[1, :, 150:] = math.nan
        tensor[0, :, :100] = math.nan if device == "cpu" else 3.0
        tensor[1, :, :50] = math.nan if device == "cpu" else 3.0
    leaves = make_leaves(q, k, v)
    numbers = (0, 0, 0.125, 50, 0, 0.0, 0)
    _extension.load()
    out, _ = torch.ops.flashmoe.attention_varlen_forward(*leaves, None, None, used, None, None, None, *numbers)
    gradients = torch.autograd.grad(out.float().square().sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    for gradient in gradients[1:]:
        assert not gradient[1, :, 150:].any()
        assert not gradient[0, :, :100].any()
        assert gradient[0, :, 120:].any()


def test_same_bits_every_time(device: str) -> None:
    ragged = Ragged((130, 1, 77), (130, 300, 200))
    leaves = make_leaves(*ragged.tensors(device, torch.bfloat16))
    sinks = torch.zeros(4, device=device, requires_grad=True)

    def gradients() -> tuple[Tensor, ...]:
        out = flashmoe.attention_varlen(
            *leaves, *ragged.cu_seqlens(device), *ragged.longest, window=(90, 5), softcap=3.0, sinks=sinks
        )
        return torch.autograd.grad(out.float().sin().sum(), (*leaves, sinks))

    first = gradients()
    for _ in range(3 if device == "cpu" else 50):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


def test_one_kernel_for_long_entries(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On compute capability 9.0: the same bits every time, and close to the two separate kernels, which sum dq in another order."""
    if device == "cpu" or torch.cuda.get_device_capability() != (9, 0) or os.environ.get("FLASHMOE_KERNEL"):
        pytest.skip("not run: needs a GPU of compute capability 9.0, and no family forced")
    for heads_kv, window in ((32, (-1, 0)), (16, (-1, 0)), (32, (2500, 0)), (32, (-1, -1))):
        ragged = Ragged((2048, 0, 65, 3000, 1, 900), (2048, 7, 65, 3000, 1, 1000), 32, heads_kv, spare=5)
        q, k, v = ragged.tensors(device, torch.bfloat16)
        lengths = (*ragged.cu_seqlens(device), *ragged.longest)
        out, lse = flashmoe.attention_varlen(q, k, v, *lengths, window=window, return_lse=True)
        given = (torch.randn_like(out), None, q, k, v, *lengths[:2], None, None, None, out, lse, *lengths[2:], 0.125)
        backward = functools.partial(torch.ops.flashmoe._attention_varlen_backward, *given, *window, 0.0)
        first, again = backward(), backward()
        assert "_varlen_backward_fused_" in _extension.last_kernel()
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        monkeypatch.setenv("FLASHMOE_SPLIT_BACKWARD", "1")
        split = backward()
        assert "_varlen_backward_dkv_" in _extension.last_kernel()
        monkeypatch.delenv("FLASHMOE_SPLIT_BACKWARD")
        _compare(first[:3], [gradient.double() for gradient in split[:3]], torch.bfloat16)
        assert torch.equal(first[3], split[3])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch itself uses it
def test_what_has_no_gradient(device: str) -> None:
    q = torch.randn(1, 2, 5, 64, device=device).half().requires_grad_()
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    used = torch.tensor([5], dtype=torch.int32, device=device)
    plain, sinks = q.detach(), torch.zeros(2, device=device)
    for wanted in range(6):  # each of them in turn
        leaves = [t.detach().requires_grad_(number == wanted) for number, t in enumerate([*(plain,) * 5, sinks])]
        with pytest.raises(DifferentiationError, match=r"under torch\.no_grad"):
            flashmoe.attention_with_kvcache(*leaves[:5], cache_seqlens=used, sinks=leaves[5])
    tokens, pages = q[0].transpose(0, 1), q.transpose(1, 2)
    cu_seqlens = torch.tensor([0, 5], dtype=torch.int32, device=device)
    with torch.autograd.forward_ad.dual_level():
        new = torch.autograd.forward_ad.make_dual(plain, plain)  # the cache would lose its tangents
        with pytest.raises(DifferentiationError, match=r"under torch\.no_grad"):
            flashmoe.attention_with_kvcache(plain, plain, plain, new, new, cache_seqlens=used)
    out = flashmoe.attention_varlen(tokens, pages, pages, cu_seqlens, None, 5, 5, seqused_k=used, block_table=table)
    with pytest.raises(DifferentiationError, match="over pages has no gradient"):
        out.sum().backward()
    out = flashmoe.attention(q, q, q, window=(2, 0))
    (gradient,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(DifferentiationError, match="differentiated once"):
        gradient.sum().backward()
    with pytest.raises(DifferentiationError, match="forward-mode"):
        torch.func.jvp(lambda x: flashmoe.attention(x, x, x, window=(2, 0)), (q.detach(),), (q.detach(),))


def test_torch_func(device: str) -> None:
    """vmap moves the mapped dimension into the batch if it can, and otherwise calls element by element."""
    dtype = DTYPES[device][0]
    q, k, v = (torch.randn(3, 2, h, 20, 64, device=device).to(dtype) for h in (4, 2, 2))
    sinks = torch.randn(3, 4, device=device)

    def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return flashmoe.attention(q, k, v, causal=True, window=(6, 0), softcap=3.0, sinks=sinks).float().square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    own = torch.func.vmap(torch.func.grad(loss, argnums=(0, 3)))(q, k, v, sinks)
    for i in range(3):
        leaves = make_leaves(q[i], k[i], v[i])
        wanted = torch.autograd.grad(loss(*leaves), leaves)
        for found, one in zip(mapped, wanted, strict=True):
            torch.testing.assert_close(found[i], one, rtol=1e-3, atol=1e-3)
        leaves = make_leaves(q[i], sinks[i])
        wanted = torch.autograd.grad(loss(leaves[0], k[i], v[i], leaves[1]), leaves)
        for found, one in zip(own, wanted, strict=True):
            torch.testing.assert_close(found[i], one, rtol=1e-3, atol=1e-3)
    ragged = Ragged((5, 9), (5, 9))
    tokens = torch.stack([ragged.tensors(device, dtype, seed)[0] for seed in range(2)])
    keys = ragged.tensors(device, dtype)[1:]
    cu_seqlens = ragged.cu_seqlens(device)
    found = torch.func.vmap(lambda one: flashmoe.attention_varlen(one, *keys, *cu_seqlens, 9, 9))(tokens)
    for one, result in zip(tokens, found, strict=True):
        assert torch.equal(flashmoe.attention_varlen(one, *keys, *cu_seqlens, 9, 9), result)


def test_merging_parts_is_the_whole(device: str) -> None:
    """Two halves of the keys, one of them hidden from some rows; and the gradients through both."""
    dtype = DTYPES[device][-1]
    tensors = [torch.randn(2, h, s, 64, device=device).to(dtype) for h, s in ((4, 50), (2, 90), (2, 90))]

    def whole(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = flashmoe.attention(q, k, v, causal=True, return_lse=True)
        return result

    def merged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first = flashmoe.attention(q, k[:, :, :70], v[:, :, :70], window=(-1, 20), return_lse=True)
        second = flashmoe.attention(q, k[:, :, 70:], v[:, :, 70:], causal=True, return_lse=True)
        return flashmoe.merge_attention(*first, *second)

    ours, wanted = make_leaves(*tensors), make_leaves(*tensors)
    found, plain = merged(*ours), whole(*wanted)
    close = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 2e-2}
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, **close)
    upstream = [torch.randn_like(t) for t in found]
    for a, b in zip(
        torch.autograd.grad(found, ours, upstream), torch.autograd.grad(plain, wanted, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4 if dtype is torch.float32 else 0.1)


def test_merging_nothing() -> None:
    """Rows that neither part sees stay empty; a part of weight 0 is ignored; also for ragged results."""
    out = torch.randn(6, 2, 8)
    lse = torch.randn(2, 6)
    nothing = torch.full((2, 6), -math.inf)
    merged, total = flashmoe.merge_attention(out, lse, torch.full_like(out, math.nan), nothing)
    assert torch.equal(merged, out)
    torch.testing.assert_close(total, lse)
    zero, empty = flashmoe.merge_attention(out, nothing, out, nothing)
    assert not zero.any()
    assert torch.equal(empty, nothing)
    with pytest.raises(flashmoe.errors.ShapeError, match="both results with equal shapes"):
        flashmoe.merge_attention(out, lse.mT, out, lse)
    leaves = [t.double().requires_grad_() for t in (out, lse, out + 1, lse - 0.5)]
    assert torch.autograd.gradcheck(flashmoe.merge_attention, leaves)
    assert torch.autograd.gradgradcheck(flashmoe.merge_attention, leaves)
