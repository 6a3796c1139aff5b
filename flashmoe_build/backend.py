"""The PEP 517 backend: hatchling's, except that it requests compilers and torch only when something is compiled.

``pip install -e .`` therefore takes seconds: it links the checkout's package, which loads the library that ``./nox -s build`` puts
into build/lib.
"""

from pathlib import Path
from typing import Any

from hatchling import build as hatchling
from hatchling.build import build_editable, build_sdist, build_wheel, get_requires_for_build_sdist

from flashmoe_tools.toml import tomllib

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

ROOT = Path(__file__).resolve().parents[1]


def compile_requirements(root: Path = ROOT) -> list[str]:
    """Requirements for compiling, in addition to the backend itself, from pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return list(project["tool"]["flashmoe"]["compile-requires"])


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*hatchling.get_requires_for_build_wheel(config_settings), *compile_requirements()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    # Except the library needed only for links to several folders
    return hatchling.get_requires_for_build_wheel(config_settings)
