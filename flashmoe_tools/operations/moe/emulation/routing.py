"""Routing and sorting slots by expert on the emulated machine: every path, every tail, values that reveal a wrong order."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from flashmoe_build.emulation.compare import different, worst_element
from flashmoe_build.emulation.runner import Buffer, Launch, NamedProblem, Runner, Trial, output, preceding
from flashmoe_tools.tables import Unit

# enum class Scalar and enum class Scoring in csrc/moe/params/routing.h.
SCALARS: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3, torch.int64: 4}
)
SCORINGS = ("softmax", "topk_softmax", "sigmoid")
NAN, INFINITY = float("nan"), float("inf")
MOST_BLOCKS = 3  # of a route kernel: few, so that each handles several tokens


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 7919 + 31)


@dataclass(frozen=True)
class RouteProblem(NamedProblem):
    """Logits of `tokens` tokens; the row stride is three elements more than a row."""

    tokens: int
    experts: int
    top_k: int
    scoring: str = "softmax"
    groups: int = 1
    topk_groups: int = 1
    dtype: torch.dtype = torch.float32
    has_bias: bool = False
    renormalize: bool = True
    scale: float = 1.0
    values: str = "normal"  # ties: few different values; nan; infinity: some experts are masked; low: sigmoid gives 0; lane: one has the largest
    huge_tokens: int | None = None  # total number of tokens, of which these are the last

    def logits(self) -> torch.Tensor:
        generator = seeded(self.experts + self.top_k)
        logits = torch.randn(self.tokens, self.experts + 3, generator=generator) * 2
        if self.values == "ties":
            logits = torch.randint(-2, 1, logits.shape, generator=generator).float()
            logits[logits == 0] = torch.where(
                torch.rand(logits[logits == 0].shape, generator=generator) < 0.5, -0.0, 0.0
            )
        if self.values == "nan":
            logits[0, 3] = NAN
            logits[1] = NAN
            logits[2, [1, self.experts - 1]] = torch.tensor([-NAN, NAN])
        if self.values == "infinity":
            logits[:, ::2] = -INFINITY
        if self.values == "lane":
            logits = logits - 8
            logits[:, 5::32] += 8
        if self.values == "low":
            logits = logits - 200
        logits[:, self.experts :] = 100.0  # after the end of a row
        return logits.to(self.dtype)

    def bias(self) -> torch.Tensor | None:
        return torch.randn(self.experts, generator=seeded(5)) if self.has_bias else None


def route_problems(_: Unit) -> Iterator[RouteProblem]:
    half, bfloat = torch.float16, torch.bfloat16
    yield RouteProblem("qwen", 30, 128, 8)
    yield RouteProblem("every-expert", 3, 20, 20, renormalize=False, scale=2.5)
    yield RouteProblem("one-token", 1, 8, 2, "topk_softmax", dtype=bfloat)
    yield RouteProblem("gpt-oss", 5, 128, 4, "topk_softmax", has_bias=True, dtype=bfloat)
    yield RouteProblem("sigmoid", 5, 64, 6, "sigmoid", dtype=half, scale=0.5)
    yield RouteProblem("sigmoid-plain", 5, 40, 3, "sigmoid", has_bias=True, renormalize=False)
    yield RouteProblem("deepseek-v3", 6, 256, 8, "sigmoid", 8, 4, has_bias=True, scale=2.5)
    yield RouteProblem("deepseek-v2", 6, 160, 6, "softmax", 8, 3, renormalize=False, scale=16.0)
    yield RouteProblem("groups-of-one", 4, 32, 5, "sigmoid", 32, 5)
    yield RouteProblem("softmax-bias", 4, 66, 5, "softmax", has_bias=True)
    yield RouteProblem("many-experts", 3, 500, 32)
    yield RouteProblem("most-experts", 2, 1024, 32, "sigmoid", has_bias=True)
    yield RouteProblem("ties", 8, 128, 8, values="ties")
    yield RouteProblem("ties-groups", 4, 96, 7, "sigmoid", 6, 3, values="ties")
    yield RouteProblem("ties-of-groups", 4, 64, 10, "sigmoid", 32, 5, values="ties")
    yield RouteProblem("wide-groups", 12, 256, 8, "sigmoid", 4, 2, values="lane")
    yield RouteProblem("nan", 4, 40, 6, values="nan")
    yield RouteProblem("nan-sigmoid", 4, 64, 6, "sigmoid", 4, 2, values="nan", has_bias=True, renormalize=False)
    yield RouteProblem("infinity", 4, 10, 8, values="infinity")
    yield RouteProblem("low", 3, 33, 4, "sigmoid", values="low")
    yield RouteProblem("far", 4, 40, 31, huge_tokens=2**27)


def _descending(scores: torch.Tensor) -> torch.Tensor:
    """Order of the columns: largest first, NaN before all others, the lower index first among equals."""
    return torch.where(torch.isnan(scores), float("inf"), scores).sort(dim=1, descending=True, stable=True).indices


def choose(p: RouteProblem, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids in fp64."""
    logits = logits[:, : p.experts].double()
    offset = torch.zeros(p.experts).double() if bias is None else bias.double()
    scores = {"softmax": logits.softmax(1), "sigmoid": logits.sigmoid(), "topk_softmax": logits + offset}[p.scoring]
    choice = scores if p.scoring == "topk_softmax" else scores + offset
    if bias is None and p.groups == 1:
        choice = logits
    if p.groups > 1:
        grouped = choice.unflatten(1, (p.groups, -1))
        most = min(2 if p.scoring == "sigmoid" else 1, grouped.shape[2])
        kept = _descending(grouped.topk(most, dim=2).values.sum(2))[:, : p.topk_groups]
        stays = torch.zeros(grouped.shape[:2]).scatter(1, kept, 1.0).bool()
        choice = choice.masked_fill(~stays.repeat_interleave(grouped.shape[2], 1), -float("inf"))
    ids = _descending(choice)[:, : p.top_k]
    weights = scores.gather(1, ids)
    if p.scoring == "topk_softmax":
        weights = weights.softmax(1)
    elif p.renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * p.scale, ids


