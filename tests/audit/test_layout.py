"""Zip archives that contain more than, or something else than, their central directory describes."""

import io
import struct
import zipfile
import zlib
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_tools.audit import layout
from flashmoe_tools.audit.errors import AuditError
from flashmoe_tools.audit.inputs import unpack
from flashmoe_tools.audit.layout import problem_of_layout

NAME = "science-1.0-cp311-cp311-linux_x86_64.whl"
MEMBERS = {
    "science/_C.so": b"\x7fELF" * 30,
    "science/__init__.py": b"from . import _C\n",
    **{f"science-1.0.dist-info/{name}": b"x: y\n" for name in ("WHEEL", "METADATA", "RECORD")},
}


class Unseekable(io.BytesIO):
    """A stream that makes zipfile write data descriptors after the members, as for a pipe."""

    def seek(self, *_: object) -> int:
        raise io.UnsupportedOperation


def packed(
    members: dict[str, bytes] = MEMBERS,
    stream: io.BytesIO | None = None,
    zip64: bool = False,
    method: int = zipfile.ZIP_STORED,
) -> bytes:
    target = stream if stream is not None else io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in members.items():
            row = zipfile.ZipInfo(name)
            row.compress_type = method
            with archive.open(row, "w", force_zip64=zip64) as member:
                member.write(content)
    return target.getvalue()


def problem(content: bytes) -> str:
    with io.BytesIO(content) as stream, zipfile.ZipFile(stream) as archive:
        return problem_of_layout(stream, archive.infolist())


def directory(content: bytes) -> int:
    return int(struct.unpack_from("<L", content, len(content) - 6)[0])


def moved(content: bytes, at: int, more: bytes) -> bytes:
    """``more`` inserted before the central directory at byte ``at``, with all later offsets corrected."""
    start = directory(content)
    body, rest = content[:at] + more + content[at:start], bytearray(content[start:])
    struct.pack_into("<L", rest, len(rest) - 6, start + len(more))
    place = rest.find(b"PK\1\2")
    while place >= 0:
        offset = struct.unpack_from("<L", rest, place + 42)[0]
        struct.pack_into("<L", rest, place + 42, offset + len(more) * (offset >= at and at < start))
        place = rest.find(b"PK\1\2", place + 4)
    return body + bytes(rest)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("zip64", [False, True])
@pytest.mark.parametrize("stream", [io.BytesIO, Unseekable], ids=["sizes", "descriptors"])
def test_every_form_that_zipfile_writes_passes(stream: type[io.BytesIO], zip64: bool, method: int) -> None:
    large = bytes(range(256)) * 999 + b"x" * 300_000
    assert problem(packed({**MEMBERS, "science/größe": large}, stream(), zip64, method)) == ""


def test_more_members_than_the_short_end_record_counts() -> None:
    """zipfile writes the zip64 end record for 65,536 members or more."""
    content = packed({f"m/{number}": b"" for number in range(1 << 16)})
    assert b"PK\6\6" in content[-200:]
    assert problem(content) == ""


def test_compressed_data_of_several_reads() -> None:
    """Every read but the last ends with nothing left over, before the end of the data."""
    noise = Random(1).randbytes(300_000)
    assert problem(packed({**MEMBERS, "science/data": noise}, method=zipfile.ZIP_DEFLATED)) == ""


def test_data_that_end_with_a_read_and_more_behind() -> None:
    """One stored block as large as a read: what is hidden after it is not in the same read."""
    text = b"x" * ((1 << 16) - 5)
    block = b"\1" + struct.pack("<2H", len(text), len(text) ^ 0xFFFF) + text
    for hidden in (b"", b"hidden", block):
        member, stream = zipfile.ZipInfo("a"), io.BytesIO(block + hidden)
        member.compress_type, member.compress_size = zipfile.ZIP_DEFLATED, len(block + hidden)
        assert layout._is_filled(stream, 0, member) is (hidden == b"")
        assert stream.tell() == len(block)


