"""Finds where a source tree declares or defines a function, for the message about an undefined symbol."""

import re
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = frozenset({".h", ".hh", ".hpp", ".cuh", ".inl", ".cu", ".cc", ".cpp", ".cxx"})
MAX_BYTES = 4_000_000


@dataclass(frozen=True)
class Mention:
    """One mention: ``file:line``, and whether a function body follows."""

    place: str
    is_definition: bool


def find_mentions(folder: Path, function: str) -> tuple[Mention, ...]:
    """Declarations and definitions of ``function`` (its last name, no namespace) in the C++ files under ``folder``."""
    pattern = re.compile(rf"(?<![\w.>])(?:\w+::)*{re.escape(function)}\s*(?:<[^;{{}}()]*>)?\s*\(")
    found: list[Mention] = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file()):
        if path.stat().st_size > MAX_BYTES:
            continue
        text = _without_comments(path.read_text(encoding="utf-8", errors="replace"))
        for match in pattern.finditer(text):
            kind = _statement_kind(text, match.start(), match.end())
            if kind is not None:
                line = text.count("\n", 0, match.start()) + 1
                found.append(Mention(f"{path.relative_to(folder.parent)}:{line}", kind == "definition"))
    return tuple(found)


def _without_comments(text: str) -> str:
    """The text with comments blanked out; offsets and line numbers stay the same."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.DOTALL)


def _statement_kind(text: str, start: int, end: int) -> str | None:
    """The kind of statement: declaration, definition, or None for a call, which has no type in front of the name."""
    before = re.split(r"[;{}]", text[:start])[-1]
    before = re.sub(r"^\s*#[^\n]*$", "", before, flags=re.MULTILINE).strip()
    if not re.search(r"[\w>*&]\s*$", before) or re.search(r"\b(?:return|else|throw|new|case)\s*$", before):
        return None
    depth, index = 1, end
    while index < len(text) and depth:
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        index += 1
    after = re.match(r"[^;{]*([;{])", text[index:], flags=re.DOTALL)
    if after is None:
        return None
    return "definition" if after.group(1) == "{" else "declaration"


def default_source(start: Path) -> Path | None:
    """The csrc/ folder at or above ``start``, or None outside a checkout."""
    for folder in (start, *start.parents):
        if (folder / "csrc" / "tables" / "arch.toml").is_file():
            return folder / "csrc"
    return None
