"""Host code: C++ objects, cached by content, linked with the embedded device binaries into libflashmoe.so."""

import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashmoe.errors import BuildError
from flashmoe_build.compile.cache import Cache, content_key, include_closure
from flashmoe_build.compile.codegen import PlacedBinary, embed_source, index_json, kernel_table_source
from flashmoe_build.compile.device import CompiledUnit
from flashmoe_build.compile.jobs import run_all
from flashmoe_build.compile.toolchain import TIME_LIMIT, Toolchain
from flashmoe_tools.progress import Progress
from flashmoe_tools.tables import Tables

TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10.0, the first release with a versioned stable ABI
LIBRARY_NAME = "libflashmoe.so"
ALIGNMENT = 64  # bytes, of each embedded binary
NEWEST_STRICT_GXX = 12  # the newest major version of g++ whose warnings are errors
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-ipa-cp-clone",  # took a third of the CPU backward kernels' compile time and made nothing faster
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-fno-plt",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-D_GLIBCXX_USE_CXX11_ABI=1",
    "-D_FORTIFY_SOURCE=2",
    "-fstack-protector-strong",
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
    "-DUSE_CUDA",
)
SANITIZED = (
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",
    "-O1",  # the optimiser is the slow half of a sanitized compilation
    "-U_FORTIFY_SOURCE",
    "-Wno-error",  # the sanitizers' instrumentation triggers warnings about maybe-uninitialised variables
)
PRECOMPILED = "host/precompiled.h"
_PRECOMPILING = threading.Lock()
INSTRUCTION_SETS = {"x86_64": ("sse2", "avx2", "avx512", "avx512_bf16", "amx"), "aarch64": ("neon",)}
LINK_FLAGS = (
    "-shared",
    "-Wl,--no-undefined",
    "-Wl,--as-needed",
    "-Wl,-z,relro,-z,now,-z,noexecstack",
    "-Wl,--build-id=none",
    "-Wl,--exclude-libs,ALL",
    "-Wl,--hash-style=gnu",
    f"-Wl,-soname,{LIBRARY_NAME}",
)


