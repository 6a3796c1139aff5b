"""Whether a kernel can be launched on a GPU at all, and how many of its blocks fit on one multiprocessor.

Allocation rules: CUDA C++ Best Practices Guide and the occupancy calculator that ships with CUDA 12: registers are given
to a warp in units of 256, each of the four schedulers has a quarter of the register file, a block is charged for whole
rounds of schedulers, and shared memory comes in units of 128 bytes (256 on compute capability 7.5).
"""

from __future__ import annotations

from dataclasses import dataclass

from flashmoe.tables import Gpu

WARP = 32
SCHEDULERS = 4
REGISTER_UNIT = 256  # registers, per warp
MAX_THREADS_PER_BLOCK = 1024


@dataclass(frozen=True)
class Need:
    """What one kernel asks of a multiprocessor. ``registers`` None: PTX, the driver's compiler decides later."""

    kernel: str
    target: str
    registers: int | None
    threads: int
    smem_static: int
    smem_dynamic: int
    local_memory: int


@dataclass(frozen=True)
class Launch:
    """The verdict for one kernel on one GPU; ``problems`` is empty when it can be launched."""

    need: Need
    gpu: str
    blocks_per_sm: int
    limited_by: str
    smem_limit: int
    problems: tuple[str, ...]


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def warp_registers(registers: int) -> int:
    """Registers that one warp is given for ``registers`` a thread."""
    return round_up(registers * WARP, REGISTER_UNIT)


def launchability(need: Need, gpu: Gpu, *, smem_static_limit: int, registers_limit: int) -> Launch:
    """Hold one kernel against one GPU's limits."""
    smem = need.smem_static + need.smem_dynamic
    problems = []
    if smem > gpu.smem_per_block_optin:
        problems.append(
            f"{smem} bytes of shared memory a block, {gpu.name} has {gpu.smem_per_block_optin} after opting in"
        )
    if need.smem_static > smem_static_limit:
        problems.append(
            f"{need.smem_static} bytes of static shared memory, the limit without opting in is {smem_static_limit}"
        )
    if need.threads > MAX_THREADS_PER_BLOCK:
        problems.append(f"{need.threads} threads a block, the limit is {MAX_THREADS_PER_BLOCK}")
    if need.registers is not None and need.registers > registers_limit:
        problems.append(f"{need.registers} registers a thread, the limit is {registers_limit}")
    warps = round_up(need.threads, WARP) // WARP
    block_registers = warp_registers(need.registers) * round_up(warps, SCHEDULERS) if need.registers is not None else 0
    if block_registers > gpu.registers_per_block:
        problems.append(
            f"{need.registers} registers x {need.threads} threads take {block_registers} registers, "
            f"{gpu.name} has {gpu.registers_per_block} a block"
        )
    limits = _block_limits(need, gpu, smem, warps)
    limited_by = min(limits, key=lambda name: limits[name])
    blocks = limits[limited_by]
    if blocks < 1 and not problems:
        problems.append(f"no block fits on a multiprocessor of {gpu.name}, by its {limited_by}")
    return Launch(need, gpu.name, max(0, blocks), limited_by, gpu.smem_per_block_optin, tuple(problems))


def _block_limits(need: Need, gpu: Gpu, smem: int, warps: int) -> dict[str, int]:
    unit = 256 if gpu.compute_capability < (8, 0) else 128
    taken = round_up(smem + gpu.smem_reserved, unit)
    limits = {
        "threads": gpu.max_threads_per_sm // max(WARP, round_up(need.threads, WARP)),
        "blocks": gpu.max_blocks_per_sm,
        "shared memory": gpu.smem_per_sm // taken if taken else gpu.max_blocks_per_sm,
    }
    if need.registers:
        per_scheduler = gpu.registers_per_sm // SCHEDULERS // warp_registers(need.registers)
        limits["registers"] = per_scheduler * SCHEDULERS // max(1, warps)
    return limits
