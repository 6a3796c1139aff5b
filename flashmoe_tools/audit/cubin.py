"""Reads one cubin with pyelftools: which kernels it holds and what each needs from a multiprocessor.

Layout (checked against cuobjdump and nvdisasm of CUDA 12.8, see tests/audit/test_cubin.py): ``.text.<kernel>`` is code;
``.nv.info`` (all functions) and ``.nv.info.<kernel>`` are attribute lists; ``.nv.shared.<kernel>`` is static shared
memory; ``.nv.local.<kernel>`` is local memory. An attribute is a format byte, a number byte and a value. The value has
16 bits, or with format 4 a 16-bit length followed by that many bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashmoe_tools.audit.elf import open_elf, section_data
from flashmoe_tools.audit.errors import AuditError, DamagedElfError, EmbeddedError

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

_SIZED = 0x04  # EIFMT_SVAL
_MAX_THREADS, _FRAME_SIZE, _MIN_STACK, _PARAM_SIZE, _REGISTERS = 0x05, 0x11, 0x12, 0x19, 0x2F
_SHARED_RESERVED_SECTION = ".nv.shared.reserved.0"
SHARED_RESERVED = 1024  # bytes reserved for the driver; part of .nv.shared.<kernel> where that exists (sm_90 on)


@dataclass(frozen=True)
class KernelFacts:
    """One entry point. Sizes in bytes; ``registers`` per thread; ``max_threads`` per block, 0 if not bounded."""

    name: str
    registers: int
    stack: int
    local: int
    smem_static: int
    max_threads: int
    param_bytes: int
    code_bytes: int

    @property
    def local_memory(self) -> int:
        return max(self.stack, self.local)


@dataclass(frozen=True)
class CubinFacts:
    """``arch`` is written as in a target's name: ``sm_90a``."""

    arch: str
    kernels: tuple[KernelFacts, ...]
    functions: tuple[str, ...]  # every global function symbol, including the entry points


def architecture(abi_version: int, flags: int) -> str:
    """The architecture in the ELF flags of a cubin; raises EmbeddedError for an unknown ABI."""
    if abi_version == 7:
        return f"sm_{flags & 0xFF}{'a' if flags & 0x800 else ''}"
    if abi_version == 8:
        return f"sm_{(flags >> 8) & 0xFF}{'a' if flags & 0x8 else ''}"
    msg = f"the cubin has ELF ABI version {abi_version}; this audit reads 7 and 8 (CUDA 11 and 12)"
    raise EmbeddedError(msg, "teach flashmoe_tools/audit/cubin.py the new layout, with cuobjdump at hand")


def read_cubin(content: bytes, name: str) -> CubinFacts:
    """Parses one cubin. Raises a subclass of AuditError for anything else."""
    elf = open_elf(content, name)
    if elf["e_machine"] != "EM_CUDA":
        msg = f"{name} is an ELF file for {elf['e_machine']}, not device code"
        raise EmbeddedError(msg, "embed NVRTC's output")
    try:
        return _facts(elf)
    except AuditError:
        raise
    except Exception as error:  # pyelftools may raise anything for a damaged file
        msg = f"{name}: a table inside cannot be read ({type(error).__name__}: {error})"
        raise DamagedElfError(msg, "compile and embed it again") from error


def _facts(elf: ELFFile) -> CubinFacts:
    symbols = list(elf.get_section_by_name(".symtab").iter_symbols())
    shared = _by_function(section_data(elf, ".nv.info") or b"")
    has_reserved = elf.get_section_by_name(_SHARED_RESERVED_SECTION) is not None
    kernels, functions = [], []
    for index, symbol in enumerate(symbols):
        if symbol["st_info"]["type"] != "STT_FUNC" or symbol["st_shndx"] == "SHN_UNDEF":
            continue
        functions.append(symbol.name)
        if elf.get_section_by_name(f".nv.info.{symbol.name}") is None:
            continue  # a device function: it has no launch attributes
        kernels.append(_kernel(elf, symbol.name, shared.get(index, {}), has_reserved=has_reserved))
    arch = architecture(elf["e_ident"]["EI_ABIVERSION"], elf["e_flags"])
    return CubinFacts(arch, tuple(sorted(kernels, key=lambda k: k.name)), tuple(sorted(functions)))


def _kernel(elf: ELFFile, name: str, shared: dict[int, int], *, has_reserved: bool) -> KernelFacts:
    own = dict(_attributes(section_data(elf, f".nv.info.{name}") or b""))
    code = elf.get_section_by_name(f".text.{name}")
    if code is None:
        msg = f"kernel {name} has launch attributes but no code"
        raise EmbeddedError(msg, "compile and embed it again")
    in_header = code["sh_info"] >> 24  # filled in up to sm_75; 0 on later architectures, which only have the attribute
    registers = shared.get(_REGISTERS, in_header)
    if in_header and in_header != registers:
        msg = f"kernel {name}: {in_header} registers in its section header, {registers} in its attribute"
        raise EmbeddedError(msg, "the cubin was edited; compile and embed it again")
    if not registers:
        msg = f"kernel {name} states no register count"
        raise EmbeddedError(msg, "the cubin was edited or is of a newer layout; compile it again with NVRTC 12.8")
    threads = own.get(_MAX_THREADS, b"")
    x, y, z = struct.unpack("<3I", threads) if len(threads) == 12 else (0, 0, 0)
    parameters = own.get(_PARAM_SIZE, b"\0\0")
    static = _size(elf, f".nv.shared.{name}")
    return KernelFacts(
        name=name,
        registers=registers,
        stack=max(shared.get(_FRAME_SIZE, 0), shared.get(_MIN_STACK, 0)),
        local=_size(elf, f".nv.local.{name}"),
        smem_static=max(0, static - SHARED_RESERVED) if has_reserved else static,
        max_threads=x * y * z,
        param_bytes=int.from_bytes(parameters[:2], "little"),
        code_bytes=code["sh_size"],
    )


def _size(elf: ELFFile, name: str) -> int:
    section = elf.get_section_by_name(name)
    return int(section["sh_size"]) if section is not None else 0


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, value) of each attribute; raises EmbeddedError if the list runs past its end."""
    position = 0
    while position + 4 <= len(data):
        form, number, value = struct.unpack_from("<BBH", data, position)
        position += 4
        if form != _SIZED:
            yield number, value.to_bytes(2, "little")
            continue
        if position + value > len(data):
            msg = f"attribute {number:#x} of a kernel runs {position + value - len(data)} bytes over its section"
            raise EmbeddedError(msg, "the cubin was edited; compile and embed it again")
        yield number, data[position : position + value]
        position += value


def _by_function(data: bytes) -> dict[int, dict[int, int]]:
    """Symbol index -> {attribute: value} for the attributes that name a function; all of these have 8 bytes."""
    found: dict[int, dict[int, int]] = {}
    for number, value in _attributes(data):
        if len(value) == 8:
            index, amount = struct.unpack("<II", value)
            found.setdefault(index, {})[number] = amount
    return found
