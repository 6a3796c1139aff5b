"""Choosing an instruction set, and that its code does not leak out of its translation unit."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe.variables import CPU_ISAS
from flashmoe_build.compile.host import sanitizers

from .backend import ISAS, SOURCES, Backend, BackendError

FLAG_OF_ISA = {"avx2": ("avx2", "fma", "f16c"), "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl")}
FLAG_OF_ISA["avx512_bf16"] = (*FLAG_OF_ISA["avx512"], "avx512_bf16")
FLAG_OF_ISA["amx"] = (*FLAG_OF_ISA["avx512_bf16"], "amx_tile", "amx_bf16", "avx512vbmi")


x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="AArch64 has one instruction set here")


def cpu_flags() -> set[str]:
    if platform.machine() != "x86_64":
        return set()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).split(":")[1].split())


def test_supported_set_is_the_machines(library: Backend) -> None:
    flags = cpu_flags()
    expected = [isa for isa in ISAS if flags.issuperset(FLAG_OF_ISA.get(isa, ()))]
    assert library.supported == expected
    library.set_isa(None)
    assert library.selected_isa() == os.environ.get("FLASHMOE_CPU_ISA", expected[-1])


@pytest.mark.parametrize("name", ["sse9", "AVX2", "avx", " avx2"])
def test_unknown_name(library: Backend, name: str) -> None:
    before = library.selected_isa()
    with pytest.raises(BackendError, match=f"'{name}'.*supported here: {', '.join(library.supported)}"):
        library.set_isa(name)
    assert library.selected_isa() == before


@pytest.mark.parametrize("isa", [ISAS[0], "sse9"])
def test_environment_variable(built: Path, isa: str) -> None:
    """Read at first use, so each value needs a separate process."""
    program = (
        "import ctypes, sys\n"
        "library, text = ctypes.CDLL(sys.argv[1]), ctypes.create_string_buffer(500)\n"
        "status = library.cpu_selected_isa(text, ctypes.c_size_t(500))\n"
        "print(status, text.value.decode())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(built / "libcpu.so")],
        env={**os.environ, "FLASHMOE_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=True,
    )
    if isa == ISAS[0]:
        assert result.stdout == f"0 {isa}\n"
    else:
        assert re.match(
            rf"1 FLASHMOE_CPU_ISA: instruction set 'sse9' is unknown .*supported here: {ISAS[0]}", result.stdout
        )


def symbols(path: Path) -> list[tuple[str, str]]:
    """(type letter, demangled name) from nm."""
    text = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
    return [(line[17], line[19:]) for line in text.splitlines()]


@pytest.mark.skipif(bool(sanitizers(os.environ)), reason="sanitizers add symbols of their own")
@pytest.mark.parametrize(
    "source", [path.stem for path in SOURCES if path.stem.startswith(("forward_", "backward_", "kernel_"))]
)
def test_wide_code_stays_in_its_object(built: Path, source: str) -> None:
    """The linker could keep a weak function compiled here as the copy for a CPU without these instructions."""
    leaving = [(kind, name) for kind, name in symbols(built / f"{source}.o") if kind not in "tbdrU"]
    assert len(leaving) == 1
    kind, name = leaving[0]
    assert kind in "DR"
    assert re.fullmatch(r"flashmoe::cpu::k\w+Kernel", name)


@x86_only
def test_only_the_wide_objects_have_wide_code(built: Path) -> None:
    def uses(path: Path, register: str) -> bool:
        text = subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout
        return re.search(rf"%{register}\d", text) is not None

    found = {
        path.stem: {register for register in ("ymm", "zmm", "tmm") if uses(path, register)}
        for path in sorted(built.glob("*.o"))
    }
    assert found.pop("forward_amx") == {"ymm", "zmm", "tmm"}
    for name in ("forward_avx512", "backward_avx512", "backward_avx512_bf16", "kernel_avx512", "kernel_avx512_bf16"):
        assert found.pop(name) == {"ymm", "zmm"}
    for name in ("forward_avx2", "backward_avx2", "kernel_avx2"):
        assert found.pop(name) == {"ymm"}
    plain = {"attention", "backward", "forward_sse2", "backward_sse2", "isa", "kernel_sse2", "moe", "routing", "shim"}
    assert set(found) == plain
    assert set().union(*found.values()) == set()


def test_python_knows_every_name() -> None:
    """The doctor distinguishes a misspelt FLASHMOE_CPU_ISA from one that this machine lacks."""
    assert CPU_ISAS == ISAS
