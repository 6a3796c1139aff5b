"""Checks on the embedded kernels: the table holds exactly what the file holds, and each can be launched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashmoe.audit.context import failed, limited, listing, passed, warned
from flashmoe.audit.cubin import CubinFacts
from flashmoe.audit.embedded import Binary
from flashmoe.audit.launch import Launch, Need, launchability
from flashmoe.audit.ptx import PtxFacts
from flashmoe.report import Check, Verdict
from flashmoe.tables import Tables, Unit

MAX_PARAM_BYTES = 4096  # the limit of every driver; more needs compute capability 7.0 and CUDA 12.1
BUILD = "`python -m flashmoe_build --archs all`"
_LOCAL_ALLOWANCES = frozenset({"local_memory", "local", "stack", "spills", "spill"})


@dataclass(frozen=True)
class KernelAudit:
    """What came of it: checks, and one row a kernel and GPU."""

    checks: tuple[Check, ...]
    launches: tuple[Launch, ...]


def audit_kernels(binaries: Sequence[Binary], tables: Tables, targets: Sequence[str] | None) -> KernelAudit:
    """All checks on embedded binaries. ``targets``: what the build declares to hold; None means the whole table."""
    wanted = tuple(targets) if targets is not None else tuple(t.name for t in tables.targets)
    expected = {(u.name, u.target.name): u for u in tables.units(wanted)}
    launches = tuple(_launches(binaries, tables))
    checks = [
        *_check_targets(binaries, tables, wanted),
        *_check_readable(binaries),
        *_check_set(binaries, expected),
        *_check_entries(binaries, expected),
        *_check_arch(binaries),
        *_check_hashes(binaries),
        *_check_forbidden(binaries, tables),
        *_check_resources(binaries, expected),
        *_check_parameters(binaries),
        *_check_launches(launches),
    ]
    return KernelAudit(tuple(checks), launches)


def _check_targets(binaries: Sequence[Binary], tables: Tables, wanted: Sequence[str]) -> Iterator[Check]:
    used = {u.target.name for u in tables.units()}
    held, name = {b.target for b in binaries}, "targets"
    unknown = sorted(held - {t.name for t in tables.targets})
    for target in unknown:
        yield failed(f"{name}: {target}", found=f"binaries for {target}", expected=f"a target of arch.toml: {listing(sorted(used))}",
                     why="No GPU is known to load it, so nothing about it can be checked.", cause="built from another arch.toml",
                     next_step="add the target to csrc/arch.toml, or build again")
    missing = [t for t in wanted if t in used and t not in held]
    for target in missing:
        gpus = listing(tables.target(target).gpus)
        yield failed(f"missing architecture: {target}", found=f"binaries for {listing(sorted(held))}", expected=f"binaries for {target} too",
                     why=f"On {gpus} the first call would fail with `no kernel for this GPU`, or fall back to slower code.",
                     cause=f"the target was left out of the build, or its binaries were dropped at the link", next_step=f"build it: {BUILD}")
    left_out = sorted(used - set(wanted))
    if left_out:
        yield warned(name, f"a partial build: it declares {listing(sorted(wanted))} and leaves out {listing(left_out)}",
                     "every target of the table", "GPUs of the other targets have no kernel in this file.", f"for a release: {BUILD}")
    elif not unknown and not missing:
        yield passed(name, listing(sorted(held), 12), "every target of the table")


def _check_readable(binaries: Sequence[Binary]) -> list[Check]:
    bad = [failed(f"unreadable binary: {b.label}", found=str(b.error), expected="a sound cubin or PTX module",
                  why="The driver refuses it at the first launch.", cause="the binary or its index was damaged or edited",
                  next_step=b.error.next_step) for b in binaries if b.error is not None]
    return limited(bad) or [passed("embedded binaries", f"{len(binaries)}, all readable")]


def _check_set(binaries: Sequence[Binary], expected: dict[tuple[str, str], Unit]) -> list[Check]:
    held = [(b.name, b.target) for b in binaries]
    present = {target for _, target in held}
    checks = []
    for key in sorted(set(expected) - set(held)):
        unit = expected[key]
        if unit.target.name not in present:
            continue  # one failure for the whole target says it already
        others = sorted({dtype for b, t in held if t == key[1] for dtype in unit.row.dtypes if b == Unit(unit.row, dtype, unit.target).name})
        cause = (f"the unit for {unit.dtype} was not compiled or not embedded; {', '.join(others)} is there" if others
                 else "the unit was not compiled or not embedded")
        checks.append(failed(f"missing kernel: {unit.name} for {key[1]}", found=f"no binary {unit.name} for {key[1]}",
                             expected=f"{listing(symbol for _, symbol in unit.entries)}",
                             why=f"The operator accepts {unit.dtype} with head dim {unit.row.head_dim}; the call would fail at launch.",
                             cause=cause, next_step=f"build it ({BUILD}), or drop the row from csrc/kernels.toml"))
    for key in sorted(set(held) - set(expected)):
        checks.append(failed(f"kernel outside the table: {key[0]} for {key[1]}", found=f"{key[0]} for {key[1]}",
                             expected="only units that csrc/kernels.toml states for the declared targets",
                             why="Nothing dispatches to it, and nothing says what it may use.", cause="built from another kernels.toml, or a stale cache",
                             next_step="clean the build folder and build again"))
    for key in sorted({k for k in held if held.count(k) > 1}):
        checks.append(failed(f"kernel twice: {key[0]} for {key[1]}", found=f"{held.count(key)} binaries", expected="one",
                             why="Which of them is launched is chance.", cause="the link embedded it twice", next_step="build again"))
    return limited(checks) or [passed("kernel set", f"{len(held)} units, exactly the table's")]


def _check_entries(binaries: Sequence[Binary], expected: dict[tuple[str, str], Unit]) -> list[Check]:
    checks, count = [], 0
    for binary in binaries:
        unit = expected.get((binary.name, binary.target))
        if binary.facts is None:
            continue
        stated = {s for _, s in unit.entries} if unit is not None else set(binary.entries)
        count += len(stated)
        for symbol in sorted(stated - binary.symbols):
            same = listing(sorted(binary.symbols), 4) or "nothing"
            checks.append(failed(f"missing entry: {symbol}", found=f"{binary.label} holds {same}", expected=symbol,
                                 why="cuModuleGetFunction fails at the first launch.",
                                 cause="the unit was never instantiated for this dtype, head dim or mask", next_step="look at the generated unit and build again"))
        for symbol in sorted(binary.symbols - stated):
            checks.append(failed(f"entry outside the table: {symbol}", found=f"{symbol} in {binary.label}", expected=listing(sorted(stated), 4),
                                 why="Nothing dispatches to it, and nothing says what it may use.", cause="another unit's binary under this name, or a leftover entry",
                                 next_step="build again; if it stays, state it in csrc/kernels.toml"))
        if set(binary.entries) != stated:
            checks.append(failed(f"index entries: {binary.label}", found=listing(sorted(binary.entries), 4), expected=listing(sorted(stated), 4),
                                 why="The host looks kernels up by the index.", cause="index and table were not generated together", next_step="build again"))
    return limited(checks) or [passed("kernel entries", f"{count} symbols, each in its binary")]


def _check_arch(binaries: Sequence[Binary]) -> list[Check]:
    bad = [failed(f"architecture: {b.label}", found=f"code for {b.facts.arch}", expected=f"code for {b.target}",
                  why="The driver refuses it (`no kernel image`), or a GPU runs code made for another.",
                  cause="compiled with another -arch than the index says", next_step="build again; the cache key must hold the target")
           for b in binaries if b.facts is not None and b.facts.arch != b.target]
    return limited(bad) or [passed("architecture of each binary", "equal to its declared target")]


def _check_hashes(binaries: Sequence[Binary]) -> list[Check]:
    bad = [failed(f"edited binary: {b.label}", found=f"sha256 {b.actual_sha256[:16]}...", expected=f"sha256 {b.sha256[:16]}... (index)",
                  why="It is not what the compiler gave, so no test or audit of that binary holds for this one.",
                  cause="changed after the build", next_step="build again from the recorded commit")
           for b in binaries if b.actual_sha256 != b.sha256]
    return limited(bad) or [passed("sha256 of each binary", "equal to the index")]


def _check_forbidden(binaries: Sequence[Binary], tables: Tables) -> list[Check]:
    """bf16 where the hardware has none: by name in a cubin, by name and instruction in PTX."""
    known = {t.name: t for t in tables.targets}
    checks = []
    for binary in binaries:
        target = known.get(binary.target)
        if target is None or target.supports_bf16:
            continue
        names = set(binary.entries) | binary.symbols
        if isinstance(binary.facts, CubinFacts):
            names |= set(binary.facts.functions)
        words = sorted(n for n in names if "bf16" in n.lower() or "bfloat16" in n.lower())
        if isinstance(binary.facts, PtxFacts):
            words += [f"{e.name} (bf16 instructions)" for e in binary.facts.entries if e.uses_bf16]
        if words:
            checks.append(failed(f"bf16 for {binary.target}: {binary.label}", found=listing(words, 4), expected=f"no bf16 code for {binary.target}",
                                 why=f"Compute capability {target.capability[0]}.{target.capability[1]} has no bf16 arithmetic; 8.0 is the first that has.",
                                 cause=f"{binary.target} stands among the targets of a bf16 row", next_step=f"take {binary.target} out of that row's targets; float16 works there"))
    return limited(checks) or [passed("forbidden code", "no bf16 for targets below 8.0")]


def _check_resources(binaries: Sequence[Binary], expected: dict[tuple[str, str], Unit]) -> list[Check]:
    """Threads, dynamic shared memory and local memory against the table's row."""
    checks: list[Check] = []
    for binary in binaries:
        unit = expected.get((binary.name, binary.target))
        if unit is None:
            continue
        bytes_wanted = unit.row.smem_bytes(unit.dtype)
        if binary.smem_dynamic != bytes_wanted:
            checks.append(failed(f"shared memory: {binary.label}", found=f"{binary.smem_dynamic} bytes in the index",
                                 expected=f"{bytes_wanted} bytes by the table", why="The host asks the driver for the index's number.",
                                 cause="built from another kernels.toml or smem formula", next_step="build again"))
        if binary.threads != unit.row.threads:
            checks.append(failed(f"threads: {binary.label}", found=f"{binary.threads} in the index", expected=f"{unit.row.threads} by the table",
                                 why="The kernel's tile assumes the table's number.", cause="built from another kernels.toml", next_step="build again"))
        for need, bound in _needs(binary):
            if bound and binary.threads > bound:
                checks.append(failed(f"launch bounds: {need.kernel}", found=f"at most {bound} threads ({binary.target})", expected=f"{binary.threads} threads",
                                     why="The launch fails with `too many resources requested`.", cause="__launch_bounds__ of another tile", next_step="build again"))
            if need.local_memory:
                checks.append(_local_check(need, unit))
    return limited(checks) or [passed("resources", "threads, shared memory and local memory as the table says")]


