"""The rules for the arguments of ragged, paged and banded attention, stated once in Python.

The compiled operators check every call themselves. These rules serve calls on fake tensors, and the messages of calls that
failed. What only device memory could tell (lengths, pages) is not looked at here.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from flashmoe.checks import is_number, shape_of, translate
from flashmoe.errors import ArgumentError, ArgumentTypeError, DeviceError, DtypeError, FlashmoeError, ShapeError
from flashmoe.operators.attention import arguments as dense
from flashmoe.operators.attention.arguments import MAX_HEAD_DIM

MAX_LENGTH = 2**30 - 1  # the kernels add windows and lengths in 32 bits
MAX_SPLITS = 32
MAX_SOFTCAP = 4096.0  # kernels know tanh to within 7e-7, which the softcap multiplies
RAGGED = "[tokens, heads, head_dim]"
PAGES = "[pages, page_size, heads, head_dim]"
# Optional tensors that go with q: dtype, dimensions.
COMPANIONS = {
    "cu_seqlens_q": (torch.int32, 1),
    "cu_seqlens_k": (torch.int32, 1),
    "seqused_k": (torch.int32, 1),
    "block_table": (torch.int32, 2),
    "sinks": (torch.float32, 1),
}


def validate(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    seqused_k: Any,
    block_table: Any,
    sinks: Any,
    mask: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    scale: Any,
    window_left: Any,
    window_right: Any,
    softcap: Any,
    num_splits: Any,
) -> None:
    """Raise the typed error that says what is wrong, or return when ``attention_varlen_forward`` takes these arguments."""
    key_layout = RAGGED if cu_seqlens_k is not None else PAGES if block_table is not None else dense.LAYOUT
    layouts = {"q": dense.LAYOUT if cu_seqlens_q is None else RAGGED, "k": key_layout, "v": key_layout}
    for (name, layout), tensor in zip(layouts.items(), (q, k, v), strict=True):
        dense.check_is_dense_tensor(name, tensor, layout)
    dense.check_devices(q, k, v)
    dense.check_dtypes(q, k, v)
    _check_layouts(layouts, (q, k, v), cu_seqlens_k, seqused_k, block_table)
    given = (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, sinks)
    for (name, (dtype, rank)), tensor in zip(COMPANIONS.items(), given, strict=True):
        if tensor is not None:
            _check_companion(name, tensor, q.device, dtype, rank)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    _check_counts(batch, q, k, cu_seqlens_k, seqused_k, block_table, sinks)
    _check_sizes(q, k, v, heads_kv=k.shape[2 if block_table is not None else 1])
    check_numbers(max_seqlen_q, max_seqlen_k, window_left, window_right, softcap, num_splits)
    dense.check_scalars(scale, causal=False)
    if mask is not None:
        rows = q.shape[2] if cu_seqlens_q is None else max_seqlen_q
        keys = k.shape[2] if cu_seqlens_k is None and block_table is None else max_seqlen_k
        check_mask(mask, q, (batch, q.shape[1], rows, keys))


def _check_layouts(layouts: dict[str, str], tensors: tuple[Tensor, ...], cu_seqlens_k: Any, *pages: Any) -> None:
    seqused_k, block_table = pages
    if block_table is not None and cu_seqlens_k is not None:
        msg = "cu_seqlens_k and block_table are both given; pages take seqused_k for the lengths, and cu_seqlens_k=None"
        raise ArgumentError(msg)
    if block_table is not None and seqused_k is None:
        msg = "block_table is given without seqused_k; give the number of keys of each sequence, int32 [sequences]"
        raise ArgumentError(msg)
    for (name, layout), tensor in zip(layouts.items(), tensors, strict=True):
        if tensor.dim() != layout.count(",") + 1:
            msg = f"{name} must be {layout}; found {shape_of(tensor)}; reshape it, or give the lengths that its layout needs"
            raise ShapeError(msg)
        if any(size > dense.MAX_SIZE for size in tensor.shape):
            msg = f"each size of {name} must be below 2^31; found {shape_of(tensor)}; split that dimension"
            raise ShapeError(msg)
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            msg = f"the last dimension of {name} must be contiguous; found strides {tuple(tensor.stride())}; call .contiguous()"
            raise ShapeError(msg)


def _check_companion(name: str, tensor: Any, device: torch.device, dtype: torch.dtype, rank: int) -> None:
    if not isinstance(tensor, Tensor):
        msg = f"{name} must be a tensor or None; found {type(tensor).__name__}; convert it with torch.tensor(..., dtype={dtype})"
        raise ArgumentTypeError(msg)
    if tensor.device != device:
        msg = f"{name} must be on q's device; found {tensor.device} and {device}; move it with .to(q.device)"
        raise DeviceError(msg)
    if tensor.dtype != dtype:
        msg = f"{name} must be {dtype}; found {tensor.dtype}; convert it with .to({dtype})"
        raise DtypeError(msg)
    dense.check_is_dense_tensor(name, tensor)
    if tensor.dim() != rank:
        msg = f"{name} must have {rank} dimension{'s' * (rank > 1)}; found {shape_of(tensor)}; reshape it"
        raise ShapeError(msg)
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        msg = f"the last dimension of {name} must be contiguous; found strides {tuple(tensor.stride())}; call .contiguous()"
        raise ShapeError(msg)


def _check_counts(
    batch: int, q: Tensor, k: Tensor, cu_seqlens_k: Any, seqused_k: Any, block_table: Any, sinks: Any
) -> None:
    counts = {
        "cu_seqlens_k": (cu_seqlens_k, batch + 1, "one more than there are sequences of q"),
        "seqused_k": (seqused_k, batch, "one for each sequence of q"),
        "block_table": (block_table, batch, "one row for each sequence of q"),
        "sinks": (sinks, q.shape[1], "one for each query head"),
    }
    if batch < 0:
        msg = "cu_seqlens_q is empty; it has one element more than there are sequences"
        raise ShapeError(msg)
    for name, (tensor, wanted, meaning) in counts.items():
        if tensor is not None and tensor.shape[0] != wanted:
            msg = f"{name} must have {wanted} elements, {meaning}; found {tensor.shape[0]}"
            raise ShapeError(msg)
    if block_table is not None and k.shape[1] < 1:
        msg = f"a page must hold at least one key; found k {shape_of(k)}"
        raise ShapeError(msg)
    if cu_seqlens_k is None and block_table is None and k.shape[0] != batch:
        msg = (
            f"q and k must share the batch size; found {batch} sequences of q and {k.shape[0]} in k; expand one of them"
        )
        raise ShapeError(msg)


def _check_sizes(q: Tensor, k: Tensor, v: Tensor, heads_kv: int) -> None:
    if k.shape[:-1] != v.shape[:-1]:
        msg = f"k and v may differ in head_dim alone; found k {shape_of(k)} and v {shape_of(v)}"
        raise ShapeError(msg)
    if q.shape[-1] != k.shape[-1]:
        msg = f"q and k must share head_dim; found {q.shape[-1]} in q and {k.shape[-1]} in k; check the projections"
        raise ShapeError(msg)
    for name, tensor in (("q", q), ("v", v)):
        if tensor.shape[-1] < 1 or tensor.shape[-1] > MAX_HEAD_DIM:
            msg = f"head_dim of {name} is {tensor.shape[-1]}; supported: 1 to {MAX_HEAD_DIM}; use more heads of a smaller size"
            raise ShapeError(msg)
    heads_q = q.shape[1]
    if (heads_q != 0) if heads_kv == 0 else (heads_q % heads_kv != 0):
        msg = (
            f"the number of query heads must be a multiple of the number of key heads; found {heads_q} and {heads_kv}; "
            "repeat or drop key heads so that it is"
        )
        raise ShapeError(msg)


def check_mask(mask: Any, q: Tensor, sizes: tuple[int, ...]) -> None:
    """``sizes``: [batch, query heads, queries, keys], which the mask has."""
    if not isinstance(mask, Tensor):
        msg = f"attn_mask must be a tensor or None; found {type(mask).__name__}; convert it with torch.as_tensor"
        raise ArgumentTypeError(msg)
    dense.check_is_dense_tensor("attn_mask", mask)
    if mask.device != q.device:
        msg = f"attn_mask must be on q's device; found {mask.device} and {q.device}; move it with .to(q.device)"
        raise DeviceError(msg)
    if mask.dtype not in (torch.bool, q.dtype):
        msg = f"attn_mask must be torch.bool or q's {q.dtype}; found {mask.dtype}; convert it with .to(q.dtype)"
        raise DtypeError(msg)
    if tuple(mask.shape) != tuple(sizes):
        raise ShapeError(wrong_mask(mask, sizes))


def wrong_mask(mask: Tensor, sizes: tuple[int, ...]) -> str:
    msg = f"attn_mask must broadcast to [batch, query heads, queries, keys] = {list(sizes)}; found {shape_of(mask)}"
    is_padding = tuple(mask.shape) == (sizes[0], sizes[3])
    return f"{msg}; " + ("of a padding mask [batch, keys] give mask[:, None, None]" if is_padding else "reshape it")


def check_numbers(
    max_seqlen_q: Any, max_seqlen_k: Any, window_left: Any, window_right: Any, softcap: Any, num_splits: Any
) -> None:
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        check_integer(name, value, 0, MAX_LENGTH, "the longest sequence's length, known to the host")
    for value in (window_left, window_right):
        check_integer("each side of window", value, -1, 2**62, "a number of keys, or -1 for no limit")
    check_integer("num_splits", num_splits, 0, MAX_SPLITS, "0 lets the kernels choose")
    if not is_number(softcap):
        msg = f"softcap must be a number; found {type(softcap).__name__}; use float(softcap), or 0.0 for none"
        raise ArgumentTypeError(msg)
    if not (dense.is_finite_number(softcap) and softcap >= 0):
        msg = f"softcap must be positive and finite in float32, or 0.0 for none; found {softcap}"
        raise ArgumentError(msg)
    if softcap > MAX_SOFTCAP:
        msg = f"softcap must be at most {MAX_SOFTCAP}: it multiplies the rounding of tanh; found {softcap}; use 0.0 for none"
        raise ArgumentError(msg)


def as_integer(value: Any) -> Any:
    """An integer of another type, such as NumPy's, as an int; anything else as it is, for the check."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, (bool, torch.SymInt)) else value


