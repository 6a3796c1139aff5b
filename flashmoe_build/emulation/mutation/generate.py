"""Mutants by rule: every edit that an operator makes of the kernels' sources, and the choice of them that a hunt takes.

All calls that synchronise are among the chosen. Of the other edits as many are as a
function's length asks for, spread over the operators. A name is the file, the function, the operator and a number: it changes when the function does.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from flashmoe.errors import TableError
from flashmoe_build.emulation.build import CSRC
from flashmoe_build.emulation.mutation.kernels import noticing_kernels
from flashmoe_build.emulation.mutation.operators import Edit, edits
from flashmoe_build.emulation.mutation.planted import Mutant
from flashmoe_build.emulation.mutation.source import Source

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).with_name("generated.toml")
TOKENS_PER_EDIT = 200  # of a file's functions, for the edits that are not of synchronisation
NOT_KERNELS = frozenset(("cpu", "host", "ptx", "emulation", "params", "tables"))


def sources() -> tuple[str, ...]:
    """The files that rules are applied to, relative to csrc."""
    found = (path.relative_to(CSRC) for pattern in ("*.cuh", "*tensor_map.h") for path in CSRC.rglob(pattern))
    return tuple(sorted(path.as_posix() for path in found if not NOT_KERNELS & set(path.parts)))


@lru_cache(maxsize=2)
def generated(*, every: bool = False) -> tuple[Mutant, ...]:
    """The chosen mutants, or every one that the rules make; equivalent ones are left out."""
    equivalent = equivalents()
    return tuple(
        mutant for file in sources() for mutant in _of_file(file, every=every) if mutant.name not in equivalent
    )


def equivalents() -> dict[str, str]:
    """Names of mutants that change nothing that the emulated machine could show, with the reason of each."""
    return dict(tomllib.loads(TABLE.read_text(encoding="utf-8")).get("equivalent", {}))


def fast() -> tuple[Mutant, ...]:
    """Those that the test run hunts: of each row of the table the first mutant of that file and operator whose text fits,
    on one kernel that is known to notice."""
    return tuple(_first(row) for row in tomllib.loads(TABLE.read_text(encoding="utf-8"))["fast"])


def _first(row: dict[str, str]) -> Mutant:
    for mutant in _of_file(row["file"], every=True):
        operator = mutant.name.split(":")[2]
        if operator == row["operator"] and row["text"] in " ".join(mutant.anchor.split()):
            return replace(mutant, kernels=(row["kernel"],), fast=True)
    msg = f"no generated mutant fits {row}; bring {TABLE.name} up to date with csrc"
    raise TableError(msg)


def _of_file(file: str, *, every: bool) -> Iterator[Mutant]:
    kernels = noticing_kernels(file)
    if not kernels:
        return
    source = Source((CSRC / file).read_text(encoding="utf-8"))
    stem = file.rpartition(".")[0].replace("/", ".")
    seen: Counter[str] = Counter()
    owed = 1.0  # the shortest file has one
    for function in source.functions:
        made = list(edits(source, function))
        owed += (function.end - function.begin) / TOKENS_PER_EDIT
        kept = made if every else chosen(made, int(owed), f"{file}:{function.name}")
        owed -= sum(edit.rank > 0 for edit in kept)
        picked = set(map(id, kept))
        for edit in made:
            label = f"{stem}:{function.name}:{edit.operator}"
            seen[label] += 1
            if id(edit) in picked:
                anchor = source.text[edit.start : edit.end]
                yield Mutant(
                    f"{label}:{seen[label]}",
                    edit.what,
                    file,
                    anchor,
                    edit.replacement,
                    kernels,
                    at=edit.start,
                    seeds=1 if edit.rank == 0 else 0,
                )


def chosen(made: Sequence[Edit], share: int, name: str) -> list[Edit]:
    """Every edit of synchronisation, and of the others one of each operator in turn until there are ``share``."""
    kept = [edit for edit in made if edit.rank == 0]
    groups: dict[str, list[Edit]] = {}
    for edit in made:
        if edit.rank > 0:
            groups.setdefault(edit.operator, []).append(edit)
    turns = list(groups.values())
    first = zlib.crc32(name.encode()) % len(turns) if turns else 0
    turns = turns[first:] + turns[:first]
    for place in range(max(map(len, turns), default=0)):
        for group in turns:
            if share > 0 and place < len(group):
                kept.append(group[place])
                share -= 1
    return kept
