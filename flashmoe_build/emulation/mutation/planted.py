"""A planted bug: a textual patch of a kernel source, written by hand (TOML) or made by a rule (generate.py)."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmoe.errors import TableError
from flashmoe_build.emulation.build import CACHE, CSRC, REPOSITORY
from flashmoe_tools.toml import tomllib

BY_HAND = tuple(
    sorted(
        [
            *(REPOSITORY / "tests" / "emulation").glob("mutants/*.toml"),
            *(REPOSITORY / "flashmoe_tools" / "operations").glob("*/emulation/mutants/*.toml"),
        ]
    )
)


@dataclass(frozen=True)
class Mutant:
    """One planted bug. ``anchor`` becomes ``replacement`` in ``file`` (relative to csrc).

    A hand-written bug's anchor occurs exactly once in the file, ignoring white space; a generated one is at the offset ``at``.
    """

    name: str
    what: str
    file: str
    anchor: str
    replacement: str
    kernels: tuple[str, ...]  # names or labels of units: the suite of one of them must notice the bug
    fast: bool = False  # part of the test suite, not only of the full hunt
    at: int | None = None
    rank: int = 0  # 0: synchronisation, or by hand; these are hunted first

    @property
    def seeds(self) -> int:
        """Extra seeds for each case: a hand-written bug may need a different timing than the suite's."""
        return 4 if self.at is None else 0

    @property
    def digest(self) -> str:
        """Hash of the patch: a result recorded for a different patch does not count."""
        words = (self.file, " ".join(self.anchor.split()), self.replacement)
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def load_mutants(paths: Sequence[Path] = BY_HAND) -> tuple[Mutant, ...]:
    """The hand-written bugs. Each table maps a source file to bugs as [what, anchor, replacement], optionally followed by a table of
    further fields; a file's kernels apply to every bug that names none."""
    return tuple(mutant for path in paths for mutant in _load(path))


def _load(path: Path) -> Iterator[Mutant]:
    for file, parts in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for part in parts:
            kernels = part.pop("kernels")
            for name, (what, anchor, replacement, *more) in part.items():
                stated = {"kernels": kernels, **(more[0] if more else {})}
                yield Mutant(name, what, file, anchor, replacement, **{**stated, "kernels": tuple(stated["kernels"])})


def anchor_pattern(anchor: str) -> re.Pattern[str]:
    """The anchor as a pattern that ignores how a formatter sets white space."""
    words = (re.escape(word).replace(r"\(", r"\(\s*") for word in anchor.split())
    return re.compile(r"\s+".join(words))


def patched(mutant: Mutant) -> str:
    """The source with the bug applied; raises TableError if the anchor is not where it should be."""
    text = (CSRC / mutant.file).read_text(encoding="utf-8")
    if mutant.at is None:
        spans = [match.span() for match in anchor_pattern(mutant.anchor).finditer(text)]
    else:
        end = mutant.at + len(mutant.anchor)
        spans = [(mutant.at, end)] if text[mutant.at : end] == mutant.anchor else []
    if len(spans) != 1:
        msg = (
            f"mutant {mutant.name}: its anchor occurs {len(spans)} times in csrc/{mutant.file}; "
            "bring the TOML row that plants it up to date"
        )
        raise TableError(msg)
    start, end = spans[0]
    lost = text.count("\n", start, end) - mutant.replacement.count("\n")  # call sites keep their lines
    return text[:start] + mutant.replacement + "\n" * max(0, lost) + text[end:]


def overlay(mutant: Mutant) -> Path:
    """A folder that holds the patched file under its usual name."""
    folder = CACHE / "mutants" / mutant.name
    target = folder / mutant.file
    target.parent.mkdir(parents=True, exist_ok=True)
    text = patched(mutant)
    if not target.is_file() or target.read_text(encoding="utf-8") != text:
        target.write_text(text, encoding="utf-8")
    return folder
