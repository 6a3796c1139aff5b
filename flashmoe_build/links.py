"""The repository's address, and the package's handling of a page's links."""

from pathlib import Path

from flashmoe_tools.links import absolute, rewrite
from flashmoe_tools.toml import tomllib

__all__ = ["ROOT", "absolute", "repository", "rewrite"]

ROOT = Path(__file__).resolve().parent.parent


def repository(root: Path = ROOT) -> str:
    """The address of the repository, from pyproject.toml."""
    with (root / "pyproject.toml").open("rb") as stream:
        return str(tomllib.load(stream)["project"]["urls"]["Source"])
