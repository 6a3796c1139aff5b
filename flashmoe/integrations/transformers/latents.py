"""Decoding on the latents that transformers' DeepSeek layers cache, instead of expanding all of them to keys and values in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashmoe.errors import ArgumentError
from flashmoe.mla.api import VALUE_DIM, mla_decode

ROTARY_DIM = 64


@dataclass(frozen=True)
class Latents:
    """Passed to the attention in place of keys and of values: latents [B, 1, S, 512] and rotary columns [B, 1, S, 64]."""

    layer: Any
    latent: Tensor
    rotary: Tensor

    def expand(self) -> tuple[Tensor, Tensor]:
        """Keys and values of each head, computed by the layer's own code."""
        expanded: tuple[Tensor, Tensor] = type(self.layer).expand_kv(self.layer, self.latent, self.rotary)
        return expanded

    def attend(self, query: Tensor, scale: float, lengths: Tensor | None) -> Tensor:
        """Attention of one token [B, H, 1, nope + 64] over the first ``lengths`` [B] keys, or all: [B, 1, H, value dim]."""
        batch, heads, _, width = query.shape
        weight = self.layer.kv_b_proj.weight.unflatten(0, (heads, -1))
        to_keys, to_values = weight[:, : width - ROTARY_DIM], weight[:, width - ROTARY_DIM :]
        free, rotary = query.transpose(1, 2).split((width - ROTARY_DIM, ROTARY_DIM), -1)
        absorbed = torch.cat((torch.einsum("bshn,hnc->bshc", free, to_keys), rotary), -1)
        cache = torch.cat((self.latent, self.rotary), -1).squeeze(1)
        if lengths is None:
            lengths = torch.full((batch,), cache.shape[1], dtype=torch.int32, device=cache.device)
        out = mla_decode(absorbed, cache, cache_seqlens=lengths, scale=scale)
        return torch.einsum("bshc,hvc->bshv", out, to_values).contiguous()


def decode_by_latents(model: nn.Module) -> int:
    """Make the layers with multi-head latent attention decode with :func:`flashmoe.mla_decode`; returns their number::

        model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=names.attention)
        decode_by_latents(model)

    A step of one token without padding then projects its query into the latent space, instead of expanding the whole cache to keys and values.
    Prompts, steps of several tokens, padded batches, gradients and other attention implementations run as before. For DeepSeek-V2 and V3,
    GLM-4-MoE-lite and other models whose layers have a latent of 512, 64 rotary columns and a method ``expand_kv``, which is set on each
    layer (``del layer.expand_kv`` undoes it). Whether the method does what is expected is checked by comparing values.

    Raises ArgumentError if the model has no such layer.
    """
    layers: list[Any] = [layer for layer in model.modules() if _is_plain(layer)]
    if not layers:
        msg = (
            f"no layer of {type(model).__name__} caches latents of {VALUE_DIM} and {ROTARY_DIM} values that expand_kv can expand; "
            f"remove this call, or use transformers 5.17 or later for DeepSeek-V2, V3 and GLM-4-MoE-lite"
        )
        raise ArgumentError(msg)
    for layer in layers:
        layer.expand_kv = _Expand(layer)
    return len(layers)


class _Expand:
    """Replaces ``expand_kv`` of one layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Any, Any]:
        from flashmoe.integrations.transformers.attention import NAME

        latents = Latents(self.layer, kv_nope, k_rot)
        is_ours = self.layer.config._attn_implementation == NAME
        wants_gradient = torch.is_grad_enabled() and (
            kv_nope.requires_grad or self.layer.kv_b_proj.weight.requires_grad
        )
        return (latents, latents) if is_ours and not wants_gradient else latents.expand()


@torch.no_grad()
def _is_plain(layer: Any) -> bool:
    """Whether each head's keys are kv_b_proj's first columns followed by the rotary ones, and its values the remaining columns."""
    projection = getattr(layer, "kv_b_proj", None)
    sizes = (getattr(layer, "kv_lora_rank", None), getattr(layer, "qk_rope_head_dim", None))
    if not hasattr(type(layer), "expand_kv") or sizes != (VALUE_DIM, ROTARY_DIM) or type(projection) is not nn.Linear:
        return False
    weight = projection.weight
    if projection.bias is not None or weight.device.type == "meta":
        return False
    random = torch.Generator().manual_seed(0)
    latent, rotary = (torch.randn(1, 1, 2, size, generator=random).to(weight) for size in sizes)
    keys, values = type(layer).expand_kv(layer, latent, rotary)
    expected = (latent[0, 0] @ weight.mT).unflatten(1, (keys.shape[1], -1)).transpose(0, 1)
    free, rest = expected.split((keys.shape[3] - ROTARY_DIM, values.shape[3]), -1)
    whole = torch.cat((free, rotary[0].expand(len(free), -1, -1)), -1)
    return all(torch.allclose(a, b[0], rtol=0.02, atol=0.02) for a, b in ((whole, keys), (rest, values)))
