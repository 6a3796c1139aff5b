"""Attention over a cache of latents. Importing this module imports torch and loads the compiled extension."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from flashmoe import _extension
from flashmoe.checks import check_flag, check_size, has_fx_proxies, is_number, trace_call
from flashmoe.errors import ArgumentTypeError, DifferentiationError
from flashmoe.mla.codes import LATENT_DIM
from flashmoe.rules import broken, explain
from flashmoe.transforms import has_tangent

_extension.load()
_decode = torch.ops.flashmoe.mla_decode.default
VALUE_DIM = LATENT_DIM
_OPTIONAL = ("cache_seqlens", "block_table", "sinks", "indices")


@overload
def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = ...,
    scale: float,
    block_table: Tensor | None = ...,
    indices: Tensor | None = ...,
    causal: bool = ...,
    value_dim: int = ...,
    sinks: Tensor | None = ...,
    num_splits: int = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = ...,
    scale: float,
    block_table: Tensor | None = ...,
    indices: Tensor | None = ...,
    causal: bool = ...,
    value_dim: int = ...,
    sinks: Tensor | None = ...,
    num_splits: int = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    scale: float,
    block_table: Tensor | None = None,
    indices: Tensor | None = None,
    causal: bool = True,
    value_dim: int = VALUE_DIM,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of absorbed queries over a cache of latents, as DeepSeek-V2 and its successors decode. For inference: no gradients.

    A key is 576 values, the latent (512) and its rotary part (64); its value is the latent. All heads share it.

    Args:
        q: [B, Sq, H, 576], float16 or bfloat16 (on the CPU also float32): the query projected into the latent space, and its rotary part;
            1 to 128 heads, one token or several.
        kv_cache: [P, page_size, 576] with block_table, page_size a multiple of 16; or [B, Smax, 576]. In q's dtype; or [..., 656] in uint8
            or float8_e4m3fn, a cache of 8-bit floats as :func:`mla_append` writes it, whose rotary values have q's dtype: the result equals
            that with a 16-bit cache of its codes times their scales, rounded to q's dtype.
        cache_seqlens: [B] int32 on q's device, the number of keys of each sequence, including those of q's tokens.
            Required without indices.
        scale: multiplies the scores: for a model with query dim 192, 192 ** -0.5 (times YaRN's factor), not 576 ** -0.5.
        block_table: [B, pages] int32: key j is row j % page_size of page block_table[b, j // page_size].
        indices: [B, Sq, topk] int32, the keys of each token, in place of cache_seqlens, block_table and causal: row i % page_size of page
            i // page_size of kv_cache [P, page_size, ...], with any page size; -1, anywhere, is skipped; a key listed twice counts twice.
        causal: token t of Sq sees the keys before cache_seqlens - (Sq - 1 - t); False: all of them.
        value_dim: must be 512.
        sinks: [H] float32, one extra term exp(sink) in each row's softmax sum.
        num_splits: the maximum number of splits of a sequence's keys. 0: chosen by the kernel, depending on the batch; 1: no split,
            and a row's result has the same bits in any batch.
        return_lse: also return the log-sum-exp of the scores, including the sink.

    Returns:
        out [B, Sq, H, 512], to be multiplied by each head's value projection; with ``return_lse`` also lse [B, H, Sq] in float32. A row
        without keys has out 0 and lse -inf. Memory past the lengths is ignored.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError, ArgumentTypeError: the message says what was found, what is supported, what to do.
            Lengths, pages and indices are checked only on the CPU; on a GPU lengths are clamped to the memory and pages to the cache, and
            indices past the cache are skipped.
        DifferentiationError: a gradient was requested.
        UnsupportedGpuError: compute capability below 8.0.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C (absorbed form).
    """
    if has_fx_proxies(q, kv_cache, cache_seqlens, indices):
        named = {name: value for name, value in locals().items() if name not in ("q", "kv_cache")}
        traced: Tensor = trace_call(mla_decode, q, kv_cache, **named)
        return traced
    optional = {"cache_seqlens": cache_seqlens, "block_table": block_table, "sinks": sinks, "indices": indices}
    tensors = {"q": q, "kv_cache": kv_cache, **optional}
    _check_types(tensors)
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    wanted: Any = value_dim
    if isinstance(wanted, Tensor) or wanted != VALUE_DIM:
        rule = "mla.value_dim"
        raise broken(rule, found=value_dim)
    given = (q, kv_cache, *(() if sinks is None else (sinks,)))
    if (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)) or has_tangent(*given):
        msg = "mla_decode has no gradient; call it under torch.no_grad(), or train with the unabsorbed form and flashmoe.attention"
        raise DifferentiationError(msg)
    arguments = (q, kv_cache, cache_seqlens, block_table, sinks, scale, causal, num_splits, indices)
    try:
        out, lse = _decode(*arguments)
    except Exception as error:
        if not is_number(scale):
            msg = f"scale must be a number; found {type(scale).__name__}; use float(scale)"
            raise ArgumentTypeError(msg) from error
        check_size("num_splits", num_splits, 0)
        cause = explain(error, "mla_decode", arguments)
        if cause is error:
            raise
        raise cause from error
    return (out, lse) if return_lse else out


def _check_types(tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) or (tensor is None and name in _OPTIONAL):
            continue
        msg = f"{name} must be a torch.Tensor; found {type(tensor).__name__}"
        raise ArgumentTypeError(msg)
