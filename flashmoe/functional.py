"""Attention as functions: flashmoe's own interface, and torch's.

Importing this module imports torch and loads the compiled extension.
"""

from __future__ import annotations

from typing import Literal, NoReturn, overload

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from flashmoe import _extension, keywords, routing, varlen
from flashmoe.checks import has_fx_proxies, trace_call
from flashmoe.errors import DifferentiationError
from flashmoe.operators.attention import arguments, autograd
from flashmoe.operators.attention.drop_in import is_drop_in
from flashmoe.transforms import has_tangent

_ARGUMENTS = ("q", "k", "v", "causal", "scale", "return_lse", "window", "softcap", "sinks", "attn_mask")

_extension.load()
_operator = torch.ops.flashmoe.flash_attention_forward.default
# An OpOverload's __call__ only hands its arguments on to ``_op``, at a cost of 0.24 us; the compiler never sees these two.
_inference_operator = torch.ops.flashmoe._flash_attention_inference.default._op
_drop_in_operator = torch.ops.flashmoe._flash_attention_drop_in.default._op


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    window: tuple[int, int] | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    attn_mask: Tensor | None = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    window: tuple[int, int] | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    attn_mask: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    return_lse: bool,
    window: tuple[int, int] | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    attn_mask: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **misspelt: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v, never falling back to another implementation.

    Args:
        q: [B, Hq, Sq, D], float16 or bfloat16 (on the CPU also float32), 1 <= D <= 256, last dimension contiguous.
        k, v: [B, Hkv, Sk, D] and [B, Hkv, Sk, Dv] of the same dtype and device, 1 <= Dv <= 256. Hkv divides Hq: query head h
            reads key head h // (Hq // Hkv).
        causal: hide keys j > i + (Sk - Sq) from query i: the mask ends in the bottom-right corner, so that the last query
            sees every key. Where Sq > Sk the first Sq - Sk queries see none.
        scale: multiplies q k^T; a finite number, not a tensor; 1 / sqrt(D) by default.
        return_lse: also return the log-sum-exp of the scores, the sink included.
        window: (left, right): query i sees keys from i + (Sk - Sq) - left to i + (Sk - Sq) + right; -1 is no limit.
        softcap: scores become softcap * tanh(scores / softcap), before a mask is added; at most 4096, 0.0 for none.
        sinks: [Hq], one more score per head that joins each row's sum and has no value. Float32, or converted to it.
        attn_mask: bool (False hides a key) or of q's dtype (added to the scores), of a shape that broadcasts to [B, Hq, Sq, Sk],
            any strides. Without a gradient.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype and, where q is dense, q's order of strides; with ``return_lse`` also lse
        [B, Hq, Sq] in float32 (natural logarithm). A query that sees no key has out 0 and lse -inf, or its sink. Both can be
        differentiated once (see flashmoe.operators.attention.backward).

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: an argument breaks a rule above; the message says which.
        UnsupportedGpuError, DriverError: this build has no kernel for the GPU; the driver is absent or failed.
        DifferentiationError: forward-mode differentiation, or a second derivative (raised in the backward pass).
    """
    if misspelt:
        keywords.refuse("attention", misspelt, _ARGUMENTS)
    if not (type(causal) is type(return_lse) is bool and (scale is None or type(scale) is float)):  # type: ignore[redundant-expr]
        arguments.check_scalars(
            scale, causal, return_lse
        )  # the dispatcher would take a tensor's value and drop its gradient
    if window is not None or attn_mask is not None or sinks is not None or type(softcap) is not float or softcap != 0.0:
        return _banded(q, k, v, causal, scale, window, softcap, sinks, attn_mask, return_lse)
    if is_compiling():
        if _is_unequal(q, v):
            return varlen.attend(q, k, v, causal, scale, None, 0.0, None, None, return_lse)
        out, lse = _operator(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, causal)
    else:
        try:
            if not return_lse and _is_plain(q, k, v):
                only: Tensor = _inference_operator(q, k, v, scale, causal)
                return only
            if _is_unequal(q, v):
                return varlen.attend(q, k, v, causal, scale, None, 0.0, None, None, return_lse)
            out, lse = _call(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, causal)
        except Exception as error:
            if has_fx_proxies(q, k, v):
                traced: Tensor = trace_call(attention, q, k, v, causal=causal, scale=scale, return_lse=return_lse)
                return traced
            if _is_unequal(q, v):  # whose rules are the other operators'
                return varlen.attend(q, k, v, causal, scale, None, 0.0, None, None, return_lse)
            cause = arguments.explain(error, q, k, v, scale, causal)
            if cause is error:
                raise
            raise cause from error
    return (out, lse) if return_lse else out


def _banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float,
    sinks: Tensor | None,
    attn_mask: Tensor | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    given = (q, k, v, causal, scale, window, softcap, sinks, attn_mask, return_lse)
    if is_compiling():
        return varlen.attend(*given)
    try:
        return varlen.attend(*given)
    except Exception:
        if not has_fx_proxies(q, k, v):
            raise
        options = {"window": window, "softcap": softcap, "sinks": sinks, "attn_mask": attn_mask}
        traced: Tensor = trace_call(attention, q, k, v, causal=causal, scale=scale, return_lse=return_lse, **options)
        return traced


def _is_unequal(q: Tensor, v: Tensor) -> bool:
    """Whether the values have a head_dim of their own, which the inference operators find out themselves."""
    try:
        return q.size(-1) != v.size(-1)
    except (AttributeError, IndexError, TypeError, RuntimeError):  # the operator says what is wrong
        return False


def _is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing but the output is wanted: no gradient, no transform, no mode or tracer that looks at operators."""
    return not (
        (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        or transforms_are_active()
        or forward_ad._current_level >= 0
        or num_dispatch_modes() > 0
        or is_tracing()  # a graph with the inference operator would train nothing
    )


def _call(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The operator in eager mode.

    The autograd rule is Python, called by the dispatcher on every call at a cost of several us; where no gradient can be
    asked for it is skipped. Under torch.func a tensor's outer levels cannot be seen from here, so nothing is skipped.
    """
    if transforms_are_active():
        return autograd.under_transforms(q, k, v, scale, causal)
    if forward_ad._current_level >= 0 and has_tangent(q, k, v):
        raise DifferentiationError(autograd.NO_FORWARD_MODE)
    if is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        # A mode or torch.jit.trace must see the operator, not what is in the rule.
        if num_dispatch_modes() > 0 or is_tracing():
            result: tuple[Tensor, Tensor] = _operator(q, k, v, scale, causal)
        else:
            result = autograd.EagerForward.apply(q, k, v, scale, causal)  # type: ignore[no-untyped-call]
        return result
    with torch._C._AutoDispatchBelowAutograd():
        result = _operator(q, k, v, scale, causal)
    return result


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

    float16 and bfloat16 (on the CPU also float32) with 1 <= D <= 256, without dropout, run on flashmoe, in any layout and with
    any batch sizes that torch takes, with a bool mask or one of the query's dtype; all else goes to torch, which computes it
    or raises its own error (docs/api.md has the whole table).

    ``flashmoe.explain`` (same arguments) says which path a call takes and why. The environment variable FLASHMOE_FALLBACK
    is ``allow`` (default), ``warn`` or ``error``: what happens when a call goes to torch. ``sdpa_kernel`` chooses among torch's
    own backends and says nothing about flashmoe.

    Raises the errors of :func:`attention` where flashmoe runs, torch's where torch does; and ShapeError where key and value
    differ in length, for which torch's fused CPU kernel has no check: it reads past the end of the shorter.
    """
    if misspelt:
        keywords.refuse("scaled_dot_product_attention", misspelt, routing.ARGUMENTS)
    if attn_mask is None and dropout_p == 0.0 and not is_compiling():
        out = _plain_call(query, key, value, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    obstacle = routing.find_obstacle(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if obstacle is not None:
        if has_fx_proxies(query, key, value):
            arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            traced: Tensor = trace_call(scaled_dot_product_attention, *arguments)
            return traced
        routing.refuse_unequal_lengths(key, value)
        if routing.jagged_route is None or not routing.are_jagged(query, key, value):  # else torch's own choice is told
            routing.note_fallback(obstacle)
        if routing.has_no_heads(
            query, key, value
        ):  # where torch's fused CPU kernel divides by zero, which ends the process
            empty = torch._scaled_dot_product_attention_math
            return empty(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
        return torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if query.dim() == key.dim() == value.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]:
        return _top_left(query, key, value, is_causal, scale, attn_mask)
    q, k, v, mask, batch_shape = _as_four_dimensions(query, key, value, attn_mask, enable_gqa)
    return _top_left(q, k, v, is_causal, scale, mask).reshape(*batch_shape, query.shape[-2], value.shape[-1])


def _plain_call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, enable_gqa: bool) -> Tensor | None:
    """The usual case at the cost of one operator call: four dimensions, equal batches and heads, a square causal mask.

    None where it is another case or where the operator refused: then the caller finds out which.
    """
    if not (type(causal) is type(enable_gqa) is bool and (scale is None or type(scale) is float)):  # type: ignore[redundant-expr]
        return None
    try:
        if _is_plain(q, k, v):
            only: Tensor | None = _drop_in_operator(q, k, v, scale, causal, enable_gqa)
            return only
        shape = q.shape
        if not is_drop_in(shape, k.shape, causal, enable_gqa) or _is_unequal(q, v):
            return None
        return _call(q, k, v, shape[3] ** -0.5 if scale is None else scale, causal)[0]
    except (AttributeError, ValueError, TypeError, ZeroDivisionError, RuntimeError):
        return None


def _top_left(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, mask: Tensor | None) -> Tensor:
    """Attention with SDPA's causal mask, by calls of the bottom-right one, which is the same where Sq == Sk."""
    q, k, v = _last_contiguous(q), _last_contiguous(k), _last_contiguous(v)
    if mask is not None:
        return attention(q, k, v, scale=scale, attn_mask=mask)
    seq_q, seq_k = q.shape[2], k.shape[2]
    if not causal or seq_q == seq_k:
        return attention(q, k, v, causal=causal, scale=scale)
    if seq_q < seq_k:
        return attention(q, k[:, :, :seq_q], v[:, :, :seq_q], causal=True, scale=scale)
    square = attention(q[:, :, :seq_k], k, v, causal=True, scale=scale)
    rest = attention(q[:, :, seq_k:], k, v, scale=scale)  # rows i >= Sk see every key
    return torch.cat((square, rest), dim=2)


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _as_four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, torch.Size]:
    """Broadcast the batch dimensions and merge them into one; returns also the batch shape of the result.

    Heads are broadcast too unless they are grouped; one key head for many query heads needs no copy (multi-query).
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
    if mask is not None and mask.dim() > 3:  # one with fewer dimensions broadcasts as it is
        mask = _merge(mask, batch, heads_q)
    return q, k, v, mask, result[len(result) - (rank - 2) :]


def _lead(tensor: Tensor) -> torch.Size:
    """The sizes before [length, head_dim], with a head of 1 where there is none."""
    return tensor.shape[:-2] if tensor.dim() > 2 else torch.Size((1,))


def _merge(tensor: Tensor, batch: torch.Size, heads: int) -> Tensor:
    """[..., H, S, D] to [prod(batch), heads, S, D]."""
    expanded = tensor.expand(*batch, heads, *tensor.shape[-2:])
    if len(batch) == 1:
        return expanded
    return expanded.unsqueeze(0) if len(batch) == 0 else expanded.flatten(0, -4)
