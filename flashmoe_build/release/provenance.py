"""The sources, locks and compilers that a library came from; written into the wheel as flashmoe/provenance.json."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashmoe_build.compile.device import CompiledUnit
from flashmoe_build.compile.toolchain import Toolchain
from flashmoe_build.release.version import find_commit, project_version

SCHEMA = "flashmoe.provenance/1"


def lock_hashes(root: Path) -> dict[str, str]:
    """sha256 of each lock file, by name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((root / "lockfiles").glob("*.txt"))
    }


def provenance(
    units: Sequence[CompiledUnit], *, root: Path, library: Path, toolchain: Toolchain, targets: Sequence[str]
) -> dict[str, Any]:
    commit = find_commit(root)
    return {
        "schema": SCHEMA,
        "version": project_version(root),
        "commit": commit.commit,
        "dirty": commit.dirty,
        "source_date_epoch": commit.source_date_epoch,
        "locks": lock_hashes(root),
        "compilers": {
            "nvrtc": toolchain.nvrtc_version,
            "ptxas": toolchain.ptxas_version,
            "cuda_headers": toolchain.cuda_headers_version,
            "torch_headers": toolchain.torch_version,
            "cxx": f"g++ {toolchain.cxx_version}",
        },
        "platform": toolchain.platform,
        "targets": list(targets),
        "extension_sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
        "binaries": [
            {
                "name": item.unit.name,
                "target": item.unit.target.name,
                "sha256": item.sha256,
                "size": len(item.output),
                "entries": [symbol for _, symbol in item.unit.entries],
            }
            for item in units
        ],
    }
