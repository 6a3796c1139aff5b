"""Where a needed library is and what it exports, without loading anything."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashmoe_tools.audit.elf import Symbol, exported_names, fits, provided
from flashmoe_tools.audit.torch_libraries import InstalledTorch

SYSTEM_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
_CACHED = re.compile(r"^\s+(\S+) \(libc6\b.*\) => (/.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Closure:
    """Every library that the loader would bring in, in the order of its search, and those that are nowhere."""

    libraries: Mapping[str, Path]
    absent: Mapping[str, str]  # soname -> the file that needs it

    def gives(self, symbol: Symbol) -> bool:
        return any(provided(path).gives(symbol) for path in self.libraries.values())


@dataclass(frozen=True)
class Resolver:
    """Finds libraries beside the extension, in torch, in the CUDA packages of this environment, where the loader looks."""

    near: tuple[Path, ...]  # folders of the extension and of libraries bundled in its wheel
    torch: InstalledTorch | None  # of a foreign machine too: its shims have the same names
    machine: str = "x86_64"

    def find(self, soname: str) -> Path | None:
        """The file that the loader would most likely take, or None."""
        if self.torch is not None and soname in self.torch.libraries:
            return self.torch.libraries[soname]
        triple = f"{self.machine}-linux-gnu"  # the last is where a cross compiler has that machine's libraries
        system = (f"/lib/{triple}", f"/usr/lib/{triple}", *SYSTEM_FOLDERS, f"/usr/{triple}/lib")
        before, after = ([folder / soname for folder in each] for each in (self.folders(), map(Path, system)))
        places = (*before, *loader_cache().get(soname, ()), *after)
        return next((path for path in places if path.is_file() and fits(path, self.machine)), None)

    def closure(self, name: str, needed: tuple[str, ...]) -> Closure:
        """What the file ``name`` brings in, breadth first as the loader searches."""
        found: dict[str, Path] = {}
        absent: dict[str, str] = {}
        waiting = [(soname, name) for soname in needed]
        while waiting:
            soname, user = waiting.pop(0)
            if soname in found or soname in absent:
                continue
            path = self.find(soname)
            if path is None:
                absent[soname] = user
                continue
            found[soname] = path
            waiting += [(each, soname) for each in provided(path).needed]
        return Closure(found, absent)

    def elsewhere(self, symbol: str, closure: Closure) -> str | None:
        """A library of torch that exports ``symbol`` but is not brought in."""
        libraries = self.torch.libraries if self.torch is not None else {}
        outside = ((name, path) for name, path in libraries.items() if name not in closure.libraries)
        return next((name for name, path in outside if symbol in exported_names(path)), None)

    def folders(self) -> Iterator[Path]:
        """The folders that are searched before the system's."""
        yield from self.near
        yield from cuda_folders()
        yield python_folder()
        yield from map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))


@lru_cache(maxsize=1)
def loader_cache() -> Mapping[str, tuple[Path, ...]]:
    """Files that the loader knows by name from /etc/ld.so.conf, a CUDA toolkit's among them; empty without ldconfig."""
    program = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    found: dict[str, tuple[Path, ...]] = {}
    if program is None:
        return found
    try:
        done = subprocess.run(
            [program, "-p"], capture_output=True, text=True, errors="backslashreplace", timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return found
    for name, path in _CACHED.findall(done.stdout):
        found[name] = (*found.get(name, ()), Path(path))
    return found


@lru_cache(maxsize=1)
def cuda_folders() -> tuple[Path, ...]:
    """The library folders of the nvidia-* packages that this interpreter finds: torch may lie in another folder than we do."""
    return tuple(folder for place in sys.path for folder in sorted(Path(place).glob("nvidia/*/lib")))


def python_folder() -> Path:
    """Where this interpreter's own library is, which the process has loaded before any extension."""
    return Path(sysconfig.get_config_var("LIBDIR") or sys.base_prefix)


@lru_cache(maxsize=1)
def python_exports() -> frozenset[str]:
    """What every extension module finds in the process of this interpreter: its own names, and its libraries'.

    Empty where neither its program nor its library can be read.
    """
    library = python_folder() / (sysconfig.get_config_var("INSTSONAME") or "")
    program = Path(sys.executable).resolve()
    brought = Resolver((), None, platform.machine()).closure(program.name, provided(program).needed)
    files = {program, *brought.libraries.values(), *([library] if library.is_file() else ())}
    names = frozenset().union(*(exported_names(path) for path in files))
    return names if "Py_Initialize" in names else frozenset()
