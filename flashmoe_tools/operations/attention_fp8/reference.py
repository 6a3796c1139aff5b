"""The codes for the 16-bit problem's values, and the allowed error against attention of the values they stand for.

P has three bits of fraction: a relative error of 2.6% root mean square. The sum over keys turns that into the same
share of a result's deviation from the mean value. So the rule limits the root mean square error.
"""

import math
from dataclasses import dataclass

import torch

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.attention import reference as wide
from flashmoe_tools.operations.attention.e4m3 import E4M3
from flashmoe_tools.operations.attention_fp8.problem import Fp8Problem
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.judging import high_dtype, judge_result, wrong_form

TOLERANCE = 0.035  # relative to the root mean square of a result with zero mean
ROUNDED = 0.027  # in the same unit: what rounding a result to three bits of fraction adds


@dataclass(frozen=True)
class Fp8Inputs:
    """q [B, Hq, Sq, D], k and v [B, Hkv, Sk, D] in float8_e4m3fn, their dequantised values, and their scales.

    The dequantised values have the output's dtype. Scales are in attention's format; none if all are one. Query heads
    of one key head share their scale, as in FlashAttention 3.
    """

    problem: Fp8Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dequantized: wide.Inputs
    scales: dict[str, torch.Tensor]  # q_scale, k_scale, v_scale: [B, H] or [B, H, blocks], float32
    of_rows: dict[str, torch.Tensor]  # q, k, v: the same for each row, [B, H, S, 1]

    @property
    def scale(self) -> float:
        return self.problem.scale

    def pick(self, name: str, pairs: tuple[tuple[int, int], ...], dtype: torch.dtype) -> torch.Tensor:
        """[pairs, S, D] of q, k or v, dequantised."""
        values = wide.pick(getattr(self, name).to(dtype), pairs)
        return values * wide.pick(self.of_rows[name], pairs).to(dtype) if self.scales else values

    def poison(self) -> None:
        self.dequantized.poison()


def make_inputs(problem: Fp8Problem, device: str, seed: int) -> Fp8Inputs:
    made = wide.make_inputs(problem, device, seed)
    given = {"q": made.q, "k": made.k, "v": made.v}
    scales = {name: _scale(one, problem, name) for name, one in given.items() if problem.scales != "none"}
    of_rows = {name: scale.repeat_interleave(_rows(problem, name), 2)[..., None] for name, scale in scales.items()}
    codes = {name: (one / of_rows[name] if scales else one).to(E4M3) for name, one in given.items()}
    values = {name: (one.float() * of_rows[name] if scales else one).to(made.q.dtype) for name, one in codes.items()}
    named = {f"{name}_scale": one[..., 0] if problem.scales == "heads" else one for name, one in scales.items()}
    return Fp8Inputs(problem, **codes, dequantized=wide.Inputs(made.problem, **values), scales=named, of_rows=of_rows)


def _rows(problem: Fp8Problem, name: str) -> int:
    """How many rows of a tensor share a scale."""
    if problem.scales == "heads":
        return problem.seq_q if name == "q" else problem.seq_k
    return 128 if name == "v" else int(problem.scales.removeprefix("blocks"))


def _scale(values: torch.Tensor, problem: Fp8Problem, name: str) -> torch.Tensor:
    """[B, H, blocks] of [B, H, S, D]: maps each block's largest magnitude to the largest code.

    The maximum is over all heads of a key head.
    """
    batch, heads, _, columns = values.shape
    group = heads // problem.heads_kv
    blocks = values.float().abs().view(batch, problem.heads_kv, group, -1, _rows(problem, name), columns)
    return blocks.amax((2, 4, 5)).repeat_interleave(group, 1) / torch.finfo(E4M3).max


@dataclass(frozen=True)
class CodedResult:
    """A result in float8_e4m3fn, multiplied by ``factor``."""

    codes: torch.Tensor
    factor: float


@dataclass(frozen=True)
class Fp8Reference:
    """The reference for the checked (batch, head) pairs."""

    problem: Fp8Problem
    pairs: tuple[tuple[int, int], ...]
    out: torch.Tensor  # [pairs, Sq, D]
    coverage: float
    tolerance: float = TOLERANCE

    def judge(self, result: torch.Tensor | CodedResult, lse: torch.Tensor | None = None) -> Verification:
        del lse
        p, tolerance = self.problem, self.tolerance
        if isinstance(result, CodedResult):
            tolerance = math.hypot(tolerance, ROUNDED)
            result = (result.codes.float() / result.factor).to(TORCH_DTYPES[p.dtype])
        form = (p.batch, p.heads_q, p.seq_q, p.head_dim), TORCH_DTYPES[p.dtype]
        if text := wrong_form("result", result, form):
            return Verification(False, math.inf, tolerance, None, self.coverage, text)
        difference = wide.pick(result, self.pairs).to(self.out.dtype) - self.out
        error = float(difference.square().mean().sqrt() / self.out.square().mean().sqrt())
        return judge_result(result, error, tolerance, self.coverage)


def make_reference(inputs: Fp8Inputs) -> Fp8Reference:
    problem, kind = inputs.problem, inputs.q.device.type
    high, options = high_dtype(inputs.q.device), wide.ScoreOptions(problem.causal, scale=problem.scale)
    per_pair = problem.seq_q * problem.seq_k
    pairs = wide.choose_pairs(problem.batch, problem.heads_q, per_pair, wide.MAX_SCORES[kind])
    group = problem.heads_q // problem.heads_kv
    chunk = max(1, wide.CHUNK_SCORES[kind] // per_pair)
    outs = []
    for start in range(0, len(pairs), chunk):
        some = pairs[start : start + chunk]
        shared = tuple((b, h // group) for b, h in some)
        q, k, v = (inputs.pick(name, of, high) for name, of in (("q", some), ("k", shared), ("v", shared)))
        outs.append(wide.attend(q, k, v, options)[0])
    return Fp8Reference(problem, pairs, torch.cat(outs), len(pairs) / (problem.batch * problem.heads_q))
