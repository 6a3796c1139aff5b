"""The tensors of a layer with e4m3 weights, its two references, and the rule of ``moe/reference.py`` for either.

A contender that quantises x and the activation between the products, as ours does, is compared with a float32 (float64
on a CPU) layer that rounds these to e4m3 too. One that computes in 16 bits with dequantised weights returns
``SixteenBits`` and is compared with the layer without this rounding.
"""

import math
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.judging import high_dtype
from flashmoe_tools.operations.moe import reference as forward
from flashmoe_tools.operations.moe.problem import MoeProblem
from flashmoe_tools.operations.moe_scaled import formats
from flashmoe_tools.operations.moe_scaled.formats import BLOCK, LARGEST
from flashmoe_tools.operations.moe_scaled.problem import MoeScaledProblem

ROUTINGS = 4  # per case; a graph of calls cycles through them, so the weights of few experts do not stay in L2
SPREAD = 80.0  # of the values before scaling; the largest of a block of normal values is then near e4m3's largest


@dataclass(frozen=True)
class SixteenBits:
    """The result [T, H] of a contender with 16-bit activations."""

    out: torch.Tensor


@dataclass(frozen=True)
class ScaledInputs:
    """x [T, H] bfloat16, w13 [E, 2I, H] and w2 [E, H, I] e4m3 with float32 block scales; topk_weights [T, k].

    ``routings``: ids int32 [T, k]; results are checked with the first one.
    """

    problem: MoeScaledProblem
    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    topk_weights: torch.Tensor
    routings: tuple[torch.Tensor, ...]

    def poison(self) -> None:
        """Fills the memory that the allocator will use for the next result with NaN."""
        torch.full_like(self.x, math.nan)

    @cached_property
    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 and w2 in bfloat16."""
        return dequantize(self.w13, self.w13_scale), dequantize(self.w2, self.w2_scale)


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 of weights [E, n, k] with scales [E, n / 128, k / 128]; each product is rounded once."""
    wide = values.to(torch.bfloat16)
    wide.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK)).mul_(scales[:, :, None, :, None])
    return wide


def make_inputs(problem: MoeScaledProblem, device: str, seed: int) -> ScaledInputs:
    """Standard normal tokens and scaled weights; the seed depends only on the run's seed and the problem."""
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(f"{seed} {problem.key}".encode()))
    p = problem

    def weights(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.empty(p.experts, n, k, dtype=torch.float8_e4m3fn, device=device)
        for one in values.unbind():
            drawn = torch.randn(n, k, generator=generator, device=device).mul_(SPREAD)
            one.copy_(drawn.clamp_(-LARGEST, LARGEST))
        scales = torch.rand(p.experts, n // BLOCK, k // BLOCK, generator=generator, device=device) + 0.5
        return values, scales.mul_(k**-0.5 / SPREAD)

    x = torch.randn(p.tokens, p.hidden, generator=generator, device=device, dtype=torch.bfloat16)
    topk_weights, ids = forward.choices(p, device, generator)
    (w13, w13_scale), (w2, w2_scale) = weights(2 * p.intermediate, p.hidden), weights(p.hidden, p.intermediate)
    routings = tuple((ids + turn * p.experts // ROUTINGS) % p.experts for turn in range(ROUTINGS))
    return ScaledInputs(problem, x, w13, w2, w13_scale, w2_scale, topk_weights, routings)


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """The rows after quantisation, in their dtype."""
    return formats.dequantize(*formats.quantize(rows)).to(rows.dtype)


def compose(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    dtype: torch.dtype,
    *,
    shared: torch.Tensor | None = None,
    activation: str = "swiglu",
) -> torch.Tensor:
    """The layer in ``dtype``, expert by expert; x is replaced by its quantised rows."""

    def run_expert(expert: int, rows: torch.Tensor) -> torch.Tensor:
        up = formats.dequantize(w13[expert], w13_scale[expert], BLOCK).to(dtype)
        down = formats.dequantize(w2[expert], w2_scale[expert], BLOCK).to(dtype)
        return F.linear(rounded(forward.activate(F.linear(rows, up), activation)), down)

    return forward.mix(x.to(dtype), weights, ids, len(w13), run_expert, shared)


@dataclass(frozen=True)
class ScaledReference:
    """Either reference; the 16-bit one is created when a result needs it."""

    quantized: forward.Reference
    inputs: ScaledInputs

    @property
    def tolerance(self) -> float:
        return self.quantized.tolerance

    @property
    def coverage(self) -> float:
        return self.quantized.coverage

    @cached_property
    def sixteen_bits(self) -> forward.Reference:
        given, problem = self.inputs, sixteen_bits(self.inputs.problem)
        w13, w2 = given.dequantized
        layer = forward.Inputs(problem, given.x, w13, w2, given.topk_weights, given.routings[0])
        return forward.make_reference(layer)

    def judge(self, result: Any, lse: torch.Tensor | None = None) -> Verification:
        if isinstance(result, SixteenBits):
            return self.sixteen_bits.judge(result.out, lse)
        return self.quantized.judge(result, lse)


def sixteen_bits(problem: MoeScaledProblem) -> MoeProblem:
    """The same layer with 16-bit weights."""
    p = problem
    return MoeProblem("bf16", p.experts, p.top_k, p.hidden, p.intermediate, p.tokens, p.routing)


def make_reference(inputs: ScaledInputs) -> ScaledReference:
    tokens = forward.checked_tokens(inputs.problem, inputs.x.device)
    layer = (inputs.w13, inputs.w2, inputs.w13_scale, inputs.w2_scale)
    weights, ids = inputs.topk_weights[tokens], inputs.routings[0][tokens]

    def run(dtype: torch.dtype) -> torch.Tensor:
        return compose(rounded(inputs.x[tokens].to(dtype)), *layer, weights.to(dtype), ids, dtype)

    out = run(high_dtype(inputs.x.device))
    tolerance = forward.allowed(out, run(inputs.x.dtype), inputs.x.dtype)
    coverage = tokens.numel() / inputs.problem.tokens
    return ScaledReference(forward.Reference(sixteen_bits(inputs.problem), tokens, out, tolerance, coverage), inputs)
