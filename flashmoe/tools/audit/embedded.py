"""The device binaries inside an extension of ours: section ``.flashmoe.cubins`` and its index ``.flashmoe.index``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe.tools.audit.cubin import CubinFacts, read_cubin
from flashmoe.tools.audit.elf import open_elf, read_bytes, section_data
from flashmoe.tools.audit.errors import AuditError, EmbeddedError, NoBinariesError
from flashmoe.tools.audit.ptx import PtxFacts, read_ptx

INDEX_SECTION, BINARY_SECTION = ".flashmoe.index", ".flashmoe.cubins"
SCHEMA = "flashmoe.index/1"
ALIGNMENT = 16


@dataclass(frozen=True)
class Binary:
    """One embedded binary as the index states it, and what its bytes say; ``error`` when they cannot be read."""

    name: str
    target: str
    kind: str
    offset: int
    size: int
    sha256: str
    entries: tuple[str, ...]
    smem_dynamic: int
    threads: int
    actual_sha256: str
    facts: CubinFacts | PtxFacts | None
    error: AuditError | None = None

    @property
    def label(self) -> str:
        return f"{self.name}.{self.target}"

    @property
    def symbols(self) -> frozenset[str]:
        """The entries that the binary actually holds."""
        if isinstance(self.facts, CubinFacts):
            return frozenset(kernel.name for kernel in self.facts.kernels)
        return frozenset(e.name for e in self.facts.entries) if self.facts is not None else frozenset()


def read_embedded(path: Path) -> tuple[Binary, ...]:
    """Every embedded binary; raises EmbeddedError when a section or the index is missing, damaged or empty."""
    elf = open_elf(read_bytes(path), path.name)
    index, blob = section_data(elf, INDEX_SECTION), section_data(elf, BINARY_SECTION)
    again = "build it again; the link step embeds both sections"
    if index is None or blob is None:
        lost = INDEX_SECTION if index is None else BINARY_SECTION
        msg = f"{path.name} has no section {lost}: it holds no device code that the package could find"
        raise EmbeddedError(msg, again)
    try:
        payload = json.loads(index.rstrip(b"\0"))
        if payload["schema"] != SCHEMA:
            msg = f"the index has schema {payload['schema']!r}; this audit reads {SCHEMA!r}"
            raise EmbeddedError(msg, "audit with the flashmoe version that built the file")
        rows = [_binary(row, blob) for row in payload["binaries"]]
    except (ValueError, KeyError, TypeError) as error:
        msg = f"the index of embedded binaries cannot be read ({type(error).__name__}: {error})"
        raise EmbeddedError(msg, again) from error
    if not rows:
        msg = "the index of embedded binaries is empty: this file holds no kernel"
        raise NoBinariesError(msg, "check the targets of the build (FLASHMOE_ARCHS)")
    return tuple(rows)


def _binary(row: Mapping[str, Any], blob: bytes) -> Binary:
    offset, size, kind = int(row["offset"]), int(row["size"]), str(row["kind"])
    content = blob[offset : offset + size]
    facts: CubinFacts | PtxFacts | None = None
    error: AuditError | None = None
    label = f"{row['name']}.{row['target']}"
    try:
        _check_place(label, kind, offset, size, content)
        facts = read_ptx(content, label) if kind == "ptx" else read_cubin(content, label)
    except AuditError as raised:
        error = raised
    return Binary(
        name=str(row["name"]),
        target=str(row["target"]),
        kind=kind,
        offset=offset,
        size=size,
        sha256=str(row["sha256"]),
        entries=tuple(row["entries"]),
        smem_dynamic=int(row["smem_dynamic"]),
        threads=int(row["threads"]),
        actual_sha256=hashlib.sha256(content).hexdigest(),
        facts=facts,
        error=error,
    )


def _check_place(label: str, kind: str, offset: int, size: int, content: bytes) -> None:
    problem = ""
    if kind not in ("cubin", "ptx"):
        problem = f"is of kind {kind!r}, neither cubin nor ptx"
    elif offset < 0 or size <= 0 or len(content) != size:
        problem = f"the index places it at {offset} with {size} bytes, but the section holds {len(content)} of them"
    elif offset % ALIGNMENT:
        problem = f"lies at {offset}, not on a {ALIGNMENT}-byte boundary"
    if problem:
        msg = f"{label} {problem}"
        raise EmbeddedError(msg, "build it again; index and section were not written together")
