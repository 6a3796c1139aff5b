"""Dropout: the mask against its definition and statistics, results and gradients of every function against float64, and replaying the mask."""

import math

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashmoe
from flashmoe.attn.dropout import draw_state
from flashmoe.errors import ArgumentError, ArgumentTypeError, DeviceError, DifferentiationError, DtypeError, ShapeError
from flashmoe_tools.operations.attention import philox
from flashmoe_tools.operations.attention.reference import ScoreOptions, attend, weigh

from .reference import DTYPES, LSE_TOLERANCE, assert_ran_here, reference_dtype, tolerance

STATE = (0x1234567890ABCDEF, (7 << 40) + 3)  # both need more than 32 bits


def state_on(device: str, state: tuple[int, int] = STATE) -> Tensor:
    return torch.tensor(state, device=device)


# Counter, key, and the words in Random123's kat_vectors for seven rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_has_the_published_words(
    counter: philox.Words, key: tuple[int, int], words: philox.Words, device: str
) -> None:
    assert philox.philox4x32(counter, key) == words
    from flashmoe.attn.philox import philox as on_tensors

    found = on_tensors(*(tuple(torch.tensor(word, device=device) for word in given) for given in (counter, key)))
    assert tuple(int(word) for word in found) == words


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    offset=st.integers(-(1 << 63), (1 << 63) - 1),
    p=st.floats(0.0, 1.0, exclude_max=True),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 70)),
)
def test_the_mask_is_its_definition(seed: int, offset: int, p: float, sizes: tuple[int, int, int, int]) -> None:
    batch, heads, rows, keys = sizes
    mask = flashmoe.dropout_mask(torch.tensor((seed, offset)), p, batch, heads, rows, keys)
    wanted = torch.stack([philox.factors(seed, offset, p, b, heads, rows, keys) > 0 for b in range(batch)])
    assert torch.equal(mask, wanted)


def test_what_the_kernels_drop_is_the_mask(device: str) -> None:
    """Each row of P is uniform and V is the identity: the output is the mask, at every position of several tiles."""
    for dtype in DTYPES[device]:
        q = torch.zeros(2, 3, 150, 256, device=device, dtype=dtype)
        k = torch.zeros(2, 3, 256, 256, device=device, dtype=dtype)
        v = torch.eye(256, device=device, dtype=dtype).expand(2, 3, 256, 256)
        for head_dim in (64, 128, 256):
            state = state_on(device)
            own = (q[..., :head_dim], k[..., :head_dim])
            parts = v.split(head_dim, -1)
            found = torch.cat([flashmoe.attention(*own, part, dropout_p=0.25, rng_state=state) for part in parts], -1)
            assert_ran_here(device)
            mask = flashmoe.dropout_mask(state, 0.25, 2, 3, 150, 256)
            assert torch.equal(found != 0, mask)
            assert torch.allclose(found.float(), mask / (0.75 * 256), rtol=1e-2, atol=0)


def test_statistics(device: str) -> None:
    """Over 2^21 positions: the share that is kept, and that heads, rows, neighbours, sequences and calls agree only as often as by chance."""
    size, p = (2, 4, 512, 512), 0.3
    states = torch.tensor([(5, 0), (5, 1), (6, 0)], device=device)
    masks = [flashmoe.dropout_mask(state, p, *size) for state in states]
    first = masks[0]
    count = first.numel()
    chance = (1 - p) ** 2 + p**2

    def within(found: Tensor, wanted: float, of: int) -> bool:
        return abs(found.double().mean().item() - wanted) < 5 * math.sqrt(wanted * (1 - wanted) / of)

    for mask in masks:
        assert within(mask, 1 - p, count)
    assert (first.double().mean((0, 1, 3)) - (1 - p)).abs().max().item() < 6 * math.sqrt(p * (1 - p) / 4096)  # rows
    assert (first.double().mean((0, 1, 2)) - (1 - p)).abs().max().item() < 6 * math.sqrt(p * (1 - p) / 4096)  # keys
    pairs = {
        "calls": (first, masks[1]),
        "seeds": (first, masks[2]),
        "sequences": (first[0], first[1]),
        "heads": (first[:, 0], first[:, 1]),
        "rows": (first[:, :, :-1], first[:, :, 1:]),
        "rows of one draw": (first[:, :, :-8], first[:, :, 8:]),
        "keys": (first[..., :-1], first[..., 1:]),
        "keys of one draw": (first[..., :-8], first[..., 8:]),
        "words of one draw": (first[..., :-16], first[..., 16:]),
        "transposed": (first, first.mT),
    }
    for name, (a, b) in pairs.items():
        assert within(a == b, chance, a.numel()), name
    for wanted in (0.001, 0.1, 0.5, 0.9):  # the first is finer than a byte can represent
        assert within(flashmoe.dropout_mask(states[0], wanted, *size), 1 - wanted, count)


