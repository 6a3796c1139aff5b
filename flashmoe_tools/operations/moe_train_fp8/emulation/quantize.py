"""The kernels that make operands of products and, transposed, of weight gradients, on the emulated machine: those of given numbers bit
for bit against the definition of the format, the activation's gradient within the bounds of its exponentials."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmoe_build.emulation.compare import DTYPES, UNTOUCHED, different, touched, worst_element
from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, in_front, output
from flashmoe_tools.operations.moe.emulation.product import ACTIVATIONS, Product, gated_backward_results, route
from flashmoe_tools.operations.moe_scaled import formats
from flashmoe_tools.operations.moe_scaled.formats import BLOCK, LARGEST
from flashmoe_tools.operations.moe_train_fp8.emulation import padded
from flashmoe_tools.tables import Unit

NAMES = ("values", "scales", "transposed", "transposed_scales")


@dataclass(frozen=True)
class TilesProblem:
    """Of ``weights`` the experts' counts are rows, all the same."""

    source: str
    counts: tuple[int, ...]
    columns: int
    top_k: int = 1
    wants: tuple[str, ...] = NAMES

    @property
    def name(self) -> str:
        only = "" if self.wants == NAMES else f"-{self.wants[0]}"
        return f"{self.source}-r{'.'.join(map(str, self.counts))}-c{self.columns}-k{self.top_k}{only}"


def tiles_problems(_: Unit) -> Iterator[TilesProblem]:
    yield TilesProblem("weights", (256, 256), 128)
    yield TilesProblem("weights", (128,), 384)
    for source in ("tokens", "gradients"):
        wants = NAMES if source == "gradients" else NAMES[2:]
        yield TilesProblem(source, (70, 0, 129, 1), 256, 2, wants)
        yield TilesProblem(source, (0, 128, 5), 128, 1, wants)
    yield TilesProblem("tokens", tuple(2 if e % 7 == 3 else 0 for e in range(40)), 128, 2, NAMES[2:])
    yield TilesProblem("gradients", (3, 9), 128, 3, NAMES[:2])
    yield TilesProblem("gradients", (3, 130), 128, 1, NAMES[2:])


