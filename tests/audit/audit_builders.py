"""Builds the audit's test inputs: small extensions, cubins, wheels. The test run compiles everything itself."""

import base64
import ctypes
import hashlib
import importlib.util
import json
import subprocess
import sysconfig
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from flashmoe_tools.audit import Options, audit
from flashmoe_tools.report import Check, Report, Verdict
from flashmoe_tools.tables import Tables, Unit, load_tables

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_path("purelib"))
REAL_TABLES, ROWS = ("tables/arch.toml", "attention/operations.toml"), "attention/kernels.toml"
KERNELS_TOML = """
schema = 1
[[attention_forward.sm80]]
head_dim = 64
tile = { block_m = 64, block_n = 64, stages = 1, warps = 4 }
targets = ["sm_80", "sm_90a", "compute_80"]
why = "a small row for the tests of the audit"
options = { masked_loop = 1 }
"""
# Uses the shims like our host code, exports our names, registers nothing.
HOST = r"""
#include <cstdint>
#define EXPORT extern "C" __attribute__((visibility("default")))
extern "C" int32_t aoti_torch_get_dim(void* tensor, int64_t* dim);
extern const char flashmoe_index_begin[] __attribute__((visibility("hidden")));
EXPORT const char* flashmoe_last_kernel() { return ""; }
EXPORT const char* flashmoe_index_json() { return flashmoe_index_begin; }
EXPORT const char* flashmoe_cpu_isa() { return "none"; }
EXPORT int flashmoe_check() { return 0; }
EXPORT int flashmoe_set_cpu_isa(const char*) { int64_t dim = 0; return aoti_torch_get_dim(nullptr, &dim); }
"""
EMBED = """
.section .flashmoe.cubins,"a",@progbits
.balign 64
.incbin "cubins.bin"
.byte 0
.section .flashmoe.index,"a",@progbits
.globl flashmoe_index_begin
.hidden flashmoe_index_begin
flashmoe_index_begin:
.incbin "index.json"
.byte 0
.section .note.GNU-stack,"",@progbits
"""
EXPORTS = "{ global: flashmoe_last_kernel; flashmoe_index_json; flashmoe_cpu_isa; flashmoe_check; flashmoe_set_cpu_isa; local: *; };"


def run(command: Sequence[str], cwd: Path | None = None) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def torch_library_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "the tests of the audit link against torch: install it"
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "lib"


@lru_cache(maxsize=1)
def nvrtc() -> ctypes.CDLL:
    path = SITE / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
    assert path.is_file(), "the tests of the audit compile cubins with NVRTC 12: install the locked environment"
    return ctypes.CDLL(str(path))


@lru_cache(maxsize=256)
def device_code(source: str, target: str) -> bytes:
    """A cubin for ``sm_XX``, PTX for ``compute_XX``."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"k.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * 3)(b"--std=c++17", f"-arch={target}".encode(), b"-default-device")
    failed = library.nvrtcCompileProgram(program, 3, options)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    what = "PTX" if target.startswith("compute_") else "CUBIN"
    assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    content = ctypes.create_string_buffer(size.value)
    assert getattr(library, f"nvrtcGet{what}")(program, content) == 0
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return content.raw


def kernel_source(
    symbols: Sequence[str], *, threads: int = 128, body: str = "", parameters: str = "float* out, int n"
) -> str:
    """One entry point per symbol, with dynamic shared memory; ``body`` runs first."""
    entry = """
