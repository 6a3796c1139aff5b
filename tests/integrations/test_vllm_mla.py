"""Latent attention of vLLM on flashmoe: decoding against float64, and which class a model with MLA gets."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashmoe.errors import ArgumentError
from tests.integrations import engines

HEADS, LATENT, ROTARY, BLOCK, BLOCKS = 16, 512, 64, 16, 12
SCALE = 192**-0.5
ARGUMENTS = (HEADS, LATENT + ROTARY, SCALE, 1, None, None, "auto", None, "decoder", None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("FLASHMOE_FALLBACK", raising=False)
    with engines.installed(engines.vllm_stand_ins(), "flashmoe.integrations.vllm"):
        names = {"mla": "vllm.mla", "attention": "vllm.attention", "plugin": "vllm"}
        yield SimpleNamespace(
            **{name: importlib.import_module(f"flashmoe.integrations.{path}") for name, path in names.items()}
        )


def reference(q: Tensor, keys: Tensor) -> Tensor:
    """One request in float64: q [Sq, H, 576] over keys [Sk, 576], the last query at the last key; returns [Sq, H, 512]."""
    q, keys = q.double(), keys.double()
    scores = torch.einsum("qhd,kd->qhk", q, keys) * SCALE
    at = torch.arange(q.shape[0]).unsqueeze(1) + keys.shape[0] - q.shape[0]
    scores = scores.masked_fill((torch.arange(keys.shape[0]) > at).unsqueeze(1).to(scores.device), -torch.inf)
    return torch.softmax(scores, -1) @ keys[:, :LATENT]


@pytest.mark.parametrize("tokens", [1, 3])  # three: speculative decoding
@pytest.mark.parametrize("form", ["one tensor", "two parts"])
def test_decoding_is_attention_over_the_latents(vllm: Any, device: str, tokens: int, form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    cache, lengths = random(BLOCKS, BLOCK, LATENT + ROTARY), [37, 5, 16, 0]  # the last request pads the batch
    pages = torch.randperm(BLOCKS, generator=generator).reshape(4, 3).to(device, torch.int32)
    q = random(4 * tokens, HEADS, LATENT + ROTARY)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    batch = SimpleNamespace(decode=SimpleNamespace(seq_lens=seq_lens, block_table=pages))
    layer = vllm.mla.FlashmoeMLAImpl(*ARGUMENTS, kv_lora_rank=LATENT)
    given = q if form == "one tensor" else (q[..., :LATENT], q[..., LATENT:])
    out, lse = layer.forward_mqa(given, cache, batch, None)
    assert (out.shape, lse) == ((4 * tokens, HEADS, LATENT), None)
    limit = 2e-2 if dtype is torch.bfloat16 else 1e-5
    for at, length in enumerate(lengths):
        mine = out[at * tokens : (at + 1) * tokens]
        if length == 0:
            assert not mine.any()
            continue
        keys = cache[pages[at].long()].flatten(0, 1)[:length]
        wanted = reference(q[at * tokens : (at + 1) * tokens], keys)
        assert (mine.double() - wanted).abs().max() < limit


@pytest.mark.parametrize(
    ("at", "value", "name"),
    [(4, [0.5], "alibi_slopes"), (5, 128, "sliding_window"), (7, 30.0, "logits_soft_cap"), (8, "encoder", "attn_type")],
)
def test_what_latent_attention_lacks_is_refused(vllm: Any, at: int, value: Any, name: str) -> None:
    arguments = [*ARGUMENTS[:at], value, *ARGUMENTS[at + 1 :]]
    with pytest.raises(ArgumentError, match=f"{name} is .* leave --attention-backend out"):
        vllm.mla.FlashmoeMLAImpl(*arguments)


ALLOWED: dict[str, Any] = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 64,
    "use_mla": True,
}


def chosen(vllm: Any, num_heads: int = 16, **changes: Any) -> Any:
    vllm.plugin.register()
    selector = sys.modules[f"{engines.ATTENTION}.selector"]
    config = engines.SelectorConfig(**{**ALLOWED, **changes})
    return selector._cached_get_attn_backend(engines.Backends.CUSTOM, config, num_heads)


def test_one_name_has_two_classes(vllm: Any) -> None:
    backend = chosen(vllm)
    assert backend is vllm.mla.FlashmoeMLABackend
    assert chosen(vllm, use_mla=False, head_size=128) == f"{vllm.attention.__name__}.FlashmoeBackend"
    assert backend.get_name() == "CUSTOM"
    assert backend.get_impl_cls() is vllm.mla.FlashmoeMLAImpl
    builder = backend.get_builder_cls()
    assert builder._cudagraph_support is engines.CGSupport.UNIFORM_BATCH
    assert builder.query_len_support is engines.QueryLenSupport.UNIFORM
    assert backend.get_supported_kernel_block_sizes() == [engines.MultipleOf(16)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 320}, "head_size"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "both must be the same"),
        ({"use_sparse": True}, "sparse"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_kv_connector": True}, "KV connector"),
        ({"has_sink": True}, "sinks"),
        ({"num_heads": 160}, "160 heads of latent attention; at most 128"),
    ],
)
def test_other_latent_attention_is_vllms_own_or_refused(
    vllm: Any, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match="attention, not flashmoe") as told:
        assert "VllmOwn" in str(chosen(vllm, **changes))
    assert reason in str(told[0].message)
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    with pytest.raises(ArgumentError, match=f"{reason}.*leave the backend out"):
        chosen(vllm, **changes)


@pytest.mark.parametrize("capability", [engines.Capability(7, 5), None])  # None: a CPU
def test_the_device_is_a_reason(vllm: Any, capability: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "capability", capability)
    with pytest.warns(UserWarning, match="compute capability"):
        assert "VllmOwn" in str(chosen(vllm, dtype=torch.float16))
