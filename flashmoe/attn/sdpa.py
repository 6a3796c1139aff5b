"""torch's scaled_dot_product_attention on flashmoe's operators. sdpa_dispatch.py decides which calls run on them.

Importing this module imports torch and loads the compiled extension.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from flashmoe import _extension, fallback, keywords
from flashmoe.attn import autograd, sdpa_dispatch
from flashmoe.attn.api import attention, needs_only_output
from flashmoe.attn.arguments import MAX_GPU_OPTIONS_HEAD_DIM
from flashmoe.attn.fake import matches_sdpa
from flashmoe.checks import has_fx_proxies, trace_call

_extension.load()
_drop_in_operator = torch.ops.flashmoe._flash_attention_drop_in.default._op  # as in api.py


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **misspelt: NoReturn,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with the same signature, meaning and errors.

    query [..., Hq, Sq, D], key and value [..., H, Sk, D]; ``is_causal`` is aligned top-left (key j is visible to query i
    when j <= i), unlike :func:`attention`.

    float16 and bfloat16 (on the CPU also float32) with 1 <= D <= 512 run on flashmoe, in any layout and with
    any batch sizes that torch accepts, with a bool mask or one of the query's dtype; everything else goes to torch, which computes it
    or raises its own error (docs/api.md has the full table). Dropout takes seed and offset from the device's default generator, but
    drops other elements for them than torch does (:func:`attention`).

    ``flashmoe.explain`` (same arguments) says which path a call takes and why. The environment variable FLASHMOE_FALLBACK
    is ``allow`` (default), ``warn`` or ``error``: what happens when a call goes to torch. ``sdpa_kernel`` chooses among torch's
    own backends and does not affect flashmoe.

    Raises the errors of :func:`attention` when flashmoe runs and torch's when torch runs; and ShapeError if key and value
    differ in length, which torch's fused CPU kernel does not check: it reads past the end of the shorter one.
    """
    if misspelt:
        keywords.raise_unknown("scaled_dot_product_attention", misspelt, sdpa_dispatch.ARGUMENTS)
    if attn_mask is None and dropout_p == 0.0 and not is_compiling():
        out = _plain_call(query, key, value, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    unsupported_reason = sdpa_dispatch.find_unsupported(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )
    if unsupported_reason is not None:
        if has_fx_proxies(query, key, value):
            arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            traced: Tensor = trace_call(scaled_dot_product_attention, *arguments)
            return traced
        sdpa_dispatch.check_equal_lengths(key, value)
        if sdpa_dispatch.jagged_route is None or not sdpa_dispatch.are_jagged(
            query, key, value
        ):  # for jagged tensors torch reports its own choice
            fallback.note_fallback(unsupported_reason)
        if sdpa_dispatch.has_no_heads(query, key, value):  # with zero heads torch's fused CPU kernel divides by zero
            empty = torch._scaled_dot_product_attention_math
            return empty(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
        try:
            return torch_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        except RuntimeError as error:
            # torch's message for mismatched heads; other errors have other causes.
            is_size = type(error) is RuntimeError and "must match the size of tensor" in str(error)
            if is_size and not enable_gqa and sdpa_dispatch.would_form_groups(query, key):
                msg = f"{error} (query has {query.shape[-3]} heads and key {key.shape[-3]}: pass enable_gqa=True)"
                raise RuntimeError(msg) from error
            raise
    if query.dim() == key.dim() == value.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]:
        return _top_left(query, key, value, is_causal, scale, attn_mask, dropout_p)
    q, k, v, mask, batch_shape = _as_four_dimensions(query, key, value, attn_mask, enable_gqa)
    return _top_left(q, k, v, is_causal, scale, mask, dropout_p).reshape(*batch_shape, query.shape[-2], value.shape[-1])


def _plain_call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, enable_gqa: bool) -> Tensor | None:
    """The common case at the cost of one operator call: four dimensions, equal batches and heads, a square causal mask.

    None in any other case, or if the operator rejected the call: then the caller finds out which it is.
    """
    if not (type(causal) is type(enable_gqa) is bool and (scale is None or type(scale) is float)):  # type: ignore[redundant-expr]
        return None
    try:
        if needs_only_output(q, k, v):
            only: Tensor | None = _drop_in_operator(q, k, v, scale, causal, enable_gqa)
            return only
        if not matches_sdpa(q.shape, k.shape, causal, enable_gqa) or q.shape[-1] > MAX_GPU_OPTIONS_HEAD_DIM:
            return None
        return autograd.dense_forward(q, k, v, scale, causal)[0]
    except (AttributeError, ValueError, TypeError, ZeroDivisionError, RuntimeError):
        return None


def _top_left(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, mask: Tensor | None, dropout_p: float
) -> Tensor:
    """Attention with SDPA's top-left causal mask, by calls with the bottom-right mask, which is the same if Sq == Sk."""
    q, k, v = _last_contiguous(q), _last_contiguous(k), _last_contiguous(v)
    attend = partial(attention, scale=scale, dropout_p=float(dropout_p))
    if mask is not None:
        return attend(q, k, v, attn_mask=mask)
    seq_q, seq_k = q.shape[2], k.shape[2]
    if not causal or seq_q == seq_k:
        return attend(q, k, v, causal=causal)
    if seq_q < seq_k:
        return attend(q, k[:, :, :seq_q], v[:, :, :seq_q], causal=True)
    square = attend(q[:, :, :seq_k], k, v, causal=True)
    rest = attend(q[:, :, seq_k:], k, v)  # rows i >= Sk see every key
    return torch.cat((square, rest), dim=2)


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _as_four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, torch.Size]:
    """Broadcast the batch dimensions and merge them into one; also returns the batch shape of the result.

    Heads are broadcast too unless they are grouped; a single key head for many query heads needs no copy (multi-query).
    """
    q_lead, k_lead, v_lead = (_lead(tensor) for tensor in (query, key, value))
    batch = torch.broadcast_shapes(q_lead[:-1], k_lead[:-1], v_lead[:-1])
    heads_q, heads_k, heads_v = q_lead[-1], k_lead[-1], v_lead[-1]
    if not enable_gqa:
        heads_q = torch.broadcast_shapes((heads_q,), (heads_k,), (heads_v,))[0]
        shared = heads_k == 1 and heads_v == 1
        heads_k = heads_v = 1 if shared else heads_q
    q = _merge(query, batch, heads_q)
    k, v = _merge(key, batch, heads_k), _merge(value, batch, heads_v)
    result = torch.Size((*batch, heads_q))
    rank = max(query.dim(), key.dim(), value.dim())
    # A mask with fewer dimensions broadcasts as it is, and so does one that needs no merging; expanded, its gradient would be as large as the scores.
    if mask is not None and mask.dim() > 3 and not (mask.dim() == 4 and len(batch) == 1):
        mask = _merge(mask, batch, heads_q)
    return q, k, v, mask, result[len(result) - (rank - 2) :]


def _lead(tensor: Tensor) -> torch.Size:
    """The sizes before [length, head_dim], with one head if there is no head dimension."""
    return tensor.shape[:-2] if tensor.dim() > 2 else torch.Size((1,))


def _merge(tensor: Tensor, batch: torch.Size, heads: int) -> Tensor:
    """[..., H, S, D] to [prod(batch), heads, S, D]."""
    expanded = tensor.expand(*batch, heads, *tensor.shape[-2:])
    return expanded.unsqueeze(0) if len(batch) == 0 else expanded.flatten(0, -4)
