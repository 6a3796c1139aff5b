"""Targets share PTX, and nothing is compiled or assembled unnecessarily."""

import re
import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch
from elftools.elf.elffile import ELFFile

from flashmoe.errors import BuildError, TableError
from flashmoe_build.compile import ptxas
from flashmoe_build.compile.cache import Cache
from flashmoe_build.compile.codegen import PlacedBinary, kernel_table_source, unit_source
from flashmoe_build.compile.device import DeviceCode, compile_front_end, compile_unit, compile_units
from flashmoe_build.compile.elements import front_end, with_dtype
from flashmoe_build.compile.jobs import run_staged
from flashmoe_build.compile.nvrtc import compile_ptx
from flashmoe_build.compile.toolchain import find_toolchain
from flashmoe_tools.tables import Tables, Unit, load_tables

TARGETS = ("sm_80", "sm_90a", "sm_120a", "compute_80")
COMBINE = "attention_combine_sm80_f16_d256"  # the smallest kernel; one tile for all targets
COMBINE_FRONT = "attention_combine_sm80_xf16_d256"
HEADER = "attention/combine/combine.cuh"


@pytest.fixture
def tree(tmp_path: Path, root: Path) -> Path:
    shutil.copytree(root / "csrc", tmp_path / "csrc")
    return tmp_path


def units_of(tables: Tables) -> list[Unit]:
    return [unit for unit in tables.units(TARGETS) if unit.name == COMBINE]


def build(tree: Path) -> DeviceCode:
    tables = load_tables(tree / "csrc")
    return compile_units(
        units_of(tables), root=tree, toolchain=find_toolchain(), cache=Cache(tree / "cache"), jobs=2, tables=tables
    )


def new(code: DeviceCode) -> tuple[int, int]:
    """Numbers of PTX files and cubins that were made, not cached."""
    machine_code = [item for item in code.units if not item.unit.target.is_ptx]
    return sum(not item.cached for item in code.ptx), sum(not item.cached for item in machine_code)


def edit(tree: Path, old: str, replacement: str) -> None:
    path = tree / "csrc" / HEADER
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, replacement, 1))


def test_machine_code_for_8_6_is_what_ptxas_makes_for_8_9(tree: Path) -> None:
    """This is why 8.9 needs no separate target. To be checked again with another ptxas."""
    tables, toolchain = load_tables(tree / "csrc"), find_toolchain()
    unit = next(unit for unit in units_of(tables) if unit.target.name == "sm_80")
    ptx = compile_front_end(unit, root=tree, toolchain=toolchain, cache=Cache(tree / "cache"))
    text = with_dtype(ptx.text, unit.dtype, unit.virtual)
    made = [ptxas.assemble(text, unit.name, target, toolchain).cubin for target in ("sm_86", "sm_89")]
    sections = [list(ELFFile(BytesIO(cubin)).iter_sections()) for cubin in made]
    first, second = (
        {s.name: (s["sh_info"], s.data()) for s in of if s.name.startswith((".text", ".nv.const"))} for of in sections
    )
    assert first
    assert first == second


def test_targets_share_ptx_and_an_edit_costs_what_it_changes(tree: Path) -> None:
    code = build(tree)
    assert [item.unit.target.name for item in code.units] == list(TARGETS), "in the order asked for"
    assert new(code) == (3, 3), "compute_80 for sm_80 and itself, compute_90 for sm_90a, compute_100 for sm_120a"
    for item in code.units:
        assert item.output[:4] == (b"\x7fELF" if not item.unit.target.is_ptx else b"//\n/"), item.unit.binary_name
    digests = [item.sha256 for item in code.units]
    assert new(build(tree)) == (0, 0)

    edit(tree, "#pragma once", "#pragma once\n// A comment changes the source, and not the PTX.")
    commented = build(tree)
    assert new(commented) == (3, 0)
    assert [item.sha256 for item in commented.units] == digests

    edit(tree, "combine(const ForwardParams& params) {", "combine(const ForwardParams& params) {\n  __threadfence();")
    changed = build(tree)
    assert new(changed) == (3, 3)
    assert all(item.sha256 != digest for item, digest in zip(changed.units, digests, strict=True))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a", "sm_120a", "compute_80"])
