"""The version that a build carries: the release's only where the release's tag stands at a clean commit.

Everything else is a development version that names its commit, so that two builds of different sources never share a file name; nor do a
wheel for all targets and one for some of them.
"""

import re
from collections.abc import Collection, Sequence

MOST_NAMED = 3
_LINE = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


def stated_version(source: str) -> str:
    """The version in the text of flashmoe/_version.py; empty where there is none."""
    match = _LINE.search(source)
    return match[1] if match else ""


def with_version(source: str, version: str) -> str:
    """The text of flashmoe/_version.py with another version: what the wheel holds."""
    return _LINE.sub(f'__version__ = "{version}"', source)


def release_tag(base: str) -> str:
    return f"v{base}"


def version_of(base: str, commit: str, *, dirty: bool, tags: Collection[str], partial: str = "") -> str:
    """``base`` for a clean commit with its tag, else base.dev0+g<commit>, with ``.dirty`` where files differ from the commit.

    ``partial``, see :func:`partial_label`, follows as another local part.
    """
    if not dirty and release_tag(base) in tags:
        return f"{base}+{partial}" if partial else base
    label = f"g{commit[:12]}" if re.fullmatch(r"[0-9a-f]{12,}", commit) else "unknown"
    return f"{base}.dev0+{label}{'.dirty' if dirty else ''}{'.' if partial else ''}{partial}"


def partial_label(targets: Sequence[str]) -> str:
    """What the version of a wheel says that holds these targets alone: ``sm90a``, ``cpu`` for none, the number of many."""
    names = [re.sub(r"[^a-z0-9]", "", target) for target in targets]
    return "cpu" if not names else ".".join(names) if len(names) <= MOST_NAMED else f"{len(names)}targets"
