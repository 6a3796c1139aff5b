"""The kernel that adds up dS matrices for a shared mask, on the emulated machine: over sequences, heads, or both."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashmoe_build.emulation.compare import DTYPES, UNIT_ROUNDOFF, worst_element
from flashmoe_build.emulation.runner import Launch, NamedProblem, Runner, Trial, output
from flashmoe_tools.tables import Unit

OPERATION = "attention_scores_sum"
CHUNKS = 2  # kScoresSumChunks


@dataclass(frozen=True)
class Shared(NamedProblem):
    """Scores [batch, heads, rows, keys] of a mask that has size one in the dimensions ``dims``."""

    name: str
    sizes: tuple[int, int, int, int]
    dims: tuple[int, ...]


def problems(unit: Unit) -> Iterator[Shared]:
    yield Shared("sequences", (6, 3, 5, 136), (0,))
    if unit.dtype == "f16":
        yield Shared("heads", (2, 5, 33, 72), (1,))
        yield Shared("both", (3, 3, 7, 8), (0, 1))


def trial(unit: Unit, p: Shared) -> Trial:
    scores = torch.randn(p.sizes, generator=torch.Generator().manual_seed(len(p.dims))).to(DTYPES[unit.dtype])
    exact = scores.double()
    value = exact.sum(p.dims, keepdim=True)
    sums = torch.full(value.shape, math.nan, dtype=scores.dtype)
    adds_heads, heads, size = 1 in p.dims, p.sizes[1], math.prod(p.sizes[2:])
    values = {
        "scores": scores,
        "sums": output(sums),
        "size": size,
        "num_sums": sums.numel() // size,
        "count": scores.numel() // sums.numel(),
        "first": heads if adds_heads else 1,
        "step": 1 if adds_heads else heads,
    }
    bound = UNIT_ROUNDOFF[unit.dtype] * value.abs() + 1e-6 * exact.abs().sum(p.dims, keepdim=True)
    blocks = math.ceil(sums.numel() / 8 / unit.row.threads / CHUNKS)
    return Trial([Launch(values, blocks)], lambda: worst_element("sums", sums, value, bound), {"sums": sums})


RUNNER = Runner(problems, trial)
