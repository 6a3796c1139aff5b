"""Suites: what a benchmark run times, read from TOML and checked field by field.

A list in a ``[[cases]]`` table is an axis; the table stands for the product of its axes. ``tokens`` (batch * seq) and
``hidden`` (heads * head_dim) may stand in for ``batch`` and ``heads``, as in grids that hold the work constant.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from flashmoe.errors import ArgumentError
from flashmoe.tools.bench.case import DTYPE_BYTES, LAYOUTS, Case

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = 1
SUITE_FOLDER = Path(__file__).resolve().parent / "suites"
DEVICES = ("cpu", "cuda")
TIMINGS = ("events", "graph", "wall", "call")
KINDS = ("attention", "build")
MAX_CASES = 4096
_CASE_FIELDS = {"dtype", "head_dim", "causal", "layout", "quick"}
_CASE_FIELDS |= {"seq", "seq_q", "seq_k", "batch", "tokens", "heads", "heads_kv", "hidden"}
_SUITE_FIELDS = {"schema", "name", "title", "kind", "devices", "contenders", "baseline", "quick", "cases", "builds"}
_SUITE_FIELDS |= {"repeats", "block", "timing", "flush_l2"}


class SuiteError(ArgumentError):
    """A suite file is missing or states something that cannot be timed."""


@dataclass(frozen=True)
class BuildCase:
    """One build to time: the targets, and a file to touch first (empty: build from nothing).

    ``replace`` is what the touch does: (old, new) text, the old text standing in the file once. Without it a comment is added.
    """

    archs: str
    touch: str = ""
    replace: tuple[str, str] | None = None

    @property
    def key(self) -> str:
        if not self.touch:
            return f"build-{self.archs}-cold"
        return f"build-{self.archs}-{'edit' if self.replace else 'touch'}-{Path(self.touch).stem}"


@dataclass(frozen=True)
class Suite:
    """What to time and how: ``repeats`` samples a side, in blocks of ``block`` samples of each contender."""

    name: str
    title: str
    cases: tuple[Case, ...]
    devices: tuple[str, ...] = DEVICES
    repeats: int = 300
    block: int = 10
    timing: str = "events"
    flush_l2: bool = True
    baseline: str = "sdpa-flash"
    contenders: tuple[str, ...] = ("flashmoe", "sdpa-flash")
    kind: str = "attention"
    quick_repeats: int = 30
    quick_budget: float = 25.0
    quick_keys: frozenset[str] = field(default_factory=frozenset)
    builds: tuple[BuildCase, ...] = ()

    def quick(self) -> Suite:
        """The cases marked ``quick`` (all when none is), with fewer samples."""
        chosen = tuple(case for case in self.cases if case.key in self.quick_keys) or self.cases
        return replace(self, cases=chosen, repeats=min(self.repeats, self.quick_repeats), block=min(self.block, 3))


def suite_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in SUITE_FOLDER.glob("*.toml")))


def load_suite(name_or_path: str) -> Suite:
    """A suite of ours by its name, or a person's own file by its path. Raises SuiteError with file and field."""
    own = SUITE_FOLDER / f"{name_or_path}.toml"
    path = own if name_or_path in suite_names() else Path(name_or_path)
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
    """The suite that ``table`` states. Every unknown, missing or impossible field is a SuiteError that names it."""
    _known(table, _SUITE_FIELDS, source)
    if table.get("schema") != SCHEMA:
        _fail(source, "schema", table.get("schema"), f"schema = {SCHEMA}")
    kind = _choice(table.get("kind", "attention"), KINDS, source, "kind")
    quick = _table(table.get("quick", {}), source, "quick")
    _known(quick, {"repeats", "time_budget"}, f"{source}: [quick]")
    cases, quick_keys = _cases(table.get("cases", []), source) if kind == "attention" else ((), frozenset[str]())
    return Suite(
        name=_text(table.get("name"), source, "name"),
        title=_text(table.get("title", table.get("name")), source, "title"),
        cases=cases,
        devices=tuple(_choice(one, DEVICES, source, "devices") for one in _axis(table.get("devices", list(DEVICES)))),
        repeats=_count(table.get("repeats", 300), source, "repeats"),
        block=_count(table.get("block", 10), source, "block"),
        timing=_choice(table.get("timing", "events"), TIMINGS, source, "timing"),
        flush_l2=_flag(table.get("flush_l2", True), source, "flush_l2"),
        baseline=_text(table.get("baseline", "sdpa-flash"), source, "baseline"),
        contenders=tuple(
            _text(one, source, "contenders") for one in _axis(table.get("contenders", ["flashmoe", "sdpa-flash"]))
        ),
        kind=kind,
        quick_repeats=_count(quick.get("repeats", 30), source, "quick.repeats"),
        quick_budget=float(_count(quick.get("time_budget", 25), source, "quick.time_budget")),
        quick_keys=quick_keys,
        builds=_builds(table.get("builds", []), source) if kind == "build" else (),
    )


