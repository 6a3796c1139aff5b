"""flashmoe in Hugging Face transformers: attention and experts, by transformers' own registries.

    from flashmoe.integrations.transformers import register
    names = register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=names.attention, experts_implementation=names.experts)

Nothing of transformers is patched. transformers takes every attention whose name contains "flash" for a library that it should import,
so the name here is "fmoe". The registries are there from 4.57 on for attention and from 5.0 on for experts; 5.17 is what this was
run with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import flashmoe
from flashmoe import routing
from flashmoe.errors import ArgumentError, FlashmoeError
from flashmoe.moe.functional import Activation

NAME = "fmoe"
PAGED_NAME = f"paged|{NAME}"

# Models that hand their sliding window to the attention function, so that no mask tensor is needed for it. Other models get
# the window as a mask: right, but of size [B, 1, Sq, Sk].
WINDOW_MODELS = frozenset(
    {"mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "phi3"}
)


@dataclass(frozen=True)
class Registered:
    """What to ask transformers for; ``experts`` is None where this version of transformers cannot exchange experts."""

    attention: str
    experts: str | None


def register() -> Registered:
    """Make flashmoe known to transformers as an attention and an experts implementation; a second call changes nothing.

    Raises ArgumentError where transformers is not installed or has no registry of attention functions.
    """
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        msg = f"transformers cannot be used ({error}); install transformers 4.57 or later"
        raise ArgumentError(msg) from error
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_ATTENTION_FUNCTIONS.register(PAGED_NAME, paged_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, attention_mask)
    experts = None
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        pass  # before transformers 5
    else:
        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
        experts = NAME
    return Registered(NAME, experts)


# Attention


def attention_mask(
    *arguments: Any,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **options: Any,
) -> Tensor | None:
    """transformers' mask for SDPA, True where a key is seen, or None where causal=True and the layer's window say as much."""
    from transformers.masking_utils import sdpa_mask

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


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    """What transformers calls in each layer: query [B, Hq, Sq, D], key and value [B, Hkv, Sk, D]; returns [B, Sq, Hq, D].

    With ``cu_seq_lens_q`` among the options (packed sequences, DataCollatorWithFlattening) the batch is ragged and the mask is
    not read. What flashmoe lacks (dropout, a position bias, float32 on a GPU) goes to transformers' SDPA attention, and
    FLASHMOE_FALLBACK says what then happens.
    """
    obstacle = _obstacle(query, key, value, dropout, position_bias)
    if obstacle is not None:
        return _sdpa(obstacle, softcap, s_aux, module, query, key, value, attention_mask, dropout, scaling, is_causal,
                     position_bias, options)  # fmt: skip
    causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    extras: dict[str, Any] = {"softcap": softcap or 0.0, "sinks": None if s_aux is None else s_aux.float()}
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, -1)
    lengths = options.get("cu_seq_lens_q")
    if lengths is not None and query.shape[0] == 1:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        out = flashmoe.attention_varlen(
            q,
            k,
            v,
            lengths.int(),
            options["cu_seq_lens_k"].int(),
            int(options["max_length_q"]),
            int(options["max_length_k"]),
            causal=causal,
            window=window,
            scale=scaling,
            **extras,
        )
        return out.unsqueeze(0), None
    if attention_mask is not None:
        # It says all there is to say, the causal rule and the window included.
        return _heads_inside(_attend(query, key, value, scaling, attn_mask=attention_mask, **extras)), None
    rows, keys = query.shape[2], key.shape[2]
    if causal and 1 < rows < keys:
        # Only a prompt before an empty static cache comes without a mask: its keys are the first.
        key, value = key[:, :, :rows], value[:, :, :rows]
    if not causal:
        window = (window[0], window[0])
    return _heads_inside(_attend(query, key, value, scaling, causal=causal, window=window, **extras)), None


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, **options: Any) -> Tensor:
    tensors = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    out: Tensor = flashmoe.attention(*tensors, scale=scaling, **options)
    return out


def _heads_inside(out: Tensor) -> Tensor:
    return out.transpose(1, 2).contiguous()


def _obstacle(q: Tensor, k: Tensor, v: Tensor, dropout: float, position_bias: Tensor | None) -> str | None:
    if position_bias is not None:
        return "position_bias is given; flashmoe takes it as part of attn_mask only"
    return routing.find_obstacle(q, k, v, None, dropout, False, None, True)


def _sdpa(
    obstacle: str,
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
        msg = f"{obstacle}, and transformers' SDPA attention knows no {what}; use attn_implementation='eager'"
        raise ArgumentError(msg)
    routing.note_fallback(obstacle)
    if position_bias is not None:
        options = {**options, "position_bias": position_bias}
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
    """Continuous batching: one ragged batch a step, query [1, Hq, tokens, D]; the cache takes the new keys and gives all."""
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
    out = flashmoe.attention_varlen(
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


# Experts

_PROBE_ROWS = 64
_PROBE_WIDTH = 8


def _gates() -> dict[Activation, Callable[[Tensor, Tensor], Tensor]]:
    """What the activations of fused_moe do to a gate and an up value, as torch operations."""
    functional = nn.functional

    def clamped(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)

    return {
        "swiglu": lambda gate, up: functional.silu(gate) * up,
        "geglu": lambda gate, up: functional.gelu(gate) * up,
        "geglu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
        "reglu": lambda gate, up: functional.relu(gate) * up,
        "clamped_swiglu": clamped,
    }


GATES = MappingProxyType(_gates())


def recognise_gate(experts: Any) -> Activation:
    """Which activation of fused_moe the module's own gate is, found by comparing values.

    Raises ArgumentError, with the module's name, for a gate that is none of them.
    """
    if not getattr(experts, "has_gate", True):
        msg = f"{type(experts).__name__} has no gate; fused_moe computes gated experts only; use another experts implementation"
        raise ArgumentError(msg)
    generator = torch.Generator().manual_seed(0)
    gate, up = (8 * torch.randn(_PROBE_ROWS, _PROBE_WIDTH, generator=generator) for _ in range(2))
    if getattr(experts, "is_concatenated", True):
        joined = torch.cat((gate, up), dim=-1)
    else:
        joined = torch.stack((gate, up), dim=-1).flatten(-2)
    with torch.no_grad():
        found = experts._apply_gate(joined)
    for name, function in GATES.items():
        if torch.allclose(found, function(gate, up), rtol=1e-4, atol=1e-4):
            return name
    msg = (
        f"the gate of {type(experts).__name__} is none that fused_moe computes ({', '.join(GATES)}); "
        "use experts_implementation='grouped_mm' for this model"
    )
    raise ArgumentError(msg)


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [T, H], top_k_index and top_k_weights [T, k]; an index of num_experts or more means no expert here."""
    activation = getattr(experts, "_flashmoe_gate", None)
    if activation is None:
        activation = recognise_gate(experts)
        experts._flashmoe_gate = activation
    w13, w2 = experts.gate_up_proj, experts.down_proj
    if w13.dtype == torch.float32 and w13.device.type == "cuda":
        from transformers.integrations.moe import grouped_mm_experts_forward

        routing.note_fallback("float32 experts have no CUDA kernel")
        slow: Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
        return slow
    has_bias = getattr(experts, "has_bias", False)
    try:
        out = flashmoe.fused_moe(
            hidden_states.to(w13.dtype),
            w13,
            w2,
            top_k_weights if top_k_weights.dtype == w13.dtype else top_k_weights.float(),
            top_k_index,
            b13=experts.gate_up_proj_bias if has_bias else None,
            b2=experts.down_proj_bias if has_bias else None,
            activation=activation,
            layout="concat" if getattr(experts, "is_concatenated", True) else "interleaved",
            transposed=getattr(experts, "is_transposed", False),
        )
    except FlashmoeError as error:
        msg = f"{type(experts).__name__} cannot run on flashmoe: {error}; use experts_implementation='grouped_mm' for this model"
        raise type(error)(msg) from error
    return out.to(hidden_states.dtype)
