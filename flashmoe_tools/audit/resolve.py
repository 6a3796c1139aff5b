"""Where a needed library is and what it exports, without loading anything."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from flashmoe_tools.audit.elf import Search, Symbol, exported_names, fits, provided
from flashmoe_tools.audit.torch_libraries import InstalledTorch

SYSTEM_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
_CACHED = re.compile(r"^\s+(\S+) \(libc6\b.*\) => (/.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Closure:
    """Every library that the loader would load, in its search order, and those that cannot be found."""

    libraries: Mapping[str, Path]
    absent: Mapping[str, str]  # soname -> the file that needs it
    from_torch: tuple[str, ...] = ()  # found only because torch has already loaded them
    from_sources: tuple[str, ...] = ()  # found only if a source that names them loads them first

    def gives(self, symbol: Symbol) -> bool:
        return any(provided(path).gives(symbol) for path in self.libraries.values())


@dataclass(frozen=True)
class Resolver:
    """Finds libraries where the loader looks: run paths, torch's loaded libraries, this environment, the system."""

    torch: InstalledTorch | None  # also set for a foreign machine: the shims have the same names there
    machine: str = "x86_64"
    named: Mapping[str, Path] = field(default_factory=dict)  # libraries in the wheel that its sources mention by name

    def find(self, soname: str, folders: Iterable[Path] = ()) -> Path | None:
        """The file that the loader would take, or None; a name with a slash is never searched for.

        ``folders`` are the folders of the run paths.
        """
        if "/" in soname:
            return None
        if self.torch is not None and soname in self.torch.libraries:
            return self.torch.libraries[soname]
        triple = f"{self.machine}-linux-gnu"  # the last folder is where a cross compiler keeps that machine's libraries
        system = (f"/lib/{triple}", f"/usr/lib/{triple}", *SYSTEM_FOLDERS, f"/usr/{triple}/lib")
        before, after = (
            [folder / soname for folder in each] for each in ((*folders, *self.process()), map(Path, system))
        )
        places = (*before, *loader_cache().get(soname, ()), *after)
        return next((path for path in places if path.is_file() and fits(path, self.machine)), None)

    def closure(self, path: Path, needed: tuple[str, ...], search: Search) -> Closure:
        """All libraries that the file brings in, searched breadth first like the loader.

        RUNPATH applies to the file's own needs, RPATH also to everything below it.
        """
        found: dict[str, Path] = {}
        absent: dict[str, str] = {}
        lent: list[str] = []
        named: list[str] = []
        rpath, runpath = search.folders(path.parent)
        waiting = [(soname, path.name, (*rpath, *runpath), rpath) for soname in needed]
        while waiting:
            soname, user, folders, inherited = waiting.pop(0)
            if soname in found or soname in absent:
                continue
            library = self.find(soname, folders)
            if library is None and soname in self.named:
                named.append(soname)
                library = self.named[soname]
            if library is None:
                absent[soname] = user
                continue
            found[soname] = library
            if self.torch is not None and library == self.torch.libraries.get(soname) and library.parent not in folders:
                lent.append(soname)
            brought = provided(library)
            own, runpath = brought.search.folders(library.parent)
            chain = (*own, *inherited)
            folders = runpath or chain
            waiting += [(each, soname, folders, chain) for each in brought.needed]
        return Closure(found, absent, tuple(lent), tuple(named))

    def elsewhere(self, symbol: str, closure: Closure) -> str | None:
        """A torch library that exports ``symbol`` but is not in the closure."""
        libraries = self.torch.libraries if self.torch is not None else {}
        outside = ((name, path) for name, path in libraries.items() if name not in closure.libraries)
        return next((name for name, path in outside if symbol in exported_names(path)), None)

    @staticmethod
    def process() -> Iterator[Path]:
        """Folders of the libraries that the interpreter and torch have loaded, and those in LD_LIBRARY_PATH."""
        yield from cuda_folders()
        yield python_folder()
        yield from map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))


@lru_cache(maxsize=1)
def loader_cache() -> Mapping[str, tuple[Path, ...]]:
    """Files that the loader knows by name from /etc/ld.so.conf, for example a CUDA toolkit's; empty without ldconfig."""
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
    """The library folders of the nvidia-* packages on sys.path; torch may be installed in another folder than flashmoe."""
    return tuple(folder for place in sys.path for folder in sorted(Path(place).glob("nvidia/*/lib")))


def python_folder() -> Path:
    """The folder of the interpreter's own library, which the process has loaded before any extension."""
    return Path(sysconfig.get_config_var("LIBDIR") or sys.base_prefix)


@lru_cache(maxsize=1)
def python_exports() -> frozenset[str]:
    """The names that every extension module finds in this interpreter's process: its own and its libraries'.

    Empty if neither the interpreter nor its library can be read.
    """
    library = python_folder() / (sysconfig.get_config_var("INSTSONAME") or "")
    program = Path(sys.executable).resolve()
    own = provided(program)
    brought = Resolver(None, platform.machine()).closure(program, own.needed, own.search)
    files = {program, *brought.libraries.values(), *([library] if library.is_file() else ())}
    names = frozenset().union(*(exported_names(path) for path in files))
    return names if "Py_Initialize" in names else frozenset()