extern "C" __global__ void __launch_bounds__(%d) %s(%s) {
  extern __shared__ __align__(128) float tile[];
  %s
  tile[threadIdx.x] = out[threadIdx.x]; __syncthreads(); out[threadIdx.x] = tile[n - threadIdx.x];
}"""
    return "".join(entry % (threads, symbol, parameters, body) for symbol in symbols)


@dataclass(frozen=True)
class Row:
    """One embedded binary and what the index will say about it."""

    name: str
    target: str
    content: bytes
    entries: tuple[str, ...]
    smem_dynamic: int
    threads: int
    sha256: str = ""

    @property
    def digest(self) -> str:
        return self.sha256 or hashlib.sha256(self.content).hexdigest()


def row_of(unit: Unit, **source: Any) -> Row:
    entries = tuple(symbol for _, symbol in unit.entries)
    content = device_code(kernel_source(entries, **source), unit.target.name)
    return Row(unit.name, unit.target.name, content, entries, unit.row.smem_bytes(unit.dtype), unit.row.threads)


class Workshop:
    """Compiles and links in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fresh(self, name: str) -> Path:
        path = self.folder / f"{len(list(self.folder.iterdir())):03d}-{name}"
        path.mkdir(parents=True)
        return path

    def objects(self, sources: Mapping[str, str], flags: Sequence[str] = ()) -> tuple[Path, list[Path]]:
        """Compiles each source; returns the folder and its object files."""
        folder, paths = self.fresh("objects"), []
        for name, text in sources.items():
            (folder / name).write_text(text)
            target = folder / f"{Path(name).stem}.o"
            run(["g++", "-std=c++17", "-O1", "-fPIC", *flags, "-c", name, "-o", target.name], cwd=folder)
            paths.append(target)
        return folder, paths

    def extension(
        self, sources: Mapping[str, str], *, flags: Sequence[str] = (), link: Sequence[str] = (), name: str = "_C.so"
    ) -> Path:
        """A foreign extension; undefined names are allowed, as when setuptools links it."""
        folder, paths = self.objects(sources, flags)
        run(["g++", "-shared", *map(str, paths), *link, "-o", name], cwd=folder)
        return folder / name

    def library(
        self,
        rows: Sequence[Row],
        *,
        host: str = HOST,
        link: Sequence[str] = (),
        flags: Sequence[str] = (),
        exports: str = EXPORTS,
        index: Callable[[dict[str, Any]], Any] | None = None,
        embed: str = EMBED,
        torch: bool = True,
        targets: Sequence[str] | None = None,
        stated: Sequence[Row] | None = None,
        name: str = "libflashmoe.so",
    ) -> Path:
        """A small libflashmoe.so with its provenance.json, which is written from the ``stated`` rows."""
        folder = self.fresh("library")
        blob, listed = bytearray(), []
        for row in rows:
            blob += b"\0" * (-len(blob) % 64)
            listed.append(
                {
                    "name": row.name,
                    "target": row.target,
                    "kind": "ptx" if row.target.startswith("compute_") else "cubin",
                    "offset": len(blob),
                    "size": len(row.content),
                    "sha256": row.digest,
                    "entries": list(row.entries),
                    "smem_dynamic": row.smem_dynamic,
                    "threads": row.threads,
                }
            )
            blob += row.content
        payload: Any = {"schema": "flashmoe.index/1", "binaries": listed}
        payload = index(payload) if index is not None else payload
        (folder / "cubins.bin").write_bytes(bytes(blob))
        (folder / "index.json").write_text(payload if isinstance(payload, str) else json.dumps(payload))
        (folder / "embed.S").write_text(embed)
        (folder / "host.cpp").write_text(host)
        (folder / "exports.map").write_text(exports)
        needs = [f"-L{torch_library_folder()}", "-Wl,--allow-shlib-undefined", "-ltorch_cpu"] if torch else []
        run(
            [
                "g++",
                "-std=c++17",
                "-O1",
                "-fPIC",
                "-fvisibility=hidden",
                *flags,
                "-shared",
                "host.cpp",
                "embed.S",
                "-Wl,--version-script=exports.map",
                f"-Wl,-soname,{name}",
                *needs,
                *link,
                "-o",
                name,
            ],
            cwd=folder,
        )
        self.write_provenance(folder / name, stated if stated is not None else rows, targets)
        return folder / name

    @staticmethod
    def write_provenance(library: Path, rows: Sequence[Row], targets: Sequence[str] | None = None) -> None:
        record = {
            "schema": "flashmoe.provenance/1",
            "version": "0.1.0",
            "commit": "0" * 40,
            "dirty": False,
            "targets": list(targets if targets is not None else dict.fromkeys(r.target for r in rows)),
            "extension_sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
            "binaries": [
                {
                    "name": r.name,
                    "target": r.target,
                    "sha256": r.digest,
                    "size": len(r.content),
                    "entries": list(r.entries),
                }
                for r in rows
            ],
        }
        (library.parent / "provenance.json").write_text(json.dumps(record))

    def wheel(
        self,
        files: Mapping[str, bytes | str],
        *,
        name: str = "flashmoe_kernels-0.1.0-py3-none-manylinux_2_28_x86_64.whl",
        tag: str | None = None,
        pure: bool = False,
        record: Callable[[str], str] | None = None,
        metadata: bool = True,
    ) -> Path:
        """A wheel with a correct RECORD; ``record`` may change it."""
        path = self.fresh("wheel") / name
        info = "-".join(name.split("-")[:2]) + ".dist-info"
        content = {key: value.encode() if isinstance(value, str) else value for key, value in files.items()}
        if metadata:
            stated = tag or name.removesuffix(".whl").split("-", 2)[2]
            content[f"{info}/WHEEL"] = (
                f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(pure).lower()}\nTag: {stated}\n".encode()
            )
            stated_name, version = name.split("-")[:2]
            content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {stated_name}\nVersion: {version}\n".encode()
            lines = [f"{key},sha256={_digest(value)},{len(value)}" for key, value in content.items()] + [
                f"{info}/RECORD,,"
            ]
            text = "\n".join(lines) + "\n"
            content[f"{info}/RECORD"] = (record(text) if record is not None else text).encode()
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for key, value in content.items():
                archive.writestr(key, value)
        return path

    def wheel_of(self, files: Mapping[str, bytes | str], name: str) -> Path:
        """A wheel with these members, which include all of .dist-info except RECORD, and a correct RECORD."""
        path, info = (
            self.fresh("wheel") / name,
            next(PurePosixPath(key).parts[0] for key in files if "dist-info/" in key),
        )
        content = {key: value.encode() if isinstance(value, str) else value for key, value in files.items()}
        rows = [f"{key},sha256={_digest(value)},{len(value)}" for key, value in content.items()]
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            record = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
            for key, value in [*content.items(), (f"{info}/RECORD", record.encode())]:
                archive.writestr(zipfile.ZipInfo(key), value, zipfile.ZIP_DEFLATED)  # dated 1980, not the current time
        return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def edited_record(text: str) -> str:
    """RECORD with another sha256 for flashmoe/__init__.py."""
    return (
        "\n".join(
            f"flashmoe/__init__.py,sha256={_digest(b'other')},5" if line.startswith("flashmoe/__init__.py") else line
            for line in text.splitlines()
        )
        + "\n"
    )


