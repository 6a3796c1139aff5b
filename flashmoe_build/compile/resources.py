"""What ptxas reports about a kernel (registers, stack, spills, warnings), and whether the kernel table allows it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashmoe_tools.tables import Tables, Unit

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_STATIC = re.compile(r"(\d+) bytes smem")
_WGMMA = re.compile(r"C75\d\d|wgmma.*serializ", re.IGNORECASE)
# -warn-lmem-usage and -warn-spills repeat the numbers as warnings; they count as the same kind, so that one allowance covers both.
_SAME_IN_WORDS = {"local_memory": "Local memory used for function", "spill": "Registers are spilled to local memory"}
_HARMLESS = re.compile(
    r"^\s*$|ptxas info|bytes stack frame|Used \d+ registers|Compile time|Function properties|bytes gmem"
)


@dataclass(frozen=True)
class Resources:
    """One kernel's resources on one target; bytes are per thread except ``static_shared`` (per block)."""

    symbol: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int


@dataclass(frozen=True)
class Finding:
    """Something in the compiler's log that must not be there."""

    kind: str  # spill | local_memory | wgmma_serialised | warning | resources
    text: str


def parse_log(log: str) -> tuple[Resources, ...]:
    """Resources of each entry function in a ``-v`` log, in log order."""
    found: list[Resources] = []
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", log):
        entry, frame, used = _ENTRY.search(part), _FRAME.search(part), _USED.search(part)
        if entry is None or frame is None or used is None:
            continue
        static = _STATIC.search(part)
        stack, stores, loads = (int(value) for value in frame.groups())
        found.append(Resources(entry[1], int(used[1]), stack, stores, loads, int(static[1]) if static else 0))
    return tuple(found)


def findings(unit: Unit, log: str, tables: Tables) -> tuple[Finding, ...]:
    """Everything that fails the build for this unit; empty is good. PTX units have no resources to check."""
    problems = [*_warnings(log)]
    if not unit.target.is_ptx:
        resources = parse_log(log)
        problems += _missing(unit, resources)
        problems += [problem for item in resources for problem in _limits(unit, item, tables)]
    return tuple(problem for problem in problems if problem.kind not in unit.row.allow)


def _warnings(log: str) -> Sequence[Finding]:
    result = []
    for line in log.splitlines():
        if _WGMMA.search(line):
            result.append(Finding("wgmma_serialised", line.strip()))
        elif "warning" in line.lower() and not _HARMLESS.search(line):
            kind = next((kind for kind, words in _SAME_IN_WORDS.items() if words in line), "warning")
            result.append(Finding(kind, line.strip()))
    return result


def _missing(unit: Unit, resources: Sequence[Resources]) -> Sequence[Finding]:
    reported = {item.symbol for item in resources}
    return [
        Finding("resources", f"the log contains no resources of {symbol}")
        for _, symbol in unit.entries
        if symbol not in reported
    ]


def _limits(unit: Unit, item: Resources, tables: Tables) -> list[Finding]:
    name = item.symbol
    result = []
    if item.spill_stores or item.spill_loads:
        text = f"{name} spills {item.spill_stores} bytes of stores, {item.spill_loads} of loads"
        result.append(Finding("spill", text))
    if item.stack:
        result.append(Finding("local_memory", f"{name} has {item.stack} bytes per thread in local memory"))
    registers = _allocated_registers(item.registers) * unit.row.threads
    shared = item.static_shared + unit.row.smem_bytes(unit.dtype)
    needs = [("bytes of static shared memory", item.static_shared, tables.smem_static_limit, "any GPU")]
    for gpu in map(tables.gpu, unit.target.gpus):
        needs.append(("registers per block", registers, gpu.registers_per_block, gpu.name))
        needs.append(("bytes of shared memory per block", shared, gpu.smem_per_block_optin, gpu.name))
    for what, needed, limit, where in needs:
        if needed > limit:
            result.append(Finding("resources", f"{name} needs {needed} {what}; {where} has {limit}"))
    return result


def _allocated_registers(per_thread: int) -> int:
    """Registers per thread as allocated: in units of 256 per warp, that is 8 per thread (CUDA occupancy calculator, 7.5 to 12.0)."""
    return -(-per_thread // 8) * 8


def summary(resources: Sequence[Resources]) -> list[Mapping[str, int | str]]:
    return [vars(item) for item in resources]
