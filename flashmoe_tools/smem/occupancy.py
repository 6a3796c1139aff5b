"""What a kernel's tile costs on a GPU, and how many of its blocks fit on a multiprocessor. Pure arithmetic.

Limits come from csrc/tables/arch.toml, bytes from the formula in operations.toml, which each generated translation unit
asserts. Occupancy: CUDA C++ Programming Guide, "Hardware Multithreading" (12.8).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

from flashmoe.errors import ArgumentError, DtypeError
from flashmoe_tools.descriptors import KernelRow
from flashmoe_tools.tables import Gpu, Tables

ATTENTION = "attention_forward"  # the only operation whose tile constraints are known here: see tiles()
WARP = 32
SCHEDULERS = 4  # per multiprocessor
REGISTER_UNIT = 256  # registers are allocated per warp in units of 256
MAX_BLOCK_N = 256
MMA_ROWS = 16  # rows of Q that a warp processes at a time (mma m16n8)
WARPGROUP_ROWS = 64  # rows of Q per consumer warpgroup (wgmma m64)
MAX_THREADS_PER_BLOCK = 1024


@dataclass(frozen=True)
class Limit:
    """How many blocks per multiprocessor one resource allows."""

    resource: str
    blocks: int


def warp_registers(registers: int) -> int:
    """Registers allocated to one warp at ``registers`` per thread."""
    return _round_up(registers * WARP, REGISTER_UNIT)


def block_limits(gpu: Gpu, *, threads: int, smem: int, registers: int | None) -> tuple[Limit, ...]:
    """Blocks per multiprocessor that each resource allows, tightest first. ``smem``: bytes per block, static and dynamic.

    Shared memory is allocated in units of 128 bytes (256 on compute capability 7.5). Each scheduler has its own quarter
    of the registers, so registers left over in one quarter cannot be used by a warp of another.
    """
    unit = 256 if gpu.compute_capability < (8, 0) else 128
    warps = max(1, _round_up(threads, WARP) // WARP)
    found = [
        Limit("shared memory", gpu.smem_per_sm // (_round_up(smem, unit) + gpu.smem_reserved or unit)),
        Limit("threads", gpu.max_threads_per_sm // (warps * WARP)),
        Limit("blocks", gpu.max_blocks_per_sm),
    ]
    if registers:
        per_scheduler = gpu.registers_per_sm // SCHEDULERS // warp_registers(registers)
        found.append(Limit("registers", per_scheduler * SCHEDULERS // warps))
    return tuple(sorted(found, key=lambda item: item.blocks))


@dataclass(frozen=True)
class Layout:
    """One tile of one family on one GPU, in bytes."""

    gpu: Gpu
    row: KernelRow
    dtype: str
    items: tuple[tuple[str, int], ...]
    registers: int | None  # per thread, if a build measured them

    @property
    def total(self) -> int:
        return sum(size for _, size in self.items)

    @property
    def limit(self) -> int:
        return self.gpu.smem_per_block_optin

    @property
    def left(self) -> int:
        return self.limit - self.total

    @property
    def fits(self) -> bool:
        return self.left >= 0 and self.row.threads <= MAX_THREADS_PER_BLOCK

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limit of each resource, tightest first."""
        return block_limits(self.gpu, threads=self.row.threads, smem=self.total, registers=self.registers)

    @property
    def blocks_per_sm(self) -> int:
        return self.limits[0].blocks if self.fits else 0


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def operations(tables: Tables) -> tuple[str, ...]:
    """The operations that have a formula for their shared memory."""
    return tuple(dict.fromkeys(kind.operation for kind in tables.descriptors if kind.shared_memory))


def families(tables: Tables, operation: str = ATTENTION) -> tuple[str, ...]:
    """The kernel families of the operation."""
    return tuple(kind.family for kind in tables.descriptors if kind.operation == operation)


def has_head_dim(tables: Tables, operation: str) -> bool:
    return any(
        axis.name == "head_dim" for kind in tables.descriptors if kind.operation == operation for axis in kind.axes
    )


def with_head_dim(row: KernelRow, head_dim: int) -> KernelRow:
    return replace(row, axes=MappingProxyType({**row.axes, "head_dim": head_dim}))


def rows_on(
    tables: Tables, gpu: Gpu, family: str, dtype: str, head_dim: int, operation: str = ATTENTION
) -> tuple[KernelRow, ...]:
    """The table's rows that run on ``gpu``; if they have a head dim, those of the smallest one that is large enough."""
    usable = [
        (unit.target, unit.row)
        for unit in tables.units()
        if unit.row.operation == operation
        and unit.row.family == family
        and unit.dtype == dtype
        and gpu.name in unit.target.gpus
        and unit.row.axes.get("head_dim", head_dim) >= head_dim
    ]
    if not usable:
        return ()
    width = min(row.axes.get("head_dim", 0) for _, row in usable)
    usable = [(target, row) for target, row in usable if row.axes.get("head_dim", 0) == width]
    best = max((target for target, _ in usable), key=lambda target: (not target.is_ptx, target.capability))
    return tuple(row for target, row in usable if target == best)