# heads, rows, keys, head dim, options, ALiBi or a mask
CASES = [
    ((4, 2), 70, 133, 64, ScoreOptions(causal=True), "alibi"),
    ((3, 3), 97, 40, 40, ScoreOptions(), ""),
    ((2, 1), 130, 130, 128, ScoreOptions(causal=True, softcap=15.0), ""),
    ((2, 2), 200, 211, 111, ScoreOptions(window=(33, 5)), ""),
    ((2, 2), 65, 300, 256, ScoreOptions(causal=True), "mask"),
    ((8, 2), 1, 700, 64, ScoreOptions(), ""),
    ((2, 2), 3, 259, 192, ScoreOptions(causal=True), ""),
    ((4, 2), 601, 700, 64, ScoreOptions(causal=True), ""),  # long enough for the fused backward kernel of sm90
    ((2, 2), 530, 513, 128, ScoreOptions(), ""),
    ((4, 2), 150, 201, 256, ScoreOptions(causal=True), ""),  # the two wgmma kernels
    ((2, 2), 200, 260, 208, ScoreOptions(window=(33, 5)), ""),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"q{case[1]}k{case[2]}d{case[3]}")
def test_dense_attention_and_its_gradients(
    device: str, case: tuple[tuple[int, int], int, int, int, ScoreOptions, str]
) -> None:
    (heads_q, heads_kv), rows, keys, dim, options, kind = case
    for dtype in DTYPES[device]:
        make = lambda heads, length: torch.randn(2, heads, length, dim, device=device).to(dtype).requires_grad_()  # noqa: B023, E731
        q, k, v = make(heads_q, rows), make(heads_kv, keys), make(heads_kv, keys)
        keywords = {"causal": options.causal, "window": options.window, "softcap": options.softcap}
        bias = torch.zeros(2, heads_q, rows, keys, device=device, dtype=dtype)
        if kind == "alibi":
            slopes = torch.rand(2, heads_q, device=device)
            own = torch.arange(rows, device=device).unsqueeze(1) + keys - rows
            bias = -slopes[..., None, None] * (own - torch.arange(keys, device=device)).abs()
            keywords["alibi_slopes"] = slopes
        elif kind == "mask":
            bias = torch.randn(2, 1, rows, keys, device=device).to(dtype).expand(-1, heads_q, -1, -1)
            keywords["attn_mask"] = bias
        state = state_on(device)
        out, lse = flashmoe.attention(q, k, v, **keywords, dropout_p=0.3, rng_state=state, return_lse=True)
        assert_ran_here(device)
        keep = flashmoe.dropout_mask(state, 0.3, 2, heads_q, rows, keys)
        high = reference_dtype(q.device)
        exact = [t.detach().to(high).requires_grad_() for t in (q, k, v)]
        plain = [t.detach().requires_grad_() for t in (q, k, v)]
        wanted, wanted_lse = dropped(*exact, options, bias.to(high), keep / 0.7)
        usual, _ = dropped(*plain, options, bias.to(dtype), keep / 0.7)
        assert (out.detach() - wanted.detach()).abs().max().item() <= tolerance(wanted.detach(), usual.detach())
        assert torch.allclose(lse.detach().to(high), wanted_lse.to(high), atol=LSE_TOLERANCE, rtol=LSE_TOLERANCE)
        upstream = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, k, v), upstream)
        expected = torch.autograd.grad(wanted, exact, upstream.to(high))
        rough = torch.autograd.grad(usual, plain, upstream)
        for name, a, b, c in zip("qkv", found, expected, rough, strict=True):
            assert (a - b).abs().max().item() <= tolerance(b, c) + 2e-5, name


