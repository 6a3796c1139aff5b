"""The bill of materials that goes into the wheel as .dist-info/sboms/flashmoe.cdx.json (PEP 770): CycloneDX 1.6.

Plain JSON, generated only from provenance.json, so it is as reproducible as that, and `verify` can make it again. A library for one dictionary would add a
dependency to the build's lock and to every `pip wheel`. A test validates it against the schema with cyclonedx-python-lib.
"""

import uuid
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from flashmoe._version import DISTRIBUTION

NAME = "flashmoe.cdx.json"
SPEC = "1.6"
NAMESPACE = uuid.UUID("6f2f4f0a-54a3-5d3c-9d0f-5f0b6a1f8e55")  # of serial numbers: the same wheel has the same one


def bill(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The bill of a wheel with this provenance: compilers as tools, headers and device binaries as components."""
    version, compilers = str(provenance["version"]), provenance["compilers"]
    own = f"pkg:pypi/{DISTRIBUTION}@{version}"
    parts = [
        _headers("nvidia-cuda-runtime-cu12", compilers["cuda_headers"]),
        _headers("torch", compilers["torch_headers"]),
    ]
    binaries = [_binary(row) for row in provenance["binaries"]]
    timestamp = datetime.fromtimestamp(int(provenance["source_date_epoch"]), timezone.utc)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, str(provenance['extension_sha256']))}",
        "version": 1,
        "metadata": {
            "timestamp": timestamp.isoformat(timespec="seconds").replace("+00:00", "Z"),
            "lifecycles": [{"phase": "build"}],
            "tools": {"components": [_nvrtc(compilers), _ptxas(compilers), _cxx(str(compilers["cxx"]))]},
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": DISTRIBUTION,
                "version": version,
                "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "properties": [
                    {"name": "flashmoe:commit", "value": str(provenance["commit"])},
                    {"name": "flashmoe:dirty", "value": str(bool(provenance["dirty"])).lower()},
                    *(
                        {"name": f"flashmoe:lock:{name}:sha256", "value": str(digest)}
                        for name, digest in sorted(provenance["locks"].items())
                    ),
                ],
                "components": [_library(str(provenance["extension_sha256"])), *binaries],
            },
        },
        "components": parts,
        "dependencies": [{"ref": own, "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def _nvrtc(compilers: Mapping[str, Any]) -> dict[str, Any]:
    return _compiler("library", "nvidia-cuda-nvrtc-cu12", compilers["nvrtc"], "NVRTC, the device compiler")


def _ptxas(compilers: Mapping[str, Any]) -> dict[str, Any]:
    return _compiler("application", "nvidia-cuda-nvcc-cu12", compilers["ptxas"], "ptxas, the device assembler")


def _compiler(kind: str, name: str, version: object, description: str) -> dict[str, Any]:
    return {
        "type": kind,
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": str(version),
        "description": description,
        "purl": f"pkg:pypi/{name}@{version}",
    }


def _cxx(stated: str) -> dict[str, Any]:
    name, _, version = stated.partition(" ")
    return {
        "type": "application",
        "bom-ref": f"{name}@{version}",
        "name": name,
        "version": version,
        "description": "host compiler",
    }


def _headers(name: str, version: object) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": str(version),
        "description": "headers that were compiled in; of torch only the stable ABI",
        "purl": f"pkg:pypi/{name}@{version}",
    }


def _library(digest: str) -> dict[str, Any]:
    return {
        "type": "file",
        "bom-ref": "flashmoe/libflashmoe.so",
        "name": "flashmoe/libflashmoe.so",
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }


def _binary(row: Mapping[str, Any]) -> dict[str, Any]:
    label = f"{row['name']}.{row['target']}"
    return {
        "type": "file",
        "bom-ref": f"device/{label}",
        "name": label,
        "description": "device binary embedded in libflashmoe.so",
        "hashes": [{"alg": "SHA-256", "content": str(row["sha256"])}],
    }
