"""The grouped products with mma.sync and those for few rows, on the emulated machine.

These are families sm75 and sm80 (forward and backward), and the few-rows kernels. Each row is a separate buffer, so a
chunk past its end is out of bounds; memory that no row needs does not exist.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flashmoe_build.emulation.compare import DTYPES, Expected, worst_element
from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, counter, output, preceding
from flashmoe_tools.operations.moe.emulation.product import (
    DOT_COLUMNS,
    EARLY_SLOTS,
    Product,
    Routing,
    forward_results,
    gated_backward_results,
    sums_of_rows,
    weight_gradient,
)
from flashmoe_tools.tables import Unit

PADDING = 8  # elements between rows
FAR = 2**28 + 8  # elements between rows: the ninth row is past 2^31
NAN = float("nan")


def mma_sync_problems(unit: Unit) -> Iterator[Product]:
    """Edges of the kernel's tile, empty and hot experts, more experts than the tile table has sections, every layout."""
    operation, m = unit.row.operation, unit.row.block_m
    make = partial(Product, operation, unit.dtype, activation="swiglu", gathers=True)
    plain = make((0, 0), n=16, k=8)
    if plain.is_gradient:
        yield make((70, 0, 3, 33), n=m + 8, k=136, unrouted=2, top_k=2)
        yield make((1, 32, 160), n=8, k=8, gathers=False, has_counter=False)
        yield make((5, 9, 12), n=24, k=40, top_k=3, has_nan=True)
        yield make((10, 2), n=40, k=16, is_far=True)
        yield replace(plain, unrouted=3)
        return
    step = 16 if plain.is_gated else 8  # granularity of n
    wide = 128 + step  # one step past a column tile
    words = unit.row.words["weights"]
    pairs = "kn_pairs" if "kn_pairs" in words else "kn"
    for word in words:  # tails of all three sizes, an expert without rows, slots without an expert
        tails = make((m + 1, 0, 3, m), n=wide, k=200, weights=word, unrouted=3, top_k=2, saves=True, seed=len(word))
        yield replace(tails, is_interleaved=word != "kn", has_bias=not plain.is_backward)
    by_rows = make((5, 1), n=128 + 2 * step, k=40, weights="nk", gathers=False, activation="clamped_swiglu", scale=4.0)
    yield replace(by_rows, has_bias=not plain.is_backward)
    yield replace(by_rows, counts=(m + 5,), activation="swiglu")  # one expert: no offsets
    # A hot expert with more row tiles than run side by side.
    yield make((0, 17 * m + 3, 1), n=wide, k=8, weights="nk", activation="geglu", has_counter=False)
    # Two experts per section of the tile table, most of them empty.
    many = (0,) * 3 + (1, 0, 2, 0) * 20
    yield make(many, n=32, k=32, weights="kn", top_k=4, activation="reglu", saves=True)
    yield replace(plain, weights="nk", unrouted=6, top_k=2)
    yield make((7, 9, 4), n=48, k=72, weights="nk", top_k=5, activation="geglu_tanh", has_nan=True, saves=True)
    far = make((11, 0, 10), n=48, k=64, weights=pairs, is_far=True, saves=True)
    yield replace(far, is_interleaved=pairs == "kn_pairs")
    yield replace(far, weights="nk", is_interleaved=True, seed=1)


