"""The correctness rule that a contender must pass before it is timed.

max|out - ref| <= 2 max|plain - ref| + 2 max|(ref16 + 0.3 - 0.3) - ref16|, where ref is attention in fp32 (fp64 on the
CPU), plain the same formula in the case's dtype by ordinary torch operations, ref16 the reference rounded to the dtype.
The bound is thus what plain PyTorch itself achieves, not a number somebody chose. LSE (ours): within 2e-4 of ref.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashmoe.tools.bench.contenders import Prepared
from flashmoe.tools.bench.inputs import Inputs

LSE_TOLERANCE = 2e-4
# Scores of all checked (batch, head) pairs together; above it a spread of pairs is checked, and the report says so.
MAX_SCORES = {"cuda": 2**34, "cpu": 2**25}
CHUNK_SCORES = {"cuda": 2**28, "cpu": 2**23}


@dataclass(frozen=True)
class Reference:
    """Expected values of the checked (batch, head) pairs: out [pairs, Sq, D], lse [pairs, Sq] and the error allowed."""

    pairs: tuple[tuple[int, int], ...]
    out: torch.Tensor
    lse: torch.Tensor
    tolerance: float
    coverage: float  # checked share of all (batch, head) pairs


@dataclass(frozen=True)
class Verification:
    """``passed`` only when every checked value was finite and close enough."""

    passed: bool
    max_error: float
    tolerance: float
    lse_error: float | None
    coverage: float
    reason: str = ""


def choose_pairs(batch: int, heads: int, scores_per_pair: int, budget: int) -> tuple[tuple[int, int], ...]:
    """All (batch, head) pairs, or as many as ``budget`` scores allow, spread evenly from the first to the last."""
    everything = [(b, h) for b in range(batch) for h in range(heads)]
    count = max(2, budget // max(1, scores_per_pair))
    if count >= len(everything):
        return tuple(everything)
    step = (len(everything) - 1) / (count - 1)
    return tuple(everything[round(index * step)] for index in range(count))


def make_reference(inputs: Inputs) -> Reference:
    """Computes in chunks of pairs, so that the scores [chunk, Sq, Sk] stay small beside the inputs."""
    case = inputs.case
    kind = inputs.q.device.type
    high = torch.float64 if kind == "cpu" else torch.float32
    per_pair = case.seq_q * case.seq_k
    pairs = choose_pairs(case.batch, case.heads_q, per_pair, MAX_SCORES[kind])
    chunk = max(1, CHUNK_SCORES[kind] // per_pair)
    outs, lses = [], []
    plain_error = rounding = 0.0
    for start in range(0, len(pairs), chunk):
        part = pairs[start : start + chunk]
        q, k, v = _gather(inputs, part)
        out, lse = _attention(q.to(high), k.to(high), v.to(high), inputs.scale, case.causal)
        plain, _ = _attention(q, k, v, inputs.scale, case.causal)
        rounded = out.to(q.dtype)
        plain_error = max(plain_error, _max_abs(plain.to(high) - out))
        rounding = max(rounding, _max_abs(((rounded + 0.3 - 0.3) - rounded).to(high)))
        outs.append(out.float())
        lses.append(lse.float())
    coverage = len(pairs) / (case.batch * case.heads_q)
    return Reference(pairs, torch.cat(outs), torch.cat(lses), 2 * plain_error + 2 * rounding, coverage)


def verify(prepared: Prepared, inputs: Inputs, reference: Reference) -> Verification:
    """Runs the contender once and judges its result. Its errors propagate."""
    _poison(inputs)
    out = prepared.call()
    if out.shape != inputs.q.shape or out.dtype != inputs.q.dtype:
        found = f"result is {tuple(out.shape)} {out.dtype}, expected {tuple(inputs.q.shape)} {inputs.q.dtype}"
        return Verification(False, math.inf, reference.tolerance, None, reference.coverage, found)
    error = _max_abs(_pick(out, reference.pairs).float() - reference.out)
    lse_error = None
    if prepared.lse is not None:
        lse_error = _max_abs(_pick(prepared.lse(), reference.pairs).float() - reference.lse)
    reason = ""
    if not bool(torch.isfinite(out).all()):
        reason = "the result holds NaN or Inf"
    elif not error <= reference.tolerance:
        reason = f"max error {error:.3g} exceeds {reference.tolerance:.3g}"
    elif lse_error is not None and not lse_error <= LSE_TOLERANCE:
        reason = f"LSE error {lse_error:.3g} exceeds {LSE_TOLERANCE:g}"
    return Verification(not reason, error, reference.tolerance, lse_error, reference.coverage, reason)


def _poison(inputs: Inputs) -> None:
    """Leaves NaN in the memory that the caching allocator hands out next: an unwritten output then shows."""
    torch.full_like(inputs.q, math.nan)


def _gather(inputs: Inputs, pairs: tuple[tuple[int, int], ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[pairs, S, D] of q and of the K and V heads that these query heads read."""
    group = inputs.case.heads_q // inputs.case.heads_kv
    shared = tuple((b, h // group) for b, h in pairs)
    return _pick(inputs.q, pairs), _pick(inputs.k, shared), _pick(inputs.v, shared)


def _pick(tensor: torch.Tensor, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
    batch = torch.tensor([b for b, _ in pairs], device=tensor.device)
    heads = torch.tensor([h for _, h in pairs], device=tensor.device)
    return tensor[batch, heads]


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T scale) v in the inputs' dtype, by definition; causal aligned bottom-right. [N, Sq, D], [N, Sq]."""
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)  # [N, Sq, Sk]
    if causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu_(columns - rows + 1)
        scores.masked_fill_(hidden, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.matmul(torch.softmax(scores, dim=-1), v), lse


def _max_abs(values: torch.Tensor) -> float:
    """Largest magnitude; NaN when any value is NaN, which fails every comparison."""
    return float(values.abs().max()) if values.numel() else 0.0
