"""The gradient of the experts' biases on the emulated machine."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashmoe_build.emulation.compare import DTYPES, UNIT_ROUNDOFF, worst_element
from flashmoe_build.emulation.runner import Launch, NamedProblem, Runner, Trial, output, preceding
from flashmoe_tools.operations.moe.emulation.gemm import NAN
from flashmoe_tools.tables import Unit

SINGLE = 2.0**-23
BLOCK_COLUMNS = 64  # columns per block of the kernel


@dataclass(frozen=True)
class BiasGradientProblem(NamedProblem):
    """Expert 1 has no rows. ``gathered``: a's rows are tokens; else one row per slot, with NaN in the last ones."""

    counts: tuple[int, ...]
    columns: int
    top_k: int = 1
    gathered: bool = False
    has_weights: bool = False
    huge_rows: int | None = None  # number of rows of a
    is_tight: bool = False  # a ends with the last column of the last row that is read


def problems(_: Unit) -> Iterator[BiasGradientProblem]:
    yield BiasGradientProblem("rows", (5, 0, 33, 130), 136)
    yield BiasGradientProblem("gathered", (40, 0, 300), 64, 3, gathered=True, has_weights=True)
    yield BiasGradientProblem("narrow", (1, 0), 8, 2, gathered=True)
    yield BiasGradientProblem("far", (9, 0, 40), 72, 4, gathered=True, has_weights=True, huge_rows=2**27)
    yield BiasGradientProblem("tight", (3, 0, 2), 72, is_tight=True)


def trial(unit: Unit, p: BiasGradientProblem) -> Trial:
    generator, dtype = torch.Generator().manual_seed(p.columns * 7919 + 31), DTYPES[unit.dtype]
    rows, experts = sum(p.counts), len(p.counts)
    tokens = rows + (0 if p.is_tight else 2)
    a = torch.randn(tokens, p.columns + (0 if p.is_tight else 8), generator=generator) + 0.25
    sources = torch.randint(0, tokens, (rows,), generator=generator) if p.gathered else torch.arange(rows)
    unused = torch.ones(tokens, dtype=torch.bool)
    unused[sources] = False
    a[unused], a[:, p.columns :] = NAN, NAN
    slots = None
    if p.gathered:
        first = (p.huge_rows or tokens) - tokens
        slots = ((sources + first) * p.top_k + torch.randint(0, p.top_k, (rows,), generator=generator)).int()
    weights = torch.rand(rows, generator=generator) if p.has_weights else None
    a = a.to(dtype)
    d = torch.full((experts, p.columns), NAN, dtype=dtype)
    values = {
        "a": preceding(a, end=p.huge_rows and p.huge_rows * a.shape[1]),
        "d": output(d),
        "row_weights": preceding(weights),
        "expert_offsets": preceding(torch.tensor([0, *p.counts]).cumsum(0).int()),
        "a_slots": preceding(slots),
        "experts": experts,
        "top_k": p.top_k,
        "columns": p.columns,
    }

    def check() -> list[str]:
        terms = a.double()[sources, : p.columns] * (1.0 if weights is None else weights.double()[:, None])
        owners = torch.repeat_interleave(torch.arange(experts), torch.tensor(p.counts))
        zeros = torch.zeros(experts, p.columns, dtype=torch.float64)
        expected, spread = (zeros.index_add(0, owners, one) for one in (terms, terms.abs()))
        bound = UNIT_ROUNDOFF[unit.dtype] * expected.abs() + 16 * SINGLE * spread + 1e-9
        return worst_element("d", d, expected, bound)

    return Trial([Launch(values, experts * math.ceil(p.columns / BLOCK_COLUMNS))], check, {"d": d})


RUNNER = Runner(problems, trial)