def sanitizers(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Compiler and linker flags if FLASHMOE_SANITIZE names sanitizers, such as ``address,undefined``; else none."""
    names = environ.get("FLASHMOE_SANITIZE", "")
    return (f"-fsanitize={names}",) if names else ()


def compile_flags(environ: Mapping[str, str], cxx_version: str) -> tuple[str, ...]:
    """Flags for every host file. Compilers newer than CI's warn more: g++ 13, for example, of references that do not dangle."""
    lenient = ("-Wno-error",) if int(cxx_version.split(".")[0]) > NEWEST_STRICT_GXX else ()
    return (*COMMON_FLAGS, *lenient, *((*sanitizers(environ), *SANITIZED) if sanitizers(environ) else ()))


def is_for(source: Path, platform: str) -> bool:
    """Whether a C++ file is compiled for ``platform``: CPU backend files are named for their instruction set, which a pragma inside selects."""
    return not any(_is_kernel(source, names) for other, names in INSTRUCTION_SETS.items() if other != platform)


def _is_kernel(source: Path, instruction_sets: Sequence[str]) -> bool:
    return any(source.stem.endswith(f"_{name}") for name in instruction_sets)


def host_sources(root: Path, generated: Path, platform: str) -> list[Path]:
    """Every C++ file of the library, in a stable order."""
    csrc = root / "csrc"
    own = set(csrc.rglob("*.cpp")) - set((csrc / "emulation").rglob("*.cpp"))
    return [*sorted(source for source in own if is_for(source, platform)), generated]


def layout_blob(units: Sequence[CompiledUnit]) -> tuple[bytes, list[PlacedBinary]]:
    """The blob of all device binaries, and the position of each."""
    blob = bytearray()
    placed = []
    for item in units:
        blob += b"\0" * (-len(blob) % ALIGNMENT)
        placed.append(PlacedBinary(item.unit, len(blob), len(item.output), item.sha256))
        blob += item.output
        if item.unit.target.is_ptx and not item.output.endswith(b"\0"):
            blob += b"\0"
    return bytes(blob), placed


def build_library(
    units: Sequence[CompiledUnit],
    *,
    root: Path,
    out: Path,
    toolchain: Toolchain,
    cache: Cache,
    jobs: int,
    tables: Tables,
) -> Path:
    """Compile the host code, embed the device binaries and link; returns the library's path."""
    generated = out / "generated"
    generated.mkdir(parents=True, exist_ok=True)
    blob, placed = layout_blob(units)
    (generated / "binaries.bin").write_bytes(blob)
    (generated / "index.json").write_text(json.dumps(index_json(placed), sort_keys=True), encoding="utf-8")
    (generated / "embed.S").write_text(embed_source("binaries.bin", "index.json"), encoding="utf-8")
    table = generated / "kernel_table.cpp"
    table.write_text(kernel_table_source(tables, placed), encoding="utf-8")
    sources = host_sources(root, table, toolchain.platform)
    _drop_stale_objects(out / "objects", sources)
    with Progress("host code", len(sources) + 1) as progress:

        def work(source: Path) -> Path:
            compiled, cached = compile_source(source, root=root, out=out, toolchain=toolchain, cache=cache)
            progress.advance(f"{source.name} {'cached' if cached else 'compiled'}")
            return compiled

        objects = run_all(sources, work, jobs)
        return _link(objects, generated, root=root, out=out, toolchain=toolchain, progress=progress)


def _object_name(source: Path) -> str:
    names = source.parts[source.parts.index("csrc") + 1 : -1] if "csrc" in source.parts else (source.parent.name,)
    return f"{'_'.join((*names, source.stem))}.o"


def _drop_stale_objects(folder: Path, sources: Sequence[Path]) -> None:
    """Removes objects whose source is gone, which the audit would otherwise take for part of the library."""
    names = {_object_name(source) for source in sources}
    for path in folder.glob("*.o"):
        if path.name not in names:
            path.unlink()


def compile_source(source: Path, *, root: Path, out: Path, toolchain: Toolchain, cache: Cache) -> tuple[Path, bool]:
    """The object of one C++ file, in ``out``/objects, and whether it was in the cache."""
    csrc = root / "csrc"
    text = source.read_text(encoding="utf-8")
    includes = include_closure(text, [csrc], source.parent)
    # Kernels of the CPU backend cannot use it: they must set their target before the first header.
    first = None if _is_kernel(source, INSTRUCTION_SETS[toolchain.platform]) else csrc / PRECOMPILED
    facts = {
        "flags": compile_flags(os.environ, toolchain.cxx_version),
        "first": first.read_text(encoding="utf-8") if first else "",
        "cxx": toolchain.cxx_version,
        "platform": toolchain.platform,
        "torch": toolchain.torch_version,
        "cuda": toolchain.cuda_headers_version,
    }
    key = content_key(text, includes, csrc, {**facts, "name": source.name})
    target = out / "objects" / _object_name(source)
    target.parent.mkdir(parents=True, exist_ok=True)

    def made() -> tuple[bytes, dict[str, Any]]:
        flags = compile_flags(os.environ, toolchain.cxx_version)
        compiler = [toolchain.cxx, *flags, *_path_flags(root, out, toolchain)]
        given = ["-include", str(_precompile(first, compiler, out=out, facts=facts))] if first else []
        _run([*compiler, *given, "-c", str(source), "-o", str(target)], source.name, cwd=root)
        return target.read_bytes(), {}

    output, _, cached = cache.get(key, ".o", made)
    if cached:
        target.write_bytes(output)
    return target, cached


def _precompile(header: Path, compiler: Sequence[str], *, out: Path, facts: Mapping[str, object]) -> Path:
    """A copy of ``header`` that g++ finds in precompiled form; the first caller that needs it makes it."""
    text = header.read_text(encoding="utf-8")
    folder = out / "precompiled" / hashlib.sha256(json.dumps([compiler, facts]).encode()).hexdigest()[:16]
    copy, compiled = folder / header.name, folder / f"{header.name}.gch"
    with _PRECOMPILING:
        if not compiled.is_file():
            shutil.rmtree(folder.parent, ignore_errors=True)  # 50 MB each
            folder.mkdir(parents=True)
            copy.write_text(text, encoding="utf-8")
            partial = compiled.with_suffix(".tmp")
            _run([*compiler, "-x", "c++-header", str(copy), "-o", str(partial)], header.name, cwd=folder)
            partial.replace(compiled)
    return copy


def _path_flags(root: Path, out: Path, toolchain: Toolchain) -> list[str]:
    prefixes = {toolchain.torch_include: "torch", toolchain.cuda_include: "cuda", out: "build", root: "."}
    return [
        *(f"-ffile-prefix-map={path}={name}" for path, name in prefixes.items()),
        f"-I{root / 'csrc'}",
        f"-isystem{toolchain.torch_include}",
        f"-isystem{toolchain.cuda_include}",
    ]


def _link(
    objects: Sequence[Path], generated: Path, *, root: Path, out: Path, toolchain: Toolchain, progress: Progress
) -> Path:
    embedded = out / "objects" / "embed.o"
    _run([toolchain.cxx, "-c", "embed.S", "-o", str(embedded)], "embed.S", cwd=generated)
    library = out / "lib" / LIBRARY_NAME
    library.parent.mkdir(parents=True, exist_ok=True)
    temporary = library.with_suffix(".tmp")
    torch = [f"-L{toolchain.torch_library}", "-Wl,--allow-shlib-undefined", "-ltorch_cpu"]
    exports = ("-Xlinker", f"--version-script={root / 'csrc' / 'host' / 'exports.map'}")  # -Wl would split at a comma
    checkers = sanitizers(os.environ)  # their symbols come from a preloaded library
    flags = [*(flag for flag in LINK_FLAGS if not checkers or flag != "-Wl,--no-undefined"), *checkers]
    command = [toolchain.cxx, *flags, *exports, *map(str, objects), str(embedded), *torch, "-o", str(temporary)]
    _run(command, LIBRARY_NAME, cwd=out)
    temporary.replace(library)
    progress.advance(f"{LIBRARY_NAME} {library.stat().st_size / 1e6:.1f} MB")
    return library


def _run(command: Sequence[str], what: str, cwd: Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=TIME_LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        msg = f"{what}: {command[0]} did not finish within {TIME_LIMIT} s"
        raise BuildError(msg) from error
    if done.returncode != 0:
        msg = f"{what}: {Path(command[0]).name} ended with {done.returncode}\n{done.stderr.strip()[-6000:]}"
        raise BuildError(msg)
