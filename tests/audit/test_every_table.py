"""What the audit reads from made-up tables of a file: each fault by itself, and both sides of each limit."""

import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe_tools.audit import cubin, elf, inputs, launch, layout, lookup_tables, mapping
from flashmoe_tools.audit.errors import EmbeddedError, UnreadableError
from flashmoe_tools.audit.ptx import PtxEntry, read_ptx
from flashmoe_tools.tables import load_tables


class Section(dict[str, Any]):
    """The parts of pyelftools' Section that the audit uses. Tags are (name, value)."""

    def __init__(self, name: str, content: bytes = b"", tags: tuple[tuple[str, int], ...] = (), **fields: Any) -> None:
        super().__init__({"sh_type": "SHT_RELA", "sh_size": len(content), "sh_info": 0, **fields})
        self.name, self.content, self.tags = name, content, tags

    def data(self) -> bytes:
        return self.content

    def iter_tags(self) -> list[Any]:
        return [SimpleNamespace(entry=SimpleNamespace(d_tag=tag, d_val=value)) for tag, value in self.tags]


class Elf(dict[str, Any]):
    """The parts of pyelftools' ELFFile that the audit uses."""

    def __init__(self, *sections: Section, segments: tuple[Any, ...] = (), **fields: Any) -> None:
        super().__init__({"e_machine": "EM_X86_64", **fields})
        self.sections, self.segments = sections, segments

    def get_section_by_name(self, name: str) -> Any:
        return next((section for section in self.sections if section.name == name), None)

    def iter_sections(self) -> Any:
        return iter(self.sections)

    def iter_segments(self) -> Any:
        return iter(self.segments)


def _file(*sections: Section, **more: Any) -> Any:
    return Elf(*sections, **more)


def _segment(kind: str = "PT_LOAD", at: int = 0, size: int = 4096, flags: int = 6, **more: int) -> dict[str, Any]:
    return {"p_type": kind, "p_vaddr": at, "p_offset": at, "p_filesz": size, "p_memsz": size, "p_align": 4096, "p_flags": flags, **more}  # fmt: skip


