"""vLLM's latent attention on flashmoe: decoding and prompts compared with float64, and the class that a model with MLA gets."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import accumulate
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


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    monkeypatch.delenv("FLASHMOE_FALLBACK", raising=False)
    modules = engines.vllm_stand_ins()
    with engines.installed(modules, "flashmoe.integrations.vllm"):
        if getattr(request, "param", "stand-in") != "stand-in":
            engines.use_own_sources(modules, engines.engine_sources()[request.param])
        names = {"mla": "vllm.mla", "attention": "vllm.attention", "plugin": "vllm"}
        yield SimpleNamespace(
            **{name: importlib.import_module(f"flashmoe.integrations.{path}") for name, path in names.items()}
        )


def reference(q: Tensor, keys: Tensor) -> Tensor:
    """One request in float64: q [Sq, H, 576] over keys [Sk, 576], the last query aligned with the last key; returns [Sq, H, 512]."""
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


def starts_of(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def filled(kind: Any, **given: Any) -> Any:
    """One of vLLM's dataclasses, with None in fields that flashmoe does not read; a namespace if there is no class."""
    return SimpleNamespace(**given) if kind is None else kind(**{**{one.name: None for one in fields(kind)}, **given})


CHUNKS = ["stand-in", "stand-in, numbered", *engines.engine_sources()]


@pytest.mark.parametrize(
    ("vllm", "version"), [(name.partition(",")[0], name) for name in CHUNKS], indirect=["vllm"], ids=CHUNKS
)
def test_prompts_see_their_new_tokens_and_the_chunks_of_what_is_cached(vllm: Any, version: str, device: str) -> None:
    """As vLLM does it: new tokens, then each chunk of the context, merged by log-sum-exp."""
    generator = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    new, chunks, heads = [5, 1, 40], [[16, 0, 7], [3, 20, 0]], 4  # for three requests; tokens of each chunk

    def random(tokens: int, size: int) -> Tensor:
        return torch.randn(tokens, heads, size, generator=generator).to(device, dtype)

    def values(tokens: int) -> Tensor:  # a slice of wider rows, as in vLLM's projection
        return random(tokens, 256)[..., 128:]

    folder = engines.engine_sources().get(version)
    kind = folder and engines.own_class(folder, engines.LATENT, "MLACommonPrefillMetadata")
    numbered = "numbered" in version or not (kind is None or hasattr(kind, "ContextChunk"))
    starts, longest = starts_of(new, device), max(new)
    context = None
    if numbered:
        context = filled(
            kind and kind.ChunkedContextMetadata,
            cu_seq_lens=torch.stack([starts_of(one, device) for one in chunks]), max_seq_lens=[max(one) for one in chunks],
        )  # fmt: skip
    config = SimpleNamespace(
        attention_config=SimpleNamespace(mla_prefill_backend=None), chosen=SimpleNamespace(**engines.PROMPT_SIZES)
    )
    prompts = vllm.mla.FlashmoeMLAMetadataBuilder(None, ["a layer"], config, device)._prefill_backend
    prompts.prepare_metadata(filled(kind, query_start_loc=starts, max_query_len=longest, chunked_context=context))
    q, parts = random(sum(new), 192), []
    keys, own = [(random(sum(new), 192), values(sum(new)))], [new]
    parts.append(
        prompts.run_prefill_new_tokens(
            q=q, k=keys[0][0], v=keys[0][1], return_softmax_lse=True, out=None, output_scale=None
        )
    )
    for at, lengths in enumerate(chunks):
        k, v = random(sum(lengths), 192), values(sum(lengths))
        which: dict[str, Any] = {"chunk_idx": at}
        if not numbered:
            of = {
                "query_start_loc": starts,
                "cu_seq_lens": starts_of(lengths, device),
                "max_query_len": longest,
                "max_seq_len": max(lengths),
            }
            which = {"chunk": filled(kind and kind.ContextChunk, **of)}
        parts.append(prompts.run_prefill_context_chunk(q=q, k=k, v=v, **which))
        keys, own = [*keys, (k, v)], [*own, lengths]
    assert all(out.shape == (sum(new), heads, 128) and lse.shape == (heads, sum(new)) for out, lse in parts)
    shares = torch.softmax(torch.stack([lse for _, lse in parts]).double(), 0).transpose(1, 2).unsqueeze(-1)
    mine = (shares * torch.stack([out for out, _ in parts]).double()).sum(0)
    alone = prompts.run_prefill_new_tokens(q, *keys[0], return_softmax_lse=False)
    assert torch.equal(alone, parts[0][0])
    for at, (begin, end) in enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False)):
        rows = [slice(sum(lengths[:at]), sum(lengths[: at + 1])) for lengths in own]
        order = [*range(1, len(own)), 0]  # cached tokens come first
        k, v = (torch.cat([keys[part][which][rows[part]] for part in order]).double() for which in (0, 1))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), k) * engines.PROMPT_SIZES["scale"]
        hidden = torch.arange(len(k)) > torch.arange(len(k) - new[at], len(k)).unsqueeze(1)
        wanted = torch.softmax(scores.masked_fill(hidden.to(device), -torch.inf), -1)
        difference = mine[begin:end] - torch.einsum("hqk,khd->qhd", wanted, v)
        assert difference.abs().max() < (2e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    ("changes", "named"), [({"qk_nope_head_dim": 200}, None), ({"v_head_dim": 264}, None), ({}, "FLASH_ATTN")]
)
def test_prompts_stay_with_what_was_named_and_with_heads_that_are_too_wide(
    vllm: Any, changes: dict[str, int], named: str | None
) -> None:
    layer = SimpleNamespace(**{**engines.PROMPT_SIZES, **changes})
    config = SimpleNamespace(attention_config=SimpleNamespace(mla_prefill_backend=named))
    assert vllm.mla.prompts_of(layer, config) is layer


@pytest.mark.parametrize(
    ("at", "value", "name"),
    [(4, [0.5], "alibi_slopes"), (5, 128, "sliding_window"), (7, 30.0, "logits_soft_cap"), (8, "encoder", "attn_type")],
)
def test_what_latent_attention_lacks_is_refused(vllm: Any, at: int, value: Any, name: str) -> None:
    arguments = [*ARGUMENTS[:at], value, *ARGUMENTS[at + 1 :]]
    with pytest.raises(ArgumentError, match=f"{name} is .* remove --attention-backend"):
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
    with pytest.raises(ArgumentError, match=f"{reason}.*remove --attention-backend"):
        chosen(vllm, **changes)


@pytest.mark.parametrize("capability", [engines.Capability(7, 5), None])  # None: a CPU
def test_the_device_is_a_reason(vllm: Any, capability: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "capability", capability)
    with pytest.warns(UserWarning, match="compute capability"):
        assert "VllmOwn" in str(chosen(vllm, dtype=torch.float16))
