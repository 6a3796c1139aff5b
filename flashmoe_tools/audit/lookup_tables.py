"""Whether the loader's lookup tables match the names in the file: a wrong hash hides a symbol or a version."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

_SYMBOL = 24  # bytes
_OWN_VERSIONS = 2  # .gnu.version indices below this mean local or global and have no name


def problems_of_lookup(elf: ELFFile) -> Iterator[str]:
    table = elf.get_section_by_name(".gnu.hash")
    symbols = elf.get_section_by_name(".dynsym")
    if symbols is None:
        return
    data, strings = symbols.data(), elf.get_section(symbols["sh_link"]).data()
    offsets = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), _SYMBOL)]
    if table is not None and table["sh_size"]:
        names = [strings[at : strings.index(b"\0", at)] for at in offsets]
        is_empty = not any(
            byte for at in range(0, len(data), _SYMBOL) for byte in data[at + 6 : at + 8]
        )  # all are undefined
        yield from _hashes(table.data(), [] if is_empty else names)
    yield from _versions(elf)


def gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFF_FFFF
    return value


def elf_hash(name: bytes) -> int:
    """The older hash function, used for versions (System V ABI, figure 5-13)."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        value = (value ^ ((value & 0xF000_0000) >> 24)) & 0x0FFF_FFFF
    return value


def _hashes(table: bytes, names: list[bytes]) -> Iterator[str]:
    """Checks that .gnu.hash has the buckets and chains of the names, and that its Bloom filter lets all of them pass."""
    buckets, first, words, shift = struct.unpack_from("<4I", table)
    filters = struct.unpack_from(f"<{words}Q", table, 16)
    starts = struct.unpack_from(f"<{buckets}I", table, 16 + 8 * words)
    chain = [value for (value,) in struct.iter_unpack("<I", table[16 + 8 * words + 4 * buckets :])]
    hashes = [gnu_hash(name) for name in names[first:]]
    if not buckets or words & (words - 1) or len(hashes) != len(chain):
        yield f".gnu.hash has {buckets} buckets, {words} filter words and {len(chain)} of {len(hashes)} symbols"
        return
    expected, following = [0] * buckets, [value % buckets for value in hashes[1:]] + [-1]
    for index, value in enumerate(hashes):
        bucket = value % buckets
        expected[bucket] = expected[bucket] or first + index
        word = filters[value // 64 & (words - 1)]
        found = word >> value % 64 & word >> (value >> shift) % 64 & 1
        if not found or chain[index] != (value & ~1 | (following[index] != bucket)):
            yield f".gnu.hash does not lead to {names[first + index].decode(errors='replace')}"
    if expected != list(starts):
        yield ".gnu.hash has other buckets than its symbols"


def _versions(elf: ELFFile) -> Iterator[str]:
    """Checks that each index in .gnu.version has a name, and each name its hash."""
    known = set(range(_OWN_VERSIONS))
    for section, hashed in (
        (elf.get_section_by_name(".gnu.version_r"), "vna_hash"),
        (elf.get_section_by_name(".gnu.version_d"), "vd_hash"),
    ):
        for entry, auxiliaries in section.iter_versions() if section is not None else ():
            rows: list[Any] = list(auxiliaries)
            if hashed == "vd_hash":
                known.add(entry["vd_ndx"])
                pairs = [(entry["vd_hash"], rows[0].name)]
            else:
                known.update(row["vna_other"] & 0x7FFF for row in rows)
                pairs = [(row["vna_hash"], row.name) for row in rows]
            if (entry["vn_version"] if hashed == "vna_hash" else entry["vd_version"]) != 1 or any(
                value != elf_hash(name.encode()) for value, name in pairs
            ):
                yield f"{section.name} is of another version, or has another hash for {pairs[0][1]}"
    bound = elf.get_section_by_name(".gnu.version")
    if bound is not None:
        indices = struct.unpack(f"<{len(bound.data()) // 2}H", bound.data())
        lost = {index & 0x7FFF for index in indices} - known
        if lost:
            yield f".gnu.version has {len(lost)} versions without a name"
