"""What the kernels around the grouped products must give, by plain torch, and what is wrong with what they gave."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashmoe_build.emulation.moe.routing_problems import (
    BiasGradientInputs,
    BiasGradientProblem,
    CombineInputs,
    CombineProblem,
    RouteProblem,
    SortInputs,
    SortProblem,
)
from flashmoe_build.emulation.problem import worst_place

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SINGLE = 2.0**-23


def _different(name: str, found: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """Of results that must be exact."""
    wrong = (found != expected).nonzero()
    if wrong.numel() == 0:
        return []
    at = tuple(int(i) for i in wrong[0])
    text = f"{name} is wrong at {len(wrong)} of {found.numel()} places; first at {list(at)}: "
    return [f"{text}{found[at].item()} instead of {expected[at].item()}"]


def _descending(scores: torch.Tensor) -> torch.Tensor:
    """Order of the columns, the largest first, NaN before all, the lower index first among equals."""
    return torch.where(torch.isnan(scores), float("inf"), scores).sort(dim=1, descending=True, stable=True).indices


def route(problem: RouteProblem, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids in fp64."""
    logits = logits[:, : problem.experts].double()
    offset = torch.zeros(problem.experts).double() if bias is None else bias.double()
    scores = {"softmax": logits.softmax(1), "sigmoid": logits.sigmoid(), "topk_softmax": logits + offset}[
        problem.scoring
    ]
    choice = scores if problem.scoring == "topk_softmax" else scores + offset
    if bias is None and problem.groups == 1:
        choice = logits
    if problem.groups > 1:
        grouped = choice.unflatten(1, (problem.groups, -1))
        most = min(2 if problem.scoring == "sigmoid" else 1, grouped.shape[2])
        kept = _descending(grouped.topk(most, dim=2).values.sum(2))[:, : problem.topk_groups]
        stays = torch.zeros(grouped.shape[:2]).scatter(1, kept, 1.0).bool()
        choice = choice.masked_fill(~stays.repeat_interleave(grouped.shape[2], 1), -float("inf"))
    ids = _descending(choice)[:, : problem.top_k]
    weights = scores.gather(1, ids)
    if problem.scoring == "topk_softmax":
        weights = weights.softmax(1)
    elif problem.renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * problem.scale, ids


def route_disagreements(
    problem: RouteProblem,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
) -> list[str]:
    expected, chosen = route(problem, logits, bias)
    found = _different("ids", ids, chosen.int())
    found += worst_place("weights", weights, expected, 5e-6 * expected.abs().nan_to_num() + 1e-12)
    return found + _different("counts", counts, torch.bincount(chosen.flatten(), minlength=problem.experts).int())


@dataclass(frozen=True)
class Sorted:
    """What moe_sort writes."""

    expert_offsets: torch.Tensor
    row_slots: torch.Tensor
    slot_rows: torch.Tensor
    row_weights: torch.Tensor


def sort(inputs: SortInputs, experts: int) -> Sorted:
    of_slot = inputs.experts(experts)
    order = of_slot.sort(stable=True).indices
    counts = torch.bincount(of_slot, minlength=experts + 1)[:experts]
    count = int(counts.sum())
    row_slots = torch.full_like(order, -1)
    row_slots[:count] = order[:count]
    slot_rows = torch.full_like(order, -1)
    slot_rows[order[:count]] = torch.arange(count)
    row_weights = torch.zeros(len(order))
    row_weights[:count] = inputs.weights.float()[order[:count]]
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    return Sorted(offsets.int(), row_slots.int(), slot_rows.int(), row_weights)


def sort_disagreements(problem: SortProblem, inputs: SortInputs, found: Sorted) -> list[str]:
    expected = sort(inputs, problem.experts)
    wrong: list[str] = []
    for name in ("expert_offsets", "row_slots", "slot_rows", "row_weights"):
        wrong += _different(name, getattr(found, name), getattr(expected, name))
    return wrong


def _add_in_order(terms: torch.Tensor) -> torch.Tensor:
    """The fp32 sum along the first axis, one term after the other, each product and sum rounded once: [n, ...] of fp64."""
    total = torch.zeros(terms.shape[1:], dtype=torch.float32)
    for term in terms:
        total = (total.double() + term).float()
    return total.double()


