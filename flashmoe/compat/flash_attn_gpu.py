"""The functions of flash_attn 2's extension, for code that calls them directly: positional arguments, raw results, no autograd.

Dense tensors are [B, S, H, D], ragged ones [N, H, D]. Errors are RuntimeErrors. Besides out and lse a call returns S_dmask, empty unless
return_softmax is True, and rng_state, the seed and offset of the dropout, zeros without dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashmoe
from flashmoe.attn import varlen
from flashmoe.attn.options import DenseBackward, VarlenBackward
from flashmoe.compat import arguments
from flashmoe.compat.dropout import dropout_options, signed_probabilities, signed_ragged_probabilities, state_of
from flashmoe.compat.kvcache import attend_cache


def _check(generator: Any, p_dropout: float, return_softmax: bool = False) -> None:
    if generator is not None:
        msg = "the `generator` argument is no longer supported, as in flash_attn; pass None: torch's default generator is used"
        raise arguments.RawCallError(msg)
    if not 0.0 <= p_dropout < 1.0:
        msg = f"p_dropout must be at least 0 and less than 1; found {p_dropout}; it is the fraction that is dropped"
        raise arguments.RawCallError(msg)
    if return_softmax and p_dropout == 0.0:
        msg = "return_softmax is only supported when p_dropout > 0.0, as in flash_attn; pass False"
        raise arguments.RawCallError(msg)


def _forward_result(
    out: Tensor, lse: Tensor, given: Tensor | None, state: Tensor, probabilities: Tensor | None
) -> list[Tensor]:
    if given is not None:
        out = given.copy_(out)
    return [out, lse, out.new_empty(0) if probabilities is None else probabilities, state]


@torch.no_grad()
def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: None = None,
) -> list[Tensor]:
    """[out, lse [B, Hq, Sq], S_dmask, rng_state]."""
    _check(generator, p_dropout, return_softmax)
    options = arguments.score_options(
        is_causal, (window_size_left, window_size_right), softcap, softmax_scale, alibi_slopes
    )
    q, k, v = (t.transpose(1, 2) for t in _readable(q, k, v))
    dropout = dropout_options(p_dropout, q)
    found, lse = flashmoe.attention(q, k, v, **options, **dropout, return_lse=True)
    probabilities = signed_probabilities(q, k, options, dropout) if return_softmax else None
    return _forward_result(found.transpose(1, 2), lse, out, state_of(dropout, q), probabilities)


@torch.no_grad()
def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: None = None,
    num_splits: int = 0,
) -> list[Tensor]:
    """[out, lse [Hq, N], S_dmask, rng_state]; with pages the lengths are seqused_k, or the differences of cu_seqlens_k."""
    _check(generator, p_dropout, return_softmax)
    if num_splits > 1:
        msg = f"num_splits > 1 is not supported for packed sequences, as in flash_attn; found {num_splits}; pass 0 or 1"
        raise arguments.RawCallError(msg)
    q, k, v = _readable(q, k, v)
    options = arguments.score_options(
        is_causal, (window_size_left, window_size_right), softcap, softmax_scale, alibi_slopes
    )
    keys: dict[str, Any] = {"cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k, "max_seqlen_k": int(max_seqlen_k)}
    if leftpad_k is not None:
        lengths = torch.diff(cu_seqlens_k) if seqused_k is None else seqused_k
        if block_table is not None:
            k, v, keys = arguments.keys_after_padding(k, v, lengths, leftpad_k, block_table)
        else:
            first = cu_seqlens_k + torch.nn.functional.pad(leftpad_k, (0, 1))
            keys = {"cu_seqlens_k": first, "seqused_k": lengths - leftpad_k, "max_seqlen_k": 2 * int(max_seqlen_k)}
    elif block_table is not None:
        lengths = torch.diff(cu_seqlens_k) if seqused_k is None else seqused_k
        keys = {"block_table": block_table, "seqused_k": lengths, "max_seqlen_k": int(max_seqlen_k)}
    dropout = dropout_options(p_dropout, q)
    result: Any = varlen.attend(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=int(max_seqlen_q),
        **keys,
        **options,
        **dropout,
        sinks=None,
        return_lse=True,
    )
    found, lse = result
    if zero_tensors:  # rows that belong to no sequence, and their lse
        rows = torch.arange(found.shape[0], device=found.device)
        outside = (rows < cu_seqlens_q[0]) | (rows >= cu_seqlens_q[-1])
        found, lse = found.masked_fill(outside[:, None, None], 0.0), lse.masked_fill(outside, -torch.inf)
    probabilities = None
    if return_softmax:
        longest = (int(max_seqlen_q), int(max_seqlen_k))
        probabilities = signed_ragged_probabilities(q, k, (cu_seqlens_q, cu_seqlens_k), longest, options, dropout)
    return _forward_result(found, lse, out, state_of(dropout, q), probabilities)


@torch.no_grad()
def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: None = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """[dq, dk, dv, rowsum(dout * out) [B, Hq, Sq]]; gradients are written to dq, dk and dv if given. out and softmax_lse may come from
    attention over more keys than k: the result is then these keys' share of the gradients. Always deterministic."""
    del deterministic
    _check(generator, p_dropout)
    dropout = _dropout_of(p_dropout, rng_state)
    options = arguments.score_options(
        is_causal, (window_size_left, window_size_right), softcap, softmax_scale, alibi_slopes
    )
    tensors = [t.transpose(1, 2) for t in _readable(dout, q, k, v, out)]
    grad_out, *operands, result = tensors
    is_plain = options["window"] is None and options["softcap"] == 0.0 and alibi_slopes is None and not dropout
    if is_plain and q.shape[-1] == v.shape[-1]:
        scores = (options["scale"], options["causal"], 7)
        given = DenseBackward._make((grad_out, None, *operands, result, softmax_lse.contiguous(), *scores))
        found = torch.ops.flashmoe.flash_attention_backward(*given)
    else:
        lengths = (q.shape[1], k.shape[1])
        found = _varlen_backward(grad_out, operands, result, softmax_lse, (None, None, None), lengths, options, dropout)
    return [
        *_into((dq, dk, dv), [gradient.transpose(1, 2) for gradient in found[:3]]),
        torch.linalg.vecdot(grad_out.float(), result.float()),
    ]


