"""The ladder as data: rungs read from TOML and checked."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flashmoe._version import WHEEL_PREFIX
from flashmoe.errors import ArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = 1
OWN_LADDER = Path(__file__).resolve().parent / "ladder.toml"


class LadderError(ArgumentError):
    """A ladder file is missing or states a rung that cannot be climbed."""


@dataclass(frozen=True)
class Rung:
    """One step: either a ``command`` that leaves a report, or the decision over an earlier rung's report.

    ``after_failed`` names a rung whose failure does not keep this one from being climbed. Unless a rung with ``proof``
    passes, nothing is known good.
    """

    name: str
    command: tuple[str, ...] = ()
    report: str = ""
    limit_seconds: float = 300.0
    budget_seconds: float = 120.0
    needs: str = ""
    proof: bool = False
    makes: str = ""
    ignore: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    decision_of: str = ""
    after_failed: str = ""
    why: str = ""
    next_step: str = ""


@dataclass(frozen=True)
class Places:
    """What the words in braces stand for."""

    root: Path
    build: Path
    library: Path
    reports: Path
    checkout: bool
    given: bool = False  # the library was named by the caller: nothing here made it

    def report_of(self, rung: Rung, python: str, budget: float) -> Path:
        if rung.report:
            return Path(self.fill([rung.report], rung, python, budget)[0])
        return self.reports / f"{rung.name}.json"

    @property
    def artifact(self) -> Path:
        """The checkout's newest wheel; the library where no wheel was made, or the caller named one."""
        wheels = [] if self.given or not self.checkout else list((self.root / "dist").glob(f"{WHEEL_PREFIX}*.whl"))
        return max(wheels, key=lambda path: path.stat().st_mtime, default=self.library)

    def fill(self, words: Sequence[str], rung: Rung, python: str, budget: float) -> list[str]:
        """``words`` with what stands in braces filled in; a word that then is empty is left out."""
        objects = self.build / "objects"
        table = {
            "artifact": str(self.artifact),
            "objects": f"--objects={objects}" if objects.is_dir() and self.artifact.suffix == ".whl" else "",
            "python": python,
            "root": str(self.root),
            "build": str(self.build),
            "library": str(self.library),
            "reports": str(self.reports),
            "report": str(self.reports / f"{rung.name}.json"),
            "budget": f"{budget:.0f}",
        }
        return [filled for word in words if (filled := _replace(word, table)) or not word]


def _replace(word: str, table: Mapping[str, str]) -> str:
    for name, value in table.items():
        word = word.replace("{" + name + "}", value)
    return word


def read_ladder(path: Path = OWN_LADDER) -> tuple[Rung, ...]:
    """The rungs of a ladder file. Raises LadderError with the rung and field that is wrong."""
    try:
        with path.open("rb") as stream:
            table = tomllib.load(stream)
    except (OSError, tomllib.TOMLDecodeError) as error:
        msg = f"{path.name} is no ladder: {error}"
        raise LadderError(msg) from error
    if table.get("schema") != SCHEMA:
        msg = f"{path.name} has schema {table.get('schema')!r}; this flashmoe reads {SCHEMA}"
        raise LadderError(msg)
    rungs = tuple(_rung(row, path.name) for row in table.get("rung", []))
    if not rungs:
        msg = f"{path.name} has no [[rung]]: nothing would be checked"
        raise LadderError(msg)
    _check_names(rungs, path.name)
    return rungs


def _rung(row: Mapping[str, Any], source: str) -> Rung:
    fields = dict(row)
    try:
        rung = Rung(
            command=tuple(fields.pop("command", ())),
            ignore=tuple(fields.pop("ignore", ())),
            environment=MappingProxyType(dict(fields.pop("environment", {}))),
            **fields,
        )
    except TypeError as error:
        msg = f"{source}: rung {row.get('name')!r}: {error}"
        raise LadderError(msg) from error
    if bool(rung.command) == bool(rung.decision_of):
        msg = f"{source}: rung {rung.name!r} needs either command or decision_of"
        raise LadderError(msg)
    return rung


def _check_names(rungs: Sequence[Rung], source: str) -> None:
    seen: set[str] = set()
    for rung in rungs:
        if rung.name in seen:
            msg = f"{source}: two rungs are named {rung.name!r}"
            raise LadderError(msg)
        for other in (rung.decision_of, rung.after_failed):
            if other and other not in seen:
                msg = f"{source}: rung {rung.name!r} refers to {other!r}, which is no earlier rung"
                raise LadderError(msg)
        seen.add(rung.name)


def select(rungs: Sequence[Rung], names: Sequence[str]) -> tuple[Rung, ...]:
    """The named rungs, in the ladder's order; all when no name is given. An unknown name is a LadderError."""
    known = [rung.name for rung in rungs]
    for name in names:
        if name not in known:
            msg = f"no rung {name!r}; the ladder has {', '.join(known)}"
            raise LadderError(msg)
    return tuple(rung for rung in rungs if not names or rung.name in names)
