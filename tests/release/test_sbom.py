"""The bill of materials: consistent with the provenance, valid CycloneDX, the same for the same wheel."""

import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from release_builders import host_compiler, provenance_of

from flashmoe_tools.sbom import bill


@pytest.fixture
def provenance(library: bytes, clone: Path) -> dict[str, Any]:
    record: dict[str, Any] = provenance_of(library, clone)
    return record


def test_it_is_valid_cyclonedx(provenance: dict[str, Any]) -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill(provenance))) is None


def test_the_validator_would_object(provenance: dict[str, Any]) -> None:
    broken = bill(provenance)
    broken["components"][0]["type"] = "headers"
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(broken)) is not None


def test_it_names_the_compilers_the_headers_and_every_binary(provenance: dict[str, Any]) -> None:
    made = bill(provenance)
    tools = {tool["name"]: tool for tool in made["metadata"]["tools"]["components"]}
    assert {tools[f"nvidia-cuda-{name}-cu12"]["version"] for name in ("nvrtc", "nvcc")} == {"12.8.93"}
    assert f"g++ {tools['g++']['version']}" == host_compiler()
    assert {(part["name"], part["version"]) for part in made["components"]} == {
        ("torch", "2.10.0"),
        ("nvidia-cuda-runtime-cu12", "12.8.90"),
    }
    inside = {part["name"]: part["hashes"][0]["content"] for part in made["metadata"]["component"]["components"]}
    assert inside["flashmoe/libflashmoe.so"] == provenance["extension_sha256"]
    assert inside["attention_bf16.sm_80"] == provenance["binaries"][1]["sha256"]
    assert len(inside) == 1 + len(provenance["binaries"])


def test_the_same_provenance_gives_the_same_text(provenance: dict[str, Any]) -> None:
    assert json.dumps(bill(provenance)) == json.dumps(bill(json.loads(json.dumps(provenance))))
    other = bill({**provenance, "extension_sha256": "0" * 64})
    assert other["serialNumber"] != bill(provenance)["serialNumber"]
