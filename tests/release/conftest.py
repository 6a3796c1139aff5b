"""A small wheel of ours, sound until a test changes it; nothing is compiled for a device."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from release_builders import PACKAGE, Workshop, git, provenance_of, rows

WheelMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="session")
def library(workshop: Workshop) -> bytes:
    return workshop.library(rows(), torch=False, host='extern "C" int flashmoe_cpu_isa() { return 0; }').read_bytes()


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that looks like ours to `verify`: one commit, one lock."""
    root = tmp_path_factory.mktemp("clone")
    (root / "lockfiles").mkdir()
    (root / "lockfiles" / "build.txt").write_text("torch==2.10.0\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        git(root, *command)
    return root


@pytest.fixture
def make_wheel(workshop: Workshop, library: bytes, clone: Path) -> WheelMaker:
    """A wheel with a right RECORD. ``content`` replaces the library, ``record`` the provenance (None: leaves it out)."""

    def make(content: bytes = library, record: dict[str, Any] | str | None = "right", **changes: Any) -> Path:
        stated = provenance_of(library, clone, **changes) if record == "right" else record
        files: dict[str, bytes | str] = {**PACKAGE, "flashmoe/libflashmoe.so": content}
        if stated is not None:
            files["flashmoe/provenance.json"] = json.dumps(stated)
        return workshop.wheel(files)

    return make
