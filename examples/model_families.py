"""gpt-oss, DeepSeek, Qwen3-MoE, Gemma 3 and 4 and Llama 4 of transformers on flashmoe: tokens per second beside transformers' "sdpa".

    python examples/model_families.py                              # all of them, small
    python examples/model_families.py gpt-oss --full --layers 4    # the released widths, on a GPU: GptOssConfig's own numbers
    python examples/model_families.py deepseek --full --layers 2 --batch 32 --prompt 4096 --tokens 128

Weights are random. A model that does not take "sdpa" is compared with "eager". Before the timing both give logits that must agree
for each token, with the experts that the first chose: random routers' choices are near ties, which a rounding decides otherwise for some tokens.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
import transformers

from flashmoe.integrations.transformers import decode_by_latents, register

SMALL = dict.fromkeys(("hidden_size", "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size"), 128) | {
    "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16, "num_local_experts": 4, "num_experts": 4,
}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # transformers' configuration, and what makes it small beside SMALL
    "gpt-oss": ("GptOssConfig", {"head_dim": 32, "num_experts_per_tok": 2}),
    "deepseek": ("DeepseekV3Config", {**LATENT, "num_experts_per_tok": 2, "first_k_dense_replace": 1}),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 32, "num_experts_per_tok": 2}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32}),
    "gemma4": (
        "Gemma4TextConfig",
        {"head_dim": 32, "global_head_dim": 64, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 32},
    ),
    "llama4": ("Llama4TextConfig", {"head_dim": 32, "num_experts_per_tok": 1}),
}
NAMES = register()


def build(name: str, options: argparse.Namespace, device: str) -> Any:
    kind, small = MODELS[name]
    config = getattr(transformers, kind)(num_hidden_layers=options.layers, **({} if options.full else SMALL | small))
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    automatic: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        model = automatic.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return model.eval()


class Routing:
    """What is handed to each layer's experts: kept in the first call, counted in the second, and put in the place of its own from then on."""

    def __init__(self, model: Any) -> None:
        self.kept: dict[str, Any] = {}
        self.others: dict[str, torch.Tensor] = {}  # of each layer: the tokens for which the second call chose others
        named = [(name, module) for name, module in model.named_modules() if name.endswith(".experts")]
        self.hooks = [
            module.register_forward_pre_hook(lambda _, given, name=name: self.call(name, given))
            for name, module in named
        ]

    def call(self, name: str, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if len(given) < 3:  # Llama 4 multiplies each expert's rows with its scores before
            return given
        if name not in self.kept:
            self.kept[name] = given[1:]
        elif name not in self.others:
            self.others[name] = (given[1].sort(-1)[0] != self.kept[name][0].sort(-1)[0]).any(-1)
            return given
        return given[0], *self.kept[name]

    def remove(self) -> str:
        for hook in self.hooks:
            hook.remove()
        moved = torch.stack(list(self.others.values())).any(0) if self.others else torch.zeros(1)
        return f"{int(moved.sum())} of {moved.numel()} tokens" if self.others else "no token"


@torch.no_grad()
def rate(model: Any, prompts: torch.Tensor, tokens: int) -> float:
    """Tokens of prompts and answers per second, greedy; the best of two, after one that is not counted."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        model.generate(prompts, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0).cpu()
        seconds.append(time.perf_counter() - start)
    return (prompts.numel() + prompts.shape[0] * tokens) / min(seconds[1:])


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model", nargs="?", choices=sorted(MODELS), help="all of them by default")
parser.add_argument("--full", action="store_true", help="the widths of transformers' configuration, not small ones")
for option, number in (("layers", 2), ("batch", 2), ("prompt", 48), ("tokens", 8)):
    parser.add_argument(f"--{option}", type=int, default=number)
options = parser.parse_args()
warnings.filterwarnings("ignore", module="transformers")
device = "cuda" if torch.cuda.is_available() else "cpu"
for name in [options.model] if options.model else MODELS:
    model = build(name, options, device)
    prompts = torch.randint(3, model.config.vocab_size, (options.batch, options.prompt), device=device)
    other = "sdpa" if model._supports_sdpa else "eager"
    logits, rates, routing = {}, {}, Routing(model)
    takes_experts = getattr(type(model), "_can_set_experts_implementation", lambda: False)()
    both = ((other, "eager" if device == "cpu" else "grouped_mm"), (NAMES.attention, NAMES.experts))
    for attention, experts in (both[0], both[1], both[1]):
        model.set_attn_implementation(attention)
        if experts is not None and takes_experts:
            model.set_experts_implementation(experts)
        with torch.no_grad():
            logits[attention] = model(prompts).logits.float()
    moved = routing.remove()
    for attention, experts in both:
        model.set_attn_implementation(attention)
        if experts is not None and takes_experts:
            model.set_experts_implementation(experts)
        if attention == NAMES.attention and name == "deepseek":
            decode_by_latents(model)
        rates[attention] = rate(model, prompts, options.tokens)
    rows = (logits[NAMES.attention] - logits[other]).norm(dim=-1) / logits[other].norm(dim=-1)
    spread = float(rows.max())
    assert spread < (1e-4 if device == "cpu" else 0.1), f"{name}: logits differ by {spread:.1e}"
    print(
        f"{name}, {device}: {rates[NAMES.attention]:.0f} tokens/s, {other} {rates[other]:.0f}; logits within {spread:.0e}, "
        f"other experts chosen for {moved}"
    )
