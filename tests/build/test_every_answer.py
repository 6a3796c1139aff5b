"""A build's results on each side of each limit, and with and without each optional part, using fakes."""

import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe.errors import BuildError
from flashmoe_build.compile import (
    archs,
    build,
    cache,
    codegen,
    device,
    elements,
    host,
    jobs,
    nvrtc,
    nvrtc_worker,
    ptxas,
    resources,
    toolchain,
)
from flashmoe_tools.tables import load_tables

# Compilers


class Nvrtc:
    """NVRTC whose calls return these statuses; it records the compiling calls."""

    def __init__(self, **statuses: int) -> None:
        self.statuses, self.compiled = statuses, list[Any]()
        self.nvrtcGetErrorString: Any = Text(lambda status: f"error {status}".encode())

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(_: Any, *given: Any) -> int:
            if name == "nvrtcCompileProgram":
                self.compiled.append(list(given[1]))
            if name.endswith("Size"):
                given[0]._obj.value = 8
            elif name.startswith("nvrtcGet"):
                given[0].value = b"log" if "Log" in name else b"ptx"
            return self.statuses.get(name, 0)

        return call


class Text:
    def __init__(self, call: Callable[..., bytes]) -> None:
        self._call, self.restype = call, None

    def __call__(self, *given: Any) -> bytes:
        return self._call(*given)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ({}, ("ok", "log", "ptx", 1)), ({"nvrtcCreateProgram": 3}, ("error 3", "log", "", 0)), ({"nvrtcCompileProgram": 6}, ("error 6", "log", "", 1)),
        ({"nvrtcGetProgramLogSize": 1}, ("ok", "", "ptx", 1)), ({"nvrtcGetProgramLog": 1}, ("ok", "", "ptx", 1)), ({"nvrtcGetPTX": 1}, ("ok", "log", "", 1)),
    ],
)  # fmt: skip
def test_a_front_end_that_fails(
    monkeypatch: pytest.MonkeyPatch, statuses: dict[str, int], expected: tuple[Any, ...]
) -> None:
    library = Nvrtc(**statuses)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    said = nvrtc_worker.compile_job({"library": "l", "source": "s", "name": "n", "options": ["-a", "-b"]})
    assert (said["status"], said["log"], said["output"], len(library.compiled)) == expected
    assert library.compiled in ([], [[b"-a", b"-b"]])
    assert said["peak_bytes"] > 2**20
    assert 0.0 <= said["seconds"] < 60.0


@pytest.mark.parametrize(("status", "message"), [(-9, "did not finish within 600 s"), (2, "ended with 2")])
def test_an_assembler_that_fails(monkeypatch: pytest.MonkeyPatch, status: int, message: str) -> None:
    monkeypatch.setattr(ptxas, "_run", lambda *_: (status, " words ", 0))
    with pytest.raises(BuildError, match=f"^u: ptxas for sm_80 {message}\nwords$"):
        ptxas.assemble(b"", "u", "sm_80", SimpleNamespace(ptxas="p"))  # type: ignore[arg-type]
    monkeypatch.setattr(ptxas, "_run", lambda command, _: (Path(command[-1]).write_bytes(b"made") - 4, "log", 7))
    done = ptxas.assemble(b"", "u", "sm_80", SimpleNamespace(ptxas="p"))  # type: ignore[arg-type]
    assert (done.cubin, done.log, done.peak_bytes) == (b"made", "log", 7)
    assert 0.0 <= done.seconds < 60.0


@pytest.mark.parametrize(
    ("is_ptx", "output", "size"), [(False, b"abc", 3), (True, b"abc", 4), (True, b"ab\0", 3), (False, b"ab\0", 3)]
)
def test_where_a_binary_lies(is_ptx: bool, output: bytes, size: int) -> None:
    one: Any = SimpleNamespace(unit=SimpleNamespace(target=SimpleNamespace(is_ptx=is_ptx)), output=output, sha256="h")
    blob, placed = host.layout_blob([one, one])
    assert [(each.offset, each.size) for each in placed] == [(0, len(output)), (64, len(output))]
    assert blob == (output + b"\0" * (64 - len(output)) + output).ljust(64 + size, b"\0")
    assert host.layout_blob([]) == (b"", [])


@pytest.mark.parametrize("version", ["11.4.0", "12", "13.0.1"])
@pytest.mark.parametrize("names", ["", "address"])
def test_flags_of_host_code(version: str, names: str) -> None:
    lenient = ["-Wno-error"] if version.startswith("13") else []
    checked = ["-fsanitize=address", *host.SANITIZED] if names else []
    assert host.compile_flags({"FLASHMOE_SANITIZE": names}, version) == (*host.COMMON_FLAGS, *lenient, *checked)


