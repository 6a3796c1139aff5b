"""The toy's kernels on the emulated machine."""

from collections.abc import Iterator

import torch
from flashmoe_tools.operations.toy.reference import SCALE, scaled

from flashmoe_build.emulation.compare import different
from flashmoe_build.emulation.runner import Launch, NamedProblem, Runner, Trial, output
from flashmoe_tools.tables import Unit

COUNT = 1200  # two blocks and part of a third


def problems(unit: Unit) -> Iterator[NamedProblem]:
    return (NamedProblem(word) for word in unit.row.words["rule"])


def trial(unit: Unit, problem: NamedProblem) -> Trial:
    x = torch.randn(COUNT, generator=torch.Generator().manual_seed(1))
    out = torch.full_like(x, torch.nan)
    values = {"x": x, "out": output(out), "count": COUNT, "scale": SCALE}
    launch = Launch(values, -(-COUNT // unit.row.block_m), words=(problem.name,))
    return Trial([launch], lambda: different("out", out, scaled(x, problem.name)), {"out": out})


RUNNERS = {"toy_scale": Runner(problems, trial)}
