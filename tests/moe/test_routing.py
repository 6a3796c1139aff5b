"""topk_route and moe_sort compared with plain PyTorch: choices, weights, counts, gradients, order."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashmoe

SCORINGS = ("softmax", "topk_softmax", "sigmoid")


@st.composite
def _sizes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    groups, size = draw(st.integers(1, 8)), draw(st.integers(1, 9))
    topk_groups = draw(st.integers(1, groups))
    return groups, size, topk_groups, draw(st.integers(1, min(32, topk_groups * size)))


SIZES = _sizes()


def scores_of(logits: Tensor, scoring: str, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(scores, values used for the choice), in float64."""
    exact = logits.double()
    if scoring == "topk_softmax":
        exact = exact if bias is None else exact + bias.double()
        return exact, exact
    scores = exact.sigmoid() if scoring == "sigmoid" else exact.softmax(1)
    return scores, scores if bias is None else scores + bias.double()


def keep_groups(choice: Tensor, scoring: str, groups: int, topk_groups: int) -> Tensor:
    """The choice with -inf for experts of dropped groups; of equal groups the first are kept."""
    if groups == 1:
        return choice
    grouped = choice.unflatten(1, (groups, -1))
    best = grouped.topk(min(2, grouped.shape[2]), 2).values.sum(2) if scoring == "sigmoid" else grouped.amax(2)
    stays = torch.zeros_like(best, dtype=torch.bool).scatter(
        1, best.sort(dim=1, descending=True, stable=True).indices[:, :topk_groups], value=True
    )
    return grouped.masked_fill(~stays.unsqueeze(2), -torch.inf).flatten(1)


def weights_of(
    logits: Tensor, ids: Tensor, scoring: str, bias: Tensor | None, renormalize: bool, scale: float
) -> Tensor:
    """Weights of the given choices, differentiable, in float64."""
    chosen = scores_of(logits, scoring, bias)[0].gather(1, ids.long())
    if scoring == "topk_softmax":
        chosen = chosen.softmax(1)
    elif renormalize:
        chosen = chosen / chosen.sum(1, keepdim=True)
    return chosen * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scoring", SCORINGS)
@settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(sizes=(1, 128, 1, 8), with_bias=True, renormalize=True)
@example(sizes=(8, 8, 3, 6), with_bias=True, renormalize=False)
@example(sizes=(1, 33, 1, 32), with_bias=False, renormalize=True)
@example(sizes=(4, 2, 2, 3), with_bias=False, renormalize=False)
@given(sizes=SIZES, with_bias=st.booleans(), renormalize=st.booleans())
def test_routing(
    dtype: torch.dtype, scoring: str, sizes: tuple[int, int, int, int], with_bias: bool, renormalize: bool, device: str
) -> None:
    """Sizes: groups, experts per group, groups kept, choices."""
    groups, size, topk_groups, k = sizes
    experts = groups * size
    torch.manual_seed(hash(sizes) % 1000)
    logits = (2 * torch.randn(50, experts)).to(device, dtype).requires_grad_()
    bias = (0.1 * torch.randn(experts)).to(device) if with_bias else None
    options = {
        "scoring": scoring,
        "groups": groups,
        "topk_groups": topk_groups,
        "renormalize": renormalize,
        "scale": 1.5,
    }
    weights, ids, counts = flashmoe.topk_route(logits, k, bias=bias, return_counts=True, **options)  # type: ignore[call-overload]
    choice = keep_groups(scores_of(logits.detach(), scoring, bias)[1], scoring, groups, topk_groups)
    best = choice.topk(k, 1).values
    found = choice.gather(1, ids.long())
    torch.testing.assert_close(found, best, rtol=1e-5, atol=1e-6)  # ties within rounding may go either way
    assert all(len(set(row)) == k for row in ids.tolist())
    assert torch.equal(counts.cpu(), torch.bincount(ids.flatten().cpu(), minlength=experts).int())
    exact = logits.detach().double().requires_grad_()
    expected = weights_of(exact, ids, scoring, bias, renormalize, 1.5)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-5, atol=1e-6)
    upstream = torch.randn_like(weights)
    (gradient,) = torch.autograd.grad(weights, logits, upstream)
    (reference,) = torch.autograd.grad(expected, exact, upstream.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(gradient.double(), reference, rtol=tolerance, atol=tolerance * 0.1)


def test_the_gradient_of_a_bias(device: str) -> None:
    """With topk_softmax it is part of the logits, otherwise it only affects the choice."""
    logits, bias = torch.randn(20, 8, device=device), torch.randn(8, device=device, requires_grad=True)
    weights, ids = flashmoe.topk_route(logits, 3, scoring="topk_softmax", bias=bias)
    upstream = torch.randn_like(weights)
    (gradient,) = torch.autograd.grad(weights, bias, upstream)
    exact = bias.detach().double().requires_grad_()
    reference = torch.autograd.grad(
        weights_of(logits, ids, "topk_softmax", exact, True, 1.0), exact, upstream.double()
    )[0]
    torch.testing.assert_close(gradient.double(), reference, rtol=1e-5, atol=1e-6)


def test_equal_scores_go_to_the_lower_expert(device: str) -> None:
    logits = torch.zeros(4, 16, device=device)
    for scoring in SCORINGS:
        _, ids = flashmoe.topk_route(logits, 5, scoring=scoring)  # type: ignore[call-overload]
        assert ids.tolist() == [[0, 1, 2, 3, 4]] * 4


def test_rows_apart(device: str) -> None:
    wide = torch.randn(9, 40, device=device)
    logits = wide[:, 3:19]
    for a, b in zip(flashmoe.topk_route(logits, 4), flashmoe.topk_route(logits.contiguous(), 4), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(
        flashmoe.topk_route(logits.T.contiguous().T, 4), flashmoe.topk_route(logits.contiguous(), 4), strict=True
    ):
        assert torch.equal(a, b)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 400),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 40),
    seed=st.integers(0, 9),
    wide=st.booleans(),
)
def test_the_sort_is_stable(device: str, tokens: int, top_k: int, experts: int, seed: int, wide: bool) -> None:
    """Rows of an expert are in slot order; ids outside the layer have no row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(
        -1, experts + 1, (tokens, top_k), generator=generator, dtype=torch.int64 if wide else torch.int32
    )
    weights = torch.rand(tokens, top_k, generator=generator)
    results = torch.ops.flashmoe.moe_sort(ids.to(device), weights.to(device), None, experts)
    offsets, row_slots, slot_rows, row_weights = (result.cpu() for result in results)
    flat = ids.flatten().long()
    inside = (flat >= 0) & (flat < experts)
    rows = int(inside.sum())
    order = torch.where(inside, flat, experts).argsort(stable=True)[:rows]
    assert torch.equal(row_slots[:rows].long(), order)
    assert (row_slots[rows:] == -1).all()
    assert torch.equal(row_weights[:rows], weights.flatten()[order])
    assert (row_weights[rows:] == 0).all()
    assert torch.equal(slot_rows[order].long(), torch.arange(rows))
    assert (slot_rows[~inside] == -1).all()
    counts = torch.bincount(flat[inside], minlength=experts)
    assert offsets.tolist() == [0, *counts.cumsum(0).tolist()]


@pytest.mark.parametrize("slots", [4096, 4097, 100_000])
def test_the_sort_of_many_slots(slots: int, device: str) -> None:
    ids = torch.randint(0, 300, (slots,), device=device)
    offsets, row_slots, *_ = torch.ops.flashmoe.moe_sort(ids, torch.rand(slots, device=device), None, 300)
    assert torch.equal(row_slots.long(), ids.argsort(stable=True))
    assert torch.equal(offsets[1:].long(), ids.bincount(minlength=300).cumsum(0))
