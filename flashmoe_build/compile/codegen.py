"""Sources generated from the tables: device translation units and the C++ kernel table. Pure: data in, text out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flashmoe_build.compile.elements import EITHER, SHARED
from flashmoe_tools.descriptors import MAX_AXES, MAX_COSTS, Axis, Descriptor
from flashmoe_tools.tables import Entry, Tables, Unit

ELEMENT_TYPES: Mapping[str, str] = {
    "f16": "flashmoe::ptx::F16",
    "bf16": "flashmoe::ptx::BF16",
    EITHER: "flashmoe::ptx::XF16",
    "f32": "float",
}
CPP_DTYPES: Mapping[str, str] = {"f16": "Dtype::kFloat16", "bf16": "Dtype::kBFloat16", "f32": "Dtype::kFloat32"}


@dataclass(frozen=True)
class PlacedBinary:
    """One device binary and its position in the embedded blob."""

    unit: Unit
    offset: int
    size: int
    sha256: str


def unit_source(unit: Unit) -> str:
    """The translation unit: the family's spec with this row's numbers, and its entry points."""
    row, kind = unit.row, unit.row.descriptor
    shared_bytes = row.smem_bytes(SHARED[0] if unit.dtype == EITHER else unit.dtype)
    numbers = [
        ELEMENT_TYPES[unit.dtype],
        *(str(row.axes[axis.name]) for axis in kind.numbers),
        *(str(value) for value in (*row.tile, row.warps)),
        *(f"/*{name}=*/{value}" for name, value in row.options.items()),
    ]
    lines = [
        f'#include "{kind.header}"',
        "",
        f"using Spec = {kind.spec}<{', '.join(numbers)}>;",
        f"static_assert(Spec::kSharedBytes == {shared_bytes},",
        '              "operations.toml and the kernel disagree about shared memory");',
        f'static_assert(Spec::kNumThreads == {row.threads}, "kernels.toml and the kernel disagree about threads");',
        "",
    ]
    for entry in unit.entries:
        lines += _entry(kind, row.min_blocks, entry)
    return "\n".join(lines) + "\n"


def map_parameters(kind: Descriptor) -> tuple[str, ...]:
    """Names of a kernel's TMA parameters, which follow ``params``."""
    return tuple(f"{name}_map" for name in kind.tensor_maps.names) if kind.tensor_maps is not None else ()


def _entry(kind: Descriptor, min_blocks: int, entry: Entry) -> list[str]:
    maps = map_parameters(kind)
    parameters = [f"const __grid_constant__ {kind.params.name} params"]
    parameters += [f"const __grid_constant__ flashmoe::ptx::TensorMap {name}" for name in maps]
    arguments = (
        f"/*{axis.argument}=*/{axis.words[word]}" for axis, word in zip(kind.word_axes, entry.words, strict=True)
    )
    return [
        f'extern "C" __global__ void __launch_bounds__(Spec::kNumThreads, {min_blocks})',
        f"{entry.symbol}({', '.join(parameters)}) {{",
        f"  {kind.entry}<{', '.join(['Spec', *arguments])}>({', '.join(['params', *maps])});",
        "}",
        "",
    ]


def index_json(placed: Sequence[PlacedBinary]) -> dict[str, object]:
    """The content of the section .flashmoe.index, which describes the blob."""
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
                "entries": [entry.symbol for entry in item.unit.entries],
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
    kernels = [_kernel_line(p.unit, entry, index) for index, p in enumerate(placed) for entry in p.unit.entries]
    gpus = [
        f"    {{{_number(gpu.compute_capability)}, {{{', '.join([*(_quoted(gpu.families)), 'nullptr'])}}}}},"
        for gpu in tables.gpus
    ]
    headers = dict.fromkeys(kind.enums.header for kind in tables.descriptors if kind.enums is not None)
    return "\n".join(
        [
            "// Generated from arch.toml, operations.toml and kernels.toml by flashmoe_build/compile/codegen.py.",
            '#include "host/kernel_table.h"',
            *(f'#include "{header}"' for header in headers),
            "",
            *dict.fromkeys(line for kind in tables.descriptors for line in _enum_checks(kind)),
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


def _enum_checks(kind: Descriptor) -> list[str]:
    """Static assertions that the host's enums for axes, axis words and cost values are in the descriptor's order."""
    if kind.enums is None:
        return []
    space, problem = kind.enums.name, f'"{kind.enums.header} and operations.toml differ"'
    names = [(f"axis::{_enumerator(axis.name)}", index) for index, axis in enumerate(kind.axes)]
    names += [(f"cost::{_enumerator(name)}", index) for index, name in enumerate(kind.cost)]
    for axis in kind.word_axes:
        names += [(f"{_camel(axis.name)}::{_enumerator(word)}", index) for index, word in enumerate(axis.words)]
    return [f"static_assert(static_cast<int>({space}::{name}) == {index}, {problem});" for name, index in names]


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _enumerator(name: str) -> str:
    return f"k{_camel(name)}"


def _kernel_line(unit: Unit, entry: Entry, index: int) -> str:
    row, kind = unit.row, unit.row.descriptor
    words = dict(zip((axis.name for axis in kind.word_axes), entry.words, strict=True))

    def value(axis: Axis) -> int:
        return row.axes[axis.name] if axis.is_number else list(axis.words).index(words[axis.name])

    axes = [*map(value, kind.axes), *[-1] * (MAX_AXES - len(kind.axes))]
    cost = [*(row.cost.values()), *[0.0] * (MAX_COSTS - len(row.cost))]
    fields = [
        *_quoted((row.operation, row.family, row.variant, entry.symbol)),
        CPP_DTYPES[unit.dtype],
        f"{{{', '.join(map(str, axes))}}}",
        *map(str, (row.block_m, row.block_n, row.threads, row.min_blocks, row.smem_bytes(unit.dtype))),
        str(len(map_parameters(kind))),
        _bool(row.schedule == "persistent"),
        _bool(bool(row.cost)),
        f"{{{', '.join(map(repr, cost))}}}",
        str(index),
    ]
    return f"    {{{', '.join(fields)}}},"


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
    """Assembly that puts the blob and its index into separate sections."""
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
