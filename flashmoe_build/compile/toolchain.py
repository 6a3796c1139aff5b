"""Finds the locked compiler, headers and torch in the running environment, and the machine's g++."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashmoe.errors import BuildError

NVRTC_DISTRIBUTION = "nvidia-cuda-nvrtc-cu12"
PTXAS_DISTRIBUTION = "nvidia-cuda-nvcc-cu12"
HEADERS_DISTRIBUTION = "nvidia-cuda-runtime-cu12"
PINNED_DISTRIBUTIONS = (NVRTC_DISTRIBUTION, PTXAS_DISTRIBUTION, HEADERS_DISTRIBUTION, "torch", "numpy")
MINIMUM_GXX = 11


@dataclass(frozen=True)
class Toolchain:
    """Paths are of this machine; versions and hashes are what a report or a wheel may state."""

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


@lru_cache(maxsize=1)
def find_toolchain() -> Toolchain:
    """The toolchain of this environment; raises BuildError that names the part which is missing."""
    nvrtc = _file(NVRTC_DISTRIBUTION, "libnvrtc.so.12")
    ptxas = _file(PTXAS_DISTRIBUTION, "ptxas")
    cuda = _file(HEADERS_DISTRIBUTION, "cuda_fp16.h")
    torch = _file("torch", "torch/csrc/stable/library.h")
    library = _file("torch", "libtorch_cpu.so")
    cxx, version = _host_compiler()
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
    )


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


def _host_compiler() -> tuple[str, str]:
    wanted = os.environ.get("CXX") or "g++"
    found = shutil.which(wanted)
    if found is None:
        msg = (
            f"no host compiler {wanted!r} on PATH; install g++ {MINIMUM_GXX} or newer (Debian: apt-get install g++), "
            "or set CXX"
        )
        raise BuildError(msg)
    answer = subprocess.run([found, "-dumpfullversion"], capture_output=True, text=True, check=False, timeout=30)
    version = answer.stdout.strip()
    if not re.fullmatch(r"\d+(\.\d+)*", version):
        msg = (
            f"{wanted} -dumpfullversion printed {version!r}, which is no version; g++ {MINIMUM_GXX} or newer is needed"
        )
        raise BuildError(msg)
    if int(version.split(".")[0]) < MINIMUM_GXX:
        msg = f"{wanted} is version {version}; g++ {MINIMUM_GXX} or newer is needed"
        raise BuildError(msg)
    return found, version
