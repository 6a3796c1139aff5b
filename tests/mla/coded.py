"""The 8-bit cache format by its description, for tests: bytes packed with struct, values decoded bit by bit."""

import math
import struct

import torch
from torch import Tensor

KEY_BYTES = 656
# Codes 0 to 127: sign, 4 bits of exponent (bias 7), 3 bits of fraction; no infinity.
MAGNITUDES = [
    math.nan if code == 0x7F else (code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10)
    for code in range(128)
]
VALUES = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=torch.float64)


def nearest_code(value: float) -> int:
    """The closest of all codes; of two equally close ones the even one."""
    if math.isnan(value):
        return 0x7F
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    magnitude = min(abs(value), 448.0)
    return sign | min(range(127), key=lambda code: (abs(MAGNITUDES[code] - magnitude), code % 2))


def quantized(latent: Tensor) -> bytes:
    """The 656 bytes of a latent [576]."""
    codes, scales = b"", b""
    for group in latent[:512].double().reshape(4, 128).tolist():
        most = max((abs(value) for value in group if not math.isnan(value)), default=0.0)
        scale = 2.0**-13
        while scale * 448.0 < most and scale < 2.0**127:
            scale *= 2.0
        codes += bytes(nearest_code(value / scale) for value in group)
        scales += struct.pack("<f", scale)
    return codes + scales + latent[512:].contiguous().view(torch.uint8).numpy().tobytes()


def dequantized(coded: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., 576] in ``dtype``, the type of the cache's rotary values; with scales other than powers of two, products are rounded once."""
    coded = coded.view(torch.uint8).cpu()
    scales = coded[..., 512:528].contiguous().view(torch.float32).double()
    latent = VALUES[coded[..., :512].long()] * scales.repeat_interleave(128, -1)
    return torch.cat([latent.float().to(dtype), coded[..., 528:].contiguous().view(dtype)], -1)
