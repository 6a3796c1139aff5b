"""Keeps programs of this package from importing modules in the folder in which they are started.

``python -m`` puts that folder first on sys.path, so an unrelated json.py or elftools.py there would be imported. Python's own
``-P`` (from 3.11 on) leaves it out. Uses only modules that every interpreter has loaded before its first line.
"""

from __future__ import annotations

import os
import sys


def is_started_as_program(arguments: list[str]) -> bool:
    """Whether this is the command line of ``python -m flashmoe...`` or ``python -m flashmoe_tools...``."""
    words = iter(arguments[1:])
    for word in words:
        if not word.startswith("-") or word.startswith("--"):
            return False
        if word in ("-W", "-X"):
            next(words, None)
        elif word.endswith("m"):
            return next(words, "").partition(".")[0] in ("flashmoe", "flashmoe_tools")
    return False


def leave_current_folder() -> None:
    """Remove the current folder from sys.path, unless this package is in it: then its code is what the user wants to run."""
    here, package = _real(os.curdir), _real(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    if here != package:
        sys.path[:] = [entry for entry in sys.path if entry and _real(entry) != here]


def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except OSError:  # the current folder was deleted
        return ""
