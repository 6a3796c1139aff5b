"""The tensors of an attention problem: random inputs, the reference by definition, and the rule that a result must keep.

max|out - ref| <= 2 max|plain - ref| + 2 max|(ref16 + 0.3 - 0.3) - ref16| + 1e-6, where ref is attention in fp32 (fp64 on the
CPU), plain the same formula in the problem's dtype by ordinary torch operations, ref16 the reference rounded to the dtype.
The bound is thus what plain PyTorch itself achieves, not a number somebody chose; 1e-6 is room for float32 on the smallest
problems, where plain PyTorch happens to be exact. LSE: within 2e-4 of ref.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention.problem import LSE_TOLERANCE, AttentionProblem
from flashmoe_tools.operations.dtypes import TORCH_DTYPES

FLOOR = 1e-6
# Scores of all checked (batch, head) pairs together; above it a spread of pairs is checked, and the report says so.
MAX_SCORES = {"cuda": 2**34, "cpu": 2**25}
CHUNK_SCORES = {"cuda": 2**28, "cpu": 2**23}


@dataclass(frozen=True)
class Inputs:
    """q [B, Hq, Sq, D], k and v [B, Hkv, Sk, D] of one dtype on one device; never zeros, which hide errors."""

    problem: AttentionProblem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def scale(self) -> float:
        return self.problem.scale

    def poison(self) -> None:
        """Leave NaN in the memory that the caching allocator hands out for the next result."""
        torch.full_like(self.q, math.nan)


def make_inputs(problem: AttentionProblem, device: str, seed: int) -> Inputs:
    """Standard normal values; the seed depends on the run's seed and the problem alone."""
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(f"{seed} {problem.key}".encode()))  # the CPU generator reads 32 bits

    def tensor(heads: int, length: int) -> torch.Tensor:
        """[batch, heads, length, head_dim], stored in the problem's layout."""
        is_bshd = problem.layout == "bshd"
        outer = (length, heads) if is_bshd else (heads, length)
        shape = (problem.batch, *outer, problem.head_dim)
        values = torch.randn(shape, generator=generator, device=device, dtype=TORCH_DTYPES[problem.dtype])
        return values.transpose(1, 2) if is_bshd else values

    return Inputs(
        problem,
        tensor(problem.heads_q, problem.seq_q),
        tensor(problem.heads_kv, problem.seq_k),
        tensor(problem.heads_kv, problem.seq_k),
    )


