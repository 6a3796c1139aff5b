"""Small random transformers models: logits and gradients compared with its own eager attention and experts, and generation."""

import warnings
from importlib import import_module
from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flashmoe import _extension
from flashmoe.errors import ArgumentError
from flashmoe.integrations import transformers as integration
from flashmoe.integrations.transformers import NAME, PAGED_NAME, recognise_gate, register
from tests.torch_warnings import WHOLE_MODELS

transformers = pytest.importorskip("transformers")
ALL_ATTENTION_FUNCTIONS = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS

pytestmark = WHOLE_MODELS
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2}
# Latent attention: queries and keys are wider than values; the second layer has experts.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse"],
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    **EXPERTS,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 7},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 16},
    "GptOss": {"head_dim": 16, "num_local_experts": 4, "sliding_window": 7, **EXPERTS},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32, "decoder_sparse_step": 1, **EXPERTS},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None, **EXPERTS},
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
    "Glm4MoeLite": LATENT,
}
LENGTH = 19


def build(name: str, device: str, layers: int = 2) -> nn.Module:
    register()
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]}, num_hidden_layers=layers)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    built: nn.Module = model.to(device, dtype).eval()
    return built


def use(model: Any, ours: bool) -> None:
    model.set_attn_implementation(NAME if ours else "eager")
    if register().experts is not None and hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation(NAME if ours else "eager")


