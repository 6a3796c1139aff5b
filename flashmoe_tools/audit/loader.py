"""The last rung: this machine's loader maps and relocates the file, in a child that may only read (sandbox.py).

The loader is asked to list what the file brings in and to bind every symbol (`ldd -r`, without its shell script). It
runs no constructor and no resolver of the file. Its word can only add a failure: nothing that it says turns one into a pass.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flashmoe_tools.audit import sandbox
from flashmoe_tools.audit.context import Context, failed, listing, passed, skipped
from flashmoe_tools.audit.lookup import look_up
from flashmoe_tools.report import Check

LOADER = Path("/lib64/ld-linux-x86-64.so.2")
TIMEOUT_SECONDS = 60
_UNDEFINED = re.compile(r"undefined symbol: ([^\s,]+)(?:, version \S+)?\s+\((.*)\)")
_REFUSED = re.compile(r"error while loading shared libraries|version `.*' not found|symbol lookup error|Inconsistency")
_PYTHON_NAME = re.compile(r"_?Py[A-Z_]\w*")


@dataclass(frozen=True)
class Answer:
    """What the loader said: why it refuses the file, the names that it found nowhere, or why it was not asked."""

    refusal: str = ""
    undefined: tuple[tuple[str, str], ...] = ()  # name, path of the file that wants it
    libraries: int = 0
    not_asked: str = ""


def check_loader(context: Context) -> list[Check]:
    name, path = "the loader", context.facts.path
    if context.facts.machine != platform.machine():
        return [
            skipped(name, f"not asked: the file is for {context.facts.machine}, this machine is {platform.machine()}")
        ]
    if context.closure.absent:
        return [skipped(name, f"not asked: {listing(context.closure.absent)} is not on this machine")]
    newer = sorted({symbol.version for symbol in look_up(context).floor})
    if newer:
        return [skipped(name, f"not asked: this machine's libraries are older than {listing(newer)}")]
    folders = [*context.resolver.folders()]
    if context.torch is not None:
        folders += {library.parent: None for library in context.torch.libraries.values()}
    answer = ask(path, tuple(dict.fromkeys(folders)))
    if answer.not_asked:
        return [skipped(name, f"not asked: {answer.not_asked}")]
    refusal = answer.refusal or _contradiction(context, answer)
    if refusal:
        return [
            failed(
                name,
                found=refusal,
                expected="it maps and relocates the file",
                why="Importing it fails in the same way, or crashes the interpreter.",
                cause="a table that the loader reads is damaged or was edited, or a library is another than it was linked with",
                next_step="link the file again; if it stays, compare `readelf -Wld` and `readelf -WV` with a fresh build",
            )
        ]
    told = f"maps and relocates it with {answer.libraries} libraries; no code of it ran"
    missing = sorted(
        {symbol for symbol, _ in answer.undefined if not _PYTHON_NAME.fullmatch(symbol)} & _judged(context)
    )
    if missing:
        told = f"maps it, and misses {listing(missing)}, which the checks above have judged; no code of it ran"
    return [passed(name, told)]


def _contradiction(context: Context, answer: Answer) -> str:
    """Names that the loader misses although the tables say where they are. The others have been judged.

    Of the file itself, and of libraries bundled with it; extensions beside it are audited on their own.
    """
    judged = _judged(context)
    lost = [
        f"{name} ({Path(user).name})"
        for name, user in answer.undefined
        if (Path(user).name == context.facts.path.name or Path(user).parent.name.endswith(".libs"))
        and name not in judged
        and not _PYTHON_NAME.fullmatch(name)
    ]
    return f"undefined symbol: {listing(lost)}" if lost else ""


def _judged(context: Context) -> set[str]:
    return {s.name for s in context.facts.undefined if not context.closure.gives(s)}


def ask(path: Path, folders: tuple[Path, ...] = ()) -> Answer:
    """Have the loader map and relocate ``path``, with ``folders`` before its own search path."""
    if sys.platform != "linux" or not LOADER.is_file():
        return Answer(not_asked=f"this machine has no {LOADER.name}")
    if os.statvfs(path).f_flag & os.ST_NOEXEC:
        return Answer(not_asked="the folder is mounted noexec, where the loader maps nothing")
    words = [str(LOADER), "--library-path", ":".join(map(str, folders)), str(path.resolve())]
    variables = {"LD_TRACE_LOADED_OBJECTS": "1", "LD_WARN": "yes", "LD_BIND_NOW": "yes", "LC_ALL": "C"}
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", sandbox.__file__, *words],
                env={f"{sandbox.PREFIX}{key}": value for key, value in variables.items()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer(refusal=f"no answer within {TIMEOUT_SECONDS} s")
        output.seek(0)
        text = output.read().decode("utf-8", "backslashreplace")
    return _understood(done.returncode, text, path)


def _understood(status: int, text: str, path: Path) -> Answer:
    lines = [line.strip() for line in text.splitlines()]
    if status == sandbox.REFUSED:
        return Answer(
            not_asked=f"the sandbox could not be set up ({listing(lines[-1:])}); it is never loaded outside one"
        )
    if status < 0:
        return Answer(refusal=f"the loader crashed on it ({signal.Signals(-status).name})")
    refusals = [line for line in lines if _REFUSED.search(line)]
    if status or refusals:
        return Answer(refusal=_plain((refusals or lines or [f"exit code {status}"])[0], path))
    undefined = tuple((m[1], m[2]) for m in map(_UNDEFINED.fullmatch, lines) if m is not None)
    return Answer(undefined=undefined, libraries=sum(" => " in line for line in lines))


def _plain(line: str, path: Path) -> str:
    """The loader's line without its own name in front and without folders of this machine."""
    text = line.split("error while loading shared libraries: ", 1)[-1]
    return re.sub(r"/\S*/(?=[^/\s])", "", text.replace(str(path.resolve()), path.name))[:300]