@torch.no_grad()
def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: None = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """[dq, dk, dv, rowsum(dout * out) [Hq, N]]; otherwise as :func:`bwd`. Rows and keys that belong to no sequence always get zeros."""
    del deterministic, zero_tensors
    _check(generator, p_dropout)
    dropout = _dropout_of(p_dropout, rng_state)
    options = arguments.score_options(
        is_causal, (window_size_left, window_size_right), softcap, softmax_scale, alibi_slopes
    )
    dout, q, k, v, out = _readable(dout, q, k, v, out)
    lengths = (int(max_seqlen_q), int(max_seqlen_k))
    sequences = (cu_seqlens_q, cu_seqlens_k, None)
    found = _varlen_backward(dout, [q, k, v], out, softmax_lse, sequences, lengths, options, dropout)
    return [*_into((dq, dk, dv), found[:3]), torch.linalg.vecdot(dout.float(), out.float()).mT]


def fwd_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]:
    """[out, lse [B, Hq, Sq]]."""
    options = arguments.score_options(
        is_causal, (window_size_left, window_size_right), softcap, softmax_scale, alibi_slopes
    )
    found, lse = attend_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        lengths=cache_seqlens,
        block_table=block_table,
        options={**options, "num_splits": num_splits},
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
    )
    return [found if out is None else out.copy_(found), lse]


def _dropout_of(p_dropout: float, rng_state: Tensor | None) -> tuple[Any, ...]:
    """The gradient operator's trailing arguments; empty without dropout."""
    if p_dropout == 0.0:
        return ()
    if rng_state is None:
        msg = f"p_dropout is {p_dropout} and rng_state is None; pass the rng_state that the forward call returned"
        raise arguments.RawCallError(msg)
    return float(p_dropout), rng_state


def _readable(*tensors: Tensor) -> list[Tensor]:
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def _into(targets: tuple[Tensor | None, ...], found: Any) -> list[Tensor]:
    return [g if target is None else target.copy_(g) for target, g in zip(targets, found, strict=True)]


def _varlen_backward(
    dout: Tensor,
    operands: list[Tensor],
    out: Tensor,
    lse: Tensor,
    sequences: tuple[Tensor | None, ...],
    lengths: tuple[int, int],
    options: dict[str, Any],
    dropout: tuple[Any, ...],
) -> Any:
    left, right = options["window"] or arguments.UNBOUNDED
    right = 0 if options["causal"] else right
    scale = operands[0].shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    slopes = options["alibi_slopes"]
    mask = None if slopes is None else varlen.expand_slopes(slopes, operands[0], sequences[0])
    scores = (scale, left, right, options["softcap"], 7)
    given = VarlenBackward._make((dout, None, *operands, *sequences, None, mask, out, lse, *lengths, *scores))
    if dropout:
        return torch.ops.flashmoe.attention_dropout_backward(*given, *dropout)
    return torch.ops.flashmoe.attention_varlen_backward(*given)
