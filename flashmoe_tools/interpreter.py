"""Commands that can be typed: replaces ``python`` in a report by the interpreter that runs this program."""

import re
import shlex
import shutil
import sys
from pathlib import Path

COMMAND = re.compile(r"(?<![\w/.-])python(?= -m flashmoe)")


def interpreter() -> str:
    """``python`` if that is this interpreter, else its path; relative if it is below the current folder."""
    found, path = shutil.which("python"), Path(sys.executable)  # links stay: they distinguish environments
    if found and Path(found).absolute() == path.absolute():
        return "python"
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def runnable(text: str) -> str:
    """``text`` with ``python -m flashmoe...`` as a command that works in this terminal. Reports keep the plain word."""
    return COMMAND.sub(lambda _: interpreter(), text)
