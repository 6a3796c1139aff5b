"""The tensors of a backward problem: the forward inputs and dout, the gradients by definition, and the rule for each.

The reference is torch's own derivative of attention by definition, in fp32 (fp64 on a CPU). Each of dq, dk and dv must
satisfy the forward pass's rule (attention/reference.py), with its own bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention import reference as forward
from flashmoe_tools.operations.attention.problem import AttentionProblem
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.judging import high_dtype, judge_gradients, max_abs

NAMES = ("dq", "dk", "dv")
# Tensors of the scores' size that torch's derivative holds at once: scores, weights and the gradients of both.
LIVE = 4


@dataclass(frozen=True)
class BackwardInputs(forward.Inputs):
    """dout [B, Hq, Sq, Dv], the gradient of the output."""

    dout: torch.Tensor

    def poison(self) -> None:
        blocks = [torch.full_like(tensor, math.nan) for tensor in (self.q, self.k, self.v)]  # all three at once
        del blocks


def make_inputs(problem: AttentionProblem, device: str, seed: int) -> BackwardInputs:
    given = forward.make_inputs(problem, device, seed)
    like_out = replace(problem, head_dim=problem.columns_v, value_dim=None)
    return BackwardInputs(**vars(given), dout=forward.make_inputs(like_out, device, seed + 1).q)


@dataclass(frozen=True)
class GradientReference:
    """Expected dq [groups, Hq / Hkv, Sq, D], dk [groups, 1, Sk, D] and dv [groups, 1, Sk, Dv] of the checked (batch, key head) pairs."""

    problem: AttentionProblem
    pairs: tuple[tuple[int, int], ...]
    gradients: tuple[torch.Tensor, ...]
    tolerances: tuple[float, ...]
    coverage: float

    @property
    def tolerance(self) -> float:
        return max(self.tolerances)

    def judge(self, result: Sequence[torch.Tensor], lse: torch.Tensor | None = None) -> Verification:
        """``result`` is (dq, dk, dv); the reported error and tolerance are those of the gradient closest to its bound."""
        del lse
        p = self.problem
        keys = (p.batch, p.heads_kv, p.seq_k)
        shapes = ((p.batch, p.heads_q, p.seq_q, p.head_dim), (*keys, p.head_dim), (*keys, p.columns_v))
        forms = [(shape, TORCH_DTYPES[p.dtype]) for shape in shapes]

        def error_of(index: int) -> float:
            return max_abs(_groups(result[index], self.pairs, p).float() - self.gradients[index])

        return judge_gradients(NAMES, result, forms, error_of, self.tolerances, self.coverage)


def make_reference(inputs: forward.Inputs) -> GradientReference:
    """Computes in chunks of (batch, key head) pairs with all their query heads, so that the scores stay small."""
    assert isinstance(inputs, BackwardInputs)
    problem, kind, high = inputs.problem, inputs.q.device.type, high_dtype(inputs.q.device)
    per_pair = problem.seq_q * problem.seq_k * problem.heads_q // problem.heads_kv
    pairs = forward.choose_pairs(problem.batch, problem.heads_kv, per_pair, forward.MAX_SCORES[kind])
    chunk = max(1, forward.CHUNK_SCORES[kind] // (LIVE * per_pair))
    found: list[tuple[torch.Tensor, ...]] = []
    rules = [forward.Rule(inputs.q.dtype) for _ in NAMES]
    for start in range(0, len(pairs), chunk):
        chosen = pairs[start : start + chunk]
        q, k, v, dout = (_groups(one, chosen, problem) for one in (inputs.q, inputs.k, inputs.v, inputs.dout))
        exact = _differentiate(q.to(high), k.to(high), v.to(high), dout.to(high), problem)
        plain = _differentiate(q, k, v, dout, problem)
        for rule, expected, own in zip(rules, exact, plain, strict=True):
            rule.add(expected, own)
        found.append(tuple(one.float() for one in exact))
    gradients = tuple(torch.cat(parts) for parts in zip(*found, strict=True))
    tolerances = tuple(rule.tolerance for rule in rules)
    return GradientReference(problem, pairs, gradients, tolerances, len(pairs) / (problem.batch * problem.heads_kv))


def _differentiate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, problem: AttentionProblem
) -> tuple[torch.Tensor, ...]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    out, _ = forward.attend(q, k, v, forward.ScoreOptions(problem.causal, scale=problem.scale))
    return torch.autograd.grad(out, (q, k, v), dout)


def _groups(tensor: torch.Tensor, pairs: tuple[tuple[int, int], ...], problem: AttentionProblem) -> torch.Tensor:
    """[pairs, heads of the group, S, D]: of a query tensor the heads that read the pair's key head, otherwise that head."""
    return forward.pick(tensor.unflatten(1, (problem.heads_kv, -1)), pairs)
