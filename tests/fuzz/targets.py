"""The fuzz targets: each is one reader, with its inputs and what must hold for every input.

An input is a JSON value, so that findings can be kept in corpus.json and tried in every test run.
``check`` raises for a finding: an untyped error, or a pass although the zip archive is invalid.
"""

import atexit
import base64
import hashlib
import io
import posixpath
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile
from hypothesis import strategies as st

from flashmoe.errors import FlashmoeError, ReportError, TableError
from flashmoe_tools.audit import Options, audit
from flashmoe_tools.audit.elf import provided, read_elf
from flashmoe_tools.audit.embedded import parse_index
from flashmoe_tools.audit.errors import AuditError
from flashmoe_tools.audit.ptx import read_ptx
from flashmoe_tools.audit.wheels import read_provenance
from flashmoe_tools.report import Verdict, read_report
from flashmoe_tools.tables import load_tables, table_directory
from flashmoe_tools.verify.metadata import entry_points_text

LIBRARY = """
#include <stdio.h>
int table[3] = {1, 2, 3};
int* pointers[3] = {table, table + 1, table + 2};
int helper(int n) { return puts("x") + *pointers[n]; }
int PyInit__C(void) { return helper(1); }
"""
TABLES = (".dynamic", ".dynsym", ".gnu.version", ".gnu.version_r", ".gnu.hash", ".rela.dyn", ".rela.plt")
WHEEL = "science-1.0-cp311-cp311-linux_x86_64.whl"
PTX = """.version 8.7
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 tile[];
.visible .entry k(.param .u64 k_param_0, .param .align 8 .b8 k_param_1[320])
.maxntid 128, 1, 1
{ .shared .align 4 .b8 s[1024]; .local .align 8 .b8 depot[16]; fma.rn.bf16x2 %r1, %r2, %r3, %r4; ret; }
"""
INDEX = {
    "schema": "flashmoe.index/1",
    "binaries": [
        {"name": "u", "target": "compute_80", "kind": "ptx", "offset": 0, "size": len(PTX), "sha256": "0" * 64,
         "entries": ["k"], "smem_dynamic": 0, "threads": 128},
    ],
}  # fmt: skip
PROVENANCE = {
    "schema": "flashmoe.provenance/1",
    "commit": "0" * 40,
    "targets": ["sm_80"],
    "extension_sha256": "0" * 64,
    "binaries": [{"name": "u", "target": "sm_80", "sha256": "0" * 64}],
}
REPORT = {
    "schema": "flashmoe.report/1", "kind": "audit", "checks": [{"name": "a", "verdict": "PASS"}], "data": {}, "environment": {},
    "command": ["x"], "started": "", "seconds": 1.0,
}  # fmt: skip


