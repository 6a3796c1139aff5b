"""flashmoe.attention, on dense tensors. Ragged batches and pages are in varlen.py; torch's interface is in sdpa.py.

Importing this module imports torch and loads the compiled extension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flashmoe import _extension, fallback, keywords
from flashmoe.attn import arguments, autograd, fp8, layout, varlen
from flashmoe.attn.options import is_slopes
from flashmoe.checks import has_fx_proxies, trace_call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Unpack

    from flashmoe.attn.options import ScoreOptions

_extension.load()
fallback.fallback_policy()  # a misspelt value fails at import, not at the first call that falls back, much later
_operator = torch.ops.flashmoe.flash_attention_forward.default
# An OpOverload's __call__ only forwards to ``_op``, at a cost of 0.24 us; the compiler never sees this one.
_inference_operator = torch.ops.flashmoe._flash_attention_inference.default._op
_ARGUMENTS = (
    *("q", "k", "v", "causal", "scale", "return_lse"),
    *("window", "softcap", "sinks", "attn_mask", "alibi_slopes", "dropout_p", "rng_state", "consistent"),
    *("q_scale", "k_scale", "v_scale", "out_dtype"),
)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    rng_state: Tensor | None = ...,
    q_scale: Tensor | float | None = ...,
    k_scale: Tensor | float | None = ...,
    v_scale: Tensor | float | None = ...,
    out_dtype: torch.dtype | None = ...,
    **options: Unpack[ScoreOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    rng_state: Tensor | None = ...,
    q_scale: Tensor | float | None = ...,
    k_scale: Tensor | float | None = ...,
    v_scale: Tensor | float | None = ...,
    out_dtype: torch.dtype | None = ...,
    **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    rng_state: Tensor | None = ...,
    q_scale: Tensor | float | None = ...,
    k_scale: Tensor | float | None = ...,
    v_scale: Tensor | float | None = ...,
    out_dtype: torch.dtype | None = ...,
    **options: Unpack[ScoreOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *misplaced: NoReturn,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    consistent: bool = False,
    q_scale: Tensor | float | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    **misspelt: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v, never falling back to another implementation.

    Args:
        q: [B, Hq, Sq, D], float16 or bfloat16 (on the CPU also float32), or float8_e4m3fn; 1 <= D <= 512, last dimension contiguous.
        k, v: [B, Hkv, Sk, D] and [B, Hkv, Sk, Dv] of the same dtype and device, 1 <= Dv <= 512. Hkv divides Hq: query head h
            reads key head h // (Hq // Hkv).
        causal: hide keys j > i + (Sk - Sq) from query i: the mask is aligned bottom-right, so the last query sees every key.
            If Sq > Sk, the first Sq - Sk queries see no key.
        scale: multiplies q k^T; a finite number, not a tensor; 1 / sqrt(D) by default.
        return_lse: also return the log-sum-exp of the scores, including the sink.
        window: (left, right): query i sees keys from i + (Sk - Sq) - left to i + (Sk - Sq) + right; -1 means no limit.
        softcap: scores become softcap * tanh(scores / softcap), before a mask is added; at most 4096, 0.0 for none.
        sinks: [Hq], one extra score per head that is added to each row's softmax sum and has no value. Float32, or converted to it.
        attn_mask: bool (False hides a key) or q's dtype (added to the scores), of a shape that broadcasts to [B, Hq, Sq, Sk], any
            strides. An additive mask has a gradient; for a broadcast mask it takes no more memory than the mask itself.
        alibi_slopes: [Hq] or [B, Hq], float32 or converted to it: -slope * abs(i + (Sk - Sq) - j) is added to the score of query i and
            key j, after softcap (ALiBi: Press et al., Train Short, Test Long). On a GPU slopes are capped at 88. Cannot be combined
            with attn_mask; has no gradient.
        dropout_p: the probability with which an attention weight becomes 0, rounded to the nearest multiple of 2^-16; the others are
            multiplied by 1 / (1 - dropout_p). lse is computed without dropout.
        rng_state: int64 [2] on q's device: seed and offset. With the sequence, head, query and key they decide what is dropped, in both
            passes (:func:`dropout_mask`). By default drawn from the device's default generator, once per call.
        consistent: the bits of a row of out and lse depend only on its query, its visible keys and the options, not on the other rows,
            the batch, or which function computes it (docs/api.md says where). FLASHMOE_CONSISTENT=1 sets this for every call.
        q_scale, k_scale, v_scale: only for q, k and v in float8_e4m3fn: the factors that dequantise them, above zero. Each is a number or a
            float32 tensor [], [H] or [B, H], with H the tensor's own heads, or [B, H, blocks] with one scale per 128 rows (for q and k
            also per 64): ceil(rows / 128) or ceil(rows / 64) blocks, counted from row 0. On GPUs of compute capability 9.0 the matrix
            products, including P V, then run in 8 bits (docs/kernels/attention-fp8.md). On other devices, with any option except
            causal and scale, or with a gradient, the tensors are dequantised and everything runs as in 16 bits.
        out_dtype: only for float8_e4m3fn inputs: the dtype of out, bfloat16 (default) or float16.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype (or out_dtype), with q's order of strides if q is dense; with ``return_lse`` also lse
        [B, Hq, Sq] in float32 (natural logarithm). A query that sees no key has out 0 and lse -inf, or its sink. Both can be
        differentiated once (see flashmoe.attn.backward).

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: an argument breaks a rule above; the message says which.
        UnsupportedGpuError, DriverError: this build has no kernel for the GPU; the driver is absent or failed.
        DifferentiationError: forward-mode differentiation, or a second derivative (raised in the backward pass).
    """
    if misplaced or misspelt:
        _refuse(misplaced, misspelt)
    if not (type(causal) is type(return_lse) is type(consistent) is bool and (scale is None or type(scale) is float)):  # type: ignore[redundant-expr]
        arguments.check_scalars(
            scale, causal, return_lse, consistent
        )  # the dispatcher would take a tensor's value and drop its gradient
    if fp8.is_fp8_call(q, q_scale, k_scale, v_scale, out_dtype):
        result: Tensor | tuple[Tensor, Tensor] = fp8.attend(
            attention,
            (q, k, v),
            (q_scale, k_scale, v_scale),
            out_dtype,
            causal=causal,
            scale=scale,
            return_lse=return_lse,
            consistent=consistent,
            options={
                "window": window,
                "softcap": softcap,
                "sinks": sinks,
                "attn_mask": attn_mask,
                "alibi_slopes": alibi_slopes,
                "dropout_p": dropout_p,
                "rng_state": rng_state,
            },
        )
        return result
    has_tensor = attn_mask is not None or sinks is not None or alibi_slopes is not None
    has_dropout = type(dropout_p) is not float or dropout_p != 0.0
    if has_tensor or consistent or has_dropout or window is not None or type(softcap) is not float or softcap != 0.0:
        if has_fx_proxies(q, k, v):
            traced: Tensor = trace_call(attention, **_named(locals()))
            return traced
        return varlen.attend(
            q,
            k,
            v,
            mask=_expand_mask(attn_mask, q, k),
            alibi_slopes=alibi_slopes,
            causal=causal,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            dropout_p=dropout_p,
            rng_state=rng_state,
            consistent=consistent,
            return_lse=return_lse,
        )
    if is_compiling():
        both: tuple[Tensor, Tensor] = _operator(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, causal)
        return both if return_lse else both[0]
    if layout.checks_left:
        layout.warn_if_transposed(q, k)
    try:
        if not return_lse and needs_only_output(q, k, v):
            only: Tensor = _inference_operator(q, k, v, scale, causal)
            return only
        both = autograd.dense_forward(q, k, v, scale, causal)
    except Exception as error:
        if has_fx_proxies(q, k, v):
            traced = trace_call(attention, q, k, v, causal=causal, scale=scale, return_lse=return_lse)
            return traced
        cause = arguments.explain_dense(error, q, k, v, scale, causal)
        if cause is error:
            raise
        raise cause from error
    return both if return_lse else both[0]


