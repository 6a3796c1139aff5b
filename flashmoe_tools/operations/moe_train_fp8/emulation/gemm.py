"""The weight gradient of e4m3 operands on the emulated machine, against fp64 of the operands."""

from collections.abc import Iterator
from functools import partial

import torch

from flashmoe_build.emulation.compare import DTYPES, UNTOUCHED, touched, worst_element
from flashmoe_build.emulation.runner import Launch, Runner, Trial, counter, output, preceding
from flashmoe_tools.operations.moe.emulation.product import Product, rounded, route
from flashmoe_tools.operations.moe_scaled import formats
from flashmoe_tools.operations.moe_scaled.emulation.gemm import SUM_ROUNDOFF, Scaled
from flashmoe_tools.operations.moe_scaled.formats import BLOCK
from flashmoe_tools.operations.moe_train_fp8.emulation import padded
from flashmoe_tools.tables import Unit

PADDING = 8


def problems(unit: Unit) -> Iterator[Product]:
    """Tails of rows; experts without rows and with most of them, with unused blocks between; half-filled column tiles."""
    make = partial(Product, unit.row.operation, unit.dtype, top_k=2)
    yield make((70, 0, 129, 1), 256, 384, seed=1)
    yield make((128, 5, 250, 0), 128, 256, unrouted=5, seed=2)
    yield make((9, 800), 128, 128, top_k=1, has_counter=False, seed=3)  # the ring is reused
    yield make((0, 0), 256, 128, unrouted=4, seed=4)
    yield make((130, 3), 9 * 128, 256, top_k=1, seed=6)  # more than one section of tiles


def trial(unit: Unit, p: Product) -> Trial:
    generator = torch.Generator().manual_seed(p.seed * 7919 + 31)
    routing, dtype, experts = route(p, generator), DTYPES[p.dtype], len(p.counts)
    count = padded.blocks(p.slots, experts)
    # Stored by column; b's scales, one per 128 columns, are created for each and repeated.
    a = Scaled.random((p.n,), count * BLOCK, 1, generator)
    b = Scaled.random((p.k,), count * BLOCK, BLOCK, generator)
    is_used = torch.zeros(count * BLOCK, dtype=torch.bool)
    is_tail = torch.zeros_like(is_used)
    for rows, at in padded.experts_of(routing.offsets):
        place = padded.rows_of(at)
        is_used[place] = True
        is_tail[place.start + rows.stop - rows.start : place.stop] = True
    for one in (a, b):
        one.values[:, is_tail] = 0
        one.values[:, ~is_used] = formats.NAN
        one.scales[:, ~is_used[::BLOCK]] = torch.nan
    out = torch.full((experts, p.n, p.k + PADDING), UNTOUCHED, dtype=dtype)
    out[..., : p.k] = torch.nan
    product = {
        **p.sizes(),
        "a": preceding(a.values),
        "b": preceding(b.values),
        "d": output(out),
        "a_stride": count * BLOCK // 2,
        "b_stride": count * BLOCK // 2,
        "d_stride": out.stride(1),
        "expert_offsets": preceding(routing.offsets),
        "tile_counter": counter() if p.has_counter else None,
    }
    scales = {"a_scale": preceding(a.scales.mT.contiguous()), "b_scale": preceding(b.scales.mT.contiguous())}

    def check() -> list[str]:
        value = torch.zeros((experts, p.n, p.k), dtype=torch.float64)
        error = torch.zeros_like(value)
        left, right = a.numbers(), b.numbers()
        for expert, (_, at) in zip(
            (e for e, n in enumerate(p.counts) if n), padded.experts_of(routing.offsets), strict=True
        ):
            place = padded.rows_of(at)
            value[expert] = left[:, place] @ right[:, place].mT
            error[expert] = SUM_ROUNDOFF * (left[:, place].abs() @ right[:, place].abs().mT)
        expected, bound = rounded(p, (value, error))
        return worst_element("d", out[..., : p.k], expected, bound) + touched("d", out[..., p.k :])

    return Trial([Launch({"gemm": product, **scales}, p.tiles(unit))], check, {"d": out})


RUNNER = Runner(problems, trial)
