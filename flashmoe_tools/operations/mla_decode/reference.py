"""Multi-head latent attention in plain torch, and the tensors of a problem.

The result is compared with float64 on the CPU and float32 elsewhere, by the rule of attention (attention/reference.py).
"""

import math
import zlib
from dataclasses import dataclass

import torch

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention.problem import LSE_TOLERANCE
from flashmoe_tools.operations.attention.reference import Rule
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.judging import high_dtype, judge_result, max_abs, wrong_form
from flashmoe_tools.operations.mla_decode.codes import dequantize, make_coded
from flashmoe_tools.operations.mla_decode.problem import HEAD_DIM, LATENT_DIM, MlaDecodeProblem

MOST_CHECKED = 8  # sequences


def scores_of(q: torch.Tensor, keys: torch.Tensor, scale: float, *, is_causal: bool) -> torch.Tensor:
    """Scores [tokens, heads, keys] of one sequence; -inf where a token does not see a key.

    Token t of T does not see the last T - 1 - t keys.
    """
    scores = q @ keys.mT * scale
    if is_causal:
        tokens, count = len(q), len(keys)
        ends = count - (tokens - 1 - torch.arange(tokens, device=q.device))
        hidden = torch.arange(count, device=q.device) >= ends[:, None]
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    return scores


def attend(
    q: torch.Tensor, keys: torch.Tensor, scale: float, *, is_causal: bool, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [tokens, heads, 512], lse [heads, tokens], weights) of one sequence.

    q [tokens, heads, 576] and keys [keys, 576] determine the dtype. A row that sees no key has out 0 and lse -inf; with
    a sink, lse is the sink.
    """
    scores = scores_of(q, keys, scale, is_causal=is_causal)
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None].expand(len(q), -1, 1)
        scores = torch.cat([scores, column], dim=-1)
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])[..., : len(keys)]
    return weights @ keys[:, :LATENT_DIM], lse.mT, weights


@dataclass(frozen=True)
class Inputs:
    """q [B, Sq, H, 576], cache [pages, page_size, 576] or 656 bytes, table [B, pages] int32 and lengths [B] int32."""

    problem: MlaDecodeProblem
    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    indices: torch.Tensor | None  # [B, Sq, topk] int32, rows in all pages

    def poison(self) -> None:
        """Fills the memory that the next result will get with NaN."""
        torch.full_like(self.q, math.nan)

    def keys_of(self, sequence: int) -> torch.Tensor:
        """[keys, 576] of a sequence, or of one token's indices; codes are multiplied by their scales."""
        if self.indices is not None:
            keys = self.cache.flatten(0, 1)[self.indices[sequence, 0].long()]
        else:
            keys = self.cache[self.table[sequence].long()].flatten(0, 1)[: self.problem.keys]
        return dequantize(keys, self.q.dtype) if self.problem.has_codes else keys


def make_inputs(problem: MlaDecodeProblem, device: str, seed: int) -> Inputs:
    """Standard normal values, NaN after the keys; the seed depends only on the run's seed and the problem."""
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(f"{seed} {problem.key}".encode()))
    p, dtype = problem, TORCH_DTYPES[problem.dtype]
    pages = -(-p.keys // p.page_size)
    options = {"generator": generator, "device": device, "dtype": dtype}
    q = torch.randn(p.batch, p.tokens, p.heads, HEAD_DIM, **options)  # type: ignore[call-overload]
    cache = torch.randn(p.batch * pages, p.page_size, HEAD_DIM, **options)  # type: ignore[call-overload]
    table = torch.randperm(p.batch * pages, generator=generator, device=device).to(torch.int32).view(p.batch, pages)
    if p.keys % p.page_size:
        cache[table[:, -1].long(), p.keys % p.page_size :] = math.nan
    if p.has_codes:
        cache = torch.cat([make_coded(chunk) for chunk in cache.split(1024)])
    lengths = torch.full((p.batch,), p.keys, dtype=torch.int32, device=device)
    return Inputs(problem, q, cache, table, lengths, _indices(problem, table, generator) if p.topk else None)


def _indices(p: MlaDecodeProblem, table: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Distinct keys of a token's own sequence, as rows in all pages."""
    rows = torch.rand(p.batch, p.tokens, p.keys, generator=generator, device=table.device)
    keys = rows.argsort(-1)[..., : p.topk]
    pages = table.long()[torch.arange(p.batch, device=table.device)[:, None, None], keys // p.page_size]
    return (pages * p.page_size + keys % p.page_size).to(torch.int32)


@dataclass(frozen=True)
class Reference:
    """Expected results of the checked sequences, by sequence index, and the allowed error."""

    problem: MlaDecodeProblem
    checked: dict[int, tuple[torch.Tensor, torch.Tensor]]
    tolerance: float
    coverage: float

    def judge(self, result: torch.Tensor, lse: torch.Tensor | None = None) -> Verification:
        p = self.problem
        form = ((p.batch, p.tokens, p.heads, LATENT_DIM), TORCH_DTYPES[p.dtype])
        if text := wrong_form("result", result, form):
            return Verification(False, math.inf, self.tolerance, None, self.coverage, text)
        error = max(max_abs(result[index].float() - out) for index, (out, _) in self.checked.items())
        lse_error = None
        if lse is not None:
            lse_error = max(max_abs(lse[index].float() - own) for index, (_, own) in self.checked.items())
        return judge_result(result, error, self.tolerance, self.coverage, lse_error, LSE_TOLERANCE)


def make_reference(inputs: Inputs) -> Reference:
    p, rule, high = inputs.problem, Rule(inputs.q.dtype), high_dtype(inputs.q.device)
    checked = {}
    for index in range(0, p.batch, max(1, p.batch // MOST_CHECKED)):
        q, keys = inputs.q[index], inputs.keys_of(index)
        out, lse, _ = attend(q.to(high), keys.to(high), p.scale, is_causal=True)
        rule.add(out, attend(q, keys, p.scale, is_causal=True)[0])
        checked[index] = (out.float(), lse.float())
    return Reference(p, checked, rule.tolerance, len(checked) / p.batch)
