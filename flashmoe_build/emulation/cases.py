"""The kernels to emulate and the small problems that each runs on, as the operations define them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from flashmoe.errors import TableError
from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.machine import TENSOR_CORES, LaunchReport, Settings
from flashmoe_build.emulation.runner import NamedProblem, Outcome, Runner, execute
from flashmoe_tools import operations
from flashmoe_tools.tables import Tables, Unit

# Each family uses the tensor-core arithmetic of its GPU; the seeds of the suite cover every policy for work in flight.
FAMILY_CORES = {"sm75": "t4", "sm80": "a100", "sm90": "h100"}
EVERY_NTH = 5  # one in this many problems runs if another kernel of the same source runs them all
_KERNELS: dict[int, tuple[Tables, tuple[Kernel, ...]]] = {}  # computed once per table object; tables cannot be hashed
NOT_EMULATED = NamedProblem("not emulated")  # stands for a kernel operation without a runner: a case that fails


def runners() -> Mapping[str, Runner]:
    """The runners of all ``emulation`` packages by kernel operation. Two for the same operation are a TableError."""
    return _runners(tuple(operations.__path__))


@lru_cache(maxsize=4)
def _runners(_: tuple[str, ...]) -> Mapping[str, Runner]:
    found: dict[str, Runner] = {}
    for operation in operations.packages():
        name = f"{operations.__name__}.{operation}.emulation"
        if find_spec(name) is None:
            continue
        own = import_module(name).RUNNERS
        if twice := found.keys() & own:
            msg = f"operations/{operation}/emulation: another one runs {', '.join(sorted(twice))}, too; keep one of the two"
            raise TableError(msg)
        found |= own
    return found


@dataclass(frozen=True)
class Kernel:
    """One kernel unit to emulate. Units that differ only in target share the source text and are one kernel."""

    label: str
    unit: Unit

    @property
    def runner(self) -> Runner | None:
        return runners().get(self.unit.row.operation)


@dataclass(frozen=True)
class Case:
    """A kernel, a problem and a seed: the input of one emulated run."""

    kernel: Kernel
    problem: Any  # defined by the operation
    seed: int

    @property
    def identity(self) -> str:
        return f"{self.kernel.label}-{self.problem.name}-seed{self.seed}"

    def command(self) -> str:
        """The command that repeats the case, for reports; ``runnable`` inserts the interpreter when it is printed."""
        words = getattr(self.problem, "command_words", f"--problem '{self.problem.name}'")
        return f"python -m flashmoe_build.emulation --kernel {self.kernel.label} {words} --seed {self.seed}"


def kernels(tables: Tables) -> tuple[Kernel, ...]:
    """Every distinct kernel of the table: rows of the same name and numbers are one; if a name has several tiles, the
    label of each includes its target."""
    known = _KERNELS.get(id(tables))
    if known is None or known[0] is not tables:
        known = _KERNELS[id(tables)] = (tables, _distinct(tables))
    return known[1]


def _distinct(tables: Tables) -> tuple[Kernel, ...]:
    distinct: dict[tuple[object, ...], Unit] = {}
    for unit in tables.units():
        row = unit.row
        numbers = (row.block_m, row.block_n, row.stages, row.warps, row.min_blocks, tuple(sorted(row.options.items())))
        distinct.setdefault((unit.name, *numbers), unit)
    names = [unit.name for unit in distinct.values()]
    return tuple(
        Kernel(unit.name if names.count(unit.name) == 1 else f"{unit.name}.{unit.target.name}", unit)
        for unit in distinct.values()
    )


def matching(tables: Tables, text: str) -> tuple[Kernel, ...]:
    """The kernel with that label, else all whose label contains ``text``."""
    every = kernels(tables)
    exact = tuple(kernel for kernel in every if kernel.label == text)
    return exact or tuple(kernel for kernel in every if text in kernel.label)


def is_causal(problem: Any) -> bool:
    return bool(getattr(problem, "causal", False))


def is_huge(problem: Any) -> bool:
    """Whether offsets exceed 2^31, so that only one block runs."""
    return bool(getattr(problem, "huge", False))


def suite(
    tables: Tables, selected: str = "", masks: tuple[bool, ...] = (False, True), *, whole: bool = False
) -> Iterator[Case]:
    """The cases of every kernel that ``selected`` names (see ``matching``); ``whole``: including those that other kernels repeat."""
    for kernel in matching(tables, selected):
        runner = kernel.runner
        if runner is None:
            yield Case(kernel, NOT_EMULATED, 0)
            continue
        step = 1 if whole or not is_repeated(kernel.unit) else EVERY_NTH
        for seed, problem in enumerate(runner.problems(kernel.unit)):
            if is_causal(problem) in masks and seed % step == 0:
                yield Case(kernel, problem, seed)


def is_repeated(unit: Unit) -> bool:
    """Whether the kernel is in bf16: its source is that of the f16 kernel of its row with another conversion, and the f16 one runs every problem."""
    return unit.dtype == "bf16" and "f16" in unit.row.dtypes


def settings_for(case: Case, **changes: object) -> Settings:
    """The settings of a case: its seed, and the tensor cores of the kernel's family."""
    core = TENSOR_CORES[FAMILY_CORES[case.kernel.unit.row.family]]
    return Settings(**{"seed": case.seed, "core": core, **changes})  # type: ignore[arg-type]


def run_case(case: Case, options: Options, **changes: object) -> Outcome:
    """Runs one case on the emulated machine and checks the result."""
    unit, runner = case.kernel.unit, case.kernel.runner
    if runner is None:
        wrong = (
            f"nothing was proved: no operation runs {unit.row.operation}; state its problems and trial in RUNNERS of "
            "flashmoe_tools/operations/NAME/emulation/__init__.py"
        )
        return Outcome(unit.name, LaunchReport(unit.name, case.seed, 0.0, ""), (wrong,), {})
    return execute(unit, runner.trial(unit, case.problem), settings_for(case, **changes), options)
