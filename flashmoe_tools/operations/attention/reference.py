"""Attention by definition in plain PyTorch, the tensors of its problems, and the rule for the error of a result.

max|out - ref| <= 2 max|plain - ref| + 2 max|(ref16 + 0.3 - 0.3) - ref16| + 1e-6, where ref is attention in fp32 (fp64
on the CPU), plain the same formula in the problem's dtype with ordinary torch operations, and ref16 the reference
rounded to the dtype. So the bound is what plain PyTorch itself achieves, not an arbitrary number. LSE: within 2e-4 of
ref.

The rule is made for 16 bits, where plain PyTorch rounds the scores and we do not. In float32 both round alike and their
errors are random: over 80 random problems the ratio of the two maxima was 1 on average and at most 3.7. Hence a factor
of 6 there, plus two units in the last place, because plain PyTorch can be exact (one key).
"""

import math
import zlib
from dataclasses import dataclass

import torch

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention.problem import LSE_TOLERANCE, AttentionProblem
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.judging import high_dtype, judge_result, max_abs, wrong_form

FLOOR = 1e-6  # slack for the smallest 16-bit problems, where plain PyTorch happens to be exact
KINDS = ("normal", "shifted", "logits", "outlier")
# Scores of all checked (batch, head) pairs together; beyond that a sample of pairs is checked, as the report says.
MAX_SCORES = {"cuda": 2**34, "cpu": 2**25}
CHUNK_SCORES = {"cuda": 2**28, "cpu": 2**23}