BESIDE = "-Wl,-rpath,$ORIGIN"  # otherwise the loader does not search the folder of the file
PACKAGE = {
    "flashmoe/__init__.py": "from flashmoe import _extension\n",
    "flashmoe/_extension.py": "import torch\nfrom pathlib import Path\ntorch.ops.load_library(str(Path(__file__).parent / 'libflashmoe.so'))\n",
}


def package_files(library: Path, name: str = "libflashmoe.so", kernels: str = KERNELS_TOML) -> dict[str, bytes | str]:
    """The content of our wheel, with ``library`` under ``name`` and the small kernel table."""
    return {
        **PACKAGE,
        f"flashmoe/{name}": library.read_bytes(),
        "flashmoe/provenance.json": (library.parent / "provenance.json").read_bytes(),
        **{f"flashmoe/_tables/{name}": (ROOT / "csrc" / name).read_bytes() for name in REAL_TABLES},
        f"flashmoe/_tables/{ROWS}": kernels,
    }


def small_tables(folder: Path, kernels: str = KERNELS_TOML) -> Tables:
    """The real architecture table with a small kernel table."""
    for name in REAL_TABLES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / "csrc" / name).read_bytes())
    (folder / ROWS).write_text(kernels)
    return load_tables(folder)


def failures(report: Report) -> list[Check]:
    return [check for check in report.checks if check.verdict is Verdict.FAIL]


def only_failure(report: Report, name: str) -> Check:
    """The only failure; it must have this name and all the information a reader needs."""
    found = failures(report)
    assert [check.name for check in found] == [name], "\n".join(f"{c.name}: {c.found} / {c.why}" for c in found)
    return complete(found[0])


def complete(check: Check) -> Check:
    assert all((check.found, check.expected, check.why, check.next_step)), check
    return check


def named(report: Report, part: str) -> Check:
    """The failure whose name contains ``part``."""
    found = [check for check in failures(report) if part in check.name]
    assert found, f"no failure named {part!r} among {[c.name for c in failures(report)]}"
    return complete(found[0])


__all__ = ["Options", "Row", "Workshop", "audit", "replace"]