def weigh(scores: torch.Tensor, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The softmax of ``scores`` [..., Sq, Sk], which are masked in place, and their log-sum-exp [..., Sq].

    A causal mask is aligned bottom-right. A query that sees no key has weights 0 and log-sum-exp -inf.
    """
    rows, keys = scores.shape[-2:]
    if causal:
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).triu_(keys - rows + 1)
        scores.masked_fill_(hidden, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if causal and rows > keys:
        weights[..., : rows - keys, :] = 0.0
    return weights, lse


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T scale) v and its log-sum-exp in the inputs' dtype, by definition. [..., Sq, D], [..., Sq]."""
    weights, lse = weigh(torch.matmul(q, k.transpose(-1, -2)).mul_(scale), causal=causal)
    return torch.matmul(weights, v), lse


@dataclass(frozen=True)
class Reference:
    """Expected values of the checked (batch, head) pairs: out [pairs, Sq, D], lse [pairs, Sq] and the error allowed."""

    problem: AttentionProblem
    pairs: tuple[tuple[int, int], ...]
    out: torch.Tensor
    lse: torch.Tensor
    tolerance: float
    coverage: float  # checked share of all (batch, head) pairs

    def judge(self, result: torch.Tensor, lse: torch.Tensor | None = None) -> Verification:
        """``result`` is [B, Hq, Sq, D]; ``lse`` [B, Hq, Sq], of those who give one."""
        p, dtype = self.problem, TORCH_DTYPES[self.problem.dtype]
        shape = (p.batch, p.heads_q, p.seq_q, p.head_dim)
        if result.shape != shape or result.dtype != dtype:
            found = f"result is {tuple(result.shape)} {result.dtype}, expected {shape} {dtype}"
            return Verification(False, math.inf, self.tolerance, None, self.coverage, found)
        error = max_abs(pick(result, self.pairs).float() - self.out)
        lse_error = None if lse is None else max_abs(pick(lse, self.pairs).float() - self.lse)
        reason = ""
        if not bool(torch.isfinite(result).all()):
            reason = "the result holds NaN or Inf"
        elif not error <= self.tolerance:
            reason = f"max error {error:.3g} exceeds {self.tolerance:.3g}"
        elif lse_error is not None and not lse_error <= LSE_TOLERANCE:
            reason = f"LSE error {lse_error:.3g} exceeds {LSE_TOLERANCE:g}"
        return Verification(not reason, error, self.tolerance, lse_error, self.coverage, reason)


def make_reference(inputs: Inputs) -> Reference:
    """Computes in chunks of pairs, so that the scores [chunk, Sq, Sk] stay small beside the inputs."""
    problem = inputs.problem
    kind = inputs.q.device.type
    high = torch.float64 if kind == "cpu" else torch.float32
    per_pair = problem.seq_q * problem.seq_k
    pairs = choose_pairs(problem.batch, problem.heads_q, per_pair, MAX_SCORES[kind])
    chunk = max(1, CHUNK_SCORES[kind] // per_pair)
    outs, lses = [], []
    plain_error = rounding = 0.0
    for start in range(0, len(pairs), chunk):
        q, k, v = _gather(inputs, pairs[start : start + chunk])
        out, lse = attend(q.to(high), k.to(high), v.to(high), problem.scale, causal=problem.causal)
        plain, _ = attend(q, k, v, problem.scale, causal=problem.causal)
        plain_error = max(plain_error, max_abs(plain.to(high) - out))
        rounding = max(rounding, rounding_error(out, q.dtype))
        outs.append(out.float())
        lses.append(lse.float())
    coverage = len(pairs) / (problem.batch * problem.heads_q)
    tolerance = allowed(plain_error, rounding)
    return Reference(problem, pairs, torch.cat(outs), torch.cat(lses), tolerance, coverage)


def rounding_error(expected: torch.Tensor, dtype: torch.dtype) -> float:
    """max|(rounded + 0.3 - 0.3) - rounded|, with ``expected`` rounded to ``dtype``."""
    rounded = expected.to(dtype)
    return max_abs(((rounded + 0.3 - 0.3) - rounded).to(expected.dtype))


def allowed(plain_error: float, rounding: float) -> float:
    """The largest error of a result that keeps the rule."""
    return 2 * plain_error + 2 * rounding + FLOOR


def choose_pairs(batch: int, heads: int, scores_per_pair: int, budget: int) -> tuple[tuple[int, int], ...]:
    """All (batch, head) pairs, or as many as ``budget`` scores allow, spread evenly from the first to the last."""
    everything = [(b, h) for b in range(batch) for h in range(heads)]
    count = max(2, budget // max(1, scores_per_pair))
    if count >= len(everything):
        return tuple(everything)
    step = (len(everything) - 1) / (count - 1)
    return tuple(everything[round(index * step)] for index in range(count))


def _gather(inputs: Inputs, pairs: tuple[tuple[int, int], ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[pairs, S, D] of q and of the K and V heads that these query heads read."""
    group = inputs.problem.heads_q // inputs.problem.heads_kv
    shared = tuple((b, h // group) for b, h in pairs)
    return pick(inputs.q, pairs), pick(inputs.k, shared), pick(inputs.v, shared)


def pick(tensor: torch.Tensor, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """[pairs, ...] of a tensor [batch, heads, ...]."""
    batch = torch.tensor([b for b, _ in pairs], device=tensor.device)
    heads = torch.tensor([h for _, h in pairs], device=tensor.device)
    return tensor[batch, heads]


def max_abs(values: torch.Tensor) -> float:
    """Largest magnitude; NaN when any value is NaN, which fails every comparison."""
    return float(values.abs().max()) if values.numel() else 0.0
