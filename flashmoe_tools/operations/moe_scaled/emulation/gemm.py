"""The plain and gated grouped products of scaled e4m3 operands on the emulated machine, against fp64 of the operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_build.emulation.compare import DTYPES, UNTOUCHED, touched, worst_element
from flashmoe_build.emulation.runner import Launch, Runner, Trial, counter, output, preceding
from flashmoe_tools.operations.moe.emulation.product import (
    EARLY_SLOTS,
    Product,
    Routing,
    Sums,
    activated,
    rounded,
    route,
    sums_of_rows,
)
from flashmoe_tools.operations.moe_scaled import formats
from flashmoe_tools.operations.moe_scaled.formats import BLOCK, LARGEST
from flashmoe_tools.tables import Unit

PADDING = 16  # values after each row, skipped by strides
# wgmma's sums over 128 of k keep 13 bits after the leading one of the largest product; those of mma.sync are float32.
SUM_ROUNDOFF, MMA_ROUNDOFF = 2.0**-12, 1e-5
FEW_ROWS = ("grouped_gemm_scaled_few_rows", "grouped_gemm_gated_scaled_few_rows")
KEPT = "grouped_gemm_gated_scaled_kept"
PRODUCTS = ("grouped_gemm_scaled", "grouped_gemm_gated_scaled", KEPT, *FEW_ROWS)


def problems(unit: Unit) -> Iterator[Product]:
    """Tails in rows and columns; experts without rows and with most of them; NaN next to the data; a reused ring."""
    m, is_gated = unit.row.block_m, "gated" in unit.row.operation

    def make(counts: tuple[int, ...], columns: int, k: int, seed: int, activation: str, **more: Any) -> Product:
        n, word = (2 * columns, activation) if is_gated else (columns, "")
        chosen = {"weights": "nk", "activation": word, "seed": seed, "gathers": is_gated, "top_k": 2, **more}
        return Product(unit.row.operation, unit.dtype, counts, n, k, **chosen)

    if unit.row.operation in FEW_ROWS:
        # Tails of rows and of the last stage, choices known early; a reused ring; experts in each other's way.
        yield make((m + 2, 0, 3), 256, 384, 1, "swiglu", has_nan=True, unrouted=5)
        yield make((0, 5, 3 * m + 1), 128, 1664, 2, "geglu", has_nan=True, has_counter=False)
        yield make((2, 1), 384, 128, 3, "clamped_swiglu", top_k=1)
        yield make((0, 0), 128, 128, 4, "reglu", unrouted=4)
        return
    yield make((m + 2, 0, 3), 384, 256, 1, "swiglu", has_nan=True, unrouted=5)
    yield make((0, 70, m + 64, 9), 256, 640, 2, "geglu", has_nan=True, has_counter=False)
    yield make((2 * m + 66, 1), 128, 128, 3, "clamped_swiglu", top_k=1)
    yield make((0, 0), 128, 128, 4, "reglu", unrouted=4)


@dataclass(frozen=True)
class Scaled:
    """e4m3 bytes [..., rows, k] and the scales of their blocks."""

    values: torch.Tensor
    scales: torch.Tensor
    block_rows: int = 1

    @classmethod
    def random(cls, rows: tuple[int, ...], k: int, block_rows: int, generator: torch.Generator) -> Scaled:
        """Values of every e4m3 magnitude; scales far enough apart that using a neighbour's shows."""
        values = (torch.randn((*rows, k), generator=generator) * 60).clamp(-LARGEST, LARGEST)
        blocks = (*rows[:-1], rows[-1] // block_rows, k // BLOCK)
        powers = 2.0 ** torch.randint(-9, -5, blocks, generator=generator)
        return cls(formats.encode(values), powers * (1 + torch.rand(blocks, generator=generator)), block_rows)

    def erase(self, rows: Any) -> None:
        """Writes NaN where a kernel must not read."""
        self.values[rows], self.scales[rows] = formats.NAN, torch.nan

    def padded(self) -> torch.Tensor:
        return torch.nn.functional.pad(self.values, (0, PADDING), value=formats.NAN)

    def numbers(self) -> torch.Tensor:
        """The values in fp64."""
        return formats.dequantize(self.values, self.scales, self.block_rows)


@dataclass(frozen=True)
class Inputs:
    routing: Routing
    a: Scaled
    weights: Scaled


def make_inputs(p: Product) -> Inputs:
    generator = torch.Generator().manual_seed(p.seed * 7919 + 31)
    routing = route(p, generator)
    used = routing.sources(p)
    rows = p.tokens if p.gathers else p.slots
    a = Scaled.random((rows,), p.k, 1, generator)
    unused = torch.ones(rows, dtype=torch.bool)
    unused[used] = False
    a.erase(unused)
    if p.has_nan:
        a.values[used[p.first_rows()], 3] = 0xFF
    weights = Scaled.random((len(p.counts), p.n), p.k, BLOCK, generator)
    weights.erase([expert for expert, count in enumerate(p.counts) if count == 0])
    return Inputs(routing, a, weights)


def _wrong_quantised(sums: Sums, found: Scaled) -> list[str]:
    """Checks quantised rows of the activation: each block's scale, and values to within half a unit in the last place."""
    value, bound = sums
    blocks = value.unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    scale_bound = bound.unflatten(1, (-1, BLOCK)).amax(-1) / LARGEST + 1e-6 * largest
    scales = torch.where(largest.isnan(), largest, found.scales.double())
    wrong = worst_element("d_scale", scales, largest / LARGEST, scale_bound + 1e-30)
    steps = found.scales.double().repeat_interleave(BLOCK, 1) * 2.0**-10
    return wrong + worst_element("d", found.numbers(), value, 1.01 * bound + 2.0**-4 * (value.abs() + bound) + steps)


def trial(unit: Unit, p: Product) -> Trial:
    inputs, is_few_rows = make_inputs(p), p.operation in FEW_ROWS
    makes_e4m3 = p.is_gated and not is_few_rows
    dtype = torch.uint8 if makes_e4m3 else torch.float32 if p.is_gated else DTYPES[p.dtype]
    out = torch.full((p.slots, p.width + (PADDING if makes_e4m3 else 8)), int(UNTOUCHED), dtype=dtype)
    out_scale = torch.full((p.slots, p.width // BLOCK), UNTOUCHED)
    z = torch.full((p.slots, p.n if p.operation == KEPT else 0), UNTOUCHED, dtype=torch.bfloat16)
    a, weights, ids = inputs.a.padded(), inputs.weights.padded(), inputs.routing.choices(p)
    offsets = inputs.routing.offsets
    is_early = not p.is_gated and (is_few_rows or p.seed % 2 == 0)  # offsets were written before the preceding grid
    # Two values are stored as one 16-bit element, which is the unit of k and of e4m3 strides.
    product = {
        **p.sizes(),
        "k": p.k // 2,
        "a": preceding(a),
        "b": weights,
        "d": output(out),
        "a_stride": a.stride(0) // 2,
        "b_stride": weights.stride(1) // 2,
        "b_expert_stride": weights.stride(0) // 2,
        "d_stride": out.stride(0) // (2 if makes_e4m3 else 1),
        "expert_offsets": offsets if is_early else preceding(offsets),
        "a_slots": preceding(inputs.routing.row_slots) if p.is_gated else None,
        "ids": ids if p.is_gated and is_few_rows and p.slots <= EARLY_SLOTS else None,
        "id_bytes": ids.element_size(),
        "tile_counter": counter() if p.has_counter else None,
        "preactivation": output(z) if p.operation == KEPT else None,
    }
    values = {
        "gemm": product,
        "a_scale": preceding(inputs.a.scales),
        "b_scale": inputs.weights.scales,
        "d_scale": output(out_scale) if makes_e4m3 else None,
        "overlaps_previous_grid": is_early,
    }

    def check() -> list[str]:
        rows = inputs.a.numbers()[inputs.routing.sources(p)]
        roundoff = MMA_ROUNDOFF if is_few_rows else SUM_ROUNDOFF
        sums = sums_of_rows(p, rows, inputs.weights.numbers(), None, roundoff)
        found = out[: p.rows, : p.width]
        if makes_e4m3:
            wrong = _wrong_quantised(activated(p, sums), Scaled(found, out_scale[: p.rows]))
            wrong += touched("d_scale's rows", out_scale[p.rows :])
            if p.operation == KEPT:
                wrong += worst_element("preactivation", z[: p.rows], *rounded(p, sums))
                wrong += touched("preactivation's rows", z[p.rows :])
        else:
            wrong = worst_element("d", found, *(activated(p, sums) if p.is_gated else rounded(p, sums)))
        return wrong + touched("d's columns", out[:, p.width :]) + touched("d's rows", out[p.rows :])

    return Trial([Launch(values, p.tiles(unit))], check, {"d": out, "d_scale": out_scale, "preactivation": z})


RUNNER = Runner(problems, trial)
