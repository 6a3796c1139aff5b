"""The kernels of the table, on the CPU: the edges of their tiles, both masks, every memory layout.

A failing case prints the command that repeats it. Some kernels represent others here (``taken``, ``of_other_sizes``),
and the tiles of a family share its problems (``meets``); ``./nox -s emulate`` runs all of them on all, as CI does every
night.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest
from torch import Tensor

from flashmoe_build.compile.jobs import run_all
from flashmoe_build.emulation.build import Options, jobs, kernel_library
from flashmoe_build.emulation.cases import EVERY_NTH, Case, Kernel, is_repeated, kernels, run_case, settings_for, suite
from flashmoe_build.emulation.changed import variants
from flashmoe_build.emulation.machine import AsyncPolicy
from flashmoe_build.emulation.mutation.planted import load_mutants
from flashmoe_build.emulation.runner import Trial, execute
from flashmoe_tools.interpreter import runnable
from flashmoe_tools.tables import load_tables


def taken() -> dict[str, Kernel]:
    """The kernels to run, by label.

    A kernel in bf16 is its row's in f16 with another conversion: the first of an operation's family represents those of
    its other tiles, unless the row says that the code depends on the dtype, or a planted bug names that kernel."""
    planted = {name for mutant in load_mutants() for name in mutant.kernels}
    chosen, seen = {}, set()
    for kernel in kernels(load_tables()):
        row = kernel.unit.row
        family = (row.operation, row.family)
        if is_repeated(kernel.unit):
            if family in seen and not row.by_dtype and not planted & {kernel.label, kernel.unit.name}:
                continue
            seen.add(family)
        chosen[kernel.label] = kernel
    return chosen


def of_other_sizes(chosen: dict[str, Kernel]) -> dict[str, int]:
    """Labels of tiles that differ from one in ``ways`` only by sizes or target, and that no planted bug names.

    Each with its index in its family: the first runs every ``EVERY_NTH``-th problem, the others only run at night."""
    planted = {name for mutant in load_mutants() for name in mutant.kernels}
    ways = {kernel.label for kernel in variants(tuple(chosen.values()))}
    seen: set[str] = set()
    turns: Counter[tuple[str, str]] = Counter()
    few = {}
    for label, kernel in chosen.items():
        unit = kernel.unit
        is_named = label in planted or (unit.name in planted and unit.name not in seen)
        if not is_repeated(unit) and not is_named and (label not in ways or unit.name in seen):
            few[label] = turns[family_of(kernel)]
            turns[family_of(kernel)] += 1
        seen.add(unit.name)
    return few


def family_of(kernel: Kernel) -> tuple[str, str]:
    return kernel.unit.row.operation, kernel.unit.row.family


def meets(case: Case) -> bool:
    """Whether the kernel runs the problem here.

    Tiles of a family that have equally many problems share them if there are many: each runs every second one,
    alternating, so that each problem is run by one of the tiles."""
    label = case.kernel.label
    if label in FEW:
        return case.seed % EVERY_NTH == 0
    alike = ALIKE[sharing(case.kernel)]
    return label not in alike or len(alike) == 1 or case.seed % 2 == alike.index(label) % 2


def sharing(kernel: Kernel) -> tuple[tuple[str, str], int]:
    return family_of(kernel), PROBLEMS[kernel.label]


MANY = 8  # problems per kernel
EVERY = list(suite(load_tables()))
PROBLEMS = Counter(case.kernel.label for case in EVERY)
CHOSEN = taken()
FEW = of_other_sizes(CHOSEN)
TAKEN = {label: kernel for label, kernel in CHOSEN.items() if not FEW.get(label)}
ALIKE = defaultdict[tuple[tuple[str, str], int], list[str]](list)  # tiles that share their problems
for kernel in TAKEN.values():
    if kernel.label not in FEW and not is_repeated(kernel.unit) and PROBLEMS[kernel.label] >= MANY:
        ALIKE[sharing(kernel)].append(kernel.label)
CASES = [case for case in EVERY if case.kernel.label in TAKEN and meets(case)]
# The first case of each operation of each family also checks that its results are compared.
FIRST = {(case.kernel.unit.row.operation, case.kernel.unit.row.family): case.identity for case in reversed(CASES)}


def test_every_kernel_of_the_table_is_emulated() -> None:
    every = kernels(load_tables())
    assert {case.kernel.label for case in EVERY} == {kernel.label for kernel in every}

    def kinds(of: Iterable[Kernel]) -> set[tuple[str, str, str]]:
        return {(kernel.unit.row.operation, kernel.unit.row.family, kernel.unit.dtype) for kernel in of}

    assert kinds(case.kernel for case in CASES) == kinds(every)
    assert {case.kernel.label for case in CASES} == TAKEN.keys()
    assert all(kernel.unit.dtype == "bf16" for kernel in every if kernel.label not in CHOSEN)
    # Every problem of the tiles that are not merely another size is run.
    ways = [case for case in EVERY if case.kernel.label in TAKEN and case.kernel.label not in FEW]
    met = {(*sharing(case.kernel), case.seed) for case in CASES}
    assert met >= {(*sharing(case.kernel), case.seed) for case in ways}


@pytest.mark.timeout(1200)  # g++ on every kernel, when nothing is cached
def test_the_kernels_compile(request: pytest.FixtureRequest) -> None:
    """All kernels of the cases in this run."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    cases = [item.callspec.params["case"] for item in items if item.originalname == test_kernel.__name__]
    units = list({case.kernel.label: case.kernel.unit for case in cases}.values())
    assert len(run_all(units, lambda unit: kernel_library(unit, Options()), jobs())) == len(units)


@pytest.mark.together(lambda case: case.kernel.label, "case")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.identity)
def test_kernel(case: Case) -> None:
    unit, runner = case.kernel.unit, case.kernel.runner
    assert runner is not None
    trial = runner.trial(unit, case.problem)
    before = {name: tensor.clone() for name, tensor in trial.results.items()}
    outcome = execute(unit, trial, settings_for(case), Options())
    assert outcome.passed, f"{outcome.explain()}\nrepeat: {runnable(case.command())}"
    if case.identity in FIRST.values():
        assert_results_are_compared(trial, before)


def assert_results_are_compared(trial: Trial, before: dict[str, Tensor]) -> None:
    """The check fails if anything that the launch has written is changed."""
    compared = 0
    for name, tensor in trial.results.items():
        written = (tensor != before[name]) & tensor.isfinite() if tensor.is_floating_point() else tensor != before[name]
        if not written.any():
            continue
        after = tensor.clone()
        tensor[written] += 1
        assert trial.check(), f"{name} may be anything"
        tensor.copy_(after)
        compared += 1
    assert compared


@pytest.mark.parametrize("policy", [AsyncPolicy.LAZY, AsyncPolicy.EAGER, AsyncPolicy.RANDOM])
def test_timing_does_not_change_a_bit(policy: AsyncPolicy) -> None:
    """Whatever the interleaving and the time at which copies complete, the same inputs give the same bits."""
    dense = [case for case in CASES if "varlen" not in case.kernel.label and "append" not in case.kernel.label]
    # Others leave NaN where they write nothing
    first_of_each = {case.kernel.unit.row.family: case for case in reversed(dense)}
    for case in first_of_each.values():
        outcomes = [run_case(case, Options(), policy=policy, seed=seed) for seed in (101, 202, 303)]
        assert all(outcome.passed for outcome in outcomes)
        for outcome in outcomes:
            assert all(tensor.equal(outcomes[0].results[name]) for name, tensor in outcome.results.items())
