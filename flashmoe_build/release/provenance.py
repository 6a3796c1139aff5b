"""Which sources, locks and compilers a library came from; written into the wheel as flashmoe/provenance.json."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashmoe._version import __version__
from flashmoe_build.compile.device import CompiledUnit
from flashmoe_build.compile.toolchain import Toolchain

SCHEMA = "flashmoe.provenance/1"
COMMIT_FILE = "COMMIT.json"  # in an sdist, which has no repository
UNKNOWN_EPOCH = 315532800  # 1980-01-01, the earliest time that a zip can hold


@dataclass(frozen=True)
class Commit:
    """The sources' commit; ``dirty`` when tracked files differ from it or untracked ones could affect the build."""

    commit: str
    dirty: bool
    source_date_epoch: int


def find_commit(root: Path) -> Commit:
    """From git, else from the sdist's own record, else unknown and dirty."""
    head = _git(root, "rev-parse", "HEAD")
    if head is not None and _git(root, "rev-parse", "--show-prefix") == "":
        status = _git(root, "status", "--porcelain", "--untracked-files=normal")
        epoch = _git(root, "log", "-1", "--format=%ct")
        return Commit(head, dirty=bool(status), source_date_epoch=int(epoch or UNKNOWN_EPOCH))
    try:
        return Commit(**json.loads((root / COMMIT_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Commit("unknown", dirty=True, source_date_epoch=int(os.environ.get("SOURCE_DATE_EPOCH", UNKNOWN_EPOCH)))


def commit_json(commit: Commit) -> str:
    return json.dumps(asdict(commit), indent=1) + "\n"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", *arguments],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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
        "version": __version__,
        **asdict(commit),
        "locks": lock_hashes(root),
        "compilers": {
            "nvrtc": toolchain.nvrtc_version,
            "nvrtc_sha256": toolchain.nvrtc_sha256,
            "ptxas": toolchain.ptxas_version,
            "ptxas_sha256": toolchain.ptxas_sha256,
            "cuda_headers": toolchain.cuda_headers_version,
            "torch_headers": toolchain.torch_version,
            "cxx": f"g++ {toolchain.cxx_version}",
        },
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
