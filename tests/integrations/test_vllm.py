"""flashmoe's plug-in for vLLM, called as vLLM calls it: builder, metadata, cache and forward, compared with float64 torch.

"stand-in" are small classes with vLLM's signatures; versions appear if the run was given vLLM's sources (tests/integrations/engines.py).
"""

import importlib
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flashmoe.attn.options import CONSISTENT, Varlen
from flashmoe.errors import ArgumentError, ShapeError
from tests.integrations import engines

HEADS, KV_HEADS, D, BLOCK, BLOCKS = 4, 2, 16, 16, 12
CUSTOM = "flashmoe.integrations.vllm.attention.FlashmoeBackend"


@dataclass
class Vllm:
    """The engine's modules, and our modules imported with them."""

    attention: Any
    backend: Any
    selector: Any
    registry: Any
    plugin: Any


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "vllm" in metafunc.fixturenames:
        metafunc.parametrize("vllm", ["stand-in", *engines.engine_sources()], indirect=True)


@pytest.fixture
def vllm(request: pytest.FixtureRequest) -> Iterator[Vllm]:
    modules = engines.vllm_stand_ins()
    with engines.installed(modules, "flashmoe.integrations.vllm"):
        if request.param != "stand-in":
            engines.use_own_sources(modules, engines.engine_sources()[request.param])
        names = (
            f"{engines.ATTENTION}.backend",
            f"{engines.ATTENTION}.selector",
            f"{engines.ATTENTION}.backends.registry",
        )
        own = [importlib.import_module(f"flashmoe.integrations.{name}") for name in ("vllm.attention", "vllm")]
        backend, selector, registry = (sys.modules[name] for name in names)
        yield Vllm(own[0], backend, selector, registry, own[1])


class Layer:
    def __init__(self, device: str, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
        self._k_scale, self._v_scale = (torch.tensor(scale, device=device) for scale in (k_scale, v_scale))


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    softcap: float,
    sinks: Tensor | None,
    slopes: list[float] | None,
) -> Tensor:
    """One sequence in float64: q [Sq, H, D], k and v [Sk, Hkv, D], the last query aligned with the last key; returns [Sq, H, D]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.double().transpose(0, 1) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = scores.shape[-2:]
    distance = torch.arange(keys) - torch.arange(rows).unsqueeze(1) - (keys - rows)
    distance = distance.to(scores.device)
    if slopes is not None:
        scores = scores + torch.tensor(slopes, dtype=torch.float64, device=scores.device).view(-1, 1, 1) * distance
    hidden = distance > 0 if window is None else (distance > 0) | (distance <= -window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, rows, 1)), -1)
    return (torch.softmax(scores, -1)[..., :keys] @ v).transpose(0, 1)


@dataclass
class Case:
    """Sequences of (keys already in the cache, new queries); the cache's memory is heads first or tokens first."""

    sequences: tuple[tuple[int, int], ...] = ((0, 20), (33, 1), (0, 1), (17, 5))
    tokens_first: bool = False
    cache: str = "auto"
    scales: tuple[float, float] = (1.0, 1.0)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    slopes: list[float] | None = None
    padding: int = 3


