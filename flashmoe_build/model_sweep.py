"""``./nox -s models``, after a build: every causal language model in the installed transformers, shrunk, with random weights.

Each model's logits with flashmoe's attention (and experts, if it has any) are compared with transformers' eager code, in float32 on the
CPU, and the operators that ran are counted: a model that did not reach flashmoe does not PASS. docs/guides/models.md shows the report.
"""

import argparse
import json
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from flashmoe.errors import ArgumentError
from flashmoe_build.program import ROOT, Stopwatch, finish
from flashmoe_tools.progress import Progress
from flashmoe_tools.report import Check, Verdict, write_report

TOO_LARGE = "cannot be made small here"
REPORTS = "docs/results/*-cpu/models.json"
LIMIT_S = 90
MOST_PARAMETERS = 20e6
TOLERANCE = 2e-4  # for logits with a standard deviation of about 1
# Sizes under all names that configurations use; a configuration takes the ones it has.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "n_words"), 128),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "word_embed_proj_dim", "embedding_size", "emb_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "mlp_only_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 16, "first_k_dense_replace": 1, "sliding_window": 7,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    "n_group": 1, "topk_group": 1, "num_global_layers": 1, "image_size": 32, "patch_size": 8,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "query_pre_attn_scalar": 16, "vocab_size_per_layer_input": 128,
}  # fmt: skip

SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global"], 2]]}, "xmod": {"default_language": "en_XX"}, "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        msg = f"longer than {seconds} s"
        raise TimeoutError(msg)

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def small(config_class: Any) -> dict[str, Any]:
    """Arguments that shrink a configuration and the ones nested in it (text, images)."""
    from transformers import CONFIG_MAPPING

    known = config_class().to_dict()
    given = {name: value for name, value in SMALL.items() if name in known}
    if known.get("kv_lora_rank"):  # latent attention: one KV head per query head, and head_dim is the rotated part
        given |= {"num_key_value_heads": SMALL["num_attention_heads"]} | (
            {"head_dim": SMALL["qk_rope_head_dim"]} if "head_dim" in known else {}
        )
    if isinstance(known.get("layer_types"), list):
        given["layer_types"] = known["layer_types"][-2:]  # the last layer of a period has full attention
    for name, inner in getattr(config_class, "sub_configs", {}).items():
        if isinstance(known.get(name), dict):
            kind = known[name].get("model_type", "")
            given[name] = small(CONFIG_MAPPING[kind] if inner.__name__ == "AutoConfig" else inner) | {
                "model_type": kind
            }
    return given | SPECIAL.get(config_class.model_type, {})


def small_model(config_class: Any) -> Any:
    """A model of two layers. Raises whatever transformers raises, and ValueError for a model that stays large."""
    import torch
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    config = config_class(**small(config_class))
    with torch.device("meta"):
        size = sum(p.numel() for p in make(config).parameters())
    if size > MOST_PARAMETERS:
        msg = f"{size / 1e6:.0f} million parameters although made small"
        raise ValueError(msg)
    torch.manual_seed(0)
    model = make(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5 / parameter.shape[-1] ** 0.5 if "embed" not in name else 1.0)
    return model


