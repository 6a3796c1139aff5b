"""What is under audit: a shared object, a wheel, or a folder. Opened with typed errors, unpacked with limits."""

import base64
import hashlib
import io
import re
import stat
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from flashmoe._version import WHEEL_PREFIX
from flashmoe_tools.audit.errors import AuditError, DamagedWheelError, EmptyInputError, UnreadableError
from flashmoe_tools.audit.layout import problem_of_layout

EXTENSION = re.compile(r".+\.so(?:\.\d\w*)*$")  # libssl.so.1.1.1k too
OUR_LIBRARY = "libflashmoe.so"
MAX_UNPACKED = 8 << 30  # bytes of all members together; torch's own wheel unpacks to 3 GB
MAX_RATIO = 200  # unpacked / packed, of one member or all, above RATIO_FROM bytes; machine code reaches about 10
RATIO_FROM = 16 << 20
MAX_MEMBERS = 100_000
MAX_TEXT = 128 << 20  # bytes of text kept in memory for all members together; torch's own wheel has 45 MB of Python
MAX_SOURCE = 2 << 20  # bytes of one text; torch's largest has 1.2 MB
PIECE = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class Wheel:
    """The part of a wheel's content that the audit needs; ``extensions`` are unpacked under ``root``."""

    path: Path
    root: Path
    names: tuple[str, ...]
    extensions: tuple[str, ...]
    sources: Mapping[str, str] = field(repr=False)  # empty text: larger than MAX_SOURCE, not read
    metadata: Mapping[str, str] = field(repr=False)  # the text files in .dist-info, by file name
    other: Mapping[str, bytes] = field(repr=False)  # JSON and TOML data files, by member name
    digests: Mapping[str, str] = field(repr=False)  # sha256 of each member in RECORD's notation
    sizes: Mapping[str, int] = field(repr=False)  # bytes of each member

    @cached_property
    def named_libraries(self) -> dict[str, Path]:
        """Shared objects in the wheel, by file name, that some source names and so may load before they are needed."""
        files = {PurePosixPath(member).name: self.root / member for member in self.extensions}
        texts = [text for text in self.sources.values() if ".so" in text]
        return {name: path for name, path in files.items() if any(name in text for text in texts)}

    @property
    def is_ours(self) -> bool:
        return self.path.name.startswith(WHEEL_PREFIX)


@dataclass(frozen=True)
class Inputs:
    """Shared objects and wheels to audit, with the name under which each is reported."""

    libraries: tuple[tuple[str, Path], ...]
    wheels: tuple[Path, ...]


def collect(path: Path) -> Inputs:
    """Finds out what ``path`` is. Raises UnreadableError or EmptyInputError."""
    if not path.exists():
        msg = f"{path} is a broken symbolic link" if path.is_symlink() else f"{path} does not exist"
        raise UnreadableError(msg, "give the path of a shared object, a wheel, or a folder that holds one")
    if path.is_dir():
        return _folder(path)
    return Inputs((), (path,)) if path.suffix == ".whl" else Inputs(((path.name, path),), ())


def _folder(path: Path) -> Inputs:
    try:
        files = sorted(p for p in path.rglob("*") if not p.is_dir())
    except OSError as error:
        msg = f"cannot list {path}: {error.strerror}"
        raise UnreadableError(msg, "make the folder readable for this user") from error
    libraries = tuple((str(p.relative_to(path)), p) for p in files if EXTENSION.fullmatch(p.name))
    wheels = tuple(p for p in files if p.suffix == ".whl")
    if not libraries and not wheels:
        msg = f"{path} contains no extension (*.so) and no wheel; it has {len(files)} files"
        raise EmptyInputError(msg, "build first, or give the folder that the build wrote")
    return Inputs(libraries, wheels)


def unpack(path: Path, root: Path) -> Wheel:
    """Reads a wheel and unpacks its shared objects under ``root``. Raises DamagedWheelError or EmptyInputError."""
    try:
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            members = [m for m in archive.infolist() if not m.is_dir()]
            _refuse(path, _problem_of_each(members) or _problem_together(members))
            _refuse(path, problem_of_layout(stream, archive.infolist()))
            return _read(path, archive, members, root)
    except AuditError:
        raise
    except FileNotFoundError as error:
        msg = f"{path} does not exist"
        raise UnreadableError(msg, "build it first (./nox -s build), or give the path of a wheel") from error
    except OSError as error:
        msg = f"cannot read {path.name}: {error.strerror or error}"
        raise UnreadableError(msg, "make the file readable for this user") from error
    except (
        Exception
    ) as error:  # BadZipFile, zlib.error, NotImplementedError (compression), RuntimeError (encrypted), ...
        msg = f"{path.name} is not a valid wheel: {type(error).__name__}: {error}"
        raise DamagedWheelError(msg, "build or download the wheel again") from error


