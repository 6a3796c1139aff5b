"""e4m3 values with a scale for each block: what the fp8 layer makes of its activations, in torch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # values of a row with one scale; of weights, so many rows as well
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
_LEAST = 2.0**-100  # of a block's largest magnitude, so that zeros have a scale too


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [rows, columns] and float32 scales [rows, columns / 128] of x; a row's last block may be shorter. A
    block's scale is its largest magnitude / 448. NaN stays NaN, an infinity makes its block NaN."""
    columns = x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
    magnitudes = padded.abs()
    largest = torch.where(magnitudes.isnan(), 0.0, magnitudes).amax(-1, keepdim=True)
    scales = largest.clamp(min=_LEAST) * (1.0 / LARGEST)  # which torch on a GPU makes of a division anyway
    scaled = padded * (1.0 / scales)
    # Rounding may lift the largest a little over 448, which torch's conversion would make NaN on some devices.
    values = scaled.clamp(-LARGEST, LARGEST).flatten(1)[:, :columns].to(E4M3)
    return values, scales.squeeze(-1)