def route_trial(unit: Unit, p: RouteProblem) -> Trial:
    logits, bias, end = p.logits(), p.bias(), p.huge_tokens
    weights = torch.full((p.tokens, p.top_k), NAN)
    ids = torch.full((p.tokens, p.top_k), -7, dtype=torch.int32)
    counts = torch.zeros(p.experts, dtype=torch.int32)
    values = {
        "logits": preceding(logits, end=end and end * logits.shape[1]),
        "bias": preceding(bias),
        "weights": output(weights, end=end and end * p.top_k),
        "ids": output(ids, end=end and end * p.top_k),
        "counts": Buffer(counts, writable=True),
        "logits_dtype": SCALARS[logits.dtype],
        "scoring": SCORINGS.index(p.scoring),
        "tokens": end or p.tokens,
        **{name: getattr(p, name) for name in ("experts", "top_k", "groups", "topk_groups", "renormalize", "scale")},
    }

    def check() -> list[str]:
        expected, chosen = choose(p, logits, bias)
        wrong = different("ids", ids, chosen.int())
        wrong += worst_element("weights", weights, expected, 5e-6 * expected.abs().nan_to_num() + 1e-12)
        return wrong + different("counts", counts, torch.bincount(chosen.flatten(), minlength=p.experts).int())

    blocks = math.ceil((end or p.tokens) / unit.row.warps)
    launch = Launch(values, blocks if end else min(blocks, MOST_BLOCKS), only_block=blocks - 1 if end else None)
    return Trial([launch], check, {"weights": weights, "ids": ids})


@dataclass(frozen=True)
class SortInputs:
    ids: torch.Tensor
    weights: torch.Tensor
    expert_map: torch.Tensor | None

    def experts(self, experts: int) -> torch.Tensor:
        """The expert of this layer for each slot, or `experts` if there is none."""
        end = experts if self.expert_map is None else self.expert_map.numel()
        known = (self.ids >= 0) & (self.ids < end)
        found = torch.where(known, self.ids, 0).long()
        if self.expert_map is not None:
            found = self.expert_map[found].long()
        return torch.where(known & (found >= 0) & (found < experts), found, experts)