def serve(vllm: Vllm, case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """(output, expected output, padding rows): writes the earlier keys in one step, then runs a step with the queries."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" or case.cache != "auto" else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    is_fp8 = case.cache.startswith("fp8")
    memory = (BLOCKS, BLOCK, KV_HEADS, 2 * D) if case.tokens_first else (BLOCKS, KV_HEADS, BLOCK, 2 * D)
    kv_cache = torch.zeros(memory, dtype=torch.uint8 if is_fp8 else dtype, device=device)
    kv_cache = kv_cache.transpose(1, 2) if case.tokens_first else kv_cache
    sinks = random(HEADS) if case.sinks else None
    impl = vllm.attention.FlashmoeImpl(
        HEADS, D, D**-0.5, KV_HEADS, case.slopes, case.window, case.cache, case.softcap, "decoder", None, sinks=sinks
    )
    layer = Layer(device, *case.scales)
    tables, slots_of, free = [], [], iter(torch.randperm(BLOCKS, generator=generator).tolist())
    for before, new in case.sequences:
        pages = [next(free) for _ in range(-(-(before + new) // BLOCK))]
        slots_of.append([pages[at // BLOCK] * BLOCK + at % BLOCK for at in range(before + new)])
        tables.append(pages)
    keys, values = zip(
        *((random(b + n, KV_HEADS, D), random(b + n, KV_HEADS, D)) for b, n in case.sequences), strict=True
    )

    def write(first: bool) -> None:
        halves = [slice(0, b) if first else slice(b, b + n) for b, n in case.sequences]
        slots = [*(slot for all_slots, half in zip(slots_of, halves, strict=True) for slot in all_slots[half]), -1]
        new_keys = torch.cat(
            [*(k[half] for k, half in zip(keys, halves, strict=True)), random(1 + case.padding, KV_HEADS, D)]
        )
        new_values = torch.cat(
            [*(v[half] for v, half in zip(values, halves, strict=True)), random(1 + case.padding, KV_HEADS, D)]
        )
        mapping = torch.tensor(slots, dtype=torch.int64, device=device)  # shorter than the padded keys
        impl.do_kv_cache_update(layer, new_keys, new_values, kv_cache, mapping)

    write(first=True)
    write(first=False)
    columns = max(map(len, tables))
    table = torch.tensor([pages + [0] * (columns - len(pages)) for pages in tables], dtype=torch.int32, device=device)
    starts = torch.tensor([0, *(n for _, n in case.sequences)]).cumsum(0).int()
    tokens = int(starts[-1])
    common = vllm.backend.CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([b + n for b, n in case.sequences], dtype=torch.int32, device=device),
        num_reqs=len(case.sequences),
        num_actual_tokens=tokens,
        max_query_len=max(n for _, n in case.sequences),
        max_seq_len=max(b + n for b, n in case.sequences),
        block_table_tensor=table,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
    )
    builder = vllm.attention.FlashmoeBackend.get_builder_cls()(None, ["layer"], None, torch.device(device))
    batch = builder.build(0, common)
    query, output = (
        random(tokens + case.padding, HEADS, D),
        torch.full((tokens + case.padding, HEADS, D), 7.0, device=device).to(dtype),
    )
    impl.forward(layer, query, query, query, kv_cache, batch, output)
    wanted = []
    for index, (_, new) in enumerate(case.sequences):
        k, v = keys[index], values[index]
        if is_fp8:
            k, v = (
                (x.float() / s).to(torch.float8_e4m3fn).float() * s for x, s in zip((k, v), case.scales, strict=True)
            )
        rows = query[int(starts[index]) :][:new]
        wanted.append(reference(rows, k, v, case.window, case.softcap or 0.0, sinks, case.slopes))
    return output[:tokens], torch.cat(wanted), output[tokens:]


CASES = {
    "heads first": Case(),
    "tokens first": Case(tokens_first=True),
    "decoding": Case(sequences=((33, 1), (1, 1), (17, 1), (40, 1))),
    "window": Case(window=7),
    "softcap": Case(softcap=5.0),
    "sinks": Case(sinks=True, window=9),
    "alibi": Case(slopes=[0.5, 0.25, 0.125, 0.0625]),
    "fp8": Case(cache="fp8", scales=(0.5, 0.25)),
    "fp8, tokens first": Case(cache="fp8_e4m3", scales=(0.3, 2.0), tokens_first=True),
    "bf16": Case(cache="bfloat16"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_over_vllms_cache_is_attention(vllm: Vllm, device: str, name: str) -> None:
    found, wanted, padding = serve(vllm, CASES[name], device)
    limit = 2e-5 if found.dtype == torch.float32 else 2e-2
    assert torch.allclose(found.double(), wanted, atol=limit, rtol=limit)
    assert bool((padding == 7).all())


def test_an_unused_slot_leaves_the_cache_as_it_is(vllm: Vllm, device: str) -> None:
    impl = vllm.attention.FlashmoeImpl(HEADS, D, 1.0, KV_HEADS)
    cache = torch.zeros(2, KV_HEADS, BLOCK, 2 * D, device=device, dtype=torch.bfloat16)
    new = torch.ones(3, KV_HEADS, D, device=device, dtype=torch.bfloat16)
    impl.do_kv_cache_update(Layer(device), new, 2 * new, cache, torch.tensor([-1, 17], device=device))
    assert bool((cache[1, :, 1, :D] == 1).all() and (cache[1, :, 1, D:] == 2).all())
    assert int(cache.count_nonzero()) == KV_HEADS * 2 * D


def test_while_memory_is_measured_the_output_is_zero(vllm: Vllm) -> None:
    impl = vllm.attention.FlashmoeImpl(HEADS, D, 1.0, KV_HEADS)
    output = torch.ones(3, HEADS, D)
    impl.forward(Layer("cpu"), output, output, output, torch.empty(0), None, output)
    assert not output.any()
    with pytest.raises(NotImplementedError, match="quantise its output"):
        impl.forward(Layer("cpu"), output, output, output, torch.empty(0), None, output, output_scale=torch.ones(1))


def test_an_encoder_sees_both_sides_without_a_cache(vllm: Vllm) -> None:
    impl = vllm.attention.FlashmoeImpl(HEADS, D, D**-0.5, HEADS, None, 4, "auto", None, "encoder_only")
    query = torch.randn(9, HEADS, D)
    starts = torch.tensor([0, 9], dtype=torch.int32)
    batch = vllm.attention.FlashmoeMetadata(9, 9, starts, 9, torch.tensor([9]), torch.empty(0), torch.empty(0))
    output = torch.empty_like(query)
    impl.do_kv_cache_update(Layer("cpu"), query, query, torch.empty(0), torch.empty(0))
    impl.forward(Layer("cpu"), query, query, query, torch.empty(0), batch, output)
    distance = torch.arange(9) - torch.arange(9).unsqueeze(1)
    q = query.transpose(0, 1)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=distance.abs() < 4).transpose(0, 1)
    assert torch.allclose(output, wanted, atol=1e-5)


def calls_of(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> list[Varlen]:
    """Collects the operator's arguments from now on."""
    asked: list[Varlen] = []
    real = vllm.attention.attention_out
    monkeypatch.setattr(
        vllm.attention, "attention_out", lambda out, given, *s: asked.append(given) or real(out, given, *s)
    )
    return asked


@pytest.mark.parametrize(
    ("sequences", "calls"),
    [
        (((33, 1), (1, 1), (17, 1)), [(3, True)]),
        (((33, 1), (1, 1), (0, 20), (17, 5)), [(2, True), (25, False)]),
        (((0, 20), (17, 1)), [(21, False)]),
        (((9, 3), (17, 3)), [(6, False)]),
        (((33, 1), (40, 1), (0, 1), (9, 2), (30, 1)), [(3, True), (3, False)]),
    ],
)
def test_requests_with_one_query_are_decoded_by_themselves(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch, device: str, sequences: Any, calls: list[tuple[int, bool]]
) -> None:
    asked = calls_of(vllm, monkeypatch)
    found, wanted, padding = serve(vllm, Case(sequences=sequences, cache="bfloat16"), device)
    assert [(given.q.shape[0], given.cu_seqlens_q is None) for given in asked] == calls
    assert torch.allclose(found.double(), wanted, atol=2e-2, rtol=2e-2)
    assert bool((padding == 7).all())
    assert vllm.attention.FlashmoeMetadataBuilder.reorder_batch_threshold == 1


def test_a_new_block_table_reaches_both_spans(vllm: Vllm) -> None:
    starts, lengths = torch.tensor([0, 1, 2, 7], dtype=torch.int32), torch.tensor([4, 9, 5])
    batch = vllm.attention.FlashmoeMetadata(7, 5, starts, 9, lengths, torch.zeros(3, 2), torch.zeros(7), num_decodes=2)
    builder = vllm.attention.FlashmoeMetadataBuilder
    moved = builder.update_block_table(builder, batch, torch.arange(6).view(3, 2), torch.ones(7))
    assert [span.table.tolist() for span in moved.spans] == [[[0, 1], [2, 3]], [[4, 5]]]
    assert [(span.first, span.end, span.max_query_len) for span in moved.spans] == [(0, 2, 1), (2, 7, 5)]
    assert moved.spans[0].starts is None
    assert moved.spans[1].starts.tolist() == [0, 5]


def test_an_output_of_vllms_that_does_not_fit_is_refused_in_words(vllm: Vllm) -> None:
    impl = vllm.attention.FlashmoeImpl(HEADS, D, 1.0, KV_HEADS)
    starts, one = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    batch = vllm.attention.FlashmoeMetadata(2, 2, starts, 2, one, one.view(1, 1), torch.zeros(2))
    query, cache = torch.zeros(2, HEADS, D), torch.zeros(4, KV_HEADS, BLOCK, 2 * D)
    with pytest.raises(ShapeError, match=r"out must have q's shape with v's head_dim, here \[2, 4, 16\]"):
        impl.forward(Layer("cpu"), query, query, query, cache, batch, torch.zeros(2, HEADS, 2 * D))


def test_batch_invariance_asks_for_the_same_bits(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.attention.envs, "VLLM_BATCH_INVARIANT", True)
    alone, _, _ = serve(vllm, Case(sequences=((33, 1),), cache="bfloat16"), "cpu")
    asked = calls_of(vllm, monkeypatch)
    again, _, _ = serve(vllm, Case(sequences=((33, 1),), cache="bfloat16"), "cpu")
    assert [given.num_splits for given in asked] == [CONSISTENT]
    assert torch.equal(alone, again)
    with pytest.raises(ArgumentError, match="ALiBi"):
        vllm.attention.FlashmoeImpl(HEADS, D, 1.0, alibi_slopes=[0.5] * HEADS)


def test_graphs_are_for_batches_of_one_query_length(vllm: Vllm) -> None:
    builder = vllm.attention.FlashmoeMetadataBuilder
    assert builder._cudagraph_support is vllm.backend.AttentionCGSupport.UNIFORM_BATCH
    batch = vllm.attention.FlashmoeMetadata(1, 1, *[torch.zeros(1)] * 1, 1, *[torch.zeros(1)] * 3)
    moved = builder.update_block_table(builder, batch, torch.ones(2), torch.ones(3))
    assert (moved.block_table.numel(), moved.slot_mapping.numel(), moved.seq_lens) == (2, 3, batch.seq_lens)


def test_a_causal_flag_for_each_request_is_refused(vllm: Vllm) -> None:
    builder = vllm.attention.FlashmoeMetadataBuilder(None, [], None, torch.device("cpu"))
    common = vllm.backend.CommonAttentionMetadata(
        *[torch.zeros(1)] * 3, 1, 1, 1, 1, *[torch.zeros(1)] * 2, causal=torch.ones(1)
    )
    with pytest.raises(ArgumentError, match="causal is a tensor"):
        builder.build(0, common)


ALLOWED: dict[str, Any] = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}


