"""Attention over caches, dense or in pages, and appending new keys to them.

Importing this module imports torch and loads the compiled extension.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.compiler import is_compiling

from flashmoe import keywords
from flashmoe.attn import arguments, e4m3, out_variant
from flashmoe.attn.operators import NO_TRANSFORM_APPENDS
from flashmoe.attn.options import Varlen, Window
from flashmoe.attn.varlen import OPTIONS, attend, check_lengths
from flashmoe.checks import has_fx_proxies, trace_call
from flashmoe.errors import ArgumentError, DifferentiationError, FlashmoeError
from flashmoe.rules import explain
from flashmoe.transforms import has_tangent

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

    from flashmoe.attn.options import VarlenOptions

_append = torch.ops.flashmoe.attention_append_.default
_accepted: set[tuple[Any, ...] | None] = set()  # layouts and numbers of calls that passed every check
_MOST_ACCEPTED = 1024
_ARGUMENTS = ("q", "k_cache", "v_cache", "k_new", "v_new", "cache_seqlens", "block_table", *OPTIONS)


@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor | None = ...,
    v_new: Tensor | None = ...,
    *,
    cache_seqlens: Tensor,
    return_lse: Literal[False] = ...,
    out: Tensor | None = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor | None = ...,
    v_new: Tensor | None = ...,
    *,
    cache_seqlens: Tensor,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor | None = ...,
    v_new: Tensor | None = ...,
    *,
    cache_seqlens: Tensor,
    return_lse: bool,
    out: Tensor | None = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    *misplaced: NoReturn,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    consistent: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    **misspelt: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append new keys and values to a cache, in place, and attend to everything it then holds. For inference: no gradients.

    Args:
        q: [B, Hq, Sq, D], float16 or bfloat16 (on the CPU also float32); Sq is 1 when decoding.
        k_cache, v_cache: [B, Hkv, Smax, D] and [B, Hkv, Smax, Dv], or pages [P, page_size, Hkv, D] with block_table; any strides
            with a contiguous last dimension. In q's dtype, or float8_e4m3fn with a 16-bit q.
        k_new, v_new: [B, Hkv, Snew, D] and [B, Hkv, Snew, Dv], written after the first cache_seqlens[b] keys of sequence b; None
            to append nothing. They must not overlap the caches in memory, and two sequences must not append to the same page. Values
            appended to a float8_e4m3fn cache are divided by its scale in float32 and rounded to nearest even; beyond 448 they become
            448, and NaN stays NaN.
        cache_seqlens: [B] int32 on q's device, the number of keys in each cache before the call. Not modified.
        block_table: [B, pages] int32, the pages of each sequence: key j is row j % page_size of page block_table[b, j // page_size].
        causal, window, softcap, sinks, alibi_slopes, scale, num_splits, k_scale, v_scale, consistent: as in :func:`attention_varlen`; the
            last query is at the last key.
        return_lse: also return the log-sum-exp of the scores, including the sink.
        out: [B, Hq, Sq, Dv] in q's dtype to write the result to, which is then returned; its dimensions may have any order in memory,
            with head_dim last and no gaps. Not with return_lse.

    Returns:
        out [B, Hq, Sq, Dv]; with ``return_lse`` also lse [B, Hq, Sq] in float32. Keys past the lengths are not read.
        If the arguments' types, sizes or numbers are rejected, the caches are unchanged.

    Raises:
        ShapeError, DtypeError, DeviceError, UnsupportedGpuError, DriverError: as in :func:`attention_varlen`.
        ArgumentError: as there, and for a cache without room if lengths are checked; otherwise keys without room are dropped.
        DifferentiationError: a gradient was requested; call it under torch.no_grad().
    """
    if misplaced:
        keywords.raise_extra_positional("attention_with_kvcache", misplaced, _ARGUMENTS[5:], 5)
    if misspelt:
        keywords.raise_unknown("attention_with_kvcache", misspelt, _ARGUMENTS)
    tensors = (q, k_cache, v_cache, k_new, v_new, sinks)
    given = tuple(tensor for tensor in tensors if isinstance(tensor, Tensor))
    if (is_grad_enabled() and any(tensor.requires_grad for tensor in given)) or has_tangent(*given):
        msg = "attention_with_kvcache has no gradient; call it under torch.no_grad(), or use attention_varlen for training"
        raise DifferentiationError(msg)
    if not isinstance(q, Tensor) or not isinstance(cache_seqlens, Tensor):  # type: ignore[redundant-expr]
        if has_fx_proxies(q, cache_seqlens):
            named = {name: value for name, value in locals().items() if name in _ARGUMENTS}
            traced: Tensor = trace_call(attention_with_kvcache, **named)
            return traced
        check_lengths("cache_seqlens", cache_seqlens, "batch")
    if (k_new is None) != (v_new is None):
        msg = "k_new and v_new belong together; one of them is None"
        raise ArgumentError(msg)
    used = cache_seqlens
    append: Callable[[Varlen], None] | None = None
    try:
        if k_new is not None and v_new is not None:
            given_cache: tuple[Any, ...] = (k_cache, v_cache, k_new, v_new, cache_seqlens, block_table)
            append = partial(_append_last, given_cache, k_scale, v_scale, out)
            new, lengths = given_cache[2], given_cache[4]
            if not (isinstance(new, Tensor) and new.dim() > 2 and isinstance(lengths, Tensor)):
                check_append(given_cache, k_scale, v_scale)
            used = cache_seqlens + k_new.shape[2]
        return attend(
            q,
            k_cache,
            v_cache,
            seqused_k=used,
            block_table=block_table,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            max_seqlen_k=0 if block_table is None else _room(k_cache, block_table),
            causal=causal,
            scale=scale,
            window=window,
            softcap=softcap,
            num_splits=num_splits,
            k_scale=k_scale,
            v_scale=v_scale,
            consistent=consistent,
            return_lse=return_lse,
            out=out,
            append=append,
        )
    except FlashmoeError as error:
        if is_compiling() or _by_our_name(error) is error:
            raise
        raise _by_our_name(error) from error


