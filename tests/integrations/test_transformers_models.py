"""Which transformers models select attention by name: models that do not call its interface are rejected by name when they are built."""

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

from flashmoe.errors import ArgumentError
from flashmoe.integrations.transformers import NAME, register
from flashmoe.integrations.transformers.models import unsupported_reason
from tests.torch_warnings import WHOLE_MODELS

transformers = pytest.importorskip("transformers")

pytestmark = WHOLE_MODELS
LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
IMAGES = {**LAYERS, "image_size": 32, "patch_size": 8}
WORDS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
REFUSED = {  # model: (its configuration, why, what to use)
    "Bloom": ({"vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "do not call", "'eager'"),
    "Mpt": ({"vocab_size": 64, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, "do not call", "'eager'"),
    "GPTJ": ({"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 16}, "do not call", "'eager'"),
    "Falcon": ({"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, "do not call", "flashmoe.activate()"),
    "BigBirdPegasus": (
        {**WORDS, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
        "cannot be replaced", "'eager'",
    ),
}  # fmt: skip
RUN: dict[str, tuple[str, dict[str, Any]]] = {  # encoders, encoder-decoders, vision towers: (class, configuration)
    "Bert": ("AutoModel", {**LAYERS, "vocab_size": 64}),
    "ViT": ("AutoModel", IMAGES),
    "CLIPVision": ("AutoModel", IMAGES),
    "SiglipVision": ("AutoModel", IMAGES),
    "ModernBert": ("AutoModel", {**LAYERS, "vocab_size": 64, "pad_token_id": 0, "local_attention": 6}),
    "T5": ("AutoModelForSeq2SeqLM", {**WORDS, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}),
    "Bart": (
        "AutoModelForSeq2SeqLM",
        {
            **WORDS, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_not_ask_for_attention_by_name_is_refused(name: str) -> None:
    register()
    options, why, instead = REFUSED[name]
    config = getattr(transformers, f"{name}Config")(**options)
    with pytest.raises(ArgumentError) as caught:
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    message = str(caught.value)
    assert message.startswith(f"{name}ForCausalLM cannot take attn_implementation='{NAME}'")
    assert why in message
    assert instead in message
    assert transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager") is not None


def test_a_model_that_changes_its_masks_is_refused() -> None:
    kind = getattr(transformers, "DeepseekV4ForCausalLM", None)
    if kind is None:
        pytest.skip("this transformers has no DeepSeek-V4")
    assert "masks" in str(unsupported_reason(kind))


@pytest.mark.parametrize("name", RUN)
def test_encoders_and_vision_towers_give_what_eager_gives(name: str) -> None:
    register()
    auto, options = RUN[name]
    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    tokens, mask = torch.randint(3, 60, (2, 13)), torch.ones(2, 13, dtype=torch.int64)
    mask[1, 11:] = 0
    given: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask}
    if options is IMAGES:
        given = {"pixel_values": torch.randn(2, 3, 32, 32)}
    elif auto != "AutoModel":
        given["decoder_input_ids"] = tokens
    if Version(transformers.__version__) < Version("5.17"):
        can_switch = getattr(model, "_can_set_attn_implementation", lambda: True)
        if unsupported_reason(type(model)) or not can_switch():
            pytest.skip("this transformers does not give it its interface yet, or cannot switch it")
    found = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        with torch.no_grad():
            out = model(**given)
        found.append(out.logits if hasattr(out, "logits") else out.last_hidden_state)
    eager, ours = found
    if "attention_mask" in given and auto == "AutoModel":
        eager, ours = eager[mask.bool()], ours[mask.bool()]
    assert torch.allclose(eager, ours, atol=1e-5, rtol=1e-5)


def test_models_of_others_are_looked_at_too() -> None:
    """A class without source is accepted; a user's class that calls the interface needs none of transformers' flags."""
    assert unsupported_reason(type("Nowhere", (), {"__module__": "no.such.module"})) is None
    assert unsupported_reason(transformers.LlamaForCausalLM) is None
    assert unsupported_reason(transformers.MambaForCausalLM) is None  # has no attention
    before = transformers.PreTrainedModel.get_correct_attn_implementation
    register()
    assert transformers.PreTrainedModel.get_correct_attn_implementation is before
