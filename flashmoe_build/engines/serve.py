"""``python -m flashmoe_build.engines.serve``: compares vLLM on flashmoe with vLLM's own attention and experts, on a small random model. Needs vLLM.

    python -m flashmoe_build.engines.serve --model moe --dtype float32

Prompts share a prefix (the prefix cache), are longer than one step takes (chunks), and are decoded together. Both engines' greedy tokens and
log-probabilities are compared up to the first token that differs. That flashmoe's layers ran is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3Config", {}),
    "window": ("Gemma2Config", {"sliding_window": 32, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 32}),
    "moe": (
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1},
    ),
    "latent": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4, "head_dim": 64, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "n_routed_experts": 8, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
            "moe_intermediate_size": 64, "first_k_dense_replace": 1,
        },
    ),
    "fp8": (
        "Qwen3MoeConfig",
        {"hidden_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1},
    ),
    "mxfp4": (
        "GptOssConfig",
        {
            "hidden_size": 256, "intermediate_size": 128, "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 32,
        },
    ),
}  # fmt: skip
WITH_EXPERTS = ("moe", "latent", "fp8", "mxfp4")
TOKENS = 24
LIMITS = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 0.2}  # allowed difference of a log-probability
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # CUDA graphs for decoding, nothing compiled
BLOCK = 32  # the smallest that vLLM's own attention accepts on CPUs


def prompts() -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)

    def some(count: int) -> list[int]:
        return [int(token) for token in torch.randint(3, SIZES["vocab_size"], (count,), generator=generator)]

    shared = some(48)
    return [*(shared + some(count) for count in (1, 9, 60)), *(some(count) for count in (1, 16, 130))]


def save_model(kind: str, folder: Path) -> None:
    import torch
    import transformers

    name, options = MODELS[kind]
    torch.manual_seed(0)
    automatic: Any = transformers.AutoModelForCausalLM
    model = automatic.from_config(getattr(transformers, name)(**{**SIZES, **options}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.float().save_pretrained(folder)
    if kind in QUANTISED:
        quantise(folder, *QUANTISED[kind])


def quantise(folder: Path, config: dict[str, Any], codes: Callable[[str, Tensor], dict[str, Tensor]]) -> None:
    """Rewrites the checkpoint: each weight is replaced by the tensors that ``codes`` returns for it."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    written: dict[str, Tensor] = {}
    for name, weight in weights.items():
        written |= codes(name, weight)
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**known, "quantization_config": config}), encoding="utf-8")


def fp8_codes(name: str, weight: Tensor) -> dict[str, Tensor]:
    """An expert's weight as e4m3 with one scale per 128 x 128 block; other weights unchanged."""
    import torch

    if ".experts." not in name:
        return {name: weight}
    tiles = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = tiles.abs().amax((1, 3)) / 448
    quantised = (tiles / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1).to(torch.float8_e4m3fn)
    return {name: quantised, f"{name}_scale_inv": scale}


def mxfp4_codes(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Random codes instead of an expert's weights [E, K, N]: blocks [E, N, K / 32, 16] and scales of 2^-5."""
    import torch

    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: weight}
    experts, inner, outer = weight.shape
    blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.full(blocks.shape[:3], 122, dtype=torch.uint8)}


LAYERS = range(SIZES["num_hidden_layers"])
QUANTISED: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], dict[str, Tensor]]]] = {
    "fp8": (
        {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": [
                f"model.layers.{at}.{part}"
                for at in LAYERS
                for part in (*(f"self_attn.{letter}_proj" for letter in "qkvo"), "mlp.gate")
            ],
        },
        fp8_codes,
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4_codes),
}  # fmt: skip


def serve(folder: Path, backend: str, dtype: str, graphs: bool = False, **more: Any) -> dict[str, Any]:
    """One engine's result: tokens and log-probabilities of each prompt, and which of our functions it called. ``more`` goes to the engine."""
    from vllm import LLM, SamplingParams

    chosen: dict[str, Any] = {"attention_backend": backend} if backend else {}
    chosen |= {"compilation_config": GRAPHS} if graphs else {"enforce_eager": True}
    engine = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype=dtype, max_model_len=512, max_num_batched_tokens=64, enable_prefix_caching=True,
        block_size=BLOCK, **chosen, **more,
    )  # fmt: skip
    calls = {"attention": 0, "experts": 0}
    for kind, module, function in COUNTED:
        found = sys.modules.get(f"flashmoe.integrations.vllm.{module}")
        if found is not None:
            setattr(found, function, counted(calls, kind, getattr(found, function)))
    how = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts()], how, use_tqdm=False)
    rows = [output.outputs[0] for output in outputs]
    steps = [[(int(t), step[t].logprob) for t, step in zip(row.token_ids, row.logprobs, strict=True)] for row in rows]
    return {"found": steps, "calls": calls}


COUNTED = (
    ("attention", "attention", "attention_out"),
    ("attention", "mla", "mla_decode"),
    ("experts", "experts", "fused_moe"),
)


def counted(calls: dict[str, int], part: str, function: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        calls[part] += 1
        return function(*arguments, **options)

    return call


def compare(theirs: Sequence[Sequence[Any]], ours: Sequence[Sequence[Any]]) -> tuple[int, int, float]:
    """(equal tokens, all tokens, the largest difference of log-probabilities before a sequence's first differing token)."""
    equal, largest = 0, 0.0
    for one, other in zip(theirs, ours, strict=True):
        for (token, value), (our_token, our_value) in zip(one, other, strict=True):
            if token != our_token:
                break
            equal, largest = equal + 1, max(largest, abs(value - our_value))
    return equal, sum(map(len, theirs)), largest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="dense")
    parser.add_argument("--dtype", choices=sorted(LIMITS), default="float32")
    parser.add_argument("--graphs", action="store_true", help="decode by CUDA graphs (on a GPU), not eagerly")
    parser.add_argument("--engine", nargs=3, metavar=("FOLDER", "BACKEND", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engine:
        folder, backend, file = options.engine
        Path(file).write_text(json.dumps(serve(Path(folder), backend, options.dtype, options.graphs)), encoding="utf-8")
        return 0
    results = {}
    with tempfile.TemporaryDirectory(prefix="flashmoe-serve-") as scratch:
        save_model(options.model, Path(scratch) / "model")
        for backend in ("", "CUSTOM"):  # one process each: vLLM keeps state
            file = Path(scratch) / f"{backend or 'own'}.json"
            command = [
                sys.executable,
                "-m",
                "flashmoe_build.engines.serve",
                "--dtype",
                options.dtype,
                *(["--graphs"] if options.graphs else []),
                "--engine",
                f"{scratch}/model",
                backend,
                str(file),
            ]
            variables = {"FLASHMOE_VLLM_EXPERTS": "1" if backend else "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
            subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT, **variables})
            results[backend] = json.loads(file.read_text(encoding="utf-8"))
    equal, total, largest = compare(results[""]["found"], results["CUSTOM"]["found"])
    calls = results["CUSTOM"]["calls"]
    ran = calls["attention"] > 0 and (calls["experts"] > 0 or options.model not in WITH_EXPERTS)
    passed = ran and largest <= LIMITS[options.dtype] and (equal == total or options.dtype != "float32")
    print(f"{'PASS' if passed else 'FAIL'} {options.model} {options.dtype}: {equal} of {total} tokens equal up to each sequence's first other one, "
          f"log-probabilities within {largest:.1e}; flashmoe: {calls['attention']} attention, {calls['experts']} expert calls")  # fmt: skip
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