@pytest.mark.parametrize("names", ["", "address"])
def test_a_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: str) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], what: str, cwd: Path) -> None:
        ran.append(command)
        Path(command[-1]).parent.mkdir(parents=True, exist_ok=True)
        Path(command[-1]).write_bytes(b"\0" * 1_500_000)

    monkeypatch.setattr(host, "_run", run)
    monkeypatch.setenv("FLASHMOE_SANITIZE", names)
    tools: Any = SimpleNamespace(cxx="g++", torch_library=Path("/torch"))
    said: list[str] = []
    given: Any = {
        "root": Path("/a,b"),
        "out": tmp_path,
        "toolchain": tools,
        "progress": SimpleNamespace(advance=said.append),
    }
    library = host._link([Path("a.o")], tmp_path, **given)
    assert (library, said) == (tmp_path / "lib" / host.LIBRARY_NAME, ["libflashmoe.so 1.5 MB"])
    assert ("-Wl,--no-undefined" in ran[1]) is not bool(names)
    assert ("-fsanitize=address" in ran[1]) is bool(names)
    assert [word for word in ran[1] if word.endswith(".o")] == ["a.o", str(tmp_path / "objects" / "embed.o")]
    assert "--version-script=/a,b/csrc/host/exports.map" in ran[1]


def test_names_of_objects_and_sources() -> None:
    names = {"csrc/a/b/c.cpp": "a_b_c.o", "/x/csrc/c.cpp": "c.o", "out/generated/t.cpp": "generated_t.o"}
    assert [host._object_name(Path(source)) for source in names] == list(names.values())
    for stem, platforms in (
        ("gemm_avx2", "x86_64"),
        ("gemm_neon", "aarch64"),
        ("gemm", "x86_64 aarch64"),
        ("avx2", "x86_64 aarch64"),
    ):
        assert [one for one in ("x86_64", "aarch64") if host.is_for(Path(f"{stem}.cpp"), one)] == platforms.split()


def test_a_kernel_s_line_has_every_place_filled(root: Path) -> None:
    seen = set()
    for unit in load_tables(root / "csrc").units():
        line = codegen._kernel_line(unit, unit.entries[0], 5)
        axes, costs = (part.split("}")[0].split(", ") for part in line.split("{")[2:4])
        assert (len(axes), len(costs)) == (codegen.MAX_AXES, codegen.MAX_COSTS)
        own, kind = list(unit.row.cost.values()), unit.row.descriptor
        assert [float(one) for one in costs] == [*own, *[0.0] * (codegen.MAX_COSTS - len(own))]
        assert axes[len(kind.axes) :] == ["-1"] * (codegen.MAX_AXES - len(kind.axes))
        flags = line.split("}")[1].split("{")[0].split(", ")[-3:-1]
        assert flags == [str(one).lower() for one in (unit.row.schedule == "persistent", bool(own))]
        seen.add((unit.row.schedule == "persistent", bool(own)))
    assert len(seen) > 1
    assert codegen._number((9, 0)) == 90
    assert codegen._number((12, 1)) == 121
    assert codegen._camel("head_dim") == "HeadDim"


@pytest.mark.parametrize("is_cached", [True, False])
def test_progress_of_device_code(monkeypatch: pytest.MonkeyPatch, root: Path, is_cached: bool) -> None:
    tables, said = load_tables(root / "csrc"), list[str]()
    bar, totals = SimpleNamespace(advance=said.append), list[int]()
    monkeypatch.setattr(
        device,
        "Progress",
        type(
            "P",
            (),
            {
                "__init__": lambda _, __, total: totals.append(total),
                "__enter__": lambda _: bar,
                "__exit__": lambda *_: None,
            },
        ),
    )
    ptx = SimpleNamespace(cached=is_cached, seconds=1.25, log="", peak_bytes=3)
    monkeypatch.setattr(device, "compile_front_end", lambda *_, **__: ptx)
    monkeypatch.setattr(
        device, "finish_unit", lambda unit, *_, **__: device.CompiledUnit(unit, b"abc", "h", "", 2.3456, 9, is_cached)
    )
    monkeypatch.setattr(device, "_check", lambda *_: None)
    units = [unit for unit in tables.units() if not unit.target.is_ptx][:3]
    code = device.compile_units(units, root=root, toolchain=None, cache=None, jobs=1, tables=tables)  # type: ignore[arg-type]
    assert [one.unit for one in code.units] == units
    assert totals == [len(said)]
    assert {text.split()[-1] for text in said} == ({"cached"} if is_cached else {"1.2s", "2.3s"})
    row = code.units[0].to_json()
    assert (row["seconds"], row["size"], row["peak_bytes"], row["cached"]) == (2.346, 3, 9, is_cached)
    data = build._data(
        code,
        Path(__file__),
        ["t"],
        2,
        1.23456,
        SimpleNamespace(**dict.fromkeys(toolchain.Toolchain.__dataclass_fields__, "v")),
    )  # type: ignore[arg-type]
    assert (data["device_seconds"], data["cached_units"]) == (1.235, 3 * is_cached)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("ptxas warning : Local memory used for function 'k'", "local_memory"), ("ptxas warning : Registers are spilled to local memory", "spill"),
        ("WARNING: x", "warning"), ("ptxas info : warning", ""), ("info C7510: Potential Performance Loss", "wgmma_serialised"),
        ("note: WGMMA is serialized", "wgmma_serialised"),
        ("nothing", ""), ("", ""),
    ],
)  # fmt: skip
def test_lines_of_a_log(line: str, kind: str) -> None:
    assert [(one.kind, one.text) for one in resources._warnings(f" {line} \n")] == ([(kind, line)] if kind else [])


