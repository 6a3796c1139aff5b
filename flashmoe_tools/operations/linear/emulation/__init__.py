"""The tiles of linear on the emulated machine: kernels of moe/ in other sizes on moe/'s problems, and its own kernels."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, counter
from flashmoe_tools.operations.moe.emulation import by_rows, gemm
from flashmoe_tools.operations.moe.emulation.product import Product
from flashmoe_tools.tables import Unit

MOST_COLUMNS = 160  # widest tile whose sums can have segments


@dataclass(frozen=True)
class Sums(Product):
    segments: int = 1
    is_divided: bool = False  # True: one block per segment; False: one per tile

    @property
    def name(self) -> str:
        return f"{super().name}-{'blocks' if self.is_divided else 'segments'}{self.segments}"


def launch(unit: Unit, p: Sums, values: dict[str, object]) -> Launch:
    """``values``: the members of GemmParams."""
    m, n = unit.row.block_m, unit.row.block_n
    tiles = math.ceil(p.rows / m) * math.ceil(p.n / n)
    more: dict[str, object] = {"segments": p.segments}
    if p.is_divided:
        partials = torch.full((tiles * m * n * p.segments,), float("nan"))
        more |= {"partials": Buffer(partials, writable=True, initialised=False), "arrivals": counter(tiles * m // 64)}
    return Launch(
        {"gemm": {**values, "tile_counter": None}, **more}, tiles * (p.segments if p.is_divided else 1), p.words
    )


def problems(unit: Unit) -> Iterator[Sums]:
    """Tails in rows, n and k; fewer rows than a TMA box; sums in segments of different lengths, in one block or several."""
    m, n = unit.row.block_m, unit.row.block_n

    def make(rows: int, columns: int, k: int, seed: int, **more: object) -> Sums:
        chosen = {"weights": "nk", "seed": seed, **more}
        return Sums(unit.row.operation, unit.dtype, (rows,), columns, k, **chosen)  # type: ignore[arg-type]

    yield make(m + 70, n + 8, 136, 1, has_bias=True, has_nan=True)
    yield make(m, 2 * n, 64, 2)
    yield make(5, n + 72, 200, 3, has_bias=True)
    yield make(2048 + m + 3, n + 8, 8, 4)  # more than one group of row tiles
    if n <= MOST_COLUMNS:
        for is_divided in (False, True):
            both = {"segments": 4, "is_divided": is_divided}
            yield make(m + 66, n + 8, 392, 5, has_bias=True, has_nan=True, **both)  # 1, 2, 2, 2 blocks of 64 k
            yield make(17, 2 * n, 256, 6, **both)


def trial(unit: Unit, p: Sums) -> Trial:
    whole = gemm.trial(unit, p)
    return Trial([launch(unit, p, dict(whole.launches[0].values))], whole.check, whole.results)


RUNNERS = {"linear": gemm.RUNNER, "linear_nk": Runner(problems, trial), "linear_few_rows": by_rows.FEW_ROWS}