def _relations(*rows: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<QQq", place, info, 0) for place, info in rows)


@pytest.mark.parametrize(("at", "value", "is_right"), [
    (6, 1, True), (6, 2, False), (20, 2, False), (7, 0, True), (7, 3, True), (7, 1, False), (8, 1, False), (15, 1, False), (16, 9, True), (54, 57, False),
])  # fmt: skip
def test_the_header(at: int, value: int, is_right: bool) -> None:
    content = bytearray(64)
    content[6] = content[20] = 1
    content[54] = 56
    content[at] = value
    assert bool(mapping._header(bytes(content))) is not is_right
    content[6] = content[20] = 2  # the same, unknown version in both places
    assert mapping._header(bytes(content))


ALIGNED, OVERLAP, LOADED, OUTSIDE = "is not aligned", "overlaps", "segments to load", "is outside of what is loaded"
DYNAMIC = "PT_DYNAMIC"


@pytest.mark.parametrize(("segments", "told"), [
    ([_segment()], []), ([_segment(size=5000)], [OVERLAP]), ([_segment(), _segment(at=4096, size=4)], [OVERLAP]), ([], [LOADED]),
    ([_segment(p_align=2048)], [ALIGNED]), ([_segment(p_align=12288)], [ALIGNED]),
    ([_segment(p_align=8192)], []), ([_segment(p_offset=-8)], [ALIGNED]), ([_segment(p_memsz=4095)], [OVERLAP]), ([_segment(p_memsz=4097)], []),
    ([_segment(size=4), _segment(at=4096, size=0)], []), ([_segment(size=4, p_memsz=4097), _segment(at=4096, size=0)], [OVERLAP]),
    ([_segment(p_memsz=1 << 36)], []), ([_segment(p_memsz=(1 << 36) + 1)], [LOADED]),
    ([_segment(size=4), _segment(DYNAMIC, 8, 4088)], []), ([_segment(size=4), _segment(DYNAMIC, 8, 4089)], [OUTSIDE]),
    ([_segment(at=4096, size=0), _segment(DYNAMIC, 4095, 1)], [OUTSIDE]), ([_segment(at=4096, size=0, p_memsz=1), _segment("PT_GNU_RELRO", 4096, 4096)], []),
    ([_segment(), _segment("PT_NOTE", 9999)], []), ([_segment(), _segment("PT_GNU_RELRO", 4096, 1)], [OUTSIDE]),
])  # fmt: skip
def test_segments(segments: list[Any], told: list[str]) -> None:
    """A file of 4096 bytes."""
    loads = [segment for segment in segments if segment["p_type"] == "PT_LOAD"]
    found = list(mapping._segments(_file(segments=tuple(segments)), loads, 4096))
    assert [words for words, line in zip(told, found, strict=True) if words not in line] == []


@pytest.mark.parametrize("name", [".rela.dyn", ".rela.plt"])
@pytest.mark.parametrize(("tags", "place", "kind", "symbol", "told"), [
    ((), 4096, 8, 0, []), ((), 4152, 8, 1, []), ((), 4095, 8, 0, ["not writable"]), ((), 4153, 8, 0, ["not writable"]), ((), 8192, 8, 0, ["not writable"]),
    ((("DT_TEXTREL", 0),), 8192, 8, 0, []), ((("DT_FLAGS", 4),), 8192, 8, 0, []), ((("DT_FLAGS", 8),), 8192, 8, 0, ["not writable"]),
    ((("DT_FLAGS_1", 4),), 8192, 8, 0, ["not writable"]), ((("DT_TEXTREL", 0),), 8248, 8, 0, []), ((("DT_TEXTREL", 0),), 8249, 8, 0, ["not writable"]),
    ((), 0, 0, 0, []), ((), 4096, 99, 0, ["of type 99, by symbol 0 of 2"]), ((), 4096, 8, 2, ["by symbol 2 of 2"]), ((), 0, 99, 2, ["of 2", "not writable"]),
])  # fmt: skip
def test_relocations(name: str, tags: Any, place: int, kind: int, symbol: int, told: list[str]) -> None:
    """64 bytes from 4096 on are writable; 64 from 8192 on are not."""
    loads = [_segment(at=4096, size=64), _segment(at=8192, size=64, flags=5)]
    rows = Section(name, _relations((place, symbol << 32 | kind)))
    found = list(mapping._relations(_file(rows, Section(".dynsym", bytes(48)), Section(".dynamic", tags=tags)), loads))
    assert [words for words, line in zip(told, found, strict=True) if words not in line] == []
    without = list(mapping._relations(_file(rows, Section(".dynamic", tags=tags)), loads))
    assert any("of 0" in line for line in without) is (symbol > 0 or kind == 99)


@pytest.mark.parametrize(("count", "kind", "is_right"), [
    (0, "SHT_RELA", True), (2, "SHT_RELA", True), (3, "SHT_RELA", False), (4, "SHT_RELA", False), (2, "SHT_PROGBITS", False),
])  # fmt: skip
def test_relocations_that_are_counted(count: int, kind: str, is_right: bool) -> None:
    file = _file(Section(".rela.dyn", _relations((0, 8), (8, 8), (16, 1)), sh_type=kind))  # R_X86_64_RELATIVE is 8
    said = f"DT_RELACOUNT is {count}, more than the relative relocations that begin .rela.dyn"
    assert list(mapping._numbers(file, {}, {"DT_RELACOUNT": count})) == ([] if is_right else [said])


SOUND = {"DT_STRTAB": 64, "DT_STRSZ": 8, "DT_SYMTAB": 72, "DT_SYMENT": 24, "DT_VERNEED": 80, "DT_VERNEEDNUM": 1, "DT_INIT": 4095, "DT_FINI": 0}  # fmt: skip
TABLES: dict[str, tuple[dict[str, int], str]] = {
    "sound": ({}, ""), "address": ({"DT_STRTAB": 65}, "DT_STRTAB is 0x41"), "size": ({"DT_STRSZ": 9}, "DT_STRSZ is 9"),
    "no size": ({"DT_STRSZ": -1}, "DT_STRSZ is None"),
    "no tag": ({"DT_SYMTAB": -1}, "it has no DT_SYMTAB but a section .dynsym"), "no section": ({"DT_HASH": 64}, "it has DT_HASH without a section .hash"),
    "empty": ({"DT_RELR": 64, "DT_RELRENT": 8}, "it has DT_RELR without a section .relr.dyn"),
    "entry": ({"DT_SYMENT": 16}, "DT_SYMENT is 16, the loader takes 24"),
    "no entry": ({"DT_SYMENT": -1}, "DT_SYMENT is None"), "an entry of nothing": ({"DT_RELAENT": 9}, ""), "count": ({"DT_VERNEEDNUM": 2}, "DT_VERNEEDNUM is 2"),
    "code ends": ({"DT_INIT": 4096}, "DT_INIT is 0x1000, where there is no code"), "data": ({"DT_FINI": 8192}, "DT_FINI is 0x2000, where there is no code"),
    "not loaded": ({"DT_FINI": 20000}, "DT_FINI is 0x4e20"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_the_dynamic_section(kind: str) -> None:
    changes, told = TABLES[kind]
    tags = tuple((tag, value) for tag, value in {**SOUND, **changes}.items() if value >= 0)
    loads = (_segment(flags=5), _segment(at=8192))
    segments = (_segment("PT_NOTE", 64, p_offset=9), *loads, _segment("PT_TLS", 20000, flags=5), _segment(DYNAMIC, 256))

    def of(*tables: Section, at: int = 256, segments: tuple[Any, ...] = segments) -> list[str]:
        file = _file(Section(".dynamic", tags=tags, sh_offset=256, sh_addr=at), *tables, segments=segments)
        return list(mapping._tables(file))

    names, symbols = (Section(".dynstr", bytes(8), sh_addr=64, sh_offset=64), Section(".dynsym", bytes(24), sh_addr=72, sh_offset=72))  # fmt: skip
    more = Section(".gnu.version_r", b"x", sh_addr=80, sh_offset=80, sh_info=1), Section(".relr.dyn")
    found = of(names, symbols, *more)
    assert [told in line for line in found] == [True] * bool(told)
    if kind == "sound":
        assert of(Section(".dynstr", bytes(8), sh_addr=64, sh_offset=63), symbols, *more) == ["DT_STRTAB is 0x40, section .dynstr is at 0x40"]  # fmt: skip
        lost = ["its .dynamic section is not where the loader looks for it (PT_DYNAMIC)"]
        assert of(at=257) == of(segments=(*segments, _segment(DYNAMIC, 256))) == of(segments=segments[:-1]) == lost
        assert list(mapping._tables(_file(segments=segments))) == lost
        assert [mapping._offset(_file(segments=(_segment(at=64, size=8, p_offset=16),)), at) for at in (63, 64, 71, 72)] == [None, 16, 23, None]  # fmt: skip


def _hash_table(
    names: list[bytes], first: int, buckets: int, filters: tuple[int, ...], last: int | None = None
) -> bytes:
    hashes = [lookup_tables.gnu_hash(name) for name in names[first:]]
    starts = [next((first + i for i, h in enumerate(hashes) if h % buckets == b), 0) for b in range(buckets)]
    ends = [i + 1 == len(hashes) or h % buckets != hashes[i + 1] % buckets for i, h in enumerate(hashes)]
    chain = [h & ~1 | end for h, end in zip(hashes, ends, strict=True)][:last]
    return struct.pack(f"<4I{len(filters)}Q{buckets + len(chain)}I", buckets, first, len(filters), 5, *filters, *starts, *chain)  # fmt: skip


def test_hash_tables() -> None:
    """Every name is either found or reported by its own name."""
    names, every = sorted([b"f", b"g", b"hh"], key=lambda name: lookup_tables.gnu_hash(name) % 2), (1 << 64) - 1
    table = [b"", b"open", *names]
    assert list(lookup_tables._hashes(_hash_table(table, 2, 2, (every,)), table)) == []
    assert list(lookup_tables._hashes(_hash_table(table, 2, 2, (0,)), table)) == [f".gnu.hash does not lead to {name.decode()}" for name in names]  # fmt: skip
    for words, last in ((3, None), (1, 2)):
        assert "symbols" in next(lookup_tables._hashes(_hash_table(table, 2, 2, (every,) * words, last), table))
    assert list(lookup_tables._hashes(_hash_table(table, 2, 2, (every, every)), table)) == []
    for at, name in zip(
        (32, 36, 40), names, strict=True
    ):  # a hash in the chain, and whether it is the last of its bucket
        for bit in (1, 2):
            damaged = bytearray(_hash_table(table, 2, 2, (every,)))
            damaged[at] ^= bit
            assert list(lookup_tables._hashes(bytes(damaged), table)) == [f".gnu.hash does not lead to {name.decode()}"]
    for at in (28, 24):  # the bucket itself
        damaged = bytearray(_hash_table(table, 2, 2, (every,)))
        damaged[at] ^= 1
        assert list(lookup_tables._hashes(bytes(damaged), table)) == [".gnu.hash has other buckets than its symbols"]
    assert [lookup_tables.elf_hash(name) for name in (b"", b"GLIBC_2.2.5", b"GLIBC_2.17")] == [0, 0x09691A75, 0x06969197]  # fmt: skip


class Versions(Section):
    def iter_versions(self) -> Any:
        return self["rows"]


@pytest.mark.parametrize("name", [".gnu.version_r", ".gnu.version_d"])
@pytest.mark.parametrize(("version", "change", "is_right"), [(1, 0, True), (2, 0, False), (1, 1, False)])
def test_versions_of_symbols(name: str, version: int, change: int, is_right: bool) -> None:
    """Versions required from a library, and versions that it defines."""
    value = lookup_tables.elf_hash(b"V_1") ^ change
    entry = {"vn_version": version} if name.endswith("r") else {"vd_version": version, "vd_hash": value, "vd_ndx": 2}
    asked = {"vna_hash": value, "vna_other": 0x8002} if name.endswith("r") else {}
    table = Versions(name, rows=[(entry, [Named("V_1", **asked)])])
    bound = Section(".gnu.version", struct.pack("<4H", 0, 1, 2, 0x8002))
    said = f"{name} is of another version, or has another hash for V_1"
    assert list(lookup_tables._versions(_file(table, bound))) == ([] if is_right else [said])
    assert list(lookup_tables._versions(_file(bound))) == [".gnu.version has 1 versions without a name"]


# Device code


class Symbols(Section):
    def iter_symbols(self) -> list[Any]:
        kinds = (("", "STT_FUNC", 0), ("code", "STT_SECTION", 1), ("k", "STT_FUNC", 1), ("inner", "STT_FUNC", 1), ("taken", "STT_FUNC", 0))  # fmt: skip
        return [Named(name, st_info={"type": kind}, st_shndx=place or "SHN_UNDEF") for name, kind, place in kinds]  # fmt: skip


class Named(dict[str, Any]):
    def __init__(self, name: str, **fields: Any) -> None:
        super().__init__(fields)
        self.name = name


def _attribute(number: int, *values: int) -> bytes:
    return struct.pack(f"<BBH{len(values)}I", 4, number, 4 * len(values), *values)


@pytest.mark.parametrize(("reserved", "static", "held"), [(False, 2000, 2000), (True, 2000, 976), (True, 8, 0)])
def test_kernels_of_a_cubin(reserved: bool, static: int, held: int) -> None:
    """Only defined functions with launch attributes are kernels; the stack size is the larger of two numbers."""
    shared = _attribute(0x2F, 2, 40) + _attribute(0x11, 2, 8) + _attribute(0x12, 2, 16) + _attribute(0x11, 3, 99) + _attribute(0x2F, 2)  # fmt: skip
    own = _attribute(5, 32, 2, 3) + bytes([3, 0x19]) + struct.pack("<H", 300)
    contents = {".nv.info": shared, ".text.k": bytes(7), ".nv.shared.k": bytes(static), ".nv.local.k": b"123"}
    sections = [Symbols(".symtab"), *(Section(name, content) for name, content in contents.items())]
    sections += [Section(f".nv.info.{name}", own) for name in ("k", "code", "taken")] + [Section(".nv.shared.reserved.0")] * reserved  # fmt: skip
    facts = cubin._facts(_file(*sections, e_ident={"EI_ABIVERSION": 8}, e_flags=0x5A08))
    assert (facts.arch, facts.functions) == ("sm_90a", ("inner", "k"))
    assert facts.kernels == (cubin.KernelFacts("k", 40, 16, 3, held, 192, 300, 7),)
    assert [cubin.architecture(abi, flags) for abi in (7, 8) for flags in (0x850, 0x5A08)] == [
        "sm_80a",
        "sm_8a",
        "sm_8",
        "sm_90a",
    ]
    assert [cubin.architecture(7, 0x150), cubin.architecture(8, 0x5000)] == ["sm_80", "sm_80"]
    for abi in (6, 9):
        with pytest.raises(EmbeddedError, match=f"ELF ABI version {abi}; this audit reads 7 and 8"):
            cubin.architecture(abi, 0)
    bare = cubin._facts(_file(Symbols(".symtab"), e_ident={"EI_ABIVERSION": 8}, e_flags=0x5A08))
    assert (bare.kernels, bare.functions) == ((), ("inner", "k"))
    with pytest.raises(EmbeddedError, match="runs 1 bytes over its section"):
        list(cubin._attributes(own[:4] + own[4:15]))
    assert list(cubin._attributes(own[:16] + b"abc")) == [(5, own[4:16])]


def test_entries_of_a_ptx_module() -> None:
    head = ".version 8.7\n.target sm_80\n.visible .entry b(.param .b8 a, .param .align 16 .b8 p[24], .param .u64 q)"
    body = "{\n .shared .align 4 .f32 s[4][8];\n .local .b8 d[12];\n .shared .u8 one;\n {\n fma.rn.bf16x2 a, b, c;\n }\n }"  # fmt: skip
    text = f"{head} .maxntid 32, 4 {body}\n.entry a() {{\n .shared .b8 z;\n}}\n"
    assert read_ptx(text.encode() + b"\0", "x").entries == (PtxEntry("a", 1, 0, 0, 0, False), PtxEntry("b", 129, 12, 128, 48, True))  # fmt: skip
    for bad in (b"\xff", b".version 8.7", b".target sm_80"):
        with pytest.raises(EmbeddedError, match="x is not PTX"):
            read_ptx(bad, "x")


def test_a_block_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because of a limit of the multiprocessor; not reported if there is another reason already."""
    monkeypatch.setattr(launch, "block_limits", lambda *_, **__: [SimpleNamespace(blocks=0, resource="threads")])
    for threads, told in ((128, "no block fits on a multiprocessor of sm80, by its threads"), (1025, "1025 threads per block, the limit is 1024")):  # fmt: skip
        need = launch.Need("k", "k", "sm_80", 32, threads, 0, 0, 0)
        row = launch.launchability(need, load_tables().gpu("sm80"), smem_static_limit=49152, registers_limit=255)
        assert row.problems == (told,)


# Files


@pytest.mark.parametrize(("size", "packed", "told"), [
    (inputs.RATIO_FROM, 0, False), (inputs.RATIO_FROM + 1, 0, True), (20_000_000, 100_000, False), (20_000_001, 100_000, True),
    (inputs.MAX_UNPACKED, inputs.MAX_UNPACKED, False), (inputs.MAX_UNPACKED + 1, inputs.MAX_UNPACKED, True),
])  # fmt: skip
def test_how_far_a_wheel_may_unpack(size: int, packed: int, told: bool) -> None:
    member = zipfile.ZipInfo("a")
    member.file_size, member.compress_size = size, packed
    assert bool(inputs._problem_together([member])) is told
    assert bool(inputs._problem_of_each([member])) is (told and size <= inputs.MAX_UNPACKED)


def test_forms_of_a_data_descriptor() -> None:
    assert [len(form) for form in layout._descriptors((1, 0xFFFF_FFFF, 2))] == [24, 16, 20, 12]
    assert [len(form) for form in layout._descriptors((1, 2, 0x1_0000_0000))] == [24, 20]


def test_bytes_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(b"12345")
    assert (elf.read_bytes(path, 3), elf.read_bytes(path, 0), elf.read_bytes(path)) == (b"123", b"", b"12345")

    def fail(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(UnreadableError, match=r"cannot read a\.so: Input/output error"):
        elf.read_bytes(path)
