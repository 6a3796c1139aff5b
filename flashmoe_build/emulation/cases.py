"""Which kernels there are to emulate, and the small problems that each is run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from flashmoe.errors import ArgumentError, TableError
from flashmoe_build.emulation import backward, fused_queries, huge, row_dot
from flashmoe_build.emulation.attention import run_forward
from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.combine import run_combine
from flashmoe_build.emulation.huge import huge_problem
from flashmoe_build.emulation.machine import TENSOR_CORES, Settings
from flashmoe_build.emulation.moe import backward as moe_backward
from flashmoe_build.emulation.moe import few_rows, gemm, mma_sync, routing, scaled
from flashmoe_build.emulation.problem import Layout, Problem, Shape, Values
from flashmoe_build.emulation.varlen import append, decode
from flashmoe_build.emulation.varlen import backward as varlen_backward
from flashmoe_build.emulation.varlen import cases as varlen_cases
from flashmoe_build.emulation.varlen import fused_queries as varlen_fused_queries
from flashmoe_build.emulation.varlen import run as varlen
from flashmoe_tools.tables import Tables, Unit

# Each family adds as its own GPU does; the seeds of the suite use every policy for work in flight.
FAMILY_CORES = {"sm75": "t4", "sm80": "a100", "sm90": "h100"}
FEW_OF = 5  # of so many problems one is run where another kernel of the same source runs them all


@dataclass(frozen=True)
class Kernel:
    """One kernel unit to emulate. Units that differ only in target share the source text and count once."""

    label: str
    unit: Unit


@dataclass(frozen=True)
class Case:
    """A kernel, a problem and a seed: what one emulated run needs."""

    kernel: Kernel
    problem: Any  # of attention a Problem, else what the operation's own suite made
    seed: int

    @property
    def problem_name(self) -> str:
        """Of a problem of an operation other than attention."""
        p = self.problem
        return str(getattr(p, "name", None) or getattr(p, "identity", None) or p)

    @property
    def identity(self) -> str:
        p = self.problem
        if not isinstance(p, Problem):
            return f"{self.kernel.label}-{self.problem_name}-seed{self.seed}"
        mask = "causal" if p.causal else "full"
        splits = f"-s{p.splits}" if p.splits > 1 else ""
        without = ("" if p.wants_lse else "-nolse") + ("" if p.has_counter else "-nocounter")
        layout = "huge" if p.huge else p.layout.value
        return f"{self.kernel.label}-{mask}-{p.shape}-{layout}-{p.values.value}{splits}{without}-seed{self.seed}"

    def command(self) -> str:
        """The command that repeats the case, for reports; ``runnable`` names the interpreter in what is printed."""
        p = self.problem
        if not isinstance(p, Problem):
            name = self.problem_name
            return (
                f"python -m flashmoe_build.emulation --kernel {self.kernel.label} --problem '{name}' --seed {self.seed}"
            )
        parts = [
            "python -m flashmoe_build.emulation",
            f"--kernel {self.kernel.label}",
            f"--mask {'causal' if p.causal else 'full'}",
            "--huge" if p.huge else f"--shape {p.shape}",
            "" if p.huge else f"--layout {p.layout.value}",
            "" if p.huge else f"--values {p.values.value}",
            "" if p.huge else f"--data-seed {p.data_seed}",
            f"--splits {p.splits}" if p.splits > 1 and not p.huge else "",
            "" if p.wants_lse else "--no-lse",
            "" if p.has_counter else "--no-counter",
            f"--seed {self.seed}",
        ]
        return " ".join(part for part in parts if part)


def kernels(tables: Tables) -> tuple[Kernel, ...]:
    """Every distinct kernel of the table: same name and same numbers count once; a name with several tiles gets the
    target of each in its label."""
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


def _split_counts(unit: Unit) -> tuple[int, ...]:
    return (3, 2) if unit.row.options.get("split") else (1,)


def problems(unit: Unit) -> Iterator[Any]:
    """The suite of one kernel: edges of its own tile, both masks, grouped heads, narrow head dims, every layout."""
    return _operation(unit).problems(unit)


def _forward_problems(unit: Unit) -> Iterator[Problem]:
    m, n, dim = unit.row.block_m, unit.row.block_n, unit.row.axes["head_dim"]
    narrow = dim // 2 + 8  # a multiple of 8 inside a 64-column segment; of 256 columns the last segment is all outside
    splits = _split_counts(unit)
    sizes: tuple[tuple[int, int, int, int, int, int, Layout, Values], ...] = (
        # seq_q, seq_k, head dim, heads, key heads, batch, layout, values
        # One past a tile, both ways: an index inside the tile where the one of the problem is meant.
        (m + 1, 2 * n + 1, dim, 2, 1, 1, Layout.BSHD, Values.SHIFTED),
        # Whole tiles, two batches; nobody wants the log-sum-exp.
        (m, n, dim, 1, 1, 2, Layout.BHSD, Values.NORMAL),
        # A maximum that moves from tile to tile.
        (65, 3 * n + 7, dim, 1, 1, 1, Layout.ROWS, Values.RISING),
        # Fewer columns than the kernel has.
        (3, n + 3, narrow, 2, 2, 1, Layout.ROWS, Values.LARGE),
        # Fewer keys than rows: causal rows without a key.
        (m + 7, 5, dim, 1, 1, 1, Layout.BHSD, Values.NORMAL),
        # Decode, grouped heads; without a tile counter.
        (1, 2 * n - 1, dim, 4, 2, 2, Layout.BSHD, Values.OUTLIER),
        # Row and head offsets past 2^31 elements.
        (36, 40, dim, 2, 1, 1, Layout.FAR, Values.NORMAL),
        # Equal scores, far from 0: a maximum that stays must leave the old sums as they are.
        (20, 3 * n + 7, dim, 1, 1, 1, Layout.BHSD, Values.LEVEL),
        # NaN in the inputs, in a last key that most causal rows do not see among them.
        (20, n + 9, dim, 2, 2, 1, Layout.BHSD, Values.NAN),
    )
    if unit.row.schedule == "persistent":
        sizes += (
            # Eight tiles for three blocks: every buffer comes round again.
            (m * 3 + 70, n + 30, dim, 2, 1, 1, Layout.BHSD, Values.SHIFTED),
            # Causal: the first 64 rows of a tile see one key block, the others two; of two shares they see none of one.
            (m, m + n - 64, dim, 6, 2, 1, Layout.BHSD, Values.SHIFTED),
        )
    for causal in (mask == "causal" for mask in unit.row.words["mask"]):
        for index, (seq_q, seq_k, columns, heads, key_heads, batch, layout, values) in enumerate(sizes):
            problem = Problem(
                Shape(batch, heads, key_heads, seq_q, seq_k, columns),
                unit.dtype,
                causal,
                layout,
                values,
                index,
                splits[index % len(splits)],
            )
            yield replace(problem, wants_lse=index != 1, has_counter=index != 5)
        yield huge_problem(unit, causal)


def _combine_problems(unit: Unit) -> Iterator[Problem]:
    for index, (head_dim, splits, rows, layout) in enumerate(
        (
            (64, 2, 5, Layout.BHSD),
            (128, 32, 3, Layout.ROWS),
            (256, 7, 9, Layout.BSHD),
            (40, 3, 1, Layout.ROWS),
            (256, 1, 2, Layout.FAR),
        )
    ):
        shape = Shape(2, 3, 1, rows, 64, head_dim)
        yield Problem(shape, unit.dtype, False, layout, Values.NORMAL, index, splits, wants_lse=index != 2)
    yield huge_problem(unit, causal=False)


Runner = Callable[[Unit, Any, Settings, Options], Any]  # the problem is what the operation's own suite made


@dataclass(frozen=True)
class _Operation:
    """How the kernels of one operation are tried out."""

    problems: Callable[[Unit], Iterator[Any]]
    run: Runner
    run_huge: Runner | None = None  # for those whose problems have huge ones among them


_OPERATIONS = {
    "attention_forward": _Operation(_forward_problems, run_forward, huge.run_forward),
    "attention_varlen_forward": _Operation(varlen_cases.problems, varlen.run),
    "attention_append": _Operation(append.problems, append.run),
    "attention_decode": _Operation(decode.problems, decode.run),
    "attention_combine": _Operation(_combine_problems, run_combine, huge.run_combine),
    "attention_backward_dq": _Operation(backward.problems, backward.run_backward),
    "attention_backward_dkv": _Operation(backward.problems, backward.run_backward),
    "attention_backward_fused": _Operation(backward.problems, backward.run_backward),
    "attention_backward_fused_prepare": _Operation(fused_queries.problems, fused_queries.run),
    "attention_backward_fused_convert": _Operation(fused_queries.problems, fused_queries.run),
    "attention_row_dot": _Operation(row_dot.problems, row_dot.run),
    **{name: _Operation(varlen_backward.problems, varlen_backward.run) for name in varlen_backward.RESULTS},
    "attention_varlen_backward_fused_prepare": _Operation(varlen_fused_queries.problems, varlen_fused_queries.run),
    "attention_varlen_backward_fused_convert": _Operation(varlen_fused_queries.problems, varlen_fused_queries.run),
    **{name: _Operation(routing.problems, routing.run) for name in routing.OPERATIONS},
    "grouped_gemm": _Operation(gemm.plain_problems, gemm.run_gemm),
    "grouped_gemm_gated": _Operation(gemm.gated_problems, gemm.run_gemm),
    "grouped_gemm_gated_backward": _Operation(moe_backward.gated_backward_problems, moe_backward.run_gated_backward),
    **{name: _Operation(few_rows.problems, few_rows.run) for name in few_rows.OPERATIONS},
    **{name: _Operation(scaled.problems, scaled.run) for name in ("moe_quantize", *scaled.PRODUCTS)},
    "grouped_gemm_weight_gradient": _Operation(moe_backward.weight_gradient_problems, moe_backward.run_weight_gradient),
}

# The grouped products with mma.sync.
_MMA_SYNC = _Operation(mma_sync.problems, mma_sync.run)


def _operation(unit: Unit) -> _Operation:
    name = unit.row.operation
    if name in mma_sync.OPERATIONS and unit.row.family in mma_sync.FAMILIES:
        return _MMA_SYNC
    if name not in _OPERATIONS:
        msg = f"there are no problems to emulate {name} on; known: {', '.join(_OPERATIONS)}; add it to flashmoe_build/emulation/cases.py"
        raise TableError(msg)
    return _OPERATIONS[name]


def matching(tables: Tables, text: str) -> tuple[Kernel, ...]:
    """The kernel of that label, or else all whose label contains ``text``."""
    every = kernels(tables)
    exact = tuple(kernel for kernel in every if kernel.label == text)
    return exact or tuple(kernel for kernel in every if text in kernel.label)


def suite(
    tables: Tables, selected: str = "", masks: tuple[bool, ...] = (False, True), *, whole: bool = False
) -> Iterator[Case]:
    """The cases of every kernel that ``selected`` names (see ``matching``); ``whole``: of those that others repeat, too."""
    for kernel in matching(tables, selected):
        step = 1 if whole or not _is_repeated(kernel.unit) else FEW_OF
        for seed, problem in enumerate(problems(kernel.unit)):
            if problem.causal in masks and seed % step == 0:
                yield Case(kernel, problem, seed)


def _is_repeated(unit: Unit) -> bool:
    """The grouped products in bf16 are the source of those in f16, which meet every problem."""
    is_product = unit.row.operation.startswith("grouped_gemm")
    return is_product and unit.dtype == "bf16" and "f16" in unit.row.dtypes


def settings_for(case: Case, **changes: object) -> Settings:
    """The settings of a case: its seed, and the tensor cores of the kernel's family."""
    core = TENSOR_CORES[FAMILY_CORES[case.kernel.unit.row.family]]
    return Settings(**{"seed": case.seed, "core": core, **changes})  # type: ignore[arg-type]


def run_case(case: Case, options: Options, **changes: object) -> Any:
    """Runs one case on the emulated machine and checks the result."""
    operation = _operation(case.kernel.unit)
    run = operation.run_huge if case.problem.huge else operation.run
    if run is None:
        msg = f"{case.kernel.label}: there is no huge problem for {case.kernel.unit.row.operation}; drop --huge"
        raise ArgumentError(msg)
    return run(case.kernel.unit, case.problem, settings_for(case, **changes), options)
