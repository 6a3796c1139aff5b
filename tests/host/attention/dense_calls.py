"""Compares a dense call's results and gradients with float64."""

import math

import torch
from torch import Tensor

import flashmoe
from tests.attention.gradients import autograd_gradients, plain_function
from tests.attention.reference import Problem

DTYPE = torch.bfloat16
LIMIT = 2e-2  # of the largest gradient, as in tests/attention/test_varlen_gradients.py


def tensors(problem: Problem, layout: str) -> list[Tensor]:
    """q, k, v and the output's gradient; "bshd": as transposed views."""
    shapes = [(problem.heads_q, problem.seq_q), (problem.heads_kv, problem.seq_k)]
    order = (shapes[0], shapes[1], shapes[1], shapes[0])
    if layout == "bshd":
        return [torch.randn(problem.batch, s, h, problem.head_dim).to(DTYPE).transpose(1, 2) for h, s in order]
    return [torch.randn(problem.batch, h, s, problem.head_dim).to(DTYPE) for h, s in order]


def check_dense(problem: Problem, layout: str, needs: int, with_lse: bool) -> None:
    q, k, v, grad_out = tensors(problem, layout)
    grad_lse = torch.randn(q.shape[:3]) if with_lse else None
    scale = problem.head_dim**-0.5
    out, lse = flashmoe.attention(q, k, v, causal=problem.causal, return_lse=True)
    function = plain_function(problem)
    wide = [tensor.double() for tensor in (q, k, v)]
    expected_out, expected_lse = function(*wide)
    assert (out.double() - expected_out).abs().max() <= LIMIT
    seen = expected_lse > -math.inf
    assert torch.equal(lse > -math.inf, seen)
    assert (lse.double() - expected_lse)[seen].abs().max() <= 1e-3
    if grad_lse is not None:
        grad_lse = grad_lse.masked_fill(~seen, 0.0)
    found = torch.ops.flashmoe._flash_attention_backward(
        grad_out, grad_lse, q, k, v, out, lse, scale, problem.causal, needs
    )
    expected = autograd_gradients(function, (q, k, v), torch.float64, grad_out, grad_lse)
    for index, (name, ours, wanted) in enumerate(zip("qkv", found, expected, strict=True)):
        if not needs >> index & 1:
            assert ours is None
            continue
        assert ours.shape == wanted.shape
        assert (ours.double() - wanted).abs().max() <= LIMIT * wanted.abs().max(), f"d{name}"
