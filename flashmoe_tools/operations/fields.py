"""Reads the fields of a suite file; each is checked, and named if it is wrong."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from flashmoe.errors import ArgumentError


class SuiteError(ArgumentError):
    """A suite file is missing or describes something that cannot be timed."""


def axis(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def counts(row: Mapping[str, Any], where: str, name: str) -> list[int]:
    return [count(one, where, name) for one in axis(row.get(name))]


def count(value: Any, where: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        fail(where, name, value, "a whole number, at least 1")
    return int(value)


def divide(value: int, by: int, where: str, name: str, other: str) -> int:
    if value % by or value < by:
        fail(where, name, value, f"a multiple of {other} = {by}")
    return value // by


def flag(value: Any, where: str, name: str) -> bool:
    if not isinstance(value, bool):
        fail(where, name, value, "true or false")
    return bool(value)


def text(value: Any, where: str, name: str) -> str:
    if not isinstance(value, str) or not value:
        fail(where, name, value, "a non-empty string")
    return str(value)


def choice(value: Any, options: Sequence[str], where: str, name: str) -> str:
    if value not in options:
        fail(where, name, value, f"one of {', '.join(options)}")
    return str(value)


def table(value: Any, where: str, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        fail(where, name, value, "a table")
    return dict(value)


def known(row: Mapping[str, Any], fields: set[str], where: str) -> None:
    unknown = sorted(set(row) - fields)
    if unknown:
        fail(where, unknown[0], row[unknown[0]], f"one of the fields {', '.join(sorted(fields))}")


def fail(where: str, name: str, found: Any, expected: str) -> NoReturn:
    msg = f"{where}: {name} is {found!r}; expected {expected}"
    raise SuiteError(msg)