def reasons(vllm: Vllm, **changes: Any) -> list[str]:
    capability = engines.Capability(*changes.pop("capability", (9, 0)))
    config = vllm.selector.AttentionSelectorConfig(**{**ALLOWED, **changes})
    found: list[str] = vllm.attention.FlashmoeBackend.validate_configuration(
        device_capability=capability, **config._asdict()
    )
    return found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"has_sink": True, "kv_cache_dtype": "fp8", "capability": (8, 0)}, None),
        ({"use_batch_invariant": True, "kv_cache_dtype": "bfloat16"}, None),
        ({"head_size": 512}, "head_size"),
        ({"head_size": 20}, "head_size"),
        ({"use_mla": True}, "MLA"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "both must be the same"),
        ({"kv_cache_dtype": "fp8", "use_batch_invariant": True}, "not supported for fp8"),
        (
            {"kv_cache_dtype": "fp8", "dtype": torch.float16, "capability": (7, 5)},
            "fp8 cache needs compute capability 8.0",
        ),
        ({"capability": (7, 5)}, "bfloat16 needs compute capability 8.0; this GPU has 7.5"),
        ({"dtype": torch.float16, "capability": (7, 0)}, "compute capability"),
        ({"dtype": torch.float32}, "float32 has no CUDA kernel"),
        ({"use_kv_connector": True}, "KV connector"),
    ],
)
def test_what_is_not_covered_is_a_reason_of_vllms(vllm: Vllm, changes: dict[str, Any], reason: str | None) -> None:
    found = reasons(vllm, **changes)
    assert (found == []) if reason is None else (len(found) == 1 and reason in found[0])


