"""What the release tests build: rows, a provenance, a repository. Nothing is compiled for a device."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "audit"))

from audit_builders import PACKAGE, Row, Workshop

__all__ = ["PACKAGE", "Row", "Workshop", "git", "provenance_of", "rows"]


def rows() -> tuple[Row, ...]:
    """Two device binaries; their content is checked by hash here and read by the audit elsewhere."""
    return tuple(
        Row(f"attention_{dtype}", "sm_80", f"\x7fELF {dtype} ".encode() * 20, (f"kernel_{dtype}",), 1024, 128)
        for dtype in ("f16", "bf16")
    )


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def provenance_of(library: bytes, clone: Path, **changes: Any) -> dict[str, Any]:
    """What the build would have written for this library from the clone's commit."""
    return {
        "schema": "flashmoe.provenance/1",
        "version": "0.1.0",
        "commit": git(clone, "rev-parse", "HEAD"),
        "dirty": False,
        "source_date_epoch": int(git(clone, "log", "-1", "--format=%ct")),
        "locks": {"build.txt": hashlib.sha256((clone / "lockfiles" / "build.txt").read_bytes()).hexdigest()},
        "compilers": {
            "nvrtc": "12.8.93",
            "nvrtc_sha256": "ab" * 32,
            "ptxas": "12.8.93",
            "ptxas_sha256": "cd" * 32,
            "cuda_headers": "12.8.90",
            "torch_headers": "2.10.0",
            "cxx": "g++ 12.2.0",
        },
        "targets": ["sm_80"],
        "extension_sha256": hashlib.sha256(library).hexdigest(),
        "binaries": [
            {"name": row.name, "target": row.target, "sha256": row.digest, "size": len(row.content), "entries": list(row.entries)}
            for row in rows()
        ],
        **changes,
    }  # fmt: skip
