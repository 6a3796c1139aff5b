"""The kernels that quantise operands, plain and transposed, on the emulated machine.

Plain operands are for products, transposed ones for weight gradients. Given numbers are checked bit for bit against the
format's definition, the activation's gradient within the bounds of its exponentials.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmoe_build.emulation.compare import DTYPES, UNTOUCHED, different, touched, worst_element
from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, output, preceding
from flashmoe_tools.operations.moe.emulation.product import ACTIVATIONS, Product, Sums, gated_backward_results, route
from flashmoe_tools.operations.moe_scaled import formats
from flashmoe_tools.operations.moe_scaled.formats import BLOCK, LARGEST
from flashmoe_tools.operations.moe_train_fp8.emulation import padded
from flashmoe_tools.tables import Unit

NAMES = ("values", "scales", "transposed", "transposed_scales")


@dataclass(frozen=True)
class TilesProblem:
    """With ``weights`` the experts' counts are rows, all the same."""

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
    yield TilesProblem("weights", (256, 256), 256)
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
    """Adds zeros, an outlier and NaN."""
    x[..., : BLOCK // 2] *= 1e-3
    x[0, ..., 3] = 0.0
    x[-1, ..., 5], x[-1, ..., 7] = 1000.0, torch.nan


def _blank(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Result tensors: bytes for values, float32 for scales and dots."""

    def blank(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        is_float = "scales" in name or "dots" in name
        return torch.full(shape, UNTOUCHED).to(torch.float32 if is_float else torch.uint8)

    return {name: blank(name, shape) for name, shape in shapes.items()}


def _weights_trial(unit: Unit, p: TilesProblem) -> Trial:
    generator = torch.Generator().manual_seed(p.columns)
    x = torch.randn((len(p.counts), p.counts[0], p.columns), generator=generator)
    _odd_numbers(x)
    x = x.to(DTYPES[unit.dtype])
    results = _blank(_shapes(p, 0))
    values = {
        "x": preceding(x),
        **{name: output(tensor) for name, tensor in results.items()},
        "experts": len(p.counts),
        "rows": p.counts[0],
        "columns": p.columns,
    }

    def check() -> list[str]:
        wrong: list[str] = []
        for e, one in enumerate(x):
            codes, scales = formats.quantize(one, BLOCK)
            for name, expected in zip(NAMES, (codes, scales, codes.mT, scales.mT), strict=True):
                wrong += different(f"{name} of {e}", results[name][e], expected)
        return wrong

    blocks = sum(p.counts) // BLOCK * (p.columns // BLOCK)
    return Trial([Launch(values, blocks, (p.source,))], check, results)


def _rows_trial(unit: Unit, p: TilesProblem) -> Trial:
    generator = torch.Generator().manual_seed(p.columns + len(p.counts))
    product = Product("", unit.dtype, p.counts, 0, 0, gathers=True, top_k=p.top_k, unrouted=3)
    routing, count = route(product, generator), padded.blocks(product.slots, len(p.counts))
    results = _blank({name: shape for name, shape in _shapes(p, product.slots).items() if name in p.wants})
    sources = routing.sources(product)
    chosen = torch.randn((len(sources.unique()), p.columns), generator=generator)
    _odd_numbers(chosen)
    x = torch.full((product.tokens, p.columns + 8), torch.nan)  # tokens nobody chose, and what strides skip
    x[sources.unique(), : p.columns] = chosen
    x = x.to(DTYPES[unit.dtype])
    values: dict[str, Any] = {
        "x": preceding(x),
        **{name: output(tensor) for name, tensor in results.items()},
        "x_stride": x.stride(-2),
        "experts": len(p.counts),
        "top_k": p.top_k,
        "columns": p.columns,
        "expert_offsets": preceding(routing.offsets),
        "row_slots": preceding(routing.row_slots),
        "transposed_stride": count * BLOCK,
    }

    def check() -> list[str]:
        rows, block_rows = x[sources, : p.columns], 1 if p.source == "gradients" else BLOCK
        wrong: list[str] = []
        is_used = torch.zeros(count, dtype=torch.bool)
        for own, at in padded.experts_of(routing.offsets):
            is_used[at] = True
            found = {name: results[name][own] for name in NAMES[:2] if name in results}
            expected = dict(zip(NAMES[:2], formats.quantize(rows[own]), strict=True))
            if "transposed" in results:
                found["transposed"] = results["transposed"][:, padded.rows_of(at)]
                found["transposed_scales"] = results["transposed_scales"][at].mT
                columns = formats.quantize(padded.whole(rows[own]).mT, block_rows)
                expected |= dict(zip(NAMES[2:], columns, strict=True))
            for name, one in found.items():
                wrong += different(name, one, expected[name])
        for name in NAMES[:2]:
            if name in results:
                wrong += touched(f"{name}' rows", results[name][product.rows :])
        if "transposed" in results:
            unused = results["transposed"].unflatten(1, (-1, BLOCK))[:, ~is_used]
            wrong += touched("unused blocks", unused) + touched("their scales", results["transposed_scales"][~is_used])
        return wrong

    return Trial([Launch(values, count * (p.columns // BLOCK), (p.source,))], check, results)


def tiles_trial(unit: Unit, p: TilesProblem) -> Trial:
    return _weights_trial(unit, p) if p.source == "weights" else _rows_trial(unit, p)


def gated_problems(unit: Unit) -> Iterator[Product]:
    """``n`` counts the columns of gate; ``saves``: all results are requested."""
    base = Product(
        "grouped_gemm_gated_backward", unit.dtype, (70, 0, 129, 1), 256, 0, activation="swiglu", saves=True, unrouted=5
    )
    yield base
    for seed, activation in enumerate(ACTIVATIONS[1:], 1):
        yield replace(base, counts=(0, 20 + seed), n=128, activation=activation, saves=seed != 2, seed=seed)


def _wrong_blocks(
    name: str, expected: Sums, codes: torch.Tensor, scales: torch.Tensor, block_rows: int = 1
) -> list[str]:
    """Checks blocks of ``block_rows`` by 128: each scale, and values to within half a unit in the last place."""
    value, bound = expected

    def largest_of(one: torch.Tensor) -> torch.Tensor:
        blocks: torch.Tensor = one.abs().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, block_rows))
        return blocks.amax((1, 3))

    largest = largest_of(value)
    scale_bound = largest_of(bound) / LARGEST + 1e-6 * largest + 1e-30
    wrong = worst_element(f"{name}'s scales", scales.double(), largest / LARGEST, scale_bound)
    steps = scales.double().repeat_interleave(block_rows, 0).repeat_interleave(BLOCK, 1) * 2.0**-10
    found = formats.dequantize(codes, scales, block_rows)
    return wrong + worst_element(name, found, value, 1.01 * bound + 2.0**-4 * (value.abs() + bound) + steps)


def _of_rows(sums: Sums, rows: slice) -> Sums:
    return sums[0][rows], sums[1][rows]


def _columns(sums: Sums) -> Sums:
    """Transposed, padded to complete blocks of rows."""
    return padded.whole(sums[0]).mT, padded.whole(sums[1]).mT


def gated_trial(unit: Unit, p: Product) -> Trial:
    generator, dtype = torch.Generator().manual_seed(p.seed + 17), DTYPES[p.dtype]
    routing, slots, experts = route(p, generator), p.slots, len(p.counts)
    count = padded.blocks(slots, experts)
    z = (4.0 * torch.randn(slots, 2 * p.n, generator=generator)).to(dtype)
    z[: p.rows : 3, : 2 * p.n : 7], z[1 : p.rows : 3, : 2 * p.n : 5] = 7.0, -30.0  # at a clamp's edge, and far out
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
    if not p.saves:
        shapes = {name: shape for name, shape in shapes.items() if name in ("values", "scales")}
    results = _blank(shapes)
    values = {
        "preactivation": Buffer(z),
        "s": preceding(s),
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
            dz, active = (_of_rows(expected[name], own) for name in ("d", "weighted_activation"))
            wrong += _wrong_blocks("dz", dz, results["values"][own], results["scales"][own])
            if not p.saves:
                continue
            place = padded.rows_of(at)
            scales = results["transposed_scales"][at].mT
            wrong += _wrong_blocks("transposed", _columns(dz), results["transposed"][:, place], scales)
            codes, scales = results["activation_transposed"][:, place], results["activation_scales"][at].mT
            wrong += _wrong_blocks("activation", _columns(active), codes, scales, BLOCK)
        if p.saves:
            wrong += worst_element("row_dots", results["row_dots"][:, : p.rows], *expected["row_dots"])
            wrong += touched("row_dots", results["row_dots"][:, p.rows :])
        return wrong + touched("dz's rows", results["values"][p.rows :])

    return Trial([Launch(values, count * (p.n // BLOCK))], check, results)


TILES = Runner(tiles_problems, tiles_trial)
GATED = Runner(gated_problems, gated_trial)
