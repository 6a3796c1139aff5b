"""Compiles the emulated machine once and each kernel unit into a separate shared library, both cached by content."""

import os
import shutil
import subprocess
import threading
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from flashmoe.errors import BuildError
from flashmoe_build.compile.cache import content_key, include_closure
from flashmoe_build.compile.codegen import map_parameters, unit_source
from flashmoe_build.compile.jobs import job_count, run_all
from flashmoe_build.emulation.parameters import layout_checks
from flashmoe_tools.descriptors import TensorMaps
from flashmoe_tools.tables import Unit

REPOSITORY = Path(__file__).resolve().parents[2]
CSRC = REPOSITORY / "csrc"
CACHE = REPOSITORY / "build" / "emulation"
COMPILE_SECONDS = 300

# Kernel arithmetic is not contracted into fused multiply-adds here; NVRTC contracts by default. Kernels that need an FMA
# call fma_rn. Uninitialised locals hold a pattern (about -1.7e38 as a float).
COMMON_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-Wno-unknown-pragmas",
)
# Call sites are named relative to the repository. Not part of any key: checkouts share what one of them has compiled.
PREFIX_MAP = f"-fmacro-prefix-map={REPOSITORY}/="
# -Og compiles in half of -O2's time and a run takes as long: almost all of it is in the machine, which is compiled with -O3.
KERNEL_LEVEL = "-Og"
# -g1 gives gdb a kernel's lines and frames; more would slow down compiling, and linking the machine.
# Neither kernels nor the machine throw; without landing pads a kernel compiles in nine tenths of the time.
KERNEL_FLAGS = ("-g1", "-fno-var-tracking", "-fno-math-errno", "-fno-exceptions", "-include", "emulation/prelude.h")
# Out-of-range indices of register arrays, and int overflows and shifts, trap; the machine reports them.
TRAP_FLAGS = ("-fsanitize=bounds,signed-integer-overflow,shift", "-fsanitize-undefined-trap-on-error")
DIVISION_FLAG = "-fsanitize=integer-divide-by-zero"
POISON_FLAG = (
    "-ftrivial-auto-var-init=pattern"  # g++ 12 and later; with g++ 11, locals hold whatever happened to be on the stack
)
MACHINE_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi")
_MACHINE_LOCK = threading.Lock()
MAP_BYTES = 128  # of an encoded tensor map; also the width of the swizzle


@dataclass(frozen=True)
class Options:
    """How to compile. ``sanitize``: "", "address", "undefined" or both with a comma. ``overlay``: a folder whose files
    replace those of csrc (changed kernels)."""

    sanitize: str = ""
    overlay: Path | None = None

    def flags(self) -> tuple[str, ...]:
        if not self.sanitize:
            return ()
        return (
            *(f"-fsanitize={self.sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
            "-DFLASHMOE_EMULATION_SANITIZE",
        )

    def roots(self) -> tuple[Path, ...]:
        overlay = () if self.overlay is None else (self.overlay,)
        return (CSRC / "emulation" / "include", *overlay, CSRC)


def jobs() -> int:
    """Number of concurrent compilations and test processes: MAX_JOBS, else at most two."""
    return job_count(os.environ) if os.environ.get("MAX_JOBS") else min(2, job_count(os.environ))


@lru_cache(maxsize=1)
def compiler() -> tuple[str, str]:
    """The host compiler and its version line."""
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        msg = f"no {name} on PATH; install g++ 12 or later, or set CXX"
        raise BuildError(msg)
    version = subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]
    return path, version


@lru_cache(maxsize=1)
def poison_flags() -> tuple[str, ...]:
    """POISON_FLAG if the compiler supports it."""
    command = [compiler()[0], POISON_FLAG, "-fsyntax-only", "-x", "c++", "/dev/null"]
    known = subprocess.run(command, check=False, capture_output=True).returncode == 0
    return (POISON_FLAG,) if known else ()


@lru_cache(maxsize=1)
def trap_flags() -> tuple[str, ...]:
    """TRAP_FLAGS, plus a check of divisors on processors where dividing by zero gives 0: x86 traps by itself."""
    machine = subprocess.run([compiler()[0], "-dumpmachine"], check=True, capture_output=True, text=True).stdout
    return (*TRAP_FLAGS, DIVISION_FLAG) if machine.startswith("aarch64") else TRAP_FLAGS


def _run(command: list[str], what: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer's runtime
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=COMPILE_SECONDS, env=environment
    )
    if result.returncode != 0:
        msg = f"{what} does not compile for the CPU:\n{result.stderr.strip()[-6000:]}\ncommand: {' '.join(command)}"
        raise BuildError(msg)


def _publish(command: list[str], output: Path, what: str) -> Path:
    """Runs ``command`` with ``-o`` a temporary name, then moves the result into place, so that no half-written file is found."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.{threading.get_ident()}")
    _run([*command, "-o", str(temporary)], what)
    temporary.replace(output)
    return output


def machine_objects(options: Options) -> tuple[Path, ...]:
    """The machine's object files (csrc/emulation/*.cpp)."""
    path, version = compiler()

    def compile_one(source: Path) -> Path:
        text = source.read_text(encoding="utf-8")
        flags = (*COMMON_FLAGS, *MACHINE_FLAGS, *options.flags())
        key = content_key(text, include_closure(text, [CSRC]), CSRC, {"flags": flags, "compiler": version})
        output = CACHE / "machine" / f"{source.stem}-{key[:16]}.o"
        if not output.is_file():
            _publish([path, *flags, PREFIX_MAP, f"-I{CSRC}", "-c", str(source)], output, source.name)
        return output

    with _MACHINE_LOCK:  # of two concurrent kernels the second finds the objects that the first made
        return tuple(run_all(sorted((CSRC / "emulation").glob("*.cpp")), compile_one, jobs()))


