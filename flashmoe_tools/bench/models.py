"""Tokens per second of complete models in transformers, with flashmoe's attention and experts and with others.

    python -m flashmoe_tools.bench.models --json models.json           a dense model of 1.1B parameters and a mixture of the same cost
    python -m flashmoe_tools.bench.models --size tiny --rounds 3       to see that it runs; also on the CPU

Weights are random, text is random tokens. Tasks: ``generate`` (greedy, a dynamic cache, every operation launched by
Python), ``static`` (a static cache, the decoding step compiled and replayed as a CUDA graph) and ``train`` (a
fine-tuning step: forward, backward, SGD). Contenders are pairs (attention, experts) of transformers' names; those that
cannot be loaded are reported and left out. Before anything is timed, each contender's logits are compared with float32,
and its loss and gradient norm with transformers' own. Then the contenders alternate, round by round (except in
``static``), and a ratio is the median over the rounds. A contender that takes more than 8 times the fastest one's time
in the first round is not timed again.
"""

import argparse
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashmoe._extension import library_path
from flashmoe.errors import ArgumentError, ExitCode, FlashmoeError
from flashmoe.integrations.transformers import register
from flashmoe_tools.report import (
    Check,
    Report,
    Verdict,
    built_commit,
    host_environment,
    typed_command,
    utc_now,
    write_report,
)

EAGER_EXPERTS = "eager"
OURS = "fmoe"
ATTENTION_LIMIT = 1.25  # multiple of the baseline's mean error of logits
TRAINING_LIMIT = 0.02  # relative to the baseline's loss and gradient norm
SLOW = 8.0  # multiple of the fastest contender's first sample: slower ones are not timed again


@dataclass(frozen=True)
class Size:
    """``layers`` of ``width``; experts have ``expert_width``, and each token uses ``active`` of ``experts``."""

    width: int
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    mlp: int
    experts: int
    active: int
    expert_width: int
    prompt: int
    new_tokens: int
    rows: int  # sequences of ``length`` tokens in a training step
    length: int
    vocabulary: int = 32000

    def config(self, model: str) -> Any:
        transformers: Any = import_module("transformers")
        shared: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads_kv,
            "head_dim": self.head_dim,
            "max_position_embeddings": 8192,
            "intermediate_size": self.mlp,
        }
        if model == "dense":
            return transformers.LlamaConfig(**shared)
        mixture = {"num_experts": self.experts, "num_experts_per_tok": self.active}
        return transformers.Qwen3MoeConfig(
            **shared, **mixture, moe_intermediate_size=self.expert_width, decoder_sparse_step=1
        )


SIZES = {
    "1b": Size(2048, 16, 32, 8, 64, 8192, 64, 8, 1024, 512, 64, 4, 2048),
    "tiny": Size(64, 2, 4, 2, 16, 96, 8, 2, 32, 16, 4, 2, 24, 128),
}


@dataclass(frozen=True)
class Contender:
    attention: str
    experts: str | None = None

    @property
    def name(self) -> str:
        return self.attention if self.experts is None else f"{self.attention}+{self.experts}"

    @property
    def is_ours(self) -> bool:
        return self.attention == OURS and self.experts in (None, OURS)

    def use(self, model: Any) -> None:
        model.set_attn_implementation(self.attention)
        if self.experts is not None:
            model.set_experts_implementation(self.experts)


CONTENDERS = {
    "dense": tuple(map(Contender, (OURS, "sdpa", "flash_attention_3", "flash_attention_2", "eager"))),
    "moe": (
        Contender(OURS, OURS),
        Contender("sdpa", "grouped_mm"),
        Contender("sdpa", OURS),
        Contender(OURS, "grouped_mm"),
        Contender("sdpa", EAGER_EXPERTS),
    ),
}
BASELINE = {"dense": CONTENDERS["dense"][1], "moe": CONTENDERS["moe"][1]}
TASKS = ("generate", "generate-16", "static", "train")


def build(size: Size, model: str, device: str) -> Any:
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    register()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        built = transformers.AutoModelForCausalLM.from_config(size.config(model), dtype=dtype)
    built.generation_config.eos_token_id = built.generation_config.bos_token_id = None
    built.generation_config.pad_token_id = 0
    return built


