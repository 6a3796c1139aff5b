"""Mutants by rule: every edit that an operator makes in the kernels' sources, and the subset that a hunt uses.

Every synchronising call is in the subset. The number of other edits grows with a
function's length; they are spread over the operators. A name is the file, the function, the operator and a number: it changes when the function does.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flashmoe.errors import TableError
from flashmoe_build.emulation.build import CSRC
from flashmoe_build.emulation.mutation.kernels import noticing_kernels
from flashmoe_build.emulation.mutation.operators import edits
from flashmoe_build.emulation.mutation.planted import Mutant
from flashmoe_build.emulation.mutation.site import Edit
from flashmoe_build.emulation.mutation.source import Source
from flashmoe_tools.toml import tomllib

TABLE = Path(__file__).with_name("generated.toml")
TOKENS_PER_EDIT = 200  # one edit that is not of synchronisation per this many tokens of a file's functions
NOT_KERNELS = frozenset(("cpu", "host", "ptx", "emulation", "params", "tables"))


def sources() -> tuple[str, ...]:
    """The files that rules are applied to, relative to csrc."""
    found = (path.relative_to(CSRC) for pattern in ("*.cuh", "*tensor_map.h") for path in CSRC.rglob(pattern))
    return tuple(sorted(path.as_posix() for path in found if not NOT_KERNELS & set(path.parts)))


@dataclass(frozen=True)
class Equivalent:
    """Mutants whose effect the emulated machine cannot show, selected by operator, full text and location. Without operator and text, every
    mutant of a function whose decisions affect only speed."""

    why: str
    operator: str = ""
    text: str = ""
    function: str = ""  # without its struct
    file: str = ""
    number: int = 0  # selects one of several with the same text in a function, as numbered in their names; 0: all

    def covers(self, mutant: Mutant) -> bool:
        _, function, operator, number = mutant.name.split(":")
        return (
            self.operator in ("", operator)
            and self.text in ("", " ".join(mutant.anchor.split()))
            and self.function in ("", function.rpartition(".")[2])
            and self.file in ("", mutant.file)
            and self.number in (0, int(number))
        )


@lru_cache(maxsize=2)
def generated(*, every: bool = False) -> tuple[Mutant, ...]:
    """The chosen mutants, or with ``every`` all that the rules make; without equivalent ones."""
    known = equivalents()
    made = (mutant for file in sources() for mutant in _of_file(file, noticing_kernels(file), every=every))
    return tuple(mutant for mutant in made if not any(row.covers(mutant) for row in known))


def equivalents() -> tuple[Equivalent, ...]:
    return tuple(Equivalent(**row) for row in tomllib.loads(TABLE.read_text(encoding="utf-8"))["equivalent"])


def fast() -> tuple[dict[str, Any], ...]:
    """Table rows of the bugs that the test suite hunts."""
    return tuple(tomllib.loads(TABLE.read_text(encoding="utf-8"))["fast"])


def first(row: dict[str, Any]) -> Mutant:
    """The row's mutant: the first (or the ``number``-th) of the file and operator whose text matches, on one kernel known to notice it."""
    left = int(row.get("number", 1))
    for mutant in _of_file(row["file"], (row["kernel"],), every=True):
        operator = mutant.name.split(":")[2]
        if operator == row["operator"] and row["text"] in " ".join(mutant.anchor.split()):
            left -= 1
            if left == 0:
                return replace(mutant, fast=True)
    msg = f"no generated mutant fits {row}; bring {TABLE.name} up to date with csrc"
    raise TableError(msg)


def _of_file(file: str, kernels: tuple[str, ...], *, every: bool) -> Iterator[Mutant]:
    if not kernels:
        return
    source = Source((CSRC / file).read_text(encoding="utf-8"))
    stem = file.rpartition(".")[0].replace("/", ".")
    seen: Counter[str] = Counter()
    owed = 1.0  # so that the shortest file gets one
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
                    rank=edit.rank,
                )


def chosen(made: Sequence[Edit], share: int, name: str) -> list[Edit]:
    """Every edit of synchronisation, and ``share`` others, taken from each operator in turn."""
    kept = [edit for edit in made if edit.rank == 0]
    groups: dict[str, list[Edit]] = {}
    for edit in made:
        if edit.rank > 0:
            groups.setdefault(edit.operator, []).append(edit)
    turns = list(groups.values())
    first = zlib.crc32(name.encode()) % len(turns) if turns else 0
    turns = turns[first:] + turns[:first]
    for index in range(max(map(len, turns), default=0)):
        for group in turns:
            if share > 0 and index < len(group):
                kept.append(group[index])
                share -= 1
    return kept
