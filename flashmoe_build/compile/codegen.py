"""Sources generated from the tables: device translation units and the C++ kernel table. Pure: data in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flashmoe.tools.tables import KernelRow, Tables, Unit

ELEMENT_TYPES: Mapping[str, str] = {"f16": "__half", "bf16": "__nv_bfloat16"}
CPP_DTYPES: Mapping[str, str] = {"f16": "Dtype::kFloat16", "bf16": "Dtype::kBFloat16", "f32": "Dtype::kFloat32"}
CPP_MASKS: Mapping[str, str] = {"": "Mask::kNone", "full": "Mask::kFull", "causal": "Mask::kCausal"}


@dataclass(frozen=True)
class PlacedBinary:
    """One device binary and where it lies in the embedded blob."""

    unit: Unit
    offset: int
    size: int
    sha256: str


def unit_source(unit: Unit) -> str:
    """The translation unit: the family's spec with this row's numbers, and one entry point a mask."""
    row = unit.row
    namespace = f"flashmoe::{row.operation.split('_')[0]}::{row.family}"
    folder = f"forward/{row.family}" if row.operation == "attention_forward" else "combine"
    header = f"attention/{folder}/{row.operation.split('_', 1)[1]}.cuh"
    spec = "ForwardSpec" if row.operation.endswith("_forward") else "CombineSpec"
    numbers = [
        ELEMENT_TYPES[unit.dtype],
        *(str(n) for n in (row.head_dim, row.block_m, row.block_n, row.stages, row.warps)),
        *(_option(key, value) for key, value in row.options.items()),
    ]
    lines = [
        f'#include "{header}"',
        "",
        f"using Spec = {namespace}::{spec}<{', '.join(numbers)}>;",
        f"static_assert(Spec::kSharedBytes == {row.smem_bytes(unit.dtype)},",
        '              "flashmoe/tools/smem/formulas.py and the kernel disagree about shared memory");',
        f'static_assert(Spec::kNumThreads == {row.threads}, "kernels.toml and the kernel disagree about threads");',
        "",
    ]
    for mask, symbol in unit.entries:
        lines += _entry(row, namespace, mask, symbol)
    return "\n".join(lines) + "\n"


def _option(key: str, value: int) -> str:
    literal = str(value).lower() if isinstance(value, bool) else str(value)
    return f"/*{key}=*/{literal}"


def _entry(row: KernelRow, namespace: str, mask: str, symbol: str) -> list[str]:
    maps = (
        ("q_map", "k_map", "v_map", "out_map") if row.family == "sm90" and row.operation == "attention_forward" else ()
    )
    parameters = ["const __grid_constant__ flashmoe::attention::ForwardParams params"]
    parameters += [f"const __grid_constant__ flashmoe::ptx::TensorMap {name}" for name in maps]
    arguments = ", ".join(["params", *maps])
    function = row.operation.split("_", 1)[1]
    template = f"Spec, /*kIsCausal=*/{'true' if mask == 'causal' else 'false'}" if mask else "Spec"
    return [
        f'extern "C" __global__ void __launch_bounds__(Spec::kNumThreads, {row.min_blocks})',
        f"{symbol}({', '.join(parameters)}) {{",
        f"  {namespace}::{function}<{template}>({arguments});",
        "}",
        "",
    ]


def index_json(placed: Sequence[PlacedBinary]) -> dict[str, object]:
    """What the section .flashmoe.index states about the blob."""
    return {
        "schema": "flashmoe.index/1",
        "binaries": [
            {
                "name": item.unit.name,
                "target": item.unit.target.name,
                "kind": "ptx" if item.unit.target.is_ptx else "cubin",
                "offset": item.offset,
                "size": item.size,
                "sha256": item.sha256,
                "entries": [symbol for _, symbol in item.unit.entries],
                "smem_dynamic": item.unit.row.smem_bytes(item.unit.dtype),
                "threads": item.unit.row.threads,
            }
            for item in placed
        ],
    }


def kernel_table_source(tables: Tables, placed: Sequence[PlacedBinary]) -> str:
    """kernel_table.cpp: the arrays behind csrc/host/kernel_table.h."""
    binaries = [
        f'    {{"{p.unit.name}", "{p.unit.target.name}", {_number(p.unit.target.capability)}, '
        f"{_number(p.unit.virtual_capability)}, "
        f"{_bool(p.unit.target.is_arch_specific)}, {_bool(p.unit.target.is_ptx)}, {p.offset}u, {p.size}u}},"
        for p in placed
    ]
    kernels = [line for index, p in enumerate(placed) for line in _kernel_lines(p.unit, index)]
    gpus = [
        f"    {{{_number(gpu.compute_capability)}, {{{', '.join([*(_quoted(gpu.families)), 'nullptr'])}}}}},"
        for gpu in tables.gpus
    ]
    return "\n".join(
        [
            "// Generated from csrc/arch.toml and csrc/kernels.toml by flashmoe_build/compile/codegen.py.",
            '#include "host/kernel_table.h"',
            "",
            'extern "C" const unsigned char flashmoe_binaries[];',
            'extern "C" const char flashmoe_index[];',
            "",
            "namespace flashmoe {",
            "namespace host {",
            "namespace {",
            "",
            *_array("DeviceBinary", "kBinaries", binaries),
            *_array("Kernel", "kKernels", kernels),
            *_array("GpuFamilies", "kGpus", gpus),
            f"constexpr KernelTable kTable{{kBinaries, {len(binaries)}, kKernels, {len(kernels)},",
            f"                               kGpus, {len(gpus)}}};",
            "",
            "}  // namespace",
            "",
            "const KernelTable& kernel_table() { return kTable; }",
            "const unsigned char* embedded_binaries() { return flashmoe_binaries; }",
            "const char* embedded_index() { return flashmoe_index; }",
            "",
            "}  // namespace host",
            "}  // namespace flashmoe",
            "",
        ]
    )


def _kernel_lines(unit: Unit, index: int) -> Iterable[str]:
    row = unit.row
    for mask, symbol in unit.entries:
        yield (
            f'    {{"{row.operation}", "{row.family}", "{row.variant}", "{symbol}", {CPP_DTYPES[unit.dtype]}, '
            f"{CPP_MASKS[mask]}, {row.head_dim}, {row.block_m}, {row.block_n}, {row.stages}, {row.threads}, "
            f"{row.min_blocks}, {row.smem_bytes(unit.dtype)}, {_bool(row.schedule == 'persistent')}, {index}}},"
        )


def _array(kind: str, name: str, rows: Sequence[str]) -> list[str]:
    if not rows:  # a zero-length array is not C++
        return [f"constexpr const {kind}* {name} = nullptr;", ""]
    return [f"constexpr {kind} {name}[] = {{", *rows, "};", ""]


def _number(capability: tuple[int, int]) -> int:
    return 10 * capability[0] + capability[1]


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _quoted(words: Iterable[str]) -> list[str]:
    return [f'"{word}"' for word in words]


def embed_source(blob: str, index: str) -> str:
    """Assembly that places the blob and its index into sections of their own."""
    return f"""\
    .section .flashmoe.cubins,"a",@progbits
    .balign 64
    .globl flashmoe_binaries
    .hidden flashmoe_binaries
    .type flashmoe_binaries, @object
flashmoe_binaries:
    .incbin "{blob}"
    .byte 0
    .size flashmoe_binaries, . - flashmoe_binaries
    .section .flashmoe.index,"a",@progbits
    .globl flashmoe_index
    .hidden flashmoe_index
    .type flashmoe_index, @object
flashmoe_index:
    .incbin "{index}"
    .byte 0
    .size flashmoe_index, . - flashmoe_index
    .section .note.GNU-stack,"",@progbits
"""
