"""Small problems for the kernels around the grouped products: every path, every tail, and values that show a wrong order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from flashmoe_build.emulation.problem import NamedProblem

# enum class Scalar and enum class Scoring of csrc/moe/params/routing.h.
SCALARS: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3, torch.int64: 4}
)
SCORINGS = ("softmax", "topk_softmax", "sigmoid")
NAN, INFINITY = float("nan"), float("inf")


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 7919 + 31)


@dataclass(frozen=True)
class RouteProblem(NamedProblem):
    """Logits of `tokens` tokens; rows are three elements further apart than they are long."""

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
    huge_tokens: int | None = None  # these tokens are the last of so many

    def logits(self) -> torch.Tensor:
        generator = _random(self.experts + self.top_k)
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
        logits[:, self.experts :] = 100.0  # nobody's
        return logits.to(self.dtype)

    def bias(self) -> torch.Tensor | None:
        return torch.randn(self.experts, generator=_random(5)) if self.has_bias else None


def route_problems() -> Iterator[RouteProblem]:
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


@dataclass(frozen=True)
class SortInputs:
    ids: torch.Tensor
    weights: torch.Tensor
    expert_map: torch.Tensor | None

    def experts(self, experts: int) -> torch.Tensor:
        """By slot the expert of this layer, or `experts` where there is none."""
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
    blocks: int = 1  # more: count, then place
    ids: torch.dtype = torch.int32
    weights: torch.dtype = torch.float32
    values: str = "random"  # of them some that name nobody; hot: one expert; nobody: none at all
    map_length: int = 0

    def inputs(self) -> SortInputs:
        generator = _random(self.slots + self.experts)
        end = self.map_length or self.experts
        ids = torch.randint(0, end, (self.slots,), generator=generator)
        outside = torch.tensor([-1, end, -(2**31), 2**31 - 1])
        if self.ids is torch.int64:
            outside = torch.cat([outside, torch.tensor([2**32 + 1, -(2**32) + 1, -1])])
        strangers = torch.rand(self.slots, generator=generator) < 0.1
        ids[strangers] = outside[torch.randint(0, len(outside), (int(strangers.sum()),), generator=generator)]
        if self.values == "hot":
            ids[:] = self.experts - 1
        if self.values == "nobody":
            ids[:] = -1
        expert_map = None
        if self.map_length:
            expert_map = torch.randperm(self.map_length, generator=generator).int() - 3  # some outside, at both ends
        weights = torch.rand(self.slots, generator=generator) + 0.5
        return SortInputs(ids.to(self.ids), weights.to(self.weights), expert_map)


def sort_problems() -> Iterator[SortProblem]:
    long, half, bfloat = torch.int64, torch.float16, torch.bfloat16
    yield SortProblem("decode", 40, 128)
    yield SortProblem("one-slot", 1, 8, ids=long, weights=bfloat)
    yield SortProblem("nothing", 0, 8)
    yield SortProblem("warps", 1100, 40, ids=long, weights=half)
    yield SortProblem("batches", 4133, 3)
    yield SortProblem("most-experts", 400, 1024)
    yield SortProblem("hot", 200, 16, weights=bfloat, values="hot")
    yield SortProblem("nobody", 70, 16, values="nobody")
    yield SortProblem("map", 260, 16, map_length=40)
    yield SortProblem("blocks", 700, 24, blocks=3, ids=long, map_length=30)
    yield SortProblem("empty-block", 70, 128, blocks=4, weights=bfloat)
    yield SortProblem("many-blocks", 600, 700, blocks=9)
    yield SortProblem("long-blocks", 2305, 1024, blocks=2)


@dataclass(frozen=True)
class CombineInputs:
    slot_rows: torch.Tensor
    rows: torch.Tensor
    row_weights: torch.Tensor | None
    shared: torch.Tensor | None
    row_dots: torch.Tensor
    bias: torch.Tensor | None
    dout: torch.Tensor
    expert_offsets: torch.Tensor
    row_experts: torch.Tensor  # of rows, as many as there are


@dataclass(frozen=True)
class CombineProblem(NamedProblem):
    """What no choice points to is NaN."""

    tokens: int
    top_k: int
    columns: int
    experts: int = 6
    dot_tiles: int = 3
    has_weights: bool = True
    has_shared: bool = False
    has_bias: bool = False
    wants_out: bool = True
    wants_dweights: bool = True
    values: str = "normal"  # order: sums that show the order of their terms; nobody: no slot has a row
    blocks: int = 1  # of a token
    huge_tokens: int | None = None

    def inputs(self, dtype: torch.dtype) -> CombineInputs:
        generator = _random(self.tokens + self.columns)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        slots = self.tokens * self.top_k
        kept = torch.rand(slots, generator=generator) < (0.0 if self.values == "nobody" else 0.8)
        if self.values == "order":
            kept[:] = True
        count = int(kept.sum())
        slot_rows = torch.full((slots,), -1)
        slot_rows[kept] = torch.randperm(count, generator=generator)
        rows, weights, dots = normal(slots, self.columns), normal(slots), normal(self.dot_tiles, slots)
        if self.values == "order":  # small, large, -large, small, ...
            terms = torch.tensor([2.0**-10, 2.0**15, -(2.0**15)]).repeat(slots)[: self.top_k]
            rows[slot_rows] = terms.repeat(self.tokens)[:, None].expand(-1, self.columns)
            weights[:] = 1.0
            dots = torch.tensor([2.0**-10, 2.0**15, -(2.0**15)]).repeat(self.dot_tiles)[: self.dot_tiles, None]
            dots = dots.repeat(1, slots)
        rows[count:], weights[count:], dots[:, count:] = NAN, NAN, NAN
        cuts = torch.randint(0, count + 1, (self.experts - 1,), generator=generator).sort().values
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), cuts, torch.tensor([count])])
        if self.experts > 2:
            offsets[2] = offsets[1]  # an expert without rows
        row_experts = torch.repeat_interleave(torch.arange(self.experts), offsets.diff())
        bias = normal(self.experts, self.columns)
        bias[offsets.diff() == 0] = NAN
        return CombineInputs(
            slot_rows=slot_rows,
            rows=rows.to(dtype),
            row_weights=weights if self.has_weights else None,
            shared=normal(self.tokens, self.columns).to(dtype) if self.has_shared else None,
            row_dots=dots.contiguous(),
            bias=bias.to(dtype) if self.has_bias else None,
            dout=normal(self.tokens, self.columns).to(dtype),
            expert_offsets=offsets,
            row_experts=row_experts,
        )


def combine_problems(*, is_backward: bool) -> Iterator[CombineProblem]:
    yield CombineProblem("wide", 3, 4, 2048 + 264, has_shared=True, dot_tiles=40, has_bias=True)
    yield CombineProblem("blocks", 2, 9, 3 * 1024 + 72, has_shared=True, has_bias=True, experts=40, blocks=2)
    yield CombineProblem("narrow", 5, 2, 8, has_weights=False)
    yield CombineProblem("choices", 2, 32, 264, has_shared=True, dot_tiles=1)
    yield CombineProblem("odd-choices", 3, 11, 72, experts=1, has_bias=True)
    yield CombineProblem("one-choice", 2, 1, 256, dot_tiles=32)
    yield CombineProblem("order", 2, 10, 40, values="order", dot_tiles=4)
    yield CombineProblem("nobody", 2, 3, 24, values="nobody", has_shared=True, has_bias=True)
    yield CombineProblem("far", 2, 5, 72, has_shared=True, has_bias=True, dot_tiles=9, huge_tokens=2**26)
    if is_backward:
        yield CombineProblem("only-dx", 2, 3, 40, wants_dweights=False)
        yield CombineProblem("only-dweights", 2, 9, 40, wants_out=False, has_bias=True)


@dataclass(frozen=True)
class GatherInputs:
    a: torch.Tensor
    slot_rows: torch.Tensor  # [slots]; -1: no row
    sources: torch.Tensor  # by row, the row of `a`


@dataclass(frozen=True)
class GatherProblem(NamedProblem):
    """Some slots have no row. `first_row`: rows before it are other tokens', of which there is address space alone."""

    count: int  # rows
    columns: int
    tokens: int
    top_k: int
    first_row: int = 0

    def inputs(self, dtype: torch.dtype) -> GatherInputs:
        generator = _random(self.columns)
        slots = self.tokens * self.top_k
        chosen = torch.randperm(slots, generator=generator)[: self.count]
        a = torch.randn(self.tokens, self.columns + 8, generator=generator)
        a[:, self.columns :] = NAN
        slot_rows = torch.full((slots,), -1, dtype=torch.int32)
        slot_rows[chosen] = torch.arange(self.count, dtype=torch.int32) + self.first_row
        return GatherInputs(a.to(dtype), slot_rows, chosen // self.top_k)


def gather_problems() -> Iterator[GatherProblem]:
    yield GatherProblem("rows", 15, 1096, 9, 2)  # more than the columns in flight, and a tail
    yield GatherProblem("narrow", 3, 8, 3, 1)
    yield GatherProblem("nobody", 0, 40, 2, 2)
    yield GatherProblem("far", 9, 72, 4, 3, first_row=2**26)


@dataclass(frozen=True)
class BiasGradientInputs:
    a: torch.Tensor
    row_weights: torch.Tensor | None
    expert_offsets: torch.Tensor
    a_slots: torch.Tensor | None
    sources: torch.Tensor  # by row, the row of `a` as it is given


@dataclass(frozen=True)
class BiasGradientProblem(NamedProblem):
    """Expert 1 has no rows. `gathered`: a's rows are tokens; else there are as many as slots, the last ones NaN."""

    rows: tuple[int, ...]
    columns: int
    top_k: int = 1
    gathered: bool = False
    has_weights: bool = False
    huge_rows: int | None = None  # of a

    @property
    def experts(self) -> int:
        return len(self.rows)

    def inputs(self, dtype: torch.dtype) -> BiasGradientInputs:
        generator = _random(self.columns)
        count = sum(self.rows)
        offsets = torch.tensor([0, *torch.tensor(self.rows).cumsum(0).tolist()], dtype=torch.int32)
        tokens = count + 2
        a = torch.randn(tokens, self.columns + 8, generator=generator) + 0.25
        sources = torch.randint(0, tokens, (count,), generator=generator) if self.gathered else torch.arange(count)
        unused = torch.ones(tokens, dtype=torch.bool)
        unused[sources] = False
        a[unused], a[:, self.columns :] = NAN, NAN
        slots = None
        if self.gathered:
            first = (self.huge_rows or tokens) - tokens
            choices = torch.randint(0, self.top_k, (count,), generator=generator)
            slots = ((sources + first) * self.top_k + choices).int()
        weights = torch.rand(count, generator=generator) if self.has_weights else None
        return BiasGradientInputs(a.to(dtype), weights, offsets, slots, sources)


def bias_gradient_problems() -> Iterator[BiasGradientProblem]:
    yield BiasGradientProblem("rows", (5, 0, 33, 130), 136)
    yield BiasGradientProblem("gathered", (40, 0, 300), 64, 3, gathered=True, has_weights=True)
    yield BiasGradientProblem("narrow", (1, 0), 8, 2, gathered=True)
    yield BiasGradientProblem("far", (9, 0, 40), 72, 4, gathered=True, has_weights=True, huge_rows=2**27)
