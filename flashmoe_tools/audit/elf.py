"""Reads one ELF shared object or object file with pyelftools into frozen facts."""

from __future__ import annotations

import hashlib
import io
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmoe_tools.audit.errors import (
    DamagedElfError,
    ForeignMachineError,
    NoDynamicSymbolsError,
    NotElfError,
    ToolMissingError,
    UnreadableError,
)
from flashmoe_tools.audit.mapping import problem_of_mapping

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

MAGIC = b"\x7fELF"
MAX_BYTES = 4 << 30  # the largest library of torch has 1 GB
MAX_SYMBOLS = 2_000_000  # per table; libtorch_cpu.so has 100,000
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section index, value, size
_BINDINGS = {0: "local", 1: "global", 2: "weak", 10: "unique"}
_SECTION, _FILE = 3, 4  # symbol types that do not name a function or object
_UNDEFINED = 0
_DT_FLAGS_TEXTREL, _DF_STATIC_TLS = 0x4, 0x10
_STATIC_TLS = "static TLS"  # our own key among the dynamic tags
_LOADING = ("DT_AUDIT", "DT_DEPAUDIT", "DT_FILTER", "DT_AUXILIARY")  # tags other than DT_NEEDED that name a library
_NOT_FOR_IMPORT = {  # flags of DT_FLAGS_1 that make dlopen refuse a file
    0x0800_0000: "is a position-independent executable (PIE), not a shared object",
    0x40: "is marked as not to be opened at run time (-z nodlopen)",
}
_NO_IMPORT = "not for import"  # our own key among the dynamic tags
_HIDDEN_VERSION = 0x8000  # set in .gnu.version for a version that is not the default one
_LITTLE_64 = b"\x7fELF\x02\x01"  # magic, 64 bits, little-endian
MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}
_NUMBERS = {"x86_64": 62, "aarch64": 183}  # e_machine, at byte 18


@dataclass(frozen=True, slots=True)
class Symbol:
    """One symbol. ``binding`` is local, global, weak or unique.

    An undefined dynamic symbol may be bound to a ``version`` that the file expects ``library`` to define.
    """

    name: str
    defined: bool
    binding: str
    hidden: bool
    size: int
    version: str = ""
    library: str = ""

    @property
    def is_weak(self) -> bool:
        return self.binding == "weak"


