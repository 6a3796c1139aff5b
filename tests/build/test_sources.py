"""Rules for the device and host sources; each one prevents a failure that occurred."""

import re
import subprocess
from pathlib import Path

import pytest

from flashmoe_build.compile.codegen import unit_source
from flashmoe_build.compile.nvrtc_worker import compile_job
from flashmoe_build.compile.toolchain import find_toolchain
from flashmoe_tools.tables import load_tables

CSRC = Path(__file__).resolve().parents[2] / "csrc"
DEVICE_HEADERS = sorted(set(CSRC.rglob("*.cuh")) - set((CSRC / "emulation").rglob("*.cuh")))
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".cuh", ".h", ".cpp"})


def relative(path: Path) -> str:
    return path.relative_to(CSRC).as_posix()


def compile_device(source: str) -> str:
    toolchain = find_toolchain()
    options = [
        "--std=c++17",
        "--gpu-architecture=sm_90a",
        "-default-device",
        f"--include-path={CSRC}",
        f"--include-path={toolchain.cuda_include}",
    ]
    answer = compile_job(
        {"library": str(toolchain.nvrtc_library), "source": source, "name": "case.cu", "options": options}
    )
    return "" if answer["status"] == "ok" else str(answer["log"])


def test_there_are_headers() -> None:
    assert len(DEVICE_HEADERS) > 10


@pytest.mark.parametrize("header", DEVICE_HEADERS, ids=relative)
def test_header_compiles_alone_and_twice(header: Path) -> None:
    """No header depends on another being included before it, or on the host's headers, which NVRTC does not have."""
    name = relative(header)
    assert compile_device(f'#include "{name}"\n#include "{name}"\n') == ""


def test_headers_compile_in_either_order() -> None:
    """For example `#define WARP_SIZE 32` in one header and `constexpr int WARP_SIZE` in another."""
    names = [relative(path) for path in DEVICE_HEADERS]
    for order in (names, names[::-1]):
        assert compile_device("".join(f'#include "{name}"\n' for name in order)) == ""


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_object_like_macro_for_a_constant(path: Path) -> None:
    """Constants are constexpr; a macro could silently replace a name elsewhere."""
    macros = re.findall(r"^\s*#\s*define\s+(\w+)[ \t]+[-\d(\"'].*$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert macros == []


def test_inline_assembly_only_in_ptx() -> None:
    found = [
        relative(path)
        for path in SOURCES
        if re.search(r"\basm\s*(volatile)?\s*\(", path.read_text(encoding="utf-8"))
        and path.parent.name != "ptx"
        and not relative(path).startswith(("cpu/", "attention/cpu/", "host/", "emulation/"))
    ]
    assert found == []


def test_code_that_depends_on_a_16_bit_type_says_so() -> None:
    """f16 and bf16 share PTX (elements.py), so a kernel must not depend on the type."""
    known = {
        "attention/decode/e4m3.cuh",  # asserted by E4m3DecodeSpec; `by_dtype` in kernels.toml
        "attention/forward/sm90/softcap.cuh",  # asserted by VarlenSpec; `by_dtype` in kernels.toml
        "moe/routing/scalars.cuh",  # a type known only at run time
    }
    found = {
        relative(path)
        for path in DEVICE_HEADERS
        if path.parent.name != "ptx"
        and re.search(r"\b(?:B?F16|__half2?|__nv_bfloat16\w*)\b", path.read_text(encoding="utf-8"))
    }
    assert found == known


def test_includes_are_closed_over_tracked_files(root: Path) -> None:
    """A header must not exist on one machine only."""
    listed = subprocess.run(["git", "ls-files", "csrc"], cwd=root, capture_output=True, text=True, check=True)
    tracked = {root / line for line in listed.stdout.splitlines()}
    assert tracked
    missing = []
    for path in sorted(tracked):
        if path.suffix not in {".cuh", ".h", ".cpp"}:
            continue
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            candidates = [(folder / name).resolve() for folder in (path.parent, CSRC, CSRC / "emulation" / "include")]
            if not any(candidate in tracked for candidate in candidates):
                missing.append(f"{relative(path)} includes {name}")
    assert missing == []


def test_host_code_sees_no_device_code() -> None:
    """Host sources include no bf16 or fp16 intrinsics and no kernels, so they cannot call them."""
    found = []
    for path in SOURCES:
        if path.suffix not in {".h", ".cpp"} or relative(path).startswith("emulation/"):
            continue
        for name in re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.MULTILINE):
            if name.endswith(".cuh") or re.match(r"(?:cuda_|mma|crt/|cooperative_groups)", name):
                found.append(f"{relative(path)} includes {name}")
    assert found == []


def test_no_device_helper_is_defined_twice() -> None:
    """Conversion helpers are defined in one place."""
    homes: dict[str, set[str]] = {}
    for path in DEVICE_HEADERS:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"__device__ __forceinline__ [\w:<>&\* ]+?\b(\w+)\(", text):
            if re.match(r"(to|from|pack|unpack|convert)_", name):
                homes.setdefault(name, set()).add(relative(path))
    assert homes
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


UNCHECKED_BY_DESIGN = {
    # In a destructor or while describing an error, where a further failure cannot be reported.
    "cuGetErrorName",
    "cuGetErrorString",
    "cuCtxPopCurrent",
}


def test_every_driver_call_is_checked() -> None:
    """A launch once failed without being noticed."""
    unchecked = []
    calls = 0
    for path in sorted(path for path in CSRC.rglob("*.cpp") if path.parent.name == "host"):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"(check_(?:driver|launch)\(\s*)?(?:driver\(\)|api)\.(cu[A-Z]\w+)\(", text):
            calls += 1
            restores_in_destructor = f"~RelaxedCapture() {{ driver().{match[2]}(" in text[: match.end()][-80:]
            kept = re.search(r"const CUresult result = $", text[: match.start()])
            is_checked = match[1] is not None or (kept and "check_driver(result," in text[match.end() :][:400])
            if not is_checked and match[2] not in UNCHECKED_BY_DESIGN and not restores_in_destructor:
                unchecked.append(f"{path.name}: {match[2]}")
    assert calls > 10
    assert unchecked == []


def test_unit_source_states_every_entry_and_its_shared_memory() -> None:
    for unit in load_tables().units():
        text = unit_source(unit)
        for _, symbol in unit.entries:
            assert text.count(f"{symbol}(") == 1
        assert f"kSharedBytes == {unit.row.smem_bytes(unit.dtype)}" in text
