"""The layer with 4-bit weights (mxfp4, OCP Microscaling Formats 1.0): e2m1 codes, two per byte, and a power of two for each 32.

The GPU kernels convert weights to bfloat16 as they multiply; the CPU writes out the bfloat16 weights of the experts that have
tokens. Both results equal those of the bfloat16 layer on :func:`dequantize`d weights, bit for bit. There is no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashmoe.errors import ArgumentError
from flashmoe.moe import errors
from flashmoe.moe.options import Layer, Mxfp4Layer, Scales
from flashmoe.moe.packed import is_packed
from flashmoe.moe.scaled import check_no_gradients
from flashmoe.rules import check

BLOCK = 32  # values of a row with one scale
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the magnitudes of codes 0 to 7; bit 3 is the sign
CAST = tuple(Mxfp4Layer._fields.index(name) for name in ("x", "b13", "b2", "shared"))  # by autocast


def is_mxfp4(layer: Layer, scales: Scales) -> bool:
    """Whether this module handles the call: codes or scales are bytes."""
    tensors = (layer.w13, layer.w2, scales.w13, scales.w2)
    return any(getattr(tensor, "dtype", None) is torch.uint8 for tensor in tensors)


def call_mxfp4(layer: Layer, scales: Scales, out: Tensor | None, *, weights_on_input: bool) -> Tensor:
    """``fused_moe`` with uint8 weights."""
    for name, is_given in {"transposed": layer.transposed, "weights_on_input": weights_on_input}.items():
        if is_given:
            msg = f"{name} is given with mxfp4 (uint8) weights, which do not support it; remove it, or pass bfloat16 weights"
            raise ArgumentError(msg)
    packed = [is_packed(weights) for weights in (layer.w13, layer.w2)]
    if any(packed):
        _check_packed(packed, scales)
    for name, scale in (("w13_scale", scales.w13), ("w2_scale", scales.w2)):
        if scale is None and not any(packed):
            msg = f"{name} is None; mxfp4 (uint8) weights need w13_scale and w2_scale; pass both, or bfloat16 weights"
            raise ArgumentError(msg)
    if scales.x is not None:
        msg = "x_scale is given with mxfp4 (uint8) weights, whose x is bfloat16; leave it out"
        raise ArgumentError(msg)
    given = {name: getattr(layer, name) for name in Mxfp4Layer._fields if name in Layer._fields}
    given |= {"w13": _flat(layer.w13), "w2": _flat(layer.w2), "w13_scale": scales.w13, "w2_scale": scales.w2}
    call = Mxfp4Layer(**given)
    check_no_gradients((*call, out), "mxfp4 (uint8)")
    if out is not None:
        errors.check_types("_fused_moe_mxfp4", call)
        errors.check_tensor("out", out)
        check("_fused_moe_mxfp4_out", (out, *call))
    result = _compute(call)
    return result if out is None else out.copy_(result)


def _check_packed(packed: list[bool], scales: Scales) -> None:
    if not all(packed):
        msg = f"w{'2' if packed[0] else '13'} is not packed, and the other weights are; pack both, or neither (flashmoe.pack_mxfp4)"
        raise ArgumentError(msg)
    if scales.w13 is not None or scales.w2 is not None:
        msg = "scales are given with packed mxfp4 weights, which contain their scales (flashmoe.pack_mxfp4); remove w13_scale and w2_scale"
        raise ArgumentError(msg)


def _flat(weights: Any) -> Any:
    """[E, n, k / 2], a view of a checkpoint's blocks [E, n, k / 32, 16]."""
    is_blocks = isinstance(weights, Tensor) and weights.dim() == 4 and weights.shape[3] == BLOCK // 2
    return weights.flatten(2) if is_blocks else weights


def _compute(call: Mxfp4Layer) -> Tensor:
    operator = torch.ops.flashmoe._fused_moe_mxfp4.default
    if is_compiling():
        compiled: Tensor = operator(*call)
        return compiled
    try:
        result: Tensor = operator(*call)
    except Exception as error:
        errors.raise_cause(error, "_fused_moe_mxfp4", call)
        raise
    return result


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [..., k] from uint8 codes [..., k / 2], two per byte, the first in the low four bits, and uint8 scales [..., k / 32].

    A code is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; a scale b means 2^(b - 127), 255 means NaN (OCP Microscaling Formats
    1.0). Exact, except for what bfloat16 cannot hold: magnitudes of 2^128 and more become infinite.
    """
    table = torch.tensor((*_NUMBERS, *(-number for number in _NUMBERS)), dtype=torch.bfloat16, device=codes.device)
    values = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(-2)
    bits = torch.where(scales == 0, 1 << 22, scales.to(torch.int32) << 23)  # of a float32; 2^-127 is subnormal
    powers = bits.view(torch.float32).masked_fill(scales == 255, torch.nan)
    weights: Tensor = (values.unflatten(-1, (-1, BLOCK)) * powers.unsqueeze(-1)).to(torch.bfloat16).flatten(-2)
    return weights