def dropped(
    q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, bias: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse) by the definition, in the dtype of the inputs."""
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if options.softcap > 0:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores + bias
    hidden = options.hidden(q.shape[2], k.shape[2], q.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    weights, lse = weigh(scores)
    return (weights * factors.to(weights.dtype)).to(q.dtype) @ v.repeat_interleave(group, 1), lse


def test_without_dropout_the_definition_is_the_operation_s(device: str) -> None:
    q, k, v = (torch.randn(1, 2, 20, 16, device=device).to(reference_dtype(torch.device(device))) for _ in range(3))
    bias, ones = q.new_zeros(1, 2, 20, 20), q.new_ones(1, 2, 20, 20)
    options = ScoreOptions(causal=True, softcap=3.0)
    for found, wanted in zip(dropped(q, k, v, options, bias, ones), attend(q, k, v, options), strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


def test_ragged_and_dense_calls_drop_the_same(device: str) -> None:
    """Rows and keys are counted within their sequence, sequences within the batch: with different lengths, and for gradients too."""
    dtype = DTYPES[device][0]
    lengths_q, lengths_k = (5, 70, 0, 33), (70, 90, 3, 33)
    ends_q, ends_k = (torch.tensor([0, *n], device=device).cumsum(0).int() for n in (lengths_q, lengths_k))
    q, k, v = (
        torch.randn(sum(n), 4, 64, device=device).to(dtype).requires_grad_() for n in (lengths_q, lengths_k, lengths_k)
    )
    sinks = torch.randn(4, device=device, requires_grad=True)
    state = state_on(device)
    options = {"causal": True, "dropout_p": 0.4, "rng_state": state, "sinks": sinks}
    out = flashmoe.attention_varlen(q, k, v, ends_q, ends_k, 70, 90, **options)
    assert_ran_here(device)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v, sinks), upstream)
    dense = [torch.zeros(4, 4, n, 64, device=device, dtype=dtype) for n in (70, 90, 90)]
    for b in range(4):
        for target, source, ends in zip(dense, (q, k, v), (ends_q, ends_k, ends_k), strict=True):
            own = source.detach()[ends[b] : ends[b + 1]].transpose(0, 1)
            target[b, :, : own.shape[1]] = own
    for b in range(4):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        if lengths_q[b] == 0:
            continue
        # The batch up to b, cut to b's lengths: sequence b is the last one.
        own = [
            t[: b + 1, :, :n].clone() for t, n in zip(dense, (lengths_q[b], lengths_k[b], lengths_k[b]), strict=True)
        ]
        own = [t.requires_grad_() for t in own]
        wanted = flashmoe.attention(*own, **options)
        assert torch.allclose(out[rows].transpose(0, 1), wanted[b], atol=4e-3, rtol=4e-3)
        gradients = torch.autograd.grad(wanted[b], own, upstream[rows].transpose(0, 1))
        for index, (a, g) in enumerate(zip(found, gradients, strict=False)):
            part = a[rows if index == 0 else keys].transpose(0, 1)
            assert torch.allclose(part, g[b], atol=2e-2, rtol=2e-2)
    assert found[3].isfinite().all()


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 80),
    keys=st.integers(1, 150),
    dim=st.integers(1, 72),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    p=st.floats(0.0, 0.9),
    causal=st.booleans(),
    data_seed=st.integers(0, 1000),
)
def test_any_shape_on_the_cpu(
    rows: int, keys: int, dim: int, heads: tuple[int, int], p: float, causal: bool, data_seed: int
) -> None:
    generator = torch.Generator().manual_seed(data_seed)
    make = lambda h, n: torch.randn(2, h, n, dim, generator=generator, requires_grad=True)  # noqa: E731
    q, k, v = make(heads[0], rows), make(heads[1], keys), make(heads[1], keys)
    state = torch.tensor((data_seed, rows))
    out = flashmoe.attention(q, k, v, causal=causal, dropout_p=p, rng_state=state)
    keep = flashmoe.dropout_mask(state, p, 2, heads[0], rows, keys) if p > 0 else torch.ones(2, heads[0], rows, keys)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    options, bias = ScoreOptions(causal=causal), torch.zeros(1, dtype=torch.float64)
    wanted, _ = dropped(*exact, options, bias, keep / (1 - p))
    assert torch.allclose(out.double(), wanted, atol=2e-5, rtol=2e-5)
    upstream = torch.randn(out.shape, generator=generator)
    found = torch.autograd.grad(out, (q, k, v), upstream)
    for a, b in zip(found, torch.autograd.grad(wanted, exact, upstream.double()), strict=True):
        assert torch.allclose(a.double(), b, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("rows", [5, 70])
def test_a_gradient_of_nan_reaches_the_values_that_were_not_dropped(rows: int) -> None:
    q, k, v = (torch.randn(1, 2, n, 24, requires_grad=True) for n in (rows, 150, 150))
    out = flashmoe.attention(q, k, v, dropout_p=0.5, rng_state=state_on("cpu"))
    found = []
    for value in (1.0, torch.nan):
        upstream = torch.zeros_like(out)
        upstream[:, :, 3] = value
        (gradient,) = torch.autograd.grad(out, v, upstream, retain_graph=True)
        found.append(gradient)
    assert torch.equal(found[1].isnan(), found[0] != 0)


def test_the_default_generator_decides(device: str) -> None:
    dtype = DTYPES[device][0]
    q, k, v = (torch.randn(1, 2, 64, 64, device=device).to(dtype) for _ in range(3))
    torch.manual_seed(3)
    first, second = (flashmoe.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(flashmoe.attention(q, k, v, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    state = draw_state(q.device)
    assert state.shape == (2,)
    assert torch.equal(flashmoe.attention(q, k, v, dropout_p=0.5, rng_state=state), first)
    plain = flashmoe.attention(q, k, v)
    assert torch.equal(flashmoe.attention(q, k, v, dropout_p=0.0, rng_state=state), plain)
    torch.manual_seed(3)
    flashmoe.attention(q, k, v, dropout_p=0.0)
    assert torch.equal(draw_state(q.device), state)  # without dropout nothing is drawn


def test_a_checkpoint_replays_the_mask(device: str) -> None:
    dtype = DTYPES[device][0]
    tensors = [torch.randn(1, 2, 70, 64, device=device).to(dtype).requires_grad_() for _ in range(3)]
    call = lambda *t: flashmoe.attention(*t, dropout_p=0.5)  # noqa: E731
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(5)
        out = torch.utils.checkpoint.checkpoint(call, *tensors, use_reentrant=False) if checkpointed else call(*tensors)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), tensors)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_compiled_code_without_a_break(device: str) -> None:
    dtype = DTYPES[device][0]
    tensors = [torch.randn(1, 4, 40, 32, device=device).to(dtype).requires_grad_() for _ in range(3)]
    state = state_on(device)
    compiled = torch.compile(
        lambda q, k, v, s: flashmoe.attention(q, k, v, causal=True, dropout_p=0.25, rng_state=s),
        backend="aot_eager",
        fullgraph=True,
    )
    out = compiled(*tensors, state)
    wanted = flashmoe.attention(*tensors, causal=True, dropout_p=0.25, rng_state=state)
    assert torch.equal(out, wanted)
    upstream = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad(one, tensors, upstream) for one in (out, wanted)), strict=True):
        assert torch.equal(a, b)
    drawn = torch.compile(lambda *t: flashmoe.attention(*t, dropout_p=0.25), backend="aot_eager", fullgraph=True)
    assert not torch.equal(drawn(*tensors), drawn(*tensors))


def test_the_operators_are_what_torch_takes_them_for(device: str) -> None:
    dtype = DTYPES[device][0]
    q, k, v = (torch.randn(1, 2, 20, 32, device=device).to(dtype).requires_grad_() for _ in range(3))
    numbers = (0, 0, 32**-0.5, -1, 0, 0.0, 0)
    given = (q, k, v, *(None,) * 6, *numbers, 0.25, state_on(device))
    torch.library.opcheck(torch.ops.flashmoe.attention_dropout_forward.default, given)


def test_transforms_and_autocast(device: str) -> None:
    q, k, v = (torch.randn(3, 1, 4, 50, 32, device=device).to(DTYPES[device][0]) for _ in range(3))
    state = state_on(device)
    call = lambda *t: flashmoe.attention(*t, dropout_p=0.3, rng_state=state)  # noqa: E731
    each = torch.stack([call(*tensors) for tensors in zip(q, k, v, strict=True)])
    assert torch.equal(torch.func.vmap(call)(q, k, v), each)  # each element is a separate call with the same state
    gradient = torch.func.grad(lambda q: call(q, k[0], v[0]).float().square().sum())(q[0])
    leaf = q[0].clone().requires_grad_()
    assert torch.equal(gradient, torch.autograd.grad(call(leaf, k[0], v[0]).float().square().sum(), leaf)[0])
    with torch.autocast(device, torch.bfloat16):
        out = call(*(t[0].float() for t in (q, k, v)))
    assert torch.equal(out, call(*(t[0].bfloat16() for t in (q, k, v))))


def test_a_row_s_bits_do_not_depend_on_threads_or_runs(device: str) -> None:
    dtype = DTYPES[device][0]
    tensors = [torch.randn(2, 4, 300, 64, device=device).to(dtype).requires_grad_() for _ in range(3)]
    state, found = state_on(device), []
    upstream = torch.randn(2, 4, 300, 64, device=device).to(dtype)
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        out = flashmoe.attention(*tensors, causal=True, dropout_p=0.3, rng_state=state)
        found.append((out, *torch.autograd.grad(out, tensors, upstream)))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_a_cuda_graph_draws_anew() -> None:
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    fixed = state_on("cuda")
    flashmoe.attention(q, k, v, dropout_p=0.5)  # loads whatever a first call loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = flashmoe.attention(q, k, v, dropout_p=0.5)
        given = flashmoe.attention(q, k, v, dropout_p=0.5, rng_state=fixed)
    results = []
    for _ in range(2):
        graph.replay()
        results.append((drawn.clone(), given.clone()))
    assert not torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    fixed[1] += 1  # the state is read when the graph runs
    graph.replay()
    assert not torch.equal(given, results[0][1])
    assert torch.equal(given, flashmoe.attention(q, k, v, dropout_p=0.5, rng_state=fixed))


@pytest.mark.gpu
def test_a_gpu_drops_what_the_cpu_drops() -> None:
    q, k, v = (torch.randn(2, 4, 150, 64, dtype=torch.float16) for _ in range(3))
    state = state_on("cpu")
    found = flashmoe.attention(*(t.cuda() for t in (q, k, v)), causal=True, dropout_p=0.5, rng_state=state.cuda())
    wanted = flashmoe.attention(q, k, v, causal=True, dropout_p=0.5, rng_state=state)
    assert torch.allclose(found.cpu(), wanted, atol=4e-3, rtol=4e-3)


def test_what_is_refused(device: str) -> None:
    q = torch.randn(2, 4, 8, 32, device=device).to(DTYPES[device][0])
    state = state_on(device)
    for wrong in (-0.1, 1.0, 1.5, math.nan):
        with pytest.raises(ArgumentError, match=r"dropout_p must be at least 0 and less than 1; found"):
            flashmoe.attention(q, q, q, dropout_p=wrong)
    with pytest.raises(ArgumentTypeError, match="dropout_p must be a number; found Tensor"):
        flashmoe.attention(q, q, q, dropout_p=torch.tensor(0.5))  # type: ignore[call-overload]
    with pytest.raises(ArgumentTypeError, match="rng_state must be an int64 tensor"):
        flashmoe.attention(q, q, q, dropout_p=0.5, rng_state=3)  # type: ignore[call-overload]
    with pytest.raises(DtypeError, match=r"rng_state must be torch.int64"):
        flashmoe.attention(q, q, q, dropout_p=0.5, rng_state=state.int())
    with pytest.raises(ShapeError, match="rng_state must have 2 elements"):
        flashmoe.attention(q, q, q, dropout_p=0.5, rng_state=state.repeat(2))
    with pytest.raises(DeviceError, match="rng_state must be on q's device"):
        flashmoe.attention(q, q, q, dropout_p=0.5, rng_state=state.to("meta"))
    cache, used = q.transpose(1, 2).contiguous(), torch.full((2,), 8, device=device, dtype=torch.int32)
    rows = torch.arange(0, 17, 8, device=device, dtype=torch.int32)
    table = torch.arange(2, device=device, dtype=torch.int32).view(2, 1)
    with pytest.raises(ArgumentError, match="dropout_p is not supported with block_table"):
        flashmoe.attention_varlen(
            cache.flatten(0, 1), cache, cache, rows, None, 8, 8, seqused_k=used, block_table=table, dropout_p=0.5
        )
    with pytest.raises(ArgumentTypeError, match="no argument 'dropout_p': dropout is not supported with a cache"):
        flashmoe.attention_with_kvcache(q, q, q, cache_seqlens=used, dropout_p=0.5)  # type: ignore[call-overload]
    leaf = q.clone().requires_grad_()
    out = flashmoe.attention(leaf, leaf, leaf, dropout_p=0.5)
    (once,) = torch.autograd.grad(out.float().square().sum(), leaf, create_graph=True)
    with pytest.raises(DifferentiationError, match="second derivative"):
        torch.autograd.grad(once.float().sum(), leaf)