def usable(model: Any, contender: Contender, device: str) -> str:
    """Why this contender cannot run here, or an empty text."""
    try:
        contender.use(model)
        with torch.no_grad():
            model(torch.zeros(1, 8, dtype=torch.long, device=device))
    except (ImportError, ValueError, TypeError, AttributeError, RuntimeError, FlashmoeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return ""


# Checks


def _logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(tokens, use_cache=False).logits.float()
    return out


def _convert(model: Any, dtype: torch.dtype) -> None:
    """Converts only the parameters: the rotary frequencies are float32 in every model."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def check_logits(model: Any, contenders: Sequence[Contender], baseline: Contender, tokens: Tensor) -> list[Check]:
    """Compares mean errors against transformers' eager code with the same weights in float32.

    float32 represents bfloat16 weights exactly.
    """
    dtype = model.dtype
    Contender("eager", EAGER_EXPERTS if baseline.experts else None).use(model)
    _convert(model, torch.float32)
    reference = _logits(model, tokens)
    _convert(model, dtype)
    errors = {}
    for contender in (baseline, *contenders):
        contender.use(model)
        errors[contender] = float((_logits(model, tokens) - reference).abs().mean())
    limit = ATTENTION_LIMIT * errors[baseline] + 1e-5
    return [
        Check(
            f"logits {contender.name}",
            Verdict.PASS if errors[contender] <= limit else Verdict.FAIL,
            f"mean error {errors[contender]:.2e}",
            f"at most {limit:.2e}, {ATTENTION_LIMIT} of {baseline.name}'s",
        )
        for contender in contenders
    ]


def _gradients(model: Any, tokens: Tensor) -> tuple[float, float]:
    model.zero_grad(set_to_none=True)
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    norms = [parameter.grad.float().norm() for parameter in model.parameters() if parameter.grad is not None]
    found = float(loss.detach()), float(torch.stack(norms).norm())
    model.zero_grad(set_to_none=True)
    return found


def check_training(model: Any, contenders: Sequence[Contender], baseline: Contender, tokens: Tensor) -> list[Check]:
    baseline.use(model)
    expected = _gradients(model, tokens)
    checks = []
    for contender in contenders:
        contender.use(model)
        found = _gradients(model, tokens)
        differences = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
        checks.append(
            Check(
                f"training {contender.name}",
                Verdict.PASS if max(differences) <= TRAINING_LIMIT else Verdict.FAIL,
                f"loss {found[0]:.4f}, gradient norm {found[1]:.4f}",
                f"loss {expected[0]:.4f}, gradient norm {expected[1]:.4f}, within {TRAINING_LIMIT:.0%}",
            )
        )
    return checks


# Tasks: each function returns a call and the number of tokens that it generates or trains on.


def _generate(model: Any, size: Size, device: str, rows: int, *, is_static: bool) -> tuple[Callable[[], Any], int]:
    prompt = torch.randint(3, size.vocabulary, (rows, size.prompt), device=device)
    options: dict[str, Any] = {"max_new_tokens": size.new_tokens, "min_new_tokens": size.new_tokens, "do_sample": False}
    if is_static:
        options["cache_implementation"] = "static"
    mask = torch.ones_like(prompt)
    return lambda: model.generate(prompt, attention_mask=mask, **options), rows * size.new_tokens


def _train(model: Any, size: Size, device: str) -> tuple[Callable[[], Any], int]:
    tokens = torch.randint(3, size.vocabulary, (size.rows, size.length), device=device)

    def step() -> None:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        with torch.no_grad():
            parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
            torch._foreach_add_(parameters, [parameter.grad for parameter in parameters], alpha=-1e-6)
        model.zero_grad(set_to_none=True)

    return step, tokens.numel()


def prepare(task: str, model: Any, size: Size, device: str) -> tuple[Callable[[], Any], int]:
    model.train(task == "train")
    if task == "train":
        return _train(model, size, device)
    return _generate(model, size, device, 16 if task == "generate-16" else 1, is_static=task == "static")


def seconds_of(call: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(
    model: Any, task: str, contenders: Sequence[Contender], size: Size, device: str, rounds: int, limit: float
) -> list[dict[str, Any]]:
    """One row per contender. Rounds stop after ``limit`` seconds, but at least three are run."""
    call, tokens = prepare(task, model, size, device)
    samples: dict[Contender, list[float]] = {contender: [] for contender in contenders}
    if task == "static":  # two sets of recorded graphs cannot share a process, so contenders do not alternate
        for contender in contenders:
            torch.compiler.reset()
            model.__dict__.pop("_compiled_call", None)
            contender.use(model)
            for _ in range(3):
                call()
            samples[contender] = [seconds_of(call, device) for _ in range(rounds)]
        return _rows(task, samples, tokens)
    for contender in contenders:
        contender.use(model)
        call()
    started = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - started > limit:
            break
        for contender in (*contenders[done % len(contenders) :], *contenders[: done % len(contenders)]):
            contender.use(model)
            samples[contender].append(seconds_of(call, device))
        if done == 0:
            fastest = min(times[0] for times in samples.values())
            contenders = [one for one in contenders if samples[one][0] <= SLOW * fastest]
            started = time.perf_counter()
    return _rows(task, samples, tokens)


def _rows(task: str, samples: dict[Contender, list[float]], tokens: int) -> list[dict[str, Any]]:
    ours = next((times for contender, times in samples.items() if contender.is_ours), None)
    rows = []
    for contender, times in samples.items():
        row: dict[str, Any] = {
            "task": task,
            "contender": contender.name,
            "tokens_per_s": round(tokens / statistics.median(times), 1),
            "ms": [round(1e3 * seconds, 3) for seconds in sorted(times)],
        }
        if ours is not None and not contender.is_ours:
            row["ours_is_faster_by"] = round(statistics.median(b / a for a, b in zip(ours, times, strict=False)), 3)
        rows.append(row)
    return rows


# The program


def run(
    size: Size, device: str, models: Sequence[str], tasks: Sequence[str], rounds: int, limit: float
) -> tuple[list[Check], list[Any]]:
    checks: list[Check] = []
    rows: list[Any] = []
    for name in models:
        model = build(size, name, device)
        contenders = []
        for contender in CONTENDERS[name]:
            problem = usable(model, contender, device)
            if problem:
                checks.append(Check(f"{name} {contender.name}", Verdict.SKIP, problem))
            else:
                contenders.append(contender)
        tokens = torch.randint(3, size.vocabulary, (1, min(size.length, 256)), device=device)
        found = check_logits(model, contenders, BASELINE[name], tokens)
        if "train" in tasks:
            found += check_training(model, _able(contenders, "train", BASELINE[name]), BASELINE[name], tokens)
        checks += [Check(f"{name} {one.name}", one.verdict, one.found, one.expected) for one in found]
        for one in checks:
            if one.name.startswith(name):
                print(f"{one.verdict} {one.name}: {one.found} {one.expected and f'({one.expected})'}", flush=True)
        for task in tasks:
            for row in measure(model, task, _able(contenders, task, BASELINE[name]), size, device, rounds, limit):
                rows.append({"model": name, **row})
                print(_line(rows[-1]), flush=True)
        del model
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return checks, rows


def _able(contenders: Sequence[Contender], task: str, baseline: Contender) -> list[Contender]:
    """Leaves out contenders that are too expensive for the task.

    Eager attention keeps the scores of every layer, which do not fit on a GPU; compiling takes a minute per contender.
    """
    if task == "static":
        return [one for one in contenders if one.is_ours or one == baseline]
    return [one for one in contenders if not (task == "train" and one.attention == "eager")]


def _line(row: dict[str, Any]) -> str:
    ratio = row.get("ours_is_faster_by")
    spread = f"{row['ms'][0]:.1f} to {row['ms'][-1]:.1f} ms, {len(row['ms'])} samples"
    text = f"{row['model']:6} {row['task']:12} {row['contender']:18} {row['tokens_per_s']:>10.1f} tokens/s ({spread})"
    return text if ratio is None else f"{text}, ours {ratio:.3f}x"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints, writes the report; FAIL if a contender's results are wrong."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m flashmoe_tools.bench.models", description=__doc__
    )
    parser.add_argument("--size", choices=tuple(SIZES), default="1b")
    parser.add_argument("--model", action="append", choices=tuple(CONTENDERS), help="this model only (may be repeated)")
    parser.add_argument("--task", action="append", choices=TASKS, help="this task only (may be repeated)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--limit", type=float, default=20.0, help="time limit for the rounds of a task; at least three are run"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args(arguments)
    started, clock = utc_now(), time.monotonic()
    models, tasks = options.model or tuple(CONTENDERS), options.task or TASKS
    try:
        register()
    except ArgumentError as error:
        print(f"ArgumentError: {error}", file=sys.stderr)
        return ExitCode.FAILED
    warnings.simplefilter("ignore")
    checks, rows = run(SIZES[options.size], options.device, models, tasks, max(3, options.rounds), options.limit)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    data = {"size": options.size, "device": device, "transformers": version("transformers"), "rows": rows}
    environment = host_environment() | {
        "torch": torch.__version__,
        "commit": built_commit(library_path()),
        "torch_threads": torch.get_num_threads(),
    }
    command = typed_command("flashmoe_tools.bench.models")
    seconds = round(time.monotonic() - clock, 1)
    report = Report("models", tuple(checks), data, environment, command, started, seconds)
    if options.json:
        write_report(options.json, report)
    print(f"models {report.verdict}")
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
