"""A wheel's content and what it says about itself. All of it is untrusted: parsed with types, never believed."""

import hashlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe_tools.audit.elf import open_elf, section_data
from flashmoe_tools.audit.embedded import Binary, read_embedded
from flashmoe_tools.audit.errors import AuditError, NoBinariesError
from flashmoe_tools.audit.guard import parse_json
from flashmoe_tools.audit.inputs import Wheel, unpack
from flashmoe_tools.audit.wheels import check_provenance, check_record
from flashmoe_tools.report import Check, Verdict
from flashmoe_tools.verify.errors import VerifyError
from flashmoe_tools.versions import partial_label

PACKAGE = "flashmoe"  # the folder that is imported, whatever the distribution's name
LIBRARY = f"{PACKAGE}/lib{PACKAGE}.so"
RECORD = f"{PACKAGE}/provenance.json"
SCHEMA = "flashmoe.provenance/1"
FIELDS = (
    *("schema", "version", "commit", "dirty", "source_date_epoch", "locks", "compilers", "platform", "targets"),
    *("extension_sha256", "binaries"),
)
MACHINES = {62: "x86_64", 183: "aarch64"}  # ELF's e_machine
# Packages in lockfiles/build.txt, by their name among the compilers of provenance.json.
PINNED = {
    "nvrtc": "nvidia-cuda-nvrtc-cu12",
    "ptxas": "nvidia-cuda-nvcc-cu12",
    "cuda_headers": "nvidia-cuda-runtime-cu12",
    "torch_headers": "torch",
}
UNTRUSTED = "An untrusted file that cannot be read is not one to install."


@dataclass(frozen=True)
class Stated:
    """The fields of the wheel's provenance that are used."""

    version: str
    commit: str
    dirty: bool
    epoch: int
    locks: Mapping[str, str]  # sha256 of each file in lockfiles/, by name
    compilers: Mapping[str, str]
    cxx: str
    targets: tuple[str, ...]
    platform: str
    record: Mapping[str, Any]

    @property
    def partial(self) -> str:
        """The last local part of the version if it names the targets, as in a wheel for only some of them."""
        label = partial_label(self.targets)
        return label if self.version.endswith((f"+{label}", f".{label}")) else ""


@dataclass(frozen=True)
class Content:
    """A wheel of ours: its provenance, the hash of every member, and its device binaries."""

    wheel: Wheel
    sha256: str
    stated: Stated
    members: Mapping[str, str]
    binaries: tuple[Binary, ...]

    @property
    def machine(self) -> str:
        """The machine that the library's ELF header names."""
        return MACHINES.get(int.from_bytes(self.read(LIBRARY)[18:20], "little"), "x86_64")

    @property
    def cubins(self) -> dict[str, str]:
        """sha256 of the embedded bytes, by name and target."""
        return {binary.label: binary.actual_sha256 for binary in self.binaries}

    def read(self, name: str) -> bytes:
        with zipfile.ZipFile(self.wheel.path) as archive:
            return archive.read(name)


def read_wheel(path: Path, scratch: Path) -> Content:
    """Opens a wheel of ours. Raises VerifyError for another project's, AuditError for a damaged one."""
    wheel = unpack(path, scratch)
    if LIBRARY not in wheel.names:
        msg = f"{path.name} has no {LIBRARY}, so it is not a wheel of flashmoe; `python -m flashmoe audit` accepts any wheel"
        raise VerifyError(msg)
    stated = read_stated(wheel.other.get(RECORD), path.name)
    with zipfile.ZipFile(path) as archive:
        members = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in wheel.names}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Content(wheel, digest, stated, members, device_binaries(wheel.root / LIBRARY))


def device_binaries(library: Path) -> tuple[Binary, ...]:
    """The embedded binaries; empty for a CPU-only build. Raises AuditError."""
    try:
        return read_embedded(library)
    except NoBinariesError:
        return ()


