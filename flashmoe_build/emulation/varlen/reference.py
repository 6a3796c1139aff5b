"""Ragged, paged and banded attention in fp64, from the 16-bit tensors that the kernels read."""

from __future__ import annotations

import torch

from flashmoe_build.emulation.problem import UNIT_ROUNDOFF
from flashmoe_build.emulation.varlen.problem import UNBOUNDED, VarlenProblem
from flashmoe_build.emulation.varlen.tensors import Tensors

INFINITY = float("inf")
EXPONENT_UNIT = 4e-7  # error of an exponent for each unit of a score in fp32


def visible(p: VarlenProblem, rows: int, keys: int) -> torch.Tensor:
    """[rows, keys]: what the window shows, aligned bottom-right."""
    at = torch.arange(rows)[:, None] + (keys - rows)
    key = torch.arange(keys)[None, :]
    shown = torch.ones(rows, keys, dtype=torch.bool)
    if p.left < UNBOUNDED:
        shown &= key >= at - p.left
    if p.right < UNBOUNDED:
        shown &= key <= at + p.right
    return shown


def reference(p: VarlenProblem, tensors: Tensors, entry: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, bound of the error of out) of one entry: [heads, rows, ...]. The bound is that of dense problems; a softcap adds
    the fp32 error of its tanh."""
    q, k, v = (tensor.double() for tensor in tensors.entries[entry])
    k, v = (tensor.repeat_interleave(p.group, dim=0) for tensor in (k, v))
    rows, keys = q.shape[1], k.shape[1]
    scores = q @ k.mT * p.scale
    magnitude = scores.abs()
    if p.softcap > 0:
        scores = p.softcap * torch.tanh(scores / p.softcap)
        magnitude = magnitude + p.softcap
    if tensors.mask is not None:
        mask = tensors.mask[entry, :, :rows, :keys]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -INFINITY)
        else:
            scores = scores + mask.double()
            magnitude = magnitude + mask.double().abs().nan_to_num(posinf=0.0)
    scores = scores.masked_fill(~visible(p, rows, keys), -INFINITY)
    terms = scores
    if tensors.sinks is not None:
        terms = torch.cat([scores, tensors.sinks.double()[:, None, None].expand(-1, rows, 1)], dim=-1)
    lse = torch.logsumexp(terms, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(torch.isinf(lse), 0.0)[..., None])
    out, spread = weights @ v, weights @ v.abs()
    unit = UNIT_ROUNDOFF[p.dtype]
    exponent = EXPONENT_UNIT * magnitude.amax(dim=-1, keepdim=True) if keys else 0.0
    small = keys * 2.0**-25 * float(v.abs().max()) if p.dtype == "f16" and keys else 0.0
    return out, lse, (unit + 2e-5 + exponent) * spread + unit * out.abs() + 1e-6 + small
