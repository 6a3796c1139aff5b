"""A build's errors and numbers, with fake compilers, drivers and memory."""

from __future__ import annotations

import ctypes
import importlib.metadata
import marshal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe.errors import BuildError
from flashmoe_build.compile import archs, build, codegen, device, host, jobs, nvrtc, ptxas, resources, toolchain
from flashmoe_build.compile.build import _announce, _checks, _summary
from flashmoe_build.compile.cache import Cache, include_closure
from flashmoe_build.compile.codegen import PlacedBinary, index_json
from flashmoe_build.compile.device import DeviceCode
from flashmoe_build.compile.jobs import MEMORY_PER_JOB, run_all
from flashmoe_build.compile.toolchain import Toolchain, find_toolchain
from flashmoe_tools.report import Verdict
from flashmoe_tools.tables import load_tables


def test_a_log_names_no_folder_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: Any, folder: str) -> tuple[int, str, int]:
        return 1, f"ptxas {folder}/unit.ptx, line 3", 0

    monkeypatch.setattr(ptxas, "_run", run)
    with pytest.raises(BuildError, match=r"a unit: ptxas for sm_80 ended with 1\nptxas unit\.ptx, line 3"):
        ptxas.assemble(b"", "a unit", "sm_80", find_toolchain())


def test_an_array_without_rows_is_a_pointer_to_none() -> None:
    assert codegen._array("int", "kNone", []) == ["constexpr const int* kNone = nullptr;", ""]
    assert codegen._array("int", "kOne", ["    1,"]) == ["constexpr int kOne[] = {", "    1,", "};", ""]


def test_a_header_that_is_nowhere_is_left_to_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "there.h").write_text('#include "not_there_either.h"')
    text = '#include "not_there.h"\n#include "there.h"'
    assert include_closure(text, [tmp_path]) == include_closure(text, [], tmp_path) == (tmp_path.resolve() / "there.h",)


def test_headers_that_include_each_other(tmp_path: Path) -> None:
    for name, other in ("ab", "ba"):
        (tmp_path / f"{name}.h").write_text(f'#pragma once\n#include "{other}.h"')
    assert [path.name for path in include_closure('#include "a.h"', [tmp_path])] == ["a.h", "b.h"]


def test_the_cache_lies_in_the_build_unless_it_is_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReachedError(Exception):
        pass

    def units(*_: Any, cache: Cache, **__: Any) -> None:
        raise ReachedError(cache.folder)

    for name, stand_in in (
        ("compile_units", units),
        ("hold_until_exit", print),
        ("verify_environment", lambda *_, **__: None),
    ):
        monkeypatch.setattr(build, name, stand_in)
    for elsewhere in ("", str(tmp_path / "elsewhere")):
        monkeypatch.setenv("FLASHMOE_CACHE_DIR", elsewhere)
        with pytest.raises(ReachedError) as reached:
            build.build(tmp_path / "out", archs="none")
        assert reached.value.args[0] == (Path(elsewhere) if elsewhere else tmp_path.resolve() / "out" / "cache")


class FakeDriver:
    """libcuda with these compute capabilities; ``fails`` names the call that returns an error."""

    def __init__(self, *capabilities: tuple[int, int], fails: str = "") -> None:
        self.capabilities, self.fails = capabilities, fails

    def cuInit(self, _: int) -> int:  # noqa: N802 - the driver's name
        return int(self.fails == "cuInit")

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.capabilities)
        return int(self.fails == "cuDeviceGetCount")

    def cuDeviceGetAttribute(self, value: Any, attribute: int, index: int) -> int:  # noqa: N802
        value._obj.value = self.capabilities[index][{75: 0, 76: 1}[attribute]]
        return int(self.fails == "cuDeviceGetAttribute")


def test_native_asks_the_driver_for_every_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeDriver((9, 0), (8, 6), (9, 0)))
    assert archs.native_capabilities() == [(8, 6), (9, 0)]


