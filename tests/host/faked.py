"""Compiles an extension with a driver that needs no GPU, and runs its tests.

In a separate process, because operators exist once per process."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from flashmoe import _extension
from flashmoe_build.compile.cache import Cache
from flashmoe_build.compile.codegen import PlacedBinary, kernel_table_source
from flashmoe_build.compile.host import compile_source, sanitizers
from flashmoe_build.compile.jobs import run_all
from flashmoe_build.compile.toolchain import find_toolchain
from flashmoe_tools.tables import load_tables
from tests.host.every_call import EXPECTED, on_the_cpu

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


def compile_extension(folder: Path, operation: str, names: Iterable[str], *others: Path) -> Path:
    """Links these files of csrc/OPERATION/host and ``others`` with fake_gpu.cpp of tests/host/OPERATION."""
    return link(
        folder,
        HERE / operation / "fake_gpu.cpp",
        *(CSRC / "host" / f"{name}.cpp" for name in SHARED),
        *(CSRC / operation / "host" / f"{name}.cpp" for name in names),
        *others,
        CSRC / "cpu" / "isa.cpp",
    )


def link(folder: Path, *sources: Path) -> Path:
    """A library of these files and the whole kernel table; objects are compiled as by the build, through its cache."""
    tables, toolchain = load_tables(), find_toolchain()
    cache = Cache(Path(os.environ.get("FLASHMOE_CACHE_DIR") or ROOT / "build" / "cache"))
    placed = [PlacedBinary(unit, 0, 0, "") for unit in tables.units()]
    (folder / "table.cpp").write_text(kernel_table_source(tables, placed))

    def compiled(source: Path) -> Path:
        return compile_source(source, root=ROOT, out=folder, toolchain=toolchain, cache=cache)[0]

    objects = run_all([folder / "table.cpp", *sources], compiled, jobs=2)
    torch_library = [f"-L{toolchain.torch_library}", "-Wl,--allow-shlib-undefined", "-ltorch_cpu"]
    path = folder / "libflashmoe.so"
    own = ("-shared", "-Wl,-Bsymbolic", "-Wl,--exclude-libs,ALL")  # as in the build: a static C++ runtime stays private
    command = [toolchain.cxx, *own, *sanitizers(os.environ), *map(str, objects), *torch_library]
    subprocess.run([*command, "-o", str(path)], check=True, timeout=300)
    return path


def run_tests(library: Path, operation: str, part: ModuleType | None = None) -> None:
    """Runs tests/host/OPERATION/*on_fake_gpu.py, with the CPU's results of ``part`` of tests/arguments."""
    if part is not None:
        _extension.load()
        on_the_cpu(part, library.with_name(EXPECTED))
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
    command = [sys.executable, "-m", "pytest", *options, *map(str, (HERE / operation).glob("*on_fake_gpu.py"))]
    alone = {"FLASHMOE_LIBRARY": str(library), "FLASHMOE_TEST_REPORT": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ = {**os.environ, **alone}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
