"""Checks of the types of attention's arguments, which C++ cannot see; rules.py has the rules for values.

An eager call with arguments of the usual types runs none of this: explain_dense and the like find the reason after a failure.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashmoe.attn.options import Varlen
from flashmoe.checks import check_flag, has_names, is_number
from flashmoe.errors import ArgumentError, ArgumentTypeError, DtypeError, FlashmoeError
from flashmoe.rules import broken, explain

MAX_HEAD_DIM = 512
MAX_GPU_OPTIONS_HEAD_DIM = 256  # limit of the GPU's kernels for gradients, dropout, ALiBi and 8-bit floats
MAX_SCALE = 3.4028234663852886e38 / 1.4426950408889634  # the kernels hold scale * log2(e) in float32
MAX_LENGTH = 2**30 - 1  # the kernels add windows and lengths in 32 bits
LAYOUT = "[batch, heads, length, head_dim]"
RAGGED = "[tokens, heads, head_dim]"
PAGES = "[pages, page_size, heads, head_dim]"
# A plain dict: torch.compile cannot trace a mapping proxy once the code that it compiles has modified any dict.
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
            "pad or densify it, or use flashmoe.scaled_dot_product_attention, which falls back to torch"
        )
        raise ArgumentError(msg)
    if tensor.is_quantized:
        msg = f"{name} is a quantised tensor ({tensor.dtype}), which no kernel supports; pass {name}.dequantize()"
        raise DtypeError(msg)
    if has_names(tensor):
        msg = f"{name} has named dimensions {tensor.names}; named tensors are not supported; drop the names with .rename(None)"
        raise ArgumentError(msg)
    if tensor._is_zerotensor():
        msg = f"{name} is a zero tensor without memory, as forward-mode differentiation creates; materialise it with .clone()"
        raise ArgumentError(msg)


def check_scalars(scale: Any, causal: Any, return_lse: Any = False, consistent: Any = False) -> None:
    """The rules for ``scale`` (None: the default) and the flags."""
    if isinstance(scale, Tensor):
        msg = f"scale must be a number or None; found a {type(scale).__name__}; use float(scale), or multiply q by it if its gradient is needed"
        raise ArgumentTypeError(msg)
    if not (scale is None or is_number(scale)):
        msg = f"scale must be a number or None; found {type(scale).__name__}; use float(scale)"
        raise ArgumentTypeError(msg)
    if not (scale is None or is_finite_number(scale)):
        found = str(scale) if len(str(scale)) < 40 else f"{str(scale)[:20]}... ({len(str(scale))} characters)"
        infinite = broken("attention.scale", scale=found)
        raise infinite
    check_flag("causal", causal, "; pass a mask as attn_mask" if isinstance(causal, Tensor) else "")
    check_flag("return_lse", return_lse)
    check_flag("consistent", consistent)


def is_finite_number(value: Any) -> bool:
    """Whether ``value`` is a number (not a tensor) that the kernels can hold; a symbolic number counts as one."""
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return True
    return is_number(value) and -MAX_SCALE <= value <= MAX_SCALE  # false for NaN; right for integers of any size


def check_numbers(
    max_seqlen_q: Any, max_seqlen_k: Any, window_left: Any, window_right: Any, softcap: Any, num_splits: Any
) -> None:
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        _check_integer(name, value, "the longest sequence's length")
    for value in (window_left, window_right):
        _check_integer("each side of window", value, "a number of keys, or -1 for no limit")
    _check_integer("num_splits", num_splits, "0 lets the kernels choose")
    if not is_number(softcap):
        msg = f"softcap must be a number; found {type(softcap).__name__}; use float(softcap), or 0.0 for none"
        raise ArgumentTypeError(msg)


def _check_integer(name: str, value: Any, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):  # other integer types: see as_integer
        msg = f"{name} must be an int ({meaning}); found {type(value).__name__}; use int(...)"
        raise ArgumentTypeError(msg)


def as_integer(value: Any) -> Any:
    """An integer of another type, such as NumPy's, as an int; anything else unchanged, for the check."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, (bool, torch.SymInt)) else value


def check_optional_tensor(name: str, tensor: Any) -> None:
    if tensor is None:
        return
    if not isinstance(tensor, Tensor):
        msg = f"{name} must be a tensor or None; found {type(tensor).__name__}; convert it with torch.as_tensor"
        raise ArgumentTypeError(msg)
    check_is_dense_tensor(name, tensor)


def explain_dense(error: BaseException, q: Any, k: Any, v: Any, scale: Any, causal: Any) -> BaseException:
    """Why a call with these arguments failed: flashmoe's typed error if a rule was broken, else ``error`` itself.

    ``scale`` None is the default. Out of memory and other errors of torch are returned unchanged.
    """
    try:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_is_dense_tensor(name, tensor)
        check_scalars(scale, causal)
    except FlashmoeError as wrong_type:
        return wrong_type
    return explain(error, "_flash_attention_inference", (q, k, v, scale, causal))


def explain_varlen(
    error: BaseException, given: Varlen, call: tuple[str, tuple[Any, ...]] | None = None
) -> BaseException:
    """Like explain_dense, for ``attention_varlen_forward`` or for another operator and its arguments (``call``)."""
    keys = RAGGED if given.cu_seqlens_k is not None else PAGES if given.block_table is not None else LAYOUT
    try:
        check_is_dense_tensor("q", given.q, LAYOUT if given.cu_seqlens_q is None else RAGGED)
        check_is_dense_tensor("k", given.k, keys)
        check_is_dense_tensor("v", given.v, keys)
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "sinks"):
            check_optional_tensor(name, getattr(given, name))
        check_optional_tensor("attn_mask", given.mask)
        check_scalars(given.scale, causal=False)
        check_numbers(*given[9:11], *given[12:])
    except FlashmoeError as wrong_type:
        return wrong_type
    return explain(error, *(call or ("attention_varlen_forward", given)))


def explain_append(
    error: BaseException, k_cache: Any, v_cache: Any, k_new: Any, v_new: Any, cache_seqlens: Any, block_table: Any
) -> BaseException:
    """Like explain_dense, for ``attention_append_``."""
    layout = LAYOUT if block_table is None else PAGES
    try:
        check_is_dense_tensor("k_cache", k_cache, layout)
        check_is_dense_tensor("v_cache", v_cache, layout)
        check_is_dense_tensor("k_new", k_new)
        check_is_dense_tensor("v_new", v_new)
        check_optional_tensor("block_table", block_table)
    except FlashmoeError as wrong_type:
        return wrong_type
    return explain(error, "attention_append_", (k_cache, v_cache, k_new, v_new, cache_seqlens, block_table))