def test_native_without_a_driver_or_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> Any:
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(BuildError, match=r"needs the NVIDIA driver \(libcuda\.so\.1\)"):
        archs.native_capabilities()
    for driver, message in (
        (FakeDriver(), "found no usable GPU"),
        (FakeDriver((9, 0), fails="cuInit"), "found no usable GPU"),
        (FakeDriver((9, 0), fails="cuDeviceGetCount"), "found no usable GPU"),
        (FakeDriver((9, 0), fails="cuDeviceGetAttribute"), "does not report the compute capability of GPU 0"),
    ):
        monkeypatch.setattr(ctypes, "CDLL", lambda _, driver=driver: driver)
        with pytest.raises(BuildError, match=message):
            archs.native_capabilities()


# Reports


def unit_of(root: Path, *, is_ptx: bool) -> Any:
    return next(unit for unit in load_tables(root / "csrc").units() if unit.target.is_ptx is is_ptx)


def made(root: Path, seconds: float, peak: int, *, cached: bool, is_ptx: bool = False) -> Any:
    return SimpleNamespace(unit=unit_of(root, is_ptx=is_ptx), seconds=seconds, peak_bytes=peak, cached=cached)


def test_fresh_seconds_are_of_what_was_compiled_and_the_peak_is_of_all(root: Path) -> None:
    units = (
        made(root, 1.0, 5, cached=False),
        made(root, 2.0, 9, cached=True),
        made(root, 4.0, 1, cached=False, is_ptx=True),  # its seconds belong to the front end and are counted there
    )
    front = (made(root, 8.0, 7, cached=False), made(root, 16.0, 3, cached=True))
    code = DeviceCode(units, front)
    assert (code.fresh_seconds, code.peak_bytes) == (9.0, 9)
    assert (DeviceCode((), ()).fresh_seconds, DeviceCode((), ()).peak_bytes) == (0.0, 0)


def test_checks_of_a_build(root: Path, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"\0" * 1_500_000)
    for units, device_verdict in (((), Verdict.SKIP), ((made(root, 1.0, 1, cached=True),), Verdict.PASS)):
        for peak, memory_verdict in ((MEMORY_PER_JOB, Verdict.PASS), (MEMORY_PER_JOB + 1, Verdict.WARN)):
            front = (made(root, 1.0, peak, cached=True),)
            verdicts = [check.verdict for check in _checks(DeviceCode(units, front), tmp_path / "lib.so")]
            assert verdicts == [device_verdict, memory_verdict, Verdict.PASS]
    assert _checks(DeviceCode((), ()), tmp_path / "lib.so")[2].found == "lib.so, 1.5 MB"


def test_the_summary_counts_what_was_new() -> None:
    data = {"units": [1] * 7, "cached_units": 3, "ptx": 5, "cached_ptx": 1, "library_bytes": 2_000_000}
    report: Any = SimpleNamespace(data={**data, "peak_bytes_per_job": 3_000_000_000}, seconds=1.25)
    assert _summary(report).split("built    ")[1] == (
        "7 device binaries (4 assembled from 4 new PTX of 5, 3 from the cache), library 2.0 MB, 1.2 s, "
        "largest compiler process 3.00 GB"
    )


