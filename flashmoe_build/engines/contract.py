"""What the plug-ins call, implement and look up in each engine, and the comparison with what an engine provides.

An engine is a mapping from a clause's target ("module:Class.method") to what was found there, so it can come from a record or from sources.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flashmoe_build.engines.signatures import Parameter, Signature


@dataclass(frozen=True)
class Clause:
    """One dependency on an engine. ``theirs``: "module:path". ``since``, ``until``: first and last version that has it."""

    part: str  # of the plug-in: "attention" or "experts"
    theirs: str
    since: tuple[int, ...] = ()
    until: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """The key under which the finding is recorded."""
        return self.theirs

    def applies(self, version: str) -> bool:
        number = number_of(version)
        return number >= self.since and (not self.until or number[: len(self.until)] <= self.until)


@dataclass(frozen=True)
class Implements(Clause):
    """The engine calls our function as it would call theirs."""

    ours: str = ""
    returns: tuple[str, ...] = ()  # any of these, if theirs is annotated


@dataclass(frozen=True)
class Calls(Clause):
    """We call their function with these arguments: the first ``positional`` of ``passes`` by position."""

    passes: tuple[str, ...] = ()
    positional: int = 0


@dataclass(frozen=True)
class Has(Clause):
    """The module or class has these names."""

    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Defines(Clause):
    """Our class defines every abstract method of theirs."""

    ours: str = ""

    @property
    def key(self) -> str:
        return f"{self.theirs} abstract"


@dataclass(frozen=True)
class Difference:
    """One difference; ``what`` is a parameter or name."""

    theirs: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.theirs}: {self.what}: {self.why}"


Found = Signature | frozenset[str] | None
Engine = Mapping[str, Found]


def number_of(version: str) -> tuple[int, ...]:
    """The numbers before any suffix: "0.5.23.post1" is (0, 5, 23)."""
    words = version.split(".")
    return tuple(int(word) for word in words if word.isdigit())


@dataclass(frozen=True)
class Ours:
    """How to read our own sources: a function's signature, a class's names."""

    signature: Callable[[str], Signature | None]
    names: Callable[[str], frozenset[str]]


def differences(clauses: Sequence[Clause], version: str, engine: Engine, ours: Ours) -> list[tuple[Clause, Difference]]:
    """Where an engine of this version differs from what the plug-ins expect."""
    found = []
    for clause in clauses:
        if clause.applies(version):
            found += [(clause, one) for one in _differences(clause, engine.get(clause.key), ours)]
    return found


def _differences(clause: Clause, theirs: Found, ours: Ours) -> Iterator[Difference]:
    if isinstance(clause, Has):
        present = theirs if isinstance(theirs, frozenset) else frozenset()
        for name in clause.names:
            if name not in present:
                yield Difference(clause.theirs, name, "is not there")
    elif isinstance(clause, Defines):
        for name in sorted((theirs if isinstance(theirs, frozenset) else frozenset()) - ours.names(clause.ours)):
            yield Difference(clause.theirs, name, f"is abstract, and {clause.ours} does not define it")
    elif not isinstance(theirs, Signature):
        yield Difference(clause.theirs, clause.theirs.rpartition(".")[2], "is not there")
    elif isinstance(clause, Calls):
        yield from _call(clause, theirs)
    elif isinstance(clause, Implements):
        own = ours.signature(clause.ours)
        if own is None:
            yield Difference(clause.theirs, clause.ours, "flashmoe does not define it")
        else:
            yield from _implementation(clause, theirs, own)


def _call(clause: Calls, theirs: Signature) -> Iterator[Difference]:
    by_position = [one for one in theirs.parameters if not one.is_keyword_only]
    for index, name in enumerate(clause.passes):
        parameter = theirs.named(name)
        if parameter is None and not theirs.takes_more:
            yield Difference(clause.theirs, name, "flashmoe passes it, but it is not a parameter")
        elif index < clause.positional and (index >= len(by_position) or by_position[index].name != name):
            yield Difference(clause.theirs, name, f"flashmoe passes it as argument {index + 1}, where it is not")
    for parameter in theirs.parameters:
        if parameter.default is None and parameter.name not in clause.passes:
            yield Difference(clause.theirs, parameter.name, "has no default, and flashmoe does not pass it")


def _implementation(clause: Implements, theirs: Signature, own: Signature) -> Iterator[Difference]:
    if own.takes_more and not own.parameters:
        return  # accepts any arguments
    own_positions = [one.name for one in own.parameters if not one.is_keyword_only]
    for index, parameter in enumerate(theirs.parameters):
        yield from _parameter(clause, parameter, index, own, own_positions)
    known = {one.name for one in theirs.parameters}
    for extra in own.parameters:
        if extra.name not in known and extra.default is None and not theirs.takes_more:
            yield Difference(clause.theirs, extra.name, f"{clause.ours} needs it, but the engine has no such parameter")
    if clause.returns and theirs.returns is not None and theirs.returns not in clause.returns:
        yield Difference(clause.theirs, "return", f"is {theirs.returns}; flashmoe gives {' or '.join(clause.returns)}")


def _parameter(
    clause: Implements, theirs: Parameter, index: int, own: Signature, own_positions: Sequence[str]
) -> Iterator[Difference]:
    mine = own.named(theirs.name)
    if mine is None:
        if not own.takes_more:
            yield Difference(clause.theirs, theirs.name, f"is new, and {clause.ours} does not take it")
    elif not theirs.is_keyword_only and (index >= len(own_positions) or own_positions[index] != theirs.name):
        yield Difference(clause.theirs, theirs.name, f"is argument {index + 1}, in {clause.ours} another")
    elif theirs.default is not None and mine.default is None:
        yield Difference(clause.theirs, theirs.name, f"may be left out ({theirs.default}), but {clause.ours} needs it")


def changes(before: Engine, after: Engine) -> list[Difference]:
    """The differences between two readings of the same names, parameter by parameter."""
    found = []
    for theirs in sorted({*before, *after}):
        old, new = before.get(theirs), after.get(theirs)
        if old == new:
            continue
        if isinstance(old, Signature) and isinstance(new, Signature):
            found += list(_changed(theirs, old, new))
        elif isinstance(old, frozenset) and isinstance(new, frozenset):
            found += [Difference(theirs, name, "is in only one of the two") for name in sorted(old ^ new)]
        else:
            found.append(Difference(theirs, theirs.rpartition(".")[2], "is gone" if new is None else "is new"))
    return found


def _changed(theirs: str, old: Signature, new: Signature) -> Iterator[Difference]:
    names = [one.name for one in old.parameters] + [one.name for one in new.parameters if old.named(one.name) is None]
    for name in names:
        was, now = old.named(name), new.named(name)
        if was != now:
            yield Difference(theirs, name, f"was {was or 'absent'}, is {now or 'absent'}")
    if [one.name for one in old.parameters] != [one.name for one in new.parameters] and {*old.parameters} == {
        *new.parameters
    }:
        yield Difference(theirs, "order", f"was {old}, is {new}")
    if old.takes_more != new.takes_more:
        yield Difference(theirs, "**", "takes further keywords in only one of the two")
    if old.returns != new.returns:
        yield Difference(theirs, "return", f"was {old.returns}, is {new.returns}")
