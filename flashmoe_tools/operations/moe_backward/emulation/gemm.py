"""The grouped products of family sm90's backward pass on the emulated machine.

These are the weight gradient, and the product followed by the gradient of the activation.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from flashmoe_build.emulation.compare import DTYPES, UNTOUCHED, touched, worst_element
from flashmoe_build.emulation.runner import Launch, Runner, Trial, counter, output, preceding
from flashmoe_tools.operations.moe.emulation.gemm import NAN, PADDING
from flashmoe_tools.operations.moe.emulation.product import (
    DOT_COLUMNS,
    Product,
    gated_backward_results,
    route,
    sums_of_rows,
    weight_gradient,
)
from flashmoe_tools.tables import Unit


def weight_gradient_problems(unit: Unit) -> Iterator[Product]:
    """Tails in n, k and rows; experts without rows and with most of them; NaN next to the data."""
    m, n = unit.row.block_m, unit.row.block_n
    make = partial(Product, unit.row.operation, unit.dtype, top_k=2)
    yield make((70, 0, 129, 1), m + 8, n + 72, has_nan=True, seed=1)
    yield make((64, 63, 128, 5, 0), m - 8, n, unrouted=5, has_nan=True, seed=2)
    yield make((9, 450, 0), m, 72, top_k=1, has_counter=False, seed=3)  # the ring is reused
    yield make((0, 0), 40, 2 * n + 8, unrouted=4, seed=4)  # no token chose these experts
    yield make((33, 100), 2 * m + 8, 136, has_nan=True, seed=5)
    yield make((5, 3), 8 * m + 8, n + 8, top_k=1, seed=6)  # more than one section of tiles


def weight_gradient_trial(unit: Unit, p: Product) -> Trial:
    generator = torch.Generator().manual_seed(p.seed)
    routing, dtype = route(p, generator), DTYPES[p.dtype]
    given: dict[str, torch.Tensor] = {}
    for name, width in (("a", p.n), ("b", p.k)):
        tensor = torch.randn((p.slots, width + PADDING), generator=generator).to(dtype)
        tensor[:, width:] = NAN  # padding, which strides skip
        if p.has_nan:
            tensor[p.first_rows(), 3] = NAN
        tensor[p.rows :] = NAN  # nothing writes rows after the last one
        given[name] = tensor
    out = torch.full((len(p.counts), p.n, p.k + PADDING), UNTOUCHED, dtype=dtype)
    out[..., : p.k] = NAN
    values = {
        **p.sizes(),
        **{name: preceding(tensor) for name, tensor in given.items()},
        "d": output(out),
        "expert_offsets": preceding(routing.offsets),
        "tile_counter": counter() if p.has_counter else None,
    }

    def check() -> list[str]:
        expected = weight_gradient(p, given["a"][: p.rows, : p.n], given["b"][: p.rows, : p.k])
        return worst_element("d", out[..., : p.k], *expected) + touched("d", out[..., p.k :])

    return Trial([Launch(values, p.tiles(unit))], check, {"d": out})


def gated_backward_problems(unit: Unit) -> Iterator[Product]:
    """Tails in rows, n and k; experts without rows and with most of them; both layouts; each activation; NaN nearby."""
    m, n = unit.row.block_m, unit.row.block_n
    for weights in unit.row.words["weights"]:
        make = partial(Product, unit.row.operation, unit.dtype, weights=weights, top_k=2)
        base = make((m + 2, 0, 65, 1), n + 72, 136, activation="swiglu", unrouted=5, has_nan=True)
        yield base
        yield replace(base, activation="clamped_swiglu", is_interleaved=True, seed=1)
        if (
            n == 256
        ):  # both consumers share this tile; the epilogue is the other tile's, which has the rest; the ring is reused
            yield make((m, 10, 10, 70), 264, 328, activation="reglu", seed=5)
            continue
        yield make((7, 9), 40, 456, activation="geglu", top_k=1, has_counter=False, seed=2)
        yield make((0, 80), n, 8, activation="geglu_tanh", is_interleaved=True, seed=3)
        yield make((2 * m + 9, 3), 72, 72, activation="reglu", seed=4)
        yield make((m, 10, 10, 10, 10, 10, 20), n, 328, activation="swiglu", seed=5)  # the ring is reused


def gated_backward_trial(unit: Unit, p: Product) -> Trial:
    generator = torch.Generator().manual_seed(p.seed + 17)
    routing, dtype = route(p, generator), DTYPES[p.dtype]
    n, k, rows, experts = p.n, p.k, p.rows, len(p.counts)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    dout = normal(p.slots, k + PADDING)
    dout[:, k:] = NAN
    dout[rows:] = NAN  # nothing writes rows after the last one
    weights = normal(experts, n, k) if p.weights == "nk" else normal(experts, k, n)
    z = (4.0 * normal(p.slots, 2 * n)).to(dtype)
    row_weights = torch.rand(p.slots, generator=generator) + 0.1
    # Values at the edge of a clamp, and far outside.
    z[:rows:3, : 2 * n : 7] = 7.0
    z[1:rows:3, : 2 * n : 5] = -30.0
    z[rows:] = NAN
    if p.has_nan:
        dout[3, 5], z[4, 2] = NAN, NAN
        weights[1] = NAN  # of the expert that no token chose
    results = {
        "d": torch.full((p.slots, 2 * n + PADDING), UNTOUCHED, dtype=dtype),
        "weighted_activation": torch.full((p.slots, n), UNTOUCHED, dtype=dtype),
        "row_dots": torch.full((math.ceil(n / DOT_COLUMNS), p.slots), UNTOUCHED),
    }
    values = {
        **p.sizes(),
        **{name: output(tensor) for name, tensor in results.items()},
        "a": preceding(dout),
        "b": weights,
        "b_expert_stride": weights.stride(0),
        "preactivation": preceding(z),
        "row_weights": preceding(row_weights),
        "expert_offsets": preceding(routing.offsets),
        "tile_counter": counter() if p.has_counter else None,
    }

    def check() -> list[str]:
        sums = sums_of_rows(p, dout[:rows, :k], weights if p.weights == "nk" else weights.mT, None)
        d, active, dots = results.values()
        found = {"d": d[:rows, : 2 * n], "weighted_activation": active[:rows], "row_dots": dots[:, :rows]}
        wrong: list[str] = []
        for name, expected in gated_backward_results(p, sums, z[:rows], row_weights[:rows]).items():
            wrong += worst_element(name, found[name], *expected)
        wrong += touched("d", d[:, 2 * n :]) + touched("d's rows", d[rows:])
        return wrong + touched("weighted_activation", active[rows:]) + touched("row_dots", dots[:, rows:])

    return Trial([Launch(values, p.tiles(unit), p.words)], check, results)


WEIGHT_GRADIENT = Runner(weight_gradient_problems, weight_gradient_trial)
GATED_BACKWARD = Runner(gated_backward_problems, gated_backward_trial)
