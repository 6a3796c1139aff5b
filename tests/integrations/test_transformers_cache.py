"""E4m3Cache in transformers' models: the bits of the same cache dequantised, and the calls that it rejects."""

import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from flashmoe.errors import ArgumentError, DtypeError
from flashmoe.integrations.transformers import NAME
from tests.torch_warnings import WHOLE_MODELS

from .test_transformers import build, use

transformers = pytest.importorskip("transformers")
cache = pytest.importorskip("flashmoe.integrations.transformers.cache")
layers = pytest.importorskip("transformers.cache_utils")

pytestmark = WHOLE_MODELS
DEEPSEEK = "transformers.models.deepseek_v3.modeling_deepseek_v3"
GREEDY = {
    "max_new_tokens": 8,
    "do_sample": False,
    "eos_token_id": None,
    "output_logits": True,
    "return_dict_in_generate": True,
}


class DequantisedLayer(layers.DynamicLayer):  # type: ignore[misc]
    """An independent reference for E4m3Cache: every key and value rounded to e4m3 times its scale, in 16 bits."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.powers = [self.power(states) for states in (key_states, value_states)]
        rounded = []
        for states, power in zip((key_states, value_states), self.powers, strict=True):
            codes = (states.double() / power).clamp(-448, 448).to(torch.float8_e4m3fn)
            exact = codes.double() * power
            assert torch.equal(exact.to(states.dtype).double(), exact)
            rounded.append(exact.to(states.dtype))
        found: tuple[Tensor, Tensor] = super().update(*rounded)
        return found

    @staticmethod
    def power(states: Tensor) -> Tensor:
        """The smallest power of two for which 8 times the largest magnitude is below 448."""
        largest = states.double().abs().amax((2, 3), keepdim=True) * 8 / 448
        return 2.0 ** (largest.log2().floor() + 1)


def caches() -> tuple[Any, Any]:
    return cache.E4m3Cache(), layers.Cache(layer_class_to_replicate=DequantisedLayer)


def run(model: Any, tokens: Tensor, used: Any, **options: Any) -> tuple[Tensor, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(tokens, past_key_values=used, **{**GREEDY, **options})
    return found.sequences, torch.stack(found.logits)


def sixteen_bits(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    model: Any = build(name, "cpu").to(dtype)
    use(model, ours=True)
    return model


@pytest.mark.parametrize(
    ("name", "dtype", "length"),
    [
        ("Llama", torch.bfloat16, 9),
        ("Llama", torch.float16, 19),
        ("Mistral", torch.bfloat16, 19),
        ("Gemma2", torch.float16, 9),
        ("GptOss", torch.bfloat16, 19),
        ("Qwen3Moe", torch.bfloat16, 5),
    ],
    ids=str,
)
def test_tokens_and_logits_are_those_of_the_dequantised_cache(name: str, dtype: torch.dtype, length: int) -> None:
    """Prompts that attention reads as codes, and longer ones."""
    model = sixteen_bits(name, dtype)
    tokens = torch.randint(3, 64, (2, length))
    (found, logits), (expected, expected_logits) = (run(model, tokens, used) for used in caches())
    assert torch.equal(found, expected)
    assert torch.equal(logits, expected_logits)
    assert not torch.equal(logits, run(model, tokens, None)[1])  # differs from the cache in 16 bits


@pytest.mark.parametrize(("side", "name"), [("left", "Llama"), ("left", "GptOss"), ("right", "Llama")])
def test_padded_prompts(side: str, name: str) -> None:
    model = sixteen_bits(name)
    tokens, valid = torch.randint(3, 64, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    valid[1, : 5 if side == "left" else 0] = 0
    valid[1, 12 if side == "left" else 7 :] = 0
    (found, logits), (expected, expected_logits) = (run(model, tokens, used, attention_mask=valid) for used in caches())
    assert torch.equal(found, expected)
    assert torch.equal(logits, expected_logits)


def test_beams_are_reordered_and_repeated() -> None:
    model = sixteen_bits("Llama")
    tokens = torch.randint(3, 64, (2, 9))
    options = {"num_beams": 3, "output_logits": False, "return_dict_in_generate": False}
    found, expected = (model.generate(tokens, past_key_values=used, **{**GREEDY, **options}) for used in caches())
    assert torch.equal(found, expected)


@torch.no_grad()
def test_chunks_crops_and_resets() -> None:
    """A prompt in chunks, the last of which are removed and replaced; then another prompt in the same cache."""
    model = sixteen_bits("Llama")
    tokens = torch.randint(3, 64, (2, 40))
    ours, expected = caches()
    for used in (ours, expected):
        model(tokens[:, :20], past_key_values=used)
        model(tokens[:, 20:31], past_key_values=used)
        used.crop(-4)
    logits = [model(tokens[:, 27:30], past_key_values=used).logits for used in (ours, expected)]
    assert torch.equal(*logits)
    assert ours.get_seq_length() == 30
    room = ours.layers[0].keys
    assert room.dtype == torch.float8_e4m3fn
    assert room.shape == (2, 2, cache.ROOM, 16)
    longer = torch.randint(3, 64, (2, 110))
    assert torch.equal(*(model(longer, past_key_values=used).logits for used in (ours, expected)))
    assert ours.layers[0].keys.shape[2] == 2 * cache.ROOM
    ours.reset()
    assert ours.get_seq_length() == 0
    assert torch.equal(*(model(tokens[:, 5:9], past_key_values=used).logits for used in (ours, caches()[1])))


def test_what_comes_later_saturates_and_nan_stays() -> None:
    """The first keys' largest magnitude is 1, so the maximum is 448 times 2^-5; for zeros the scale is 1."""
    layer = cache.E4m3Layer()
    first = torch.tensor([1.0, -0.3, 0.0, 2.0**-20]).bfloat16().expand(1, 2, 1, 4)
    layer.update(first, torch.zeros_like(first))
    later = torch.tensor([8.0, 100.0, float("nan"), -float("inf")]).bfloat16().expand(1, 2, 1, 4)
    keys, values = (found.dequantized()[0, 1] for found in layer.update(later, later))
    assert keys[0].tolist() == [1.0, -0.3125, 0.0, 0.0]
    assert [keys[1, 2].isnan(), values[1, 2].isnan()] == [True, True]
    assert keys[1, [0, 1, 3]].tolist() == [8.0, 14.0, -14.0]
    assert values[1, [0, 1, 3]].tolist() == [8.0, 96.0, -448.0]


