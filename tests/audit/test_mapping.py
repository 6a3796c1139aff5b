"""A shared object whose headers mean one thing to the loader and another to a reader of sections."""

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from audit_builders import Workshop, audit, named
from elftools.elf.elffile import ELFFile

from flashmoe_tools.report import Verdict

SOURCE = """
#include <stdio.h>
int table[3] = {1, 2, 3};
int* pointers[3] = {table, table + 1, table + 2};
extern "C" int helper(int n) { return puts("x") + *pointers[n]; }
extern "C" int PyInit__C() { return 1; }
"""
LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).PyInit__C"
Edit = Callable[[bytearray, ELFFile], None]


@pytest.fixture(scope="module")
def library(workshop: Workshop) -> Path:
    return workshop.extension({"bind.cpp": SOURCE})


def tag(name: str, value: int | None = None, number: int | None = None) -> Edit:
    """One entry of the dynamic section with another value or tag."""

    def edit(content: bytearray, elf: ELFFile) -> None:
        section = elf.get_section_by_name(".dynamic")
        place = next(i for i, one in enumerate(section.iter_tags()) if one.entry.d_tag == name)
        at = section["sh_offset"] + 16 * place + (8 if number is None else 0)
        struct.pack_into("<q", content, at, value if number is None else number)

    return edit


def word(section: str, at: int, value: int, form: str = "<I") -> Edit:
    def edit(content: bytearray, elf: ELFFile) -> None:
        struct.pack_into(form, content, elf.get_section_by_name(section)["sh_offset"] + at, value)

    return edit


def header(at: int, value: int) -> Edit:
    return lambda content, elf: struct.pack_into("<B", content, at, value)


def second_dynamic(content: bytearray, elf: ELFFile) -> None:
    """PT_DYNAMIC points to a copy instead of the section, here to zeros."""
    place = next(i for i, s in enumerate(elf.iter_segments()) if s["p_type"] == "PT_DYNAMIC")
    at = elf["e_phoff"] + 56 * place + 8
    struct.pack_into("<2Q", content, at, 8, 8)


def segment(kind: str, field: int, value: int) -> Edit:
    def edit(content: bytearray, elf: ELFFile) -> None:
        place = [i for i, s in enumerate(elf.iter_segments()) if s["p_type"] == kind][-1]
        struct.pack_into("<Q", content, elf["e_phoff"] + 56 * place + field, value)

    return edit


def section_size(name: str, change: int) -> Edit:
    def edit(content: bytearray, elf: ELFFile) -> None:
        place = elf["e_shoff"] + elf["e_shentsize"] * elf.get_section_index(name) + 32
        struct.pack_into("<Q", content, place, elf.get_section_by_name(name)["sh_size"] + change)

    return edit


DAMAGE: dict[str, tuple[Edit, str]] = {
    "ELF version": (header(20, 9), "another version or ABI"),
    "ABI": (header(8, 8), "another version or ABI"),
    "program header size": (header(54, 57), ""),
    "PT_DYNAMIC": (second_dynamic, "PT_DYNAMIC"),
    "RELRO": (segment("PT_GNU_RELRO", 40, 1 << 43), "PT_GNU_RELRO"),
    "more in the file than in memory": (segment("PT_LOAD", 40, 1), "longer than the file or its memory"),
    "alignment": (segment("PT_LOAD", 16, 1), "not aligned"),
    "all memory": (segment("PT_LOAD", 40, 1 << 47), "segments to load"),
    "symbol table": (tag("DT_SYMTAB", 8), "DT_SYMTAB"),
    "symbol size": (tag("DT_SYMENT", 8), "DT_SYMENT"),
    "no strings": (tag("DT_STRTAB", number=0x6000_0009), "no DT_STRTAB"),
    "relocation size": (tag("DT_RELAENT", 8), "DT_RELAENT"),
    "relocations end": (tag("DT_RELASZ", 1 << 30), "DT_RELASZ"),
    "relative ones": (tag("DT_RELACOUNT", 9), "DT_RELACOUNT"),
    "initialiser": (tag("DT_INIT", 16), "DT_INIT"),
    "relocation type": (word(".rela.dyn", 8, 99), ""),
    "relocation symbol": (word(".rela.plt", 12, 5000), "by symbol 5000"),
    "relocation place": (word(".rela.dyn", 0, 16, "<Q"), "which is not writable"),
    "hash filter": (word(".gnu.hash", 8, 3), ".gnu.hash has"),
    "hash bucket": (word(".gnu.hash", 24, 0x7FFF), ".gnu.hash"),
    "version's hash": (word(".gnu.version_r", 16, 5), "another hash for GLIBC"),
    "version without a name": (word(".gnu.version", 2, 77, "<H"), "versions without a name"),
    "a symbol without a version": (section_size(".gnu.version", -2), "a table inside cannot be read"),
    "a version without a symbol": (section_size(".gnu.version", 2), "a table inside cannot be read"),
}
# What glibc does not notice: it depends on the following memory, the loader's age, or the symbol that is requested.
UNNOTICED = {
    "more in the file than in memory",
    "symbol size",
    "relocation symbol",
    "hash bucket",
    "version without a name",
    "a symbol without a version",
    "a version without a symbol",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_the_loader_refuses_or_crashes_on_fails(library: Path, tmp_path: Path, kind: str) -> None:
    """Each fault is in one field.

    Except for UNNOTICED, this machine's loader refuses, asserts, crashes or does not find the function.
    """
    edit, text = DAMAGE[kind]
    with library.open("rb") as stream:
        content = bytearray(stream.read())
        edit(content, ELFFile(stream))
    path = tmp_path / library.name
    path.write_bytes(bytes(content))
    check = named(audit(path), "input: ")
    assert check.verdict is Verdict.FAIL
    assert text in check.found
    loaded = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, timeout=60, check=False)
    assert loaded.returncode != 0 or kind in UNNOTICED


def test_what_linkers_write_passes(workshop: Workshop, library: Path) -> None:
    """Every kind of hash table, packed relocations, an initialiser with another name, and a library without exports."""
    forms = [
        ["-Wl,--hash-style=sysv"],
        ["-Wl,--hash-style=both"],
        ["-Wl,-z,pack-relative-relocs"],
        ["-Wl,-init=helper"],
        ["-Wl,-z,now,-z,separate-code"],
    ]
    for link in ([], *forms):
        report = audit(workshop.extension({"bind.cpp": SOURCE}, link=link))
        assert not [check.name for check in report.checks if check.name.startswith("input")], link
    empty = workshop.extension({"bind.cpp": SOURCE}, flags=["-fvisibility=hidden"])
    assert not [check.name for check in audit(empty).checks if check.name.startswith("input")]
