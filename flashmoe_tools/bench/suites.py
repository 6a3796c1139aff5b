"""Suites: what a benchmark run times, read from TOML and checked field by field.

``operation`` (attention by default) names the problem type (flashmoe_tools.operations), which reads the tables in
``cases``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashmoe_tools.bench.distributed.workloads import Workload, parse_workloads
from flashmoe_tools.operations import DEFAULT_OPERATION, Problem, fields, operations, packages, problem_type
from flashmoe_tools.operations.fields import SuiteError
from flashmoe_tools.toml import tomllib

SCHEMA = 1
SUITE_FOLDER = Path(__file__).resolve().parent / "suites"  # suites that belong to no single operation
DEVICES = ("cpu", "cuda")
TIMINGS = ("events", "graph", "sustained", "wall", "call")
KINDS = ("operation", "distributed")
BUILD_COST = "build-cost"  # the suite that times builds of a checkout
MAX_CASES = 4096
_SUITE_FIELDS = {"schema", "name", "title", "kind", "devices", "contenders", "baseline", "quick", "cases", "parts"}
_SUITE_FIELDS |= {"operation", "repeats", "block", "timing", "flush_l2"}


@dataclass(frozen=True)
class Suite:
    """What to time and how: ``repeats`` samples per contender, in blocks of ``block`` samples of each contender."""

    name: str
    title: str
    cases: tuple[Problem, ...]
    devices: tuple[str, ...] = DEVICES
    repeats: int = 300
    block: int = 10
    timing: str = "events"
    flush_l2: bool = True
    baseline: str = "sdpa-flash"
    contenders: tuple[str, ...] = ("flashmoe", "sdpa-flash")
    kind: str = "operation"
    operation: str = DEFAULT_OPERATION
    quick_repeats: int = 30
    quick_budget: float = 25.0
    quick_keys: frozenset[str] = field(default_factory=frozenset)
    quick_only: tuple[Problem, ...] = ()
    workloads: tuple[Workload, ...] = ()

    def quick(self) -> Suite:
        """The cases marked ``quick`` (all if none is), with fewer samples. Cases marked "only" appear in no other run."""
        chosen = (*self.quick_only, *(case for case in self.cases if case.key in self.quick_keys)) or self.cases
        works = tuple(work for work in self.workloads if work.key in self.quick_keys) or self.workloads
        return replace(
            self, cases=chosen, workloads=works, repeats=min(self.repeats, self.quick_repeats), block=min(self.block, 3)
        )


def suite_files() -> Mapping[str, Path]:
    """The suites of every operation's package and of bench itself, by name."""
    folders = (SUITE_FOLDER, *(folder / "suites" for folder in packages().values()))
    return {path.stem: path for path in sorted(path for folder in folders for path in folder.glob("*.toml"))}


def suite_names() -> tuple[str, ...]:
    return tuple(sorted(suite_files()))


def load_suite(name_or_path: str) -> Suite:
    """Loads one of our suites by name, or a user's file by path. Raises SuiteError with file and field."""
    if name_or_path == BUILD_COST:
        msg = f"the {BUILD_COST} suite needs a checkout, which it builds; there: ./nox -s bench -- --suite {BUILD_COST}"
        raise SuiteError(msg)
    path = suite_files().get(name_or_path, Path(name_or_path))
    if not path.is_file():
        msg = f"no suite {name_or_path!r}: known suites are {', '.join(suite_names())}; or give the path of a TOML file"
        raise SuiteError(msg)
    try:
        with path.open("rb") as stream:
            table = tomllib.load(stream)
    except tomllib.TOMLDecodeError as error:
        msg = f"{path.name} is not TOML: {error}"
        raise SuiteError(msg) from error
    except (OSError, UnicodeDecodeError) as error:
        msg = f"cannot read {path.name}: {error}"
        raise SuiteError(msg) from error
    return parse_suite(table, path.name)


def parse_suite(table: Mapping[str, Any], source: str) -> Suite:
    """Parses ``table``. Every unknown, missing or impossible field is a SuiteError that names it."""
    fields.known(table, _SUITE_FIELDS, source)
    if table.get("schema") != SCHEMA:
        fields.fail(source, "schema", table.get("schema"), f"schema = {SCHEMA}")
    kind = fields.choice(table.get("kind", "operation"), KINDS, source, "kind")
    operation = fields.choice(table.get("operation", DEFAULT_OPERATION), operations(), source, "operation")
    quick = fields.table(table.get("quick", {}), source, "quick")
    fields.known(quick, {"repeats", "time_budget"}, f"{source}: [quick]")
    rows = table.get("cases", [])
    works, quick_works = parse_workloads(table.get("parts"), source) if kind == "distributed" else ((), frozenset())
    cases = _Cases() if kind != "operation" else _cases(rows, source, problem_type(operation))
    return Suite(
        name=fields.text(table.get("name"), source, "name"),
        title=fields.text(table.get("title", table.get("name")), source, "title"),
        cases=tuple(cases.full.values()),
        devices=tuple(
            fields.choice(one, DEVICES, source, "devices") for one in fields.axis(table.get("devices", list(DEVICES)))
        ),
        repeats=fields.count(table.get("repeats", 300), source, "repeats"),
        block=fields.count(table.get("block", 10), source, "block"),
        timing=fields.choice(table.get("timing", "events"), TIMINGS, source, "timing"),
        flush_l2=fields.flag(table.get("flush_l2", True), source, "flush_l2"),
        baseline=fields.text(table.get("baseline", "sdpa-flash"), source, "baseline"),
        contenders=tuple(
            fields.text(one, source, "contenders")
            for one in fields.axis(table.get("contenders", ["flashmoe", "sdpa-flash"]))
        ),
        kind=kind,
        operation=operation,
        quick_repeats=fields.count(quick.get("repeats", 30), source, "quick.repeats"),
        quick_budget=float(fields.count(quick.get("time_budget", 25), source, "quick.time_budget")),
        quick_keys=frozenset(cases.quick) | quick_works,
        quick_only=tuple(cases.only.values()),
        workloads=works,
    )


@dataclass(frozen=True)
class _Cases:
    """All cases of a suite, the keys of those that the quick run includes, and the cases only the quick run has."""

    full: dict[str, Problem] = field(default_factory=dict)
    quick: set[str] = field(default_factory=set)
    only: dict[str, Problem] = field(default_factory=dict)


def _cases(rows: Any, source: str, problem: type[Problem]) -> _Cases:
    if not isinstance(rows, list) or not rows:
        fields.fail(source, "cases", rows, "at least one table of cases")
    found = _Cases()
    for number, row in enumerate(rows, start=1):
        where = f"{source}: cases[{number}]"
        table = dict(fields.table(row, source, f"cases[{number}]"))
        quick = table.pop("quick", False)
        target = found.only if quick == "only" else found.full
        is_marked = quick != "only" and fields.flag(quick, where, "quick")
        for case in problem.expand(table, where):
            target.setdefault(case.key, case)
            if is_marked:
                found.quick.add(case.key)
        if len(target) > MAX_CASES:
            fields.fail(where, "cases", len(target), f"at most {MAX_CASES} cases in a suite")
    return found