def compare(model: Any, tokens: Any, eager: Any) -> tuple[float, Counter[str], str]:
    """The largest difference of logits to eager code, how often each of our operators ran, and why experts did not run."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from flashmoe.integrations.transformers import register

    ran: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "flashmoe":
                ran["experts" if "moe" in function._schema.name.partition("::")[2] else "attention"] += 1
            return function(*args, **(kwargs or {}))

    names = register()
    refused = ""
    with torch.no_grad():
        model.set_attn_implementation(names.attention)
        if names.experts is not None and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation(names.experts)
        try:
            with Count():
                ours = model(tokens, use_cache=False).logits
        except ArgumentError as error:  # experts that fused_moe does not support
            refused = str(error).partition(";")[0]
            ran.clear()
            model.set_experts_implementation("eager")
            with Count():
                ours = model(tokens, use_cache=False).logits
    return float((ours - eager).abs().max() / eager.std().clamp(min=1e-6)), ran, refused


def check_model(kind: str) -> tuple[Check, dict[str, Any]]:
    import torch
    from transformers import CONFIG_MAPPING

    from flashmoe.integrations.transformers.models import unsupported_reason

    row: dict[str, Any] = {"model": kind}
    step = ""
    try:
        with at_most(LIMIT_S), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = TOO_LARGE
            model = small_model(CONFIG_MAPPING[kind])
            if reason := unsupported_reason(type(model)):
                row["why"] = f"refused: {reason}"
                return Check(kind, Verdict.SKIP, row["why"]), row
            tokens = torch.randint(3, 128, (2, 19))
            with torch.no_grad():
                eager = model(tokens, use_cache=False).logits
            step = "does not select attention by name"
            difference, ran, refused = compare(model, tokens, eager)
            row |= {"difference": float(f"{difference:.1e}")} | ({"why": refused} if refused else {})
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:60]
        row["why"] = f"{step}: {type(error).__name__}: {first}"
        return Check(kind, Verdict.SKIP, row["why"]), row
    row |= ran
    found = f"{difference:.1e}; attention {ran['attention']}, experts {ran['experts']} calls"
    if not ran:
        row["why"] = "its layers call no attention of transformers' registry"
        return Check(kind, Verdict.SKIP, row["why"]), row
    verdict = Verdict.PASS if difference <= TOLERANCE else Verdict.FAIL
    return Check(kind, verdict, found, f"at most {TOLERANCE:g}"), row


def line_of(row: dict[str, Any]) -> str:
    """What ran, the difference, and why something did not run: a row of the page, as stored in the report."""
    runs = ", ".join(part for part in ("attention", "experts") if row.get(part))
    is_equal = bool(runs) and row["difference"] <= TOLERANCE
    why = row.get("why", "" if is_equal else "differs from eager code").replace("|", "/")
    return f"{runs if is_equal else 'no'}|{row['difference']:.0e}|{why}" if runs else f"no||{why}"


def table(root: Path = ROOT) -> tuple[Sequence[str], list[Sequence[str]]]:
    """The newest report, grouped by what runs on flashmoe and by why the rest does not; for each group the largest difference."""
    path = max(root.glob(REPORTS), default=None)
    data = json.loads(path.read_text(encoding="utf-8"))["data"] if path else {"models": {}}
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for kind, line in data["models"].items():
        runs, difference, why = line.split("|")
        is_tried = not why.startswith(TOO_LARGE)
        reason = why.partition(" (")[0] if is_tried else "the sweep cannot make them small"
        groups.setdefault((runs if is_tried else "not tried", reason), []).append((kind, difference))
    order = sorted(
        groups, key=lambda group: (group[0] in ("no", "not tried"), group[0] == "not tried", -len(groups[group]))
    )
    rows = [
        (runs, f"{len(groups[runs, why])}", ", ".join(sorted(kind for kind, _ in groups[runs, why])),
         max((difference for _, difference in groups[runs, why]), key=lambda one: float(one or 0)), why)
        for runs, why in order
    ]  # fmt: skip
    return ("runs on flashmoe", "models", "which", "largest difference", "why not"), [*rows]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "reports" / "models.json")
    parser.add_argument("--only", metavar="A,B", help="only these model types")
    options = parser.parse_args(arguments)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS

    chosen = options.only.split(",") if options.only else sorted(KINDS)
    clock, checks, rows = Stopwatch(), [], []
    with Progress("models", len(chosen)) as progress:
        for kind in chosen:
            check, row = check_model(kind)
            checks.append(check)
            rows.append(row)
            progress.advance(f"{kind} {check.verdict}")
    for check in checks:
        print(f"{check.verdict} {check.name}: {check.found}")
    groups = [[one for one in checks if one.verdict is verdict] for verdict in (Verdict.PASS, Verdict.SKIP)]
    summary = [Check("families", group[0].verdict, f"{len(group)}") for group in groups if group]  # listed by rows
    summary += [check for check in checks if check.verdict is Verdict.FAIL]
    report = clock.report(
        "models",
        summary,
        {"transformers": metadata.version("transformers"), "models": {row["model"]: line_of(row) for row in rows}},
    )
    write_report(options.json, report)
    return finish(report)


if __name__ == "__main__":
    sys.exit(main())
