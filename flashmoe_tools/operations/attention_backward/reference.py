"""The tensors of a backward problem: the forward pass's inputs and dout, the gradients by definition, and the rule for each.

The reference is torch's own derivative of attention by definition, in fp32 (fp64 on a CPU). Each of dq, dk and dv must keep
the rule that the forward pass keeps (attention/tensors.py), with its own bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention import reference as tensors
from flashmoe_tools.operations.attention.problem import AttentionProblem
from flashmoe_tools.operations.dtypes import TORCH_DTYPES

NAMES = ("dq", "dk", "dv")
# Elements as large as the scores that live at once in torch's derivative: scores, weights and the gradients of both.
LIVE = 4


@dataclass(frozen=True)
class BackwardInputs(tensors.Inputs):
    """dout [B, Hq, Sq, D], the gradient of the output."""

    dout: torch.Tensor

    def poison(self) -> None:
        blocks = [torch.full_like(tensor, math.nan) for tensor in (self.q, self.k, self.v)]  # three, all at once
        del blocks


def make_inputs(problem: AttentionProblem, device: str, seed: int) -> BackwardInputs:
    forward = tensors.make_inputs(problem, device, seed)
    dout = tensors.make_inputs(problem, device, seed + 1).q
    return BackwardInputs(problem, forward.q, forward.k, forward.v, dout)


@dataclass(frozen=True)
class GradientReference:
    """Expected dq [groups, Hq / Hkv, Sq, D] and dk, dv [groups, 1, Sk, D] of the checked (batch, key head) pairs."""

    problem: AttentionProblem
    pairs: tuple[tuple[int, int], ...]
    gradients: tuple[torch.Tensor, ...]
    tolerances: tuple[float, ...]
    coverage: float

    @property
    def tolerance(self) -> float:
        return max(self.tolerances)

    def judge(self, result: Sequence[torch.Tensor], lse: torch.Tensor | None = None) -> Verification:
        """``result`` is (dq, dk, dv); the error and tolerance given are those of the gradient closest to its bound."""
        del lse
        p, dtype = self.problem, TORCH_DTYPES[self.problem.dtype]
        shapes = ((p.batch, p.heads_q, p.seq_q, p.head_dim), *((p.batch, p.heads_kv, p.seq_k, p.head_dim),) * 2)
        worst, worst_error, worst_tolerance, reason = -1.0, 0.0, self.tolerance, ""
        for name, found, shape, expected, tolerance in zip(
            NAMES, result, shapes, self.gradients, self.tolerances, strict=True
        ):
            if found.shape != shape or found.dtype != dtype:
                text = f"{name} is {tuple(found.shape)} {found.dtype}, expected {shape} {dtype}"
                return Verification(False, math.inf, tolerance, None, self.coverage, text)
            error = tensors.max_abs(_groups(found, self.pairs, p).float() - expected)
            if not bool(torch.isfinite(found).all()):
                reason = reason or f"{name} holds NaN or Inf"
            elif not error <= tolerance:
                reason = reason or f"{name}: max error {error:.3g} exceeds {tolerance:.3g}"
            if not error / tolerance <= worst:  # NaN is the worst there is
                worst, worst_error, worst_tolerance = error / tolerance, error, tolerance
        return Verification(not reason, worst_error, worst_tolerance, None, self.coverage, reason)


def make_reference(inputs: tensors.Inputs) -> GradientReference:
    """Computes in chunks of (batch, key head) pairs with all their query heads, so that the scores stay small."""
    assert isinstance(inputs, BackwardInputs)
    problem = inputs.problem
    kind = inputs.q.device.type
    high = torch.float64 if kind == "cpu" else torch.float32
    per_pair = problem.seq_q * problem.seq_k * problem.heads_q // problem.heads_kv
    pairs = tensors.choose_pairs(problem.batch, problem.heads_kv, per_pair, tensors.MAX_SCORES[kind])
    chunk = max(1, tensors.CHUNK_SCORES[kind] // (LIVE * per_pair))
    found: list[tuple[torch.Tensor, ...]] = []
    plain_errors, roundings = [0.0] * 3, [0.0] * 3
    for start in range(0, len(pairs), chunk):
        chosen = pairs[start : start + chunk]
        q, k, v, dout = (_groups(one, chosen, problem) for one in (inputs.q, inputs.k, inputs.v, inputs.dout))
        exact = _differentiate(q.to(high), k.to(high), v.to(high), dout.to(high), problem)
        plain = _differentiate(q, k, v, dout, problem)
        for index, (expected, own) in enumerate(zip(exact, plain, strict=True)):
            plain_errors[index] = max(plain_errors[index], tensors.max_abs(own.to(high) - expected))
            roundings[index] = max(roundings[index], tensors.rounding_error(expected, q.dtype))
        found.append(tuple(one.float() for one in exact))
    gradients = tuple(torch.cat(parts) for parts in zip(*found, strict=True))
    tolerances = tuple(tensors.allowed(error, own) for error, own in zip(plain_errors, roundings, strict=True))
    return GradientReference(problem, pairs, gradients, tolerances, len(pairs) / (problem.batch * problem.heads_kv))


def _differentiate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, problem: AttentionProblem
) -> tuple[torch.Tensor, ...]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    out, _ = tensors.attend(q, k, v, problem.scale, causal=problem.causal)
    return torch.autograd.grad(out, (q, k, v), dout)


def _groups(tensor: torch.Tensor, pairs: tuple[tuple[int, int], ...], problem: AttentionProblem) -> torch.Tensor:
    """[pairs, heads of the group, S, D]: of a query tensor the heads that read the pair's key head, else that head."""
    return tensors.pick(tensor.unflatten(1, (problem.heads_kv, -1)), pairs)
