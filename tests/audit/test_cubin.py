"""Compares what is read from cubins and PTX with what NVIDIA's own tools read from the same bytes."""

import re
from pathlib import Path

import pytest
from audit_builders import SITE, device_code, kernel_source, run

from flashmoe_tools.audit.cubin import CubinFacts, architecture, read_cubin
from flashmoe_tools.audit.errors import AuditError, EmbeddedError
from flashmoe_tools.audit.ptx import read_ptx

ARCHS = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_120", "sm_120a"]
TOOLS = SITE / "triton" / "backends" / "nvidia" / "bin"
SOURCE = (
    kernel_source(["plain"])
    + kernel_source(
        ["with_static"],
        body="__shared__ float fixed[300]; fixed[threadIdx.x] = n; __syncthreads(); out[1] = fixed[n];",
        threads=256,
    )
    + kernel_source(
        ["with_stack"], body="float many[100]; for (int i = 0; i < 100; ++i) many[i] = out[i]; out[0] = many[n];"
    )
    + 'extern "C" __global__ void unbounded(double* x, char c, short s, float f) { x[threadIdx.x] = c + s + f; }\n'
)


def tool(name: str) -> str:
    path = TOOLS / name
    assert path.is_file(), (
        f"{name} (it comes with triton, which torch installs) is needed to confirm what the audit reads"
    )
    return str(path)


def dump(arch: str, folder: Path) -> tuple[CubinFacts, Path]:
    content = device_code(SOURCE, arch)
    path = folder / f"{arch}.cubin"
    path.write_bytes(content)
    return read_cubin(content, path.name), path


@pytest.mark.parametrize("arch", ARCHS)
def test_resources_are_cuobjdumps(arch: str, tmp_path: Path) -> None:
    facts, path = dump(arch, tmp_path)
    text = run([tool("cuobjdump"), "-res-usage", str(path)])
    found = re.findall(r"Function (\w+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert (
        {row[0] for row in found}
        == {k.name for k in facts.kernels}
        == {"plain", "with_static", "with_stack", "unbounded"}
    )
    reserved = 1024 if arch >= "sm_90" or arch.startswith("sm_1") else 0
    for name, registers, stack, shared, local in found:
        kernel = next(k for k in facts.kernels if k.name == name)
        assert (kernel.registers, kernel.stack, kernel.local) == (int(registers), int(stack), int(local))
        assert kernel.smem_static == int(shared) - reserved, (name, arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_attributes_are_cuobjdumps(arch: str, tmp_path: Path) -> None:
    facts, path = dump(arch, tmp_path)
    text = run([tool("cuobjdump"), "-elf", str(path)])
    assert f"sm={facts.arch.removeprefix('sm_')}," in text
    for kernel in facts.kernels:
        block = text.split(f"\n.nv.info.{kernel.name}\n", 1)[1].split("\n.nv.", 1)[0]
        threads = re.search(r"EIATTR_MAX_THREADS\s+Format:\s+EIFMT_SVAL\s+Value:\s+(0x\w+) (0x\w+) (0x\w+)", block)
        product = 0 if threads is None else int(threads[1], 16) * int(threads[2], 16) * int(threads[3], 16)
        assert kernel.max_threads == product
        size = re.search(r"EIATTR_CBANK_PARAM_SIZE\s+Format:\s+EIFMT_HVAL\s+Value:\s+(0x\w+)", block)
        assert size is not None
        assert kernel.param_bytes == int(size[1], 16)


def test_known_numbers() -> None:
    facts = read_cubin(device_code(SOURCE, "sm_80"), "x")
    by_name = {k.name: k for k in facts.kernels}
    assert by_name["with_stack"].local_memory == 400
    assert by_name["plain"].local_memory == 0
    assert (by_name["plain"].max_threads, by_name["with_static"].max_threads, by_name["unbounded"].max_threads) == (
        128,
        256,
        0,
    )
    assert (by_name["plain"].param_bytes, by_name["unbounded"].param_bytes) == (12, 16)


@pytest.mark.parametrize("arch", ARCHS)
def test_symbols_are_nvdisasms(arch: str, tmp_path: Path) -> None:
    facts, path = dump(arch, tmp_path)
    text = run([tool("nvdisasm"), str(path)])
    assert {k.name for k in facts.kernels} == set(re.findall(r"^\s*\.section\s+\.text\.(\w+)", text, re.MULTILINE))
    for kernel in facts.kernels:
        assert re.search(rf"\.size\s+{kernel.name},\(", text)


def test_unknown_abi_is_refused() -> None:
    with pytest.raises(EmbeddedError, match="ELF ABI version 9"):
        architecture(9, 0)


def test_register_count_that_contradicts_itself() -> None:
    """sm_75 states the register count twice: in the section header and as an attribute."""
    content = bytearray(device_code(SOURCE, "sm_75"))
    registers = read_cubin(bytes(content), "x").kernels[0].registers
    place = content.index(bytes([0x04, 0x2F, 0x08, 0x00])) + 8
    assert content[place] > 0
    content[place] += 1
    with pytest.raises(EmbeddedError, match="in its section header"):
        read_cubin(bytes(content), "x")
    assert registers > 0


@pytest.mark.parametrize("target", ["compute_75", "compute_80", "compute_90"])
def test_ptx_agrees_with_the_cubin(target: str) -> None:
    ptx = read_ptx(device_code(SOURCE, target), target)
    cubin = read_cubin(device_code(SOURCE, target.replace("compute", "sm")), "x")
    assert ptx.arch == target
    assert ptx.version.startswith("8.")
    assert [e.name for e in ptx.entries] == [k.name for k in cubin.kernels]
    for entry, kernel in zip(ptx.entries, cubin.kernels, strict=True):
        assert (entry.max_threads, entry.param_bytes) == (kernel.max_threads, kernel.param_bytes)
        assert not entry.uses_bf16
    by_name = {e.name: e for e in ptx.entries}
    assert (by_name["with_static"].smem_static, by_name["plain"].smem_static) == (1200, 0)
    assert (by_name["with_stack"].local, by_name["plain"].local) == (400, 0)


def test_bf16_instructions_are_seen_in_ptx() -> None:
    source = 'extern "C" __global__ void k(unsigned short* x, float f) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(*x) : "f"(f)); }'
    assert read_ptx(device_code(source, "compute_80"), "k").entries[0].uses_bf16


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b".version 8.7\n", b".target sm_80\n", b"hello"])
def test_what_is_no_ptx(content: bytes) -> None:
    with pytest.raises(AuditError, match="is not PTX"):
        read_ptx(content, "k")