def _refuse(path: Path, problem: str) -> None:
    if problem:
        msg = f"{path.name} is not a valid wheel: {problem}"
        raise DamagedWheelError(msg, "do not install it; build or download the wheel again")


def _problem_together(members: list[zipfile.ZipInfo]) -> str:
    """Why the members together cannot be a wheel, or an empty text."""
    unpacked, packed = sum(m.file_size for m in members), sum(m.compress_size for m in members)
    names = {m.filename for m in members}
    below = next((n for n in names if any(str(parent) in names for parent in PurePosixPath(n).parents)), None)
    if below is not None:
        return f"member {below!r} lies below a member that is a file"
    if len(members) > MAX_MEMBERS:
        return f"it has {len(members)} members, more than {MAX_MEMBERS}"
    if unpacked > MAX_UNPACKED:
        return f"it unpacks to {unpacked} bytes, more than {MAX_UNPACKED}"
    if unpacked > RATIO_FROM and unpacked > MAX_RATIO * packed:
        return f"its members unpack from {packed} to {unpacked} bytes"
    if len({m.filename.split("/", 1)[0] for m in members if _is_metadata(PurePosixPath(m.filename))}) > 1:
        return "it has several .dist-info folders, so it is unclear which of them counts"
    return ""


def _problem_of_each(members: list[zipfile.ZipInfo]) -> str:
    """What is wrong with the first member that no wheel should hold, or an empty text."""
    seen: set[str] = set()
    for member in members:
        where = PurePosixPath(member.filename)
        if where.is_absolute() or ".." in where.parts or "\\" in member.filename:
            return f"member {member.filename!r} points outside the wheel"
        if member.filename in seen:
            return f"member {member.filename!r} is in it twice"
        if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
            return f"member {member.filename!r} is a link or a device, not a file"
        if member.flag_bits & 1:
            return f"member {member.filename!r} is encrypted"
        if member.file_size > RATIO_FROM and member.file_size > MAX_RATIO * max(1, member.compress_size):
            return f"member {member.filename!r} unpacks from {member.compress_size} to {member.file_size} bytes"
        seen.add(member.filename)
    return ""


def _read(path: Path, archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], root: Path) -> Wheel:
    """Unpacks shared objects to disk and small texts to memory; hashes and CRC-checks all members in chunks."""
    names = tuple(m.filename for m in members)
    extensions = tuple(n for n in names if EXTENSION.fullmatch(PurePosixPath(n).name))
    if not extensions:
        msg = f"{path.name} contains no extension: none of its {len(names)} files is a shared object"
        raise EmptyInputError(msg, "the build did not put the library into the wheel; look at the wheel hook")
    sources, metadata, other, digests = {}, {}, {}, {}
    budget = MAX_TEXT
    for member in members:
        name, member_path = member.filename, PurePosixPath(member.filename)
        is_read = _is_metadata(member_path) or (_is_text(member_path) and member.file_size <= MAX_SOURCE)
        kept = io.BytesIO() if is_read else None
        if kept is not None:
            budget -= member.file_size
        if budget < 0:
            msg = f"{path.name} holds more than {MAX_TEXT} bytes of Python, JSON and TOML, more than an audit reads"
            raise DamagedWheelError(msg, "audit the shared objects in it, unpacked")
        if name in extensions:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            with (root / name).open("wb") as copy:
                digests[name] = _copy(archive, member, copy)
        else:
            digests[name] = _copy(archive, member, kept)
        data = kept.getvalue() if kept is not None else b""
        if member_path.suffix == ".py":
            sources[name] = data.decode("utf-8", "replace")
        elif _is_metadata(member_path):
            metadata[member_path.name] = data.decode("utf-8", "replace")
        if member_path.suffix in (".json", ".toml") and kept is not None:
            other[name] = data
    for needed in ("WHEEL", "METADATA", "RECORD"):
        if needed not in metadata:
            msg = f"{path.name} is not a valid wheel: .dist-info/{needed} is missing"
            raise DamagedWheelError(msg, "build it with a wheel builder (pip wheel, hatchling), not with zip")
    sizes = {m.filename: m.file_size for m in members}
    return Wheel(path, root, names, extensions, sources, metadata, other, digests, sizes)


def _is_metadata(path: PurePosixPath) -> bool:
    return len(path.parts) == 2 and path.parent.name.endswith(".dist-info")


def _is_text(path: PurePosixPath) -> bool:
    return path.suffix in (".py", ".json", ".toml")


def _copy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, copy: BinaryIO | None) -> str:
    """Reads one member to its end, which checks its CRC; returns its sha256 in RECORD's notation."""
    digest = hashlib.sha256()
    with archive.open(member) as stream:
        while piece := stream.read(PIECE):
            digest.update(piece)
            if copy is not None:
                copy.write(piece)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
