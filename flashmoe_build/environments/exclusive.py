"""One process at a time: environments and build folders that two sessions would otherwise write at once."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from flashmoe.tools.progress import Progress

POLL_S = 0.2
_held: dict[Path, TextIO] = {}


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the file ``path`` as a lock between processes; says so, again and again, while another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        _take(stream, path)
        yield


def hold_until_exit(path: Path) -> None:
    """Take the lock and keep it as long as this process lives; taking it again in the same process is free.

    For a build folder: the wheel is packed from it after the build has returned.
    """
    path = path.resolve()
    if path in _held:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.open("w")  # open until the process ends, which is the point
    _take(stream, path)
    _held[path] = stream


def _take(stream: TextIO, path: Path) -> None:
    if _try(stream):
        return
    with Progress(f"waiting for another session that is making {path.stem}"):
        while not _try(stream):
            time.sleep(POLL_S)


def _try(stream: TextIO) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
