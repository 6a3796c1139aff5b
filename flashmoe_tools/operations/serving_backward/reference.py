"""The tensors of a ragged backward problem: the forward pass's and dout, the gradients by definition, and the rule for each.

The reference is torch's derivative of attention by definition, in fp32 (fp64 on a CPU), one head at a time. Each of dq, dk, dv and,
where there are sinks, dsinks must keep the rule of the forward pass (attention/tensors.py), with a bound of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention.reference import MAX_SCORES, allowed, choose_pairs, max_abs, rounding_error
from flashmoe_tools.operations.serving import reference as forward
from flashmoe_tools.operations.serving.problem import ServingProblem

NAMES = ("dq", "dk", "dv", "dsinks")
MOST_PAIRS = 64  # (entry, key head) checked: each query head of theirs is two derivatives of its own


@dataclass(frozen=True)
class BackwardInputs(forward.Inputs):
    """dout [tokens, Hq, D], the gradient of the output."""

    dout: torch.Tensor = field(kw_only=True)

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """What is differentiated: q, k, v and, where there are some, sinks."""
        return (self.q, self.k, self.v, *([] if self.sinks is None else [self.sinks]))

    def poison(self) -> None:
        blocks = [torch.full_like(tensor, math.nan) for tensor in (self.q, self.k, self.v)]  # three, all at once
        del blocks


def make_inputs(problem: ServingProblem, device: str, seed: int) -> BackwardInputs:
    """The forward pass's, and a standard normal dout."""
    given = forward.make_inputs(problem, device, seed)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed + 1)
    shape, dtype = given.q.shape, given.q.dtype
    dout = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    return BackwardInputs(**vars(given), dout=dout)


@dataclass(frozen=True)
class Part:
    """What is expected of one gradient of a checked (entry, head): its tokens [first, end) of that head."""

    gradient: int
    first: int
    end: int
    head: int
    expected: torch.Tensor


@dataclass(frozen=True)
class GradientReference:
    """Expected gradients of the checked (entry, key head) pairs with all their query heads, and the errors allowed."""

    shapes: tuple[torch.Size, ...]  # of dq, dk, dv and, where there are sinks, dsinks
    dtypes: tuple[torch.dtype, ...]
    parts: tuple[Part, ...]
    dsinks: torch.Tensor | None  # [Hq]; None where a part of the entries is checked, whose sum is not known
    tolerances: tuple[float, ...]
    coverage: float

    @property
    def tolerance(self) -> float:
        return max(self.tolerances)

    def judge(self, result: Sequence[torch.Tensor], lse: torch.Tensor | None = None) -> Verification:
        """``result`` is (dq, dk, dv), with sinks also dsinks; error and tolerance are those of the gradient closest to its bound."""
        del lse
        if len(result) != len(self.shapes):
            text = f"{len(result)} gradients, expected {len(self.shapes)}"
            return Verification(False, math.inf, self.tolerance, None, self.coverage, text)
        worst, worst_error, worst_tolerance, reason = -1.0, 0.0, self.tolerance, ""
        for index, (found, shape, dtype) in enumerate(zip(result, self.shapes, self.dtypes, strict=True)):
            name = NAMES[index]
            if found.shape != shape or found.dtype != dtype:
                text = f"{name} is {tuple(found.shape)} {found.dtype}, expected {tuple(shape)} {dtype}"
                return Verification(False, math.inf, self.tolerance, None, self.coverage, text)
            if not bool(torch.isfinite(found).all()):
                reason = reason or f"{name} holds NaN or Inf"
            if index >= len(self.tolerances):
                continue
            error, tolerance = self._error(index, found), self.tolerances[index]
            if not error <= tolerance:
                reason = reason or f"{name}: max error {error:.3g} exceeds {tolerance:.3g}"
            if not error / tolerance <= worst:  # NaN is the worst there is
                worst, worst_error, worst_tolerance = error / tolerance, error, tolerance
        return Verification(not reason, worst_error, worst_tolerance, None, self.coverage, reason)

    def _error(self, index: int, found: torch.Tensor) -> float:
        if self.dsinks is not None and NAMES[index] == "dsinks":
            return max_abs(found.float() - self.dsinks)
        parts = (one for one in self.parts if one.gradient == index)
        return max(max_abs(found[one.first : one.end, one.head].float() - one.expected) for one in parts)


