"""torch.ops.flash_attn_3: the operators beneath FlashAttention 3's functions, for code that calls them directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashmoe.compat import flash_attn_3

_NAMESPACE = "flash_attn_3"
_LENGTHS = "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None"
_WINDOW = "bool is_causal=False, int window_size_left=-1, int window_size_right=-1"
_STARTS = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None"
_TUNING = "int num_splits=0, bool? pack_gqa=None, int sm_margin=0"
_SCHEMAS = {
    "fwd": f"(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, Tensor(out!)? out=None, "
    f"{_STARTS}, Tensor? cu_seqlens_k_new=None, {_LENGTHS}, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    f"Tensor? v_descale=None, float? softmax_scale=None, {_WINDOW}, int attention_chunk=0, float softcap=0., "
    f"bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, {_TUNING}) -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, "
    f"Tensor(dv!)? dv=None, {_STARTS}, {_LENGTHS}, float? softmax_scale=None, {_WINDOW}, float softcap=0., bool deterministic=False, "
    "int sm_margin=0) -> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fwd_combine": "(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) -> (Tensor(out!), Tensor)",
    "get_scheduler_metadata": "(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim, "
    f"int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, {_STARTS}, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    f"Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0, {_WINDOW}, int attention_chunk=0, bool has_softcap=False, "
    f"{_TUNING}) -> Tensor",
}


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    gradients = [
        torch.empty_like(of) if given is None else given for of, given in zip((q, k, v), (dq, dk, dv), strict=True)
    ]
    delta = flash_attn_3._flash_attn_backward(dout, q, k, v, out, softmax_lse, *rest[:6], *gradients, *rest[6:])
    return (*gradients, delta, *(delta.new_empty(0) for _ in range(4)))


def _metadata(*given: Any) -> Tensor:
    return flash_attn_3.get_scheduler_metadata(cache_seqlens=given[8])


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fwd": flash_attn_3._flash_attn_forward,
    "bwd": _backward,
    "fwd_combine": flash_attn_3.flash_attn_combine,
    "get_scheduler_metadata": _metadata,
}


def _with_defaults(name: str) -> Callable[..., Any]:
    """The function behind an operator. torch leaves out trailing arguments that equal the schema's defaults; this adds them."""

    def call(*given: Any) -> Any:
        arguments = getattr(torch.ops.flash_attn_3, name).default._schema.arguments
        return _FUNCTIONS[name](*given, *(argument.default_value for argument in arguments[len(given) :]))

    return call


_library: list[torch.library.Library] = []  # while registered


def register() -> None:
    """Define the operators, unless another library has defined them."""
    if _library or hasattr(torch.ops.flash_attn_3, "fwd"):
        return
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _with_defaults(name), "CompositeExplicitAutograd")
    _library.append(library)


def unregister() -> None:
    """Remove the operators."""
    for library in _library:
        library._destroy()
    _library.clear()
