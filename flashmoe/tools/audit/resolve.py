"""Where a needed library is and what it exports, without loading anything."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashmoe.tools.audit.elf import exported_names, provided
from flashmoe.tools.audit.torch_libraries import InstalledTorch

SYSTEM_FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")


@dataclass(frozen=True)
class Resolver:
    """Finds libraries beside the extension, in torch, in the CUDA packages of this environment, in the system."""

    near: tuple[Path, ...]  # folders of the extension and of libraries bundled in its wheel
    torch: InstalledTorch | None

    def find(self, soname: str) -> Path | None:
        """The file that the loader would most likely take, or None."""
        if self.torch is not None and soname in self.torch.libraries:
            return self.torch.libraries[soname]
        return next((path for path in (f / soname for f in self._folders()) if path.is_file()), None)

    def provider(self, symbol: str, needed: tuple[str, ...]) -> str | None:
        """The library among ``needed``, or among what those need in turn, that exports ``symbol``."""
        return next((name for name, path in self.closure(needed).items() if symbol in exported_names(path)), None)

    def closure(self, needed: tuple[str, ...]) -> dict[str, Path]:
        """Every library that the loader would bring in, breadth first as it searches them."""
        found: dict[str, Path] = {}
        waiting = list(needed)
        while waiting:
            soname = waiting.pop(0)
            path = self.find(soname) if soname not in found else None
            if path is not None:
                found[soname] = path
                waiting += provided(path).needed
        return found

    def unread(self, needed: tuple[str, ...]) -> tuple[str, ...]:
        """The needed libraries that are not on this machine."""
        return tuple(soname for soname in needed if self.find(soname) is None)

    def _folders(self) -> Iterator[Path]:
        yield from self.near
        yield from cuda_folders()
        yield from (Path(folder) for folder in SYSTEM_FOLDERS)


@lru_cache(maxsize=1)
def cuda_folders() -> tuple[Path, ...]:
    """The library folders of the nvidia-* packages in this environment."""
    return tuple(sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/lib")))
