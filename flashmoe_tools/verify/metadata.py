"""The generated files of .dist-info, held against what pyproject.toml of the commit says.

A requirement or an entry point that the commit lacks would be installed with the wheel, so each header is compared, and one that
no build of ours writes is a difference.
"""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Iterable, Mapping
from email.message import Message
from email.parser import Parser
from fnmatch import fnmatch, fnmatchcase
from pathlib import PurePosixPath
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from flashmoe_tools.verify.errors import VerifyError

Headers = dict[str, list[str]]


def wheel_sources(pyproject: bytes, paths: Iterable[str]) -> list[str]:
    """Those of ``paths`` that hatchling packs: below ``packages`` of the wheel target and not below a folder of ``exclude``."""
    try:
        target = tomllib.loads(pyproject.decode())["tool"]["hatch"]["build"]["targets"]["wheel"]
        packages, excluded = (
            [str(name) for name in target["packages"]],
            [str(name) for name in target.get("exclude", ())],
        )
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        msg = "pyproject.toml of the commit names no packages of the wheel ([tool.hatch.build.targets.wheel])"
        raise VerifyError(msg) from error
    folders = [PurePosixPath(pattern).parts for pattern in excluded if pattern.endswith("/")]

    def is_packed(path: str) -> bool:
        parts = PurePosixPath(path).parts
        inside = any(path.startswith(f"{package}/") for package in packages)
        return inside and not any(
            len(parts) > len(folder) and all(map(fnmatchcase, parts, folder)) for folder in folders
        )

    return [path for path in paths if is_packed(path)]


def read_project(pyproject: bytes) -> dict[str, Any]:
    """The project table. Raises VerifyError."""
    try:
        project = tomllib.loads(pyproject.decode()).get("project")
    except (ValueError, RecursionError) as error:
        msg = f"pyproject.toml of the commit cannot be read: {error}"
        raise VerifyError(msg) from error
    if not isinstance(project, dict) or not isinstance(project.get("name"), str):
        msg = "pyproject.toml of the commit names no project"
        raise VerifyError(msg)
    return project


def normalized(name: str) -> str:
    """A distribution's name as file names have it."""
    return re.sub(r"[-_.]+", "_", name).lower()


def expected_headers(project: Mapping[str, Any], version: str, licenses: list[str]) -> Headers:
    """Headers of METADATA that the commit determines, each with its values in any order."""
    extras: Mapping[str, list[str]] = project.get("optional-dependencies", {})
    requirements = [_requirement(text) for text in project.get("dependencies", [])]
    requirements += [_requirement(text, extra) for extra, texts in extras.items() for text in texts]
    license_text = project.get("license")
    headers = {
        "Name": [project["name"]],
        "Version": [version],
        "Summary": [project.get("description", "")],
        "Keywords": [",".join(sorted(project.get("keywords", [])))],
        "License-Expression": [license_text] if isinstance(license_text, str) else [],
        "License-File": licenses,
        "Classifier": list(project.get("classifiers", [])),
        "Requires-Python": [project.get("requires-python", "")],
        "Requires-Dist": requirements,
        "Provides-Extra": list(extras),
        "Project-URL": [f"{label}, {url}" for label, url in project.get("urls", {}).items()],
        "Author": [", ".join(one["name"] for one in project.get("authors", []) if "email" not in one)],
        "Author-email": [
            ", ".join(f"{one['name']} <{one['email']}>" for one in project.get("authors", []) if "email" in one)
        ],
        "Description-Content-Type": ["text/markdown"],
    }
    return {name: sorted(filter(None, values)) for name, values in headers.items()}


def _requirement(text: str, extra: str = "") -> str:
    from packaging.requirements import Requirement

    own = Requirement(text)
    if extra:
        marker = f"({own.marker}) and extra == '{extra}'" if own.marker else f"extra == '{extra}'"
        own = Requirement(f"{str(own).split(';')[0]}; {marker}")
    return str(own)


def differing_headers(metadata: str, expected: Headers) -> list[str]:
    """Headers of METADATA with other values than the commit's."""
    found = Parser().parsestr(metadata)
    names = {name for name in found if name != "Metadata-Version"} | set(expected)
    return sorted(name for name in names if _values(found, name) != expected.get(name, []))


def _values(found: Message, name: str) -> list[str]:
    values = [str(value) for value in found.get_all(name, [])]
    return sorted(_requirement(value) for value in values) if name == "Requires-Dist" else sorted(values)


def description(metadata: str) -> str:
    return str(Parser().parsestr(metadata).get_payload())


def wheel_headers_differ(text: str, tag: str) -> list[str]:
    """Headers of the WHEEL file that a build of ours does not write so."""
    found = Parser().parsestr(text)
    expected = {"Wheel-Version": ["1.0"], "Root-Is-Purelib": ["false"], "Tag": [tag]}
    wrong = [name for name, values in expected.items() if found.get_all(name) != values]
    return wrong + sorted(set(found.keys()) - {*expected, "Generator"})


def expected_entry_points(project: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    groups = {"console_scripts": project.get("scripts", {}), "gui_scripts": project.get("gui-scripts", {})}
    groups.update(project.get("entry-points", {}))
    return {name: dict(entries) for name, entries in groups.items() if entries}


def read_entry_points(text: str) -> dict[str, dict[str, str]]:
    """The entry points of a wheel. Raises VerifyError."""
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    try:
        parser.read_string(text)
    except configparser.Error as error:
        msg = f"entry_points.txt cannot be read: {error}"
        raise VerifyError(msg) from error
    return {section: dict(parser[section]) for section in parser.sections()}


def license_files(project: Mapping[str, Any], tree: Mapping[str, str]) -> list[str]:
    patterns = project.get("license-files", [])
    return sorted(path for path in tree if any(fnmatch(path, pattern) for pattern in patterns))
