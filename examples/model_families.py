"""gpt-oss, DeepSeek, Qwen3-MoE, Gemma 3 and 4 and Llama 4 of transformers on flashmoe: tokens per second beside transformers' "sdpa".

    python examples/model_families.py                              # all of them, small
    python examples/model_families.py gpt-oss --full --layers 4    # the released widths, on a GPU: GptOssConfig's own numbers
    python examples/model_families.py deepseek --full --layers 2 --batch 32 --prompt 4096 --tokens 128

Weights are random. A model without "sdpa" is compared with "eager". Before timing, the error of flashmoe's logits against "eager" in float32 must be
at most 1.2 times the other implementation's. All runs use the float32 run's choice of experts, because with random routers rounding decides near ties.
"""

from __future__ import annotations

import argparse
import time
import warnings
from functools import partial
from typing import Any

import torch
import transformers

from flashmoe.integrations.transformers import decode_by_latents, register

SMALL = dict.fromkeys(("hidden_size", "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size"), 128) | {
    "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16, "num_local_experts": 4, "num_experts": 4,
}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # transformers' configuration, and the small sizes added to SMALL
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
    """Each layer's choice of experts: recorded in the first call, compared in the second, and replaced by the recorded one afterwards."""

    def __init__(self, model: Any) -> None:
        self.kept: dict[str, Any] = {}
        self.others: dict[str, torch.Tensor] = {}  # each layer's tokens for which the second call chose other experts
        self.hooks: list[Any] = []
        for name, module in model.named_modules():
            kind = type(module).__name__
            if kind == "Llama4Router":  # its scores [tokens, experts] are zero where an expert is not chosen
                self.hooks.append(module.register_forward_hook(partial(self.after, name)))
            elif name.endswith(".experts") and kind != "Llama4TextExperts":
                self.hooks.append(module.register_forward_pre_hook(partial(self.before, name)))

    def before(self, name: str, _: Any, given: Any) -> Any:
        return self.call(name, given, 1)

    def after(self, name: str, _: Any, given: Any, made: Any) -> Any:
        return self.call(name, made, 0)

    def call(self, name: str, given: tuple[torch.Tensor, ...], first: int) -> tuple[torch.Tensor, ...]:
        """``given``: (hidden states, indices, weights), or a router's (scores, logits); the choice begins at index ``first``."""
        if name not in self.kept:
            self.kept[name] = given[first:]
        elif name not in self.others:
            mine, kept = given[first], self.kept[name][0]
            differs = mine.sort(-1)[0] != kept.sort(-1)[0] if first else (mine > 0) != (kept > 0)
            self.others[name] = differs.any(-1)
        else:
            return *given[:first], *(k.to(g.dtype) for k, g in zip(self.kept[name], given[first:], strict=True))
        return given

    def remove(self) -> str:
        for hook in self.hooks:
            hook.remove()
        moved = torch.stack(list(self.others.values())).any(0) if self.others else torch.zeros(1)
        return f"{int(moved.sum())} of {moved.numel()} tokens" if self.others else "no token"


def choose(model: Any, attention: str, experts: str | None) -> None:
    model.set_attn_implementation(attention)
    if experts is not None and getattr(type(model), "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation(experts)


@torch.no_grad()
def logits(model: Any, prompts: torch.Tensor, attention: str, experts: str | None, dtype: torch.dtype) -> Any:
    choose(model, attention, experts)
    return model.to(dtype)(prompts).logits.float()


@torch.no_grad()
def rate(model: Any, prompts: torch.Tensor, tokens: int) -> float:
    """Tokens of prompts and answers per second, greedy decoding; the best of two runs, after one warm-up run."""
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
    rates, routing = {}, Routing(model)
    both = ((other, "eager" if device == "cpu" else "grouped_mm"), (NAMES.attention, NAMES.experts))
    dtype, exact = model.dtype, logits(model, prompts, "eager", "eager", torch.float32)
    logits(model, prompts, *both[1], dtype)
    far = [
        float(((logits(model, prompts, *side, dtype) - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())
        for side in both
    ]
    moved = routing.remove()
    assert far[1] < 1.2 * far[0] + 1e-4, f"{name}: logits {far[1]:.1e} from float32's, {other} {far[0]:.1e}"
    for attention, experts in both:
        choose(model, attention, experts)
        if attention == NAMES.attention and name == "deepseek":
            decode_by_latents(model)
        rates[attention] = rate(model, prompts, options.tokens)
    print(
        f"{name}, {device}: {rates[NAMES.attention]:.0f} tokens/s, {other} {rates[other]:.0f}; logits {far[1]:.0e} from float32's, "
        f"{other} {far[0]:.0e}; other experts than float32 for {moved}"
    )
