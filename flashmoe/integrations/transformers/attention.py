"""The functions that transformers' layers call for their masks and their attention."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from flashmoe import fallback
from flashmoe.attn import sdpa_dispatch, varlen
from flashmoe.attn.api import attention
from flashmoe.attn.arguments import DTYPES
from flashmoe.attn.options import Window
from flashmoe.errors import ArgumentError, FlashmoeError
from flashmoe.integrations.transformers.codes import ScaledCodes
from flashmoe.integrations.transformers.latents import Latents

NAME = "fmoe"
PAGED_NAME = f"paged|{NAME}"
NO_WEIGHTS = f"{NAME!r} attention cannot return weights for output_attentions=True; use attn_implementation='eager'"

# Models that pass their sliding window to the attention function, so that it needs no mask tensor. Other models get
# the window as a mask: correct, but of size [B, 1, Sq, Sk].
WINDOW_MODELS = frozenset(
    {"mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "phi3"}
)


def attention_mask(
    *arguments: Any,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **options: Any,
) -> Tensor | None:
    """The mask that the layers get: transformers' own for SDPA, True where a key is visible, or something smaller.

    None if causal=True and the layer's window are equivalent; for a decoding step over a static cache without padding int32
    [B, 1, 1, 1], the number of keys of each sequence, so that the unused rest of the cache is not read.
    """
    from transformers.masking_utils import sdpa_mask

    if local_size is None and not allow_is_causal_skip:
        lengths = _lengths_of_static_cache(*arguments, **options)
        if lengths is not None:
            return lengths
    by_kernel = (
        local_size is not None
        and allow_is_causal_skip
        and getattr(config, "model_type", None) in WINDOW_MODELS
        and getattr(config, "sliding_window", None) == local_size
    )
    options |= {
        "local_size": None if by_kernel else local_size,
        "allow_is_causal_skip": allow_is_causal_skip,
        "config": config,
    }
    mask: Tensor | None = sdpa_mask(*arguments, **options)
    return mask


def _lengths_of_static_cache(
    batch_size: int,
    q_length: int = 0,
    *_: Any,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    device: Any = None,
    **__: Any,
) -> Tensor | None:
    """int32 [B, 1, 1, 1] if the mask of one new token is only its sequence's length; None otherwise.

    Looking for padding waits for the GPU, as transformers' own check for leaving out a mask does.
    """
    from transformers.masking_utils import causal_mask_function

    is_plain = q_length == 1 and mask_function is causal_mask_function and type(kv_offset) is int and kv_offset == 0
    if not is_plain or device is None or is_compiling():
        return None
    if attention_mask is not None and (attention_mask.dim() != 2 or not bool(attention_mask.all())):
        return None
    if isinstance(q_offset, Tensor):
        keys = q_offset.to(device, torch.int32).reshape(-1)[-1:] + 1
        return keys.expand(batch_size).contiguous().view(batch_size, 1, 1, 1)
    return torch.full((batch_size, 1, 1, 1), q_offset + 1, dtype=torch.int32, device=device)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in each layer: query [B, Hq, Sq, D], key and value [B, Hkv, Sk, D]; returns [B, Sq, Hq, D].

    With ``cu_seq_lens_q`` among the options (packed sequences, DataCollatorWithFlattening) the batch is ragged and the mask is
    not read. Unsupported calls (float32 on a GPU, a position bias with packed sequences) go to transformers' SDPA attention, and
    FLASHMOE_FALLBACK says what happens then. A position bias, as in T5, is added to the scores, with its gradient.
    """
    if isinstance(key, (Latents, ScaledCodes)):
        if dropout == 0.0 and position_bias is None and options.get("cu_seq_lens_q") is None:
            stored = (query, key, value, attention_mask)
            found = _attend_stored(module, *stored, scaling, is_causal, sliding_window, softcap, s_aux)
            if found is not None:
                return found, None
        key, value = key.expand() if isinstance(key, Latents) else (key.dequantized(), value.dequantized())
    # Looking for obstacles takes longer than the call, so outside of a compiler it is done only for what the operators would not reject.
    is_packed = query.shape[0] == 1 and options.get("cu_seq_lens_q") is not None
    has_packed_bias = is_packed and position_bias is not None
    if is_compiling() or has_packed_bias or not _has_kernels(query):
        unsupported_reason = _unsupported_reason(query, key, value, has_packed_bias)
    else:
        unsupported_reason = None
    if unsupported_reason is None:
        if options.get("output_attentions") and not is_compiling():
            warnings.warn(NO_WEIGHTS, stacklevel=2)
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        extras = _extras(softcap, s_aux, dropout)
        window = None if sliding_window is None else (sliding_window - 1, -1 if causal else sliding_window - 1)
        given = (query, key, value, attention_mask, position_bias, causal, window, scaling, extras, options)
        if is_compiling():
            return _attend(*given), None
        try:
            return _attend(*given), None
        except FlashmoeError:
            unsupported_reason = _unsupported_reason(query, key, value, has_packed_bias)
            if unsupported_reason is None:
                raise
    causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    attention_mask = _whole_mask(query, key, attention_mask, causal, sliding_window, options.get("cu_seq_lens_q"))
    return _sdpa(unsupported_reason, softcap, s_aux, module, query, key, value, attention_mask, dropout, scaling, is_causal,
                 position_bias, options)  # fmt: skip