def test_a_dependent_kernel_waits_where_the_host_launches_it_early(tmp_path: Path, root: Path, target: str) -> None:
    """The host requests an early launch from virtual capability 9.0 on; without the wait partial results would be read too soon."""
    unit = next(unit for unit in load_tables(root / "csrc").units((target,)) if unit.name == COMBINE)
    ptx = compile_front_end(unit, root=root, toolchain=find_toolchain(), cache=Cache(tmp_path))
    assert (b"griddepcontrol.wait" in ptx.text) == (unit.virtual_capability >= (9, 0))
    assert (unit.virtual_capability >= (9, 0)) == (unit.target.capability >= (9, 0))


def instructions(ptx: bytes, dtype: str) -> list[str]:
    """The lines of the kernels, without those that contain the unit's name or its C++ types."""
    lines = (line.strip() for line in ptx.decode().replace(f"_{dtype}_", "_").splitlines())
    return [line for line in lines if line and not line.startswith((".global", "//"))]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("operation", ["attention_row_dot_sm80", "moe_combine_sm80", "attention_append_sm80"])
def test_one_ptx_serves_both_16_bit_types(tmp_path: Path, root: Path, operation: str, target: str, dtype: str) -> None:
    """The PTX made from it equals NVRTC's output for the type itself, also where bf16 needs other instructions (sm_80)."""
    unit = next(unit for unit in load_tables(root / "csrc").units((target,)) if unit.name == f"{operation}_{dtype}")
    toolchain, cache = find_toolchain(), Cache(tmp_path)
    either = compile_front_end(unit, root=root, toolchain=toolchain, cache=cache)
    alone = compile_ptx(
        unit_source(unit), unit.name, unit.virtual, csrc=root / "csrc", toolchain=toolchain, cache=cache
    )
    written = instructions(with_dtype(either.text, dtype, unit.virtual), dtype)
    assert written == instructions(with_dtype(alone.text, dtype, unit.virtual), dtype)
    assert not any("xf16" in line for line in written)
    assert compile_unit(unit, root=root, toolchain=toolchain, cache=cache).output[:4] == b"\x7fELF"


def test_bf16_is_widened_without_the_instruction_of_9_0() -> None:
    widen = b"\tcvt.f32.xf16 %f1, %rs2;\n\tcvt.rn.xf16x2.f32 %r1, %f1, %f2;\n"
    plain = b"\tcvt.f32.bf16 %f1, %rs2;\n\tcvt.rn.bf16x2.f32 %r1, %f1, %f2;\n"
    assert with_dtype(widen, "bf16", "compute_90a") == plain
    assert with_dtype(widen, "f16", "compute_75") == plain.replace(b"bf16", b"f16")
    moved = b"\tmov.b32 %f1, {0, %rs2};\n\tcvt.rn.bf16x2.f32 %r1, %f1, %f2;\n"
    assert with_dtype(widen, "bf16", "compute_80") == moved
    assert with_dtype(plain, "bf16", "compute_80") == moved


def run_ptx(text: str, dtype: torch.dtype, registers: dict[str, torch.Tensor]) -> None:
    """Interprets the few instructions of a conversion by bits, on words in int64."""
    some = next(iter(registers.values()))

    def halves(word: torch.Tensor) -> torch.Tensor:
        return torch.stack((word & 0xFFFF, word >> 16)).int().short().view(dtype)

    def fused(*words: torch.Tensor) -> torch.Tensor:
        x, y, z = (halves(word).double() for word in words)
        low, high = (x * y + z).to(dtype).view(torch.int16).long() & 0xFFFF
        return low | high << 16

    run = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "shr.b32": lambda a, b: a >> b,
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "lop3.b32": lambda a, b, c, table: (a & c) | (b & ~c) if table[0] == 0xE4 else a * 0,
        f"fma.rn.{'f16' if dtype == torch.float16 else 'bf16'}x2": fused,
    }
    for line in re.findall(r"[^{};]+(?=;)", text):
        name, _, words = line.strip().partition(" ")
        if name == ".reg":
            continue
        out, *given = (word.strip() for word in words.split(","))
        registers[out] = run[name](
            *(registers[w] if w in registers else torch.full_like(some, int(w, 0)) for w in given)
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_pair_of_codes_becomes_its_elements_by_bits(dtype: torch.dtype) -> None:
    """Below 8.9, with every code in the adjacent byte; a sign of zero and NaN are kept."""
    first, second = torch.arange(65536).div(256, rounding_mode="floor"), torch.arange(65536) % 256
    swapped = [second, first, 255 - first, second ^ first]
    registers = {"%r7": swapped[0] | swapped[1] << 8 | swapped[2] << 16 | swapped[3] << 24}
    name = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    text = with_dtype(b"\tunpack.xf16x2.e4m3x4 %r1, %r2, %r7;\n", name, "compute_80")
    run_ptx(text.decode(), dtype, registers)
    for out, codes in (("%r1", swapped[0::2]), ("%r2", swapped[1::2])):
        for half, code in enumerate(codes):
            wanted = code.byte().view(torch.float8_e4m3fn).to(dtype)
            found = (registers[out] >> 16 * half & 0xFFFF).int().short().view(dtype)
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found.view(torch.int16)[~wanted.isnan()], wanted.view(torch.int16)[~wanted.isnan()])


