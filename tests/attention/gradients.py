"""Gradients by plain PyTorch, and the error rule for flashmoe's dq, dk and dv."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

import flashmoe
from flashmoe import _extension
from flashmoe_tools.operations.attention.reference import weigh

from .reference import Problem, plain_attention, reference_dtype, tolerance

Function = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Gradients = tuple[Tensor, ...]


def make_leaves(*tensors: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_() for tensor in tensors]


def autograd_gradients(
    function: Function,
    tensors: tuple[Tensor, ...],
    dtype: torch.dtype,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
) -> Gradients:
    """Gradients by autograd through ``function``, on copies of the tensors in ``dtype``."""
    inputs = make_leaves(*tensors, dtype=dtype)
    given = [
        (output, gradient.to(output.dtype))
        for output, gradient in zip(function(*inputs), (grad_out, grad_lse), strict=True)
        if gradient is not None
    ]
    return torch.autograd.grad(
        [output for output, _ in given], inputs, [gradient for _, gradient in given], materialize_grads=True
    )


def plain_function(problem: Problem, scale: float | None = None) -> Function:
    return lambda q, k, v: plain_attention(q, k, v, problem.causal, scale)


def ours(
    problem: Problem,
    tensors: tuple[Tensor, ...],
    grad_out: Tensor | None,
    grad_lse: Tensor | None = None,
    scale: float | None = None,
) -> Gradients:
    """Calls the operator itself, in this thread, so that last_kernel() returns the backward pass's kernel."""
    scale = problem.head_dim**-0.5 if scale is None else scale
    out, lse = flashmoe.attention(*tensors, causal=problem.causal, scale=scale, return_lse=True)
    result: Gradients = torch.ops.flashmoe.flash_attention_backward(
        grad_out, grad_lse, *tensors, out, lse, scale, problem.causal
    )
    assert_kernel_ran(out)
    return result


def has_kernel(device: str | torch.device, dtype: torch.dtype = torch.float16) -> bool:
    oldest = {torch.float16: (7, 5), torch.bfloat16: (8, 0)}
    on_gpu = torch.device(device).type == "cuda"
    return on_gpu and dtype in oldest and torch.cuda.get_device_capability(device) >= oldest[dtype]


def assert_kernel_ran(tensor: Tensor) -> None:
    """Fail unless the last call of this thread ran flashmoe's backward kernels, if this GPU has some, of the family that is forced."""
    if has_kernel(tensor.device, tensor.dtype):
        family = os.environ.get("FLASHMOE_KERNEL", "")
        assert any(f"attention_backward_{kind}_{family}" in _extension.last_kernel() for kind in ("dkv", "fused"))


def rounded_output_terms(
    problem: Problem, tensors: tuple[Tensor, ...], grad_out: Tensor | None, scale: float | None
) -> tuple[float, float, float]:
    """How much rounding the output to 16 bits may change dq, dk and dv (dv not at all).

    Every flash backward takes rowsum(dO * O) from the stored output: it has an error of up to eps / 2 * rowsum(|dO * O|), and dS
    of P times that. Plain PyTorch uses the probabilities themselves, and is exact for a row that sees one key.
    """
    dtype = tensors[0].dtype
    if grad_out is None or dtype not in (torch.float16, torch.bfloat16):
        return 0.0, 0.0, 0.0
    work = reference_dtype(tensors[0].device)
    factor = abs(problem.head_dim**-0.5 if scale is None else scale)
    q, k, v = (tensor.to(work) for tensor in tensors)
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    weights, _ = weigh(q @ k.mT * (problem.head_dim**-0.5 if scale is None else scale), causal=problem.causal)
    row_error = torch.finfo(dtype).eps / 2 * (grad_out.to(work) * (weights @ v)).abs().sum(-1, keepdim=True)
    score_error = factor * weights * row_error
    groups = score_error.mT @ q.abs()
    of_keys = groups.unflatten(1, (tensors[1].shape[1], -1)).sum(2)
    return (score_error @ k.abs()).max().item(), of_keys.max().item(), 0.0


def check_gradients(
    problem: Problem,
    tensors: tuple[Tensor, ...],
    grad_out: Tensor | None,
    grad_lse: Tensor | None = None,
    scale: float | None = None,
    slack: float = 0.0,
) -> Gradients:
    """flashmoe's gradients, compared with the reference by the error rule. ``slack``: the error in a difference that is zero in exact
    arithmetic, where plain PyTorch may be exact."""
    actual = ours(problem, tensors, grad_out, grad_lse, scale)
    function, dtype = plain_function(problem, scale), tensors[0].dtype
    expected = autograd_gradients(function, tensors, reference_dtype(tensors[0].device), grad_out, grad_lse)
    plain = autograd_gradients(function, tensors, dtype, grad_out, grad_lse)
    terms = rounded_output_terms(problem, tensors, grad_out, scale)
    for name, a, b, c, source, term in zip("qkv", actual, expected, plain, tensors, terms, strict=True):
        assert a.dtype == dtype
        assert a.shape == source.shape
        assert b.isfinite().all(), "the reference is not finite: this case cannot be compared by differences"
        assert a.isfinite().all(), f"d{name} of {problem}, {dtype}"
        # In float32 both have rounding errors of the same kind and independent sign: the exponential of a score has the score's error.
        limit = (2 if dtype is torch.float32 else 1) * tolerance(b, c) + slack + term
        error = (a.to(b.dtype) - b).abs().max().item()
        assert error <= limit, f"d{name}: max error {error:.3e} over {limit:.3e} for {problem}, {dtype}"
    return actual
