"""The tensors of a serving problem, the reference by definition, and the rule of attention (attention/reference.py)."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace

import torch

from flashmoe.attn.philox import keep_mask
from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention.problem import LSE_TOLERANCE
from flashmoe_tools.operations.attention.reference import MAX_SCORES, Rule, ScoreOptions, attend, choose_pairs
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.judging import high_dtype, judge_result, max_abs, wrong_form
from flashmoe_tools.operations.serving.problem import ServingProblem

MOST_PAIRS = 128  # checked pairs: each takes a dozen small operations
CODE_SCALE = 0.5  # for every key head
CODE_ROUNDOFF = 2.0**-4  # e4m3's
HIDDEN = -0.52  # three of ten normal values are below it


@dataclass(frozen=True)
class Inputs:
    """q [tokens, Hq, D]; k, v [tokens, Hkv, D], or [pages, page_size, Hkv, D] with a table [batch, pages]."""

    problem: ServingProblem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor  # [batch + 1] int32
    cu_seqlens_k: torch.Tensor
    seqused_k: torch.Tensor  # [batch] int32
    block_table: torch.Tensor | None
    sinks: torch.Tensor | None = None  # [Hq] float32, of values that the problem's dtype can represent
    mask: torch.Tensor | None = (
        None  # [batch, 1, Sq, Sk]: bool, or added to the scores in the problem's dtype; learned: [1, Hq, Sq, Sk]
    )
    slopes: torch.Tensor | None = None  # [Hq] float32, for ALiBi
    codes: tuple[torch.Tensor, torch.Tensor] | None = None  # of an e4m3 cache: k and v divided by CODE_SCALE
    rng_state: torch.Tensor | None = None  # [2] int64, for dropout
    keep: torch.Tensor | None = None  # [batch, Hq, Sq, Sk] bool: the dropout mask of a contender that does not use ours
    rounds_weights: bool = False  # to e4m3: for a contender that multiplies in 8 bits

    @property
    def plain(self) -> Inputs:
        """The same tensors without score options."""
        return replace(self, problem=self.problem.plain, sinks=None, mask=None, slopes=None, rng_state=None)

    @property
    def scale(self) -> float:
        return self.problem.scale

    def bias_of(self, sequence: int, head: int) -> torch.Tensor | None:
        """[rows, keys]: a sequence's mask tensor, or its head's ALiBi in float32; None if it has neither."""
        if self.slopes is None:
            return None if self.mask is None else self.mask[sequence % self.mask.shape[0], head % self.mask.shape[1]]
        rows, keys = self.problem.lengths_q[sequence], self.problem.lengths_k[sequence]
        own = torch.arange(keys - rows, keys, device=self.q.device).unsqueeze(1)
        return -self.slopes[head] * (own - torch.arange(keys, device=self.q.device)).abs()

    def factors_of(self, sequence: int, head: int) -> torch.Tensor | None:
        """[rows, keys]: dropout's factors for a head's weights; None without dropout."""
        p = self.problem.dropout / 100
        if self.rng_state is None:
            return None
        if self.keep is not None:
            return self.keep[sequence, head] / (1 - p)
        rows, keys = self.problem.lengths_q[sequence], self.problem.lengths_k[sequence]
        one = (range(sequence, sequence + 1), range(head, head + 1))
        return keep_mask(self.rng_state, p, *one, rows, keys)[0, 0] / (1 - p)

    def poison(self) -> None:
        """Fills the memory that the caching allocator will use for the next result with NaN."""
        torch.full_like(self.q, math.nan)

    def keys_of(self, tensor: torch.Tensor, sequence: int) -> torch.Tensor:
        """[keys, Hkv, D] of k or v."""
        if self.block_table is None:
            return tensor[int(self.cu_seqlens_k[sequence]) : int(self.cu_seqlens_k[sequence + 1])]
        keys, page_size = self.problem.lengths_k[sequence], self.problem.page_size
        pages = self.block_table[sequence, : -(-keys // page_size)].long()
        return tensor[pages].flatten(0, 1)[:keys]


def _visible(problem: ServingProblem, device: str) -> torch.Tensor:
    """A mask of padding or documents: bool [batch, 1, rows, keys]."""
    key = torch.arange(problem.seq_k, device=device)
    seen = torch.tensor(problem.visible_keys, device=device)[..., None]
    row = torch.arange(problem.seq_q, device=device)[:, None]
    last = row if problem.mask == "documents" else torch.minimum(row, seen - 1)  # the last key that a row sees
    return ((key <= last) & (key > last - seen))[:, None]


def make_inputs(problem: ServingProblem, device: str, seed: int) -> Inputs:
    """Standard normal values, queries times the scores' deviation, pages in random order.

    The seed depends only on the run's seed and the problem. A mask hides three keys in ten; an additive one adds normal
    values to the others. A learned one hides none, and one of padding or documents nothing else.
    """
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(f"{seed} {problem.key}".encode()))  # the CPU generator reads 32 bits
    dtype, d = TORCH_DTYPES[problem.dtype], problem.head_dim

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    def ints(numbers: tuple[int, ...], *, sums: bool) -> torch.Tensor:
        lengths = torch.tensor(numbers, dtype=torch.int64)
        both = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))) if sums else lengths
        return both.to(device, torch.int32)

    rows, keys = problem.lengths_q, problem.lengths_k
    q = values(sum(rows), problem.heads_q, d) * problem.deviation
    table = None
    shape: tuple[int, ...] = (sum(keys), problem.heads_kv, d)
    if problem.page_size:
        longest = -(-max(keys) // problem.page_size)
        counts = [-(-one // problem.page_size) for one in keys][: 1 if problem.spread == "shared" else None]
        order = torch.randperm(sum(counts), generator=generator, device=device).to(torch.int32)
        table = torch.zeros(problem.batch, longest, dtype=torch.int32, device=device)
        first = 0
        for sequence, count in enumerate(counts):
            table[sequence, :count] = order[first : first + count]
            first += count
        if problem.spread == "shared":
            table[1:] = table[0]
        shape = (sum(counts), problem.page_size, problem.heads_kv, d)
    k, v = values(*shape), values(*shape)
    codes = None
    if problem.cache == "e4m3":
        codes = ((k / CODE_SCALE).to(torch.float8_e4m3fn), (v / CODE_SCALE).to(torch.float8_e4m3fn))
        k, v = (code.to(dtype) * CODE_SCALE for code in codes)
    sinks, mask = None, None
    if problem.sinks:
        sinks = values(problem.heads_q).float()
    if problem.mask == "learned":
        mask = values(1, problem.heads_q, problem.seq_q, problem.seq_k)
    elif problem.mask in ("padding", "documents"):
        mask = _visible(problem, device)
    elif problem.mask != "none":
        drawn = values(problem.batch, 1, problem.seq_q, problem.seq_k)
        hidden = drawn < HIDDEN
        mask = ~hidden if problem.mask == "bool" else drawn.masked_fill_(hidden, -math.inf)
    lengths = (ints(rows, sums=True), ints(keys, sums=True), ints(keys, sums=False))
    heads = torch.arange(1, problem.heads_q + 1, device=device)
    slopes = torch.exp2(heads * (-8 / problem.heads_q)) if problem.alibi else None
    state = torch.tensor((seed, 1), device=device) if problem.dropout else None
    return Inputs(problem, q, k, v, *lengths, table, sinks, mask, slopes, codes, state)


@dataclass(frozen=True)
class Checked:
    """Expected values of one checked (sequence, head): rows [first, end) of the result, out [rows, D] and lse [rows]."""

    head: int
    first: int
    end: int
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class Reference:
    """Expected values of the checked (sequence, head) pairs and the allowed error."""

    problem: ServingProblem
    checked: tuple[Checked, ...]
    tolerance: float
    coverage: float  # checked share of all pairs

    def judge(self, result: torch.Tensor, lse: torch.Tensor | None = None) -> Verification:
        """``result`` is [tokens, Hq, D], or dense [B, Hq, Sq, D]; ``lse`` [Hq, tokens] from contenders that return one."""
        p = self.problem
        tokens = result.transpose(1, 2).flatten(0, 1) if result.dim() == 4 else result
        if text := wrong_form("result", tokens, ((sum(p.lengths_q), p.heads_q, p.head_dim), TORCH_DTYPES[p.dtype])):
            return Verification(False, math.inf, self.tolerance, None, self.coverage, text)
        error = max(max_abs(tokens[one.first : one.end, one.head].float() - one.out) for one in self.checked)
        lse_error = None
        if lse is not None:
            lse_error = max(max_abs(lse[one.head, one.first : one.end].float() - one.lse) for one in self.checked)
        return judge_result(result, error, self.tolerance, self.coverage, lse_error, LSE_TOLERANCE * p.deviation)


def score_options(problem: ServingProblem) -> ScoreOptions:
    window = (problem.window - 1, 0) if problem.window else None
    return ScoreOptions(problem.causal, window, float(problem.softcap), problem.scale)


def make_reference(inputs: Inputs) -> Reference:
    """Computed pair by pair: as many as the budget of scores allows, spread over sequences and heads."""
    problem, kind, high = inputs.problem, inputs.q.device.type, high_dtype(inputs.q.device)
    group = problem.heads_q // problem.heads_kv
    pairs = choose_pairs(problem.batch, problem.heads_q, problem.seq_q * problem.seq_k, MAX_SCORES[kind] // 4)
    pairs = pairs[:: max(1, len(pairs) // MOST_PAIRS)]
    checked, rule, options = [], Rule(inputs.q.dtype), score_options(problem)
    starts = inputs.cu_seqlens_q.tolist()
    for sequence, head in pairs:
        first, end = starts[sequence : sequence + 2]
        q = inputs.q[first:end, head]
        k, v = (inputs.keys_of(tensor, sequence)[:, head // group] for tensor in (inputs.k, inputs.v))
        mask = inputs.bias_of(sequence, head)
        sink = None if inputs.sinks is None else inputs.sinks[head]
        factors = inputs.factors_of(sequence, head)
        out, lse = attend(q.to(high), k.to(high), v.to(high), options, sinks=sink, mask=mask, factors=factors)
        rule.add(out, attend(q, k, v, options, sinks=sink, mask=mask, factors=factors)[0])
        checked.append(Checked(head, first, end, out.float(), lse.float()))
    coverage = len(pairs) / (problem.batch * problem.heads_q)
    of_weights = CODE_ROUNDOFF * max(max_abs(one.out) for one in checked) if inputs.rounds_weights else 0.0
    return Reference(problem, tuple(checked), rule.tolerance + of_weights, coverage)
