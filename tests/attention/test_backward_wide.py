"""The fused backward kernel of 65 to 128 columns, where it is chosen."""

from __future__ import annotations

import math
import os

import pytest
import torch

import flashmoe
from flashmoe import _extension

from .gradients import check_gradients
from .reference import Problem, make_inputs


@pytest.mark.gpu
def test_the_wide_fused_kernel() -> None:
    """By the rule with broken tiles and groups, the same bits on every run, beside another stream's, in poisoned memory."""
    if torch.cuda.get_device_capability() != (9, 0) or os.environ.get("FLASHMOE_KERNEL") not in (None, "", "sm90"):
        pytest.skip("not run: only compute capability 9.0 has a fused kernel")
    problems = (
        (Problem(4101, 4165, 128, 8, 4, batch=4, causal=False), torch.bfloat16),
        (Problem(4101, 4165, 104, 8, 4, batch=4, causal=False), torch.float16),
        (Problem(8201, 8265, 128, 16, 8, causal=True), torch.bfloat16),  # all tiles downwards
        # The last section downwards; the first rows see no key.
        (Problem(8265, 8201, 104, 18, 18, causal=True), torch.float16),
    )
    for problem, dtype in problems:
        tensors = make_inputs(problem, "cuda", dtype)
        generator = torch.Generator("cuda").manual_seed(1)
        grad_out = torch.randn(tensors[0].shape, generator=generator, device="cuda").to(dtype)
        poison = [torch.full_like(tensor, math.nan) for tensor in tensors for _ in range(3)]
        poison.append(torch.full((1 << 25,), math.nan, device="cuda"))  # the size of dq's sums
        del poison
        first = check_gradients(problem, tensors, grad_out)
        assert "attention_backward_fused_sm90" in _extension.last_kernel()
        assert "d128" in _extension.last_kernel()
        out, lse = flashmoe.attention(*tensors, causal=problem.causal, return_lse=True)
        arguments = (grad_out, None, *tensors, out, lse, problem.head_dim**-0.5, problem.causal)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        for _ in range(20):
            results = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(torch.ops.flashmoe.flash_attention_backward(*arguments))
            torch.cuda.synchronize()
            for result in results:
                for actual, before in zip(result, first, strict=True):
                    assert torch.equal(actual, before)
