"""Which symbols torch exports: the installed torch's own libraries, and the stable C shims as data for each version.

The data file is written from a real libtorch by ``python -m flashmoe_tools.audit.torch_libraries --write`` run in an
environment that has that torch; add one file per version, never edit an existing one.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashmoe_tools.audit.elf import exported_names
from flashmoe_tools.audit.errors import ShimDataError
from flashmoe_tools.audit.policy import DATA, version_key

SHIM = re.compile(r"(?:aoti_torch|torch)_[a-z0-9_A-Z]+")
SHIM_LIBRARIES = ("libtorch_cpu.so", "libtorch_cuda.so")
SCHEMA = "flashmoe.shims/2"


@dataclass(frozen=True)
class Shims:
    """The shims of one torch: symbol -> library that exports it."""

    version: str
    library: Mapping[str, str]


@dataclass(frozen=True)
class InstalledTorch:
    """The torch of this environment, found without importing it."""

    version: str
    libraries: Mapping[str, Path]


def release(version: str) -> str:
    """``2.10.0+cu128`` -> ``2.10.0``."""
    return version.split("+", 1)[0]


@lru_cache(maxsize=1)
def installed_torch() -> InstalledTorch | None:
    """The torch that `import torch` would load here, or None."""
    try:
        spec = importlib.util.find_spec("torch")
        version = importlib.metadata.version("torch")
    except (ImportError, ValueError, importlib.metadata.PackageNotFoundError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "lib"
    return InstalledTorch(version, {path.name: path for path in sorted(folder.glob("lib*.so*"))})


def shim_data(version: str) -> Shims:
    """The shims that a torch of ``version`` certainly has: those of the newest data file up to that version.

    The stable ABI only grows, so an older file is a safe lower bound. Raises ShimDataError below the oldest file.
    """
    files = {path.stem.removeprefix("torch_shims_"): path for path in DATA.glob("torch_shims_*.json")}
    usable = sorted((name for name in files if version_key(name) <= version_key(release(version))), key=version_key)
    if not usable:
        msg = f"no shim data for torch {version}; there is data for {', '.join(sorted(files)) or 'no version'}"
        raise ShimDataError(
            msg, "in an environment with that torch, run `python -m flashmoe_tools.audit.torch_libraries --write`"
        )
    payload = json.loads(files[usable[-1]].read_text(encoding="utf-8"))
    if payload.get("schema") != SCHEMA:
        msg = f"{files[usable[-1]].name} has schema {payload.get('schema')!r}, this audit reads {SCHEMA!r}"
        raise ShimDataError(msg, "rewrite the file with this version's --write command")
    return Shims(
        payload["torch"], {name: library for library, names in payload["shims"].items() for name in names.split()}
    )


def shims_for(version: str) -> Shims:
    """The shims of the installed torch if it is that version, else those of the data files."""
    installed = installed_torch()
    if installed is not None and release(installed.version) == release(version):
        return _read_shims(installed)
    return shim_data(version)


def _read_shims(torch: InstalledTorch) -> Shims:
    library: dict[str, str] = {}
    for name in reversed(SHIM_LIBRARIES):  # last, so that libtorch_cpu wins: only it may be in NEEDED
        if name in torch.libraries:
            library.update({s: name for s in exported_names(torch.libraries[name]) if SHIM.fullmatch(s)})
    return Shims(torch.version, library)


def write_data(folder: Path) -> Path:
    """Write the installed torch's shims to ``torch_shims_<version>.json``; returns the file."""
    torch = installed_torch()
    if torch is None:
        msg = "torch is not installed here, so there is nothing to read shims from"
        raise ShimDataError(msg, "run this in an environment that has the torch whose shims you want")
    shims = _read_shims(torch).library
    by_library = {name: " ".join(sorted(s for s, where in shims.items() if where == name)) for name in SHIM_LIBRARIES}
    path = folder / f"torch_shims_{release(torch.version)}.json"
    payload = {"schema": SCHEMA, "torch": release(torch.version), "shims": by_library}
    path.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--write", action="store_true", required=True, help="write the installed torch's data file")
    parser.add_argument("--folder", type=Path, default=DATA)
    print(write_data(parser.parse_args().folder).name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
