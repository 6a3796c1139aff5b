"""Keys without their mean, for attention in 8-bit floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmoe.errors import ArgumentTypeError, DtypeError, ShapeError

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def smooth_keys(k: Any) -> Tensor:
    """``k`` less the mean of each head's keys, to be quantised in its place.

    Every score of a query loses the same number, scale * (q . mean): the softmax, and so ``out`` of attention, stays what it was, and ``lse`` is less by
    that number. Where keys share a large mean, as those of language models do in some columns, what is left needs a smaller scale, and scores
    of 8-bit keys are closer to the exact ones. Keys to which others are added later (a cache) have to lose the first ones' mean, too.

    Args:
        k: [B, Hkv, Sk, D], any strides, float16, bfloat16 or float32; can be differentiated.

    Returns:
        A tensor like ``k``: the mean is taken in float32, the difference rounded once.

    Raises:
        ArgumentTypeError, ShapeError, DtypeError: k is not such a tensor.
    """
    if not isinstance(k, Tensor):
        msg = f"k must be a tensor; found {type(k).__name__}; use torch.as_tensor"
        raise ArgumentTypeError(msg)
    if k.dtype not in _DTYPES:
        msg = f"k must be float16, bfloat16 or float32; found {k.dtype}; smooth keys before they are quantised"
        raise DtypeError(msg)
    if k.dim() != 4:
        msg = f"k must be [batch, heads, keys, head_dim]; found {list(k.shape)}; add what is missing with .unsqueeze(0)"
        raise ShapeError(msg)
    wide = k.float()
    return (wide - wide.mean(dim=2, keepdim=True)).to(k.dtype) if k.shape[2] else k.clone()