def test_targets_are_announced(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    known = find_toolchain()
    _announce(load_tables(root / "csrc").targets[:2], 3, 2, known)
    _announce([], 0, 2, known)
    printed = capsys.readouterr().out
    names = " ".join(target.name for target in load_tables(root / "csrc").targets[:2])
    assert f"targets  {names}\n" in printed
    assert "targets  none (CPU backend only)\n" in printed
    assert "GB each" in printed


def test_a_target_without_a_kernel_is_refused(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> None:
    tables = load_tables(root / "csrc")
    target = tables.targets[0]
    monkeypatch.setattr(build, "resolve", lambda *_: [target])
    monkeypatch.setattr(build, "load_tables", lambda _: SimpleNamespace(units=lambda _: ()))
    with pytest.raises(BuildError, match=f"no kernels.toml has a kernel for {target.name}"):
        build.build(tmp_path, root=root)


def test_the_index_says_what_kind_of_code_lies_where(root: Path) -> None:
    placed = [PlacedBinary(unit_of(root, is_ptx=is_ptx), 64 * is_ptx, 7, "hash") for is_ptx in (False, True)]
    rows: Any = index_json(placed)["binaries"]
    assert [(row["kind"], row["offset"], row["size"]) for row in rows] == [("cubin", 0, 7), ("ptx", 64, 7)]


# Errors


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("1000", "400", 600), ("max", "400", 2048), ("9999", "1", 2048), ("", "", 2048), ("700", "x", 2048)],
)
def test_memory_is_what_the_machine_and_the_group_leave(
    monkeypatch: pytest.MonkeyPatch, limit: str, used: str, expected: int
) -> None:
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2 kB\nMemFree: 1 kB\n"}
    if limit:
        files |= {"/sys/fs/cgroup/memory.max": f"{limit}\n", "/sys/fs/cgroup/memory.current": f"{used}\n"}

    def read_text(path: Path, encoding: str) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(jobs.Path, "read_text", read_text)
    assert jobs.available_memory() == expected


def test_an_interruption_ends_the_queue_and_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all([1, 2], lambda item: item, 1)