@pytest.mark.parametrize(("per_thread", "given"), [(0, 0), (1, 8), (8, 8), (9, 16), (255, 256)])
def test_registers_come_by_eights(per_thread: int, given: int) -> None:
    assert resources._allocated_registers(per_thread) == given
    used = "ptxas info : Compiling entry function 'k' for 'sm_80'\n1 bytes stack frame, 2 bytes spill stores, 3 bytes spill loads\nUsed 4 registers"
    assert resources.parse_log(used) == (resources.Resources("k", 4, 1, 2, 3, 0),)
    assert resources.parse_log(f"{used}, 48 bytes smem\n")[0].static_shared == 48
    for gone in ("entry", "stack frame", "Used"):
        assert resources.parse_log(used.replace(gone, "")) == ()


@pytest.mark.parametrize(("environment", "argument", "found"), [({}, None, "all"), ({"FA_ARCHS": "80"}, None, "80"), ({"FA_ARCHS": "80"}, "", "80"),
    ({"FA_ARCHS": "80", "FLASHMOE_ARCHS": "90a"}, None, "90a"), ({"FLASHMOE_ARCHS": "", "FA_ARCHS": "80"}, None, "80"),
    ({"FLASHMOE_ARCHS": "80"}, "none", "none")])  # fmt: skip
def test_which_targets_are_asked_for(environment: dict[str, str], argument: str | None, found: str) -> None:
    assert archs.requested(environment, argument) == found


def test_the_best_of_what_a_gpu_can_load(root: Path) -> None:
    """Code for that GPU, then for an older GPU of its major version, then PTX; computed independently here."""
    tables = load_tables(root / "csrc")
    for major, minor in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)):
        here, best = (major, minor), None
        for target in tables.targets:
            own = target.capability
            if target.is_ptx:
                rank = 0 if own <= here else None
            elif own == here:
                rank = 2
            else:
                rank = 1 if own[0] == major and own < here and not target.is_arch_specific else None
            if rank is not None and (best is None or (rank, own) > best[0]):
                best = ((rank, own), target)
        assert archs._loadable(tables.targets, here) is (best and best[1])
    with pytest.raises(BuildError, match=r"no target runs on compute capability 3\.5; known: "):
        archs._best_for("35", tables)


@pytest.mark.parametrize("facts", ["[", "[]", "null", "{}", '{"sha256": "x"}', None])
def test_entries_that_are_no_entries(tmp_path: Path, facts: str | None) -> None:
    kept = cache.Cache(tmp_path)
    kept.store("abcd", ".o", b"made", {"log": "l"})
    assert kept.load("abcd", ".o") == (b"made", {"log": "l", "sha256": hashlib.sha256(b"made").hexdigest()})
    assert kept.path("abcd", ".o") == tmp_path / "ab" / "abcd.o"
    if facts is None:
        kept.path("abcd", ".json").unlink()
    else:
        kept.path("abcd", ".json").write_text(facts)
    assert kept.load("abcd", ".o") is None