@dataclass(frozen=True)
class SortProblem(NamedProblem):
    slots: int
    experts: int
    blocks: int = 1  # more than one: a launch that counts, then one that places
    ids: torch.dtype = torch.int32
    weights: torch.dtype = torch.float32
    values: str = "random"  # random: some ids name no expert; hot: one expert; none: no expert at all
    map_length: int = 0

    def inputs(self) -> SortInputs:
        generator = seeded(self.slots + self.experts)
        end = self.map_length or self.experts
        ids = torch.randint(0, end, (self.slots,), generator=generator)
        outside = torch.tensor([-1, end, -(2**31), 2**31 - 1])
        if self.ids is torch.int64:
            outside = torch.cat([outside, torch.tensor([2**32 + 1, -(2**32) + 1, -1])])
        strangers = torch.rand(self.slots, generator=generator) < 0.1
        ids[strangers] = outside[torch.randint(0, len(outside), (int(strangers.sum()),), generator=generator)]
        if self.values == "hot":
            ids[:] = self.experts - 1
        if self.values == "none":
            ids[:] = -1
        expert_map = None
        if self.map_length:
            expert_map = torch.randperm(self.map_length, generator=generator).int() - 3  # some outside, at both ends
        weights = torch.rand(self.slots, generator=generator) + 0.5
        return SortInputs(ids.to(self.ids), weights.to(self.weights), expert_map)


def sort_problems(_: Unit) -> Iterator[SortProblem]:
    long, half, bfloat = torch.int64, torch.float16, torch.bfloat16
    yield SortProblem("decode", 40, 128)
    yield SortProblem("one-slot", 1, 8, ids=long, weights=bfloat)
    yield SortProblem("nothing", 0, 8)
    yield SortProblem("warps", 1100, 40, ids=long, weights=half)
    yield SortProblem("batches", 4133, 3)
    yield SortProblem("most-experts", 400, 1024)
    yield SortProblem("hot", 200, 16, weights=bfloat, values="hot")
    yield SortProblem("nobody", 70, 16, values="none")
    yield SortProblem("map", 260, 16, map_length=40)
    yield SortProblem("blocks", 700, 24, blocks=3, ids=long, map_length=30)
    yield SortProblem("empty-block", 70, 128, blocks=4, weights=bfloat)
    yield SortProblem("many-blocks", 600, 700, blocks=9)
    yield SortProblem("long-blocks", 2305, 1024, blocks=2)


def sort(inputs: SortInputs, experts: int) -> dict[str, torch.Tensor]:
    """The expected results of the kernel."""
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
    exact = {"expert_offsets": offsets, "row_slots": row_slots, "slot_rows": slot_rows}
    return {**{name: tensor.int() for name, tensor in exact.items()}, "row_weights": row_weights}


def sort_trial(_: Unit, p: SortProblem) -> Trial:
    """One launch with one block, or two with several blocks: each block counts its share, then places it."""
    inputs = p.inputs()
    expected = sort(inputs, p.experts)
    results = {name: torch.full_like(tensor, -77) for name, tensor in expected.items()}
    values = {
        "ids": preceding(inputs.ids),
        "topk_weights": preceding(inputs.weights),
        "expert_map": preceding(inputs.expert_map),
        **{name: output(tensor) if tensor.numel() else None for name, tensor in results.items()},
        "ids_dtype": SCALARS[inputs.ids.dtype],
        "weights_dtype": SCALARS[inputs.weights.dtype],
        "slots": p.slots,
        "experts": p.experts,
        "ids_end": p.experts if inputs.expert_map is None else inputs.expert_map.numel(),
    }
    launches = [Launch(values, 1, ("one",))]
    if p.blocks > 1:
        counts = torch.full((p.blocks * p.experts,), -77, dtype=torch.int32)
        given = {"ids": inputs.ids, "topk_weights": inputs.weights, "expert_map": inputs.expert_map}
        early = {name: None if tensor is None else Buffer(tensor) for name, tensor in given.items()}
        ranks = Buffer(results["slot_rows"], writable=True, is_from_preceding_grid=True, name="ranks")
        launches = [
            Launch({**values, "block_counts": output(counts)}, p.blocks, ("count",)),
            Launch({**values, **early, "block_counts": preceding(counts), "slot_rows": ranks}, p.blocks, ("place",)),
        ]

    def check() -> list[str]:
        return [text for name, tensor in results.items() for text in different(name, tensor, expected[name])]

    return Trial(launches, check, results)


RUNNERS = {"moe_route": Runner(route_problems, route_trial), "moe_sort": Runner(sort_problems, sort_trial)}
