"""mxfp4 numbers from their definition (OCP Microscaling Formats 1.0); shares no code with what it checks.

An e2m1 code is a sign, two bits of exponent e (bias 1) and one of mantissa m: (1 + m/2) 2^(e-1), or m/2 if e is 0. A
byte holds two codes, the first in the low four bits. Each 32 codes of a row share an e8m0 scale b, 2^(b-127); 255 is
NaN. A weight as bfloat16 is the nearest one, ties to even: exact, but infinite from 2^128 on.
"""

import torch
from torch import Tensor

BLOCK = 32
NAN = 255  # as a scale


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """fp64 [..., k] of codes [..., k / 2] and scales [..., k / 32]."""
    nibbles = torch.stack((codes % 16, codes // 16), -1).flatten(-2).double()
    sign = torch.where(nibbles >= 8, -1.0, 1.0)
    exponent, mantissa = (nibbles % 8 / 2).floor(), nibbles % 2
    number = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    powers = torch.where(scales == NAN, torch.nan, 2.0 ** (scales.double() - 127))
    return sign * number * powers.repeat_interleave(BLOCK, -1)


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of x [..., k]: the scale maps a block's largest magnitude to at most 6; values round to nearest."""
    blocks = x.double().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1).clamp(min=2.0**-120)
    exponent = (largest / 6).log2().ceil()
    scaled = (blocks / 2.0 ** exponent.unsqueeze(-1)).flatten(-2)
    borders = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), dtype=torch.float64, device=x.device)
    nibbles = torch.bucketize(scaled.abs(), borders) + 8 * (scaled < 0)
    return (nibbles[..., 0::2] + 16 * nibbles[..., 1::2]).to(torch.uint8), (exponent + 127).to(torch.uint8)


def as_bfloat16(codes: Tensor, scales: Tensor) -> Tensor:
    """The bfloat16 weights of the layer that the mxfp4 layer must match bit for bit.

    A float32 holds every number below 2^128.
    """
    return decode(codes, scales).float().bfloat16()
