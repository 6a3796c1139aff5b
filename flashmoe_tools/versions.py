"""The version that a build carries: the release's only if the release's tag is at a clean commit.

Anything else is a development version that names its commit, so builds of different sources never share a file name.
Neither do a wheel for all targets and one for only some of them.
"""

import re
from collections.abc import Collection, Sequence

MOST_NAMED = 3
_LINE = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


def stated_version(source: str) -> str:
    """The version in the text of flashmoe/_version.py, or an empty text."""
    match = _LINE.search(source)
    return match[1] if match else ""


def with_version(source: str, version: str) -> str:
    """The text of flashmoe/_version.py with another version, as the wheel contains it."""
    return _LINE.sub(f'__version__ = "{version}"', source)


def release_tag(base: str) -> str:
    return f"v{base}"


def version_of(base: str, commit: str, *, dirty: bool, tags: Collection[str], partial: str = "") -> str:
    """``base`` for a clean commit with its tag, else base.dev0+g<commit>, with ``.dirty`` if files differ from it.

    ``partial`` is appended as another local part, see :func:`partial_label`.
    """
    if not dirty and release_tag(base) in tags:
        return f"{base}+{partial}" if partial else base
    label = f"g{commit[:12]}" if re.fullmatch(r"[0-9a-f]{12,}", commit) else "unknown"
    return f"{base}.dev0+{label}{'.dirty' if dirty else ''}{'.' if partial else ''}{partial}"


def partial_label(targets: Sequence[str]) -> str:
    """Version label of a wheel for only these targets: ``sm90a``, ``cpu`` for none, or the number if there are many."""
    names = [re.sub(r"[^a-z0-9]", "", target) for target in targets]
    return "cpu" if not names else ".".join(names) if len(names) <= MOST_NAMED else f"{len(names)}targets"