def read_stated(content: bytes | None, wheel: str) -> Stated:
    """The provenance record, with the types of all fields checked. Raises VerifyError."""
    try:
        record = parse_json(content, RECORD) if content is not None else None
    except AuditError:
        record = None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        msg = f"{wheel} has no readable {RECORD}, so its commit and compilers are unknown; build it again"
        raise VerifyError(msg)
    binaries = _field(record, "binaries", list)
    for row in binaries:
        for name in ("name", "target", "sha256"):
            _field(row if isinstance(row, dict) else {}, name, str, "binaries.")
    targets = _field(record, "targets", list)
    if not all(isinstance(target, str) for target in targets):
        msg = f"{RECORD}: targets contains something that is not a name; build the wheel again"
        raise VerifyError(msg)
    locks, compilers = _field(record, "locks", dict), _field(record, "compilers", dict)
    return Stated(
        version=_field(record, "version", str),
        commit=_field(record, "commit", str),
        dirty=_field(record, "dirty", bool),
        epoch=_field(record, "source_date_epoch", int),
        locks={name: _field(locks, name, str, "locks.") for name in locks},
        compilers={name: _field(compilers, name, str, "compilers.") for name in compilers},
        cxx=_field(compilers, "cxx", str, "compilers."),
        targets=tuple(targets),
        platform=_field(record, "platform", str),
        record=record,
    )


def _field(record: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    value = record.get(name)
    if type(value) is not kind:
        msg = f"{RECORD}: {where}{name} is of type {type(value).__name__}, not {kind.__name__}; build the wheel again"
        raise VerifyError(msg)
    return value


def check_content(content: Content) -> list[Check]:
    """The checks that need only the file: that it is consistent, which does not prove where it came from."""
    library = content.wheel.root / LIBRARY
    return [
        *guarded("wheel record", lambda: check_record(content.wheel)),
        *guarded("provenance", lambda: check_provenance(content.stated.record, library, content.binaries)),
        *guarded("platform and host compiler", lambda: [check_host(content)]),
    ]


def check_host(content: Content) -> Check:
    """Compares the platform with the library's header, and the host compiler with the note it leaves in every object."""
    stated, library = content.stated, content.read(LIBRARY)
    note = section_data(open_elf(library, LIBRARY), ".comment") or b""
    notes = [text.decode("utf-8", "replace") for text in note.split(b"\0") if text]
    own = [f"g++ {text.rsplit(' ', 1)[-1]}" for text in notes]
    name, shown = "platform and host compiler", f"{stated.platform}, {stated.cxx}"
    if stated.platform != content.machine or stated.cxx not in own:
        why, step = "The record contradicts the file, so it was edited.", "do not install this file"
        expected = f"{content.machine}, {' or '.join(own) or 'a compiler'}, as in the library"
        return Check(name, Verdict.FAIL, shown, expected, why, step)
    further = sorted({*stated.record, *stated.compilers} - {*FIELDS, *PINNED, "cxx"})
    if further:
        why = "Nothing in the file or the commit says whether they are right."
        step = "verify with the flashmoe of that commit"
        return Check(name, Verdict.UNPROVED, f"{RECORD} has {further[:8]}, too", "known fields", why, step)
    return Check(name, Verdict.PASS, f"{shown}, as in the library")


def guarded(name: str, check: Callable[[], Sequence[Check]]) -> Sequence[Check]:
    """The checks, or one FAIL that says why the untrusted content could not be read, whatever was raised."""
    try:
        return check()
    except (VerifyError, AuditError) as error:
        return [
            Check(name, Verdict.FAIL, str(error), "readable content", UNTRUSTED, "build or download the wheel again")
        ]
    except Exception as error:
        found = f"cannot be read ({type(error).__name__}: {str(error)[:200]})"
        return [Check(name, Verdict.FAIL, found, "readable content", UNTRUSTED, "build or download the wheel again")]
