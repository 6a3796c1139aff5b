"""Progress of long steps: one rewritten line on a terminal, plain lines in a log, never silent for more than 30 seconds."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

HEARTBEAT_SECONDS = 20.0


class Progress:
    """Counts finished parts of a step and prints its name, the count and the elapsed time.

    Use as a context manager; call :meth:`advance` when a part is done. Safe to call from several threads. ``total`` 0
    means unknown. A background timer prints a line if nothing was printed for ``HEARTBEAT_SECONDS``. A step that is
    usually quick prints nothing in the first ``quiet_for`` seconds.
    """

    def __init__(
        self, what: str, total: int = 0, *, stream: TextIO | None = None, every: float = 2.0, quiet_for: float = 0.0
    ) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._every = 0.1 if self._terminal else every
        self._quiet_for = quiet_for
        self._spoke = False
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._printed = 0.0
        self._detail = ""
        self._width = 0  # of the line that is on the terminal
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._heartbeat, name=f"progress {what}", daemon=True)

    def __enter__(self) -> Progress:
        self._emit(final=False)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        with self._lock:
            self._detail = "" if kind is None else f"stopped: {kind.__name__}"
            self._emit(final=True)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def advance(self, detail: str = "", count: int = 1) -> None:
        with self._lock:
            self.done += count
            self._detail = detail
            if time.monotonic() - self._printed >= self._every:
                self._emit(final=False)

    def note(self, detail: str) -> None:
        """Shows what is being worked on without counting a part as done."""
        self.advance(detail, count=0)

    def _heartbeat(self) -> None:
        while not self._stop.wait(1.0):
            with self._lock:
                if time.monotonic() - self._printed >= (HEARTBEAT_SECONDS if self._spoke else 0.0):
                    self._emit(final=False)

    def _emit(self, *, final: bool) -> None:
        if self.elapsed < self._quiet_for or (final and self._quiet_for and not self._spoke):
            return
        self._spoke = True
        count = f" {self.done}/{self.total}" if self.total else (f" {self.done}" if self.done else "")
        line = f"{self.what}{count} {self.elapsed:.0f}s {self._detail}".rstrip()
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be erased
            # Overwrites the rest of the previous line with blanks: notebooks support the carriage return but no control
            # sequences.
            line, left = line[:width], self._width
            self._width = len(line)
            self._stream.write("\r" + line.ljust(left) + ("\n" if final else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
        self._printed = time.monotonic()
