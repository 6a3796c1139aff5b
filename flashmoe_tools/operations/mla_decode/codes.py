"""The 8-bit float cache in Python numbers: the reference for kernels and the CPU, and how problems fill a cache."""

import math

import torch

from flashmoe_tools.operations.mla_decode.problem import KEY_BYTES, LATENT_DIM

SCALE_COLUMNS = 128
SCALES = LATENT_DIM // SCALE_COLUMNS
ROTARY_BYTE = LATENT_DIM + 4 * SCALES
LARGEST, LEAST_SCALE, NAN_CODE = 448.0, 1e-4, 0x7F


def scale_of(most: float) -> float:
    """The smallest power of two, at least 1e-4, that scales ``most`` to 448 or less; 2^127 for infinity."""
    if math.isinf(most):
        return 2.0**127
    mantissa, exponent = math.frexp(max(most / LARGEST, LEAST_SCALE))
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def quantize_row(latent: torch.Tensor) -> torch.Tensor:
    """[656] uint8 of one 16-bit latent [576]."""
    codes, scales = [], []
    for group in latent[:LATENT_DIM].double().split(SCALE_COLUMNS):
        finite = [abs(value) for value in group.tolist() if not math.isnan(value)]
        scale = scale_of(max(finite, default=0.0))
        divided = group / scale
        own = divided.clamp(-LARGEST, LARGEST).float().to(torch.float8_e4m3fn).view(torch.uint8)
        codes.append(own.masked_fill(divided.isnan(), NAN_CODE))
        scales.append(scale)
    rotary = latent[LATENT_DIM:].contiguous().view(torch.uint8)
    return torch.cat([*codes, torch.tensor(scales, dtype=torch.float32).view(torch.uint8), rotary])


def make_coded(latents: torch.Tensor) -> torch.Tensor:
    """[..., 656] uint8 of many latents [..., 576]; each scale follows the same rule."""
    groups = latents[..., :LATENT_DIM].float().unflatten(-1, (SCALES, SCALE_COLUMNS))
    mantissa, exponent = torch.frexp((groups.abs().nan_to_num(nan=0.0).amax(-1) / LARGEST).clamp(min=LEAST_SCALE))
    scales = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2).view(torch.uint8)
    rotary = latents[..., LATENT_DIM:].contiguous().view(torch.uint8)
    return torch.cat([codes, scales.contiguous().view(torch.uint8), rotary], dim=-1)


def dequantize(coded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., 576] in the 16-bit type of the cache's rotary values: codes times scales, rounded."""
    assert coded.shape[-1] == KEY_BYTES
    coded = coded.view(torch.uint8)
    codes = coded[..., :LATENT_DIM].view(torch.float8_e4m3fn).float()
    scales = coded[..., LATENT_DIM:ROTARY_BYTE].contiguous().view(torch.float32)
    latent = (codes * scales.repeat_interleave(SCALE_COLUMNS, dim=-1)).to(dtype)
    return torch.cat([latent, coded[..., ROTARY_BYTE:].contiguous().view(dtype)], dim=-1)