def test_data_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data do not end within the claimed size, or within the file, like a stored block that is longer.

    A reader that waits for more would wait forever.
    """
    block = b"\1" + struct.pack("<2H", 9, 9 ^ 0xFFFF) + b"123456789"
    member = zipfile.ZipInfo("a")
    member.compress_type = zipfile.ZIP_DEFLATED
    for content, claimed, is_filled in (
        (block, 14, True),
        (block, 13, False),
        (block[:-1], 14, False),
        (block[:-1], 999, False),
        (block, 15, False),
    ):
        member.compress_size = claimed
        assert layout._is_filled(io.BytesIO(content), 0, member) is is_filled

    def refuse(*_: object) -> bool:
        raise AssertionError

    monkeypatch.setattr(layout, "_is_filled", refuse)  # if the sizes come before the data, no reader follows the data
    assert problem(packed(method=zipfile.ZIP_DEFLATED)) == ""


def test_names_fields_and_comments_of_members() -> None:
    """A name without the UTF-8 flag is in code page 437; folders are empty."""
    target, stamp = io.BytesIO(), struct.pack("<2H4s", 0x5455, 4, b"time") + struct.pack("<2H", 7, 0)
    with zipfile.ZipFile(target, "w") as archive:
        for name in (*MEMBERS, "science/größe", "science/aa.txt", "science/folder/"):
            row = zipfile.ZipInfo(name)
            row.extra, row.comment = stamp, b"of the member"
            archive.writestr(row, b"" if name.endswith("/") else b"content")
    content = target.getvalue()
    assert problem(content) == problem(content.replace(b"science/aa.txt", b"science/\x81\xe1.txt")) == ""
    assert list(layout._fields(stamp)) == [(0x5455, b"time"), (7, b"")]
    assert list(layout._fields(stamp[:3])) == []


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (6, "another name, other flags"),
        (8, "another name, other flags"),
        (14, "another size"),
        (18, "another size"),
        (22, "another size"),
    ],
)
@pytest.mark.parametrize("stream", [io.BytesIO, Unseekable], ids=["sizes", "descriptors"])
def test_fields_of_a_local_header(stream: type[io.BytesIO], at: int, message: str) -> None:
    """A member with a descriptor may also have its size and checksum in the header, if they are correct."""
    content = bytearray(packed(stream=stream()))
    start = directory(bytes(content))
    right = content[start + at + 2 : start + at + 6] if at >= 14 else content[at : at + 2]
    content[at : at + len(right)] = right
    assert problem(bytes(content)) == ""
    content[at] ^= 2
    assert message in problem(bytes(content))


@pytest.mark.parametrize("at", range(4, 22))
def test_no_byte_of_the_end_record_can_change(at: int) -> None:
    """Disk numbers, counts, the directory's size and position, the length of the comment."""
    content = packed()
    changed = bytearray(content)
    changed[len(content) - 22 + at] ^= 1
    with io.BytesIO(bytes(changed)) as stream:
        assert problem_of_layout(stream, zipfile.ZipFile(io.BytesIO(content)).infolist()) != ""


@pytest.mark.parametrize("wrong", [b"PK\6\6", b"PK\6\5", b"PK\5\6", b"xxxx"])
def test_a_zip64_end_record_begins_as_one(wrong: bytes) -> None:
    """Even if the short record describes the directory: readers that look for the long one disagree about a wrong one."""
    content = packed()
    start, end = directory(content), content[-22:]
    count, length = struct.unpack_from("<HL", end, 10)
    for rest, gap, is_right in ((44, b"", True), (45, b"", False), (44, b"gap", False)):
        long = struct.pack("<4sQ2H2L4Q", wrong, rest, 45, 45, 0, 0, count, count, length, start) + gap
        whole = content[:-22] + long + struct.pack("<4sLQL", b"PK\6\7", 0, len(content) - 22, 1) + end
        with io.BytesIO(whole) as stream:
            message = problem_of_layout(stream, zipfile.ZipFile(io.BytesIO(content)).infolist())
        assert ("its last bytes are not the end record" in message) is not (is_right and wrong == b"PK\6\6")


SOUND = packed()
LOCAL = packed({"science/__init__.py": b"import os\n"})[: directory(packed({"science/__init__.py": b"import os\n"}))]


