"""Ragged and paged attention with score options in fp64, from the 16-bit tensors that the kernels read."""

import torch

from flashmoe_build.emulation.compare import UNIT_ROUNDOFF
from flashmoe_tools.operations.attention import philox
from flashmoe_tools.operations.attention.reference import ScoreOptions, weigh
from flashmoe_tools.operations.attention_backward.emulation.backward import Scores
from flashmoe_tools.operations.serving.emulation.problem import UNBOUNDED, MaskTensor, VarlenProblem
from flashmoe_tools.operations.serving.emulation.tensors import Tensors

EXPONENT_UNIT = 4e-7  # error of an exponent per unit of a score in fp32
FAR = 1e36  # a mask value beyond this absorbs the score, in fp32 as in fp64


def attend(p: VarlenProblem, tensors: Tensors, sequence: int) -> tuple[Scores, torch.Tensor]:
    """The scores and the log-sum-exp [heads, rows] of one sequence; both include its sink."""
    q, k, v = (tensor.double() for tensor in tensors.sequences[sequence])
    k, v = (tensor.repeat_interleave(p.group, dim=0) for tensor in (k, v))
    rows, keys = q.shape[1], k.shape[1]
    scores = q @ k.mT * p.scale
    magnitude, derivative = scores.abs(), torch.ones_like(scores)
    if p.softcap > 0:
        capped = torch.tanh(scores / p.softcap)
        scores, derivative, magnitude = p.softcap * capped, 1.0 - capped * capped, magnitude + p.softcap
    if p.mask is MaskTensor.ALIBI and tensors.mask is not None:
        own = torch.arange(rows).unsqueeze(1) + keys - rows
        bias = -tensors.mask[sequence].double()[:, None, None] * (own - torch.arange(keys)).abs()
        scores, magnitude = scores + bias, magnitude + bias.abs()
    elif tensors.mask is not None:
        mask = tensors.mask[sequence, :, :rows, :keys]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        else:
            scores = scores + mask.double()
            size = mask.double().abs()
            magnitude = magnitude + size.masked_fill(size > FAR, 0.0)
    left, right = (-1 if side == UNBOUNDED else side for side in (p.left, p.right))
    hidden = ScoreOptions(window=(left, right)).hidden(rows, keys, scores.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if tensors.sinks is not None:
        scores = torch.cat([scores, tensors.sinks.double()[:, None, None].expand(-1, rows, 1)], dim=-1)
    weights, lse = weigh(scores)
    weights = weights[..., :keys]
    factors: torch.Tensor | float = 1.0
    if p.dropout_p > 0:
        factors = philox.factors(*p.rng_state, p.dropout_p, sequence, p.heads_q, rows, keys)
    return Scores(q, k, v, weights, magnitude, derivative, factors), lse


def reference(p: VarlenProblem, tensors: Tensors, sequence: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, bound of the error of out) of one sequence: [heads, rows, ...].

    The bound is that of dense problems; a softcap adds the fp32 error of its tanh.
    """
    scores, lse = attend(p, tensors, sequence)
    kept, keys = scores.weights * scores.factors, scores.k.shape[1]
    out, spread = kept @ scores.v, kept @ scores.v.abs()
    unit = UNIT_ROUNDOFF[p.dtype]
    exponent = EXPONENT_UNIT * scores.magnitude.amax(dim=-1, keepdim=True) if keys else 0.0
    small = keys * 2.0**-25 / (1.0 - p.dropout_p) * float(scores.v.abs().max()) if p.dtype == "f16" and keys else 0.0
    return out, lse, (unit + 2e-5 + exponent) * spread + unit * out.abs() + 1e-6 + small