def check_integer(name: str, value: Any, least: int, most: int, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):  # see as_integer
        msg = f"{name} must be an int ({meaning}); found {type(value).__name__}; use int(...)"
        raise ArgumentTypeError(msg)
    if value < least or value > most:
        msg = f"{name} must be from {least} to {most} ({meaning}); found {value}"
        raise ArgumentError(msg)


def explain(error: BaseException, arguments: tuple[Any, ...]) -> BaseException:
    """Why a call with these arguments failed: our typed error where a rule was broken, else ``error`` itself."""
    if isinstance(error, torch.OutOfMemoryError):
        return error
    try:
        validate(*arguments)
    except FlashmoeError as broken_rule:
        return broken_rule
    coded = error if isinstance(error, FlashmoeError) else translate(error)
    return error if coded is None else coded


def validate_append(
    k_cache: Any, v_cache: Any, k_new: Any, v_new: Any, cache_seqlens: Any, block_table: Any = None
) -> None:
    """Raise the typed error that says what is wrong, or return when ``attention_append_`` takes these arguments."""
    layout = dense.LAYOUT if block_table is None else PAGES
    for name, tensor, wanted in (
        ("k_cache", k_cache, layout),
        ("v_cache", v_cache, layout),
        ("k_new", k_new, dense.LAYOUT),
        ("v_new", v_new, dense.LAYOUT),
    ):
        dense.check_is_dense_tensor(name, tensor, wanted)
        if tensor.dim() != 4:
            msg = f"{name} must be {wanted}; found {shape_of(tensor)}"
            raise ShapeError(msg)
        if tensor.dtype != k_cache.dtype or tensor.device != k_cache.device:
            msg = (
                f"{name} must have the dtype and device of k_cache; found {tensor.dtype} on {tensor.device} and {k_cache.dtype} "
                f"on {k_cache.device}; convert it with .to(k_cache)"
            )
            raise (DtypeError if tensor.dtype != k_cache.dtype else DeviceError)(msg)
    heads, batch = k_cache.shape[1 if block_table is None else 2], k_new.shape[0]
    if block_table is None and k_cache.shape[0] != batch:
        msg = f"k_new and k_cache must share the batch size; found {batch} and {k_cache.shape[0]}; give every sequence new keys"
        raise ShapeError(msg)
    if isinstance(cache_seqlens, Tensor) and tuple(cache_seqlens.shape) != (batch,):
        msg = f"cache_seqlens must be int32 [{batch}], one for each sequence of k_new; found {shape_of(cache_seqlens)}"
        raise ShapeError(msg)
    for name, new, cache in (("k_new", k_new, k_cache), ("v_new", v_new, v_cache)):
        if new.shape[1] != heads or new.shape[3] != cache.shape[3] or new.shape[:3] != k_new.shape[:3]:
            msg = (
                f"{name} must be [batch, heads, new keys, head_dim] of the cache's heads; found {shape_of(new)} for a cache of "
                f"{shape_of(cache)}"
            )
            raise ShapeError(msg)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        is_expanded = any(stride == 0 and size > 1 for size, stride in zip(cache.shape, cache.stride(), strict=True))
        if is_expanded and k_new.shape[2] > 0:
            found = f"{shape_of(cache)} with strides {tuple(cache.stride())}"
            msg = f"{name} is expanded, so that new keys would overwrite each other; found {found}; give it memory with .clone()"
            raise ShapeError(msg)
    given = (k_new, k_cache, v_cache, None, None, cache_seqlens, block_table, None, None)
    validate(*given, 0, 0, 1.0, -1, -1, 0.0, 0)
    if cache_seqlens is None or cache_seqlens.shape[0] != batch:
        msg = f"cache_seqlens must be int32 [{batch}], the keys that each sequence's cache holds"
        raise ShapeError(msg)
