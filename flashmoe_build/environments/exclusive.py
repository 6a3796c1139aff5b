"""Locks between processes, for environments and build folders that two sessions might otherwise write at once."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from flashmoe_tools.progress import Progress

POLL_S = 0.2
_held: dict[Path, TextIO] = {}


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the file ``path`` as a lock between processes; prints a line regularly while another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        _take(stream, path)
        yield


def hold_until_exit(path: Path) -> None:
    """Take the lock and keep it until this process ends; taking it again in the same process does nothing.

    For a build folder, because the wheel is packed from it after the build has returned.
    """
    path = path.resolve()
    if path in _held:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.open("w")  # deliberately open until the process ends
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
