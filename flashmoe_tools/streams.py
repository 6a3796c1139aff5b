"""Standard streams that every program can print to: closed ones discard, and no character causes an error."""

import io
import os
import re
import sys
from typing import TextIO

from flashmoe_tools.report import Verdict

_COLOURS = {Verdict.PASS: 32, Verdict.WARN: 33, Verdict.UNPROVED: 33, Verdict.FAIL: 31, Verdict.SKIP: 36}


def prepare_streams() -> None:
    """Call at the start of a program. After ``>&-`` the next opened file would get descriptor 1 and be printed into."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def show(text: str, stream: TextIO | None = None) -> None:
    """Prints lines; on a terminal a verdict at the start of a line is in colour. NO_COLOR and TERM=dumb are respected."""
    out = stream if stream is not None else sys.stdout
    if out.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR"):
        for verdict, colour in _COLOURS.items():
            text = re.sub(rf"^{verdict}(?= )", f"\x1b[{colour}m{verdict}\x1b[0m", text, flags=re.MULTILINE)
    encoding = getattr(out, "encoding", None) or "utf-8"  # an ASCII log still gets every line
    out.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
