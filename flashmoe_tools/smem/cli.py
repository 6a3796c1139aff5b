"""``python -m flashmoe smem``: what a kernel's tile costs in shared memory, and on which GPU it fits.

python -m flashmoe smem --head-dim 128                                 # every GPU, its own tile
python -m flashmoe smem --arch sm89 --head-dim 128                     # one GPU, itemised
python -m flashmoe smem --arch sm89 --head-dim 128 --tile 128x64 --stages 2
python -m flashmoe smem --operation grouped_gemm --arch sm90           # any operation whose formula is in the tables
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashmoe.errors import ArgumentError, DtypeError, ExitCode, TableError
from flashmoe_tools.descriptors import KernelRow
from flashmoe_tools.smem.occupancy import (
    ATTENTION,
    Layout,
    base_rows,
    check_dtype,
    families,
    has_head_dim,
    largest_tile,
    layout,
    operations,
    pick_family,
    tile_problem,
    with_head_dim,
)
from flashmoe_tools.tables import Gpu, Tables, entries, load_tables

MAX_HEAD_DIM = 512
DTYPES = ("bf16", "f16", "f32")
BUILD_REPORT = Path(__file__).resolve().parents[2] / "build" / "reports" / "build.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", metavar="GPU", help="sm75 ... sm120 (also 89, 8.9, sm_89); without it, all side by side"
    )
    parser.add_argument("--operation", default=ATTENTION, metavar="NAME", help=f"of the tables (default: {ATTENTION})")
    parser.add_argument("--head-dim", type=int, metavar="D", help=f"1 to {MAX_HEAD_DIM}; of operations that have one")
    parser.add_argument("--family", help="kernel family (default: the GPU's best in the operation's kernels.toml)")
    parser.add_argument("--tile", metavar="MxN", help="rows of Q x rows of K and V (default: the table's)")
    parser.add_argument("--stages", type=int, metavar="N", help="K and V tiles in flight (default: the table's)")
    parser.add_argument("--warps", type=int, metavar="N", help="warps per block (default: the table's)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16, or f16 on a GPU without bf16")
    parser.add_argument(
        "--registers", type=int, metavar="N", help="registers per thread, for the occupancy (default: the last build's)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    tables = load_tables()
    check_arguments(args, tables)
    if args.arch is None:
        requested = families(tables, args.operation) if args.family is None else (args.family,)
        gpus = tuple(gpu for gpu in tables.gpus if set(requested) & set(gpu.families))
    else:
        gpus = (named_gpu(tables, args.arch),)
    if not gpus:
        msg = f"no GPU runs a kernel family {args.family!r}; known: {', '.join(families(tables, args.operation))}"
        raise ArgumentError(msg)
    layouts = [item for gpu in gpus for item in plan(tables, gpu, args)]
    if args.json:
        print(json.dumps([to_json(item) for item in layouts], indent=1))
    elif args.arch is None:
        print(side_by_side(layouts, args.operation, args.head_dim))
    else:
        print("\n\n".join(itemised(item, args.head_dim) for item in layouts))
    return ExitCode.OK if all(item.fits for item in layouts) else ExitCode.FAILED


def check_arguments(args: argparse.Namespace, tables: Tables) -> None:
    """Raises ArgumentError for an unknown operation, a missing head dim, or a number outside its range."""
    if args.operation not in operations(tables):
        msg = f"--operation {args.operation!r} has no formula of shared memory; known: {', '.join(operations(tables))}"
        raise ArgumentError(msg)
    if (args.head_dim is not None) != has_head_dim(tables, args.operation):
        is_needed = args.head_dim is None
        msg = f"{args.operation} has {'a' if is_needed else 'no'} head dim: {'add' if is_needed else 'drop'} --head-dim"
        raise ArgumentError(msg)
    ranges = (
        ("head-dim", args.head_dim, MAX_HEAD_DIM),
        ("stages", args.stages, 64),
        ("warps", args.warps, 32),
        ("registers", args.registers, 255),
    )
    for name, value, most in ranges:
        if value is not None and not 1 <= value <= most:
            msg = f"--{name} {value} is not in 1 to {most}"
            raise ArgumentError(msg)


def named_gpu(tables: Tables, text: str) -> Gpu:
    try:
        return tables.gpu(arch_name(text))
    except TableError as error:
        msg = f"--arch {text!r}: {error}"
        raise ArgumentError(msg) from error


def arch_name(text: str) -> str:
    """``sm89`` for sm89, sm_89, 89, 8.9 and names with a suffix like sm_90a."""
    match = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)[af]?", text.strip().lower())
    return f"sm{match[1]}{match[2]}" if match else text


def parse_tile(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)[xX*](\d+)", text.strip())
    if match is None or not int(match[1]) or not int(match[2]):
        msg = f"--tile {text!r} is not a tile; write rows of Q x rows of K, for example 128x64"
        raise ArgumentError(msg)
    return int(match[1]), int(match[2])


def plan(tables: Tables, gpu: Gpu, args: argparse.Namespace) -> list[Layout]:
    """The layouts that the arguments ask for on one GPU: the table's own rows, or one with the given values."""
    dtype = args.dtype or default_dtype(tables, gpu, args.operation)
    if dtype == "bf16" and not gpu.bf16 and args.arch is None:
        dtype = "f16"  # the table of all GPUs shows the oldest one with the type that it has
    try:
        check_dtype(gpu, dtype)
    except DtypeError as error:
        raise ArgumentError(str(error)) from error
    family = pick_family(tables, gpu, args.family, args.operation)
    rows = base_rows(tables, gpu, family, dtype, args.head_dim or 0, args.operation)
    if not rows:
        msg = f"kernels.toml has no {family} row of {args.operation} to start from; known: {', '.join(families(tables, args.operation))}"
        raise ArgumentError(msg)
    changed = {name: value for name, value in (("stages", args.stages), ("warps", args.warps)) if value is not None}
    if args.tile is not None:
        changed["block_m"], changed["block_n"] = parse_tile(args.tile)
        rows = tuple(with_head_dim(row, args.head_dim) if args.head_dim else row for row in rows)
    if not changed:
        return [layout(gpu, row, dtype, args.registers or built_registers(gpu, row, dtype)) for row in rows]
    return [layout(gpu, replace(rows[0], **changed), dtype, args.registers)]


