"""Shared by the tests of attention: problems and references from the operation's package, and the comparison with them."""

import math
from dataclasses import replace

import torch
from torch import Tensor

import flashmoe
from flashmoe import _extension
from flashmoe_tools.operations.attention import reference as operation
from flashmoe_tools.operations.attention.problem import LSE_TOLERANCE
from flashmoe_tools.operations.attention.problem import AttentionProblem as Problem
from flashmoe_tools.operations.attention.reference import Rule, ScoreOptions
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.judging import high_dtype as reference_dtype

__all__ = ["LSE_TOLERANCE", "Problem", "reference_dtype"]

# The difference allowed between two ways of rounding, for results of order 1.
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-10}
DTYPES = {"cpu": (torch.float16, torch.bfloat16, torch.float32), "cuda": (torch.float16, torch.bfloat16)}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def make_inputs(
    problem: Problem, device: str, dtype: torch.dtype, kind: str = "normal", *, bshd: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh random q, k, v. ``bshd``: stored as [B, S, H, D], viewed as [B, H, S, D] through a transpose."""
    own = replace(problem, dtype=NAMES[dtype], layout="bshd" if bshd else "bhsd")
    made = operation.make_inputs(own, device, seed, kind)
    return made.q, made.k, made.v


def visible(seq_q: int, seq_k: int, device: str | torch.device) -> Tensor:
    """[Sq, Sk], True where a bottom-right causal mask lets query i see key j."""
    hidden = ScoreOptions(causal=True).hidden(seq_q, seq_k, device)
    assert hidden is not None
    return ~hidden


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) by matrix products and a softmax in the dtype of the inputs. A row without keys has out 0 and lse -inf."""
    return operation.attend(q, k, v, ScoreOptions(causal, scale=scale))


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) in the reference's precision."""
    dtype = reference_dtype(q.device)
    return plain_attention(q.to(dtype), k.to(dtype), v.to(dtype), causal, scale)


def tolerance(expected: Tensor, plain: Tensor) -> float:
    """The operation's rule: the tolerance follows from plain PyTorch's own error in its dtype."""
    rule = Rule(plain.dtype)
    rule.add(expected, plain)
    return rule.tolerance


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
