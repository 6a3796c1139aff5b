"""Attention over ragged batches and pages, and with score options (windows, softcap, sinks, ALiBi, masks). Caches are in kvcache.py.

Importing this module imports torch and loads the compiled extension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch.compiler import is_compiling

from flashmoe import _extension, keywords
from flashmoe.attn import arguments, autograd, dropout, e4m3, fp8, out_variant
from flashmoe.attn.options import CONSISTENT, Varlen, Window
from flashmoe.checks import has_fx_proxies, trace_call
from flashmoe.errors import ArgumentError, ArgumentTypeError, DifferentiationError
from flashmoe.transforms import has_tangent

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

    from flashmoe.attn.options import VarlenOptions

_extension.load()
_operator = torch.ops.flashmoe.attention_varlen_forward.default
_inference_operator = torch.ops.flashmoe._attention_varlen_inference.default._op  # as in api.py
OPTIONS = (
    *("causal", "window", "softcap", "sinks", "alibi_slopes", "scale"),
    *("num_splits", "k_scale", "v_scale", "consistent", "return_lse", "out"),
)
_ARGUMENTS = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k", "block_table"),
    *("dropout_p", "rng_state", "q_scale", "out_dtype"),
    *OPTIONS,
)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = ...,
    dropout_p: float = ...,
    rng_state: Tensor | None = ...,
    q_scale: Tensor | float | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_lse: Literal[False] = ...,
    out: Tensor | None = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = ...,
    dropout_p: float = ...,
    rng_state: Tensor | None = ...,
    q_scale: Tensor | float | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = ...,
    dropout_p: float = ...,
    rng_state: Tensor | None = ...,
    q_scale: Tensor | float | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_lse: bool,
    out: Tensor | None = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *misplaced: NoReturn,
    causal: bool = False,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int = 0,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    consistent: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    q_scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    **misspelt: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each sequence of a packed (ragged) batch: the sequences follow each other without padding.

    Sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1. Its keys are packed in the same way, or in pages: then key j
    of sequence b is row j % page_size of page block_table[b, j // page_size]. With Sq and Sk a sequence's own lengths, query i is at key
    i + (Sk - Sq): masks are aligned bottom-right. Sequences without queries or keys are allowed. No call waits for the GPU, and a CUDA
    graph may be replayed with other lengths up to the maxima.

    Args:
        q: [Nq, Hq, D], float16 or bfloat16 (on the CPU also float32), 1 <= D <= 512, last dimension contiguous.
        k, v: [Nk, Hkv, D] and [Nk, Hkv, Dv] of the same dtype and device, 1 <= Dv <= 512, or pages [P, page_size, Hkv, D]. Hkv
            divides Hq: query head h reads key head h // (Hq // Hkv). With a 16-bit q, k and v may be float8_e4m3fn; so may all three.
        cu_seqlens_q: [B + 1] int32 on q's device: the running sum of the lengths, starting at 0, at most Nq.
        cu_seqlens_k: the same for the keys; with seqused_k the first sequence may start later. None with pages.
        max_seqlen_q, max_seqlen_k: the longest sequence's length, or more; ints, because the host does not read the lengths.
        causal: hide keys after the query's own: the window's right side is 0.
        window: (left, right): query i sees keys from i + (Sk - Sq) - left to i + (Sk - Sq) + right; -1 means no limit.
        softcap: scores become softcap * tanh(scores / softcap); at most 4096, 0.0 for none.
        sinks: [Hq], one extra score per head that is added to each row's softmax sum and has no value. Float32, or converted to it.
        alibi_slopes: [Hq] or [B, Hq], float32 or converted to it: -slope * abs(i + (Sk - Sq) - j) is added to the score of query i and
            key j, after softcap; on a GPU slopes are capped at 88. Has no gradient.
        scale: multiplies q k^T; a finite number, not a tensor; 1 / sqrt(D) by default.
        seqused_k: [B] int32, the number of keys of each sequence; required with pages, by default all that the sequence has room for.
        block_table: [B, pages of the longest] int32, the pages of each sequence, in any order, shared or not.
        num_splits: the number of thread blocks that a row's keys are split among; 0 lets the kernels choose. With 1 a row's result
            does not depend on the rest of the batch, bit for bit.
        k_scale, v_scale: the factors that dequantise k and v in float8_e4m3fn, in float32: a number, or a tensor [], [Hkv] or [B, Hkv]; for
            pages also [P, 1, Hkv, 1], if page_size is a multiple of 16. With powers of two the result is that of the dequantised
            keys and values, bit for bit if the same kernel computes both.
        dropout_p, rng_state: as in :func:`attention`; rows and keys are counted within their sequence, sequences within the call. Not with pages.
        consistent: the bits of a row of out and lse depend only on its query, its visible keys and the options: not on the batch, on where
            a chunk begins, or on whether tensors are ragged, dense or paged (docs/api.md says where). Keys are never split.
            FLASHMOE_CONSISTENT=1 sets this for every call.
        return_lse: also return the log-sum-exp of the scores, including the sink.
        q_scale: only for q in float8_e4m3fn, with k and v in the same: the factor that dequantises q, above zero like k_scale and v_scale:
            a number, or a tensor [], [Hq] or [B, Hq]. On GPUs of compute capability 9.0 the matrix products then run in 8 bits
            (docs/kernels/attention-fp8.md). On other devices, with any option except causal, scale and seqused_k, or with a gradient,
            all three are dequantised; over pages only q is.
        out_dtype: only for q in float8_e4m3fn: the dtype of out, bfloat16 (default) or float16.
        out: [Nq, Hq, Dv] in q's dtype to write the result to, which is then returned; contiguous, sharing no memory with the inputs. Rows
            that belong to no sequence may change. Not with return_lse or dropout_p; no gradient can be recorded.

    Returns:
        out [Nq, Hq, Dv], contiguous; with ``return_lse`` also lse [Hq, Nq] in float32 (natural logarithm). A query that sees no
        key has out 0 and lse -inf, or its sink. Rows that belong to no sequence are undefined. Both can be differentiated once, in q, k,
        v and sinks, but not over pages.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: an argument breaks a rule above; the message says which. The numbers in
            cu_seqlens_q, cu_seqlens_k, seqused_k and block_table are checked on the CPU, and on a GPU only if
            $FLASHMOE_CHECK_VALUES is 1 (each call then waits for the GPU, and none can be captured). Wrong numbers that are not
            checked are clamped to the tensors' bounds.
        UnsupportedGpuError, DriverError: this build has no kernel for the GPU; the driver is absent or failed.
        DifferentiationError: forward mode, a second derivative, or a gradient over pages or float8_e4m3fn.
    """
    if misplaced:
        keywords.raise_extra_positional("attention_varlen", misplaced, OPTIONS, 7)
    if misspelt:
        keywords.raise_unknown("attention_varlen", misspelt, _ARGUMENTS)
    if not isinstance(q, Tensor) or not isinstance(cu_seqlens_q, Tensor):  # type: ignore[redundant-expr]
        if has_fx_proxies(q, cu_seqlens_q):
            named = {name: value for name, value in locals().items() if name in _ARGUMENTS}
            traced: Tensor = trace_call(attention_varlen, **named)
            return traced
        check_lengths("cu_seqlens_q", cu_seqlens_q, "sequences + 1")
    if cu_seqlens_k is None and block_table is None:
        msg = "cu_seqlens_k is None, so the keys must be in pages; pass block_table and seqused_k, or cu_seqlens_k"
        raise ArgumentError(msg)
    if q_scale is not None or out_dtype is not None or e4m3.is_fp8(q):
        result: Tensor | tuple[Tensor, Tensor] = fp8.attend_varlen(
            attention_varlen,
            (q, k, v),
            (q_scale, k_scale, v_scale),
            out_dtype,
            (cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k),
            causal=causal,
            scale=scale,
            return_lse=return_lse,
            options={
                "window": window,
                "softcap": softcap,
                "sinks": sinks,
                "alibi_slopes": alibi_slopes,
                "block_table": block_table,
                "num_splits": num_splits,
                "dropout_p": dropout_p,
                "rng_state": rng_state,
                "consistent": consistent,
                "out": out,
            },
        )
        return result
    return attend(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        block_table=block_table,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        num_splits=num_splits,
        k_scale=k_scale,
        v_scale=v_scale,
        dropout_p=dropout_p,
        rng_state=rng_state,
        consistent=consistent,
        return_lse=return_lse,
        out=out,
    )


