"""A kernel's parameter struct as a ctypes structure, read from the C header that declares it.

The header is plain C: structs of integers, floats, pointers and previously declared structs. The emulated library asserts every
name, offset, size and type that was read (``layout_checks``), so a misread header does not compile.
"""

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flashmoe.errors import BuildError
from flashmoe_tools.descriptors import Header

SCALARS: Mapping[str, Any] = MappingProxyType(
    {
        "int32_t": ctypes.c_int32,
        "uint32_t": ctypes.c_uint32,
        "int64_t": ctypes.c_int64,
        "uint64_t": ctypes.c_uint64,
        "float": ctypes.c_float,
    }
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_STRUCT = re.compile(r"\bstruct\s+(\w+)\s*\{([^{}]*)\}\s*;")
_ENUM = re.compile(r"\benum\s+class\s+(\w+)\s*:\s*(\w+)\s*\{")
_MEMBER = re.compile(r"((?:const\s+)?\w+)\s*(\*?)\s*\b(\w+)")


def structure(declared: Header, roots: Sequence[Path]) -> type[ctypes.Structure]:
    """The struct of that name. Raises BuildError for a header or a member that is not plain C."""
    name = declared.name.rsplit("::", 1)[-1]
    known = _structures(declared.header, tuple(roots))
    if name not in known:
        msg = f"{declared.header} declares no struct {name}; it declares: {', '.join(known) or 'none'}"
        raise BuildError(msg)
    return known[name]


@lru_cache(maxsize=16)
def _structures(header: str, roots: tuple[Path, ...]) -> Mapping[str, type[ctypes.Structure]]:
    text = _text(header, roots)
    found: dict[str, type[ctypes.Structure]] = {}
    for inner in _INCLUDE.findall(text):
        found |= _structures(inner, roots)
    enums = _enums(header, roots)
    for name, body in _STRUCT.findall(text):
        fields = [
            _member(text.strip(), found, enums, f"{header}, struct {name}") for text in body.split(";") if text.strip()
        ]
        attributes = {"_fields_": [(member, kind) for member, kind, _ in fields], "members": fields, "__slots__": ()}
        found[name] = type(name, (ctypes.Structure,), attributes)
    return MappingProxyType(found)


def _text(header: str, roots: tuple[Path, ...]) -> str:
    path = next((root / header for root in roots if (root / header).is_file()), None)
    if path is None:
        msg = f"no header {header} under {', '.join(map(str, roots))}; operations.toml names it"
        raise BuildError(msg)
    return _COMMENT.sub("", path.read_text(encoding="utf-8"))


def _enums(header: str, roots: tuple[Path, ...]) -> dict[str, Any]:
    """The enums of the header and of what it includes."""
    text = _text(header, roots)
    found = {name: SCALARS[kind] for name, kind in _ENUM.findall(text)}
    for inner in _INCLUDE.findall(text):
        found |= _enums(inner, roots)
    return found


def _member(
    text: str, known: Mapping[str, type[ctypes.Structure]], enums: Mapping[str, Any], where: str
) -> tuple[str, Any, str]:
    """(name, ctypes type, C++ type) of a member; a pointer becomes the 64-bit address that the kernel sees, an enum its number."""
    match = _MEMBER.fullmatch(text)
    kind, star, name = match.groups() if match is not None else ("", "", "")
    if star:
        return name, ctypes.c_uint64, f"{kind}*"
    if kind in SCALARS:
        return name, SCALARS[kind], kind
    if kind in enums:
        return name, enums[kind], kind
    if kind in known:
        return name, known[kind], ""
    msg = f"{where}: {' '.join(text.split())!r} is not a readable member; known: pointers, {', '.join((*SCALARS, *known))}"
    raise BuildError(msg)


def layout_checks(declared: Header, roots: Sequence[Path]) -> list[str]:
    """C++ that compiles only if the struct's layout is the one that ``structure`` computes."""
    name, struct = declared.name, structure(declared, roots)
    problem = f'"flashmoe_build/emulation/parameters.py reads {declared.header} differently"'
    lines = ["#include <cstddef>", "#include <type_traits>", "#include <utility>", f'#include "{declared.header}"']
    lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, {problem});")
    namespace = name.rpartition("::")[0]
    for member, offset, kind in _members(struct):
        if kind not in SCALARS and "*" not in kind:
            kind = f"{namespace}::{kind}"  # an enum
        lines.append(f"static_assert(offsetof({name}, {member}) == {offset}, {problem});")
        lines.append(
            f"static_assert(std::is_same<decltype(std::declval<{name}>().{member}), {kind}>::value, {problem});"
        )
    return lines


def _members(struct: Any, prefix: str = "", start: int = 0) -> Iterator[tuple[str, int, str]]:
    """(name, offset in bytes, C++ type) of every member that is not a struct."""
    for name, kind, written in struct.members:
        offset = start + getattr(struct, name).offset
        if written:
            yield f"{prefix}{name}", offset, written
        else:
            yield from _members(kind, f"{prefix}{name}.", offset)