def _shapes(p: TilesProblem, slots: int) -> dict[str, tuple[int, ...]]:
    experts, columns = len(p.counts), p.columns
    if p.source == "weights":
        rows = p.counts[0]
        one, other = (experts, rows, columns), (experts, columns, rows)
        scales = ((experts, rows // BLOCK, columns // BLOCK), (experts, columns // BLOCK, rows // BLOCK))
        return dict(zip(NAMES, (one, scales[0], other, scales[1]), strict=True))
    count = padded.blocks(slots, experts)
    scales_of_tiles = (count, columns if p.source == "gradients" else columns // BLOCK)
    shapes = ((slots, columns), (slots, columns // BLOCK), (columns, count * BLOCK), scales_of_tiles)
    return dict(zip(NAMES, shapes, strict=True))


def _odd_numbers(x: torch.Tensor) -> None:
    """Zeros, an outlier, NaN."""
    x[..., : BLOCK // 2] *= 1e-3
    x[0, ..., 3] = 0.0
    x[-1, ..., 5], x[-1, ..., 7] = 1000.0, torch.nan


def tiles_trial(unit: Unit, p: TilesProblem) -> Trial:
    generator, dtype = torch.Generator().manual_seed(p.columns + len(p.counts)), DTYPES[unit.dtype]
    product = Product("", unit.dtype, p.counts, 0, 0, gathers=True, top_k=p.top_k, unrouted=3)
    routing, is_weights = route(product, generator), p.source == "weights"
    slots = product.slots
    results: dict[str, torch.Tensor] = {
        name: torch.full(shape, UNTOUCHED if "scales" in name else int(UNTOUCHED)).to(
            torch.float32 if "scales" in name else torch.uint8
        )
        for name, shape in _shapes(p, slots).items()
        if name in p.wants
    }
    if is_weights:
        x = torch.randn((len(p.counts), p.counts[0], p.columns), generator=generator)
        _odd_numbers(x)
        x = x.to(dtype)
    else:
        x = torch.randn((product.tokens, p.columns + 8), generator=generator)
        sources = routing.sources(product)
        chosen = x[sources.unique()]
        _odd_numbers(chosen)
        x[:] = torch.nan  # tokens that nobody chose, and what strides skip
        x[sources.unique(), : p.columns] = chosen[:, : p.columns]
        x = x.to(dtype)
    values: dict[str, Any] = {
        "x": in_front(x),
        **{name: output(tensor) for name, tensor in results.items()},
        "x_stride": x.stride(-2),
        "experts": len(p.counts),
        "top_k": p.top_k,
        "columns": p.columns,
    }
    count = padded.blocks(slots, len(p.counts))
    if is_weights:
        values["rows"] = p.counts[0]
        blocks = len(p.counts) * p.counts[0] // BLOCK
    else:
        values |= {"expert_offsets": in_front(routing.offsets), "row_slots": in_front(routing.row_slots)}
        values["transposed_stride"] = count * BLOCK
        blocks = count

    def check() -> list[str]:
        wrong: list[str] = []
        if is_weights:
            for e, one in enumerate(x):
                codes, scales = formats.quantize(one, BLOCK)
                for name, expected in zip(NAMES, (codes, scales, codes.mT, scales.mT), strict=True):
                    wrong += different(f"{name} of {e}", results[name][e], expected)
            return wrong
        rows = x[routing.sources(product), : p.columns]
        is_used = torch.zeros(count, dtype=torch.bool)
        for own, at in padded.experts_of(routing.offsets):
            is_used[at] = True
            if "values" in results:
                for name, expected in zip(NAMES, formats.quantize(rows[own]), strict=False):
                    wrong += different(name, results[name][own], expected)
            if "transposed" in results:
                found = results["transposed"][:, padded.rows_of(at)], results["transposed_scales"][at].mT
                block_rows = 1 if p.source == "gradients" else BLOCK
                for name, one, expected in zip(
                    NAMES[2:], found, formats.quantize(padded.whole(rows[own]).mT, block_rows), strict=True
                ):
                    wrong += different(name, one, expected)
        if "values" in results:
            wrong += touched("values' rows", results["values"][product.rows :])
            wrong += touched("scales' rows", results["scales"][product.rows :])
        if "transposed" in results:
            unused = results["transposed"].unflatten(1, (-1, BLOCK))[:, ~is_used]
            wrong += touched("unused blocks", unused) + touched("their scales", results["transposed_scales"][~is_used])
        return wrong

    return Trial([Launch(values, blocks * (p.columns // BLOCK), (p.source,))], check, results)


def gated_problems(unit: Unit) -> Iterator[Product]:
    """``n`` counts the columns of gate; ``keeps``: all results are wanted."""
    base = Product(
        "grouped_gemm_gated_backward", unit.dtype, (70, 0, 129, 1), 256, 0, activation="swiglu", keeps=True, unrouted=5
    )
    yield base
    for seed, activation in enumerate(ACTIVATIONS[1:], 1):
        yield replace(base, counts=(0, 20 + seed), n=128, activation=activation, keeps=seed != 2, seed=seed)


def _wrong_blocks(
    name: str, value: torch.Tensor, bound: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block_rows: int = 1
) -> list[str]:
    """Of blocks of ``block_rows`` by 128: each scale, and every value within half a unit of its last place."""

    def largest_of(one: torch.Tensor) -> torch.Tensor:
        return one.abs().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, block_rows)).amax((1, 3))

    largest = largest_of(value)
    scale_bound = largest_of(bound) / LARGEST + 1e-6 * largest + 1e-30
    wrong = worst_element(f"{name}'s scales", scales.double(), largest / LARGEST, scale_bound)
    steps = scales.double().repeat_interleave(block_rows, 0).repeat_interleave(BLOCK, 1) * 2.0**-10
    found = formats.dequantize(codes, scales, block_rows)
    return wrong + worst_element(name, found, value, 1.01 * bound + 2.0**-4 * (value.abs() + bound) + steps)


def gated_trial(unit: Unit, p: Product) -> Trial:
    generator, dtype = torch.Generator().manual_seed(p.seed + 17), DTYPES[p.dtype]
    routing, slots, experts = route(p, generator), p.slots, len(p.counts)
    count = padded.blocks(slots, experts)
    z = (4.0 * torch.randn(slots, 2 * p.n, generator=generator)).to(dtype)
    z[: p.rows : 3, : 2 * p.n : 7], z[1 : p.rows : 3, : 2 * p.n : 5] = 7.0, -30.0  # on a clamp's border, and far out
    s = torch.randn(slots, p.n, generator=generator).to(dtype)
    row_weights = torch.rand(slots, generator=generator) + 0.1
    z[p.rows :], s[p.rows :] = torch.nan, torch.nan
    both = 2 * p.n
    shapes = {
        "values": (slots, both),
        "scales": (slots, both // BLOCK),
        "transposed": (both, count * BLOCK),
        "transposed_scales": (count, both),
        "activation_transposed": (p.n, count * BLOCK),
        "activation_scales": (count, p.n // BLOCK),
        "row_dots": (p.n // BLOCK, slots),
    }
    if not p.keeps:
        shapes = {name: shape for name, shape in shapes.items() if name in ("values", "scales")}
    results = {
        name: torch.full(shape, UNTOUCHED if "scales" in name or "dots" in name else int(UNTOUCHED)).to(
            torch.float32 if "scales" in name or "dots" in name else torch.uint8
        )
        for name, shape in shapes.items()
    }
    values = {
        "preactivation": Buffer(z),
        "s": in_front(s),
        "row_weights": Buffer(row_weights),
        "expert_offsets": routing.offsets,
        **{name: output(tensor) for name, tensor in results.items()},
        "transposed_stride": count * BLOCK,
        "experts": experts,
        "slots": slots,
        "columns": p.n,
        "activation": ACTIVATIONS.index(p.activation),
    }

    def check() -> list[str]:
        exact = s[: p.rows].double(), torch.zeros(p.rows, p.n, dtype=torch.float64)
        expected = gated_backward_results(p, exact, z[: p.rows], row_weights[: p.rows])
        wrong: list[str] = []
        for own, at in padded.experts_of(routing.offsets):
            dz, active = ([one[own] for one in expected[name]] for name in ("d", "weighted_activation"))
            wrong += _wrong_blocks("dz", *dz, results["values"][own], results["scales"][own])
            if not p.keeps:
                continue
            place = padded.rows_of(at)
            for name, given, block_rows in (("transposed", dz, 1), ("activation", active, BLOCK)):
                codes = results["transposed" if name == "transposed" else "activation_transposed"][:, place]
                found = codes, results[f"{name}_scales"][at].mT
                wrong += _wrong_blocks(name, *(padded.whole(one).mT for one in given), *found, block_rows)
        if p.keeps:
            wrong += worst_element("row_dots", results["row_dots"][:, : p.rows], *expected["row_dots"])
            wrong += touched("row_dots", results["row_dots"][:, p.rows :])
        return wrong + touched("dz's rows", results["values"][p.rows :])

    return Trial([Launch(values, count * (p.n // BLOCK))], check, results)


TILES = Runner(tiles_problems, tiles_trial)
GATED = Runner(gated_problems, gated_trial)
