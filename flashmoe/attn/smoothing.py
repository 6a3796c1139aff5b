"""Subtracts the mean from keys, for attention in 8-bit floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmoe.errors import ArgumentTypeError, DtypeError, ShapeError

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def smooth_keys(k: Any) -> Tensor:
    """``k`` minus the mean of each head's keys; quantise this instead of ``k``.

    This lowers every score of a query by the same number, scale * (q . mean): the softmax, and so ``out`` of attention, does not change, and
    ``lse`` decreases by that number. If keys share a large mean, as keys of language models do in some columns, the remainder needs a
    smaller scale, and scores with 8-bit keys are closer to the exact ones. Keys that are added later (to a cache) must have the mean of the
    first keys subtracted too.

    Args:
        k: [B, Hkv, Sk, D], any strides, float16, bfloat16 or float32; can be differentiated.

    Returns:
        A tensor like ``k``: the mean is computed in float32, the difference rounded once.

    Raises:
        ArgumentTypeError, ShapeError, DtypeError: k is not such a tensor.
    """
    if not isinstance(k, Tensor):
        msg = f"k must be a tensor; found {type(k).__name__}; use torch.as_tensor"
        raise ArgumentTypeError(msg)
    if k.dtype not in _DTYPES:
        msg = f"k must be float16, bfloat16 or float32; found {k.dtype}; smooth keys before quantising them"
        raise DtypeError(msg)
    if k.dim() != 4:
        msg = f"k must be [batch, heads, keys, head_dim]; found {list(k.shape)}; add what is missing with .unsqueeze(0)"
        raise ShapeError(msg)
    wide = k.float()
    return (wide - wide.mean(dim=2, keepdim=True)).to(k.dtype) if k.shape[2] else k.clone()
