"""Masks that kernels stream on Hopper: long rows, forward and backward, stored gradients, and bool masks converted to additive ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe_tools.operations.attention.reference import ScoreOptions

from .reference import reference_dtype
from .test_bias_gradient import LIMITS, make, wanted_gradients
from .test_dropout import dropped


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_streamed_mask(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows: -inf in blocks and in entire rows, values near the lowest number, scales of either sign; also the split form, and an unaligned mask."""
    q, k, v = (make("cuda", torch.bfloat16, 2, 4, 640, dim) for _ in range(3))
    bias = torch.randn(2, 4, 640, 640, device="cuda", dtype=torch.bfloat16)
    bias[..., 100:250] = -torch.inf
    bias[:, :, 130:140] = -torch.inf
    bias[:, :, 5, 300:] = torch.finfo(torch.bfloat16).min
    bias.requires_grad_()
    upstream = torch.randn_like(q)

    def gradients(mask: Tensor, scale: float) -> tuple[Tensor, ...]:
        out = flashmoe.attention(q, k, v, attn_mask=mask, scale=scale)
        return torch.autograd.grad(out, (q, k, v, bias), upstream)

    for scale in (dim**-0.5, -0.1):
        fused = gradients(bias, scale)
        assert all(map(torch.equal, fused, gradients(bias, scale)))
        shifted = torch.nn.functional.pad(bias, (1, 1))[..., 1:-1]
        monkeypatch.setenv("FLASHMOE_SPLIT_BACKWARD", "1")
        split = gradients(bias, scale)
        monkeypatch.delenv("FLASHMOE_SPLIT_BACKWARD")
        for other in (split, gradients(shifted, scale)):
            for ours, theirs in zip(fused, other, strict=True):
                assert ours.isfinite().all()
                assert (ours - theirs).abs().max() <= 2e-2 * theirs.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("letters", ["bhqk", "1hqk", "11qk"])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_stored_gradient(letters: str, dim: int) -> None:
    """Computed by the kernel of the other gradients: the same bits on every run, alone and together, and those of the sums in float64, rounded
    once for each sequence and head, and once more."""
    sizes = {"b": 3, "h": 4, "q": 700, "k": 584, "1": 1}
    q, k, v = (make("cuda", torch.bfloat16, 3, 4, length, dim) for length in (700, 584, 584))
    bias = make("cuda", torch.bfloat16, *(sizes[letter] for letter in letters))
    upstream = torch.randn_like(q)
    out = flashmoe.attention(q, k, v, attn_mask=bias)

    leaves = (q, k, v, bias)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        every = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    assert "attention_mask_backward_fused" in names
    assert "attention_bias_gradient" not in names
    assert ("attention_scores_sum" in names) == (letters != "bhqk")
    for _ in range(20):
        again = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
        assert all(map(torch.equal, every, again))
    assert torch.equal(every[3], torch.autograd.grad(out, bias, upstream)[0])
    wanted, rounding = wanted_gradients(leaves, upstream, ScoreOptions())
    error = (every[3] - wanted[3]).abs() - rounding
    assert error.max().item() <= LIMITS[torch.bfloat16] * wanted[3].abs().max().item()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [40, 64, 128])