def _cases(rows: Any, source: str) -> tuple[tuple[Case, ...], frozenset[str]]:
    if not isinstance(rows, list) or not rows:
        _fail(source, "cases", rows, "at least one [[cases]] table")
    found: dict[str, Case] = {}
    quick: set[str] = set()
    for number, row in enumerate(rows, start=1):
        where = f"{source}: cases[{number}]"
        table = _table(row, source, f"cases[{number}]")
        _known(table, _CASE_FIELDS, where)
        for case in _expand(table, where):
            found.setdefault(case.key, case)
            if _flag(table.get("quick", False), where, "quick"):
                quick.add(case.key)
        if len(found) > MAX_CASES:
            _fail(where, "cases", len(found), f"at most {MAX_CASES} cases in a suite")
    return tuple(found.values()), frozenset(quick)


def _expand(row: Mapping[str, Any], where: str) -> Iterator[Case]:
    """The product of the row's axes, in the order dtype, head_dim, causal, heads, batch, sequence lengths."""
    lengths = _lengths(row, where)
    axes = (
        [_choice(one, tuple(DTYPE_BYTES), where, "dtype") for one in _axis(row.get("dtype", "bf16"))],
        _counts(row, where, "head_dim"),
        [_flag(one, where, "causal") for one in _axis(row.get("causal", False))],
        [_choice(one, LAYOUTS, where, "layout") for one in _axis(row.get("layout", "bhsd"))],
        _one_of(row, where, "heads", "hidden"),
        _one_of(row, where, "batch", "tokens"),
        lengths,
    )
    for dtype, head_dim, causal, layout, (heads_word, heads), (batch_word, batch), (seq_q, seq_k) in itertools.product(
        *axes
    ):
        if causal and seq_q > seq_k:
            _fail(where, "causal", (seq_q, seq_k), "seq_q up to seq_k: the mask is bottom-right, so others see no key")
        heads_q = heads if heads_word == "heads" else _divide(heads, head_dim, where, "hidden", "head_dim")
        heads_kv = _count(row.get("heads_kv", heads_q), where, "heads_kv")
        if heads_q % heads_kv:
            _fail(where, "heads_kv", heads_kv, f"a divisor of {heads_q} query heads")
        if head_dim > 256:
            _fail(where, "head_dim", head_dim, "at most 256")
        count = batch if batch_word == "batch" else _divide(batch, seq_q, where, "tokens", "seq")
        yield Case(dtype, count, heads_q, heads_kv, seq_q, seq_k, head_dim, causal, layout)


def _lengths(row: Mapping[str, Any], where: str) -> list[tuple[int, int]]:
    if ("seq" in row) == ("seq_q" in row or "seq_k" in row):
        _fail(
            where,
            "seq",
            {name: row[name] for name in ("seq", "seq_q", "seq_k") if name in row},
            "seq, or seq_q and seq_k",
        )
    if "seq" in row:
        return [(one, one) for one in _counts(row, where, "seq")]
    return list(itertools.product(_counts(row, where, "seq_q"), _counts(row, where, "seq_k")))


def _one_of(row: Mapping[str, Any], where: str, plain: str, product: str) -> list[tuple[str, int]]:
    if (plain in row) == (product in row):
        _fail(where, plain, row.get(plain), f"exactly one of {plain} and {product}")
    word = plain if plain in row else product
    return [(word, one) for one in _counts(row, where, word)]


def _builds(rows: Any, source: str) -> tuple[BuildCase, ...]:
    if not isinstance(rows, list) or not rows:
        _fail(source, "builds", rows, "at least one [[builds]] table")
    found = []
    for number, row in enumerate(rows, start=1):
        table = _table(row, source, f"builds[{number}]")
        where = f"{source}: builds[{number}]"
        _known(table, {"archs", "touch", "replace"}, where)
        found.append(
            BuildCase(
                _text(table.get("archs"), source, "archs"),
                str(table.get("touch", "")),
                _replacement(table.get("replace"), where),
            )
        )
    return tuple(found)


def _replacement(value: Any, where: str) -> tuple[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(text, str) and text for text in value):
        _fail(where, "replace", value, "two texts, the old and the new one")
    return value[0], value[1]


def _axis(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _counts(row: Mapping[str, Any], where: str, name: str) -> list[int]:
    return [_count(one, where, name) for one in _axis(row.get(name))]


def _count(value: Any, where: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _fail(where, name, value, "a whole number, at least 1")
    return int(value)


def _divide(value: int, by: int, where: str, name: str, other: str) -> int:
    if value % by or value < by:
        _fail(where, name, value, f"a multiple of {other} = {by}")
    return value // by


def _flag(value: Any, where: str, name: str) -> bool:
    if not isinstance(value, bool):
        _fail(where, name, value, "true or false")
    return bool(value)


def _text(value: Any, where: str, name: str) -> str:
    if not isinstance(value, str) or not value:
        _fail(where, name, value, "a non-empty string")
    return str(value)


def _choice(value: Any, known: Sequence[str], where: str, name: str) -> str:
    if value not in known:
        _fail(where, name, value, f"one of {', '.join(known)}")
    return str(value)


def _table(value: Any, where: str, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _fail(where, name, value, "a table")
    return dict(value)


def _known(table: Mapping[str, Any], fields: set[str], where: str) -> None:
    unknown = sorted(set(table) - fields)
    if unknown:
        _fail(where, unknown[0], table[unknown[0]], f"one of the fields {', '.join(sorted(fields))}")


def _fail(where: str, name: str, found: Any, expected: str) -> NoReturn:
    msg = f"{where}: {name} is {found!r}; expected {expected}"
    raise SuiteError(msg)