def make_reference(inputs: forward.Inputs) -> GradientReference:
    """Pair by pair: as many as the budget of scores allows, spread over entries and key heads."""
    assert isinstance(inputs, BackwardInputs)
    problem, kind = inputs.problem, inputs.q.device.type
    high = torch.float64 if kind == "cpu" else torch.float32
    group = problem.heads_q // problem.heads_kv
    everything = problem.batch * problem.heads_kv
    budget = MAX_SCORES[kind] // 8
    per_pair = max(problem.seq_q * problem.seq_k * group, budget // MOST_PAIRS)
    pairs = choose_pairs(problem.batch, problem.heads_kv, per_pair, budget)
    rows, keys = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    count = len(inputs.leaves)
    parts: list[Part] = []
    plain_errors, roundings = [0.0] * 3, [0.0] * 3
    exact_sinks = torch.zeros(problem.heads_q, dtype=high, device=inputs.q.device)
    plain_sinks = exact_sinks.clone()
    for entry, head in pairs:
        sums: list[list[torch.Tensor]] = [[], []]  # of dk and dv over the group's heads: exact, plain
        for query_head in range(head * group, (head + 1) * group):
            exact = _differentiate(inputs, entry, query_head, high)
            plain = _differentiate(inputs, entry, query_head, inputs.q.dtype)
            if count > 3:
                exact_sinks[query_head] += exact[3]
                plain_sinks[query_head] += plain[3]
            plain_errors[0] = max(plain_errors[0], max_abs(plain[0].to(high) - exact[0]))
            roundings[0] = max(roundings[0], rounding_error(exact[0], inputs.q.dtype))
            parts.append(Part(0, rows[entry], rows[entry + 1], query_head, exact[0].float()))
            for total, own in zip(sums, (exact, plain), strict=True):
                total[:] = [a + b for a, b in zip(total, own[1:3], strict=True)] if total else own[1:3]
        for index, (expected, own) in enumerate(zip(*sums, strict=True), 1):
            plain_errors[index] = max(plain_errors[index], max_abs(own.to(high) - expected))
            roundings[index] = max(roundings[index], rounding_error(expected, inputs.q.dtype))
            parts.append(Part(index, keys[entry], keys[entry + 1], head, expected.float()))
    tolerances = [allowed(error, own) for error, own in zip(plain_errors, roundings, strict=True)]
    dsinks = None
    if count > 3 and len(pairs) == everything:
        dsinks = exact_sinks.float()
        tolerances.append(allowed(max_abs(plain_sinks - exact_sinks), rounding_error(dsinks, torch.float32)))
    leaves = inputs.leaves
    shapes, dtypes = tuple(one.shape for one in leaves), tuple(one.dtype for one in leaves)
    return GradientReference(shapes, dtypes, tuple(parts), dsinks, tuple(tolerances), len(pairs) / everything)


def _differentiate(inputs: BackwardInputs, entry: int, head: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """dq [Sq, D] of one head, what it adds to dk and dv [Sk, D], and to its sink's gradient []."""
    problem = inputs.problem
    key_head = head // (problem.heads_q // problem.heads_kv)
    first, end = inputs.cu_seqlens_q[entry], inputs.cu_seqlens_q[entry + 1]
    given = [inputs.q[first:end, head], *(inputs.keys_of(one, entry)[:, key_head] for one in (inputs.k, inputs.v))]
    given += [] if inputs.sinks is None else [inputs.sinks[head]]
    leaves = [one.detach().to(dtype, copy=True).requires_grad_() for one in given]
    q, k, v, *sink = leaves
    mask = None if inputs.mask is None else inputs.mask[entry, 0]
    out, _ = forward.attend(problem, q, k, v, mask, sink[0] if sink else None)
    return list(torch.autograd.grad(out, leaves, inputs.dout[first:end, head].to(dtype)))
