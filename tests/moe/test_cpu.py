"""The CPU backend: every dtype, layout, activation and instruction set compared with the reference, forward and backward."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashmoe import _extension
from flashmoe.variables import CPU_ISAS
from tests.moe.layer import leaf_names, run, run_backward
from tests.moe.reference import (
    ACTIVATIONS,
    LAYOUTS,
    ROUTINGS,
    Case,
    Inputs,
    allowed,
    compare,
    compare_all,
    differentiate,
    expect,
    make_inputs,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ISAS = tuple(isa for isa in CPU_ISAS if isa != "amx")  # it runs the kernels of the preceding one
FULL = Case(tokens=37, experts=5, biases=True, shared=True, mapped=True, sentinels=True)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """One instruction set forced; a test of one that this machine lacks is reported as not run."""
    before = _extension.cpu_isa()
    try:
        _extension.set_cpu_isa(request.param)
    except Exception as error:  # from the extension, of any type
        pytest.skip(f"not run: {error}")
    yield request.param
    _extension.set_cpu_isa(before)


def poison() -> None:
    """Fills memory that the next results are likely to reuse with NaN."""
    blocks = [torch.full((1 << size,), math.nan) for size in range(8, 18)]
    del blocks


def check(case: Case, seed: int = 0, kind: str = "normal") -> None:
    """Checks forward and all gradients."""
    inputs = make_inputs(case, seed, kind)
    dout = torch.randn(case.tokens, case.hidden, generator=torch.Generator().manual_seed(seed + 1)).to(case.dtype)
    expected = expect(case, inputs, dout)
    poison()
    out, gradients = run_backward(case, inputs, dout)
    compare("out", out, expected.out, expected.tolerance)
    compare_all(leaf_names(inputs), gradients, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_layouts(isa: str, dtype: torch.dtype, layout: str, transposed: bool) -> None:
    """Biases, a shared expert, an expert map and sentinels; sizes with partial tiles of rows, columns and the summed dimension."""
    check(replace(FULL, dtype=dtype, layout=layout, transposed=transposed, hidden=40, intermediate=72))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_dout_apart(dtype: torch.dtype) -> None:
    """An upstream gradient that is a slice of wider rows, which is multiplied by the slots' weights if there is a b2."""
    case = replace(FULL, dtype=dtype)
    inputs = make_inputs(case, 3, "normal")
    wide = torch.randn(case.tokens, case.hidden + 24, generator=torch.Generator().manual_seed(4)).to(dtype)
    dout = wide[:, 8 : 8 + case.hidden]
    expected = expect(case, inputs, dout.contiguous())
    compare_all(leaf_names(inputs), run_backward(case, inputs, dout)[1], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(isa: str, dtype: torch.dtype, activation: str) -> None:
    check(replace(FULL, dtype=dtype, activation=activation), kind="shifted")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_slopes_of_gates(isa: str, activation: str) -> None:
    """For each gate value: with one token, x = 0 and ``up`` = 1, the gradient of b13 is the slope."""
    gates = torch.linspace(-12, 12, 4801)
    count = len(gates)
    case = Case(1, experts=1, top_k=1, hidden=1, intermediate=count, activation=activation, biases=True)
    inputs = Inputs(
        *(torch.zeros(1, 1), torch.zeros(1, 2 * count, 1), torch.ones(1, 1, count), torch.ones(1, 1)),
        torch.zeros(1, 1, dtype=torch.int64),
        b13=torch.cat([gates, torch.ones(count)])[None],
        b2=torch.zeros(1, 1),
    )
    dout = torch.ones(1, 1)
    _, exact = differentiate(case, inputs.to(torch.float64), dout)
    _, found = run_backward(case, inputs, dout)
    index = leaf_names(inputs).index("b13")
    units = torch.finfo(torch.float32).eps * exact[index].abs().clamp(min=1)
    compare("slopes, in units of 1", (found[index] - exact[index]) / units, torch.zeros_like(exact[index]), 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(dtype: torch.dtype, routing: str) -> None:
    """Empty experts, and one with all rows, which are more than one task processes."""
    check(Case(300, experts=9, top_k=1, dtype=dtype, routing=routing))


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sums(isa: str, dtype: torch.dtype) -> None:
    """Several blocks of the summed dimension, forward and in the weights' gradients."""
    check(Case(520, experts=2, top_k=1, hidden=600, intermediate=72, dtype=dtype, routing="one"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["outlier", "large"])
def test_values(dtype: torch.dtype, kind: str) -> None:
    check(Case(33, dtype=dtype, activation="clamped_swiglu"), kind=kind)


@pytest.mark.parametrize(
    "case",
    [
        Case(0),
        Case(1, experts=1, top_k=1, hidden=8, intermediate=8),
        Case(2, experts=1, top_k=1, mapped=True, routing="one"),  # the chosen expert is on another device
        Case(5, experts=6, top_k=6),
        Case(3, experts=40, top_k=32),
        Case(7, hidden=33, intermediate=17, biases=True),
        Case(7, hidden=33, intermediate=17, dtype=torch.bfloat16, transposed=True),
        Case(7, hidden=1, intermediate=1, layout="interleaved"),
        Case(9, ids_dtype=torch.int32),
        Case(9, dtype=torch.bfloat16, weights_dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_sizes(case: Case) -> None:
    check(case)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 70),
    experts=st.integers(1, 12),
    top_k=st.integers(1, 4),
    hidden=st.integers(1, 90),
    intermediate=st.integers(1, 90),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
    layout=st.sampled_from(LAYOUTS),
    routing=st.sampled_from(ROUTINGS),
    flags=st.integers(0, 31),
    seed=st.integers(0, 99),
)
def test_anything(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    activation: str,
    layout: str,
    routing: str,
    flags: int,
    seed: int,
) -> None:
    if activation.startswith(
        "geglu"
    ):  # 1 + erf cancels for a negative gate: with a single element its rounding would be the whole result
        intermediate = max(intermediate, 16)
    transposed, biases, shared, mapped, sentinels = (bool(flags >> bit & 1) for bit in range(5))
    sizes = {"tokens": tokens, "experts": experts, "top_k": min(top_k, experts), "hidden": hidden}
    words = {"dtype": dtype, "activation": activation, "layout": layout, "routing": routing}
    case = Case(**sizes, intermediate=intermediate, **words, transposed=transposed, biases=biases)  # type: ignore[arg-type]
    check(replace(case, shared=shared, mapped=mapped, sentinels=sentinels), seed)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeats_and_threads(dtype: torch.dtype) -> None:
    """The same bits every time, with one, two and three threads, forward and backward."""
    case = replace(FULL, tokens=150, hidden=160, intermediate=96, dtype=dtype)
    inputs = make_inputs(case)
    dout = torch.randn(case.tokens, case.hidden).to(dtype)
    first_out, first = run_backward(case, inputs, dout)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, *[2] * 20):
            torch.set_num_threads(count)
            poison()
            out, gradients = run_backward(case, inputs, dout)
            assert torch.equal(bits(out), bits(first_out))
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(gradients, first, strict=True))
    finally:
        torch.set_num_threads(threads)


def rows_of(inputs: Inputs, tokens: Tensor) -> Inputs:
    """The batch with only these tokens."""
    shared = None if inputs.shared is None else inputs.shared[tokens]
    chosen = {"x": inputs.x[tokens], "topk_ids": inputs.topk_ids[tokens], "topk_weights": inputs.topk_weights[tokens]}
    return Inputs(**{**vars(inputs), **chosen, "shared": shared})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_its_batch(isa: str, dtype: torch.dtype) -> None:
    """On its own, among a few, or in another order it has the same bits as among 300, forward and in its gradient."""
    case = replace(FULL, tokens=300, hidden=300, dtype=dtype)
    inputs = make_inputs(case)
    dout = torch.randn(case.tokens, case.hidden).to(dtype)
    out, gradients = run_backward(case, inputs, dout)
    for tokens in (torch.tensor([17]), torch.tensor([299, 3, 120]), torch.randperm(300)[:90]):
        few = rows_of(inputs, tokens)
        few_out, few_gradients = run_backward(case, few, dout[tokens])
        assert torch.equal(bits(few_out), bits(out[tokens]))
        for name, whole, part in zip(leaf_names(inputs), gradients, few_gradients, strict=True):
            if name in ("x", "topk_weights"):
                assert torch.equal(bits(part), bits(whole[tokens])), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_token(dtype: torch.dtype) -> None:
    case = replace(FULL, dtype=dtype)
    inputs = make_inputs(case)
    clean = run(case, inputs)
    inputs.x[11] = math.nan
    chosen = inputs.topk_ids[11]
    inputs.topk_ids[11] = torch.tensor([0, 2]).to(chosen.dtype)  # local experts
    out = run(case, inputs)
    assert out[11].isnan().all()
    others = torch.arange(case.tokens) != 11
    assert torch.equal(bits(out[others]), bits(clean[others]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_that_nobody_chose_are_not_read(dtype: torch.dtype) -> None:
    """Their weights and biases may be NaN; their gradients are zeros."""
    case = Case(20, experts=6, biases=True, dtype=dtype)
    inputs = make_inputs(case)
    inputs.topk_ids = torch.tensor([[1, 4]]).expand(20, 2)
    unread = torch.tensor([0, 2, 3, 5])
    for tensor in (inputs.w13, inputs.w2, inputs.b13, inputs.b2):
        assert tensor is not None
        tensor[unread] = math.nan
    out, gradients = run_backward(case, inputs, torch.ones(20, case.hidden, dtype=dtype))
    assert out.isfinite().all()
    for name, gradient in zip(leaf_names(inputs), gradients, strict=True):
        assert gradient.isfinite().all(), name
        if name in ("w13", "w2", "b13", "b2"):
            assert not gradient[unread].any(), name


def test_strided_inputs() -> None:
    """Rows apart, expanded dout and shared, transposed views of weights: the same bits as contiguous ones."""
    case = Case(21, hidden=48, shared=True)
    inputs = make_inputs(case)
    dout = torch.randn(1, case.hidden).expand(case.tokens, case.hidden)
    out, gradients = run_backward(case, inputs, dout.contiguous())
    assert inputs.shared is not None
    wide = torch.full((case.tokens, 60), math.nan)
    wide[:, :48] = inputs.x
    inputs.x = wide[:, :48]
    inputs.w13, inputs.w2 = (weights.mT.contiguous().mT for weights in (inputs.w13, inputs.w2))
    leaves = [tensor.requires_grad_() for tensor in (inputs.w13, inputs.w2)]
    other = run(case, inputs)
    assert torch.equal(bits(other.detach()), bits(out))
    for leaf, gradient in zip(leaves, torch.autograd.grad(other, leaves, dout), strict=True):
        assert torch.equal(
            bits(gradient), bits(gradients[leaf_names(inputs).index("w13" if leaf is leaves[0] else "w2")])
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_kn", [False, True])
def test_grouped_mm(isa: str, dtype: torch.dtype, is_kn: bool) -> None:
    """Like F.grouped_mm, with any ends: with empty experts; rows past the last one are zeros."""
    a = torch.randn(50, 70).to(dtype)
    b = torch.randn(4, *((70, 44) if is_kn else (44, 70))).to(dtype)
    b = b if is_kn else b.mT
    offsets = torch.tensor([7, 7, 30, 41], dtype=torch.int32)
    out = torch.ops.flashmoe.grouped_mm(a, b, offsets)
    groups = list(zip([0, *offsets.tolist()], offsets.tolist(), strict=False))
    for own, (begin, end) in zip(b, groups, strict=True):
        exact = a[begin:end].double() @ own.double()
        compare("rows", out[begin:end], exact, allowed(exact, a[begin:end] @ own, dtype))
    assert not out[41:].any()
    turned, right = torch.randn(33, 50).to(dtype), torch.randn(50, 29).to(dtype)
    found = torch.ops.flashmoe._grouped_mm_2d2d(turned, right, offsets)
    for own, (begin, end) in zip(found, groups, strict=True):
        exact = turned[:, begin:end].double() @ right[begin:end].double()
        compare("sums", own, exact, allowed(exact, turned[:, begin:end] @ right[begin:end], dtype))


def test_grouped_mm_refuses_ends_out_of_order() -> None:
    with pytest.raises(RuntimeError, match=r"moe\.offsets\|index=1\|end=3\|least=4"):
        torch.ops.flashmoe.grouped_mm(torch.ones(5, 8), torch.ones(2, 8, 8), torch.tensor([4, 3], dtype=torch.int32))


def test_route() -> None:
    """Scores, ties (the lower id first), groups, and the bias that only affects the choice, compared with torch."""
    logits = torch.randn(40, 16)
    logits[:, 5] = logits[:, 3]
    bias = torch.randn(16)

    def route(scoring: str, *options: object) -> tuple[Tensor, Tensor, Tensor]:
        weights, ids, counts = torch.ops.flashmoe.topk_route(logits, 4, scoring, *options)
        assert torch.equal(counts.long(), ids.long().flatten().bincount(minlength=16))
        return weights, ids.long(), counts

    weights, ids, _ = route("softmax", None, 1, 1, True, 2.0)
    scores = logits.softmax(1)
    expected = scores.sort(dim=1, descending=True, stable=True)
    assert torch.equal(ids, expected.indices[:, :4])
    torch.testing.assert_close(weights, 2 * expected.values[:, :4] / expected.values[:, :4].sum(1, keepdim=True))

    weights, ids, _ = route("topk_softmax", bias, 1, 1, False, 1.0)
    best = (logits + bias).sort(dim=1, descending=True, stable=True)
    assert torch.equal(ids, best.indices[:, :4])
    torch.testing.assert_close(weights, best.values[:, :4].softmax(1))

    weights, ids, _ = route("sigmoid", bias, 4, 2, False, 1.0)
    choice = logits.sigmoid() + bias
    groups = choice.view(40, 4, 4).topk(2, dim=2).values.sum(2).topk(2, dim=1).indices
    stays = torch.zeros(40, 4).scatter(1, groups, 1.0).repeat_interleave(4, 1)
    best = choice.masked_fill(stays == 0, -math.inf).sort(dim=1, descending=True, stable=True)
    assert torch.equal(ids, best.indices[:, :4])
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, ids))


def test_sort_is_stable() -> None:
    case = replace(FULL, tokens=90)
    inputs = make_inputs(case)
    sort = torch.ops.flashmoe.moe_sort(inputs.topk_ids, inputs.topk_weights, inputs.expert_map, case.experts)
    offsets, row_slots, slot_rows, row_weights = sort
    assert inputs.expert_map is not None
    ids = inputs.topk_ids.flatten()
    world = len(inputs.expert_map)
    experts = [int(inputs.expert_map[i]) if 0 <= i < world else -1 for i in ids.tolist()]
    order = sorted((expert, slot) for slot, expert in enumerate(experts) if 0 <= expert < case.experts)
    rows = [slot for _, slot in order]
    assert row_slots.tolist() == rows + [-1] * (len(ids) - len(rows))
    assert offsets.tolist() == [sum(expert < e for expert, _ in order) for e in range(case.experts + 1)]
    assert slot_rows.tolist() == [rows.index(slot) if slot in rows else -1 for slot in range(len(ids))]
    assert torch.equal(row_weights[: len(rows)], inputs.topk_weights.flatten()[rows])
    assert not row_weights[len(rows) :].any()