def _extras(softcap: float | None, s_aux: Tensor | None, dropout: float) -> dict[str, Any]:
    """The keywords for the options that are given; with dropout a random state is drawn in each call."""
    extras: dict[str, Any] = {}
    if softcap:
        extras["softcap"] = float(softcap)
    if s_aux is not None:
        extras["sinks"] = s_aux.float()
    if dropout != 0.0:
        extras["dropout_p"] = float(dropout)
    return extras


def _whole_mask(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, sliding_window: int | None, cu_seqlens: Tensor | None
) -> Tensor | None:
    """Converts what the kernels would have handled into a mask for SDPA: static-cache lengths, a window, the ends of packed sequences."""
    rows, keys = query.shape[2], key.shape[2]
    column = torch.arange(keys, device=key.device)
    if mask is not None:
        return mask if mask.dtype != torch.int32 else column < mask
    if query.shape[0] != 1 or rows != keys:
        cu_seqlens = None  # not packed
    if sliding_window is not None and keys <= sliding_window:
        sliding_window = None
    if cu_seqlens is None and sliding_window is None:
        return None
    first = 0 if causal and 1 < rows < keys else keys - rows  # as in _attend
    distance = column - torch.arange(first, first + rows, device=key.device).unsqueeze(1)
    shown = distance <= (0 if causal else keys)
    if sliding_window is not None:
        shown = shown & (distance.abs() < sliding_window)
    if cu_seqlens is not None:
        entry = torch.searchsorted(cu_seqlens[1:].contiguous(), column, right=True)
        shown = shown & (entry == entry.unsqueeze(1))
    return shown[None, None]


def _has_kernels(query: Tensor) -> bool:
    device_type = query.device.type
    return device_type in DTYPES and query.dtype in DTYPES[device_type]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window: Window | None,
    scaling: float | None,
    extras: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    if "cu_seq_lens_q" in options and options["cu_seq_lens_q"] is not None and query.shape[0] == 1:
        return _attend_packed(query, key, value, causal, window, scaling, extras, options)
    # Views of transformers' layouts, except that the operators need a contiguous last dimension.
    if not (query.stride(-1) == key.stride(-1) == value.stride(-1) == 1):
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    if bias is not None:
        bias = bias.to(query.dtype)
        mask = None if mask is None else _with_bias(mask, bias)
    if mask is None:
        rows, keys = query.shape[2], key.shape[2]
        if causal and 1 < rows < keys:
            # Only a prompt before an empty static cache comes without a mask: its keys are the first ones in the cache.
            key, value = key[:, :, :rows], value[:, :, :rows]
        if bias is not None:
            extras["attn_mask"] = bias[..., : key.shape[2]]
        if window is not None and keys > window[0] + 1:  # with fewer keys the window hides none
            extras["window"] = window
        out = attention(query, key, value, causal=causal and rows > 1, scale=scaling, **extras)
    elif mask.dtype == torch.int32:  # the lengths in a static cache; a single row sees all its keys
        options = {"softcap": 0.0, "sinks": None, **extras}
        out = varlen.attend(
            *(query, key, value),
            seqused_k=mask.view(-1),
            causal=False,
            scale=scaling,
            window=None,
            return_lse=False,
            **options,
        )
    else:  # the mask includes the causal rule and the window
        out = attention(query, key, value, scale=scaling, attn_mask=mask, **extras)
    heads_inside: Tensor = out.transpose(1, 2).contiguous()
    return heads_inside


