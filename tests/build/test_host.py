"""Precompiled headers save time and change no output."""

import dataclasses
import platform
import subprocess
from pathlib import Path

import pytest

from flashmoe.errors import BuildError
from flashmoe_build.compile import host
from flashmoe_build.compile.cache import Cache
from flashmoe_build.compile.device import CompiledUnit
from flashmoe_build.compile.toolchain import Toolchain, find_toolchain
from flashmoe_tools.tables import load_tables

SOURCE = "csrc/host/copies.cpp"


def compiled(root: Path, out: Path, toolchain: Toolchain, source: str = SOURCE) -> bytes:
    cache = Cache(out / "cache")
    made, cached = host.compile_source(root / source, root=root, out=out, toolchain=toolchain, cache=cache)
    assert not cached
    return made.read_bytes()


def test_an_object_is_the_same_without_the_precompiled_headers(root: Path, tmp_path: Path) -> None:
    toolchain = find_toolchain()
    plain = tmp_path / "plain.o"
    flags = [*host.COMMON_FLAGS, *host._path_flags(root, tmp_path, toolchain)]
    subprocess.run([toolchain.cxx, *flags, "-c", str(root / SOURCE), "-o", str(plain)], cwd=root, check=True)
    assert compiled(root, tmp_path, toolchain) == plain.read_bytes()
    assert len(list(tmp_path.glob("precompiled/*/*.gch"))) == 1


def test_the_library_s_sources(root: Path) -> None:
    """They include neither the emulator nor kernels for another machine."""
    generated = root / "generated.cpp"
    for machine, other in (("x86_64", "neon"), ("aarch64", "avx2")):
        *found, last = host.host_sources(root, generated, machine)
        folders = {source.relative_to(root / "csrc").parts[0] for source in found}
        assert {"host", "attention", "moe", "cpu"} <= folders
        assert "emulation" not in folders
        assert not [source for source in found if source.stem.endswith(other)]
        assert (found, last) == (sorted(found), generated)


def test_only_ptx_ends_with_a_zero() -> None:
    """The driver reads PTX as a C string; machine code is embedded unchanged. Each is aligned."""
    units = load_tables().units()
    cubin, ptx = (next(unit for unit in units if unit.target.is_ptx is is_ptx) for is_ptx in (False, True))
    outputs = [(cubin, b"code"), (ptx, b"text"), (ptx, b"text\0"), (cubin, b"code")]
    units = [CompiledUnit(unit, output, "", "", 0.0, 0, cached=False) for unit, output in outputs]
    blob, placed = host.layout_blob(units)
    pad = b"\0" * (host.ALIGNMENT - 5)
    assert blob == b"code\0" + pad + b"text\0" + pad + b"text\0" + pad + b"code"  # the first zero is padding
    assert [one.offset for one in placed] == [host.ALIGNMENT * number for number in range(4)]


def test_a_warning_stops_the_compilers_that_ci_has_and_no_newer_one(tmp_path: Path) -> None:
    """g++ 13 mistook a reference to static memory for a dangling one, so that nothing could be built on Debian 13 and Ubuntu 24.04."""
    source = tmp_path / "unused.cpp"
    source.write_text("static int unused() { return 0; }\n")
    for version, is_refused in (("12.2.0", True), ("13.3.0", False), ("14", False)):
        command = [
            find_toolchain().cxx,
            *host.compile_flags({}, version),
            "-c",
            str(source),
            "-o",
            str(tmp_path / "unused.o"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode != 0) == is_refused, done.stderr
        assert "unused" in done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the file of another machine")
def test_a_kernel_of_the_cpu_backend_has_none(root: Path, tmp_path: Path) -> None:
    """The kernel would set its target too late, and g++ would reject headers compiled for another."""
    source = tmp_path / "kernel_avx2.cpp"
    source.write_text('#pragma GCC target("avx2")\n#include "cpu/vector_avx2.h"\n')
    assert compiled(root, tmp_path, find_toolchain(), str(source))
    assert not (tmp_path / "precompiled").exists()


def test_headers_of_a_stopped_compiler_are_made_again(root: Path, tmp_path: Path) -> None:
    toolchain = find_toolchain()
    stopped = tmp_path / "g++"
    stopped.write_text('#!/bin/sh\nfor last; do :; done\necho half > "$last"\nkill -KILL $$\n')
    stopped.chmod(0o755)
    with pytest.raises(BuildError, match=r"precompiled\.h: g\+\+ ended with -9"):
        compiled(root, tmp_path, dataclasses.replace(toolchain, cxx=str(stopped)))
    assert list(tmp_path.glob("precompiled/*/*.tmp"))
    assert not list(tmp_path.glob("precompiled/*/*.gch"))
    compiled(root, tmp_path, toolchain)
    assert len(list(tmp_path.glob("precompiled/*/*.gch"))) == 1
    assert not list(tmp_path.glob("precompiled/*/*.tmp"))