def both(model: Any, tokens: Tensor, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """(logits, gradients...) from transformers' eager code and from flashmoe."""
    results = []
    for ours in (False, True):
        use(model, ours)
        output = model(tokens, labels=tokens, **options)
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(output.loss, parameters, allow_unused=True)
        results.append([output.logits, *(g for g in gradients if g is not None)])
    return results[0], results[1]


def limit(model: Any) -> float:
    return 2e-5 if model.dtype == torch.float32 else 5e-2


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_eager(device: str, name: str) -> None:
    model = build(name, device)
    tokens = torch.randint(3, 64, (2, LENGTH), device=device)
    eager, ours = both(model, tokens)
    for a, b in zip(eager, ours, strict=True):
        assert torch.allclose(a, b, atol=limit(model), rtol=limit(model))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_padded_batches(device: str, name: str, side: str) -> None:
    model = build(name, device)
    tokens = torch.randint(3, 64, (2, LENGTH), device=device)
    valid = torch.ones_like(tokens)
    padding = slice(0, 5) if side == "left" else slice(LENGTH - 5, LENGTH)
    valid[1, padding] = 0
    eager, ours = both(model, tokens, attention_mask=valid)
    assert torch.allclose(eager[0][valid.bool()], ours[0][valid.bool()], atol=limit(model), rtol=limit(model))
    assert not any(g.isnan().any() for g in ours)


@pytest.mark.parametrize(
    ("name", "cache"), [("Mistral", "dynamic"), ("DeepseekV3", "dynamic"), ("GptOss", "static"), ("Llama", "compiled")]
)
def test_generation_gives_the_same_tokens(name: str, cache: str) -> None:
    """In float32 on the CPU, because in bfloat16 two tokens of a random model may tie."""
    model: Any = build(name, "cpu", layers=1 if cache == "compiled" else 2)
    prompt = torch.randint(3, 64, (2, 9))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    if cache == "compiled":  # the complete decoding step
        options |= {"cache_implementation": "static", "compile_config": transformers.CompileConfig(**COMPILE)}
        options["compile_config"]._compile_all_devices = True
    found = []
    for ours in (False, True):
        use(model, ours)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(model.generate(prompt, **options, disable_compile=not (ours and cache == "compiled")))
    assert torch.equal(*found)


COMPILE = {"fullgraph": True, "backend": "aot_eager", "mode": "default"}


def test_a_static_cache_decodes_by_its_lengths_where_no_key_is_padding() -> None:
    masks = import_module("transformers.masking_utils")
    if "q_length" not in signature(masks.sdpa_mask).parameters:
        pytest.skip("this transformers gives positions in place of lengths")
    options: dict[str, Any] = {
        "batch_size": 2,
        "q_length": 1,
        "kv_length": 32,
        "kv_offset": 0,
        "allow_is_causal_skip": False,
    }
    options |= {"mask_function": masks.causal_mask_function, "device": "cpu", "config": None}
    valid = torch.ones(2, 10, dtype=torch.bool)
    for offset in (9, torch.tensor([9])):
        found = integration.attention_mask(**options, q_offset=offset, attention_mask=valid)
        assert found is not None
        assert found.tolist() == [[[[10]]], [[[10]]]]
    valid[1, 0] = False
    padded = integration.attention_mask(**options, q_offset=9, attention_mask=valid)
    assert padded is not None
    assert padded.sum(-1).flatten().tolist() == [10, 9]


CONTINUOUS = {"Llama": {}, "Gemma2": MODELS["Gemma2"]}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_batching(device: str, name: str) -> None:
    """The same tokens as with transformers' paged attention; if its version accepts no foreign name, the error says so."""
    pytest.importorskip("psutil")  # transformers queries free memory
    model: Any = build(name, device)
    if register().paged is None:
        assert PAGED_NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys()
        pytest.skip("this transformers takes no foreign name for continuous batching")
    prompts = [torch.randint(3, 64, (length,)).tolist() for length in (9, 5, 14)]
    generation = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=0)
    sizes = {"num_blocks": 16, "block_size": 16, "max_batch_tokens": 64}
    found = []
    for paged in ("paged|eager", PAGED_NAME):
        model.set_attn_implementation(paged)
        outputs = model.generate_batch(
            prompts,
            generation_config=generation,
            continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes),
            progress_bar=False,
        )
        found.append([outputs[key].generated_tokens for key in sorted(outputs)])
    assert len(found[1]) == 3
    if device == "cpu":  # in bfloat16 two tokens of a random model may tie
        assert found[0] == found[1]


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_packed_sequences_are_one_ragged_batch(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a head dim that uses SDPA, where it becomes a mask."""
    if name == "Mistral":
        monkeypatch.setitem(MODELS, name, {"sliding_window": 7, "head_dim": 528})
    model: Any = build(name, device)
    use(model, ours=True)
    tokens = torch.randint(3, 64, (1, 24), device=device)
    lengths = [10, 1, 13]
    position = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0).to(device)
    cu = torch.tensor([0, 10, 11, 24], dtype=torch.int32, device=device)
    packed = model(
        tokens, position_ids=position, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=13, max_length_k=13
    ).logits
    by_mask = model(
        tokens, position_ids=position, use_cache=False
    ).logits  # with a cache transformers ignores positions
    alone = torch.cat([model(part).logits for part in tokens.split(lengths, 1)], 1)
    assert torch.allclose(packed, alone, atol=limit(model), rtol=limit(model))
    assert torch.allclose(by_mask, alone, atol=limit(model), rtol=limit(model))


def test_a_training_step_of_the_trainer(tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, 64, (4, 12))]
    options: dict[str, Any] = {
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "optim": "sgd",
        "learning_rate": 1.0,
    }
    trained = []
    for ours in (False, True):
        model: Any = build("Qwen3Moe", "cpu")
        use(model, ours)
        before = [p.detach().clone() for p in model.parameters()]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, **options
        )
        transformers.Trainer(model=model.train(), args=arguments, train_dataset=data).train()
        trained.append([p.detach() for p in model.parameters()])
        assert any(not torch.equal(a, b) for a, b in zip(before, trained[-1], strict=True))
    for eager, found in zip(*trained, strict=True):
        assert torch.allclose(eager, found, atol=limit(model), rtol=limit(model))


def test_what_is_lacking_goes_to_sdpa_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build("Llama", "cpu").double()
    use(model, ours=True)
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    with pytest.raises(ArgumentError, match=r"no kernel for torch.float64 on cpu"):
        model(torch.randint(3, 64, (1, 5)))
    monkeypatch.setenv("FLASHMOE_FALLBACK", "allow")
    assert model(torch.randint(3, 64, (1, 5))).logits.isfinite().all()


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_position_bias_is_learned(device: str, is_padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's relative positions: results, the gradient of their table, and greedy tokens with both caches, all on flashmoe."""
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    register()
    if "position_bias" not in signature(ALL_ATTENTION_FUNCTIONS["sdpa"]).parameters:
        pytest.skip("this transformers gives attention functions no position bias")
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    tokens = {name: SIZES[name] for name in ("vocab_size", "pad_token_id", "eos_token_id")}
    config = transformers.T5Config(**sizes, **tokens, decoder_start_token_id=0, relative_attention_num_buckets=8)
    torch.manual_seed(0)
    model: Any = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    given, labels = (torch.randint(3, 64, (2, length), device=device) for length in (11, 7))
    valid = torch.ones_like(given)
    if is_padded:
        valid[1, 6:] = 0
    results = []
    for ours in (False, True):
        model.set_attn_implementation(NAME if ours else "eager")
        output = model(input_ids=given, attention_mask=valid, labels=labels)
        leaves = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(output.loss, leaves, allow_unused=True)
        written = model.generate(given, attention_mask=valid, max_new_tokens=5, do_sample=False)
        results.append((output.logits, found, written))
    (logits, gradients, written), (our_logits, our_gradients, our_written) = results
    assert torch.allclose(logits, our_logits, atol=limit(model), rtol=limit(model))
    for name, a, b in zip((n for n, _ in model.named_parameters()), gradients, our_gradients, strict=True):
        assert torch.allclose(a, b, atol=limit(model), rtol=limit(model)), name
    if device == "cpu":
        assert torch.equal(written, our_written)


def test_attention_dropout_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on flashmoe with torch's generator, and not in evaluation."""
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    model: Any = build("Llama", "cpu")
    tokens = torch.randint(3, 64, (2, 9))
    use(model, ours=True)
    plain = model.eval()(tokens).logits
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert torch.equal(model(tokens).logits, plain)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model.train()(tokens).logits)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], plain)
    found[0].square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@settings(max_examples=40, deadline=None)