def test_each_sequence_and_head_has_its_scale() -> None:
    """The scale moves with it when a batch is reordered; an infinity does not turn the others into zeros."""
    layer = cache.E4m3Layer()
    largest = torch.tensor([[1.0, 64.0], [2.0**-12, float("inf")]]).bfloat16()
    states = torch.stack((largest, torch.full_like(largest, 2.0**-13)), -1)[:, :, None]  # [2, 2, 1, 2]
    keys, _ = layer.update(states, states)
    expected = states.clone()
    expected[0, 1, 0, 1] = 0.0  # 2^-13 underflows with 64 in the same head
    expected[1, 1, 0] = torch.tensor([448.0 * 16, 0.0])
    assert torch.equal(keys.dequantized(), expected)
    for change, order in (
        ("reorder_cache", [1, 1]),
        ("batch_repeat_interleave", [1, 1, 1, 1]),
        ("batch_select_indices", [1]),
    ):
        getattr(layer, change)(
            {"reorder_cache": torch.tensor([1, 1]), "batch_repeat_interleave": 2}.get(change, torch.tensor([3]))
        )
        keys, values = layer.update(states[order], states[order])
        assert torch.equal(keys.dequantized(), expected[order].expand_as(keys.dequantized()))
        assert torch.equal(values.dequantized(), keys.dequantized())


@pytest.mark.parametrize(("name", "other"), [("Llama", "sdpa"), ("Llama", "eager"), ("DeepseekV3", NAME)])
def test_who_reads_the_codes_otherwise_is_told(name: str, other: str) -> None:
    """Another attention, and a model that multiplies by what it has cached, the latents."""
    if name == "DeepseekV3" and "expand_kv" not in dir(import_module(DEEPSEEK).DeepseekV3Attention):
        pytest.skip("this transformers caches keys and values of DeepSeek, not latents")
    model = sixteen_bits(name)
    model.set_attn_implementation(other)
    with pytest.raises(ArgumentError, match=f"which only the attention '{NAME}' reads"):
        run(model, torch.randint(3, 64, (1, 9)), cache.E4m3Cache())


def test_float32_is_refused() -> None:
    model: Any = build("Llama", "cpu")
    with pytest.raises(DtypeError, match=r"keys are torch.float32; an E4m3Cache supports float16 and bfloat16"):
        run(model, torch.randint(3, 64, (1, 9)), cache.E4m3Cache())
