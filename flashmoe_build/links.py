"""The repository's address, and what the package knows of a page's links."""

import sys
from pathlib import Path

from flashmoe_tools.links import absolute, rewrite

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ROOT", "absolute", "repository", "rewrite"]

ROOT = Path(__file__).resolve().parent.parent


def repository(root: Path = ROOT) -> str:
    """The address of the repository, from pyproject.toml."""
    with (root / "pyproject.toml").open("rb") as stream:
        return str(tomllib.load(stream)["project"]["urls"]["Source"])
