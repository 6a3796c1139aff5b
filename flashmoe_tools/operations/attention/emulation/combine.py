"""The kernel that combines the results of splits, on the emulated machine."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from flashmoe_build.emulation.compare import DTYPES, UNIT_ROUNDOFF
from flashmoe_build.emulation.runner import Launch, Runner, Trial, output, preceding
from flashmoe_tools.operations.attention.emulation.forward import NAN, huge_problem, huge_sizes, merge
from flashmoe_tools.operations.attention.emulation.problem import Layout, Problem, Reference, Shape, Values, custom
from flashmoe_tools.tables import Unit

LAST_ROWS = 4  # of a huge problem: the number of rows in its last block


def problems(unit: Unit) -> Iterator[Problem]:
    """Few splits and many, head dims that leave lanes without columns, every layout of the output."""
    sizes = (
        (64, 2, 5, Layout.BHSD),
        (128, 32, 3, Layout.ROWS),
        (256, 7, 9, Layout.BSHD),
        (40, 3, 1, Layout.ROWS),
        (256, 1, 2, Layout.FAR),
    )
    for index, (head_dim, splits, rows, layout) in enumerate(sizes):
        shape = Shape(2, 3, 1, rows, 64, head_dim)
        yield Problem(shape, unit.dtype, False, layout, Values.NORMAL, index, splits, wants_lse=index != 2)
    yield huge_problem(unit, causal=False)


def make_partials(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial outputs [splits, batch, heads, rows, head_dim] and log-sum-exps.

    Some splits saw no key (-inf); row 0 of head 0 saw none in any split. Their output is never read, and is NaN here.
    """
    generator = torch.Generator().manual_seed(problem.data_seed + 5)
    rows = (problem.splits, *problem.rows)
    out = torch.randn(*rows, problem.shape.head_dim, generator=generator)
    lse = torch.randn(*rows, generator=generator) * 4
    empty = torch.rand(*rows, generator=generator) < 0.25
    empty[:, 0, 0, 0] = True
    lse[empty] = -math.inf
    out[empty] = NAN
    return out.contiguous(), lse.contiguous()


def trial(unit: Unit, problem: Problem) -> Trial:
    """One warp per row. For a huge problem only the last rows of the last head are run."""
    own, s = problem, problem.shape
    if problem.huge:
        own = replace(problem, shape=Shape(1, 1, 1, LAST_ROWS, s.seq_k, s.head_dim))
    rows = math.prod(problem.rows)
    partial, lse_partial = make_partials(own)
    out = torch.full(partial.shape[1:], NAN, dtype=DTYPES[problem.dtype])
    lse = torch.full(lse_partial.shape[1:], NAN)
    if problem.huge:
        values = {
            **huge_sizes(problem),
            "out": output(out, end=rows * s.head_dim),
            "lse": output(lse, end=rows),
            "out_partial": preceding(
                partial.flatten(1), row_stride=rows * s.head_dim, end=problem.splits * rows * s.head_dim
            ),
            "lse_partial": preceding(lse_partial.flatten(1), row_stride=rows, end=problem.splits * rows),
        }
    else:
        values = {
            **problem.sizes(),
            "out": problem.placed(out, is_output=True),
            "lse": output(lse) if problem.wants_lse else None,
            "out_partial": preceding(partial),
            "lse_partial": preceding(lse_partial),
            "num_splits": problem.splits,
        }
    blocks = math.ceil(rows / unit.row.block_m)
    return Trial(
        [Launch(values, blocks, only_block=blocks - 1 if problem.huge else None)],
        lambda: expected(own, partial, lse_partial).disagreements(own, out, lse),
        {"out": out, "lse": lse},
    )


def expected(problem: Problem, partial: torch.Tensor, lse_partial: torch.Tensor) -> Reference:
    """The combined output and log-sum-exp in fp64, and how far a kernel may be from them."""
    partial = partial.nan_to_num(0.0)
    whole, spread = merge(partial, lse_partial), merge(partial.abs(), lse_partial)["out"]
    bound = UNIT_ROUNDOFF[problem.dtype] * whole["out"].abs() + 1e-5 * spread + 1e-7
    return Reference(whole["out"], whole["lse"], bound)


RUNNER = Runner(problems, trial, custom)