class Full(Cache):
    """A cache that stores nothing."""

    def store(self, *_: object) -> None:
        pass


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> None:
    known, cache = find_toolchain(), Full(tmp_path)
    monkeypatch.setattr(nvrtc, "_run_worker", lambda *_: (b"", {}))
    with pytest.raises(BuildError, match=r"\.ptx could not be written to the cache; is the disk full\?"):
        nvrtc.compile_ptx("", "x", "compute_90", csrc=root / "csrc", toolchain=known, cache=cache)
    unit = unit_of(root, is_ptx=False)
    monkeypatch.setattr(
        device.ptxas, "assemble", lambda *_: SimpleNamespace(cubin=b"", log="", seconds=0.0, peak_bytes=0)
    )
    monkeypatch.setattr(device, "with_dtype", lambda *_: b"")
    ptx: Any = SimpleNamespace(text=b"", log="", seconds=0.0, peak_bytes=0, cached=False)
    with pytest.raises(BuildError, match=r"\.cubin could not be written to the cache"):
        device.finish_unit(unit, ptx, toolchain=known, cache=cache)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (subprocess.TimeoutExpired("x", 1), "x: NVRTC did not finish within "),
        (
            subprocess.CompletedProcess((), 3, b"", b" out of memory \n"),
            "x: the NVRTC process ended with 3: out of memory",
        ),
        (subprocess.CompletedProcess((), 0, marshal.dumps({"status": "bad", "log": " a\n"}), b""), "x: bad\na"),
    ],
)
def test_what_the_device_compiler_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, answer: Any, message: str) -> None:
    def run(*_: object, **__: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(nvrtc.subprocess, "run", run)
    with pytest.raises(BuildError) as raised:
        nvrtc._run_worker("", "x", [], find_toolchain())
    assert str(raised.value).startswith(message)


def test_a_finding_names_the_unit_and_its_row(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    done: Any = SimpleNamespace(unit=unit_of(root, is_ptx=False), log="")
    problem = SimpleNamespace(kind="spill", text="8 bytes")
    monkeypatch.setattr(device, "findings", lambda *_: [problem])
    with pytest.raises(BuildError, match=r"must not be built like this:\n  spill: 8 bytes\n"):
        device._check(done, load_tables(root / "csrc"))
    monkeypatch.setattr(device, "findings", lambda *_: [])
    device._check(done, load_tables(root / "csrc"))


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("x.cu(3): error: no such name", ""),
        ('static assertion failed with "too wide"\nstatic assertion failed with "too wide"', ":\n  too wide"),
    ],
)
def test_a_row_that_does_not_compile_says_which_and_why(
    monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path, log: str, why: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BuildError(log)

    unit = unit_of(root, is_ptx=False)
    monkeypatch.setattr(device.nvrtc, "compile_ptx", refuse)
    with pytest.raises(BuildError) as raised:
        device.compile_front_end(unit, root=root, toolchain=find_toolchain(), cache=Cache(tmp_path))
    assert str(raised.value).startswith(f"{log}\n{unit.row.source} (")
    assert str(raised.value).endswith(f"does not compile for {unit.target.name}{why}")


def test_a_compiler_of_host_code_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(host, "TIME_LIMIT", 0.1)
        with pytest.raises(BuildError, match=r"a.cpp: sleep did not finish within 0\.1 s"):
            host._run(["sleep", "5"], "a.cpp", tmp_path)
    with pytest.raises(BuildError, match=r"a.cpp: false ended with 1"):
        host._run(["false"], "a.cpp", tmp_path)
    host._run(["true"], "a.cpp", tmp_path)


def test_objects_of_sources_that_are_gone_are_removed(tmp_path: Path) -> None:
    for name in ("host_a.o", "host_b.o", "embed.o"):
        (tmp_path / name).write_bytes(b"")
    host._drop_stale_objects(tmp_path, [Path("csrc/host/a.cpp")])
    assert [path.name for path in tmp_path.iterdir()] == ["host_a.o"]


# The toolchain


def test_a_part_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no-such-thing is not installed here; `nox -s build` installs it"):
        toolchain._file("no-such-thing", "x.so")
    with pytest.raises(BuildError, match="torch is installed but lacks no-such-file; remove the environment"):
        toolchain._file("torch", "no-such-file")
    monkeypatch.setattr(importlib.metadata, "files", lambda _: None)
    with pytest.raises(BuildError, match="torch is installed but lacks"):
        toolchain._file("torch", "libtorch_cpu.so")
    monkeypatch.setattr(toolchain, "ROOT", tmp_path)
    with pytest.raises(
        BuildError, match=r"torch for aarch64 is not here; `./nox -s build -- --platform aarch64` installs it"
    ):
        toolchain._torch("aarch64" if toolchain.is_foreign("aarch64") else "x86_64")
    folder = tmp_path / ".nox" / "env" / "torch-aarch64" / "torch"
    folder.mkdir(parents=True)
    if toolchain.is_foreign("aarch64"):
        header, library = toolchain._torch("aarch64")
        assert (header.parents[3].parent, library.parent) == (folder, folder / "lib")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes a compiler that prints these words; returns its name, as in CXX."""

    def make(version: str, machine: str = "") -> str:
        path = tmp_path / "cxx"
        path.write_text(f'#!/bin/sh\n[ "$1" = -dumpmachine ] && echo "{machine}" || echo "{version}"\n')
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return str(path)

    return make


def test_the_host_compiler_is_new_enough_and_says_so(compiler: Callable[..., str]) -> None:
    here = toolchain.platform.machine()
    for version in (f"{toolchain.MINIMUM_GXX}.0.0", "13"):
        name = compiler(version)
        assert toolchain._host_compiler(here) == (name, version)
    compiler(f"{toolchain.MINIMUM_GXX - 1}.5.0")
    with pytest.raises(BuildError, match=f"g\\+\\+ {toolchain.MINIMUM_GXX}"):
        toolchain._host_compiler(here)
    for version in ("clang", "", "12."):
        compiler(version)
        with pytest.raises(BuildError, match=r"-dumpfullversion printed '.*', which is not a version"):
            toolchain._host_compiler(here)


def test_a_compiler_for_another_machine_is_one_for_it(
    compiler: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = "aarch64" if toolchain.is_foreign("aarch64") else "x86_64"
    name = compiler("12.2.0", f"{there}-linux-gnu")
    assert toolchain._host_compiler(there) == (name, "12.2.0")
    compiler("12.2.0", "riscv64-linux-gnu")
    with pytest.raises(BuildError, match=f"compiles for riscv64-linux-gnu, not for {there}"):
        toolchain._host_compiler(there)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=f"no host compiler 'no-such-compiler' on PATH.*g\\+\\+-{there}"):
        toolchain._host_compiler(there)
    with pytest.raises(BuildError, match=r"no host compiler 'no-such-compiler' on PATH.*apt-get install g\+\+\)"):
        toolchain._host_compiler(toolchain.platform.machine())


def test_a_toolchain_is_facts_that_a_wheel_may_state() -> None:
    known = find_toolchain()
    assert isinstance(known, Toolchain)
    assert replace(known, cxx_version="13") != known
    assert known.torch_version == importlib.metadata.version("torch").split("+")[0]


def test_progress_says_what_came_from_the_cache(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> None:
    said: list[str] = []

    class Progress:
        def __init__(self, _: str, total: int) -> None:
            said.append(str(total))

        def __enter__(self) -> Progress:
            return self

        def __exit__(self, *raised: object) -> None:
            pass

        def advance(self, text: str) -> None:
            said.append(text)

    monkeypatch.setattr(host, "Progress", Progress)
    monkeypatch.setattr(host, "host_sources", lambda *_: [Path("a.cpp"), Path("b.cpp")])
    monkeypatch.setattr(host, "compile_source", lambda source, **_: (source, source.name == "a.cpp"))
    monkeypatch.setattr(host, "_link", lambda objects, *_, **__: tmp_path / f"{len(objects)}.so")
    library = host.build_library(
        (),
        root=root,
        out=tmp_path,
        toolchain=find_toolchain(),
        cache=Cache(tmp_path),
        jobs=1,
        tables=load_tables(root / "csrc"),
    )
    assert said == ["3", "a.cpp cached", "b.cpp compiled"]
    assert library.name == "2.so"


def test_resources_are_held_against_each_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit nothing is reported; one above it is."""
    tables = load_tables()
    unit = next(unit for unit in tables.units(("sm_90a",)) if unit.row.threads == 128)
    gpu = tables.gpu(unit.target.gpus[0])
    fits = resources.Resources("k", gpu.registers_per_block // 128 // 8 * 8, 0, 0, 0, 0)
    assert gpu.registers_per_block % (128 * 8) == 0
    room = gpu.smem_per_block_optin - unit.row.smem_bytes(unit.dtype)

    def said(**changes: int) -> list[tuple[str, str]]:
        found = resources._limits(unit, replace(fits, **changes), tables)
        return [(finding.kind, finding.text) for finding in found]

    assert said() == said(static_shared=min(room, tables.smem_static_limit)) == []
    assert said(spill_stores=4) == [("spill", "k spills 4 bytes of stores, 0 of loads")]
    assert said(spill_loads=8) == [("spill", "k spills 0 bytes of stores, 8 of loads")]
    assert said(stack=16) == [("local_memory", "k has 16 bytes per thread in local memory")]
    more = gpu.registers_per_block + 8 * 128
    message = f"k needs {more} registers per block; {gpu.name} has {gpu.registers_per_block}"
    assert said(registers=fits.registers + 1) == [("resources", message)]
    static = tables.smem_static_limit + 1
    message = f"k needs {static} bytes of static shared memory; any GPU has {static - 1}"
    assert said(static_shared=static)[0] == ("resources", message)
    own = gpu.smem_per_block_optin + 1
    message = f"k needs {own} bytes of shared memory per block; {gpu.name} has {own - 1}"
    assert said(static_shared=room + 1)[-1] == ("resources", message)


@pytest.mark.parametrize(
    ("names", "flags"), [(None, ()), ("", ()), ("address,undefined", ("-fsanitize=address,undefined",))]
)
def test_sanitizers_are_asked_for_by_name(names: str | None, flags: tuple[str, ...]) -> None:
    assert host.sanitizers({} if names is None else {"FLASHMOE_SANITIZE": names}) == flags
