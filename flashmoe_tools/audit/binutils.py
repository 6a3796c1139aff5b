"""nm and c++filt: a second reader of the symbol tables, and demangled names in batches."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmoe_tools.audit.elf import ElfFacts, Symbol
from flashmoe_tools.audit.errors import ToolMissingError

TIMEOUT_SECONDS = 120
INSTALL = "install binutils (Debian, Ubuntu: `apt-get install binutils`; it comes with g++)"


def find_nm() -> str:
    """The path of nm; raises ToolMissingError with the fix."""
    nm = shutil.which("nm")
    if nm is None:
        msg = "nm (binutils) is not on PATH, so there is no second reader to confirm what pyelftools reads"
        raise ToolMissingError(msg, INSTALL)
    return nm


@dataclass(frozen=True)
class Disagreement:
    """Names that only one of the two readers sees, by table."""

    table: str
    only_nm: tuple[str, ...]
    only_elf: tuple[str, ...]


def compare(facts: ElfFacts) -> tuple[Disagreement, ...]:
    """Where nm and pyelftools disagree; empty when they agree. Raises ToolMissingError without nm."""
    tables: list[tuple[str, list[str], Sequence[Symbol]]] = []
    if facts.is_shared:
        tables.append((".dynsym", ["-D"], facts.dynamic))
    if facts.static is not None:
        tables.append((".symtab", [], facts.static))
    found = []
    for name, options, symbols in tables:
        ours = Counter(_row(s.name, defined=s.defined, weak=s.binding == "weak") for s in symbols)
        theirs = Counter(_nm_rows(facts.path, options))
        if ours != theirs:
            found.append(Disagreement(name, tuple(sorted(theirs - ours)), tuple(sorted(ours - theirs))))
    return tuple(found)


def _row(name: str, *, defined: bool, weak: bool) -> str:
    state = "defined" if defined else "undefined"
    return f"{'weak ' if weak else ''}{state} {name.split('@', 1)[0]}"


def _nm_rows(path: Path, options: list[str]) -> Iterable[str]:
    command = [find_nm(), "--format=posix", "--no-sort", *options, "--", str(path)]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        check=False,
        timeout=TIMEOUT_SECONDS,
        env={"LC_ALL": "C", "PATH": ""},
    )
    if result.returncode:
        return [f"nm failed: {result.stderr.strip()[:200]}"]
    return parse_rows(result.stdout)


def parse_rows(text: str) -> list[str]:
    """nm's portable format, one line for each symbol, as `defined name`; a line of another form stays visible."""
    rows = []
    for line in text.splitlines():
        match = re.match(r"(.*?) ([A-Za-z?-])(?: [0-9a-f]+)?(?: [0-9a-f]+)?\s*$", line)
        if match is None:
            rows.append(f"nm line not understood: {line[:120]}")
            continue
        name, letter = match.groups()
        rows.append(_row(name, defined=letter not in "Uwv", weak=letter in "wvWV"))
    return rows


def demangle(names: Iterable[str]) -> dict[str, str]:
    """Mangled -> demangled for each C++ name. Without c++filt a name is kept and marked as mangled."""
    result = {name: name for name in names}
    mangled = [name for name in result if name.startswith("_Z")]
    if not mangled:
        return result
    tool = shutil.which("c++filt")
    if tool is None:
        return {**result, **{name: f"{name} (mangled: c++filt is not installed)" for name in mangled}}
    run = subprocess.run(
        [tool],
        input="\n".join(mangled) + "\n",
        capture_output=True,
        text=True,
        check=False,
        errors="backslashreplace",
        timeout=TIMEOUT_SECONDS,
    )
    lines = run.stdout.splitlines()
    if run.returncode or len(lines) != len(mangled):
        return {**result, **{name: f"{name} (mangled: c++filt failed)" for name in mangled}}
    return {**result, **dict(zip(mangled, lines, strict=True))}
