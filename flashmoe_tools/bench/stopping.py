"""Treats SIGTERM like Ctrl-C, so a long program ends with a report whatever stops it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_signals() -> Iterator[None]:
    """Makes SIGTERM end a run like Ctrl-C. Only the main thread can have handlers; in other threads nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