@dataclass(frozen=True)
class Inputs:
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv], of one dtype, on one device.

    Never zeros, which hide errors.
    """

    problem: AttentionProblem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def scale(self) -> float:
        return self.problem.scale

    def poison(self) -> None:
        """Fills the memory that the caching allocator will use for the next result with NaN."""
        torch.full_like(self.q, math.nan)


def make_inputs(problem: AttentionProblem, device: str, seed: int, kind: str = "normal") -> Inputs:
    """Standard normal values; the seed depends only on the run's seed and the problem.

    ``kind``: shifted, a mean of 0.5, which makes wrong masks visible; logits, scores ten times as large; outlier, one
    huge key.
    """
    if kind not in KINDS:
        msg = f"unknown kind of input {kind!r}; known: {', '.join(KINDS)}"
        raise ValueError(msg)
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(f"{seed} {problem.key}".encode()))  # the CPU generator reads 32 bits

    def tensor(heads: int, length: int, columns: int = problem.head_dim) -> torch.Tensor:
        """[batch, heads, length, columns], stored in the problem's layout."""
        is_bshd = problem.layout == "bshd"
        outer = (length, heads) if is_bshd else (heads, length)
        shape = (problem.batch, *outer, columns)
        values = torch.randn(shape, generator=generator, device=device, dtype=TORCH_DTYPES[problem.dtype])
        values = values + 0.5 if kind == "shifted" else values
        return values.transpose(1, 2) if is_bshd else values

    q = tensor(problem.heads_q, problem.seq_q)
    k = tensor(problem.heads_kv, problem.seq_k)
    v = tensor(problem.heads_kv, problem.seq_k, problem.columns_v)
    if kind == "logits":
        q = q * 10
    elif kind == "outlier" and k.numel() > 0:
        k[-1, -1, k.shape[2] // 2, k.shape[3] // 2] = 500.0
    return Inputs(problem, q, k, v)


@dataclass(frozen=True)
class ScoreOptions:
    """What is applied between the scores and the softmax.

    ``window``: how many keys a row sees to the left and right of its own; -1 means all.
    """

    causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0  # 0: none
    scale: float | None = None  # None: 1 / sqrt(head dim)

    def hidden(self, rows: int, keys: int, device: torch.device | str) -> torch.Tensor | None:
        """[rows, keys], True if a query does not see a key, aligned bottom-right; None if all are seen."""
        left, right = self.window or (-1, -1)
        right = 0 if self.causal else right
        every = torch.ones(rows, keys, dtype=torch.bool, device=device)
        after = every.triu(keys - rows + right + 1) if right >= 0 else None
        before = every.tril(keys - rows - left - 1) if left >= 0 else None
        return after if before is None else before if after is None else after | before


PLAIN = ScoreOptions()


def weigh(scores: torch.Tensor, *, causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The softmax of ``scores`` [..., Sq, Sk], which are masked in place, and their log-sum-exp [..., Sq]."""
    if causal:
        hidden = ScoreOptions(causal=True).hidden(scores.shape[-2], scores.shape[-1], scores.device)
        assert hidden is not None
        scores.masked_fill_(hidden, -math.inf)
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -math.inf)
    empty = scores.detach().amax(-1, keepdim=True) == -math.inf
    if not empty.any():
        return torch.softmax(scores, dim=-1), torch.logsumexp(scores, dim=-1)
    known = scores.masked_fill(empty, 0.0)
    weights, lse = torch.softmax(known, dim=-1), torch.logsumexp(known, dim=-1)
    return weights.masked_fill(empty, 0.0), lse.masked_fill(empty.squeeze(-1), -math.inf)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: ScoreOptions = PLAIN,
    *,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [..., Sq, Dv], log-sum-exp [..., Sq]), computed by torch in the dtype of q [..., Hq, Sq, D]; differentiable.

    Each head of k [..., Hkv, Sk, D] and v [..., Hkv, Sk, Dv] is used by Hq / Hkv heads; for one head the dimension may
    be left out. ``sinks`` [Hq]: a logit per head that is added to the sum. ``mask``: bool, True if a key is seen, or
    added to the scores. ``factors``: dropout's.
    """
    if q.dim() > 2 and k.shape[-3] not in (0, 1, q.shape[-3]):
        k, v = (tensor.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for tensor in (k, v))
    scores = torch.matmul(q, k.mT).mul_(q.shape[-1] ** -0.5 if options.scale is None else options.scale)
    if options.softcap:
        # Multiplying out of place gives a new tensor, because tanh's derivative reads its result.
        scores = scores.div_(options.softcap).tanh_() * options.softcap
    if mask is not None:
        is_bool = mask.dtype is torch.bool
        scores = scores.masked_fill_(~mask, -math.inf) if is_bool else scores.add_(mask.to(scores.dtype))
    rows, keys = scores.shape[-2:]
    hidden = options.hidden(rows, keys, scores.device)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[..., None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights, lse = weigh(scores)
    weights = weights[..., :keys]
    if factors is not None:
        weights = weights * factors.to(weights.dtype)
    return torch.matmul(weights, v), lse


@dataclass
class Rule:
    """The module's rule for results in ``dtype``, over everything that was added."""

    dtype: torch.dtype
    plain_error: float = 0.0
    rounding: float = 0.0
    largest: float = 0.0

    def add(self, expected: torch.Tensor, plain: torch.Tensor) -> None:
        """Adds a result in the reference's precision, and the same result by plain PyTorch in its own precision."""
        rounded = expected.to(self.dtype)
        rounding = max_abs(((rounded + 0.3 - 0.3) - rounded).to(expected.dtype))
        self.plain_error = max(self.plain_error, max_abs(plain.to(expected.dtype) - expected))
        self.rounding = max(self.rounding, rounding)
        self.largest = max(self.largest, max_abs(expected))

    @property
    def tolerance(self) -> float:
        """The largest error that the rule allows."""
        if self.dtype == torch.float32:
            return 6 * self.plain_error + 2 * self.rounding + 2 * torch.finfo(self.dtype).eps * self.largest
        return 2 * self.plain_error + 2 * self.rounding + FLOOR


@dataclass(frozen=True)
class Reference:
    """Expected out [pairs, Sq, Dv] and lse [pairs, Sq] of the checked (batch, head) pairs, and the allowed error."""

    problem: AttentionProblem
    pairs: tuple[tuple[int, int], ...]
    out: torch.Tensor
    lse: torch.Tensor
    tolerance: float
    coverage: float  # checked share of all (batch, head) pairs

    def judge(self, result: torch.Tensor, lse: torch.Tensor | None = None) -> Verification:
        """``result`` is [B, Hq, Sq, Dv]; ``lse`` is [B, Hq, Sq] from contenders that return one."""
        p = self.problem
        form = (p.batch, p.heads_q, p.seq_q, p.columns_v), TORCH_DTYPES[p.dtype]
        if text := wrong_form("result", result, form):
            return Verification(False, math.inf, self.tolerance, None, self.coverage, text)
        error = max_abs(pick(result, self.pairs).float() - self.out)
        lse_error = None if lse is None else max_abs(pick(lse, self.pairs).float() - self.lse)
        return judge_result(result, error, self.tolerance, self.coverage, lse_error, LSE_TOLERANCE)


def make_reference(inputs: Inputs) -> Reference:
    """Computes in chunks of pairs, so that the scores [chunk, Sq, Sk] stay small compared with the inputs."""
    problem, kind = inputs.problem, inputs.q.device.type
    high, options = high_dtype(inputs.q.device), ScoreOptions(problem.causal, scale=problem.scale)
    per_pair = problem.seq_q * problem.seq_k
    pairs = choose_pairs(problem.batch, problem.heads_q, per_pair, MAX_SCORES[kind])
    chunk = max(1, CHUNK_SCORES[kind] // per_pair)
    outs, lses, rule = [], [], Rule(inputs.q.dtype)
    for start in range(0, len(pairs), chunk):
        q, k, v = _gather(inputs, pairs[start : start + chunk])
        out, lse = attend(q.to(high), k.to(high), v.to(high), options)
        rule.add(out, attend(q, k, v, options)[0])
        outs.append(out.float())
        lses.append(lse.float())
    coverage = len(pairs) / (problem.batch * problem.heads_q)
    return Reference(problem, pairs, torch.cat(outs), torch.cat(lses), rule.tolerance, coverage)


def choose_pairs(batch: int, heads: int, scores_per_pair: int, budget: int) -> tuple[tuple[int, int], ...]:
    """All (batch, head) pairs, or as many as ``budget`` scores allow, spread evenly from the first to the last."""
    everything = [(b, h) for b in range(batch) for h in range(heads)]
    count = max(2, budget // max(1, scores_per_pair))
    if count >= len(everything):
        return tuple(everything)
    step = (len(everything) - 1) / (count - 1)
    return tuple(everything[round(index * step)] for index in range(count))


def _gather(inputs: Inputs, pairs: tuple[tuple[int, int], ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [pairs, S, D], and the K and V heads that these query heads read."""
    group = inputs.problem.heads_q // inputs.problem.heads_kv
    shared = tuple((b, h // group) for b, h in pairs)
    return pick(inputs.q, pairs), pick(inputs.k, shared), pick(inputs.v, shared)


def pick(tensor: torch.Tensor, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """[pairs, ...] from a tensor [batch, heads, ...]."""
    batch = torch.tensor([b for b, _ in pairs], device=tensor.device)
    heads = torch.tensor([h for _, h in pairs], device=tensor.device)
    return tensor[batch, heads]
