"""Finds the locked compiler, headers and torch in the running environment, and this machine's g++.

A build for another platform uses the same tools, except that the host compiler is g++ for that platform and torch's headers
and library come from that platform's wheel.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashmoe.errors import BuildError

ROOT = Path(__file__).resolve().parents[2]
NVRTC_DISTRIBUTION = "nvidia-cuda-nvrtc-cu12"
PTXAS_DISTRIBUTION = "nvidia-cuda-nvcc-cu12"
HEADERS_DISTRIBUTION = "nvidia-cuda-runtime-cu12"
PINNED_DISTRIBUTIONS = (NVRTC_DISTRIBUTION, PTXAS_DISTRIBUTION, HEADERS_DISTRIBUTION, "torch", "numpy")
MINIMUM_GXX = 11
TIME_LIMIT = 600  # seconds, for one compiler process
PLATFORM_VARIABLE = "FLASHMOE_PLATFORM"
PLATFORMS = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Toolchain:
    """Paths are on this machine; versions and hashes may go into a report or a wheel."""

    nvrtc_library: Path
    nvrtc_version: str
    nvrtc_sha256: str
    ptxas: Path
    ptxas_version: str
    ptxas_sha256: str
    cuda_include: Path
    cuda_headers_version: str
    torch_include: Path
    torch_library: Path
    torch_version: str
    cxx: str
    cxx_version: str
    platform: str


def chosen_platform(environ: Mapping[str, str]) -> str:
    """The platform of the host code: FLASHMOE_PLATFORM, else this machine's. Raises BuildError for an unsupported one."""
    chosen = environ.get(PLATFORM_VARIABLE) or platform.machine()
    if chosen not in PLATFORMS:
        msg = f"no host code for {chosen}; {PLATFORM_VARIABLE} (or --platform) is one of {', '.join(PLATFORMS)}"
        raise BuildError(msg)
    return chosen


def is_foreign(target: str) -> bool:
    """Whether code compiled for ``target`` cannot run on this machine."""
    return target != platform.machine()


@lru_cache(maxsize=1)
def find_toolchain(target: str = platform.machine()) -> Toolchain:
    """The toolchain of this environment for one of PLATFORMS; raises BuildError naming what is missing."""
    nvrtc = _file(NVRTC_DISTRIBUTION, "libnvrtc.so.12")
    ptxas = _file(PTXAS_DISTRIBUTION, "ptxas")
    cuda = _file(HEADERS_DISTRIBUTION, "cuda_fp16.h")
    torch, library = _torch(target)
    cxx, version = _host_compiler(target)
    return Toolchain(
        nvrtc_library=nvrtc,
        nvrtc_version=importlib.metadata.version(NVRTC_DISTRIBUTION),
        nvrtc_sha256=hashlib.sha256(nvrtc.read_bytes()).hexdigest(),
        ptxas=ptxas,
        ptxas_version=importlib.metadata.version(PTXAS_DISTRIBUTION),
        ptxas_sha256=hashlib.sha256(ptxas.read_bytes()).hexdigest(),
        cuda_include=cuda.parent,
        cuda_headers_version=importlib.metadata.version(HEADERS_DISTRIBUTION),
        torch_include=torch.parents[3],
        torch_library=library.parent,
        torch_version=importlib.metadata.version("torch").split("+")[0],
        cxx=cxx,
        cxx_version=version,
        platform=target,
    )


def _torch(target: str) -> tuple[Path, Path]:
    header, library = "torch/csrc/stable/library.h", "libtorch_cpu.so"
    if not is_foreign(target):
        return _file("torch", header), _file("torch", library)
    folder = ROOT / ".nox" / "env" / f"torch-{target}" / "torch"
    if not folder.is_dir():
        msg = f"torch for {target} is not here; `./nox -s build -- --platform {target}` installs it from lockfiles/build.txt"
        raise BuildError(msg)
    return folder / "include" / header, folder / "lib" / library


def _file(distribution: str, ending: str) -> Path:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError as error:
        msg = f"{distribution} is not installed here; `nox -s build` installs it from lockfiles/build.txt"
        raise BuildError(msg) from error
    for entry in files:
        if str(entry).endswith("/" + ending):
            path = Path(str(entry.locate()))
            if path.is_file():
                return path
    msg = f"{distribution} is installed but lacks {ending}; remove the environment and run `nox -s build` again"
    raise BuildError(msg)


def _host_compiler(target: str) -> tuple[str, str]:
    prefix = f"{target}-linux-gnu" if is_foreign(target) else ""
    compiler = os.environ.get("CXX") or "-".join(filter(None, (prefix, "g++")))
    found = shutil.which(compiler)
    if found is None:
        package = "-".join(filter(None, ("g++", prefix)))
        msg = (
            f"no host compiler {compiler!r} on PATH; install g++ {MINIMUM_GXX} or newer (Debian: apt-get install {package}), "
            "or set CXX"
        )
        raise BuildError(msg)
    if prefix:
        machine = subprocess.run([found, "-dumpmachine"], capture_output=True, text=True, check=False, timeout=30)
        if not machine.stdout.startswith(f"{target}-"):
            msg = f"{compiler} compiles for {machine.stdout.strip()}, not for {target}; set CXX to a g++ that does"
            raise BuildError(msg)
    answer = subprocess.run([found, "-dumpfullversion"], capture_output=True, text=True, check=False, timeout=30)
    version = answer.stdout.strip()
    if not re.fullmatch(r"\d+(\.\d+)*", version):
        msg = f"{compiler} -dumpfullversion printed {version!r}, which is not a version; g++ {MINIMUM_GXX} or newer is needed"
        raise BuildError(msg)
    if int(version.split(".")[0]) < MINIMUM_GXX:
        msg = f"{compiler} is version {version}; g++ {MINIMUM_GXX} or newer is needed"
        raise BuildError(msg)
    return found, version
