"""Whether the bytes of a zip archive are exactly what its central directory describes.

zipfile and pip read the central directory; other tools walk the local headers from the start, and unzip repairs what it
finds. An archive with bytes that only some of them see is a different wheel to each of them. So the local headers, in
the order of the directory, then the directory and its end record must cover the file without a gap (PKWARE APPNOTE
4.3).
"""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import BinaryIO

_LOCAL = struct.Struct("<4s5H3L2H")  # signature, version, flags, method, time, date, crc, packed, size, name, extra
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_UTF8, _DESCRIPTOR = 0x800, 0x8
_FILLED = 0xFFFF_FFFF  # placeholder: the size is in the zip64 field
_ZIP64 = 1
_OTHER_NAME = 0x7075  # Info-ZIP's Unicode Path: a second name, which some readers use
_PIECE = 1 << 16


def problem_of_layout(stream: BinaryIO, members: list[zipfile.ZipInfo]) -> str:
    """The first place where the archive and its central directory disagree, or an empty text.

    zipfile must be able to open the archive. A record that is cut off by the end of the file raises struct.error.
    """
    size = stream.seek(0, 2)
    start, end = _directory(stream, size)
    if start is None:
        return "its last bytes are not the end record of a zip archive without a comment"
    at = 0
    for member in members:
        shown = repr(member.orig_filename)
        if member.orig_filename != member.filename:
            return f"member {shown} would be unpacked as {member.filename!r}"
        if str(PurePosixPath(member.filename)) != member.filename.removesuffix("/"):
            return f"member {shown} is another spelling of {str(PurePosixPath(member.filename))!r}"
        if member.is_dir() and member.file_size:
            return f"member {shown} is a folder with content"
        if member.header_offset != at:
            return f"byte {at} should begin member {shown}, which begins at byte {member.header_offset}"
        following, problem = _local(stream, at, member)
        if problem:
            return f"member {shown}: {problem}"
        at = following
    if at != start:
        return f"its members end at byte {at}, its central directory begins at byte {start}"
    listed = sum(46 + len(_raw(m)) + len(m.extra) + len(m.comment) for m in members)
    return "" if end - start == listed else f"its central directory has {end - start} bytes, {listed} of them read"


def _raw(member: zipfile.ZipInfo) -> bytes:
    return member.orig_filename.encode("utf-8" if member.flag_bits & _UTF8 else "cp437")


def _take(stream: BinaryIO, at: int, size: int) -> bytes:
    stream.seek(at)
    return stream.read(size)


def _directory(stream: BinaryIO, size: int) -> tuple[int | None, int]:
    """Where the central directory begins and ends; begin is None if the file does not end with exactly its end record."""
    record = _take(stream, max(0, size - _END.size), _END.size)
    if not record.startswith(b"PK\5\6"):
        return None, 0
    _, disk, first, here, count, length, start, comment = _END.unpack(record)
    end = size - _END.size
    locator = _take(stream, max(0, end - _LOCATOR.size), _LOCATOR.size)
    if locator.startswith(b"PK\6\7"):
        _, disk, place, _ = _LOCATOR.unpack(locator)
        record = _take(stream, place, _END64.size)
        if place + _END64.size != end - _LOCATOR.size or not record.startswith(b"PK\6\6"):
            return None, 0
        _, rest, _, _, disk, first, here, count, length, start = _END64.unpack(record)
        if rest != _END64.size - 12:
            return None, 0
        end = place
    if disk or first or comment or here != count or start + length != end:
        return None, 0
    return start, end


def _local(stream: BinaryIO, at: int, member: zipfile.ZipInfo) -> tuple[int, str]:
    """Where the member ends, and how its local header differs from the central one."""
    header = _take(stream, at, _LOCAL.size)
    if not header.startswith(b"PK\3\4"):
        return 0, "there is no local header where the central directory places it"
    _, _, flags, method, _, _, crc, packed, size, name, extra = _LOCAL.unpack(header)
    behind = _take(stream, at + _LOCAL.size, name + extra)
    if behind[:name] != _raw(member) or flags != member.flag_bits or method != member.compress_type:
        return 0, "its local header has another name, other flags or another method than the central one"
    if any(kind == _OTHER_NAME for extra in (behind[name:], member.extra) for kind, _ in _fields(extra)):
        return 0, "an extra field gives it a second name"
    packed, size = _sizes(behind[name:], packed, size)
    if flags & _DESCRIPTOR and not _is_filled(stream, at + _LOCAL.size + name + extra, member):
        return 0, "its compressed data end before the next member begins"
    at += _LOCAL.size + name + extra + member.compress_size
    stated, expected = (crc, packed, size), (member.CRC, member.compress_size, member.file_size)
    if not flags & _DESCRIPTOR:
        return at, "" if stated == expected else "its local header has another size or checksum than the central one"
    if any(found not in (0, right) for found, right in zip(stated, expected, strict=True)):
        return 0, "its local header has another size or checksum than the central one"
    for form in _descriptors(expected):
        if _take(stream, at, len(form)) == form:
            return at + len(form), ""
    return 0, "its data descriptor has another size or checksum than the central header"


def _descriptors(expected: tuple[int, int, int]) -> Iterator[bytes]:
    """The possible forms of a data descriptor: with or without a signature, with sizes of 64 or 32 bits."""
    for signature in (b"PK\7\x08", b""):
        yield signature + struct.pack("<LQQ", *expected)
        if max(expected) <= _FILLED:
            yield signature + struct.pack("<3L", *expected)


def _fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        yield kind, extra[4 : 4 + length]
        extra = extra[4 + length :]


def _sizes(extra: bytes, packed: int, size: int) -> tuple[int, int]:
    """Packed and unpacked size, taken from the local header's zip64 field where it holds them."""
    for kind, field in _fields(extra):
        if kind == _ZIP64 and len(field) >= 16:
            wide, narrow = struct.unpack_from("<2Q", field)
            size, packed = wide if size == _FILLED else size, narrow if packed == _FILLED else packed
    return packed, size


def _is_filled(stream: BinaryIO, at: int, member: zipfile.ZipInfo) -> bool:
    """Whether the compressed data end exactly where the central directory says.

    Deflate data mark their own end. A reader that follows the data looks for the next member, or finds a hidden one,
    there.
    """
    if member.compress_type != zipfile.ZIP_DEFLATED:
        return True  # stored data do not mark their end; a reader that starts at the front refuses them
    stream.seek(at)
    reader, left = zlib.decompressobj(-15), member.compress_size
    while not reader.eof and (given := stream.read(min(_PIECE, left))):
        left -= len(given)
        while given:
            reader.decompress(given, _PIECE)
            given = reader.unconsumed_tail
    return reader.eof and not reader.unused_data and not left