def _with_bias(mask: Tensor, bias: Tensor) -> Tensor:
    """The bias where a mask, or the lengths in a static cache, shows a key; -inf elsewhere."""
    if mask.dtype == torch.int32:
        mask = torch.arange(bias.shape[-1], device=bias.device) < mask
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _attend_stored(
    module: nn.Module,
    query: Tensor,
    key: Latents | ScaledCodes,
    value: Any,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor | None:
    """Attention over keys in a cache's stored form; None if no kernel reads them in that form."""
    if isinstance(key, Latents):
        is_static = mask is not None and mask.dtype == torch.int32
        if (
            query.shape[2] > 1
            or softcap
            or s_aux is not None
            or sliding_window is not None
            or not (mask is None or is_static)
        ):
            return None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return key.attend(query, scale, None if mask is None else mask.view(-1))
    if mask is not None:
        return None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and query.shape[2] > 1
    out = varlen.attend(
        query if query.stride(-1) == 1 else query.contiguous(),
        key.codes,
        value.codes,
        seqused_k=key.lengths,
        causal=causal,
        scale=scaling,
        window=None if sliding_window is None else (sliding_window - 1, -1),
        softcap=float(softcap or 0.0),
        sinks=None if s_aux is None else s_aux.float(),
        k_scale=key.scale,
        v_scale=value.scale,
        return_lse=False,
    )
    heads_inside: Tensor = out.transpose(1, 2).contiguous()  # type: ignore[union-attr]
    return heads_inside


def _attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: Window | None,
    scaling: float | None,
    extras: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    lengths = (options["cu_seq_lens_q"].int(), options["cu_seq_lens_k"].int())
    longest = (int(options["max_length_q"]), int(options["max_length_k"]))
    out: Tensor = varlen.attention_varlen(
        q, k, v, *lengths, *longest, causal=causal, window=window, scale=scaling, **extras
    )
    return out.unsqueeze(0)


def _unsupported_reason(q: Tensor, k: Tensor, v: Tensor, has_packed_bias: bool) -> str | None:
    if has_packed_bias:
        return "position_bias is not supported for packed sequences"
    return sdpa_dispatch.find_unsupported(q, k, v, None, 0.0, False, None, True)


def _sdpa(
    unsupported_reason: str,
    softcap: float | None,
    s_aux: Tensor | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    position_bias: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if softcap or s_aux is not None:
        what = "a softcap" if softcap else "sinks"
        msg = f"{unsupported_reason}, and transformers' SDPA attention does not support {what}; use attn_implementation='eager'"
        raise ArgumentError(msg)
    fallback.note_fallback(unsupported_reason)
    if position_bias is not None:
        options = {**options, "position_bias": position_bias}
    # transformers 4 passes it on beside a mask, and for a single row, which would then see only the first key.
    if is_causal and (attention_mask is not None or query.shape[2] == 1):
        is_causal = False
    result: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
    )
    return result


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Continuous batching: one ragged batch per step, query [1, Hq, tokens, D]; the cache stores the new keys and returns all keys."""
    cache = options.get("cache")
    if cache is None:
        msg = f"{PAGED_NAME} needs the cache of continuous batching; for a plain forward pass use {NAME!r}"
        raise ArgumentError(msg)
    keys, values = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=options["read_index"],
        write_index=options["write_index"],
    )
    window_size = getattr(module, "sliding_window", None) or None
    lengths_k, longest_k = options["cu_seq_lens_k"], options["max_seqlen_k"]
    if isinstance(lengths_k, dict):
        kind = "full_attention" if window_size is None else "sliding_attention"
        lengths_k, longest_k = lengths_k[kind], longest_k[kind]
    out = varlen.attention_varlen(
        query[0].transpose(0, 1),
        keys,
        values,
        options["cu_seq_lens_q"].int(),
        lengths_k.int(),
        int(options["max_seqlen_q"]),
        int(longest_k),
        causal=True,
        window=(-1, -1) if window_size is None else (window_size - 1, -1),
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
        scale=scaling,
    )
    return out.unsqueeze(0), None
