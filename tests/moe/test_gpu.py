"""Tests that need a GPU: every kernel family at the sizes of real models, the same bits in repeated runs and in any batch, memory
past 2^31 elements, CUDA graphs."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

import flashmoe

from .layer import leaf_names, run, run_backward
from .reference import ACTIVATIONS, LAYOUTS, ROUTINGS, Case, Expected, Inputs, compare, compare_all, expect, make_inputs

pytestmark = pytest.mark.gpu
BF16, F16 = torch.bfloat16, torch.float16
MODELS = {
    "qwen3": Case(1, experts=128, top_k=8, hidden=2048, intermediate=768, dtype=BF16),
    "mixtral": Case(1, experts=8, top_k=2, hidden=4096, intermediate=7168, dtype=BF16),
    "gpt-oss": Case(
        1,
        experts=32,  # of 128: the reference uses eight bytes per element
        top_k=4,
        hidden=2880,
        intermediate=2880,
        dtype=BF16,
        activation="clamped_swiglu",
        layout="interleaved",
        biases=True,
    ),
    "olmoe": Case(1, experts=64, top_k=8, hidden=2048, intermediate=1024, dtype=BF16),
}
FAMILIES = {(9, 0): ("sm90", "sm80", "sm75"), (8, 0): ("sm80", "sm75"), (7, 5): ("sm75",)}


@pytest.fixture
def empty_cache() -> Iterator[None]:
    """Empties the cache around a test that needs most of the memory."""
    known.cache_clear()
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True, scope="module")
def forget() -> Iterator[None]:
    yield
    known.cache_clear()


@pytest.fixture(params=["", "sm90", "sm80", "sm75"], ids=lambda family: family or "chosen")
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The family that the call is forced to use; "" for the default choice."""
    capability = torch.cuda.get_device_capability()
    here = next((names for least, names in FAMILIES.items() if capability >= least), ())
    if request.param and request.param not in here:
        pytest.skip("this GPU does not run the family")
    monkeypatch.setenv("FLASHMOE_KERNEL", request.param)
    return str(request.param)


def for_family(case: Case, family: str) -> Case:
    return replace(case, dtype=F16) if family == "sm75" else case


def scaled(case: Case) -> Case:
    """A quarter of every size, in odd multiples of 8; two thirds of the experts."""
    down = {name: getattr(case, name) // 32 * 8 + 8 for name in ("hidden", "intermediate")}
    experts = max(case.top_k, case.experts * 2 // 3)
    return replace(case, experts=experts, **down)  # type: ignore[arg-type]


def poison() -> None:
    """Fills memory that the next workspaces are likely to reuse with NaN."""
    blocks = [torch.full((1 << size,), float("nan"), device="cuda") for size in range(8, 27)]
    del blocks


def posed(case: Case, seed: int, kind: str, with_gradients: bool) -> tuple[Inputs, Tensor, Expected]:
    inputs = make_inputs(case, seed, kind, device="cuda")
    dout = torch.randn(case.tokens, case.hidden, device="cuda").to(case.dtype)
    return inputs, dout, expect(case, inputs, dout if with_gradients else None)


known = lru_cache(maxsize=40)(posed)  # every family is compared with the same reference


def check(case: Case, kind: str = "normal", *, with_gradients: bool = True, remember: bool = True) -> None:
    """Compares with float64 by the rule of tests/moe/reference.py."""
    inputs, dout, expected = (known if remember else posed)(case, 0, kind, with_gradients)
    poison()
    if not with_gradients:
        compare("out", run(case, inputs), expected.out, expected.tolerance)
        return
    out, gradients = run_backward(case, inputs, dout)
    compare("out", out, expected.out, expected.tolerance)
    compare_all(leaf_names(inputs), gradients, expected)


# Results


@pytest.mark.parametrize("tokens", [1, 64, 1024])
@pytest.mark.parametrize("model", MODELS)
def test_scaled_models(family: str, model: str, tokens: int) -> None:
    check(for_family(replace(scaled(MODELS[model]), tokens=tokens, shared=True), family))


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("tokens", [1, 16, 128, 2048])
@pytest.mark.parametrize("model", MODELS)
def test_real_models(model: str, tokens: int) -> None:
    check(replace(MODELS[model], tokens=tokens), with_gradients=tokens >= 128, remember=False)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [9, 700])
def test_layouts(family: str, dtype: torch.dtype, layout: str, transposed: bool, tokens: int) -> None:
    """All options at once; sizes with partial tiles of rows, columns and the summed dimension."""
    extras = {"biases": True, "shared": True, "mapped": True, "sentinels": True}
    case = Case(
        tokens, experts=5, hidden=264, intermediate=136, dtype=dtype, layout=layout, transposed=transposed, **extras
    )
    check(for_family(case, family))


@pytest.mark.parametrize("views", [False, True], ids=["dense", "views"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_weights_are_read_where_they_lie(family: str, views: bool, layout: str) -> None:
    case = for_family(Case(90, experts=3, hidden=128, intermediate=72, dtype=BF16, layout=layout), family)
    inputs = make_inputs(case, device="cuda")
    plain = run(case, inputs)
    if views:
        inputs.w13, inputs.w2 = (w.mT.contiguous().mT for w in (inputs.w13, inputs.w2))
    assert torch.equal(run(case, inputs), plain)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [11, 400])
def test_activations(family: str, activation: str, tokens: int) -> None:
    case = Case(tokens, experts=3, hidden=64, intermediate=96, dtype=BF16, activation=activation, biases=True)
    check(for_family(case, family), kind="shifted")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [30, 3000])
def test_routings(family: str, routing: str, tokens: int) -> None:
    """Experts without rows, one with all of them, and skewed distributions."""
    check(
        for_family(Case(tokens, experts=40, top_k=1, hidden=64, intermediate=48, dtype=BF16, routing=routing), family)
    )


@pytest.mark.parametrize("kind", ["outlier", "large"])
def test_values(family: str, kind: str) -> None:
    check(for_family(Case(333, hidden=128, intermediate=64, dtype=BF16), family), kind=kind)


@pytest.mark.parametrize(
    "case", [Case(3, experts=1024, top_k=32), Case(40, experts=6, top_k=6), Case(1, hidden=8, intermediate=8)], ids=str
)
def test_ends_of_the_range(family: str, case: Case) -> None:
    check(for_family(replace(case, dtype=BF16), family))


def test_the_last_kernel_is_named(family: str) -> None:
    case = for_family(Case(4000, dtype=BF16), family)
    run(case, make_inputs(case, device="cuda"))
    name = flashmoe._extension.last_kernel()
    assert name.startswith("flashmoe_grouped_gemm_gated_")
    assert family in name


# The same bits


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [16, 2048])
def test_a_thousand_runs_give_the_same_bits(tokens: int) -> None:
    """Forward and backward, while other work runs concurrently."""
    case = replace(scaled(MODELS["qwen3"]), tokens=tokens, biases=True, shared=True)
    inputs = make_inputs(case, device="cuda")
    dout = torch.randn_like(inputs.x)
    first = run_backward(case, inputs, dout)
    other = torch.cuda.Stream()
    noise = torch.randn(1024, 1024, device="cuda")
    for index in range(1000):
        if index % 5 == 0:
            with torch.cuda.stream(other):
                noise = noise @ noise / 32
        out, gradients = run_backward(case, inputs, dout)
        same = [torch.equal(out, first[0]), *(torch.equal(a, b) for a, b in zip(gradients, first[1], strict=True))]
        assert all(same), f"run {index}: {same}"


