"""Compares the generated files of .dist-info with pyproject.toml of the commit.

A requirement or an entry point that the commit lacks would be installed with the wheel. So each header is compared, and
a header that no build of ours writes is a difference.
"""

import re
from collections.abc import Iterable, Mapping
from email.parser import Parser
from fnmatch import fnmatch, fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from flashmoe_tools.toml import tomllib
from flashmoe_tools.verify.errors import VerifyError

CORE = "2.5"  # hatchling's default


def wheel_sources(pyproject: bytes, paths: Iterable[str]) -> list[str]:
    """The ``paths`` that hatchling packs: under ``packages`` of the wheel target and not under an ``exclude`` folder."""
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
    """A distribution's name as written in file names."""
    return re.sub(r"[-_.]+", "_", name).lower()


def metadata_headers(project: Mapping[str, Any], version: str, licenses: list[str], core: str) -> str:
    """The headers of METADATA as hatchling writes them, in its order; ``core`` is the format version."""
    authors = project.get("authors", [])
    rows = [
        ("Metadata-Version", [core]),
        ("Name", [project["name"]]),
        ("Version", [version]),
        ("Summary", [project.get("description", "")]),
        ("Project-URL", [f"{label}, {url}" for label, url in project.get("urls", {}).items()]),
        ("Author", [", ".join(one["name"] for one in authors if "email" not in one)]),
        ("Author-email", [", ".join(f"{one['name']} <{one['email']}>" for one in authors if "email" in one)]),
        ("License-Expression", [project["license"]] if isinstance(project.get("license"), str) else []),
        ("License-File", licenses),
        ("Keywords", [",".join(sorted(project.get("keywords", [])))]),
        ("Classifier", sorted(project.get("classifiers", []))),
        ("Requires-Python", [project.get("requires-python", "")]),
        ("Requires-Dist", sorted(map(_requirement, project.get("dependencies", [])))),
    ]
    for extra, texts in sorted(project.get("optional-dependencies", {}).items()):
        rows += [("Provides-Extra", [extra]), ("Requires-Dist", sorted(_requirement(text, extra) for text in texts))]
    rows.append(("Description-Content-Type", ["text/markdown"]))
    return "".join(f"{name}: {value}\n" for name, values in rows for value in values if value)


def _requirement(text: str, extra: str = "") -> str:
    from packaging.requirements import Requirement

    own = Requirement(text)
    own.name = re.sub(r"[-_.]+", "-", own.name).lower()
    name, _, marker = str(own).replace('"', "'").partition("; ")
    conditions = [f"({marker})" if extra and marker else marker, f"extra == '{extra}'" if extra else ""]
    return "; ".join(filter(None, [name, " and ".join(filter(None, conditions))]))


def differing_headers(found: str, expected: str) -> list[str]:
    """Headers with other values than expected; "the bytes" if only the bytes differ."""
    texts = [Parser().parsestr(text) for text in (found, expected)]
    names = sorted({name.title() for text in texts for name in text})
    wrong = [name for name in names if texts[0].get_all(name) != texts[1].get_all(name)]
    return wrong or ([] if found == expected else ["the bytes"])


def wheel_text(tag: str, hatchling: str) -> str:
    """The WHEEL file that this hatchling version writes."""
    return f"Wheel-Version: 1.0\nGenerator: hatchling {hatchling}\nRoot-Is-Purelib: false\nTag: {tag}\n"


def entry_points_text(project: Mapping[str, Any]) -> str:
    """The entry_points.txt that hatchling writes; empty if it writes none."""
    groups = {"console_scripts": project.get("scripts", {}), "gui_scripts": project.get("gui-scripts", {})}
    groups.update(sorted(project.get("entry-points", {}).items()))
    parts = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in sorted(entries.items()))
        for group, entries in groups.items()
        if entries
    ]
    return "\n".join(parts)


def record_text(rows: Iterable[tuple[str, str, int]], record: str) -> str:
    """The RECORD file for (member, sha256 in RECORD's notation, bytes), in archive order."""
    lines = [f"{name},sha256={digest},{size}" for name, digest, size in rows]
    return "\n".join([*lines, f"{record},,", ""])


def core_version(pyproject: bytes) -> str:
    """The METADATA version that the commit configures for hatchling, or its default."""
    target = tomllib.loads(pyproject.decode())["tool"]["hatch"]["build"]["targets"]["wheel"]
    return str(target.get("core-metadata-version", CORE))


def pinned(lock: str) -> dict[str, str]:
    """Name and version of each distribution in a lock file."""
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", lock, re.MULTILINE))


def license_files(project: Mapping[str, Any], tree: Mapping[str, str]) -> list[str]:
    patterns = project.get("license-files", [])
    return sorted(path for path in tree if any(fnmatch(path, pattern) for pattern in patterns))