def _local_check(need: Need, unit: Unit) -> Check:
    reason = next((why for word, why in unit.row.allow.items() if word in _LOCAL_ALLOWANCES), "")
    name, found = f"local memory: {need.kernel}", f"{need.local_memory} bytes a thread for {need.target}"
    if reason:
        return warned(name, f"{found}, allowed: {reason}", "none", "Local memory is DRAM.", "remove the allowance once it is gone")
    return failed(name, found=found, expected="none: no spills, no arrays with run-time indices", why="Local memory is DRAM: one access costs what hundreds of instructions do.",
                  cause="registers spilled, or a register array is indexed by a value unknown at compile time",
                  next_step="shrink the tile or unroll the index; or allow it in csrc/kernels.toml with the reason")


def _check_parameters(binaries: Sequence[Binary]) -> list[Check]:
    """One family gets one parameter block: its size is the same in every binary, and within the limit."""
    sizes: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for binary in binaries:
        family = "_".join(binary.name.split("_")[:3])
        rows = binary.facts.kernels if isinstance(binary.facts, CubinFacts) else (binary.facts.entries if binary.facts else ())
        for row in rows:
            sizes[family][row.param_bytes].append(f"{row.name} ({binary.target})")
    checks = []
    for family, by_size in sorted(sizes.items()):
        if len(by_size) > 1:
            found = "; ".join(f"{size} bytes in {listing(names, 2)}" for size, names in sorted(by_size.items()))
            checks.append(failed(f"parameters: {family}", found=found, expected="one size: the host passes one struct",
                                 why="A kernel reads its parameters at other offsets than the host wrote them.",
                                 cause="binaries from before and after a change of params.h (a stale cache)", next_step="clean the build folder and build again"))
        if max(by_size) > MAX_PARAM_BYTES:
            checks.append(failed(f"parameters: {family}", found=f"{max(by_size)} bytes", expected=f"at most {MAX_PARAM_BYTES}", why="The launch fails.",
                                 next_step="pass the large part by pointer"))
    return checks or [passed("kernel parameters", listing(f"{f}: {min(s)} bytes" for f, s in sorted(sizes.items())))]


