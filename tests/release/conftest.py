"""A small valid wheel, until a test changes it; nothing is compiled for a device."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from release_builders import Workshop, git, package_of, provenance_of, rows, version_here, write_sources

from flashmoe_tools.sbom import NAME, bill

WheelMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="session")
def library(workshop: Workshop) -> bytes:
    return workshop.library(rows(), torch=False, host='extern "C" int flashmoe_cpu_isa() { return 0; }').read_bytes()


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one commit that `verify` accepts as this project's."""
    root = tmp_path_factory.mktemp("clone")
    write_sources(root)
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        git(root, *command)
    return root


@pytest.fixture
def make_wheel(workshop: Workshop, library: bytes, clone: Path) -> WheelMaker:
    """A wheel with a correct RECORD. ``content`` replaces the library, ``record`` the provenance (None: omits it), ``files``
    adds and replaces members (None: omits one), ``name`` is the file's; other arguments are fields of the provenance."""

    def make(
        content: bytes = library,
        record: dict[str, Any] | str | None = "right",
        files: dict[str, bytes | str | None] | None = None,
        name: str = "",
        version: str = "",
        **changes: Any,
    ) -> Path:
        version = version or version_here(clone)
        stated = provenance_of(library, clone, **{"version": version, **changes}) if record == "right" else record
        sbom = f"flash_moe-{version}.dist-info/sboms/{NAME}"
        of_materials = json.dumps(bill(stated)) if isinstance(stated, dict) else "{}"
        members = {**package_of(version), sbom: of_materials, "flashmoe/libflashmoe.so": content, **(files or {})}
        if stated is not None:
            members["flashmoe/provenance.json"] = stated if isinstance(stated, str) else json.dumps(stated)
        kept = {key: value for key, value in members.items() if value is not None}
        return workshop.wheel_of(kept, name or f"flash_moe-{version}-py3-none-manylinux_2_28_x86_64.whl")

    return make