def test_a_key_names_files_below_its_base(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("in/a.h", "a.h"):
        (tmp_path / name).write_text("x")
    below = cache.content_key("t", [tmp_path / "in" / "a.h"], tmp_path, {})
    assert below != cache.content_key("t", [tmp_path / "a.h"], tmp_path, {})
    outside = cache.content_key("t", [tmp_path / "in" / "a.h"], tmp_path / "other", {})
    assert (
        outside
        == cache.content_key("t", [tmp_path / "a.h"], tmp_path / "other", {})
        == cache.content_key("t", [tmp_path / "a.h"], tmp_path, {})
    )


@pytest.mark.parametrize(
    ("cores", "memory", "count"), [(4, 10 * jobs.MEMORY_PER_JOB, 4), (8, 3 * jobs.MEMORY_PER_JOB - 1, 2), (8, 0, 1)]
)
def test_how_many_compilers_fit(monkeypatch: pytest.MonkeyPatch, cores: int, memory: int, count: int) -> None:
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(jobs, "available_memory", lambda: memory)
    assert jobs.job_count({}) == count
    monkeypatch.setenv("GLIBC_TUNABLES", "mine")
    assert jobs.device_compiler_environment()["GLIBC_TUNABLES"] == "mine"


@pytest.mark.parametrize(("chosen", "found"), [("", "here"), ("aarch64", "aarch64"), ("riscv64", None)])
def test_the_platform(monkeypatch: pytest.MonkeyPatch, chosen: str, found: str | None) -> None:
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "x86_64")
    if found is None:
        with pytest.raises(
            BuildError, match=r"no host code for riscv64; FLASHMOE_PLATFORM \(or --platform\) is one of x86_64, aarch64"
        ):
            toolchain.chosen_platform({"FLASHMOE_PLATFORM": chosen})
    else:
        assert toolchain.chosen_platform({"FLASHMOE_PLATFORM": chosen}) == found.replace("here", "x86_64")


# Existing outputs are not rebuilt


@pytest.mark.parametrize("is_there", [True, False])
def test_a_cache_is_asked_first(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path, is_there: bool) -> None:
    ran: list[str] = []
    facts = {"log": "l", "seconds": 1.5, "peak_bytes": 3}
    monkeypatch.setattr(nvrtc, "_run_worker", lambda *_: ran.append("nvrtc") or (b"ptx", facts))
    monkeypatch.setattr(
        device.ptxas, "assemble", lambda *_: ran.append("ptxas") or SimpleNamespace(cubin=b"cubin", **facts)
    )
    monkeypatch.setattr(host, "_precompile", lambda header, *_, **__: ran.append("header") or header)
    monkeypatch.setattr(
        host, "_run", lambda command, *_, **__: ran.append("g++") or Path(command[-1]).write_bytes(b"object")
    )
    names = toolchain.Toolchain.__dataclass_fields__
    tools: Any = SimpleNamespace(**{**dict.fromkeys(names, "1"), "platform": "x86_64"})
    kept, unit = (
        cache.Cache(tmp_path / "cache"),
        next(one for one in load_tables(root / "csrc").units() if not one.target.is_ptx),
    )
    (tmp_path / "csrc" / "host").mkdir(parents=True)
    for name in (host.PRECOMPILED, "a.cpp", "b_avx2.cpp"):
        (tmp_path / "csrc" / name).write_text("")
    for again in (False, True) if is_there else (False,):
        ran.clear()
        ptx = nvrtc.compile_ptx("text", "n", "compute_80", csrc=tmp_path, toolchain=tools, cache=kept)
        done = device.finish_unit(unit, ptx, toolchain=tools, cache=kept)
        objects = [host.compile_source(tmp_path / "csrc" / name, root=tmp_path, out=tmp_path / "out", toolchain=tools, cache=kept)
                   for name in ("a.cpp", "b_avx2.cpp")]  # fmt: skip
        assert ran == ([] if again else ["nvrtc", "ptxas", "header", "g++", "g++"])
        assert (ptx.text, ptx.cached, ptx.log, done.output, done.cached, done.log) == (
            b"ptx",
            again,
            "l",
            b"cubin",
            again,
            "ll",
        )
        assert [(path.name, path.read_bytes(), cached) for path, cached in objects] == [
            *(("a.o", b"object", again), ("b_avx2.o", b"object", again))
        ]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("virtual", ["compute_75", "compute_80", "compute_90", "compute_100"])
def test_ptx_of_one_type(dtype: str, virtual: str) -> None:
    given = b"add.xf16 a; cvt.f32.bf16 %f1, %h2; cvt.rn.bf16x2.e4m3x2 %r1, %h3;"
    old = dtype == "bf16" and virtual in ("compute_75", "compute_80")
    widened = b"mov.b32 %f1, {0, %h2};" if old else b"cvt.f32.bf16 %f1, %h2;"
    found = elements.with_dtype(given, dtype, virtual)
    assert found.startswith(b"add." + dtype.encode() + b" a; " + widened + b" { .reg .b32 half2")
    assert b"cvt.rn.f16x2.e4m3x2 half2, %h3;" in found
    assert found.endswith(b"prmt.b32 %r1, x, y, 0x7632; }")
