"""flashmoe's plug-in for SGLang, called as SGLang calls it: prefill with prefixes, decoding, pages; compared with float64 torch."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe.errors import ArgumentError
from tests.integrations import engines
from tests.integrations.sglang_stand_ins import KVWriteLoc, Mode, Pool, sglang_stand_ins
from tests.integrations.test_vllm import reference

HEADS, KV_HEADS, D, SLOTS = 4, 2, 16, 128


@pytest.fixture
def plugin() -> Iterator[Any]:
    with engines.installed(sglang_stand_ins(), "flashmoe.integrations.sglang"):
        yield importlib.import_module("flashmoe.integrations.sglang")


def runner_of(pool: Any, table: Any, page_size: int, **changes: Any) -> Any:
    given = {
        "req_to_token_pool": SimpleNamespace(req_to_token=table),
        "token_to_kv_pool": pool,
        "page_size": page_size,
        "use_mla_backend": False,
        "model_config": SimpleNamespace(is_encoder_decoder=False),
    }
    return SimpleNamespace(**{**given, **changes})


def layer_of(**changes: Any) -> Any:
    given = {
        "layer_id": 0,
        "tp_q_head_num": HEADS,
        "qk_head_dim": D,
        "v_head_dim": D,
        "scaling": D**-0.5,
        "logit_cap": 0.0,
    }
    given |= {
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "attn_type": "decoder",
        "k_scale": None,
        "v_scale": None,
    }
    return SimpleNamespace(**{**given, **changes})


def prepared(plugin: Any, device: str, form: str, page_size: int) -> SimpleNamespace:
    """A backend, a step of three requests with its cache before the step, and the step's result in float64."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" or form == "fp8" else torch.float32

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    befores, news = ([20, 3, 33], [1, 1, 1]) if form in ("decode", "graph") else ([0, 18, 5], [20, 3, 1])
    scale = torch.tensor(0.5, device=device) if form == "fp8" else None
    stored = torch.float8_e4m3fn if form == "fp8" else dtype
    pool = Pool(*(torch.zeros(SLOTS, KV_HEADS, D, device=device).to(stored) for _ in range(2)))
    table = torch.zeros(6, 64, dtype=torch.int32)
    requests, free = [4, 0, 2], torch.randperm(SLOTS // page_size, generator=generator).tolist()
    for request, before, new in zip(requests, befores, news, strict=True):
        pages = [free.pop() for _ in range(-(-(before + new) // page_size))]
        table[request, : before + new] = torch.tensor(
            [pages[at // page_size] * page_size + at % page_size for at in range(before + new)]
        )
    table = table.to(device)
    layer = layer_of(
        sliding_window_size=6 if form == "window" else -1,
        logit_cap=5.0 if form == "softcap" else 0.0,
        k_scale=scale,
        v_scale=scale,
    )
    keys, values = ([random(b + n, KV_HEADS, D) for b, n in zip(befores, news, strict=True)] for _ in range(2))
    for request, before, k, v in zip(requests, befores, keys, values, strict=True):
        pool.set_kv_buffer(layer, KVWriteLoc(table[request, :before].long()), k[:before], v[:before], scale, scale)
    plugin.register()
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    backend = registry.ATTENTION_BACKENDS["flashmoe"](runner_of(pool, table, page_size))
    lengths = torch.tensor(befores) + torch.tensor(news)
    batch = SimpleNamespace(
        batch_size=3,
        forward_mode=Mode("decode" if form in ("decode", "graph") else "extend"),
        spec_info=None,
        req_pool_indices=torch.tensor(requests, device=device),
        seq_lens=lengths.to(device),
        seq_lens_cpu=lengths,
        extend_seq_lens=torch.tensor(news, device=device),
        extend_seq_lens_cpu=news,
        out_cache_loc=torch.cat([table[r, b : b + n] for r, b, n in zip(requests, befores, news, strict=True)]).long(),
    )
    query, sinks = random(sum(news), HEADS * D), random(HEADS) if form == "sinks" else None
    fresh = [torch.cat([x[b:] for x, b in zip(each, befores, strict=True)]) for each in (keys, values)]
    rows = iter(query.view(-1, HEADS, D).split(news))
    wanted = []
    for k, v in zip(keys, values, strict=True):
        if form == "fp8":
            k, v = (0.5 * (x / 0.5).to(torch.float8_e4m3fn).float() for x in (k, v))
        wanted.append(reference(next(rows), k, v, 7 if form == "window" else None, layer.logit_cap, sinks, None))
    limit = 2e-5 if dtype == torch.float32 else 2e-2
    return SimpleNamespace(
        backend=backend,
        batch=batch,
        layer=layer,
        q=query,
        fresh=fresh,
        sinks=sinks,
        wanted=torch.cat(wanted),
        limit=limit,
    )


def is_right(step: SimpleNamespace, out: torch.Tensor) -> bool:
    return torch.allclose(out.view(-1, HEADS, D).double(), step.wanted, atol=step.limit, rtol=step.limit)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("form", ["prefill", "decode", "window", "softcap", "sinks", "fp8"])
def test_a_step_over_sglangs_pool_is_attention(plugin: Any, device: str, form: str, page_size: int) -> None:
    step = prepared(plugin, device, form, page_size)
    step.backend.init_forward_metadata(step.batch)
    forward = step.backend.forward_decode if form == "decode" else step.backend.forward_extend
    out = forward(step.q, *step.fresh, step.layer, step.batch, **({} if step.sinks is None else {"sinks": step.sinks}))
    assert is_right(step, out)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_captured_step_reads_the_lengths_and_pages_of_its_replay(plugin: Any, device: str, page_size: int) -> None:
    """SGLang captures decoding with lengths of 1 and rows of request 0, and replays it with a batch padded in the same way."""
    step, size = prepared(plugin, device, "graph", page_size), 4
    backend, fill = step.backend, step.backend.get_cuda_graph_seq_len_fill_value()
    backend.init_cuda_graph_state(size, size)
    ones = torch.full((size,), fill)
    padded = SimpleNamespace(
        batch_size=size, forward_mode=Mode("decode"), spec_info=None, out_cache_loc=torch.zeros_like(step.batch.seq_lens),
        req_pool_indices=torch.full((size,), 5, device=device), seq_lens=ones.to(device), seq_lens_cpu=ones,
    )  # fmt: skip
    q = torch.zeros(size, HEADS * D, dtype=step.q.dtype, device=device)
    backend.init_forward_metadata_out_graph(padded, in_capture=True)
    captured = backend.forward_metadata
    pool = backend.token_to_kv_pool

    def run() -> torch.Tensor:
        out: torch.Tensor = backend.forward_decode(q, None, None, step.layer, padded, save_kv_cache=False)
        return out

    graph, out = None, run()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
    for cut in (0, 1):  # the second replay has shorter requests: stale entries of the first are not read
        q[:3], padded.seq_lens[:3], padded.seq_lens_cpu[:3] = step.q, step.batch.seq_lens, step.batch.seq_lens_cpu
        padded.req_pool_indices[:3] = step.batch.req_pool_indices
        pool.set_kv_buffer(step.layer, KVWriteLoc(step.batch.out_cache_loc), *step.fresh)
        if cut:
            padded.seq_lens[:2], padded.seq_lens_cpu[:2] = 1, 1
        backend.init_forward_metadata_out_graph(padded)
        again = backend.forward_metadata
        assert all(
            x.data_ptr() == y.data_ptr() for x, y in ((captured.lengths, again.lengths), (captured.table, again.table))
        )
        assert (captured.longest_q, captured.longest_k) == (again.longest_q, again.longest_k) == (1, 64)
        if graph is None:
            backend.forward_metadata = captured
            out = run()
        else:
            graph.replay()
        rows = slice(2, 3) if cut else slice(0, 3)
        found = out.view(-1, HEADS, D)[rows].double()
        assert torch.allclose(found, step.wanted[rows], atol=step.limit, rtol=step.limit)


def test_a_second_registration_changes_nothing(plugin: Any) -> None:
    plugin.register()
    plugin.register()
    assert importlib.import_module("sglang.srt.server_args").ATTENTION_BACKEND_CHOICES == ["flashmoe"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla_backend": True}, "MLA"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "encoder-decoder"),
        ({"token_to_kv_pool": SimpleNamespace(swa_layer_nums=3)}, "--disable-hybrid-swa-memory"),
    ],
)
def test_a_model_that_is_not_covered_is_refused_at_start(plugin: Any, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        plugin.create_backend(runner_of(None, None, 1, **changes))


def test_what_comes_with_a_call_is_refused_by_name(plugin: Any) -> None:
    pool = Pool(torch.zeros(4, 1, 8), torch.zeros(4, 1, 8))
    backend = plugin.create_backend(runner_of(pool, torch.zeros(1, 4, dtype=torch.int32), 1))
    prompts = SimpleNamespace(forward_mode=Mode("extend"), spec_info=None)
    with pytest.raises(
        ArgumentError, match="does not support CUDA graphs of prompts; start with --cuda-graph-backend-prefill disabled"
    ):
        backend.init_forward_metadata_out_graph(prompts)
    with pytest.raises(ArgumentError, match="speculative"):
        backend.init_forward_metadata(SimpleNamespace(forward_mode=Mode("verify"), seq_lens=None, spec_info=None))
    backend.init_forward_metadata(SimpleNamespace(forward_mode=Mode("idle"), seq_lens=None))
    backend.forward_metadata = object()
    for layer, named in (
        (layer_of(is_cross_attention=True), "cross attention"),
        (layer_of(attn_type="encoder_only"), "encoder_only"),
    ):
        with pytest.raises(ArgumentError, match=named):
            backend.forward_extend(None, None, None, layer, None)
    with pytest.raises(ArgumentError, match="rel_bias, score_mod"):
        backend.forward_extend(None, None, None, layer_of(), None, score_mod=print, rel_bias=print, return_lse=False)


def test_without_sglang_the_error_says_so() -> None:
    from flashmoe.integrations import sglang as plugin

    with pytest.raises(ArgumentError, match=r"SGLang cannot be used .* install SGLang 0\.5\.19"):
        plugin.register()
