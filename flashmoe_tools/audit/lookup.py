"""Looks up each undefined symbol of a file as the loader does: by name and version, in every library it brings in."""

import re
import sys
from dataclasses import dataclass
from functools import lru_cache

from flashmoe_tools.audit.context import Context, may_stay_open
from flashmoe_tools.audit.elf import Symbol, provided
from flashmoe_tools.audit.names import is_torch
from flashmoe_tools.audit.policy import version_key
from flashmoe_tools.audit.resolve import python_exports
from flashmoe_tools.audit.torch_libraries import SHIM

_PYTHON_NAME = re.compile(r"_?Py[A-Z_]\w*")
_BUILT_FOR = re.compile(r"\.cpython-(\d)(\d+)\w*-|\bcp(\d)(\d+)-")


@dataclass(frozen=True)
class Lookup:
    """Where the undefined symbols of one file were found."""

    found: int = 0  # in a library that was read
    open: int = 0  # weak: may stay unresolved
    torch: int = 0  # C++ names and shims of torch, which have their own checks
    python: tuple[str, ...] = ()  # exported by this interpreter
    other_python: tuple[str, ...] = ()  # exported by another Python version, so not looked up
    floor: tuple[Symbol, ...] = ()  # of a version newer than this machine's library
    missing: tuple[Symbol, ...] = ()


def look_up(context: Context) -> Lookup:
    """Judges each symbol except torch's own, which are only counted."""
    found = weak = torch = 0
    python, other_python, floor, missing = [], [], [], []
    own = context.facts.defined_names
    same_python = built_for(context) in ("", here())
    for symbol in context.facts.undefined:
        if may_stay_open(context, symbol):
            weak += 1
        elif not symbol.version and (is_torch(symbol.name) or SHIM.fullmatch(symbol.name)):
            torch += 1
        elif context.closure.gives(symbol) or (not symbol.version and symbol.name in own):
            found += 1
        elif not symbol.version and not context.ours and symbol.name in python_exports():
            python.append(symbol.name)
        elif not context.ours and _PYTHON_NAME.fullmatch(symbol.name) and not (same_python and python_exports()):
            other_python.append(symbol.name)
        elif _is_newer_than_this_machine(context, symbol):
            floor.append(symbol)
        else:
            missing.append(symbol)
    return Lookup(found, weak, torch, tuple(python), tuple(other_python), tuple(floor), tuple(missing))


def here() -> str:
    """This interpreter as ``3.11``."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def built_for(context: Context) -> str:
    """The Python version that the file's or the wheel's name states; empty if it is any or unknown."""
    name = context.facts.path.name
    stated = _BUILT_FOR.search(name) or (None if ".abi3." in name else _BUILT_FOR.search(context.wheel_name))
    if stated is None or "-abi3-" in context.wheel_name:
        return ""
    major, minor = (stated[1], stated[2]) if stated[1] else (stated[3], stated[4])
    return f"{major}.{minor}"


def _is_newer_than_this_machine(context: Context, symbol: Symbol) -> bool:
    """Whether the version exists but this machine's copy of the platform library is older than it.

    Such a symbol can only be compared with the version floor.
    """
    path = context.closure.libraries.get(symbol.library)
    family, _, number = symbol.version.partition("_")
    if path is None or family not in context.policy.versions or not number[:1].isdigit():
        return False
    here = [v.partition("_")[2] for v in provided(path).defined_versions if v.startswith(f"{family}_")]
    newest = max((version_key(v) for v in here if v[:1].isdigit()), default=(0,))
    return version_key(number) > newest and is_known_version(family, number, context.facts.machine)


@lru_cache(maxsize=256)
def is_known_version(family: str, number: str, machine: str = "x86_64") -> bool:
    """Whether auditwheel's policies know the version; also true for one newer than all of theirs."""
    try:
        from auditwheel.architecture import Architecture
        from auditwheel.libc import Libc
        from auditwheel.policy import WheelPolicies
    except ImportError:
        return True
    policies = WheelPolicies(libc=Libc.GLIBC, arch=Architecture(machine))
    known = {v for policy in policies for v in policy.symbol_versions.get(family, ()) if v[:1].isdigit()}
    return number in known or version_key(number) > max(map(version_key, known), default=(0,))