def _append_last(
    cache: tuple[Any, ...], k_scale: e4m3.Scale, v_scale: e4m3.Scale, out: Tensor | None, given: Varlen
) -> None:
    """``cache``: the arguments of append_checked; it is unchanged if the attention that follows would be rejected."""
    try:
        check_before(given, k_scale, v_scale, out)
    except FlashmoeError:
        # An error that both checks find is reported for the caller's own arguments
        check_append(cache, k_scale, v_scale)
        raise
    if e4m3.is_fp8(cache[0]):
        e4m3.append(cache, k_scale, v_scale)
    else:
        append_checked(*cache)


def check_append(cache: tuple[Any, ...], k_scale: e4m3.Scale, v_scale: e4m3.Scale) -> None:
    """Raise the error that the append would raise."""
    nothing = ArgumentError("")
    if e4m3.is_fp8(cache[0]):
        every = (*cache, *e4m3.scale_arguments(k_scale, v_scale))
        cause = explain(nothing, "attention_append_e4m3_", every)
    else:
        e4m3.check_unscaled(k_scale, v_scale, cache[0])
        cause = arguments.explain_append(nothing, *cache)
    if cause is not nothing:
        raise _by_our_name(cause) if isinstance(cause, FlashmoeError) else cause


def check_before(given: Varlen, k_scale: e4m3.Scale = None, v_scale: e4m3.Scale = None, out: Any = None) -> None:
    """Raise the error that attention with these arguments would raise, for a caller that writes to its caches first."""
    q: Any = given.q
    is_subclass = isinstance(q, Tensor) and type(q) is not Tensor
    if is_compiling() or transforms_are_active() or is_subclass:
        return  # compiled code is fully checked before it runs; no transform follows an append; subclasses have their own rules
    layouts = _layouts(given, (k_scale, v_scale, out))
    if layouts in _accepted:  # the checks in C++ take as long as a small call
        return
    name, operands = out_variant.call_of(given, k_scale, v_scale, out)
    nothing = ArgumentError("")
    cause = arguments.explain_varlen(nothing, given, (name, operands))
    if cause is not nothing:
        raise cause
    if layouts is not None:
        if len(_accepted) >= _MOST_ACCEPTED:
            _accepted.clear()
        _accepted.add(layouts)


def _layouts(given: Varlen, others: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Everything that decides whether a call is rejected, given that its append is not; None if an argument has a type that no call accepts."""
    q, k, v, _, _, lengths, table, sinks, mask = given[:9]
    numbers: list[Any] = list(given[9:])
    try:
        found = (q.shape, q.stride(), q.dtype, q.device, k.shape, k.dtype, k.device, v.shape, v.dtype)
        for tensor in (lengths, table, sinks, mask, *others):
            if tensor is None:
                numbers.append(None)
            elif isinstance(tensor, Tensor):
                numbers += tensor.shape, tensor.stride(), tensor.dtype, tensor.device
            else:
                numbers.append(float(tensor))
    except (AttributeError, TypeError, ValueError):
        return None
    return *found, *numbers


def _by_our_name(error: FlashmoeError) -> FlashmoeError:
    """Renames arguments in the message: the operators call the lengths seqused_k, and the caches k and v."""
    text = str(error)
    ours = re.sub("^([kv]) must", r"\1_cache must", text).replace("seqused_k", "cache_seqlens")
    return error if ours == text else type(error)(ours)


def _room(pages: Tensor, block_table: Tensor) -> int:
    """The number of keys that a sequence's pages hold; 0 for tensors that the operator rejects."""
    try:
        return min(block_table.shape[1] * pages.shape[1], arguments.MAX_LENGTH)
    except (AttributeError, IndexError):
        return 0


def append_checked(*given: Any) -> None:
    """k_cache, v_cache, k_new, v_new, cache_seqlens, block_table."""
    try:
        _append(*given)
    except Exception as error:
        cause = arguments.explain_append(error, *given)
        if cause is error and transforms_are_active() and not isinstance(error, FlashmoeError):
            cause = ArgumentError(NO_TRANSFORM_APPENDS)
        if isinstance(cause, FlashmoeError):
            cause = _by_our_name(cause)
        if cause is error:
            raise
        raise cause from error