@pytest.mark.parametrize("model", MODELS)
def test_a_token_gets_the_same_bits_in_any_company(family: str, model: str) -> None:
    """On its own, among few and among many: from the kernels for few rows to the largest tile."""
    case = for_family(replace(scaled(MODELS[model]), tokens=4096), family)
    inputs = make_inputs(case, device="cuda")
    everything = run(case, inputs)
    for tokens in (1, 3, 16, 64, 200, 1000):
        for begin in (0, 4096 - tokens):
            rows = slice(begin, begin + tokens)
            part = replace(
                inputs, x=inputs.x[rows], topk_ids=inputs.topk_ids[rows], topk_weights=inputs.topk_weights[rows]
            )
            assert torch.equal(run(case, part), everything[rows]), (tokens, begin)


@pytest.mark.parametrize("tokens", [16, 300])
def test_all_families_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """The default choice, kernels for few rows and wgmma tiles, compared with mma.sync: both add 16 products of k at a time, in order."""
    case = replace(scaled(MODELS["qwen3"]), tokens=tokens)
    inputs = make_inputs(case, device="cuda")
    chosen = run(case, inputs)
    monkeypatch.setenv("FLASHMOE_KERNEL", "sm80")
    assert torch.equal(run(case, inputs), chosen)


# Memory


def test_a_nan_stays_in_its_token(family: str) -> None:
    case = for_family(Case(300, experts=4, hidden=64, intermediate=64, dtype=BF16), family)
    inputs = make_inputs(case, device="cuda")
    expected = run(case, inputs)
    inputs.x[77] = float("nan")
    found = run(case, inputs)
    assert found[77].isnan().all()
    others = torch.arange(300, device="cuda") != 77
    assert torch.equal(found[others], expected[others])


def test_weights_of_experts_that_nobody_chose_are_not_looked_at(family: str) -> None:
    case = for_family(Case(300, experts=6, hidden=72, intermediate=40, dtype=BF16, biases=True), family)
    inputs = make_inputs(case, device="cuda")
    inputs.topk_ids = inputs.topk_ids % 3 * 2
    dout = torch.randn_like(inputs.x)
    expected, gradients = run_backward(case, inputs, dout)
    for tensor in (inputs.w13, inputs.w2, inputs.b13, inputs.b2):
        assert tensor is not None
        tensor[1::2] = float("nan")
    found, again = run_backward(case, inputs, dout)
    assert torch.equal(found, expected)
    for a, b in zip(again, gradients, strict=True):
        assert torch.equal(a, b)