def pick_family(tables: Tables, gpu: Gpu, requested: str | None, operation: str = ATTENTION) -> str:
    """``wanted``, or the first of the GPU's families that has a kernel of the operation."""
    known = families(tables, operation)
    if requested is not None:
        if requested not in known:
            msg = f"no kernel family {requested!r}; known: {', '.join(known)}"
            raise ArgumentError(msg)
        if requested not in gpu.families:
            msg = f"{gpu.name} runs the families {', '.join(gpu.families)}; {requested} uses instructions that it lacks"
            raise ArgumentError(msg)
        return requested
    built = {row.family for row in tables.kernels if row.operation == operation}
    for family in gpu.families:
        if family in built:
            return family
    msg = f"no kernel family of {gpu.name} ({', '.join(gpu.families)}) has a kernel of {operation}; name one with --family"
    raise ArgumentError(msg)


def check_dtype(gpu: Gpu, dtype: str) -> None:
    if dtype == "bf16" and not gpu.bf16:
        capability = ".".join(map(str, gpu.compute_capability))
        msg = f"bf16 needs compute capability 8.0; {gpu.name} is {capability}; use --dtype f16"
        raise DtypeError(msg)


def base_rows(
    tables: Tables, gpu: Gpu, family: str, dtype: str, head_dim: int, operation: str = ATTENTION
) -> tuple[KernelRow, ...]:
    """Rows to start from: the table's for this GPU, else any of the family's, for its options."""
    found = rows_on(tables, gpu, family, dtype, head_dim, operation)
    if found:
        return found
    others = [row for row in tables.kernels if row.operation == operation and row.family == family]
    if not others or "head_dim" not in others[0].axes:
        return tuple(others)
    nearest = min(others, key=lambda row: (abs(row.axes["head_dim"] - head_dim), row.block_m * row.block_n))
    return (with_head_dim(nearest, head_dim),)


def layout(gpu: Gpu, row: KernelRow, dtype: str, registers: int | None = None) -> Layout:
    return Layout(gpu, row, dtype, row.smem_items(dtype), registers)


def tiles(row: KernelRow) -> Iterator[KernelRow]:
    """Every tile that the family's static assertions allow with the stages and warps of ``row``.

    sm75, sm80: each warp has 16-row blocks of Q, and a load pass of the block covers 4 rows per warp. sm90: one
    warpgroup loads, each of the others has 64 rows.
    """
    if row.family == "sm90":
        rows_of_q = [WARPGROUP_ROWS * (row.warps // 4 - 1)] if row.warps >= 8 else []
    else:
        rows_of_q = [MMA_ROWS * row.warps * factor for factor in (1, 2, 3, 4)]
    step = key_step(row)
    for block_m in rows_of_q:
        for block_n in range(step, MAX_BLOCK_N + 1, step):
            yield replace(row, block_m=block_m, block_n=block_n)


def key_step(row: KernelRow) -> int:
    """The granularity of a tile's number of K and V rows."""
    return MMA_ROWS if row.family == "sm90" else max(MMA_ROWS, 4 * row.warps)


def tile_problem(row: KernelRow) -> str:
    """Why no kernel of the family can use this tile even if it fits; empty if one can or if this is unknown."""
    if row.operation != ATTENTION:
        return ""
    if row.family == "sm90":
        if row.warps < 8 or row.warps % 4:
            return f"sm90 needs whole warpgroups of 4 warps, one that loads and one or more that compute; not {row.warps} warps"
        whole = WARPGROUP_ROWS * (row.warps // 4 - 1)
        if row.block_m != whole:
            return f"with {row.warps} warps a tile of sm90 has {whole} rows of Q, not {row.block_m}"
    elif row.block_m % (MMA_ROWS * row.warps):
        return f"{row.warps} warps of {row.family} share {MMA_ROWS * row.warps} rows of Q, or a multiple; not {row.block_m}"
    if row.block_n % key_step(row):
        return (
            f"rows of K come in multiples of {key_step(row)} with {row.warps} warps of {row.family}; not {row.block_n}"
        )
    return ""


def largest_tile(gpu: Gpu, row: KernelRow, dtype: str) -> Layout | None:
    """The tile with the most scores (rows of Q x rows of K) that shared memory allows; registers may allow less.

    None if none fits, and for operations other than attention, whose static assertions are not repeated here.
    """
    if row.operation != ATTENTION:
        return None
    fitting = [item for tile in tiles(row) if (item := layout(gpu, tile, dtype)).fits]
    return max(fitting, key=lambda item: (item.row.block_m * item.row.block_n, item.row.block_m), default=None)
