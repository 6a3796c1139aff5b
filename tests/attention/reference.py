"""The reference: attention in plain PyTorch, float64 on the CPU and float32 (TF32 off) on a GPU, and the tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import flashmoe
from flashmoe import _extension

LSE_TOLERANCE = 2e-4
# What two ways of rounding may differ by, for results of order 1.
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-10}
DTYPES = {"cpu": (torch.float16, torch.bfloat16, torch.float32), "cuda": (torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class Problem:
    """Sizes of one attention: q [batch, heads_q, seq_q, head_dim], k and v [batch, heads_kv, seq_k, head_dim]."""

    seq_q: int
    seq_k: int
    head_dim: int = 64
    heads_q: int = 2
    heads_kv: int = 2
    batch: int = 1
    causal: bool = False


def make_inputs(
    problem: Problem, device: str, dtype: torch.dtype, kind: str = "normal", *, bshd: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh random q, k, v. ``bshd``: stored as [B, S, H, D], seen as [B, H, S, D] through a transpose."""
    generator = torch.Generator(device).manual_seed(seed)

    def tensor(heads: int, length: int) -> Tensor:
        shape = [problem.batch, heads, length, problem.head_dim]
        if bshd:
            shape[1], shape[2] = shape[2], shape[1]
        values = torch.randn(shape, generator=generator, device=device)
        if kind == "shifted":
            values = values + 0.5
        stored = values.to(dtype)
        return stored.transpose(1, 2) if bshd else stored

    q = tensor(problem.heads_q, problem.seq_q)
    k, v = tensor(problem.heads_kv, problem.seq_k), tensor(problem.heads_kv, problem.seq_k)
    if kind == "logits":
        q = q * 10
    elif kind == "outlier" and k.numel() > 0:
        k[-1, -1, k.shape[2] // 2, k.shape[3] // 2] = 500.0
    elif kind not in ("normal", "shifted", "logits", "outlier"):
        msg = f"unknown kind of input {kind!r}"
        raise ValueError(msg)
    return q, k, v


def visible(seq_q: int, seq_k: int, device: str | torch.device) -> Tensor:
    """[Sq, Sk], True where a bottom-right causal mask lets query i see key j."""
    return torch.ones(seq_q, seq_k, dtype=torch.bool, device=device).tril(seq_k - seq_q)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) by products and a softmax in the dtype of the inputs. A row without keys has out 0 and lse -inf."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q * scale) @ k.mT
    if causal:
        scores = scores.masked_fill(~visible(q.shape[2], k.shape[2], q.device), -math.inf)
    if k.shape[2] == 0:
        return torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=q.dtype, device=q.device)
    weights = scores.softmax(-1)
    if causal and q.shape[2] > k.shape[2]:
        weights = weights.masked_fill(~visible(q.shape[2], k.shape[2], q.device), 0.0)  # rows of NaN, all masked
    return weights @ v, scores.logsumexp(-1)


def reference_dtype(device: str | torch.device) -> torch.dtype:
    return torch.float64 if torch.device(device).type == "cpu" else torch.float32


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) in the reference's precision."""
    dtype = reference_dtype(q.device)
    return plain_attention(q.to(dtype), k.to(dtype), v.to(dtype), causal, scale)


def tolerance(expected: Tensor, plain: Tensor) -> float:
    """The rule: twice plain PyTorch's own error in that dtype, plus twice the rounding of the result.

    The rule is made for 16 bits, where plain PyTorch rounds the scores and we do not. In float32 both round alike and each
    is off by its own luck: over 80 random problems the ratio of the two maxima was 1 on average, 3.7 at most. Hence 6
    there, and two units in the last place, for plain PyTorch can be exact (one key).
    """
    own = (plain.to(expected.dtype) - expected).abs().max().item()
    rounded = expected.to(plain.dtype)
    rounding = (rounded + 0.3 - 0.3 - rounded).abs().max().item()
    if plain.dtype == torch.float32:
        return 6 * own + 2 * rounding + 2 * torch.finfo(torch.float32).eps * expected.abs().max().item()
    return 2 * own + 2 * rounding


def assert_ran_here(device: str | torch.device) -> None:
    """Fail unless the last call of this thread ran flashmoe's own kernel for that device."""
    kernel = _extension.last_kernel()
    wanted = "cpu:" if torch.device(device).type == "cpu" else "flashmoe_attention_"
    assert kernel.startswith(wanted), f"the last kernel was {kernel!r}, not one of flashmoe's for {device}"


def check_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Run flashmoe.attention, compare out and lse with the reference; returns them."""
    out, lse = flashmoe.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert lse.shape == q.shape[:3]
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    if out.numel() == 0:
        return out, lse
    if k.shape[2] > 0:
        assert_ran_here(q.device)
    expected, expected_lse = reference(q, k, v, causal, scale)
    plain, _ = plain_attention(q, k, v, causal, scale)
    assert torch.isfinite(expected).all(), "the reference is not finite: this case cannot be compared by differences"
    limit = tolerance(expected, plain)
    error = (out.to(expected.dtype) - expected).abs().max().item()
    assert error <= limit, f"max error {error:.3e} over {limit:.3e} for q {list(q.shape)}, k {list(k.shape)}, {q.dtype}"
    assert not torch.isnan(lse).any()
    masked = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, masked)
    lse_limit = LSE_TOLERANCE * max(1.0, expected_lse[~masked].abs().max().item() if (~masked).any() else 0.0)
    difference = (lse.to(expected.dtype) - expected_lse)[~masked].abs()
    assert difference.numel() == 0 or difference.max().item() <= lse_limit
    return out, lse
