"""``python -m flashmoe_build.engines.speed``: vLLM's tokens per second with flashmoe and with its own attention. Needs vLLM and a GPU.

    python -m flashmoe_build.engines.speed --layers 36 --rounds 2 --json speed.json

The model has the shape of Qwen3-8B (or Qwen3-30B-A3B, --model moe) and random weights. Single: one request. Burst: prompts of one length at once, the median
of three. Sustained: more requests than run at a time, of random lengths. Long: few requests with long prompts. Each engine runs in a
separate process; the two alternate.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flashmoe_build.engines.serve import ENVIRONMENT, GRAPHS

COMMON = {
    "vocab_size": 151936, "num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8,
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
}  # fmt: skip
Requests = list[tuple[int, int]]  # (tokens of the prompt, tokens to generate)


def workloads(scale: float) -> dict[str, tuple[int, Requests]]:
    """{name: (repetitions, requests)}; ``scale`` shortens every prompt and answer, for a test."""
    draw = random.Random(0)

    def some(tokens: int) -> int:
        return max(1, int(tokens * scale))

    mixed = [(some(draw.randint(64, 2048)), some(draw.randint(64, 256))) for _ in range(256)]
    return {
        "single": (1, [(some(512), some(128))]),
        "burst": (3, [(some(512), some(128))] * 64),
        "sustained": (1, mixed),
        "long": (1, [(some(16384), some(128))] * 8),
    }


def build(folder: Path, backend: str, compiled: bool = False, **more: Any) -> Any:
    """vLLM's engine on the model of ``folder``'s config.json, with random weights. ``more`` goes to the engine."""
    from vllm import LLM

    chosen: dict[str, Any] = {"attention_backend": backend} if backend else {}
    if not compiled:
        chosen["compilation_config"] = {**GRAPHS, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128]}
    return LLM(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=20480, max_num_seqs=128,
        max_num_batched_tokens=8192, enable_prefix_caching=False, **chosen, **more,
    )  # fmt: skip


def measure(engine: Any, scale: float) -> Iterator[tuple[str, float]]:
    """Each workload and its generated tokens per second."""
    from vllm import SamplingParams

    draw = random.Random(1)

    def generate(requests: Requests) -> float:
        prompts = [{"prompt_token_ids": [draw.randrange(3, 50000) for _ in range(tokens)]} for tokens, _ in requests]
        how = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in requests
        ]
        start = time.perf_counter()
        outputs = engine.generate(prompts, how, use_tqdm=False)
        elapsed = time.perf_counter() - start
        return sum(len(output.outputs[0].token_ids) for output in outputs) / elapsed

    generate([(300, 16)] * 16)
    for name, (times, requests) in workloads(scale).items():
        yield name, statistics.median(generate(requests) for _ in range(times))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="dense")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rounds", type=int, default=2, help="processes of each engine, in alternation")
    parser.add_argument(
        "--compiled", action="store_true", help="vLLM's default, torch.compile, not only CUDA graphs for decoding"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of prompts and answers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", nargs=3, metavar=("FOLDER", "BACKEND", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engine:
        folder, backend, file = options.engine
        Path(file).write_text(
            json.dumps(dict(measure(build(Path(folder), backend, options.compiled), options.scale))), encoding="utf-8"
        )
        return 0
    found: dict[str, list[dict[str, float]]] = {"vLLM's own": [], "flashmoe": []}
    with tempfile.TemporaryDirectory(prefix="flashmoe-speed-") as scratch:
        config = {**COMMON, **MODELS[options.model], "num_hidden_layers": options.layers}
        (Path(scratch) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for turn in range(options.rounds):
            for name in list(found)[:: 1 if turn % 2 == 0 else -1]:
                found[name].append(_engine(options, scratch, name))
                print(
                    f"{name}: " + ", ".join(f"{work} {rate:.0f} tokens/s" for work, rate in found[name][-1].items()),
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(found))
    return 0


def _engine(options: argparse.Namespace, scratch: str, name: str) -> dict[str, float]:
    file = Path(scratch) / "found.json"
    command = [
        sys.executable,
        "-m",
        "flashmoe_build.engines.speed",
        "--scale",
        str(options.scale),
        *(["--compiled"] if options.compiled else []),
    ]
    command += ["--engine", scratch, "CUSTOM" if name == "flashmoe" else "", str(file)]
    variables = {"FLASHMOE_VLLM_EXPERTS": "1" if name == "flashmoe" and options.model == "moe" else "0"}
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT, **variables})
    rates: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return rates


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: medians over the processes, and the ratio of flashmoe to vLLM."""
    rows = ["| workload | " + " | ".join(found) + " | ratio |", "|---|" + "---|" * (len(found) + 1)]
    for work in next(iter(found.values()))[0]:
        rates = [statistics.median(run[work] for run in runs) for runs in found.values()]
        rows.append(f"| {work} | " + " | ".join(f"{rate:.0f}" for rate in rates) + f" | {rates[1] / rates[0]:.3f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
