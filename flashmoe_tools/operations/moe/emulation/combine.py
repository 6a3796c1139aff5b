"""Summing the rows of each token's choices, its backward pass, and gathering rows, on the emulated machine."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_build.emulation.compare import DTYPES, UNIT_ROUNDOFF, UNTOUCHED, touched, worst_element
from flashmoe_build.emulation.runner import Buffer, Launch, NamedProblem, Runner, Trial, output, preceding
from flashmoe_tools.operations.moe.emulation.routing import NAN, seeded
from flashmoe_tools.tables import Unit

BACKWARD = "moe_combine_backward"
SINGLE = 2.0**-23


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
    row_experts: torch.Tensor  # one per row


@dataclass(frozen=True)
class CombineProblem(NamedProblem):
    """Data that no choice points to is NaN."""

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
    values: str = "normal"  # order: sums that reveal the order of their terms; none: no slot has a row
    blocks: int = 1  # blocks per token
    huge_tokens: int | None = None

    def inputs(self, dtype: torch.dtype) -> CombineInputs:
        generator = seeded(self.tokens + self.columns)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        slots = self.tokens * self.top_k
        kept = torch.rand(slots, generator=generator) < (0.0 if self.values == "none" else 0.8)
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


def combine_problems(unit: Unit) -> Iterator[CombineProblem]:
    yield CombineProblem("wide", 3, 4, 2048 + 264, has_shared=True, dot_tiles=40, has_bias=True)
    yield CombineProblem("blocks", 2, 9, 3 * 1024 + 72, has_shared=True, has_bias=True, experts=40, blocks=2)
    yield CombineProblem("narrow", 5, 2, 8, has_weights=False)
    yield CombineProblem("choices", 2, 32, 264, has_shared=True, dot_tiles=1)
    yield CombineProblem("odd-choices", 3, 11, 72, experts=1, has_bias=True)
    yield CombineProblem("one-choice", 2, 1, 256, dot_tiles=32)
    yield CombineProblem("order", 2, 10, 40, values="order", dot_tiles=4)
    yield CombineProblem("nobody", 2, 3, 24, values="none", has_shared=True, has_bias=True)
    yield CombineProblem("far", 2, 5, 72, has_shared=True, has_bias=True, dot_tiles=9, huge_tokens=2**26)
    if unit.row.operation == BACKWARD:
        yield CombineProblem("only-dx", 2, 3, 40, wants_dweights=False)
        yield CombineProblem("only-dweights", 2, 9, 40, wants_out=False, has_bias=True)


def _add_in_order(terms: torch.Tensor) -> torch.Tensor:
    """fp32 sum along the first axis, term by term; each product and sum is rounded once: [n, ...] of fp64."""
    total = torch.zeros(terms.shape[1:], dtype=torch.float32)
    for term in terms:
        total = (total.double() + term).float()
    return total.double()


def _terms(p: CombineProblem, inputs: CombineInputs, *, weighted: bool) -> torch.Tensor:
    """The contribution of each choice to its token, [top_k, tokens, columns]; 0 if it has no row."""
    has_row, at = inputs.slot_rows >= 0, inputs.slot_rows.clamp(min=0)
    terms = inputs.rows.double()[at]
    if weighted and inputs.row_weights is not None:
        terms = terms * inputs.row_weights.double()[at][:, None]
    terms = torch.where(has_row[:, None], terms, 0.0).view(p.tokens, p.top_k, p.columns).transpose(0, 1)
    if weighted and inputs.shared is not None:
        terms = torch.cat([terms, inputs.shared.double()[None]])
    return terms


def expect_out(p: CombineProblem, inputs: CombineInputs, unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums, rounded to 16 bits, and their bound; for values "order" the sums are exact."""
    terms = _terms(p, inputs, weighted=unit.row.operation != BACKWARD)
    expected, spread = _add_in_order(terms), 0.0 if p.values == "order" else SINGLE
    return expected, UNIT_ROUNDOFF[unit.dtype] * expected.abs() + spread * terms.abs().sum(0) + 1e-9


