"""Standard streams that every program can print to: closed ones lead nowhere, and no character is an error."""

from __future__ import annotations

import io
import os
import sys


def prepare_streams() -> None:
    """For the start of a program. After ``>&-`` the next file that is opened would take descriptor 1 and be printed into."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