def test_nothing_is_written_past_the_results(family: str) -> None:
    """Checks guards around the caller's output."""
    case = for_family(Case(45, hidden=64, intermediate=40, dtype=BF16), family)
    inputs = make_inputs(case, device="cuda")
    wide = torch.full((case.tokens + 2, case.hidden + 16), 7.0, dtype=case.dtype, device="cuda")
    out = wide[1:-1, 8:-8]
    with torch.no_grad():
        flashmoe.fused_moe(inputs.x, inputs.w13, inputs.w2, inputs.topk_weights, inputs.topk_ids, out=out)
    assert torch.equal(out, run(case, inputs))
    out.fill_(7.0)
    assert (wide == 7.0).all()


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache")
def test_more_than_2_to_the_31_elements() -> None:
    """Rows, activations and their gradients past 32-bit offsets: the last tokens have the results that they have on their own."""
    case = Case(70_000, experts=4, top_k=8 // 2, hidden=8192, intermediate=4096, dtype=BF16)  # 2.3e9 elements of rows
    needed = 60 << 30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory")
    inputs = make_inputs(replace(case, tokens=256), device="cuda")
    several = -(-case.tokens // 256)
    many = replace(
        inputs,
        x=inputs.x.repeat(several, 1),
        topk_ids=inputs.topk_ids.repeat(several, 1),
        topk_weights=inputs.topk_weights.repeat(several, 1),
    )
    out = run(case, many)
    alone = run(case, inputs)
    for begin in (0, len(many.x) // 2 // 256 * 256, len(many.x) - 256):
        assert torch.equal(out[begin : begin + 256], alone)
    del out
    many.x.requires_grad_()
    (dx,) = torch.autograd.grad(run(case, many), many.x, many.x.detach())
    x = inputs.x.clone().requires_grad_()
    (alone,) = torch.autograd.grad(run(case, inputs_with(inputs, x)), x, inputs.x)
    for begin in (0, len(dx) - 256):
        assert torch.equal(dx[begin : begin + 256], alone)


def inputs_with(inputs: Inputs, x: Tensor) -> Inputs:
    return replace(inputs, x=x)


# Graphs, streams


def in_graph(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize("tokens", [8, 1500])
def test_graphs_follow_the_routing(family: str, tokens: int) -> None:
    """Captured once, replayed with other ids and inputs: the host holds no routing data."""
    case = for_family(Case(tokens, experts=16, hidden=128, intermediate=64, dtype=BF16), family)
    inputs = make_inputs(case, device="cuda")
    graph, out = in_graph(lambda: run(case, inputs))
    for seed in range(1, 4):
        other = make_inputs(replace(case, routing=ROUTINGS[seed]), seed, device="cuda")
        for name in ("x", "w13", "w2", "topk_weights", "topk_ids"):
            getattr(inputs, name).copy_(getattr(other, name))
        graph.replay()
        assert torch.equal(out, run(case, other))


def test_a_training_step_in_a_graph() -> None:
    case = Case(900, experts=8, hidden=128, intermediate=64, dtype=BF16, biases=True, shared=True)
    inputs = make_inputs(case, device="cuda")
    dout = torch.randn_like(inputs.x)
    expected, gradients = run_backward(case, inputs, dout)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run_backward(case, inputs, dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, captured = run_backward(case, inputs, dout)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
        for a, b in zip(captured, gradients, strict=True):
            assert torch.equal(a, b)


def test_memory_of_a_training_step() -> None:
    """In addition to the results only the preactivation, which its gradient overwrites, rows of one width and the sort."""
    case = Case(4096, experts=64, top_k=4, hidden=512, intermediate=256, dtype=BF16)
    inputs = make_inputs(case, device="cuda")
    dout = torch.randn_like(inputs.x)
    run_backward(case, inputs, dout)
    slots = case.tokens * case.top_k
    leaves = [leaf.requires_grad_() for leaf in inputs.to(case.dtype).leaves()]
    own = Inputs(**{**vars(inputs), **dict(zip(leaf_names(inputs), leaves, strict=True))})
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(run(case, own), leaves, dout)
    results = sum(leaf.nbytes for leaf in leaves) + inputs.x.nbytes
    kept = 2 * slots * (2 * case.intermediate + case.hidden) + 16 * slots
    assert torch.cuda.max_memory_allocated() - before <= 1.01 * (results + kept) + 2**20


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu() -> None:
    case = Case(600, experts=8, hidden=128, intermediate=64, dtype=BF16)
    inputs = make_inputs(case, device="cuda")
    dout = torch.randn_like(inputs.x)
    logits = torch.randn(600, 8, device="cuda", requires_grad=True)
    run_backward(case, inputs, dout)
    try:
        torch.cuda.set_sync_debug_mode("error")
        run_backward(case, inputs, dout)
        weights, _ = flashmoe.topk_route(logits, 2)
        weights.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_streams_beside_each_other() -> None:
    """Each stream has separate tile counters and workspaces."""
    case = Case(3000, experts=8, hidden=256, intermediate=128, dtype=BF16)
    inputs = make_inputs(case, device="cuda")
    expected = run(case, inputs)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(run(case, inputs))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)
