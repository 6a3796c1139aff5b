"""Relative links of a page, for readers who are not in the repository: the long description and the documentation site.

In the package, as ``verify`` makes the long description again.
"""

import re
from collections.abc import Callable
from pathlib import PurePosixPath
from posixpath import normpath

LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?(?P<after>\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def rewrite(text: str, change: Callable[[str], str]) -> str:
    """``text`` with every relative link target replaced by ``change(target)``; code blocks stay as they are."""

    def replace(match: re.Match[str]) -> str:
        target = match["target"]
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        return f"{match['before']}{change(target)}{match['anchor'] or ''}{match['after']}"

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(replace, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(replace, text[end:])])


def absolute(text: str, folder: str, ref: str, home: str) -> str:
    """The page of ``folder`` (a path in the repository, "" for its root) with links into the repository at ``ref``."""

    def change(target: str) -> str:
        path = normpath(PurePosixPath(folder, target).as_posix())
        is_file = (
            bool(PurePosixPath(path).suffix) or path.isupper()
        )  # LICENSE; not looked up: an sdist lacks some folders
        kind = "raw" if path.endswith(".svg") else "blob" if is_file else "tree"
        return f"{home}/{kind}/{ref}/{path}"

    return rewrite(text, change)


def long_description(readme: str, version: str, home: str) -> str:
    """README.md as the long description: its links lead into the repository, at the tag of this version."""
    return absolute(readme, "", f"v{version}", home)