@dataclass(frozen=True)
class Search:
    """Where a file tells the loader to search: RPATH also applies to the libraries' own dependencies, RUNPATH does not."""

    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()

    def folders(self, origin: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """The folders of RPATH (ignored if there is a RUNPATH) and those of RUNPATH, for a file in ``origin``."""
        rpath, runpath = (
            tuple(
                Path(re.sub(r"\$ORIGIN\b|\$\{ORIGIN\}", str(origin), part))
                for line in lines
                for part in line.split(":")
                if part
            )
            for lines in (self.rpath, self.runpath)
        )
        return () if runpath else rpath, runpath


@dataclass(frozen=True)
class ElfFacts:
    """What the audit needs to know about one file."""

    path: Path
    sha256: str
    is_shared: bool
    dynamic: tuple[Symbol, ...]
    static: tuple[Symbol, ...] | None  # None: stripped, no .symtab
    needed: tuple[str, ...]
    soname: str
    search: Search
    versions: Mapping[str, tuple[str, ...]]  # library -> version names required from it, such as GLIBC_2.17
    has_text_relocations: bool
    stack_flags: int | None  # p_flags of PT_GNU_STACK; None when the header is absent
    sections: tuple[str, ...]
    machine: str = "x86_64"
    loads: tuple[str, ...] = ()  # what DT_AUDIT, DT_DEPAUDIT, DT_FILTER and DT_AUXILIARY would load
    has_packed_relocations: bool = False  # DT_RELR, which loaders before glibc 2.36 ignore
    static_tls: int = 0  # bytes of thread-local storage that must be in the block allocated at start (DF_STATIC_TLS)

    @property
    def run_paths(self) -> tuple[str, ...]:
        return (*self.search.rpath, *self.search.runpath)

    @property
    def undefined(self) -> tuple[Symbol, ...]:
        return tuple(s for s in self.dynamic if not s.defined)

    @property
    def exported(self) -> tuple[Symbol, ...]:
        return tuple(s for s in self.dynamic if s.defined and not s.hidden and s.binding != "local")

    @property
    def defined_names(self) -> frozenset[str]:
        """Every name that this file defines, including hidden and local ones if it has a symbol table."""
        return frozenset(s.name for s in (*self.dynamic, *(self.static or ())) if s.defined)


def require_magic(path: Path) -> None:
    """Rejects a file that is not ELF or is larger than MAX_BYTES, before reading all of it."""
    start = read_bytes(path, limit=16)
    size = path.stat().st_size
    if not start.startswith(MAGIC):
        raise _no_elf(path.name, start, size)
    if size > MAX_BYTES:
        msg = f"{path.name} has {size} bytes, more than the {MAX_BYTES} that an audit reads into memory"
        raise UnreadableError(msg, "audit the extension itself, without data appended to it")


def _no_elf(name: str, start: bytes, size: int) -> NotElfError:
    looks = (
        "empty"
        if not size
        else ("text" if start.isascii() and "".join(start.decode().split()).isprintable() else "binary")
    )
    msg = f"{name} is not an ELF file: it is {looks} ({size} bytes, starts with {start!r})"
    return NotElfError(msg, "this is not what the linker wrote; build it again and audit that file")


def read_bytes(path: Path, limit: int = -1) -> bytes:
    """The file's content, or its first ``limit`` bytes; raises UnreadableError with the reason."""
    try:
        if not path.is_file():
            reason = (
                "is a folder" if path.is_dir() else ("is not a regular file" if path.exists() else "does not exist")
            )
            msg = f"{path.name} {reason}"
            raise UnreadableError(msg, "give the path of a shared object, a wheel, or a folder that holds one")
        if limit < 0:
            return path.read_bytes()
        with path.open("rb") as stream:
            return stream.read(limit)
    except OSError as error:
        msg = f"cannot read {path.name}: {error.strerror}"
        raise UnreadableError(msg, "make the file readable for this user") from error


def require_pyelftools() -> Any:
    """pyelftools' ELFFile class; raises ToolMissingError, which says how to install it, if it is missing."""
    try:
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        msg = "pyelftools is not installed; the audit reads ELF files with it"
        raise ToolMissingError(msg, "pip install 'flashmoe-kernels[tools]'; in a clone `./nox -s symbols`") from error
    return ELFFile


def open_elf(content: bytes, name: str) -> ELFFile:
    """A 64-bit little-endian ELF file from memory; raises a typed error for anything else."""
    if not content.startswith(MAGIC):
        raise _no_elf(name, content[:16], len(content))
    elf_class = require_pyelftools()
    if len(content) < 64:
        msg = f"{name} is cut short: {len(content)} bytes, an ELF header alone has 64"
        raise DamagedElfError(msg, "copy or build the file again")
    if content[4:6] != b"\x02\x01":
        msg = f"{name} is not a 64-bit little-endian ELF file (class {content[4]}, data {content[5]})"
        raise ForeignMachineError(msg, "audit the x86-64 or AArch64 build of the extension")
    _check_extent(content, name)
    try:
        return elf_class(io.BytesIO(content))
    except Exception as error:  # on damage pyelftools raises AssertionError, ELFError, construct's errors and others
        msg = f"{name}: the ELF header cannot be read ({type(error).__name__}: {error})"
        raise DamagedElfError(msg, "copy or build the file again") from error


def _check_extent(content: bytes, name: str) -> None:
    """Checks that the section and program header tables are inside the file."""
    program_offset, section_offset = struct.unpack_from("<QQ", content, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", content, 54)
    for what, end in (
        ("program", program_offset + program_size * program_count),
        ("section", section_offset + section_size * section_count),
    ):
        if end > len(content):
            msg = f"{name} is cut short: {len(content)} bytes, its {what} header table ends at byte {end}"
            raise DamagedElfError(msg, "copy or build the file again; the copy or the link did not finish")


def section_data(elf: ELFFile, name: str) -> bytes | None:
    """The bytes of a section, or None if there is no such section."""
    section = elf.get_section_by_name(name)
    if section is None:
        return None
    data: bytes = section.data()
    if len(data) != section["sh_size"] and section["sh_type"] != "SHT_NOBITS":
        msg = f"section {name} claims {section['sh_size']} bytes, the file holds {len(data)} of them"
        raise DamagedElfError(msg, "copy or build the file again")
    return data


def read_elf(path: Path) -> ElfFacts:
    """Reads a shared object or an object file. Raises a subclass of AuditError for anything else."""
    require_magic(path)
    content = read_bytes(path)
    elf = open_elf(content, path.name)
    kind = elf["e_type"]
    if elf["e_machine"] not in MACHINES or kind not in ("ET_DYN", "ET_REL"):
        msg = f"{path.name} is {kind} for {elf['e_machine']}, not a shared object for x86-64 or AArch64"
        raise ForeignMachineError(msg, "audit the x86-64 or AArch64 shared object")
    try:
        facts = _facts(path, elf, sha256=hashlib.sha256(content).hexdigest(), is_shared=kind == "ET_DYN")
        problem = problem_of_mapping(elf, content) if facts.is_shared else ""
        if problem:
            msg = f"{path.name}: the loader would see another file than its sections say: {problem}"
            raise DamagedElfError(msg, "copy or build the file again; do not load this one")
        return facts
    except (NoDynamicSymbolsError, DamagedElfError, ForeignMachineError):
        raise
    except Exception as error:  # as above: pyelftools may raise anything for a damaged table
        msg = f"{path.name}: a table inside cannot be read ({type(error).__name__}: {error})"
        raise DamagedElfError(msg, "copy or build the file again") from error


def _facts(path: Path, elf: ELFFile, *, sha256: str, is_shared: bool) -> ElfFacts:
    dynsym = elf.get_section_by_name(".dynsym")
    if is_shared and dynsym is None:
        msg = (
            f"{path.name} has no dynamic symbol table: its section headers are gone (sstrip, objcopy, UPX), so what it "
            "needs from other libraries cannot be read"
        )
        raise NoDynamicSymbolsError(msg, "audit the file as the linker wrote it, before anything strips its sections")
    versions = _versions_needed(elf)
    tags = _dynamic_tags(elf) if is_shared else {}
    for what in tags.get(_NO_IMPORT, ()):
        msg = f"{path.name} {what}: the loader refuses to import it"
        raise ForeignMachineError(msg, "link it with -shared, for import")
    symtab = elf.get_section_by_name(".symtab")
    tls = [s["p_memsz"] for s in elf.iter_segments() if s["p_type"] == "PT_TLS"]
    return ElfFacts(
        path=path,
        sha256=sha256,
        is_shared=is_shared,
        dynamic=tuple(_symbols(elf, dynsym, versions)) if dynsym is not None else (),
        static=tuple(_symbols(elf, symtab, {})) if symtab is not None else None,
        needed=tuple(tags.get("DT_NEEDED", ())),
        soname=next(iter(tags.get("DT_SONAME", ())), ""),
        search=_search(tags),
        versions=_by_library(versions),
        has_text_relocations="DT_TEXTREL" in tags,
        stack_flags=next((s["p_flags"] for s in elf.iter_segments() if s["p_type"] == "PT_GNU_STACK"), None),
        sections=tuple(s.name for s in elf.iter_sections()),
        machine=MACHINES[elf["e_machine"]],
        loads=tuple(f"{tag} {name}" for tag in _LOADING for name in tags.get(tag, ())),
        has_packed_relocations="DT_RELR" in tags,
        static_tls=max(tls, default=0) if _STATIC_TLS in tags else 0,
    )


def _search(tags: Mapping[str, list[str]]) -> Search:
    return Search(tuple(tags.get("DT_RPATH", ())), tuple(tags.get("DT_RUNPATH", ())))


def _dynamic_tags(elf: ELFFile) -> dict[str, list[str]]:
    section = elf.get_section_by_name(".dynamic")
    if section is None:
        msg = "the shared object has no .dynamic section"
        raise DamagedElfError(msg, "link it as a shared object (-shared)")
    tags: dict[str, list[str]] = {}
    strings = elf.get_section(section["sh_link"])
    for tag in section.iter_tags():
        name = str(tag.entry.d_tag)
        if name == "DT_FLAGS" and tag.entry.d_val & _DT_FLAGS_TEXTREL:
            tags.setdefault("DT_TEXTREL", []).append("")
        if name == "DT_FLAGS" and tag.entry.d_val & _DF_STATIC_TLS:
            tags.setdefault(_STATIC_TLS, []).append("")
        if name == "DT_FLAGS_1":
            why = [text for flag, text in _NOT_FOR_IMPORT.items() if tag.entry.d_val & flag]
            tags.setdefault(_NO_IMPORT, []).extend(why)
        value = next((getattr(tag, a) for a in ("needed", "soname", "rpath", "runpath") if hasattr(tag, a)), "")
        if name in _LOADING:
            value = strings.get_string(tag.entry.d_val)
        tags.setdefault(name, []).append(value)
    return tags


def _versions_needed(elf: ELFFile) -> dict[int, tuple[str, str]]:
    """Version index -> (library, version name), from .gnu.version_r."""
    section = elf.get_section_by_name(".gnu.version_r")
    if section is None:
        return {}
    return {
        auxiliary["vna_other"] & 0x7FFF: (need.name, auxiliary.name)
        for need, auxiliaries in section.iter_versions()
        for auxiliary in auxiliaries
    }


def _by_library(versions: Mapping[int, tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    libraries: dict[str, list[str]] = {}
    for library, version in versions.values():
        libraries.setdefault(library, []).append(version)
    return {library: tuple(sorted(names)) for library, names in sorted(libraries.items())}


def _symbols(elf: ELFFile, section: Any, versions: Mapping[int, tuple[str, str]]) -> Iterator[Symbol]:
    table, strings = section.data(), elf.get_section(section["sh_link"]).data()
    if len(table) != section["sh_size"] or len(table) % _SYMBOL.size:
        msg = f"{section.name} claims {section['sh_size']} bytes, the file holds {len(table)} of them"
        raise DamagedElfError(msg, "copy or build the file again")
    if len(table) > MAX_SYMBOLS * _SYMBOL.size:
        msg = f"{section.name} holds {len(table) // _SYMBOL.size} symbols, more than the {MAX_SYMBOLS} that an audit reads"
        raise DamagedElfError(msg, "no linker writes so many for an extension; look at the file before you load it")
    bound = elf.get_section_by_name(".gnu.version") if section.name == ".dynsym" else None
    indices = struct.unpack(f"<{len(table) // _SYMBOL.size}H", bound.data()) if bound is not None else None
    for number, (offset, info, other, section_index, _, size) in enumerate(_SYMBOL.iter_unpack(table)):
        if number == 0 or info & 0xF in (_SECTION, _FILE):
            continue
        name = strings[offset : strings.index(b"\0", offset)].decode("utf-8", "backslashreplace")
        library, version = versions.get(indices[number] & 0x7FFF, ("", "")) if indices is not None else ("", "")
        yield Symbol(
            name=name,
            defined=section_index != _UNDEFINED,
            binding=_BINDINGS.get(info >> 4, f"binding {info >> 4}"),
            hidden=other & 3 in (1, 2),
            size=size,
            version=version,
            library=library,
        )


@dataclass(frozen=True)
class Provided:
    """What the loader needs to know about a library: the names it exports and the libraries it needs.

    ``versions``: name -> the versions under which it is exported, if the library defines versions at all.
    """

    exports: frozenset[str]
    needed: tuple[str, ...]
    versions: Mapping[str, frozenset[str]]
    defined_versions: frozenset[str]
    search: Search = Search()

    def gives(self, symbol: Symbol) -> bool:
        """Whether the loader would resolve another file's undefined symbol to this library's definition."""
        if symbol.name not in self.exports:
            return False
        return not (symbol.version and self.defined_versions) or symbol.version in self.versions.get(symbol.name, ())


def fits(path: Path, machine: str) -> bool:
    """False for an ELF file of another machine or word size: the loader skips it and searches on."""
    start = read_bytes(path, limit=20)
    number = _NUMBERS[machine].to_bytes(2, "little")
    return not start.startswith(MAGIC) or (start.startswith(_LITTLE_64) and start[18:20] == number)


def provided(path: Path) -> Provided:
    """Reads what a library exports and needs; cached until the file changes.

    The file may be large, so its other tables are not read.
    """
    state = path.stat()
    return _provided(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=128)
def _provided(path: Path, _changed: int, _size: int) -> Provided:
    try:
        with path.open("rb") as stream:
            elf = require_pyelftools()(stream)
            section = elf.get_section_by_name(".dynsym")
            table, strings = section.data(), elf.get_section(section["sh_link"]).data()
            tags = _dynamic_tags(elf)
            defined = _versions_defined(elf)
            bound = elf.get_section_by_name(".gnu.version")
            indices = struct.unpack(f"<{len(table) // _SYMBOL.size}H", bound.data()) if bound is not None else ()
        names: set[str] = set()
        versions: dict[str, set[str]] = {}
        for number, (offset, info, _, section_index, _, _) in enumerate(_SYMBOL.iter_unpack(table)):
            if section_index == _UNDEFINED or info >> 4 == 0:
                continue
            name = strings[offset : strings.index(b"\0", offset)].decode("utf-8", "backslashreplace")
            names.add(name)
            if defined:
                versions.setdefault(name, set()).add(defined.get(indices[number] & ~_HIDDEN_VERSION, ""))
    except ToolMissingError:
        raise
    except Exception as error:  # as in read_elf
        msg = f"cannot read the dynamic symbols of {path.name} ({type(error).__name__}: {error})"
        raise DamagedElfError(msg, "install that library again") from error
    frozen = {name: frozenset(found) for name, found in versions.items()}
    needed = tuple(tags.get("DT_NEEDED", ()))
    return Provided(frozenset(names), needed, frozen, frozenset(defined.values()), _search(tags))


def _versions_defined(elf: ELFFile) -> dict[int, str]:
    """Version index -> version name, from .gnu.version_d, without the base version, which names the file."""
    section = elf.get_section_by_name(".gnu.version_d")
    if section is None:
        return {}
    rows = ((definition, next(iter(auxiliaries)).name) for definition, auxiliaries in section.iter_versions())
    return {row["vd_ndx"]: name for row, name in rows if not row["vd_flags"] & 1}


def exported_names(path: Path) -> frozenset[str]:
    """The names that a shared library exports."""
    return provided(path).exports
