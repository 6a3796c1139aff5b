"""The kernel that quantises to e4m3, on the emulated machine, bit for bit against the format's definition."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashmoe_build.emulation.compare import UNTOUCHED, different, touched
from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, output, preceding
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.moe_scaled.formats import BLOCK, quantize
from flashmoe_tools.tables import Unit


@dataclass(frozen=True)
class QuantizeProblem:
    rows: int
    columns: int
    is_early: bool = False

    @property
    def name(self) -> str:
        return f"r{self.rows}-c{self.columns}{'-early' if self.is_early else ''}"


def problems(_: Unit) -> Iterator[QuantizeProblem]:
    """A block of zeros, an outlier, NaN; rows and blocks that end inside a warp's share."""
    for rows, columns, is_early in ((5, 384, False), (1, 128, True), (9, 256, True)):
        yield QuantizeProblem(rows, columns, is_early)


def trial(unit: Unit, p: QuantizeProblem) -> Trial:
    generator = torch.Generator().manual_seed(p.rows)
    x = torch.randn((p.rows, p.columns + 8), generator=generator).to(TORCH_DTYPES[unit.dtype])
    x[:, p.columns :] = torch.nan
    x[0, :BLOCK] = 0.0
    x[-1, 5] = 1000.0
    x[-1, 7] = torch.nan
    results = {
        "values": torch.full((p.rows + 1, p.columns), int(UNTOUCHED), dtype=torch.uint8),
        "scales": torch.full((p.rows + 1, p.columns // BLOCK), UNTOUCHED),
    }
    values = {
        "x": Buffer(x) if p.is_early else preceding(x),
        **{name: output(tensor) for name, tensor in results.items()},
        "rows": p.rows,
        "columns": p.columns,
        "overlaps_previous_grid": p.is_early,
    }

    def check() -> list[str]:
        wrong: list[str] = []
        for (name, found), expected in zip(results.items(), quantize(x[:, : p.columns]), strict=True):
            wrong += different(name, found[:-1], expected) + touched(name, found[-1])
        return wrong

    blocks = math.ceil(p.rows * p.columns / BLOCK / (2 * unit.row.warps))
    return Trial([Launch(values, blocks)], check, results)


RUNNER = Runner(problems, trial)