def default_dtype(tables: Tables, gpu: Gpu, operation: str) -> str:
    """The first of DTYPES that the GPU supports and that a row of the operation has."""
    stated = {dtype for row in tables.kernels if row.operation == operation for dtype in row.dtypes}
    return next(dtype for dtype in DTYPES if dtype in stated and (gpu.bf16 or dtype != "bf16"))


def built_registers(gpu: Gpu, row: KernelRow, dtype: str) -> int | None:
    """Registers per thread of this row in the last build of this checkout; None without one."""
    try:
        units = json.loads(BUILD_REPORT.read_text(encoding="utf-8"))["data"]["units"]
        symbols = {entry.symbol for entry in entries(row, dtype)}
        found = [
            int(kernel["registers"])
            for unit in units
            if arch_name(unit["target"]) == gpu.name
            for kernel in unit["kernels"]
            if kernel["symbol"] in symbols
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return max(found, default=None)


def describe(row: KernelRow, dtype: str) -> str:
    words = "".join(
        f", {' and '.join(row.words[axis.name])} only"
        for axis in row.descriptor.word_axes
        if len(row.words[axis.name]) < len(axis.words)
    )
    numbers = "".join(f" {axis.prefix}{row.axes[axis.name]}" for axis in row.descriptor.numbers)
    variant = f" {row.variant}" if row.variant else ""
    named = row.descriptor.tile
    tile = f" tile {'x'.join(str(getattr(row, name)) for name in named if name != 'stages')}," if named else ""
    tile += f" {row.stages} stages," if "stages" in named else ""
    return f"{row.family}{variant} {dtype}{numbers}{tile} {row.warps} warps{words}"


def itemised(item: Layout, head_dim: int | None) -> str:
    """One layout, one line per item."""
    gpu = item.gpu
    lines = [f"{gpu.name} ({gpu.products})", f"  {describe(item.row, item.dtype)}"]
    if item.row.axes.get("head_dim") != head_dim:
        lines.append(
            f"  head dim {head_dim} runs in the kernel for {item.row.axes['head_dim']}, columns beyond it predicated"
        )
    lines += [f"  {name:<28}{size:>9,} bytes" for name, size in item.items]
    lines.append(f"  {'dynamic shared memory':<28}{item.total:>9,} bytes")
    lines.append(f"  {'limit per block (opt-in)':<28}{item.limit:>9,} bytes")
    if item.fits:
        lines.append(f"  {'left':<28}{item.left:>9,} bytes")
        lines.append(
            f"  blocks per SM: {item.blocks_per_sm} ({', '.join(f'{limit.resource} {limit.blocks}' for limit in item.limits)})"
        )
        if item.registers is None:
            lines.append(
                "  registers: not known; `nox -s build` measures the table's tiles, --registers N assumes a number"
            )
    elif item.left < 0:
        lines.append(f"  DOES NOT FIT: {-item.left:,} bytes too many")
    else:
        lines.append(f"  DOES NOT FIT: {item.row.threads} threads, a block has at most 1024")
    problem = tile_problem(item.row)
    if problem:
        lines.append(f"  no kernel has this tile: {problem}")
    if item.row.operation == ATTENTION:
        lines.append(f"  {largest_text(item)}")
    return "\n".join(lines)


def largest_text(item: Layout) -> str:
    best = largest_tile(item.gpu, item.row, item.dtype)
    with_these = f"with {item.row.stages} stages and {item.row.warps} warps"
    if best is None:
        return f"no tile fits {with_these}; fewer stages need less"
    return f"largest tile that fits {with_these}: {best.row.block_m}x{best.row.block_n}, {best.total:,} bytes (registers may allow less)"


def side_by_side(layouts: Sequence[Layout], operation: str, head_dim: int | None) -> str:
    """One line per GPU and row of its table."""
    header: tuple[str, ...] = ("GPU", "kernel", "bytes", "limit", "left", "blocks/SM")
    if operation == ATTENTION:
        header = (*header, "largest that fits")
    rows = [header]
    for item in layouts:
        best = largest_tile(item.gpu, item.row, item.dtype)
        largest = (f"{best.row.block_m}x{best.row.block_n}" if best else "none",) if operation == ATTENTION else ()
        blocks = str(item.blocks_per_sm) if item.fits else "does not fit"
        rows.append(
            (
                item.gpu.name,
                describe(item.row, item.dtype),
                f"{item.total:,}",
                f"{item.limit:,}",
                f"{item.left:,}",
                blocks,
                *largest,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    what = "attention" if operation == ATTENTION else operation
    lines = [f"shared memory of {what}{f', head dim {head_dim}' if head_dim else ''}"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def to_json(item: Layout) -> dict[str, Any]:
    best = largest_tile(item.gpu, item.row, item.dtype)
    return {
        "gpu": item.gpu.name,
        "operation": item.row.operation,
        "family": item.row.family,
        "dtype": item.dtype,
        "head_dim": item.row.axes.get("head_dim"),
        "tile": [item.row.block_m, item.row.block_n],
        "stages": item.row.stages,
        "warps": item.row.warps,
        "items": [{"name": name, "bytes": size} for name, size in item.items],
        "total": item.total,
        "limit": item.limit,
        "left": item.left,
        "fits": item.fits,
        "problem": tile_problem(item.row),
        "registers": item.registers,
        "blocks_per_sm": item.blocks_per_sm,
        "limits": {limit.resource: limit.blocks for limit in item.limits},
        "largest_tile": [best.row.block_m, best.row.block_n] if best else None,
    }