def test_a_layer_that_cannot_run_here_is_vllms_own_and_told_once(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHMOE_FALLBACK", raising=False)
    vllm.plugin.register()
    vllm.plugin.register()
    custom = vllm.registry.AttentionBackendEnum.CUSTOM
    assert custom.get_path() == CUSTOM
    backends = vllm.registry.AttentionBackendEnum
    assert not hasattr(backends, "register") or backends["FLASHMOE"].get_path() == CUSTOM
    config = vllm.selector.AttentionSelectorConfig

    def chosen(**changes: Any) -> Any:
        return vllm.selector._cached_get_attn_backend(
            backend=custom, attn_selector_config=config(**{**ALLOWED, **changes}), num_heads=4
        )

    assert "Flashmoe" in str(chosen())
    with pytest.warns(UserWarning, match=r"not flashmoe: head_size not supported; FLASHMOE_FALLBACK=error"):
        assert "VllmOwn" in str(chosen(head_size=512))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "VllmOwn" in str(chosen(head_size=320))
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    with pytest.raises(ValueError, match="head_size not supported"):
        chosen(head_size=384)


def test_on_a_cpu_what_is_asked_for_is_taken_or_told(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would not ask the plug-in there, but use its own CPU backend."""
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "capability", None)
    monkeypatch.delenv("FLASHMOE_FALLBACK", raising=False)
    vllm.plugin.register()
    custom, config = vllm.registry.AttentionBackendEnum.CUSTOM, vllm.selector.AttentionSelectorConfig

    def chosen(**changes: Any) -> Any:
        return vllm.selector._cached_get_attn_backend(custom, config(**{**ALLOWED, **changes}))

    assert chosen(dtype=torch.float32) is vllm.attention.FlashmoeBackend
    with pytest.warns(UserWarning, match="head_size not supported"):
        assert "VllmOwn" in str(chosen(head_size=512))
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    with pytest.raises(ArgumentError, match="head_size not supported; remove --attention-backend"):
        chosen(head_size=384)


def test_anothers_custom_backend_stays(vllm: Vllm) -> None:
    custom = vllm.registry.AttentionBackendEnum.CUSTOM
    vllm.registry.register_backend(custom, "somebody.Backend")
    with pytest.warns(UserWarning, match="somebody.Backend"):
        vllm.plugin.register()
    assert custom.get_path() == "somebody.Backend"


def test_without_vllm_the_error_says_so() -> None:
    from flashmoe.integrations import vllm as plugin

    with pytest.raises(ArgumentError, match=r"vLLM cannot be used .* install vLLM 0\.24"):
        plugin.register()