def expand_slopes(alibi_slopes: Any, q: Any, cu_seqlens_q: Tensor | None) -> Tensor:
    """ALiBi's slopes as float32 [batch, query heads]; slopes that do not fit stay two-dimensional, for the operator to reject."""
    if not isinstance(alibi_slopes, Tensor):
        arguments.check_optional_tensor("alibi_slopes", alibi_slopes)
    if is_grad_enabled() and alibi_slopes.requires_grad:
        raise DifferentiationError(autograd.NO_SLOPES_GRADIENT)
    slopes: Tensor = alibi_slopes.float()
    try:
        return slopes.expand(q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1, q.shape[1])
    except (RuntimeError, IndexError):
        return slopes.reshape(-1, slopes.shape[-1] if slopes.dim() > 0 else 1)


def check_lengths(name: str, lengths: Any, sizes: str) -> None:
    if not isinstance(lengths, Tensor):
        found = f"found {type(lengths).__name__}; convert it with torch.tensor(..., dtype=torch.int32)"
        msg = f"{name} must be an int32 tensor [{sizes}]; {found}"
        raise ArgumentTypeError(msg)


def attend(
    q: Any,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: Window | None,
    softcap: float,
    sinks: Tensor | None,
    return_lse: bool,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    num_splits: int = 0,
    k_scale: e4m3.Scale = None,
    v_scale: e4m3.Scale = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    consistent: bool = False,
    out: Tensor | None = None,
    append: Callable[[Varlen], None] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention_varlen_forward`` on the user's arguments. ``append`` adds new keys to k and v before they are read."""
    if not (type(causal) is type(return_lse) is type(consistent) is bool and (scale is None or type(scale) is float)):  # type: ignore[redundant-expr]
        arguments.check_scalars(scale, causal, return_lse, consistent)
        scale = float(scale) if isinstance(scale, int) else scale
    if alibi_slopes is not None:
        if mask is not None:
            msg = "attn_mask and alibi_slopes are both given; add the bias to attn_mask, and remove alibi_slopes"
            raise ArgumentError(msg)
        mask = expand_slopes(alibi_slopes, q, cu_seqlens_q)
    left, right = (-1, -1) if window is None else _sides(window)
    sizes_are_ints = type(max_seqlen_q) is type(max_seqlen_k) is type(left) is type(right) is type(num_splits) is int
    if not (
        sizes_are_ints and type(softcap) is float
    ):  # if the types are the usual ones, the operator checks the values
        integers = (max_seqlen_q, max_seqlen_k, left, right, num_splits)
        max_seqlen_q, max_seqlen_k, left, right, num_splits = map(arguments.as_integer, integers)
        arguments.check_numbers(max_seqlen_q, max_seqlen_k, left, right, softcap, num_splits)
        softcap = float(softcap)
    if num_splits < 0 or (consistent and num_splits > 1):
        needed = "remove it if consistent is True" if consistent else "0 lets the kernels choose"
        msg = f"num_splits must be from 0 to 32 ({needed}); found {num_splits}"
        raise ArgumentError(msg)
    right = 0 if causal and right >= -1 else right
    if scale is None:
        scale = q.shape[-1] ** -0.5 if isinstance(q, Tensor) and q.dim() > 0 and q.shape[-1] != 0 else 1.0
    if isinstance(sinks, Tensor) and sinks.is_floating_point():
        sinks = sinks.float().contiguous()
    given = Varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        block_table,
        sinks,
        mask,
        max_seqlen_q,
        max_seqlen_k,
        scale,
        left,
        right,
        softcap,
        CONSISTENT if consistent else num_splits,
    )
    scales = (k_scale, v_scale)
    if out is not None:
        out_variant.check_alone(
            out, has_dropout=type(dropout_p) is not float or dropout_p != 0.0, return_lse=return_lse
        )
    if append is not None:
        append(given)
    if out is not None:
        return out_variant.attend(given, k_scale, v_scale, out)
    if type(dropout_p) is not float or dropout_p != 0.0:
        return _attend_dropped(given, scales, dropout_p, rng_state, return_lse)
    return _attend(given, scales, return_lse)


