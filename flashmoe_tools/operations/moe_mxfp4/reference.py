"""The tensors of a layer with mxfp4 weights; reference and rule are ``moe/reference.py``'s for the decoded weights."""

import math
import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from flashmoe.moe.packed import pack_mxfp4
from flashmoe_tools.operations.judging import high_dtype
from flashmoe_tools.operations.moe import reference as forward
from flashmoe_tools.operations.moe.problem import MoeProblem
from flashmoe_tools.operations.moe_mxfp4 import formats
from flashmoe_tools.operations.moe_mxfp4.problem import MoeMxfp4Problem

ROUTINGS = 4  # per case; a graph of calls cycles through them, so the weights of few experts do not stay in L2
ACTIVATION, LAYOUT = "clamped_swiglu", "interleaved"


@dataclass(frozen=True)
class Mxfp4Weights:
    """Codes w13 uint8 [E, 2I, H / 2] and w2 [E, H, I / 2] with scales of 32 along a row; biases in bfloat16."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    b13: torch.Tensor
    b2: torch.Tensor

    @cached_property
    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        w13 = pack_mxfp4(self.w13, self.w13_scale, gated="interleaved")
        return w13, pack_mxfp4(self.w2, self.w2_scale)

    @cached_property
    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 and w2 in bfloat16, decoded expert by expert: float64 of all experts would not fit."""
        pairs = ((self.w13, self.w13_scale), (self.w2, self.w2_scale))
        w13, w2 = (torch.stack([formats.as_bfloat16(*one) for one in zip(*pair, strict=True)]) for pair in pairs)
        return w13, w2


@dataclass(frozen=True)
class Mxfp4Inputs:
    """x [T, H] bfloat16, the layer's weights, topk_weights [T, k].

    ``routings``: ids int32 [T, k]; results are checked with the first one.
    """

    problem: MoeMxfp4Problem
    x: torch.Tensor
    weights: Mxfp4Weights
    topk_weights: torch.Tensor
    routings: tuple[torch.Tensor, ...]

    def poison(self) -> None:
        """Fills the memory that the allocator will use for the next result with NaN."""
        torch.full_like(self.x, math.nan)


def _generator(device: str, name: str) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(name.encode()))
    return generator


def _normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16).mul_(scale)


@lru_cache(maxsize=1)
def _make_weights(experts: int, hidden: int, intermediate: int, device: str, seed: int) -> Mxfp4Weights:
    """The weights of a layer with random codes, and scales that preserve a token's size.

    They do not depend on the tokens and are kept for the next case: making, packing and dequantising gpt-oss's weights
    takes longer than timing them.
    """
    generator = _generator(device, f"{seed} {experts} {hidden} {intermediate}")

    def weights(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 256, (experts, n, k // 2), generator=generator, device=device, dtype=torch.uint8)
        middle = 127 + round(math.log2(k**-0.5 / 3))  # the typical size of codes is 3
        blocks = (experts, n, k // formats.BLOCK)
        scales = torch.randint(middle - 1, middle + 2, blocks, generator=generator, device=device, dtype=torch.uint8)
        return codes, scales

    (w13, w13_scale), (w2, w2_scale) = weights(2 * intermediate, hidden), weights(hidden, intermediate)
    b13 = _normal(generator, experts, 2 * intermediate, scale=0.1)
    return Mxfp4Weights(w13, w2, w13_scale, w2_scale, b13, _normal(generator, experts, hidden, scale=0.1))


def make_inputs(problem: MoeMxfp4Problem, device: str, seed: int) -> Mxfp4Inputs:
    """Standard normal tokens; the seed depends only on the run's seed and the problem."""
    p, generator = problem, _generator(device, f"{seed} {problem.key}")
    x, (topk_weights, ids) = _normal(generator, p.tokens, p.hidden), forward.choices(p, device, generator)
    routings = tuple((ids + turn * p.experts // ROUTINGS) % p.experts for turn in range(ROUTINGS))
    weights = _make_weights(p.experts, p.hidden, p.intermediate, device, seed)
    return Mxfp4Inputs(problem, x, weights, topk_weights, routings)


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
    activation: str = ACTIVATION,
    layout: str = LAYOUT,
    **options: Any,
) -> torch.Tensor:
    """The layer in ``dtype`` on the decoded bfloat16 weights; ``options`` are the 16-bit layer's."""
    plain = formats.as_bfloat16(w13, w13_scale), formats.as_bfloat16(w2, w2_scale)
    return forward.compose(x, *plain, weights, ids, dtype, activation=activation, layout=layout, **options)


def make_reference(inputs: Mxfp4Inputs) -> forward.Reference:
    """The 16-bit layer's reference with the decoded weights."""
    p, (w13, w2) = inputs.problem, inputs.weights.dequantized
    tokens = forward.checked_tokens(p, inputs.x.device)
    given = (inputs.x[tokens], w13, w2, inputs.topk_weights[tokens], inputs.routings[0][tokens])
    biases: dict[str, Any] = {"b13": inputs.weights.b13, "b2": inputs.weights.b2}

    def run(dtype: torch.dtype) -> torch.Tensor:
        return forward.compose(*given, dtype, **biases, activation=ACTIVATION, layout=LAYOUT)

    out = run(high_dtype(inputs.x.device))
    tolerance = forward.allowed(out, run(inputs.x.dtype), inputs.x.dtype)
    sixteen_bits = MoeProblem("bf16", p.experts, p.top_k, p.hidden, p.intermediate, p.tokens, p.routing)
    return forward.Reference(sixteen_bits, tokens, out, tolerance, tokens.numel() / p.tokens)
