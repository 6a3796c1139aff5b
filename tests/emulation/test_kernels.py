"""Every kernel of the table, on the CPU: the edges of its own tile, both masks, every memory layout.

A failing case prints the command that repeats it.
"""

from __future__ import annotations

import pytest

from flashmoe_build.compile.jobs import run_all
from flashmoe_build.emulation.build import Options, jobs, kernel_library
from flashmoe_build.emulation.cases import Case, kernels, run_case, suite
from flashmoe_build.emulation.machine import AsyncPolicy
from flashmoe_tools.interpreter import runnable
from flashmoe_tools.tables import load_tables

CASES = list(suite(load_tables()))


def test_every_family_of_the_table_is_emulated() -> None:
    families = {row.family for row in load_tables().kernels}
    assert {case.kernel.unit.row.family for case in CASES} == families
    assert {case.kernel.label for case in CASES} == {kernel.label for kernel in kernels(load_tables())}


@pytest.mark.timeout(1200)  # g++ on every kernel, when nothing is cached
def test_every_kernel_compiles() -> None:
    units = [kernel.unit for kernel in kernels(load_tables())]
    assert len(run_all(units, lambda unit: kernel_library(unit, Options()), jobs())) == len(units)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.identity)
def test_kernel(case: Case) -> None:
    outcome = run_case(case, Options())
    assert outcome.passed, f"{outcome.explain()}\nrepeat: {runnable(case.command())}"


@pytest.mark.parametrize("policy", [AsyncPolicy.LAZY, AsyncPolicy.EAGER, AsyncPolicy.RANDOM])
def test_timing_does_not_change_a_bit(policy: AsyncPolicy) -> None:
    """Whatever the interleaving and the moment at which copies land, the same inputs give the same bits."""
    dense = [case for case in CASES if "varlen" not in case.kernel.label and "append" not in case.kernel.label]
    first_of_each = {
        case.kernel.unit.row.family: case for case in reversed(dense)
    }  # others leave NaN where nothing is theirs
    for case in first_of_each.values():
        outcomes = [run_case(case, Options(), policy=policy, seed=seed) for seed in (101, 202, 303)]
        assert all(outcome.passed for outcome in outcomes)
        for outcome in outcomes:
            assert all(tensor.equal(outcomes[0].results[name]) for name, tensor in outcome.results.items())
