"""flashmoe's attention in Hugging Face transformers, as an implementation beside "sdpa" and "eager". The model is small and random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import flashmoe


def flashmoe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, Sq, D], key and value [B, Hkv, Sk, D]; returns [B, Sq, Hq, D], as transformers expects.

    Without a mask tensor flashmoe's causal mask is used, which is aligned bottom-right and so fits a query that continues a cache. For a
    padded batch the mask tensor includes the causal rule. Dropout goes to torch (FLASHMOE_FALLBACK=warn would say so).
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is None and dropout == 0.0:
        out = flashmoe.attention(query, key, value, causal=causal, scale=scaling)
    else:
        out = flashmoe.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=True
        )
    return out.transpose(1, 2).contiguous(), None


# Any name without "flash": transformers treats names with it as its own loader of FlashAttention.
AttentionInterface.register("fused", flashmoe_attention)
AttentionMaskInterface.register("fused", sdpa_mask)  # no mask tensor if a causal mask is enough

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32
config = LlamaConfig(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).to(device, dtype).eval()
tokens = torch.randint(128, (2, 70), device=device)
results = {}
for implementation in ("sdpa", "fused"):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        logits = model(tokens).logits
        written = model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0)
    results[implementation] = logits, written
difference = (results["sdpa"][0] - results["fused"][0]).abs().max().item()
print(f"largest difference of the logits: {difference:.1e}; written: {results['fused'][1][0, -8:].tolist()}")
assert difference < 2e-2
assert torch.equal(results["sdpa"][1], results["fused"][1])