def _choices(problem: CombineProblem, inputs: CombineInputs, *, weighted: bool) -> torch.Tensor:
    """What each choice adds to its token, [top_k, tokens, columns], 0 where it has no row."""
    has_row = inputs.slot_rows >= 0
    at = inputs.slot_rows.clamp(min=0)
    terms = inputs.rows.double()[at]
    if weighted and inputs.row_weights is not None:
        terms = terms * inputs.row_weights.double()[at][:, None]
    terms = torch.where(has_row[:, None], terms, 0.0)
    return terms.view(problem.tokens, problem.top_k, problem.columns).transpose(0, 1)


def _bound(problem: CombineProblem, terms: torch.Tensor, expected: torch.Tensor, unit: float) -> torch.Tensor:
    """Of results rounded to 16 bits; terms that show their order have exact sums."""
    spread = 0.0 if problem.values == "order" else SINGLE
    return unit * expected.abs() + spread * terms.abs().sum(0) + 1e-9


def _last(problem: CombineProblem, tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """Of a problem too large to run whole, the last token is all that ran."""
    return tensor.narrow(axis, problem.tokens - 1, 1) if problem.huge_tokens else tensor


def combine_disagreements(problem: CombineProblem, inputs: CombineInputs, out: torch.Tensor) -> list[str]:
    terms = _choices(problem, inputs, weighted=True)
    if inputs.shared is not None:
        terms = torch.cat([terms, inputs.shared.double()[None]])
    expected = _add_in_order(terms)
    bound = _bound(problem, terms, expected, UNIT[out.dtype])
    return worst_place("out", *(_last(problem, tensor) for tensor in (out, expected, bound)))


def combine_backward_disagreements(
    problem: CombineProblem, inputs: CombineInputs, dx: torch.Tensor, dweights: torch.Tensor
) -> list[str]:
    wrong: list[str] = []
    terms = _choices(problem, inputs, weighted=False)
    expected = _add_in_order(terms)
    bound = _bound(problem, terms, expected, UNIT[dx.dtype])
    if problem.wants_out:
        wrong += worst_place("dx", *(_last(problem, tensor) for tensor in (dx, expected, bound)))
    elif not torch.isnan(dx).all():
        wrong.append("dx was written, and nobody wants it")
    if not problem.wants_dweights:
        return wrong
    has_row, at = inputs.slot_rows >= 0, inputs.slot_rows.clamp(min=0)
    dots = torch.where(has_row, inputs.row_dots.double()[:, at], 0.0)
    expected = _add_in_order(dots)
    spread = torch.zeros_like(expected) if problem.values == "order" else SINGLE * dots.abs().sum(0)
    if inputs.bias is not None and has_row.any():
        dout = inputs.dout.double().repeat_interleave(problem.top_k, 0)
        products = torch.where(has_row[:, None], dout * inputs.bias.double()[inputs.row_experts[at]], 0.0)
        expected = expected + products.sum(1)
        spread = spread + 8 * SINGLE * products.abs().sum(1)
    shape = (problem.tokens, problem.top_k)
    tensors = (tensor.view(shape) for tensor in (dweights, expected, spread + SINGLE * expected.abs() + 1e-12))
    return wrong + worst_place("dweights", *(_last(problem, tensor) for tensor in tensors))


def bias_gradient(
    problem: BiasGradientProblem, inputs: BiasGradientInputs, unit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient in fp64, and how far a kernel may be from it."""
    terms = inputs.a.double()[inputs.sources, : problem.columns]
    if inputs.row_weights is not None:
        terms = terms * inputs.row_weights.double()[:, None]
    owners = torch.repeat_interleave(torch.arange(problem.experts), torch.tensor(problem.rows))
    zeros = torch.zeros(problem.experts, problem.columns, dtype=torch.float64)
    expected = zeros.index_add(0, owners, terms)
    spread = zeros.index_add(0, owners, terms.abs())
    return expected, unit * expected.abs() + 16 * SINGLE * spread + 1e-9
