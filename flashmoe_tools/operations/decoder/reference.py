"""The model and the cache of a decoder problem, and the rule for its log-probabilities.

max|out - ref| <= 2 max|plain - ref| + 0.01, where ref is the step in float32 by torch's matrix products over the
gathered cache, and plain the same in the problem's dtype.
"""

import copy
import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention.reference import ScoreOptions, attend
from flashmoe_tools.operations.decoder.model import Cache, Decoder, Shape, Stack
from flashmoe_tools.operations.decoder.problem import DecoderProblem
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.judging import judge_result, max_abs, wrong_form

PAGE_SIZE = 16


@dataclass(frozen=True)
class Inputs:
    problem: DecoderProblem
    model: Decoder
    cache: Cache
    tokens: Tensor  # [batch, rows]

    def step(self, stack: Stack) -> Tensor:
        """Log-probabilities [batch, rows, vocabulary]; resets the cache's lengths first, so every call does the same."""
        with torch.no_grad():
            self.cache.lengths.fill_(self.problem.keys - self.problem.rows)
            return self.cache.step(self.model, self.tokens, stack)

    def poison(self) -> None:
        shape = (*self.tokens.shape, self.problem.vocabulary)
        torch.full(shape, math.nan, device=self.tokens.device)


def make_inputs(problem: DecoderProblem, device: str, seed: int) -> Inputs:
    p = problem
    with torch.random.fork_rng():
        torch.manual_seed(zlib.crc32(f"{seed} {p.key}".encode()))
        shape = Shape(p.layers, p.width, p.heads, p.heads_kv, p.head_dim, p.ffn, p.vocabulary)
        model = Decoder(shape, device, TORCH_DTYPES[p.dtype])
        cache = Cache(shape, p.batch, p.keys, PAGE_SIZE, device, TORCH_DTYPES[p.dtype])
        for pages in cache.pages:
            for one in pages:
                one.normal_()
        tokens = torch.randint(0, p.vocabulary, (p.batch, p.rows), device=device)
    return Inputs(problem, model, cache, tokens)


def append(pages: tuple[Tensor, Tensor], k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> None:
    """Appends k and v [B, Hkv, S, D] after the first ``lengths`` keys of each sequence, by torch's indexing."""
    size = pages[0].shape[1]
    places = lengths[:, None].long() + torch.arange(k.shape[2], device=k.device)
    page = table.long().gather(1, places // size)
    for store, new in zip(pages, (k, v), strict=True):
        store[page, places % size] = new.transpose(1, 2)


def _over_gathered_keys(
    q: Tensor, pages: tuple[Tensor, Tensor], k: Tensor, v: Tensor, lengths: Tensor, table: Tensor
) -> Tensor:
    append(pages, k, v, lengths, table)
    keys = int(lengths[0]) + k.shape[2]  # all sequences have the same length
    parts = []
    for sequence in range(q.shape[0]):
        k, v = (one[table[sequence].long()].flatten(0, 1)[:keys].transpose(0, 1) for one in pages)
        parts.append(attend(q[sequence], k, v, ScoreOptions(causal=True))[0])
    return torch.stack(parts)


def _refused(*_: object) -> Tensor:
    msg = "a step is over a cache"
    raise NotImplementedError(msg)


PLAIN = Stack(torch.nn.functional.linear, _refused, _over_gathered_keys)


@dataclass(frozen=True)
class Reference:
    problem: DecoderProblem
    out: Tensor
    tolerance: float
    coverage: float = 1.0

    def judge(self, result: Tensor, lse: Tensor | None = None) -> Verification:
        del lse
        if text := wrong_form("result", result, (tuple(self.out.shape), torch.float32)):
            return Verification(False, math.inf, self.tolerance, None, self.coverage, text)
        return judge_result(result, max_abs(result - self.out), self.tolerance, self.coverage)


def make_reference(inputs: Inputs) -> Reference:
    plain = inputs.step(PLAIN)
    exact = copy.deepcopy(inputs)
    exact.model.float()
    exact.cache.pages = [(k.float(), v.float()) for k, v in exact.cache.pages]
    out = exact.step(PLAIN)
    return Reference(inputs.problem, out, 2 * max_abs(plain - out) + 0.01)
