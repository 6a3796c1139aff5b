"""Strict reading of a TOML table: every key is read by name and type, and keys that were not read are errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from flashmoe.errors import TableError

T = TypeVar("T")


class Fields:
    """One table of a file. ``where`` names it in errors: "attention/kernels.toml, row 3 (attention_forward sm80)"."""

    def __init__(self, table: object, where: str) -> None:
        if not isinstance(table, Mapping):
            msg = f"{where}: found {table!r}, a table is needed"
            raise TableError(msg)
        self._table: Mapping[str, Any] = table
        self._asked: set[str] = set()
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    @property
    def plain(self) -> dict[str, Any]:
        return dict(self._table)

    def take(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of a key. A missing key is an error unless there is a default."""
        self._asked.add(key)
        if key not in self._table:
            if default is None:
                msg = f"{self.where}: {key} is missing"
                raise TableError(msg)
            return default
        value = self._table[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:  # rejects bool for int
            self.fail(key, value, f"{kind.__name__} is needed")
        return value  # type: ignore[no-any-return]

    def table(self, key: str, *, optional: bool = False) -> Fields:
        self._asked.add(key)
        if not optional and key not in self._table:
            msg = f"{self.where}: {key} is missing"
            raise TableError(msg)
        return Fields(self._table.get(key, {}), f"{self.where}, {key}")

    def words(
        self, key: str, known: Iterable[str] | None = None, default: tuple[str, ...] | None = None
    ) -> tuple[str, ...]:
        """A list of distinct words, each of which must be in ``known``."""
        values = self.take(key, list, None if default is None else list(default))
        for value in values:
            if type(value) is not str:
                self.fail(key, value, "str is needed")
            if values.count(value) > 1:
                self.fail(key, value, "listed twice")
            if known is not None:
                self.one_of(key, value, known)
        return tuple(values)

    def word(self, key: str, known: Iterable[str], default: str | None = None) -> str:
        return self.one_of(key, self.take(key, str, default), known)

    def every(self, kind: type[T]) -> Mapping[str, T]:
        """All values of a table with arbitrary keys."""
        return MappingProxyType({key: self.take(key, kind) for key in self._table})

    def one_of(self, key: str, value: str, known: Iterable[str]) -> str:
        known = tuple(known)
        if value not in known:
            self.fail(key, value, f"known: {', '.join(known) or 'none'}")
        return value

    def fail(self, key: str, value: object, why: str) -> None:
        msg = f"{self.where}: {key} {value!r}: {why}"
        raise TableError(msg)

    def done(self) -> None:
        """Raises TableError for a key that was not read."""
        for key in self._table:
            if key not in self._asked:
                msg = f"{self.where}: unknown key {key!r}; known: {', '.join(sorted(self._asked)) or 'none'}"
                raise TableError(msg)
