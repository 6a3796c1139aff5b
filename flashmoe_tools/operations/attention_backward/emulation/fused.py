"""What surrounds the fused backward kernel: the partials of dq that it adds up, and the kernels before and after it.

The kernel before it computes row_dot and writes zeros, the one after it converts dq to 16 bits. Also tests the kernel
that computes only row_dot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flashmoe_build.emulation.compare import DTYPES, UNIT_ROUNDOFF, worst_element
from flashmoe_build.emulation.runner import Buffer, Launch, Runner, Trial, output
from flashmoe_tools.operations.attention.emulation.problem import Layout, Problem, Shape, Values, custom
from flashmoe_tools.tables import Unit

PARTIAL_ROWS = 64
TILE_KEYS = 128


@dataclass(frozen=True)
class Partials:
    """The partials of dq and their ranks.

    ``memory`` holds the partials (NaN), ``[..., partials of a head, ...]``, followed by one rank per partial (zeros):
    the number of tiles that have added to it.
    """

    memory: torch.Tensor
    sums: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def of(cls, sizes: tuple[int, ...], width: int) -> Partials:
        """``sizes``: sizes of the ranks; ``width``: columns of the fused kernel."""
        count = math.prod(sizes)
        memory = torch.full((count * (PARTIAL_ROWS * width + 1),), math.nan)
        sums, ranks = memory.split([count * PARTIAL_ROWS * width, count])
        ranks.zero_()
        return cls(memory, sums.view(*sizes, width // 8, 4, 8, 4, 2, 2), ranks.view(torch.int32).view(sizes))

    def rows(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """[..., rows, columns] of these partials; zeros where no tile has added anything.

        Element [j, w, g, t, half, i] of a partial is row 16 w + 8 half + g, column 8 j + 2 t + i.
        """
        sums, ranks = self.sums[..., first:last, :, :, :, :, :, :], self.ranks[..., first:last]
        sums = sums.masked_fill((ranks == 0).view(*ranks.shape, *[1] * 6), 0.0)
        leading = tuple(range(sums.dim() - 6))
        order = (*leading, *(len(leading) + axis for axis in (1, 4, 2, 0, 3, 5)))
        rows = sums.permute(order)
        return rows.flatten(len(leading) - 1, len(leading) + 2).flatten(len(leading))

    def prepare(self, *, writes_zeros: bool, tiles: torch.Tensor, seed: int | torch.Generator) -> None:
        """For the kernel before: ranks that it must set to zero. For the kernel after: sums as the tiles leave them."""
        if writes_zeros:
            self.ranks.fill_(-1)
            return
        self.ranks.copy_(tiles.expand_as(self.ranks))
        had = self.ranks > 0
        generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
        self.sums[had] = torch.randn(self.sums[had].shape, generator=generator)


def make_partials(problem: Problem, width: int) -> Partials:
    shape = problem.shape
    return Partials.of((shape.batch, shape.heads_q, math.ceil(shape.seq_q / PARTIAL_ROWS)), width)


def rows_of_partials(problem: Problem, partials: Partials) -> torch.Tensor:
    """[batch, heads, rows, head_dim], unscaled."""
    return partials.rows()[:, :, : problem.shape.seq_q, : problem.shape.head_dim]


def tiles_of_rows(problem: Problem) -> torch.Tensor:
    """For each partial of a head: how many key tiles its last row sees."""
    shape = problem.shape
    rows = torch.arange(PARTIAL_ROWS, shape.seq_q + PARTIAL_ROWS, PARTIAL_ROWS).clamp(max=shape.seq_q)
    keys = (rows + shape.seq_k - shape.seq_q).clamp(min=0) if problem.causal else torch.full_like(rows, shape.seq_k)
    return -(-keys // TILE_KEYS)


def row_dot_problems(unit: Unit) -> Iterator[Problem]:
    """Less than one block of rows and several, every layout, with and without a gradient of lse.

    Some head dims are not a multiple of the 32 columns of a quad of lanes.
    """
    sizes = ((1, 8, Layout.ROWS), (33, 40, Layout.BSHD), (70, 256, Layout.BHSD), (3, 128, Layout.FAR))
    widest = unit.row.axes.get("head_dim", 256)
    for index, (rows, head_dim, layout) in enumerate(sizes):
        shape = Shape(2, 3, 1, rows, 1, min(widest, head_dim))
        yield Problem(shape, unit.dtype, False, layout, Values.NORMAL, index, wants_lse=index != 1)


def around_problems(unit: Unit) -> Iterator[Problem]:
    """The problems of row_dot; if there are several partials, the first sees no key."""
    for problem in row_dot_problems(unit):
        causal = problem.shape.seq_q > PARTIAL_ROWS
        yield replace(problem, causal=causal, shape=replace(problem.shape, seq_k=1 if causal else TILE_KEYS + 2))


def trial(unit: Unit, problem: Problem) -> Trial:
    """Runs any of the three kernels. Some rows see no key."""
    shape, sizes = problem.shape, problem.rows
    is_alone, writes_dq = unit.row.operation == "attention_row_dot", unit.row.operation.endswith("convert")
    generator = torch.Generator().manual_seed(problem.data_seed + 9)
    dtype = DTYPES[problem.dtype]
    out, dout = (torch.randn(*sizes, shape.head_dim, generator=generator).to(dtype) for _ in range(2))
    lse, dlse = torch.randn(*sizes, generator=generator), torch.randn(*sizes, generator=generator)
    lse[:, 1 if is_alone else -1, -1] = -math.inf
    row_dot, dq = torch.full(sizes, math.nan), torch.full_like(out, math.nan)
    values = {
        **{name: getattr(shape, name) for name in ("batch", "head_dim")},
        "out": problem.placed(out),
        "dout": problem.placed(dout),
        "lse": lse,
        "dlse": dlse if problem.wants_lse else None,
        "row_dot": output(row_dot),
        "heads": shape.heads_q,
        "rows": shape.seq_q,
    }
    blocks = math.ceil(math.prod(sizes) * 4 / unit.row.threads)
    if not is_alone:
        partials = make_partials(problem, unit.row.axes["head_dim"])
        partials.prepare(writes_zeros=not writes_dq, tiles=tiles_of_rows(problem), seed=generator)
        blocks = partials.ranks.numel()
        values |= {
            "dq": problem.placed(dq, is_output=True),
            "sums": Buffer(partials.memory, writable=not writes_dq, initialised=writes_dq, name="partials of dq"),
            "keys": shape.seq_k,
            "row_keys": shape.seq_k - shape.seq_q + 1 if problem.causal else shape.seq_k,
            "scale": problem.scale,
        }

    def check() -> list[str]:
        if writes_dq:
            expected = problem.scale * rows_of_partials(problem, partials).double()
            return worst_element("dq", dq, expected, UNIT_ROUNDOFF[problem.dtype] * expected.abs() + 1e-6)
        products = out.double() * dout.double()
        expected = products.sum(-1) - (dlse.double() if problem.wants_lse else 0.0)
        expected = expected.masked_fill(lse == -math.inf, 0.0)
        wrong = worst_element("row_dot", row_dot, expected, 1e-5 * products.abs().sum(-1) + 1e-6)
        return wrong if is_alone or not partials.ranks.any() else [*wrong, "the ranks are not all zero"]

    return Trial([Launch(values, blocks)], check, {"row_dot": row_dot, "dq": dq})


ROW_DOT = Runner(row_dot_problems, trial, custom)
AROUND = Runner(around_problems, trial, custom)