def expect_dweights(p: CombineProblem, inputs: CombineInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected dweights [tokens, top_k] and their bound."""
    has_row, at = inputs.slot_rows >= 0, inputs.slot_rows.clamp(min=0)
    dots = torch.where(has_row, inputs.row_dots.double()[:, at], 0.0)
    expected = _add_in_order(dots)
    spread = torch.zeros_like(expected) if p.values == "order" else SINGLE * dots.abs().sum(0)
    if inputs.bias is not None and has_row.any():
        dout = inputs.dout.double().repeat_interleave(p.top_k, 0)
        products = torch.where(has_row[:, None], dout * inputs.bias.double()[inputs.row_experts[at]], 0.0)
        expected = expected + products.sum(1)
        spread = spread + 8 * SINGLE * products.abs().sum(1)
    return expected.view(p.tokens, p.top_k), (spread + SINGLE * expected.abs() + 1e-12).view(p.tokens, p.top_k)


def combine_trial(unit: Unit, p: CombineProblem) -> Trial:
    """Runs one problem.

    If it is too large to run completely, the tensors are only the end of what there would be, and only the last token
    runs. In the forward pass the sort's results are available before the preceding grid ends.
    """
    inputs, is_backward = p.inputs(DTYPES[unit.dtype]), unit.row.operation == BACKWARD
    slots, tokens, is_huge = p.tokens * p.top_k, p.huge_tokens or p.tokens, p.huge_tokens is not None
    first = tokens * p.top_k - slots
    stride = p.columns if is_huge else p.columns + 8
    out = torch.full((p.tokens, stride), NAN, dtype=DTYPES[unit.dtype])
    dweights = torch.full((slots,), NAN)

    def last(tensor: torch.Tensor | None, of_each: int, *, is_output: bool = False, is_early: bool = False) -> Any:
        end = of_each * tokens if is_huge else None
        if tensor is not None and (is_output or is_early):
            return output(tensor, end=end) if is_output else Buffer(tensor, end=end)
        return preceding(tensor, end=end)

    values: dict[str, Any] = {
        "rows": last(inputs.rows, p.top_k * p.columns),
        "slot_rows": last(
            (inputs.slot_rows + first * (inputs.slot_rows >= 0)).int(), p.top_k, is_early=not is_backward
        ),
        "out": last(out, p.columns, is_output=True) if p.wants_out else None,
        "out_stride": stride,
        "tokens": tokens,
        **{name: getattr(p, name) for name in ("top_k", "columns", "experts")},
    }
    if is_backward:
        dot_tiles = inputs.row_dots.shape[0]
        values["row_dots"] = preceding(inputs.row_dots, row_stride=tokens * p.top_k, end=dot_tiles * tokens * p.top_k)
        values["dot_tiles"] = dot_tiles
        values["dweights"] = last(dweights, p.top_k, is_output=True) if p.wants_dweights else None
        if inputs.bias is not None:
            offsets = inputs.expert_offsets + first * (inputs.expert_offsets > 0)
            values |= {"bias": preceding(inputs.bias), "expert_offsets": preceding(offsets.int())}
            values["dout"] = last(inputs.dout, p.columns)
    else:
        values |= {
            "row_weights": last(inputs.row_weights, p.top_k, is_early=True),
            "shared": last(inputs.shared, p.columns),
        }

    def check() -> list[str]:
        ran = slice(p.tokens - 1, None) if is_huge else slice(None)
        wrong = touched("out", out[:, p.columns :], NAN)
        if p.wants_out:
            wrong += worst_element("out", out[ran, : p.columns], *(one[ran] for one in expect_out(p, inputs, unit)))
        else:
            wrong += touched("out, which is not wanted,", out, NAN)
        if is_backward and p.wants_dweights:
            found = dweights.view(p.tokens, p.top_k)[ran]
            wrong += worst_element("dweights", found, *(one[ran] for one in expect_dweights(p, inputs)))
        return wrong

    launch = Launch(values, tokens * p.blocks, only_block=tokens - 1 if is_huge else None)
    return Trial([launch], check, {"out": out, "dweights": dweights})


@dataclass(frozen=True)
class GatherProblem(NamedProblem):
    """Some slots have no row. Rows before ``first_row`` are other tokens', for which there is only address space."""

    count: int  # rows
    columns: int
    tokens: int
    top_k: int
    first_row: int = 0


def gather_problems(_: Unit) -> Iterator[GatherProblem]:
    yield GatherProblem("rows", 15, 1096, 9, 2)  # more than the columns in flight, plus a tail
    yield GatherProblem("narrow", 3, 8, 3, 1)
    yield GatherProblem("nobody", 0, 40, 2, 2)
    yield GatherProblem("far", 9, 72, 4, 3, first_row=2**26)


def gather_trial(unit: Unit, p: GatherProblem) -> Trial:
    generator, slots = seeded(p.columns), p.tokens * p.top_k
    chosen = torch.randperm(slots, generator=generator)[: p.count]
    a = torch.randn(p.tokens, p.columns + 8, generator=generator)
    a[:, p.columns :] = NAN
    a = a.to(DTYPES[unit.dtype])
    slot_rows = torch.full((slots,), -1, dtype=torch.int32)
    slot_rows[chosen] = torch.arange(p.count, dtype=torch.int32) + p.first_row
    rows = torch.full((slots, p.columns), UNTOUCHED, dtype=a.dtype)
    values = {
        "a": preceding(a),
        "rows": output(rows, end=(p.first_row + slots) * p.columns if p.first_row else None),
        "slot_rows": preceding(slot_rows),
        **{name: getattr(p, name) for name in ("tokens", "top_k", "columns")},
    }

    def check() -> list[str]:
        right = torch.equal(rows[: p.count], a[chosen // p.top_k, : p.columns])
        return ([] if right else ["rows are not those of a"]) + touched("rows", rows[p.count :])

    return Trial([Launch(values, math.ceil(p.tokens / unit.row.warps))], check, {"rows": rows})


COMBINE = Runner(combine_problems, combine_trial)
RUNNERS = {"moe_combine": COMBINE, BACKWARD: COMBINE, "moe_gather": Runner(gather_problems, gather_trial)}