def named_twice() -> bytes:
    """A member with Info-ZIP's Unicode name field, which holds another name."""
    target, name = io.BytesIO(), b"evil/__init__.py"
    with zipfile.ZipFile(target, "w") as archive:
        for member, content in MEMBERS.items():
            row = zipfile.ZipInfo(member)
            if member.endswith("__init__.py"):
                field = struct.pack("<BL", 1, zlib.crc32(member.encode())) + name
                row.extra = struct.pack("<2H", 0x7075, len(field)) + field
            archive.writestr(row, content)
    return target.getvalue()


def hidden_in_a_member() -> bytes:
    """A second local member between a member's compressed data and its data descriptor."""
    content = packed({"a.py": b"a = 1\n", **MEMBERS}, Unseekable(), method=zipfile.ZIP_DEFLATED)
    name, extra = struct.unpack_from("<2H", content, 26)
    start, (crc, size) = directory(content), struct.unpack_from("<2L", content, directory(content) + 16)
    end = 30 + name + extra + size
    more = struct.pack("<4s3L", b"PK\7\x08", crc, size, 6) + LOCAL
    filled = bytearray(moved(content, end, more))
    struct.pack_into("<L", filled, start + len(more) + 20, size + len(more))
    at = end + len(more)
    struct.pack_into("<L", filled, at + 8, size + len(more))
    return bytes(filled)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (named_twice(), "an extra field gives it a second name"),
        (hidden_in_a_member(), "its compressed data end before the next member begins"),
        (moved(SOUND, 0, LOCAL), "byte 0 should begin member 'science/_C.so'"),
        (LOCAL + SOUND, "its last bytes are not the end record"),
        (SOUND.replace(b"PK\3\4", b"PK\3\5", 1), "there is no local header"),
        (moved(SOUND, directory(SOUND), LOCAL), "its members end at byte"),
        (SOUND + b"PK", "its last bytes are not the end record"),
        (SOUND[:-2] + b"\1\0x", "its last bytes are not the end record"),
        (SOUND.replace(b"science/__init__.py", b"science/__inix__.py", 1), "its local header has another name"),
        (packed({**MEMBERS, "science/./__init__.py": b""}), "is another spelling of 'science/__init__.py'"),
        (packed({**MEMBERS, "science//__init__.py": b""}), "is another spelling of 'science/__init__.py'"),
        (packed({**MEMBERS, "science/x.py_.txt": b""}).replace(b"x.py_", b"x.py\0"), "would be unpacked as 'science/x.py'"),
        (packed({**MEMBERS, "science/folder/": b"text"}), "is a folder with content"),
    ],
)  # fmt: skip
def test_what_only_some_readers_see_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    """A second member before the archive, the first member or the directory; trailing bytes; a comment; names."""
    path = tmp_path / NAME
    path.write_bytes(content)
    with pytest.raises(AuditError, match="is not a valid wheel") as refused:
        unpack(path, tmp_path / "root")
    assert message in str(refused.value)


@given(st.integers(0, len(SOUND)), st.binary(min_size=1, max_size=40), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_byte_can_be_added(at: int, more: bytes, is_moved: bool) -> None:
    """Wherever bytes are inserted, with or without corrected offsets, the archive is refused, here or by zipfile."""
    content = moved(SOUND, at, more) if is_moved and at <= directory(SOUND) else SOUND[:at] + more + SOUND[at:]
    if content == SOUND:
        return
    try:
        assert problem(content)
        return
    except (zipfile.BadZipFile, NotImplementedError, EOFError):
        return


@given(st.integers(0, len(SOUND) - 1), st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_no_byte_of_a_header_can_be_changed_unseen(at: int, by: int) -> None:
    """What may still change: content, which has a checksum, and fields by which no reader locates anything."""
    content = bytearray(SOUND)
    content[at] = (content[at] + by) % 256
    try:
        with zipfile.ZipFile(io.BytesIO(bytes(content))) as archive:
            if problem(bytes(content)):
                return
            held = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, zipfile.zlib.error):
        return
    assert held == MEMBERS
