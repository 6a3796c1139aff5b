"""An extension with a driver that needs no GPU: how it is compiled, and its tests, in a process of their own because the operators exist
once in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from flashmoe_build.compile.codegen import PlacedBinary, kernel_table_source
from flashmoe_build.compile.host import PRECOMPILED, TORCH_TARGET_VERSION
from flashmoe_build.compile.toolchain import find_toolchain
from flashmoe_tools.tables import load_tables

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
SHARED = (
    "arguments",
    "check_values",
    "copies",
    "find_kernels",
    "last_kernel",
    "launch",
    "library",
    "load_kernels",
    "tensor",
    "tensor_map",
    "tile_counters",
)


def compile_extension(folder: Path, operation: str, names: Iterable[str]) -> Path:
    """csrc/OPERATION/host, the files of these names, with the kernel table and fake_gpu.cpp of tests/host/OPERATION."""
    sources = [
        HERE / operation / "fake_gpu.cpp",
        *(CSRC / "host" / f"{name}.cpp" for name in SHARED),
        *(CSRC / operation / "host" / f"{name}.cpp" for name in names),
        CSRC / "cpu" / "isa.cpp",
    ]
    return compile_library(folder / "libflashmoe.so", sources)


def compile_library(path: Path, sources: Iterable[Path]) -> Path:
    """The sources and the table of every kernel; others' headers are parsed once, as in the build."""
    tables, toolchain = load_tables(), find_toolchain()
    placed = [PlacedBinary(unit, 0, 0, "") for unit in tables.units()]
    table, header = path.with_name("table.cpp"), path.with_name("precompiled.h")
    table.write_text(kernel_table_source(tables, placed))
    header.write_text((CSRC / PRECOMPILED).read_text())
    flags = ["-std=c++17", "-O0", "-fPIC", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    includes = [f"-I{CSRC}", f"-isystem{toolchain.torch_include}", f"-isystem{toolchain.cuda_include}"]
    compiler = [toolchain.cxx, *flags, *includes]
    subprocess.run([*compiler, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True, timeout=120)
    torch_library = [f"-L{toolchain.torch_library}", "-Wl,--allow-shlib-undefined", "-ltorch_cpu"]
    files = ["-include", str(header), str(table), *map(str, sources), *torch_library]
    subprocess.run([*compiler, "-shared", "-Wl,-Bsymbolic", *files, "-o", str(path)], check=True, timeout=300)
    return path


def run_tests(library: Path, operation: str) -> None:
    """Those of tests/host/OPERATION/on_fake_gpu.py."""
    options = [
        "-q",
        "-p",
        "pytest_timeout",
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
    ]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / operation / "on_fake_gpu.py")]
    alone = {"FLASHMOE_LIBRARY": str(library), "FLASHMOE_TEST_REPORT": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ = {**os.environ, **alone}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