def test_code_that_depends_on_the_type_does_not_compile_for_either(tmp_path: Path, root: Path) -> None:
    """Its row says so (by_dtype), and each type gets separate PTX."""
    units = [unit for unit in load_tables(root / "csrc").units(("sm_90a",)) if unit.row.by_dtype]
    operations = {"attention_varlen_forward", "attention_dropout_forward", "attention_decode_e4m3"}
    assert {unit.row.operation for unit in units} == operations
    assert [front_end(unit) for unit in units] == units
    reasons = {"scores": r"it depends on the type.*softcap\.cuh", "alibi": "ahead depends on the type's range"}
    for variant, reason in reasons.items():
        unit = next(unit for unit in units if unit.name == f"attention_varlen_forward_sm90_bf16_d64_{variant}")
        either = replace(unit, row=replace(unit.row, by_dtype=""))
        with pytest.raises(BuildError, match=reason):
            compile_front_end(either, root=root, toolchain=find_toolchain(), cache=Cache(tmp_path))


def test_the_host_is_told_the_virtual_capability(root: Path) -> None:
    tables = load_tables(root / "csrc")
    units = list(tables.units(("sm_90a",)))
    source = kernel_table_source(tables, [PlacedBinary(unit, 0, 1, "") for unit in units])
    # In an order that host code relies on
    assert source.count("static_assert(static_cast<int>(flashmoe::attention::axis::k") > 1
    for unit in units:
        major, minor = unit.virtual_capability
        assert f'{{"{unit.name}", "sm_90a", 90, {10 * major + minor}, true, false, 0u, 1u}}' in source
    assert {unit.virtual_capability for unit in units} == {(7, 5), (8, 0), (9, 0)}


def test_a_front_end_error_names_unit_and_line(tree: Path) -> None:
    edit(tree, "#pragma once", "#pragma once\n#error planted")
    with pytest.raises(BuildError, match=rf"(?s){COMBINE_FRONT}.*combine.cuh\(\d+\).*planted"):
        build(tree)


def test_a_failure_stops_what_has_not_begun() -> None:
    begun: list[int] = []

    def first(key: int) -> int:
        if key == 1:
            msg = "planted"
            raise BuildError(msg)
        return key

    def second(item: int, middle: int) -> int:
        begun.append(item + middle)
        return item

    with pytest.raises(BuildError, match="planted"):
        run_staged({1: [1], **{key: list(range(100)) for key in range(2, 50)}}, first, second, 1)
    assert len(begun) < 2400  # of 4800; how many run before the failure depends on the machine's load


def test_stages_give_every_item_its_own_key() -> None:
    groups = {key: list(range(key)) for key in range(6)}
    firsts, seconds = run_staged(groups, lambda key: 10 * key, lambda item, middle: (middle, item), 3)
    assert firsts == [0, 10, 20, 30, 40, 50]
    assert sorted(seconds) == sorted((10 * key, item) for key in groups for item in groups[key])


@pytest.mark.parametrize("virtual", ["compute_90", "compute_90a", "sm_80", "compute_86"])
def test_ptx_that_a_target_cannot_take_is_refused(tree: Path, virtual: str) -> None:
    path = tree / "csrc" / "tables" / "arch.toml"
    path.write_text(path.read_text().replace('default = "compute_80"', f'default = "{virtual}"', 1))
    with pytest.raises(TableError, match=rf"\[virtual.sm80\] makes .* from {virtual}, which cannot be"):
        load_tables(tree / "csrc")


def test_a_family_without_a_virtual_architecture_is_refused(tree: Path) -> None:
    path = tree / "csrc" / "tables" / "arch.toml"
    path.write_text(path.read_text().replace("[virtual.sm75]", "[virtual.sm76]", 1))
    with pytest.raises(TableError, match=r"\[virtual.sm75\] states no virtual architecture"):
        load_tables(tree / "csrc")
