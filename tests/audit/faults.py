"""Single faults in the tables that the loader reads, named by table and field, so that they fit any build of a library."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PT_LOAD, PT_DYNAMIC = 1, 2
DT = {
    "NULL": 0, "NEEDED": 1, "HASH": 4, "STRTAB": 5, "SYMTAB": 6, "RELA": 7, "RELASZ": 8, "RELAENT": 9, "STRSZ": 10, "SYMENT": 11,
    "PLTREL": 20, "JMPREL": 23, "PLTRELSZ": 2, "VERSYM": 0x6FFFFFF0, "VERNEED": 0x6FFFFFFE, "VERNEEDNUM": 0x6FFFFFFF,
    "GNU_HASH": 0x6FFFFEF5,
}  # fmt: skip


@dataclass
class Image:
    """A shared object in memory, with the file offsets of what the loader reads."""

    content: bytearray

    def word(self, offset: int, form: str = "<Q") -> int:
        return int(struct.unpack_from(form, self.content, offset)[0])

    def put(self, offset: int, value: int, form: str = "<Q") -> None:
        struct.pack_into(form, self.content, offset, value)

    def headers(self, kind: int) -> list[int]:
        """Offsets of the program headers of one type."""
        start, size, count = self.word(32), self.word(54, "<H"), self.word(56, "<H")
        return [at for at in range(start, start + size * count, size) if self.word(at, "<I") == kind]

    def dynamic(self, tag: str) -> int:
        """Offset of the value of a dynamic tag."""
        at = self.word(self.headers(PT_DYNAMIC)[0] + 8)
        while self.word(at) != DT[tag]:
            at += 16
        return at + 8

    def table(self, tag: str) -> int:
        """File offset of the table to which a dynamic tag points."""
        address = self.word(self.dynamic(tag))
        for header in self.headers(PT_LOAD):
            offset, start, size = self.word(header + 8), self.word(header + 16), self.word(header + 32)
            if start <= address < start + size:
                return offset + address - start
        raise AssertionError(tag)


def _load(field: int, value: int, number: int = 0) -> Callable[[Image], None]:
    return lambda image: image.put(image.headers(PT_LOAD)[number] + field, value)


def _tag(tag: str, value: int) -> Callable[[Image], None]:
    return lambda image: image.put(image.dynamic(tag), value)


def _at(tag: str, offset: int, value: int, form: str = "<I") -> Callable[[Image], None]:
    return lambda image: image.put(image.table(tag) + offset, value, form)


FAULTS: Mapping[str, Callable[[Image], None]] = {
    "PT_LOAD offset not congruent": _load(8, 0x123),
    "PT_LOAD more in the file than in memory": _load(32, 1 << 40),
    "PT_LOAD address out of order": _load(16, 1 << 40),
    "PT_LOAD beyond every address": _load(40, 1 << 62, 1),
    "string table elsewhere": _tag("STRTAB", 1 << 40),
    "symbol table elsewhere": _tag("SYMTAB", 1 << 40),
    "relocations elsewhere": _tag("RELA", 1 << 40),
    "relocation size": _tag("RELAENT", 23),
    "hash table elsewhere": _tag("GNU_HASH", 1 << 40),
    "version table elsewhere": _tag("VERSYM", 1 << 40),
    "version needs elsewhere": _tag("VERNEED", 1 << 40),
    "PLT relocations of another kind": _tag("PLTREL", 99),
    "needed name beyond the strings": _tag("NEEDED", 1 << 40),
    "relocation of an unknown type": _at("RELA", 8, 250),
    "relocation outside the file": _at("RELA", 0, 1 << 50, "<Q"),
    "PLT relocation of an unknown type": _at("JMPREL", 8, 250),
    "PLT relocation of an unknown symbol": _at("JMPREL", 12, 1 << 24),
    "version need of another revision": _at("VERNEED", 0, 9, "<H"),
    "version hash of another version": _at("VERNEED", 16, 12345),
    "hash table without buckets that are there": _at("GNU_HASH", 8, 0),
}  # fmt: skip


def broken(path: Path, target: Path, fault: str) -> Path:
    image = Image(bytearray(path.read_bytes()))
    FAULTS[fault](image)
    target.write_bytes(bytes(image.content))
    return target
