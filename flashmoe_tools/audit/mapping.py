"""Whether the loader would see the same file as the audit.

The audit reads sections by name. The loader reads segments and the addresses in the dynamic section and never looks at
section headers. A file in which the two disagree is damaged, or shows a different library to each reader. The
properties that glibc asserts are checked here too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flashmoe_tools.audit.lookup_tables import problems_of_lookup

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

_PAGE = 4096
_MOST = 1 << 36  # largest plausible memory size of a file, in bytes
_RELATION = struct.Struct("<QQq")  # offset, symbol and type, addend
_EXECUTE, _WRITE = 1, 2  # PF_X, PF_W
_TEXTREL = 4  # DF_TEXTREL
# Dynamic tags and sections of each table: tag of its address, tag of its size, section.
_TABLES = (
    ("DT_STRTAB", "DT_STRSZ", ".dynstr"),
    ("DT_SYMTAB", "", ".dynsym"),
    ("DT_HASH", "", ".hash"),
    ("DT_GNU_HASH", "", ".gnu.hash"),
    ("DT_VERSYM", "", ".gnu.version"),
    ("DT_VERNEED", "", ".gnu.version_r"),
    ("DT_VERDEF", "", ".gnu.version_d"),
    ("DT_INIT_ARRAY", "DT_INIT_ARRAYSZ", ".init_array"),
    ("DT_FINI_ARRAY", "DT_FINI_ARRAYSZ", ".fini_array"),
    ("DT_RELA", "DT_RELASZ", ".rela.dyn"),
    ("DT_JMPREL", "DT_PLTRELSZ", ".rela.plt"),
    ("DT_RELR", "DT_RELRSZ", ".relr.dyn"),
)
_COUNTS = (("DT_VERNEEDNUM", ".gnu.version_r"), ("DT_VERDEFNUM", ".gnu.version_d"))
# Values that glibc asserts, and the table that each is about.
_FIXED = {
    "DT_SYMENT": (24, "DT_SYMTAB"),
    "DT_RELAENT": (24, "DT_RELA"),
    "DT_RELRENT": (8, "DT_RELR"),
    "DT_PLTREL": (7, "DT_JMPREL"),
}
_RELATIVE = {"EM_X86_64": 8, "EM_AARCH64": 1027}
_KNOWN = {  # relocation types that glibc applies in a shared object
    "EM_X86_64": {0, 1, 5, 6, 7, 8, 10, 16, 17, 18, 36, 37},
    "EM_AARCH64": {0, 257, 1024, 1025, 1026, 1027, 1028, 1029, 1030, 1031, 1032},
}


def problem_of_mapping(elf: ELFFile, content: bytes) -> str:
    """The first place where the loader would see another file than the sections show, or refuse it; or an empty text."""
    loads = [segment for segment in elf.iter_segments() if segment["p_type"] == "PT_LOAD"]
    return (
        _header(content)
        or next(_segments(elf, loads, len(content)), "")
        or next(_tables(elf), "")
        or next(_relations(elf, loads), "")
        or next(problems_of_lookup(elf), "")
    )


def _header(content: bytes) -> str:
    version, size = struct.unpack_from("<I", content, 20)[0], struct.unpack_from("<H", content, 54)[0]
    right = content[6] == version == 1 and content[7] in (0, 3) and not any(content[8:16]) and size == 56
    return "" if right else "its ELF header is of another version or ABI, or has program headers of another size"


def _segments(elf: ELFFile, loads: list[Any], size: int) -> Iterator[str]:
    end = 0
    for load in loads:
        at, align = load["p_vaddr"], load["p_align"]
        if align % _PAGE or align & (align - 1) or (at - load["p_offset"]) % align:
            yield f"the segment at {at:#x} is not aligned as its file offset is"
        if at < end or load["p_filesz"] > load["p_memsz"] or load["p_offset"] + load["p_filesz"] > size:
            yield f"the segment at {at:#x} overlaps the one before, or is longer than the file or its memory"
        end = at + load["p_memsz"]
    if not loads or end > _MOST:
        yield f"it has {len(loads)} segments to load, which end at {end:#x}"
    for segment in elf.iter_segments():
        first, last = segment["p_vaddr"], segment["p_vaddr"] + segment["p_memsz"]
        kind = segment["p_type"]
        if kind in ("PT_DYNAMIC", "PT_GNU_RELRO") and not any(
            load["p_vaddr"] <= first and last <= -(-(load["p_vaddr"] + load["p_memsz"]) // _PAGE) * _PAGE
            for load in loads
        ):
            yield f"{kind} at {first:#x} is outside of what is loaded"


def _tables(elf: ELFFile) -> Iterator[str]:
    sections = {section.name: section for section in elf.iter_sections()}
    dynamic = sections.get(".dynamic")
    places = [(s["p_offset"], s["p_vaddr"]) for s in elf.iter_segments() if s["p_type"] == "PT_DYNAMIC"]
    if dynamic is None or places != [(dynamic["sh_offset"], dynamic["sh_addr"])]:
        yield "its .dynamic section is not where the loader looks for it (PT_DYNAMIC)"
        return
    tags = {str(tag.entry.d_tag): tag.entry.d_val for tag in dynamic.iter_tags()}
    for tag, length, name in _TABLES:
        section = sections.get(name)
        is_there = section is not None and section["sh_size"] > 0
        if is_there and tag in tags:
            yield from _place(elf, section, tags, tag, length)
        elif tag in tags or is_there:
            yield f"it has {f'{tag} without' if tag in tags else f'no {tag} but'} a section {name}"
    yield from _numbers(elf, sections, tags)


def _place(elf: ELFFile, section: Any, tags: Mapping[str, int], tag: str, length: str) -> Iterator[str]:
    if tags[tag] != section["sh_addr"] or _offset(elf, section["sh_addr"]) != section["sh_offset"]:
        yield f"{tag} is {tags[tag]:#x}, section {section.name} is at {section['sh_addr']:#x}"
    if length and tags.get(length) != section["sh_size"]:
        yield f"{length} is {tags.get(length)}, section {section.name} has {section['sh_size']} bytes"


def _numbers(elf: ELFFile, sections: Mapping[str, Any], tags: Mapping[str, int]) -> Iterator[str]:
    for tag, name in _COUNTS:
        if name in sections and tags.get(tag) != sections[name]["sh_info"]:
            yield f"{tag} is {tags.get(tag)}, section {name} counts {sections[name]['sh_info']}"
    for tag in {"DT_INIT", "DT_FINI"} & tags.keys():
        if not _is_loaded(elf, tags[tag], _EXECUTE):
            yield f"{tag} is {tags[tag]:#x}, where there is no code"
    for tag, (right, table) in _FIXED.items():
        if table in tags and tags.get(tag) != right:
            yield f"{tag} is {tags.get(tag)}, the loader takes {right}"
    relative = _RELATIVE.get(elf["e_machine"])
    kinds = [info & 0xFFFF_FFFF for _, info, _ in _rows(elf, ".rela.dyn")][: tags.get("DT_RELACOUNT", 0)]
    if len(kinds) < tags.get("DT_RELACOUNT", 0) or set(kinds) - {relative}:
        yield f"DT_RELACOUNT is {tags['DT_RELACOUNT']}, more than the relative relocations that begin .rela.dyn"


def _offset(elf: ELFFile, address: int) -> int | None:
    """The file offset of the bytes at an address."""
    for segment in elf.iter_segments():
        if segment["p_type"] == "PT_LOAD" and 0 <= address - segment["p_vaddr"] < segment["p_filesz"]:
            return int(address - segment["p_vaddr"] + segment["p_offset"])
    return None


def _is_loaded(elf: ELFFile, address: int, flags: int) -> bool:
    return any(
        s["p_type"] == "PT_LOAD" and s["p_flags"] & flags and 0 <= address - s["p_vaddr"] < s["p_filesz"]
        for s in elf.iter_segments()
    )


def _rows(elf: ELFFile, name: str) -> Iterator[tuple[int, int, int]]:
    section = elf.get_section_by_name(name)
    if section is not None and section["sh_type"] == "SHT_RELA":
        yield from _RELATION.iter_unpack(section.data())


def _relations(elf: ELFFile, loads: list[Any]) -> Iterator[str]:
    """Checks that each relocation has a known type, writes into the file's memory, and uses an existing symbol."""
    symbols = elf.get_section_by_name(".dynsym")
    count, known = (symbols["sh_size"] // 24 if symbols is not None else 0), _KNOWN[elf["e_machine"]]
    dynamic = elf.get_section_by_name(".dynamic")
    anywhere = any(  # text relocations have their own check
        str(tag.entry.d_tag) == "DT_TEXTREL" or (str(tag.entry.d_tag) == "DT_FLAGS" and tag.entry.d_val & _TEXTREL)
        for tag in dynamic.iter_tags()
    )
    written = [load for load in loads if anywhere or load["p_flags"] & _WRITE]
    spans = [(load["p_vaddr"], load["p_vaddr"] + load["p_memsz"] - 8) for load in written]
    for name in (".rela.dyn", ".rela.plt"):
        for place, info, _ in _rows(elf, name):
            kind = info & 0xFFFF_FFFF
            if kind not in known or info >> 32 >= max(1, count):
                yield f"a relocation in {name} is of type {kind}, by symbol {info >> 32} of {count}"
            if kind and not any(first <= place <= last for first, last in spans):
                yield f"a relocation in {name} writes to {place:#x}, which is not writable"