@dataclass(frozen=True)
class _Job:
    """One library to compile: its file, named by the hash of everything that goes into it, and the compile settings."""

    name: str
    text: str
    command: tuple[str, ...]
    output: Path


def _job(name: str, text: str, arch: str, options: Options) -> _Job:
    path, version = compiler()
    roots = options.roots()
    objects = machine_objects(options)
    traps = () if options.sanitize else trap_flags()
    flags = (
        *COMMON_FLAGS,
        KERNEL_LEVEL,
        *KERNEL_FLAGS,
        *poison_flags(),
        *traps,
        f"-D__CUDA_ARCH__={arch.removeprefix('sm')}0",
        *options.flags(),
    )
    facts = {"flags": flags, "compiler": version, "objects": [item.name for item in objects]}
    # The force-included prelude is part of the key although the text does not name it.
    named = '#include "emulation/prelude.h"\n' + text
    files = include_closure(named, roots)
    key = content_key(text, files, options.overlay or CSRC, facts)
    source = CACHE / "sources" / f"{name}-{key[:16]}.cpp"
    names = [PREFIX_MAP, *([f"-fmacro-prefix-map={options.overlay}/=csrc/"] if options.overlay else [])]
    includes = [f"-I{root}" for root in roots]
    command = (path, *flags, *names, *includes, "-shared", str(source), *map(str, objects), "-Wl,-Bsymbolic")
    return _Job(name, text, command, CACHE / "kernels" / f"{name}-{key[:16]}.so")


def library(name: str, text: str, arch: str, options: Options) -> Path:
    """A shared library of one translation unit and the machine. ``arch``: what the unit is compiled for, such as sm90."""
    return _compiled(_job(name, text, arch, options))


def _compiled(job: _Job) -> Path:
    if job.output.is_file():
        return job.output
    source = CACHE / "sources" / f"{job.output.stem}.cpp"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(job.text, encoding="utf-8")
    return _publish([*job.command], job.output, job.name)


def unit_text(unit: Unit, options: Options) -> str:
    """The unit that NVRTC compiles, unchanged, and for each kernel a C entry that takes its parameters by address."""
    kind = unit.row.descriptor
    lines = [unit_source(unit), *layout_checks(kind.params, options.roots())]
    maps = "".join(
        f", *static_cast<const flashmoe::ptx::TensorMap*>(arguments[{index}])"
        for index, _ in enumerate(map_parameters(kind), start=1)
    )
    for entry in unit.entries:
        lines += [
            f'extern "C" void emulation_entry_{entry.symbol}(const void* const* arguments) {{',
            f"  {entry.symbol}(*static_cast<const {kind.params.name}*>(arguments[0]){maps});",
            "}",
        ]
    if kind.tensor_maps is not None:
        tile = ", ".join(str(getattr(unit.row, name)) for name in kind.tensor_maps.tile.split(", "))
        lines += _encode_maps(kind.params.name, kind.tensor_maps, tile)
    return "\n".join(lines) + "\n"


def _encode_maps(params: str, maps: TensorMaps, tile: str) -> list[str]:
    """The host's description of the tensor maps, encoded for the machine, one after another."""
    return [
        f'#include "{maps.header}"',
        'extern "C" const char* emulation_encode_tensor_map(',
        "    void*, int, int, uint64_t, const uint64_t*, const uint64_t*, const uint32_t*, int);",
        "",
        "// Returns null, or what is wrong.",
        'extern "C" const char* emulation_encode_maps(const void* params, void* maps) {',
        f"  const auto described = {maps.describe}(*static_cast<const {params}*>(params), {tile});",
        "  auto* at = static_cast<unsigned char*>(maps);",
        "  const char* problem = nullptr;",
        "  const auto encode = [&](const auto& map) {",
        "    if (problem != nullptr) return;",
        "    constexpr int kRank = sizeof(map.dims) / sizeof(map.dims[0]);",
        "    problem = emulation_encode_tensor_map(at, sizeof(Spec::Element), kRank, reinterpret_cast<uint64_t>(map.address),",
        f"                                          map.dims, map.strides_bytes, map.box, {MAP_BYTES});",
        f"    at += {MAP_BYTES};",
        "  };",
        *(f"  encode(described.{name});" for name in maps.names),
        "  return problem;",
        "}",
    ]


def kernel_library(unit: Unit, options: Options) -> Path:
    """The emulated library of one unit; compiled if its content is new."""
    return _compiled(_unit_job(unit, options))


def library_file(unit: Unit, options: Options) -> Path:
    """The file that ``kernel_library`` writes."""
    return _unit_job(unit, options).output


def _unit_job(unit: Unit, options: Options) -> _Job:
    major, minor = unit.virtual_capability
    make = _job if options.overlay else _job_of_checkout
    return make(unit.name, unit_text(unit, options), f"sm{major}{minor}", options)


_job_of_checkout = cache(_job)  # every case looks up its kernel; its includes are read once per process