@lru_cache(maxsize=1)
def workplace() -> Path:
    """A folder with the library that will be damaged."""
    folder = Path(tempfile.mkdtemp(prefix="flashmoe-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "sound").mkdir()
    (folder / "library.c").write_text(LIBRARY)
    command = ["gcc", "-shared", "-fPIC", "-nostartfiles", "library.c", "-o", "sound/_C.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


@lru_cache(maxsize=1)
def sound() -> bytes:
    return (workplace() / "sound" / "_C.so").read_bytes()


@lru_cache(maxsize=1)
def places() -> Mapping[str, tuple[int, int]]:
    """Offset and size of everything that the loader reads in the library."""
    elf = ELFFile(io.BytesIO(sound()))
    found = {name: elf.get_section_by_name(name) for name in TABLES}
    headers = (elf["e_phoff"], elf["e_phentsize"] * elf["e_phnum"])
    return {
        "header": (0, 64),
        "segments": headers,
        **{n: (s["sh_offset"], s["sh_size"]) for n, s in found.items() if s},
    }


def damaged(edits: list[list[Any]]) -> bytes:
    """The library with each (table, position, bytes, value) written to it."""
    content = bytearray(sound())
    for name, position, width, value in edits:
        offset, size = places()[name]
        at = offset + position % max(1, size - width + 1) // width * width
        content[at : at + width] = struct.pack("<Q", value % (1 << 64))[:width]
    return bytes(content)


_NUMBERS = st.one_of(
    st.integers(0, 64), st.sampled_from([255, 1 << 12, (1 << 16) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 64) - 1]),
    st.integers(0, (1 << 64) - 1),
)  # fmt: skip
_EDIT = st.tuples(
    st.sampled_from(["header", "segments", *TABLES]), st.integers(0, 2048), st.sampled_from([1, 2, 4, 8]), _NUMBERS
)
_EDITS = st.lists(_EDIT.map(list), min_size=1, max_size=3)
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)


def _changed(text: str) -> st.SearchStrategy[str]:
    """The text with part of it replaced, or a different text."""
    piece = st.one_of(
        st.text(max_size=6), st.sampled_from(['"', "\n", "[" * 5000, "(" * 300, "\0", "\\", "1e999", "-" * 9000, ","])
    )
    cut = st.tuples(st.integers(0, len(text)), st.integers(0, 12), piece)
    return st.one_of(cut.map(lambda c: text[: c[0]] + c[2] + text[c[0] + c[1] :]), st.text(max_size=40), piece)


def _json_near(value: Any) -> st.SearchStrategy[Any]:
    """The value with part of it replaced."""
    if isinstance(value, dict):
        inside = [_json_near(part).map(lambda new, k=key: {**value, k: new}) for key, part in value.items()]
        return st.one_of(_JSON, *inside, *(st.just({k: v for k, v in value.items() if k != key}) for key in value))
    if isinstance(value, list):
        return st.one_of(_JSON, *(_json_near(part).map(lambda new: [new]) for part in value))
    return _JSON


def check_elf(edits: list[list[Any]]) -> None:
    path = workplace() / "elf.so"
    path.write_bytes(damaged(edits))
    for read in (read_elf, provided):
        with suppress(AuditError):
            read(path)


@lru_cache(maxsize=1)
def _members() -> dict[str, bytes]:
    info = "science-1.0.dist-info"
    members = {
        "science/__init__.py": b"from . import _C\n",
        "science/_C.so": sound(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: science\nVersion: 1.0\n",
    }
    return _recorded(members)


def _recorded(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """The members with a correct RECORD."""
    record = "science-1.0.dist-info/RECORD"
    digests = {
        n: base64.urlsafe_b64encode(hashlib.sha256(c).digest()).rstrip(b"=").decode() for n, c in members.items()
    }
    lines = [f"{name},sha256={digest},{len(members[name])}" for name, digest in digests.items()]
    return {**members, record: "\n".join([*lines, f"{record},,", ""]).encode()}


def _packed(members: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def _verdict(content: bytes) -> Verdict:
    path = workplace() / WHEEL
    path.write_bytes(content)
    return audit(path, Options(foreign=True)).verdict


def check_wheel(edits: list[list[int]]) -> None:
    """Changes bytes of the archive: a wheel that passes must contain the members that were packed, unchanged."""
    content = bytearray(_packed(_members()))
    for position, value in edits:
        content[position % len(content)] = value
    if _verdict(bytes(content)) is Verdict.FAIL:
        return
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    assert held == _members(), "a changed wheel passes"


def check_metadata(value: list[str]) -> None:
    """Replaces RECORD, WHEEL or METADATA by a text. Nothing passes unless every digest is in RECORD."""
    name, text = value
    member = f"science-1.0.dist-info/{name}"
    content = text.encode("utf-8", "surrogatepass")
    verdict = _verdict(_packed({**_members(), member: content}))
    if name != "RECORD":  # its digest differs
        assert verdict is Verdict.FAIL or content == _members()[member]
        return
    lines = {line.decode().rsplit(",", 1)[0] for line in _members()[member].splitlines()}
    assert verdict is Verdict.FAIL or all(line in text for line in lines), "a wheel with another RECORD passes"


def check_layout(edits: list[list[Any]]) -> None:
    """Inserts bytes into the archive, with or without correcting the offsets after them: what passes reads the same from both ends."""
    content = _packed(_members())
    for at, more, is_moved in edits:
        data, start = bytes.fromhex(more), int(struct.unpack_from("<L", content, len(content) - 6)[0])
        at %= len(content) + 1
        content = content[:at] + data + content[at:]
        if is_moved and at <= start <= len(content) - 22:
            content = _moved(content, start, len(data), at)
    if _verdict(content) is Verdict.FAIL:
        return
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        held = [(m.orig_filename.encode(), archive.read(m)) for m in archive.infolist()]
    assert list(_walk(content)) == held, "a reader of local headers sees another wheel"


def _moved(content: bytes, start: int, by: int, at: int) -> bytes:
    """The archive with the offsets in its central directory, originally at ``start``, corrected for ``by`` bytes inserted at ``at``."""
    tail = bytearray(content[start + by :])
    struct.pack_into("<L", tail, len(tail) - 6, start + by)
    place = tail.find(b"PK\1\2")
    while 0 <= place <= len(tail) - 46:
        offset = struct.unpack_from("<L", tail, place + 42)[0]
        struct.pack_into("<L", tail, place + 42, (offset + by * (offset >= at)) % (1 << 32))
        place = tail.find(b"PK\1\2", place + 4)
    return content[: start + by] + bytes(tail)


def _walk(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Names and contents as seen by a reader that starts at the first byte and ignores the central directory."""
    at = 0
    while content.startswith(b"PK\3\4", at):
        method, packed = struct.unpack_from("<H", content, at + 8)[0], struct.unpack_from("<L", content, at + 18)[0]
        name, extra = struct.unpack_from("<2H", content, at + 26)
        begin = at + 30 + name + extra
        data = content[begin : begin + packed]
        yield content[at + 30 : at + 30 + name], zlib.decompress(data, -15) if method else data
        at = begin + packed


def check_members(names: list[str]) -> None:
    """Adds members with correct lines in RECORD: in a wheel that passes, no two are installed to the same file."""
    members = {name: content for name, content in _members().items() if not name.endswith("/RECORD")}
    content = _packed(_recorded({**members, **dict.fromkeys(names, b"1 / 0\n")}))
    if _verdict(content) is Verdict.FAIL:
        return
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        places = [posixpath.normpath(f"/site/{_scheme(name)}") for name in archive.namelist()]
    assert len(set(places)) == len(places), "two members land on one file"
    assert all(place.startswith("/site/") for place in places), "a member lands outside"


def _scheme(name: str) -> str:
    """Spreads a .data folder as installers do: purelib and platlib are site-packages."""
    first, _, rest = posixpath.normpath(name).partition("/")
    scheme, _, place = rest.partition("/")
    return place if first.endswith(".data") and scheme in ("purelib", "platlib") else name


_WORDS = st.lists(
    st.sampled_from(["science", "science-1.0.data", "purelib", "platlib", "scripts", "__init__.py", "_C.so", "x.py", ".", "..", "", "a b"]),
    min_size=1, max_size=4,
).map("/".join)  # fmt: skip


def check_entry_points(groups: dict[str, dict[str, str]]) -> None:
    """What a build writes is read by the standard library as what the project declares."""
    project = {
        "scripts": groups.get("console_scripts", {}),
        "entry-points": {k: v for k, v in groups.items() if k != "console_scripts"},
    }
    text = entry_points_text(project)
    read = {(point.group, point.name, point.value) for point in EntryPoints._from_text(text)}
    assert read == {(group, name, value) for group, points in groups.items() for name, value in points.items()}


_POINT = st.text("abc-_.", min_size=1, max_size=5).filter(lambda word: word.strip(".-_") == word)
_POINTS = st.dictionaries(_POINT, _POINT.map(lambda word: f"{word}:main"), min_size=1, max_size=3)


def check_loader(value: list[Any]) -> None:
    """A needed library in various folders, with various kinds of run path: the loader loads the file exactly if the audit passes."""
    where, run_path, kind, further = value
    folder = workplace() / "loader"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "pkg" / where).mkdir(parents=True)
    for name, text in (
        ("h.c", "int helper(void) { return 1; }"),
        ("u.c", "int helper(void); int PyInit_u(void) { return helper(); }"),
    ):
        (folder / name).write_text(text)
    build = ["gcc", "-shared", "-fPIC"]
    helper = f"pkg/{where}/libfuzzhelper.so"
    subprocess.run([*build, "-Wl,-soname,libfuzzhelper.so", "h.c", "-o", helper], cwd=folder, check=True)
    link = [
        f"-Wl,{kind}",
        *([f"-Wl,-rpath,{run_path}"] if run_path else []),
        *([f"-Wl,{further},libx.so"] if further else []),
    ]
    subprocess.run([*build, "u.c", helper, *link, "-o", "pkg/u.so"], cwd=folder, check=True)
    report = audit(folder / "pkg" / "u.so", Options(foreign=True))
    wrong = [check.name for check in report.checks if check.verdict is Verdict.FAIL]
    command = [sys.executable, "-c", "import ctypes; ctypes.CDLL('pkg/u.so')"]
    loads = subprocess.run(command, cwd=folder, env={}, capture_output=True, check=False).returncode == 0
    assert bool(further) == any("loaded beside" in name for name in wrong), wrong
    assert loads != any("needed libraries" in name for name in wrong), (loads, wrong)


_LOADER = st.tuples(
    st.sampled_from([".", "libs", "../pkg.libs"]),
    st.sampled_from(["", "$ORIGIN", "$ORIGIN/libs", "${ORIGIN}/../pkg.libs", "$ORIGIN/wrong", "/nowhere:$ORIGIN/libs", "$ORIGINS"]),
    st.sampled_from(["--enable-new-dtags", "--disable-new-dtags"]),
    st.sampled_from(["", "", "--audit", "--depaudit"]),
).map(list)  # fmt: skip


_SECOND = _packed({"science/__init__.py": b"1 / 0\n"})  # only the local header and the content are inserted
_INSERTED = st.one_of(
    st.binary(min_size=1, max_size=40).map(bytes.hex),
    st.just("504b0304"),
    st.just(_SECOND[: _SECOND.index(b"PK\1\2")].hex()),
)


def check_index(text: str) -> None:
    with suppress(AuditError):
        parse_index(text.encode("utf-8", "surrogatepass"), PTX.encode())


def check_provenance(text: str) -> None:
    read_provenance(text.encode("utf-8", "surrogatepass"))


def check_report(text: str) -> None:
    path = workplace() / "report.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(ReportError):
        read_report(path)


def check_tables(value: list[str]) -> None:
    """Changes one of the three TOML tables."""
    folder = workplace() / "tables"
    for part in TOML:
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / part).write_bytes((table_directory() / part).read_bytes())
    (folder / value[0]).write_bytes(value[1].encode("utf-8", "surrogatepass"))
    with suppress(TableError):
        load_tables(folder)


TOML = ("tables/arch.toml", "attention/operations.toml", "attention/kernels.toml")


def _toml() -> st.SearchStrategy[Any]:
    texts = {part: (table_directory() / part).read_text(encoding="utf-8") for part in TOML}
    return st.one_of(*(st.tuples(st.just(part), _changed(text)).map(list) for part, text in texts.items()))


def _text_of(value: Any) -> st.SearchStrategy[str]:
    import json

    return st.one_of(_json_near(value).map(json.dumps), _changed(json.dumps(value)))


def check_ptx(text: str) -> None:
    with suppress(FlashmoeError):
        read_ptx(text.encode("utf-8", "surrogatepass"), "k.compute_80")


@dataclass(frozen=True)
class Target:
    """``rounds``: examples before the next target is run; fewer if one takes longer."""

    strategy: Callable[[], st.SearchStrategy[Any]]
    check: Callable[[Any], None]
    rounds: int


def _metadata() -> st.SearchStrategy[Any]:
    texts = {name.rsplit("/", 1)[1]: content.decode() for name, content in _members().items() if "dist-info" in name}
    return st.one_of(*(st.tuples(st.just(name), _changed(text)).map(list) for name, text in texts.items()))


TARGETS: Mapping[str, Target] = {
    "elf": Target(lambda: _EDITS, check_elf, 60),
    "wheel": Target(
        lambda: st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)).map(list), min_size=1, max_size=3), check_wheel, 8
    ),
    "layout": Target(lambda: st.lists(st.tuples(st.integers(0, 1 << 16), _INSERTED, st.booleans()).map(list), min_size=1, max_size=2), check_layout, 8),
    "members": Target(lambda: st.lists(_WORDS, min_size=1, max_size=3, unique=True), check_members, 8),
    "entry_points": Target(lambda: st.dictionaries(st.sampled_from(["console_scripts", "a.group", "b"]), _POINTS, max_size=3), check_entry_points, 40),
    "loader": Target(lambda: _LOADER, check_loader, 3),
    "metadata": Target(_metadata, check_metadata, 8),
    "index": Target(lambda: _text_of(INDEX), check_index, 100),
    "provenance": Target(lambda: _text_of(PROVENANCE), check_provenance, 100),
    "report": Target(lambda: _text_of(REPORT), check_report, 60),
    "tables": Target(_toml, check_tables, 20),
    "ptx": Target(lambda: _changed(PTX), check_ptx, 100),
}  # fmt: skip
