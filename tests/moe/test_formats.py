"""The reference's e4m3 numbers: every byte compared with torch, quantisation compared with the layer's, and planted errors that are found."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashmoe.moe import scaled as product
from flashmoe_tools.operations.moe_scaled import formats

E4M3 = torch.float8_e4m3fn
BYTES = torch.arange(256, dtype=torch.uint8)


def rows() -> Tensor:
    """Magnitudes from the underflow of scales to 1e9; ties, zeros, NaN, an infinity, and a shorter last block."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 1000, generator=generator) * torch.exp(6 * torch.randn(40, 1000, generator=generator))
    x[0, :256], x[1, 5], x[2, 7], x[4] = 0.0, torch.nan, torch.inf, x[4] * 1e-35
    numbers = formats.decode(BYTES[:127]).float()
    x[3, :126], x[3, 126] = (numbers[1:] + numbers[:-1]) / 2, 448.0
    return x


def agrees(values: Tensor, scales: Tensor, x: Tensor) -> bool:
    """Bitwise equality, except that a NaN may have either sign."""
    codes, own_scales = formats.quantize(x)
    found = values.contiguous().view(torch.uint8)
    both_nan = (codes & formats.NAN == formats.NAN) & (found & formats.NAN == formats.NAN)
    return torch.equal(scales, own_scales) and bool(((codes == found) | both_nan).all())


def test_every_byte_stands_for_what_torch_says() -> None:
    numbers = formats.decode(BYTES)
    assert torch.equal(numbers.nan_to_num(1e9), BYTES.view(E4M3).double().nan_to_num(1e9))
    assert torch.equal(formats.encode(numbers)[BYTES & 127 != 127], BYTES[BYTES & 127 != 127])


def test_the_layer_quantises_as_the_format_says() -> None:
    assert agrees(*product.quantize(rows()), rows())


def _scaled(x: Tensor, largest: float = 448.0, block: int = 128) -> tuple[Tensor, Tensor]:
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).unflatten(1, (-1, block))
    scales = padded.abs().nan_to_num(0.0).amax(-1, keepdim=True).clamp(min=2.0**-100) * (1.0 / largest)
    codes = (padded * (1.0 / scales)).clamp(-448, 448).flatten(1)[:, : x.shape[1]].to(E4M3)
    return codes, scales.squeeze(-1)[:, :: 128 // block]


def _truncated(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scales = product.quantize(x)
    wide = formats.dequantize(values, scales)
    return (values.view(torch.uint8) - (wide.abs() > x.abs()).to(torch.uint8)).view(E4M3), scales


@pytest.mark.parametrize(
    "planted",
    [lambda x: _scaled(x, 447.0), lambda x: _scaled(x, block=64), lambda x: _scaled(x.bfloat16().float()), _truncated],
    ids=["largest is 447", "blocks of 64", "x in bfloat16", "rounded towards zero"],
)
def test_a_planted_error_is_seen(planted: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    x = torch.randn(20, 1000, generator=torch.Generator().manual_seed(1))
    assert agrees(*_scaled(x), x)
    assert not agrees(*planted(x), x)
