"""The device binaries inside our extension: section ``.flashmoe.cubins`` and its index ``.flashmoe.index``."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from flashmoe.errors import TableError
from flashmoe_tools.audit.cubin import CubinFacts, read_cubin
from flashmoe_tools.audit.elf import open_elf, read_bytes, section_data
from flashmoe_tools.audit.errors import AuditError, DamagedWheelError, EmbeddedError, NoBinariesError
from flashmoe_tools.audit.guard import parse_json
from flashmoe_tools.audit.ptx import PtxFacts, read_ptx
from flashmoe_tools.fields import Fields

INDEX_SECTION, BINARY_SECTION = ".flashmoe.index", ".flashmoe.cubins"
SCHEMA = "flashmoe.index/1"
ALIGNMENT = 16
AGAIN = "build it again; the link step embeds both sections"


@dataclass(frozen=True)
class Binary:
    """One embedded binary: what the index says about it and what its bytes say; ``error`` if they cannot be read."""

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
        """The entry points that the binary actually holds."""
        if isinstance(self.facts, CubinFacts):
            return frozenset(kernel.name for kernel in self.facts.kernels)
        return frozenset(e.name for e in self.facts.entries) if self.facts is not None else frozenset()


def read_embedded(path: Path) -> tuple[Binary, ...]:
    """Every embedded binary; raises EmbeddedError when a section or the index is missing, damaged or empty."""
    elf = open_elf(read_bytes(path), path.name)
    index, blob = section_data(elf, INDEX_SECTION), section_data(elf, BINARY_SECTION)
    if index is None or blob is None:
        lost = INDEX_SECTION if index is None else BINARY_SECTION
        msg = f"{path.name} has no section {lost}: it contains no device code that the package could find"
        raise EmbeddedError(msg, AGAIN)
    return parse_index(index, blob)


def parse_index(index: bytes, blob: bytes) -> tuple[Binary, ...]:
    """The rows of the index with the binaries in ``blob`` that they name. Raises EmbeddedError."""
    try:
        payload = Fields(parse_json(index.rstrip(b"\0"), "the index of embedded binaries"), "the index")
        schema = payload.take("schema", str)
        if schema != SCHEMA:
            msg = f"the index has schema {schema!r}; this audit reads {SCHEMA!r}"
            raise EmbeddedError(msg, "audit with the flashmoe version that built the file")
        rows = [_binary(Fields(row, "the index, binaries"), blob) for row in payload.take("binaries", list)]
    except (TableError, DamagedWheelError) as error:
        msg = f"the index of embedded binaries cannot be read ({error})"
        raise EmbeddedError(msg, AGAIN) from error
    if not rows:
        msg = "the index of embedded binaries is empty: this file contains no kernel"
        raise NoBinariesError(msg, "check the targets of the build (FLASHMOE_ARCHS)")
    return tuple(rows)


def _binary(row: Fields, blob: bytes) -> Binary:
    offset, size = row.take("offset", int), row.take("size", int)
    name, target, kind = (row.take(key, str) for key in ("name", "target", "kind"))
    content = blob[offset : offset + size]
    facts: CubinFacts | PtxFacts | None = None
    error: AuditError | None = None
    label = f"{name}.{target}"
    try:
        _check_place(label, kind, offset, size, content)
        facts = read_ptx(content, label) if kind == "ptx" else read_cubin(content, label)
    except AuditError as raised:
        error = raised
    return Binary(
        name=name,
        target=target,
        kind=kind,
        offset=offset,
        size=size,
        sha256=row.take("sha256", str),
        entries=row.words("entries"),
        smem_dynamic=row.take("smem_dynamic", int),
        threads=row.take("threads", int),
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