def _attend_dropped(
    given: Varlen, scales: tuple[e4m3.Scale, e4m3.Scale], dropout_p: float, rng_state: Tensor | None, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    probability = dropout.check_probability(dropout_p)
    if probability == 0.0:
        return _attend(given, scales, return_lse)
    if e4m3.is_fp8(given.k):
        dropout.raise_fp8_dropout()
    e4m3.check_unscaled(*scales, given.k)
    result: Tensor | tuple[Tensor, Tensor] = dropout.attend(given, probability, rng_state, return_lse)
    return result


def _attend(given: Varlen, scales: tuple[e4m3.Scale, e4m3.Scale], return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    if e4m3.is_fp8(given.k):
        return e4m3.attend(given, *scales, return_lse)
    e4m3.check_unscaled(*scales, given.k)
    if is_compiling():
        out, lse = _operator(*given)
        return (out, lse) if return_lse else out
    try:
        return _call(given, return_lse)
    except Exception as error:
        cause = arguments.explain_varlen(error, given)
        if cause is error:
            raise
        raise cause from error


def _call(given: Varlen, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """The operator in eager mode; skips the autograd rule in Python when no gradient can be requested."""
    result: tuple[Tensor, Tensor]
    if transforms_are_active():
        result = autograd.varlen_under_transforms(*given)
        return result if return_lse else result[0]
    tensors = (given.q, given.k, given.v, given.sinks, given.mask)
    if has_tangent(*tensors):
        raise DifferentiationError(autograd.NO_FORWARD_MODE)
    needs_gradient = autograd.needs_gradient(*tensors)
    if not (return_lse or needs_gradient or num_dispatch_modes() > 0 or is_tracing()):
        only: Tensor = _inference_operator(*given)
        return only
    result = (autograd.eager_varlen if needs_gradient and autograd.is_eager(given) else _operator)(*given)
    return result if return_lse else result[0]


def _sides(window: Any) -> Window:
    try:
        left, right = window
    except (TypeError, ValueError) as error:
        msg = f"window must be (left, right), two numbers of keys, -1 for no limit; found {window!r}; use (n, 0) for the n keys before"
        raise ArgumentTypeError(msg) from error
    return left, right
