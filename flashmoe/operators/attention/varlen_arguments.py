"""The types of the arguments of ragged, paged and banded attention, which C++ cannot see."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from flashmoe.checks import is_number
from flashmoe.errors import ArgumentTypeError, FlashmoeError
from flashmoe.operators.attention import arguments as dense
from flashmoe.rules import explain as explain_values

MAX_LENGTH = 2**30 - 1  # the kernels add windows and lengths in 32 bits
RAGGED = "[tokens, heads, head_dim]"
PAGES = "[pages, page_size, heads, head_dim]"
_OPTIONAL = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "sinks", "attn_mask")


def check_numbers(
    max_seqlen_q: Any, max_seqlen_k: Any, window_left: Any, window_right: Any, softcap: Any, num_splits: Any
) -> None:
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        _check_integer(name, value, "the longest sequence's length, known to the host")
    for value in (window_left, window_right):
        _check_integer("each side of window", value, "a number of keys, or -1 for no limit")
    _check_integer("num_splits", num_splits, "0 lets the kernels choose")
    if not is_number(softcap):
        msg = f"softcap must be a number; found {type(softcap).__name__}; use float(softcap), or 0.0 for none"
        raise ArgumentTypeError(msg)


def _check_integer(name: str, value: Any, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):  # see as_integer
        msg = f"{name} must be an int ({meaning}); found {type(value).__name__}; use int(...)"
        raise ArgumentTypeError(msg)


def as_integer(value: Any) -> Any:
    """An integer of another type, such as NumPy's, as an int; anything else as it is, for the check."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, (bool, torch.SymInt)) else value


def explain(error: BaseException, arguments: tuple[Any, ...]) -> BaseException:
    """Why a call of ``attention_varlen_forward`` failed: our typed error where a rule was broken, else ``error`` itself."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, _, block_table = arguments[:7]
    keys = RAGGED if cu_seqlens_k is not None else PAGES if block_table is not None else dense.LAYOUT
    try:
        dense.check_is_dense_tensor("q", q, dense.LAYOUT if cu_seqlens_q is None else RAGGED)
        dense.check_is_dense_tensor("k", k, keys)
        dense.check_is_dense_tensor("v", v, keys)
        for name, tensor in zip(_OPTIONAL, arguments[3:9], strict=True):
            check_optional_tensor(name, tensor)
        dense.check_scalars(arguments[11], causal=False)
        check_numbers(*arguments[9:11], *arguments[12:16])
    except FlashmoeError as wrong_type:
        return wrong_type
    return explain_values(error, "attention_varlen_forward", arguments)


def check_optional_tensor(name: str, tensor: Any) -> None:
    if tensor is None:
        return
    if not isinstance(tensor, Tensor):
        msg = f"{name} must be a tensor or None; found {type(tensor).__name__}; convert it with torch.as_tensor"
        raise ArgumentTypeError(msg)
    dense.check_is_dense_tensor(name, tensor)


def explain_append(error: BaseException, arguments: tuple[Any, ...]) -> BaseException:
    """Why a call of ``attention_append_`` failed, likewise."""
    k_cache, v_cache, k_new, v_new, _, block_table = arguments
    layout = dense.LAYOUT if block_table is None else PAGES
    try:
        dense.check_is_dense_tensor("k_cache", k_cache, layout)
        dense.check_is_dense_tensor("v_cache", v_cache, layout)
        dense.check_is_dense_tensor("k_new", k_new)
        dense.check_is_dense_tensor("v_new", v_new)
        check_optional_tensor("block_table", block_table)
    except FlashmoeError as wrong_type:
        return wrong_type
    return explain_values(error, "attention_append_", arguments)