def _refuse(misplaced: tuple[Any, ...], misspelt: Mapping[str, Any]) -> None:
    if misplaced:
        keywords.raise_extra_positional("attention", misplaced, _ARGUMENTS[3:], 3)
    keywords.raise_unknown("attention", misspelt, _ARGUMENTS)


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in _ARGUMENTS}


def needs_only_output(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether only the output is needed: no gradient, no transform, no mode or tracer that must see the operator."""
    return not (
        (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        or transforms_are_active()
        or forward_ad._current_level >= 0
        or num_dispatch_modes() > 0
        or is_tracing()  # a traced graph with the inference operator could not be trained
    )


def _expand_mask(attn_mask: Any, q: Any, k: Any) -> Any:
    """Expand to [B, Hq, Sq, Sk], or to four dimensions if it needs a gradient. Unchanged if that fails: the operator says why."""
    if isinstance(attn_mask, Tensor) and isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() == 4:
        if is_grad_enabled() and attn_mask.requires_grad:  # not expanded: its gradient is as large as it is
            return attn_mask[(None,) * (4 - attn_mask.dim())] if attn_mask.dim() < 4 else attn_mask
        try:
            return attn_mask.expand((*q.shape[:3], k.shape[2]))
        except RuntimeError:
            is_ambiguous = attn_mask.dtype == torch.float32 or attn_mask.shape == q.shape[:2]
            return attn_mask.unsqueeze(0) if is_slopes(attn_mask) and is_ambiguous else attn_mask
    arguments.check_optional_tensor("attn_mask", attn_mask)
    return attn_mask
