"""e4m3 numbers and blocks with one scale, from the format's definition; shares no code with what it checks.

A byte is a sign, four bits of exponent (bias 7) and three of mantissa: (1 + m/8) 2^(e-7), or m/8 2^-6 if e is 0. There
is no infinity; 0x7F and 0xFF are NaN, so the largest number is 448.

Quantising a block of 128 values x of a row, all in float32: scale = max(largest |x|, 2^-100) * (1 / 448), inverse = 1 /
scale, and each value is x * inverse, saturated to 448 and rounded to the nearest e4m3 number, ties to the even
mantissa. NaN is ignored in the maximum and stays NaN; an infinity makes its whole block NaN. Each step is computed in
float64 and rounded to float32, which gives the float32 result: 53 bits hold a product of two 24-bit numbers and suffice
for their quotient.
"""

import torch
from torch import Tensor

BLOCK = 128  # values of a row with one scale; for weights also the number of rows
LARGEST = 448.0
NAN = 0x7F
LEAST = 2.0**-100  # lower limit of a block's largest magnitude, so the scale of a block of zeros has an inverse


def _numbers() -> Tensor:
    """[127] fp64: the magnitudes of the bytes below NaN, in ascending order."""
    codes = torch.arange(NAN, dtype=torch.float64)
    exponents, mantissas = (codes / 8).floor(), codes % 8
    return torch.where(exponents == 0, mantissas / 8 * 2.0**-6, (1 + mantissas / 8) * 2.0 ** (exponents - 7))


def decode(values: Tensor) -> Tensor:
    """fp64 values of bytes, or of a tensor of torch's float8_e4m3fn."""
    codes = values.contiguous().view(torch.uint8).long()
    table = torch.cat((_numbers(), torch.tensor([torch.nan], dtype=torch.float64))).to(values.device)
    return torch.where(codes >= 128, -1.0, 1.0) * table[codes & NAN]


def encode(x: Tensor) -> Tensor:
    """The bytes of the nearest e4m3 numbers, ties to even; values beyond 448 saturate, NaN gives 0x7F."""
    x = x.double()
    numbers = _numbers().to(x.device)
    borders, magnitude = (numbers[1:] + numbers[:-1]) / 2, x.abs().contiguous()
    # Differs only in ties
    down, up = (torch.bucketize(magnitude, borders), torch.bucketize(magnitude, borders, right=True))
    code = torch.where(down % 2 == 0, down, up) + 128 * torch.signbit(x)
    return torch.where(x.isnan(), NAN, code).to(torch.uint8)


def quantize(x: Tensor, block_rows: int = 1) -> tuple[Tensor, Tensor]:
    """(bytes [rows, columns], float32 scales [rows / block_rows, ceil(columns / 128)]) of x [rows, columns]."""
    columns = x.shape[1]
    padded = torch.nn.functional.pad(_float32(x.double()), (0, -columns % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, block_rows))
    largest = blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax((1, 3), keepdim=True)
    scales = _float32(largest.clamp(min=LEAST) * _float32(torch.tensor(1 / LARGEST, dtype=torch.float64)))
    codes = encode(_float32(blocks * _float32(1 / scales)))
    return codes.flatten(2).flatten(0, 1)[:, :columns], scales[:, 0, :, 0].float()


def dequantize(values: Tensor, scales: Tensor, block_rows: int = 1) -> Tensor:
    """fp64 of values [..., rows, columns] with a scale per ``block_rows`` by 128; the last blocks may be smaller."""
    wide = scales.double().repeat_interleave(block_rows, -2).repeat_interleave(BLOCK, -1)
    return decode(values) * wide[..., : values.shape[-2], : values.shape[-1]]


def _float32(x: Tensor) -> Tensor:
    """Rounds fp64 to float32, as fp64."""
    return x.float().double()
