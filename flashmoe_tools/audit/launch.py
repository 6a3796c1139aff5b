"""Whether a kernel can be launched on a GPU, and how many of its blocks fit on one multiprocessor."""

from dataclasses import dataclass

from flashmoe_tools.smem.occupancy import MAX_THREADS_PER_BLOCK, SCHEDULERS, WARP, block_limits, warp_registers
from flashmoe_tools.tables import Gpu


@dataclass(frozen=True)
class Need:
    """What one kernel needs from a multiprocessor. ``registers`` None: PTX, the driver's compiler decides later."""

    kernel: str
    unit: str
    target: str
    registers: int | None
    threads: int
    smem_static: int
    smem_dynamic: int
    local_memory: int


@dataclass(frozen=True)
class Launch:
    """The verdict for one kernel on one GPU; ``problems`` is empty if it can be launched."""

    need: Need
    gpu: str
    blocks_per_sm: int
    limited_by: str
    smem_limit: int
    problems: tuple[str, ...]


def launchability(need: Need, gpu: Gpu, *, smem_static_limit: int, registers_limit: int) -> Launch:
    """Checks one kernel against one GPU's limits."""
    smem = need.smem_static + need.smem_dynamic
    problems = []
    if smem > gpu.smem_per_block_optin:
        problems.append(
            f"{smem} bytes of shared memory per block, {gpu.name} has {gpu.smem_per_block_optin} after opting in"
        )
    if need.smem_static > smem_static_limit:
        problems.append(
            f"{need.smem_static} bytes of static shared memory, the limit without opting in is {smem_static_limit}"
        )
    if need.threads > MAX_THREADS_PER_BLOCK:
        problems.append(f"{need.threads} threads per block, the limit is {MAX_THREADS_PER_BLOCK}")
    if need.registers is not None and need.registers > registers_limit:
        problems.append(f"{need.registers} registers per thread, the limit is {registers_limit}")
    rounds = -(-need.threads // (WARP * SCHEDULERS))  # warps are rounded up to a multiple of the number of schedulers
    block_registers = warp_registers(need.registers) * rounds * SCHEDULERS if need.registers is not None else 0
    if block_registers > gpu.registers_per_block:
        problems.append(
            f"{need.registers} registers x {need.threads} threads take {block_registers} registers, "
            f"{gpu.name} has {gpu.registers_per_block} per block"
        )
    limit = block_limits(gpu, threads=need.threads, smem=smem, registers=need.registers)[0]
    if limit.blocks < 1 and not problems:
        problems.append(f"no block fits on a multiprocessor of {gpu.name}, by its {limit.resource}")
    return Launch(need, gpu.name, limit.blocks, limit.resource, gpu.smem_per_block_optin, tuple(problems))
