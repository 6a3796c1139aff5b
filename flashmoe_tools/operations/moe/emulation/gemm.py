"""The plain and gated grouped products of family sm90 on the emulated machine."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from flashmoe_build.emulation.compare import DTYPES, UNTOUCHED, touched, worst_element
from flashmoe_build.emulation.runner import Launch, Runner, Trial, counter, output, preceding
from flashmoe_tools.operations.moe.emulation.product import Product, Routing, forward_results, route, sums_of_rows
from flashmoe_tools.tables import Unit

PADDING = 8  # elements after each row, skipped by strides
NAN = float("nan")


def problems(unit: Unit) -> Iterator[Product]:
    """Tails in rows, n and k; experts without rows (also at the ends) and hot ones; every weight layout.

    Gated: each activation, with and without storing the preactivation.
    """
    m, n, is_gated = unit.row.block_m, unit.row.block_n, "gated" in unit.row.operation

    def make(counts: tuple[int, ...], columns: int, k: int, weights: str, seed: int, **more: object) -> Product:
        columns *= 2 if is_gated else 1
        chosen = {"weights": weights, "seed": seed, "gathers": is_gated, "top_k": 2, **more}
        return Product(unit.row.operation, unit.dtype, counts, columns, k, **chosen)  # type: ignore[arg-type]

    if not is_gated:
        kn = "kn" if "kn" in unit.row.words["weights"] else "nk"
        yield make((m + 2, 0, 3, 64), n + 72, 136, "nk", 1, has_bias=True, has_nan=True, unrouted=5)
        yield make((0, m, 0), n, 64, kn, 2)  # complete tiles; experts without rows at both ends
        yield make((0, 3 * m + 66, 1), 2 * n + 8, 72, kn, 3, has_bias=True, top_k=1)
        yield make((m - 1, 2 * m, 9), n + 8, 200, "nk", 4, has_counter=False, has_nan=True)
        yield make((0, 0), 40, 16, "nk", 5, unrouted=4)  # no token chose these experts
        yield make((m + 70,), n + 8, 136, "nk", 8, top_k=1, has_bias=True)  # one expert: no offsets
        # Several windows of experts, some without rows; a sum over k shorter than one block.
        some = tuple(3 if expert in (0, 31, 40, 95) else 0 for expert in range(97))
        yield make(some, 8, 8, kn, 6, has_nan=True)
        yield make((5, 2048 + 70), n + 8, 8, "nk", 7, top_k=1)  # more than one group of row tiles
        return
    n //= 2
    yield make((m + 2, 0, 3), n + 72, 136, "nk", 11, activation="swiglu", saves=True, has_nan=True, unrouted=5)
    both = {"is_interleaved": True, "saves": True, "has_bias": True}  # gate and up interleaved
    yield make((0, 2 * m - 30, 40), n + 24, 72, "nk", 12, activation="clamped_swiglu", has_nan=True, **both)
    yield make((m, 64), n, 64, "kn", 13, activation="geglu", saves=True, has_bias=True, top_k=1)
    yield make((70, m + 1), n + 40, 80, "kn_pairs", 14, activation="geglu_tanh", **both)
    yield make((3 * m + 66, 0), n + 8, 200, "nk", 15, activation="reglu", has_counter=False, top_k=3, unrouted=7)
    yield make((0, 0), 40, 16, "nk", 16, activation="swiglu", unrouted=4, saves=True)
    some = tuple(3 if expert in (1, 31, 40, 95) else 0 for expert in range(97))
    yield make(some, 16, 8, "kn_pairs", 17, is_interleaved=True, activation="swiglu", has_nan=True)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a kernel. Everything that must not affect a result is NaN."""

    routing: Routing
    a: torch.Tensor  # [tokens or slots, k + PADDING]
    weights: torch.Tensor  # [experts, n or k, k or n, + PADDING]
    bias: torch.Tensor | None


def make_inputs(p: Product) -> Inputs:
    generator = torch.Generator().manual_seed(p.seed * 7919 + 29)
    dtype, experts = DTYPES[p.dtype], len(p.counts)
    routing = route(p, generator)
    used = routing.sources(p)
    a = torch.full((p.tokens if p.gathers else p.slots, p.k + PADDING), NAN)
    values = torch.randn((a.shape[0], p.k), generator=generator)
    a[used, : p.k] = values[used]
    if p.has_nan:
        a[used[p.first_rows()], 3] = NAN
    weights = torch.randn((experts, p.n, p.k), generator=generator) * (2.0 if p.is_gated else 1.0)
    bias = torch.randn((experts, p.n), generator=generator)
    unused = [expert for expert, count in enumerate(p.counts) if count == 0]
    weights[unused], bias[unused] = NAN, NAN
    if p.weights != "nk":
        weights = weights.mT
    weights = functional.pad(weights, (0, PADDING), value=NAN)
    return Inputs(routing, a.to(dtype), weights.to(dtype).contiguous(), bias.to(dtype) if p.has_bias else None)


def trial(unit: Unit, p: Product) -> Trial:
    inputs, dtype = make_inputs(p), DTYPES[p.dtype]
    out = torch.full((p.slots, p.width + PADDING), UNTOUCHED, dtype=dtype)
    kept = torch.full((p.slots, p.n), UNTOUCHED, dtype=dtype)
    values = {
        **p.sizes(),
        "a": preceding(inputs.a),
        "b": inputs.weights,
        "b_expert_stride": inputs.weights.stride(0),
        "d": output(out),
        "bias": inputs.bias,
        "preactivation": output(kept) if p.saves else None,
        "expert_offsets": preceding(inputs.routing.offsets) if len(p.counts) > 1 else None,
        "a_slots": preceding(inputs.routing.row_slots) if p.gathers else None,
        "tile_counter": counter() if p.has_counter else None,
    }

    def check() -> list[str]:
        a = inputs.a[inputs.routing.sources(p), : p.k]
        weights = inputs.weights[..., : p.k] if p.weights == "nk" else inputs.weights[..., : p.n].mT
        sums, error = sums_of_rows(p, a, weights, inputs.bias)
        found = {"d": out[: p.rows, : p.width], "preactivation": kept[: p.rows]}
        wrong: list[str] = []
        for name, expected in forward_results(p, (sums, error + 1e-6)).items():
            wrong += worst_element(name, found[name], *expected)
        wrong += touched("d's columns", out[:, p.width :]) + touched("d's rows", out[p.rows :])
        return wrong + touched("the preactivation's rows", kept[p.rows :])

    return Trial([Launch(values, p.tiles(unit), p.words)], check, {"d": out})


RUNNER = Runner(problems, trial)
