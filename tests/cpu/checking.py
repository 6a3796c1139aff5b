"""Comparison with fp64 references, which are computed once for all instruction sets."""

import math
import mmap
from functools import cache

import torch
from torch import Tensor

from tests.arguments.described import guarded_buffer
from tests.attention.reference import LSE_TOLERANCE, Problem, make_inputs, plain_attention, reference, tolerance

from .backend import Backend

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def expected_results(problem: Problem, dtype: torch.dtype, kind: str, bshd: bool) -> tuple[Tensor, Tensor, float]:
    """(out, lse) in fp64, and the allowed error of out."""
    q, k, v = make_inputs(problem, "cpu", dtype, kind, bshd=bshd)
    out, lse = reference(q, k, v, problem.causal)
    plain, _ = plain_attention(q, k, v, problem.causal)
    return out, lse, tolerance(out, plain)


def check(
    backend: Backend, problem: Problem, dtype: torch.dtype, kind: str = "normal", *, bshd: bool = False
) -> tuple[Tensor, Tensor]:
    """Run the problem and compare it with the reference."""
    q, k, v = make_inputs(problem, "cpu", dtype, kind, bshd=bshd)
    out, lse = backend.forward(q, k, v, problem.causal)
    expected, expected_lse, limit = expected_results(problem, dtype, kind, bshd)
    error = (out.double() - expected).abs().max().item()
    assert error <= limit, f"max error {error:.3e} over {limit:.3e}: {problem}, {dtype}, {kind}"
    compare_lse(lse, expected_lse)
    return out, lse


def compare_lse(lse: Tensor, expected: Tensor) -> None:
    """Exactly -inf where the reference is; elsewhere within 2e-4, or 2e-4 of the largest value for large scores."""
    hidden = expected == -math.inf
    assert torch.equal(lse == -math.inf, hidden)
    seen = expected[~hidden]
    if seen.numel() > 0:
        difference = (lse.double()[~hidden] - seen).abs().max().item()
        assert difference <= LSE_TOLERANCE * max(1.0, seen.abs().max().item())


def with_large_stride(tensor: Tensor, axis: int) -> Tensor:
    """The same elements, with those of one axis so far apart that the last is 2^32 elements from the first; only touched pages are allocated."""
    no_reserve, step, size = 0x4000, tensor.numel(), tensor.shape[axis]
    strides = list(tensor.contiguous().stride())
    strides[axis] = -(-(1 << 32) // (size - 1))
    held = mmap.mmap(
        -1,
        tensor.element_size() * ((size - 1) * strides[axis] + step),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve,
    )
    return torch.frombuffer(held, dtype=tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)


def with_guard_page(tensor: Tensor) -> Tensor:
    """The same contiguous elements, the last one just before an inaccessible page."""
    memory, _ = guarded_buffer(tensor.numel() * tensor.element_size())
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
