"""decode_by_latents: transformers' DeepSeek layers decode with mla_decode, with the same tokens and logits as without it."""

from collections import Counter
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe.errors import ArgumentError
from flashmoe.integrations.transformers import decode_by_latents
from tests.torch_warnings import WHOLE_MODELS

from .test_transformers import MODELS, build, use

transformers = pytest.importorskip("transformers")

pytestmark = WHOLE_MODELS
FAMILIES = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite")
GREEDY = {
    "max_new_tokens": 6,
    "do_sample": False,
    "eos_token_id": None,
    "output_logits": True,
    "return_dict_in_generate": True,
}


def make(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(MODELS, name, {**MODELS[name], "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    model: Any = build(name, "cpu")
    if not hasattr(type(model.model.layers[0].self_attn), "expand_kv"):
        with pytest.raises(ArgumentError, match=r"use transformers 5\.17 or later"):
            decode_by_latents(model)
        pytest.skip("this transformers caches keys and values of each head; that decode_by_latents says so was checked")
    for name, parameter in model.named_parameters():
        if "self_attn" in name and parameter.dim() == 2:
            parameter.data *= 2  # so that scores are not negligible
    use(model, ours=True)
    return model


class Operators(TorchDispatchMode):
    """Counts calls of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "flashmoe":
            self.ran[function._schema.name.removeprefix("flashmoe::")] += 1
        return function(*args, **(kwargs or {}))


def run(model: Any, tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor, Counter[str]]:
    with torch.no_grad(), Operators() as operators:
        found = model.generate(tokens, **GREEDY, **options, disable_compile=True)
    return found.sequences, torch.stack(found.logits), operators.ran


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_logits_stay(name: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(name, monkeypatch)
    tokens = torch.randint(3, 64, (2, 9))
    expected, logits, ran = run(model, tokens, cache_implementation=cache)
    assert ran["mla_decode"] == 0
    assert decode_by_latents(model) == 2
    found, found_logits, ran = run(model, tokens, cache_implementation=cache)
    assert ran["mla_decode"] == 2 * 5  # the prompt gives the first new token
    assert torch.equal(found, expected)
    torch.testing.assert_close(found_logits, logits, atol=1e-5, rtol=1e-4)


def test_what_is_no_step_without_padding_runs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded batches, another attention, gradients; deleting the method undoes it."""
    model = make("DeepseekV3", monkeypatch)
    tokens, valid = torch.randint(3, 64, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    valid[1, :4] = 0

    def gradient() -> Tensor:
        (found,) = torch.autograd.grad(
            model(tokens, labels=tokens).loss, model.model.layers[0].self_attn.kv_b_proj.weight
        )
        return found

    before = (*run(model, tokens, attention_mask=valid)[:2], gradient())
    decode_by_latents(model)
    padded = run(model, tokens, attention_mask=valid)
    for a, b in zip(before, (*padded[:2], gradient()), strict=True):
        assert torch.equal(a, b)
    use(model, ours=False)
    assert torch.equal(run(model, tokens, attention_mask=valid)[0], before[0])
    use(model, ours=True)
    for layer in model.model.layers:
        del layer.self_attn.expand_kv
    assert [padded[2]["mla_decode"], run(model, tokens)[2]["mla_decode"]] == [0, 0]


def test_a_step_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("DeepseekV3", monkeypatch)
    tokens = torch.randint(3, 64, (1, 6))
    weight = model.model.layers[0].self_attn.kv_b_proj.weight
    found = []
    for change in (lambda _: 0, decode_by_latents):
        change(model)
        with torch.no_grad():
            past = model(tokens[:, :5]).past_key_values
        logits = model(tokens[:, 5:], past_key_values=past).logits
        found.append(torch.autograd.grad(logits.square().sum(), weight)[0])
    assert torch.equal(*found)


def test_layers_that_do_something_else_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are found by comparing values, for example keys times 2."""
    model = make("DeepseekV3", monkeypatch)
    kind = import_module("transformers.models.deepseek_v3.modeling_deepseek_v3").DeepseekV3Attention
    plain = kind.expand_kv

    def doubled(*given: Any) -> tuple[Tensor, Tensor]:
        keys, values = plain(*given)
        return 2 * keys, values

    monkeypatch.setattr(kind, "expand_kv", doubled)
    with pytest.raises(ArgumentError, match="no layer of DeepseekV3ForCausalLM caches latents of 512 and 64"):
        decode_by_latents(model)


def test_a_model_without_latents_is_told() -> None:
    with pytest.raises(ArgumentError, match="no layer of LlamaForCausalLM"):
        decode_by_latents(build("Llama", "cpu", layers=1))
