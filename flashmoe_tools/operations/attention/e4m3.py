"""Attention in 8-bit floats as the kernels compute it, in float64: the reference for tests and emulated kernels."""

import math
from dataclasses import dataclass

import torch

E4M3 = torch.float8_e4m3fn
BLOCK = 128  # keys
TOP = 8.0  # exponent of the largest P of a row
LOG2E = math.log2(math.e)
# A product of 32 columns drops bits more than 13 below its largest term (csrc/emulation/numerics.h): both for the
# scores and for P V of a block.
CUT = 2.0**-13
EXPONENTIAL = 1e-5  # error of an exponential, as a base-2 exponent


@dataclass(frozen=True)
class Codes:
    """float8_e4m3fn [batch, heads, rows, head_dim], and a scale per batch and head, or per row of each."""

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        return self.codes.double()

    @property
    def row_scale(self) -> torch.Tensor:
        """[batch, heads, 1 or rows]"""
        return (self.scale if self.scale.dim() == 3 else self.scale[..., None]).double()


@dataclass(frozen=True)
class Expected:
    """The result of the recurrence in fp64, and how far a kernel may be from it."""

    out: torch.Tensor
    out_bound: torch.Tensor
    lse: torch.Tensor
    lse_bound: torch.Tensor


def attend(q: Codes, k: Codes, v: Codes, scale: float, *, causal: bool, roundoff: float) -> Expected:
    """Attention block by block: P is rounded to e4m3 relative to the block's maximum.

    If an error of the scores may round P to a neighbouring code, the bound includes it. ``roundoff``: of the output's
    type.
    """
    (_, heads, rows, head_dim), keys_total = q.codes.shape, k.codes.shape[2]
    group = heads // k.codes.shape[1]

    def of_query(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(group, dim=1)

    keys, values = of_query(k.values), of_query(v.values * v.row_scale[..., None])
    factor = q.row_scale[..., None] * of_query(k.row_scale)[..., None, :] * scale * LOG2E
    products = q.values[..., :, None, :] * keys[..., None, :, :] if rows * keys_total * head_dim < 2**22 else None
    largest = (
        products.abs().amax(dim=-1)
        if products is not None
        else q.values.abs().amax(dim=-1, keepdim=True) * keys.abs().amax(dim=-1)[..., None, :]
    )
    raw = q.values @ keys.transpose(-1, -2)
    # Each step of 32 columns truncates some of its 33 terms.
    error = (math.ceil(head_dim / 32) * 8 * CUT * torch.maximum(largest, raw.abs()) * factor).nan_to_num(0.0)
    seen = torch.ones(rows, keys_total, dtype=torch.bool)
    if causal:
        seen = seen.tril(keys_total - rows)
    scores = (raw * factor).masked_fill(~seen, -torch.inf)
    error = error.masked_fill(~seen, 0.0)
    maximum = scores.nan_to_num(-torch.inf, neginf=-torch.inf).amax(dim=-1)  # of the row: only used as the unit of sums
    unit = torch.where(torch.isinf(maximum), 0.0, maximum)
    out = torch.zeros(*scores.shape[:3], v.codes.shape[3], dtype=torch.double)
    bound, total = torch.zeros_like(out), torch.zeros_like(maximum)
    for first in range(0, keys_total, BLOCK):
        block, off = scores[..., first : first + BLOCK], error[..., first : first + BLOCK]
        largest = block.nan_to_num(-torch.inf, neginf=-torch.inf).amax(dim=-1)
        factor = torch.exp2(largest - unit)
        # The error of the largest score affects all scores of the block.
        shift, common = torch.where(torch.isinf(largest), 0.0, largest)[..., None], off.amax(dim=-1, keepdim=True)
        weights = torch.exp2(block - shift + TOP)
        low, high = (
            (weights * torch.exp2(sign * (off + common + EXPONENTIAL))).float().to(E4M3).double() for sign in (-1, 1)
        )
        rounded = weights.float().to(E4M3).double()
        value = values[..., first : first + BLOCK, :]
        spread = rounded @ value.abs()
        flips = (high - low) @ value.abs()
        out += (rounded @ value) * factor[..., None]
        bound += (flips + (32 * CUT + common) * spread) * factor[..., None]
        total += weights.sum(dim=-1) * factor
    inverse = torch.where(total == 0, 0.0, 1.0 / total)[..., None]
    out, bound = out * inverse, bound * inverse
    worst = error.amax(dim=-1)  # a row's largest score error: the relative error of its sum
    bound = bound.nan_to_num(0.0) + (worst[..., None] + EXPONENTIAL + roundoff) * out.abs().nan_to_num(0.0) + 1e-6
    lse = torch.where(total == 0, -torch.inf, torch.log2(total) + unit - TOP)
    return Expected(out, bound, lse / LOG2E, 2e-4 + worst)