def _needs(binary: Binary) -> Iterator[tuple[Need, int]]:
    """(need, largest allowed block) of each kernel in a binary."""
    if isinstance(binary.facts, CubinFacts):
        for k in binary.facts.kernels:
            yield Need(k.name, binary.target, k.registers, binary.threads, k.smem_static, binary.smem_dynamic, k.local_memory), k.max_threads
    elif isinstance(binary.facts, PtxFacts):
        for e in binary.facts.entries:
            yield Need(e.name, binary.target, None, binary.threads, e.smem_static, binary.smem_dynamic, e.local), e.max_threads


def _launches(binaries: Sequence[Binary], tables: Tables) -> Iterator[Launch]:
    known = {t.name: t for t in tables.targets}
    for binary in binaries:
        for gpu in known[binary.target].gpus if binary.target in known else ():
            for need, _ in _needs(binary):
                yield launchability(need, tables.gpu(gpu), smem_static_limit=tables.smem_static_limit, registers_limit=tables.registers_per_thread_limit)


def _check_launches(launches: Sequence[Launch]) -> list[Check]:
    bad = [failed(f"not launchable: {row.need.kernel} on {row.gpu}", found="; ".join(row.problems),
                  expected=f"at least one block on a multiprocessor of {row.gpu}", why="The launch fails on that GPU, and only there.",
                  cause=f"the tile of the {row.need.target} binary is too large for {row.gpu}",
                  next_step=f"`python -m flashmoe smem --arch {row.gpu}` shows what fits") for row in launches if row.problems]
    if not launches:
        return [Check("launchability", Verdict.FAIL, "no kernel could be read", "a row for each kernel and GPU", "Nothing was proved.", "build again")]
    return limited(bad) or [passed("launchability", f"{len(launches)} kernel and GPU pairs, each with a block or more on a multiprocessor")]