@example(rows=1, more=4, sliding_window=4, head_dim=16)
@example(rows=5, more=0, sliding_window=4, head_dim=528)
@given(
    rows=st.integers(1, 6),
    more=st.integers(0, 6),
    sliding_window=st.integers(1, 7),
    head_dim=st.sampled_from([16, 528]),
)
def test_a_window_around_the_number_of_keys(rows: int, more: int, sliding_window: int, head_dim: int) -> None:
    """A decoding row sees the last keys of its window; a prompt has as many keys as rows. No kernel supports head dim 528, so SDPA gets a
    mask."""
    keys = rows + more if rows == 1 else rows
    heads_kv = 2 if head_dim == 16 else 4  # transformers' module would repeat them for SDPA; this one has no groups
    q, k, v = (
        torch.randn(2, heads, count, head_dim) for heads, count in ((4, rows), (heads_kv, keys), (heads_kv, keys))
    )
    register()
    out, _ = ALL_ATTENTION_FUNCTIONS[NAME](nn.Module(), q, k, v, None, sliding_window=sliding_window, is_causal=True)
    distance = torch.arange(keys - rows, keys).view(-1, 1) - torch.arange(keys)
    shown = (distance >= 0) & (distance < sliding_window)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown, enable_gqa=True)
    torch.testing.assert_close(out.transpose(1, 2), expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_what_goes_to_sdpa_keeps_its_window(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head dim without a kernel: windows and lengths that are normally left to the kernels must not be lost."""
    monkeypatch.setitem(MODELS, "Mistral", {"sliding_window": 7 if cache == "dynamic" else None, "head_dim": 528})
    model: Any = build("Mistral", "cpu")
    tokens = torch.randint(3, 64, (2, LENGTH))
    found = []
    for ours in (False, True):
        use(model, ours)
        generated = model.generate(
            tokens, max_new_tokens=4, do_sample=False, cache_implementation=cache, disable_compile=True
        )
        found.append((model(tokens).logits, generated))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=limit(model), atol=limit(model))
    assert torch.equal(found[0][1], found[1][1])


def test_head_dim_512_runs_here(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "Gemma", {"head_dim": 512})
    model: Any = build("Gemma", device)
    tokens = torch.randint(3, 64, (2, LENGTH), device=device)
    found = []
    for ours in (False, True):
        use(model, ours)
        with torch.no_grad():
            found.append(model(tokens).logits)
    assert _extension.last_kernel().startswith("cpu:") if device == "cpu" else "_d512" in _extension.last_kernel()
    torch.testing.assert_close(found[0], found[1], rtol=limit(model), atol=limit(model))


def test_weights_that_are_asked_for_are_told_to_be_lacking() -> None:
    model: Any = build("Llama", "cpu", layers=1)
    use(model, ours=True)
    with pytest.warns(UserWarning, match="cannot return weights for output_attentions=True"):
        model(torch.randint(3, 64, (1, 4)), output_attentions=True)


class _Experts(nn.Module):
    is_concatenated = True
    has_gate = True

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.factor * nn.functional.gelu(gate, approximate="tanh") * up


def test_gates_are_recognised_by_what_they_do() -> None:
    assert recognise_gate(_Experts(1.0)) == "geglu_tanh"
    with pytest.raises(ArgumentError, match=r"gate of _Experts is not one that fused_moe supports"):
        recognise_gate(_Experts(1.01))