@pytest.mark.parametrize("letters", ["bhqk", "1hqk", "b1qk", "11qk"])
def test_streamed_forward(dim: int, letters: str) -> None:
    """out and lse of long rows, against the definition and the kernel of consistent calls, which loads the mask itself."""
    sizes = {"b": 2, "h": 4, "q": 530, "k": 648, "1": 1}
    options = ScoreOptions(causal=letters == "1hqk", window=(200, 40) if letters == "b1qk" else None)
    q = torch.randn(2, 4, 530, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 648, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(*(sizes[letter] for letter in letters), device="cuda", dtype=torch.bfloat16)
    lowest = torch.finfo(bias.dtype).min  # times log2(e) it overflows float32
    bias[..., 30:40] = lowest
    bias[:, :, 9] = lowest
    bias[..., 90:200] = -torch.inf
    bias[:, :, 7] = -torch.inf
    high = reference_dtype(q.device)
    ones = torch.ones(2, 4, 530, 648, device="cuda", dtype=high)
    wanted, wanted_lse = dropped(q.to(high), k.to(high), v.to(high), options, bias.to(high), ones)
    given = {"attn_mask": bias, "causal": options.causal, "window": options.window, "return_lse": True}
    out, lse = flashmoe.attention(q, k, v, **given)
    again, _ = flashmoe.attention(q, k, v, **given)
    other, _ = flashmoe.attention(q, k, v, **given, consistent=True)
    assert torch.equal(out, again)
    assert (out - wanted).abs().max() <= LIMITS[q.dtype]
    assert (out.float() - other.float()).abs().max() <= LIMITS[q.dtype]
    assert not out[:, :, 7].any()
    seen = wanted_lse.isfinite()
    assert torch.equal(seen, lse.isfinite())
    assert (lse[:, :, 9] < -1e38).all()
    seen[:, :, 9] = False
    assert (lse[seen] - wanted_lse[seen]).abs().max() <= 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("letters", "keys"), [("b1qk", 645), ("11qk", 648), ("b11k", 645), ("11q1", 648), ("bhqk", 648)]
)
def test_long_bool_masks(letters: str, keys: int, dtype: torch.dtype) -> None:
    """They give the bits of additive masks of 0 and -inf, stored in rows that a copy engine can load."""
    sizes = {"b": 2, "h": 4, "q": 530, "k": keys, "1": 1}
    q = make("cuda", dtype, 2, 4, 530, 64)
    k, v = (make("cuda", dtype, 2, 2, keys, 64) for _ in range(2))
    upstream = torch.randn_like(q)
    mask = torch.rand([sizes[letter] for letter in letters], device="cuda") > 0.4
    if letters != "b11k":
        mask[:, :, 7] = False

    def computed(mask: Tensor, **options: Any) -> tuple[Tensor, ...]:
        out, lse = flashmoe.attention(q, k, v, attn_mask=mask, return_lse=True, **options)
        return out, lse, *torch.autograd.grad(out, (q, k, v), upstream)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        found = computed(mask)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    for kernel in ("attention_mask_forward", "attention_mask_backward_fused"):
        assert kernel in names
    for ours, again, theirs in zip(found, computed(mask), computed(mask, consistent=True), strict=True):
        assert torch.equal(ours, again)
        assert (ours - theirs)[theirs.isfinite()].abs().max() <= 2e-2 * theirs[theirs.isfinite()].abs().max()
        assert torch.equal(ours.isfinite(), theirs.isfinite())
    wide = torch.zeros(*mask.expand(*mask.shape[:2], 530, keys).shape[:3], 648, device="cuda", dtype=dtype)
    wide[..., :keys] = mask.to(dtype).log()
    same = computed(wide[..., :keys])
    assert all(map(torch.equal, found, same))


def structured(kind: str, rows: int, keys: int) -> Tensor:
    """Masks that hide whole blocks: bool [rows, keys]."""
    row, key = torch.arange(rows, device="cuda")[:, None], torch.arange(keys, device="cuda")[None]
    if kind == "causal":
        return key <= row + (keys - rows)
    if kind == "window":
        return (key - row).abs() < 150
    if kind == "documents":
        ends = torch.tensor([70, 400, 410, 700], device="cuda")
        return torch.bucketize(row, ends, right=True) == torch.bucketize(key, ends, right=True)
    blocks = torch.rand(rows // 64 + 1, keys // 64 + 1, device="cuda") < 0.3
    blocks[3:7] = False  # tiles of rows that see nothing
    blocks[:, 2:4] = False  # and of keys that nothing sees
    drawn = torch.rand(rows, keys, device="cuda") < 0.1
    return drawn & blocks.repeat_interleave(64, 0)[:rows].repeat_interleave(64, 1)[:, :keys]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["causal", "window", "documents", "blocks", "blocks, causal"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("heads_kv", "own"), [(4, (1, 1)), (2, (2, 1)), (4, (1, 4))], ids=["one", "sequence", "head"])
def test_what_a_bool_mask_hides_is_skipped(kind: str, dim: int, heads_kv: int, own: tuple[int, int]) -> None:
    """Forward and backward: the bits of the additive mask, whose blocks are all read, and the same on every run."""
    rows, keys, batch = 904, 1000, 2 if own[1] == 1 else 4
    q = make("cuda", torch.bfloat16, batch, 4, rows, dim)
    k, v = (make("cuda", torch.bfloat16, batch, heads_kv, keys, dim) for _ in range(2))
    upstream = torch.randn_like(q)
    mask = torch.stack([structured(kind, rows, keys) for _ in range(own[0] * own[1])]).view(*own, rows, keys)
    options = ScoreOptions(causal=kind.endswith(", causal"))

    def computed(mask: Tensor) -> tuple[Tensor, ...]:
        out, lse = flashmoe.attention(q, k, v, attn_mask=mask, causal=options.causal, return_lse=True)
        return out, lse, *torch.autograd.grad(out, (q, k, v), upstream)

    found = computed(mask)
    for _ in range(20):
        assert all(map(torch.equal, found, computed(mask)))
    assert all(map(torch.equal, found, computed(mask.to(q.dtype).log())))
    high = reference_dtype(q.device)
    every = mask.expand(batch, 4, -1, -1)
    ones = torch.ones(batch, 4, rows, keys, device="cuda", dtype=high)
    added = torch.zeros_like(ones).masked_fill(~every, -torch.inf)
    wanted, wanted_lse = dropped(q.to(high), k.to(high), v.to(high), options, added, ones)
    assert (found[0] - wanted).abs().max() <= LIMITS[q.dtype]
    seen = wanted_lse.isfinite()
    assert torch.equal(seen, found[1].isfinite())
    assert (found[1][seen] - wanted_lse[seen]).abs().max() <= 2e-3
