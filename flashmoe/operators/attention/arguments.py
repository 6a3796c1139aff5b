"""The types of attention's arguments, which C++ cannot see. The rules for values are in flashmoe/attn/rules.py.

An eager call runs nothing of this while its arguments are of the usual types: :func:`explain` looks for the reason after a call has failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashmoe.checks import check_flag, has_names, is_number
from flashmoe.errors import ArgumentError, ArgumentTypeError, FlashmoeError
from flashmoe.rules import broken
from flashmoe.rules import explain as explain_values

MAX_HEAD_DIM = 256
MAX_SCALE = 3.4028234663852886e38 / 1.4426950408889634  # the kernels hold scale * log2(e) in float32
LAYOUT = "[batch, heads, length, head_dim]"
# A plain dict: torch.compile traces no mapping proxy where the code that it compiles has changed any dict before.
DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    "cpu": (torch.float16, torch.bfloat16, torch.float32),
    "cuda": (torch.float16, torch.bfloat16),
    "meta": (torch.float16, torch.bfloat16, torch.float32),
}


def check_is_dense_tensor(name: str, tensor: Any, layout: str = LAYOUT) -> None:
    if not isinstance(tensor, Tensor):
        msg = f"{name} must be a torch.Tensor {layout}; found {type(tensor).__name__}; convert it with torch.as_tensor"
        raise ArgumentTypeError(msg)
    if tensor.is_nested or tensor.layout is not torch.strided:
        found = "nested" if tensor.is_nested else str(tensor.layout)
        msg = (
            f"{name} must be a dense (strided) tensor; found a {found} tensor; "
            "pad or densify it, or use flashmoe.scaled_dot_product_attention, which hands it to torch"
        )
        raise ArgumentError(msg)
    if has_names(tensor):
        msg = f"{name} has named dimensions {tensor.names}; no operator here knows names; drop them with .rename(None)"
        raise ArgumentError(msg)
    if tensor._is_zerotensor():
        msg = f"{name} is a zero tensor without memory, as forward-mode differentiation makes them; give it some with .clone()"
        raise ArgumentError(msg)


def check_scalars(scale: Any, causal: Any, return_lse: Any = False) -> None:
    """The rules for ``scale`` (None stands for the default) and the flags."""
    if isinstance(scale, Tensor):
        msg = (
            f"scale must be a number or None; found a {type(scale).__name__}; use float(scale), or multiply q by it where its "
            "gradient is wanted"
        )
        raise ArgumentTypeError(msg)
    if not (scale is None or is_number(scale)):
        msg = f"scale must be a number or None; found {type(scale).__name__}; use float(scale)"
        raise ArgumentTypeError(msg)
    if not (scale is None or is_finite_number(scale)):
        found = str(scale) if len(str(scale)) < 40 else f"{str(scale)[:20]}... ({len(str(scale))} characters)"
        infinite = broken("attention.scale", scale=found)
        raise infinite
    check_flag("causal", causal, "; a mask is attn_mask" if isinstance(causal, Tensor) else "")
    check_flag("return_lse", return_lse)


def is_finite_number(value: Any) -> bool:
    """Whether ``value`` is a number (no tensor) that the kernels can hold; a symbolic one is taken to be."""
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return True
    return is_number(value) and -MAX_SCALE <= value <= MAX_SCALE  # false for NaN; right for integers of any size


def explain(error: BaseException, q: Any, k: Any, v: Any, scale: Any, causal: Any) -> BaseException:
    """Why a call with these arguments failed: our typed error where a rule was broken, else ``error`` itself.

    ``scale`` None stands for the default. Out of memory and other errors of torch come back unchanged.
    """
    try:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_is_dense_tensor(name, tensor)
        check_scalars(scale, causal)
    except FlashmoeError as wrong_type:
        return wrong_type
    return explain_values(error, "_flash_attention_inference", (q, k, v, scale, causal))
