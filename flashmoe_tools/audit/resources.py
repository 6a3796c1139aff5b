"""Checks the embedded kernels' resource use against the table's row and against every GPU that may load them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from flashmoe_tools.audit.context import failed, limited, listing, passed
from flashmoe_tools.audit.cubin import CubinFacts
from flashmoe_tools.audit.embedded import Binary
from flashmoe_tools.audit.launch import Launch, Need, launchability
from flashmoe_tools.audit.ptx import PtxFacts
from flashmoe_tools.report import Check, Verdict
from flashmoe_tools.tables import Tables, Unit

MAX_PARAM_BYTES = 4096  # the limit of every driver; more needs compute capability 7.0 and CUDA 12.1
_LOCAL_ALLOWANCES = {"local_memory", "spill"}  # the same words as in flashmoe_build/compile/resources.py


def check_resources(binaries: Sequence[Binary], expected: dict[tuple[str, str], Unit]) -> list[Check]:
    """Compares threads, dynamic shared memory and local memory with the table's row."""
    checks: list[Check] = []
    allowed: list[str] = []
    for binary in binaries:
        unit = expected.get((binary.name, binary.target))
        if unit is None:
            continue
        bytes_wanted = unit.row.smem_bytes(unit.dtype)
        if binary.smem_dynamic != bytes_wanted:
            checks.append(
                failed(
                    f"shared memory: {binary.label}",
                    found=f"{binary.smem_dynamic} bytes in the index",
                    expected=f"{bytes_wanted} bytes by the table",
                    why="The host requests the size in the index from the driver.",
                    cause="built from another kernels.toml or operations.toml",
                    next_step="build again",
                )
            )
        if binary.threads != unit.row.threads:
            checks.append(
                failed(
                    f"threads: {binary.label}",
                    found=f"{binary.threads} in the index",
                    expected=f"{unit.row.threads} by the table",
                    why="The kernel's tile assumes the table's number.",
                    cause="built from another kernels.toml",
                    next_step="build again",
                )
            )
        for need, bound in _needs(binary):
            if bound and binary.threads > bound:
                checks.append(
                    failed(
                        f"launch bounds: {need.kernel}",
                        found=f"at most {bound} threads ({binary.target})",
                        expected=f"{binary.threads} threads",
                        why="The launch fails with `too many resources requested`.",
                        cause="__launch_bounds__ of another tile",
                        next_step="build again",
                    )
                )
            if need.local_memory and _LOCAL_ALLOWANCES.isdisjoint(unit.row.allow):
                checks.append(_local_failure(need))
            elif need.local_memory:
                allowed.append(f"{need.kernel} {need.local_memory} bytes per thread ({need.target})")
    found = limited(checks) or [passed("resources", "threads, shared memory and local memory as the table says")]
    if allowed:
        found.append(
            passed("local memory that kernels.toml allows", f"{len(allowed)}: {listing(allowed, len(allowed))}")
        )
    return found


def _local_failure(need: Need) -> Check:
    return failed(
        f"local memory: {need.kernel}",
        found=f"{need.local_memory} bytes per thread for {need.target}",
        expected="none: no spills, no arrays with run-time indices",
        why="Local memory is DRAM: one access costs as much as hundreds of instructions.",
        cause="registers spilled, or a register array is indexed by a value unknown at compile time",
        next_step="shrink the tile or unroll the index; or allow it in its row of kernels.toml, with the reason",
    )


def check_parameters(binaries: Sequence[Binary], expected: dict[tuple[str, str], Unit]) -> list[Check]:
    """Checks each operation and family's parameter struct: same size in every binary, and within the limit."""
    families = {unit.name: f"{unit.row.operation}_{unit.row.family}" for unit in expected.values()}
    sizes: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for binary in binaries:
        family = families.get(binary.name, binary.name)
        rows = (
            binary.facts.kernels
            if isinstance(binary.facts, CubinFacts)
            else (binary.facts.entries if binary.facts else ())
        )
        for row in rows:
            sizes[family][row.param_bytes].append(f"{row.name} ({binary.target})")
    checks = []
    for family, by_size in sorted(sizes.items()):
        if len(by_size) > 1:
            found = "; ".join(f"{size} bytes in {listing(names, 2)}" for size, names in sorted(by_size.items()))
            checks.append(
                failed(
                    f"parameters: {family}",
                    found=found,
                    expected="one size: the host passes one struct",
                    why="A kernel reads its parameters at other offsets than the host wrote them.",
                    cause="binaries from before and after a change of the params header (a stale cache)",
                    next_step="clean the build folder and build again",
                )
            )
        if max(by_size) > MAX_PARAM_BYTES:
            checks.append(
                failed(
                    f"parameters: {family}",
                    found=f"{max(by_size)} bytes",
                    expected=f"at most {MAX_PARAM_BYTES}",
                    why="The launch fails.",
                    next_step="pass the large part by pointer",
                )
            )
    return checks or [passed("kernel parameters", listing(f"{f}: {min(s)} bytes" for f, s in sorted(sizes.items())))]


def _needs(binary: Binary) -> Iterator[tuple[Need, int]]:
    """(need, largest allowed block) of each kernel in a binary."""
    if isinstance(binary.facts, CubinFacts):
        for k in binary.facts.kernels:
            yield (
                Need(
                    k.name,
                    binary.name,
                    binary.target,
                    k.registers,
                    binary.threads,
                    k.smem_static,
                    binary.smem_dynamic,
                    k.local_memory,
                ),
                k.max_threads,
            )
    elif isinstance(binary.facts, PtxFacts):
        for e in binary.facts.entries:
            yield (
                Need(
                    e.name,
                    binary.name,
                    binary.target,
                    None,
                    binary.threads,
                    e.smem_static,
                    binary.smem_dynamic,
                    e.local,
                ),
                e.max_threads,
            )


def launches(binaries: Sequence[Binary], tables: Tables) -> Iterator[Launch]:
    known = {t.name: t for t in tables.targets}
    for binary in binaries:
        for gpu in known[binary.target].gpus if binary.target in known else ():
            for need, _ in _needs(binary):
                yield launchability(
                    need,
                    tables.gpu(gpu),
                    smem_static_limit=tables.smem_static_limit,
                    registers_limit=tables.registers_per_thread_limit,
                )


def check_launches(rows: Sequence[Launch]) -> list[Check]:
    bad = [
        failed(
            f"not launchable: {row.need.kernel} on {row.gpu}",
            found="; ".join(row.problems),
            expected=f"at least one block on a multiprocessor of {row.gpu}",
            why="The launch fails on that GPU, and only there.",
            cause=f"the tile of the {row.need.target} binary is too large for {row.gpu}",
            next_step=f"`python -m flashmoe smem --arch {row.gpu}` shows what fits",
        )
        for row in rows
        if row.problems
    ]
    if not rows:
        return [
            Check(
                "launchability",
                Verdict.FAIL,
                "no kernel could be read",
                "a row for each kernel and GPU",
                "Nothing was proved.",
                "build again",
            )
        ]
    return limited(bad) or [
        passed("launchability", f"{len(rows)} kernel and GPU pairs, each with at least one block per multiprocessor")
    ]