def few_rows_problems(unit: Unit) -> Iterator[Product]:
    """Edges of the kernel's tile, ring and tile list; empty experts, a hot one, every layout."""
    row = unit.row
    m, n, ring = row.block_m, row.block_n, row.stages * row.options["block_k"]
    gated = row.operation == "grouped_gemm_gated_few_rows"
    edge = 16 if gated else 8  # half a fragment, if n may end there
    for index, weights in enumerate(row.words["weights"]):
        interleaved = weights == "kn_pairs" or (gated and weights == "nk")
        chosen: dict[str, Any] = {"weights": weights, "activation": "swiglu", "gathers": gated, "seed": index}
        chosen["is_interleaved"] = weights == "kn_pairs"

        def make(counts: tuple[int, ...], columns: int, k: int, *, given: Any = chosen, **more: Any) -> Product:
            return Product(row.operation, unit.dtype, counts, columns, k, **{**given, **more})

        # Tails of all three sizes, an expert without rows, slots without an expert.
        tails = make((m + 1, 0, 3, m), n + edge, 200, unrouted=3, top_k=2, has_bias=True, saves=gated)
        yield replace(tails, is_interleaved=interleaved)
        clamped = make((5, 1), 2 * edge + 16, 40, activation="clamped_swiglu", has_bias=True, scale=4.0)
        yield replace(clamped, gathers=not gated)
        if not gated:
            yield make((m + 3,), n + edge, 136, has_bias=True)  # one expert: no offsets
        if unit.dtype == "f16":  # the rest differs only in the products and the rounding
            continue
        # A hot expert, a ring that is reused, the static schedule. These three cover every number of row groups.
        yield make((0, 4 * m - 3, 1), edge, ring + 72, activation="geglu", saves=gated, has_counter=False)
        yield make((7, m // 2 + 5, 4), n - 16, 72, top_k=5, activation="geglu_tanh", has_nan=True)
        yield make((6, 0, m // 4 + 5), n, 64, is_far=True, saves=gated)
        if index == 0:
            # More experts than threads, most of them empty.
            counts = ((0,) * 5 + (1, 0, 2)) * 10 + (0,) * 620
            yield make(counts, 32, 32, top_k=4, activation="reglu", is_interleaved=interleaved)
            yield make((0, 0), 16, 8, unrouted=6, top_k=2)


@dataclass(frozen=True)
class Inputs:
    """The inputs of the kernel.

    ``b`` is [experts, n, k] whatever the layout, or for a weight gradient [rows of b, k].
    """

    routing: Routing
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor  # [experts, n]
    z: torch.Tensor  # [slots, 2 n], the preactivation that a backward product reads
    row_weights: torch.Tensor
    ids: torch.Tensor  # [slots]; an id that names no expert has no row


def make_inputs(p: Product) -> Inputs:
    """Fresh random inputs, the same for the same problem."""
    generator = torch.Generator().manual_seed(p.seed * 7919 + p.n + p.k)
    experts = len(p.counts)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(DTYPES[p.dtype])

    of_slot = torch.full((p.slots,), experts)
    of_slot[: p.rows] = p.experts_of_rows()
    of_slot = of_slot[torch.randperm(p.slots, generator=generator)]
    row_slots = torch.sort(of_slot, stable=True).indices.to(torch.int32)
    row_slots[p.rows :] = -1
    gathered = p.tokens if p.gathers else p.slots
    if p.is_gradient:
        a, b = normal(p.slots, p.n), normal(gathered, p.k)
    else:
        a, b = normal(gathered, p.k), normal(experts, p.n, p.k, scale=p.scale / math.sqrt(p.k))
    if p.has_nan:  # in the source of the first expert's last row, and in the last expert's weights
        row = p.counts[0] - 1
        if p.is_gradient:
            a[row, 3] = NAN
        else:
            a[int(row_slots[row]) // p.top_k if p.gathers else row, p.k // 2] = NAN
            b[-1, 5, p.k - 1] = NAN
    return Inputs(
        Routing(torch.cumsum(torch.tensor((0, *p.counts)), 0).to(torch.int32), row_slots),
        a,
        b,
        normal(experts, p.n),
        normal(p.slots, 2 * p.n, scale=2 * p.scale),
        torch.rand(p.slots, generator=generator),
        torch.where(of_slot < experts, of_slot, -1) if p.seed % 2 else of_slot.int(),
    )


def expect(p: Product, given: Inputs) -> Expected:
    """The rows of each result that are written."""
    sources = given.routing.sources(p)
    if p.is_gradient:
        return {"d": weight_gradient(p, given.a[: p.rows], given.b[sources])}
    sums, error = sums_of_rows(p, given.a[sources], given.b, given.bias if p.has_bias else None)
    if p.is_backward:
        return gated_backward_results(p, (sums, error + 1e-6), given.z[: p.rows], given.row_weights[: p.rows])
    return forward_results(p, (sums, error + 1e-6))


def trial(unit: Unit, p: Product) -> Trial:
    given, dtype, is_few_rows = make_inputs(p), DTYPES[p.dtype], p.operation.endswith("few_rows")
    sizes = {"d": (p.slots, p.width), "preactivation": (p.slots, p.n), "weighted_activation": (p.slots, p.n)}
    if p.is_gradient:
        sizes["d"] = (len(p.counts) * p.n, p.k)
    results = {name: torch.full(size, NAN, dtype=dtype) for name, size in sizes.items()}
    results["row_dots"] = torch.full((math.ceil(p.n / DOT_COLUMNS), p.slots), NAN)

    def rows(tensor: torch.Tensor, **options: Any) -> Buffer:
        return Buffer(tensor, row_stride=FAR if p.is_far else tensor.shape[-1] + PADDING, **options)

    # A gated product follows the sort; a plain one for few rows follows the product that writes a.
    waits = preceding if p.is_gated or not is_few_rows else Buffer
    written = rows(results["d"], writable=True, initialised=False, rows=None if p.is_gradient else range(p.rows))
    values: dict[str, Any] = {
        **p.sizes(),
        "a": rows(given.a, is_from_preceding_grid=is_few_rows and not p.is_gated),
        "d": written,
        "expert_offsets": waits(given.routing.offsets) if len(p.counts) > 1 or p.is_gradient else None,
        "bias": None if not p.has_bias else given.bias if is_few_rows else preceding(given.bias),
        "tile_counter": counter() if p.has_counter else None,
    }
    if p.gathers:
        values["b_slots" if p.is_gradient else "a_slots"] = waits(given.routing.row_slots)
    if p.is_gradient:
        values["b"] = rows(given.b)
    else:  # weights of an expert without rows do not exist in memory
        weights = given.b if p.weights == "nk" else given.b.mT.contiguous()
        size = weights.shape[1]
        used = [row for row in range(len(p.counts) * size) if p.counts[row // size] > 0]
        values["b"] = rows(weights.flatten(0, 1), rows=used)
        values["b_expert_stride"] = values["b"].strides[-1] * size
    if p.is_backward:
        values |= {name: output(results[name]) for name in ("weighted_activation", "row_dots")}
        values |= {"preactivation": preceding(given.z), "row_weights": preceding(given.row_weights)}
    elif p.saves and p.is_gated:
        values["preactivation"] = output(results["preactivation"])
    if is_few_rows:
        values["ids"] = given.ids if p.is_gated and p.slots <= EARLY_SLOTS else None
        values["id_bytes"] = given.ids.element_size()

    def check() -> list[str]:
        wrong: list[str] = []
        for name, expected in expect(p, given).items():
            found = results[name].view_as(expected[0]) if p.is_gradient else results[name][: p.rows]
            wrong += worst_element(name, results[name][:, : p.rows] if name == "row_dots" else found, *expected)
        return wrong

    return Trial([Launch(values, p.tiles(unit), p.words)], check, results)


MMA_SYNC, FEW_ROWS = Runner(mma_sync_problems, trial), Runner(few_rows_problems, trial)
