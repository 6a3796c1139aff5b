"""The grouped products with mxfp4 weights on the emulated machine, against fp64 of the decoded operands."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashmoe.moe.options import Layout
from flashmoe.moe.packed import pack_mxfp4
from flashmoe_build.emulation.compare import UNTOUCHED, touched, worst_element
from flashmoe_build.emulation.runner import Launch, Runner, Trial, counter, output, preceding
from flashmoe_tools.operations.moe.emulation.product import (
    EARLY_SLOTS,
    Product,
    Routing,
    activated,
    rounded,
    route,
    sums_of_rows,
)
from flashmoe_tools.operations.moe_mxfp4 import formats
from flashmoe_tools.operations.moe_mxfp4.formats import BLOCK, NAN
from flashmoe_tools.tables import Unit

PADDING = 16  # bytes after each row of codes, elements after rows of other tensors
PRODUCTS = (
    "grouped_gemm_mxfp4",
    "grouped_gemm_gated_mxfp4",
    "grouped_gemm_mxfp4_few_rows",
    "grouped_gemm_gated_mxfp4_few_rows",
    "grouped_gemm_mxfp4_packed",
    "grouped_gemm_gated_mxfp4_packed",
)


@dataclass(frozen=True)
class Mxfp4Product(Product):
    """``edges``: scales at the "low" or "high" end of their range; at the high end also infinite weights and NaN."""

    edges: str = ""

    @property
    def name(self) -> str:
        return super().name + (f"-{self.edges}" if self.edges else "")


def problems(unit: Unit) -> Iterator[Mxfp4Product]:
    """Tails of rows, columns and k; experts without rows and in each other's way; every kind of scale; a reused ring."""
    m, is_gated = unit.row.block_m, "gated" in unit.row.operation
    if unit.row.operation.endswith("packed"):
        yield from _packed_problems(unit)
        return

    def make(counts: tuple[int, ...], columns: int, k: int, seed: int, activation: str, **more: object) -> Mxfp4Product:
        n, word = (2 * columns, activation) if is_gated else (columns, "")
        return Mxfp4Product(
            unit.row.operation,
            unit.dtype,
            counts,
            n,
            k,
            activation=word,
            seed=seed,
            gathers=is_gated,
            **{"top_k": 2, **more},  # type: ignore[arg-type]
        )

    yield make(
        (m + 2, 0, 3), 72, 352, 1, "clamped_swiglu", has_nan=True, has_bias=True, is_interleaved=True, unrouted=5
    )
    yield make((0, 5, 2 * m + 1), 128, 1888, 2, "geglu", has_nan=True, has_counter=False)
    yield make((2, 1), 328, 256, 3, "swiglu", top_k=1, edges="high", has_bias=True)
    yield make((m // 2 + 1, 7), 72, 288, 5, "reglu", edges="low", is_interleaved=True)
    yield make((0, 0), 128, 64, 4, "reglu", unrouted=4)


def _packed_problems(unit: Unit) -> Iterator[Mxfp4Product]:
    """Every width of the product; columns unevenly shared by consumers; the ring reused; one and two blocks of k."""
    m, is_gated = unit.row.block_m, "gated" in unit.row.operation

    def make(counts: tuple[int, ...], blocks: int, k: int, seed: int, activation: str, **more: object) -> Mxfp4Product:
        word = activation if is_gated else ""
        named = {"activation": word, "seed": seed, "gathers": is_gated and m < 256, "top_k": 2, **more}
        return Mxfp4Product(unit.row.operation, unit.dtype, counts, 64 * blocks, k, **named)  # type: ignore[arg-type]

    yield make((m + 2, 0, 3), 4, 192, 1, "clamped_swiglu", has_nan=True, has_bias=True, is_interleaved=True, unrouted=5)
    yield make(
        (0, 5, m // 2 + 1), 2, 64 * (unit.row.stages + 2), 2, "geglu", has_nan=True, has_counter=False, has_bias=True
    )
    yield make((m // 4 + 1, 3 * m // 4), 2, 128, 6, "geglu_tanh", is_interleaved=True)
    yield make((2, 1), 6, 256, 3, "swiglu", top_k=1, edges="high", has_bias=True)
    yield make((9, 7), 4, 64, 5, "reglu", edges="low", is_interleaved=True)
    yield make((0, 0), 2, 64, 4, "reglu", unrouted=4)


@dataclass(frozen=True)
class Inputs:
    routing: Routing
    a: torch.Tensor  # bfloat16 [slots or tokens, k]
    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None


def make_inputs(p: Mxfp4Product) -> Inputs:
    generator = torch.Generator().manual_seed(p.seed * 7919 + 43)
    routing = route(p, generator)
    used = routing.sources(p)
    rows = p.tokens if p.gathers else p.slots
    a = torch.full((rows, p.k), torch.nan)
    a[used] = torch.randn((len(used), p.k), generator=generator)
    if p.has_nan:
        a[used[p.first_rows()], 3] = torch.nan
    experts = len(p.counts)
    codes = torch.randint(0, 256, (experts, p.n, p.k // 2), generator=generator, dtype=torch.uint8)
    blocks = (experts, p.n, p.k // BLOCK)
    scales = torch.randint(117, 124, blocks, generator=generator, dtype=torch.uint8)
    if p.edges:
        # Each edge scale has its own row; tokens are scaled so that no sum leaves float32's range. 2^127 times 2 and
        # more is infinite.
        a = a.abs() * 2.0 ** (20 if p.edges == "low" else -14)
        for row, scale in enumerate((0, 128, 1, 2, 126, 127) if p.edges == "low" else (129, 200, 252, 253, 254, NAN)):
            scales[:, row * 5 + 1] = scale
        codes[:, 1::5] = codes[:, 1::5] & 0x77 | 0x22  # no zero, one sign: infinity does not become NaN
    for expert in (expert for expert, count in enumerate(p.counts) if count == 0):
        scales[expert] = NAN
    bias = torch.randn((experts, p.n), generator=generator).bfloat16() if p.has_bias else None
    return Inputs(routing, a.bfloat16(), codes, scales, bias)


def trial(unit: Unit, p: Mxfp4Product) -> Trial:
    inputs, is_few_rows = make_inputs(p), p.operation.endswith("few_rows")
    out = torch.full((p.slots, p.width + 8), UNTOUCHED, dtype=torch.bfloat16)
    a = torch.nn.functional.pad(inputs.a, (0, 8), value=torch.nan)
    is_packed = p.operation.endswith("packed")
    if is_packed:
        layout: Layout = "interleaved" if p.is_interleaved else "concat"
        codes = pack_mxfp4(inputs.codes, inputs.scales, gated=layout if p.is_gated else None).flatten(2)
    else:
        codes = torch.nn.functional.pad(inputs.codes, (0, PADDING), value=0x77)
    offsets, ids = inputs.routing.offsets, inputs.routing.choices(p)
    product = {
        **p.sizes(),
        "a": preceding(a),
        "b": codes,
        "d": output(out),
        "bias": inputs.bias,
        "a_stride": a.stride(0),
        "b_stride": codes.stride(1) // 2,  # in 16-bit elements, four codes each
        "b_expert_stride": codes.stride(0) // 2,
        "d_stride": out.stride(0),
        "expert_offsets": preceding(offsets) if p.is_gated or not is_few_rows else offsets,
        "a_slots": preceding(inputs.routing.row_slots) if p.is_gated else None,
        "ids": ids if p.is_gated and is_few_rows and p.slots <= EARLY_SLOTS else None,
        "id_bytes": ids.element_size(),
        "tile_counter": counter() if p.has_counter else None,
    }

    def check() -> list[str]:
        weights = formats.as_bfloat16(inputs.codes, inputs.scales)
        sums = sums_of_rows(p, inputs.a[inputs.routing.sources(p)], weights, inputs.bias)
        wrong = worst_element("d", out[: p.rows, : p.width], *rounded(p, activated(p, sums) if p.is_gated else sums))
        return wrong + touched("d's columns", out[:, p.width :]) + touched("d's rows", out[p.rows :])

    scales = None if is_packed else inputs.scales
    return Trial([Launch({"gemm": product, "b_scale": scales}, p.tiles(unit))], check, {"d": out})


RUNNER = Runner(problems, trial)
