"""A content-addressed store of finished compilations, and the include closure that goes into its keys."""

import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flashmoe.errors import BuildError

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@lru_cache(maxsize=1024)
def _includes(path: Path, _modified_and_size: tuple[int, int]) -> tuple[str, ...]:
    return tuple(_INCLUDE.findall(path.read_text(encoding="utf-8")))


def _direct_includes(path: Path) -> tuple[str, ...]:
    status = path.stat()
    return _includes(path, (status.st_mtime_ns, status.st_size))


def include_closure(text: str, roots: Iterable[Path], own: Path | None = None) -> tuple[Path, ...]:
    """Every file under ``roots`` that ``text`` includes with quotes, directly or through another, sorted."""
    folders = [*roots, *([own] if own else [])]
    found: set[Path] = set()
    pending = [(name, own) for name in _INCLUDE.findall(text)]
    while pending:
        name, beside = pending.pop()
        for folder in [*([beside] if beside else []), *folders]:
            path = folder / name
            if path.is_file():
                path = path.resolve()
                if path not in found:
                    found.add(path)
                    pending += [(inner, path.parent) for inner in _direct_includes(path)]
                break
    return tuple(sorted(found))


def content_key(text: str, files: Iterable[Path], base: Path, facts: Mapping[str, Any]) -> str:
    """sha256 over the source, each included file's name and content, and ``facts`` (options, compiler hash)."""
    digest = hashlib.sha256()
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    digest.update(text.encode())
    for path in files:
        name = path.relative_to(base) if path.is_relative_to(base) else Path(path.name)
        digest.update(f"\0{name.as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Cache:
    """Files by key. An entry is either complete or absent, even when two builds write it at once."""

    folder: Path

    def path(self, key: str, suffix: str) -> Path:
        return self.folder / key[:2] / f"{key}{suffix}"

    def load(self, key: str, suffix: str) -> tuple[bytes, dict[str, Any]] | None:
        """The stored output and its facts; None if absent or damaged (it is then rebuilt)."""
        try:
            output = self.path(key, suffix).read_bytes()
            facts = json.loads(self.path(key, ".json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(facts, dict) or facts.get("sha256") != hashlib.sha256(output).hexdigest():
            return None
        return output, facts

    def get(
        self, key: str, suffix: str, make: Callable[[], tuple[bytes, Mapping[str, Any]]]
    ) -> tuple[bytes, dict[str, Any], bool]:
        """The output, its facts, and whether it was cached; ``make`` produces a missing one.

        Two concurrent builds that need the same output, as in .ci/run, make it once: the second waits and then finds it.
        """
        known = self.load(key, suffix)
        if known is not None:
            return *known, True
        folder = self.path(key, "").parent
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks: both builds make it
                fcntl.flock(held, fcntl.LOCK_EX)
            known = self.load(key, suffix)
            if known is not None:
                return *known, True
            self.store(key, suffix, *make())
            known = self.load(key, suffix)
        finally:
            os.close(held)
        if known is None:
            msg = f"{self.path(key, suffix)} could not be written to the cache; is the disk full?"
            raise BuildError(msg)
        return *known, False

    def store(self, key: str, suffix: str, output: bytes, facts: Mapping[str, Any]) -> None:
        complete = {**facts, "sha256": hashlib.sha256(output).hexdigest()}
        self._write(self.path(key, suffix), output)
        self._write(self.path(key, ".json"), json.dumps(complete, indent=1).encode())

    def _write(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            Path(temporary).replace(path)
        except BaseException:  # a full disk, Ctrl-C: otherwise half a file would remain, which nothing reads
            Path(temporary).unlink(missing_ok=True)
            raise
