"""Checks on the embedded kernels: the file holds exactly the kernels of the table, and each can be launched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flashmoe_tools.audit.context import failed, limited, listing, passed, warned
from flashmoe_tools.audit.cubin import CubinFacts
from flashmoe_tools.audit.embedded import Binary
from flashmoe_tools.audit.launch import Launch
from flashmoe_tools.audit.ptx import PtxFacts
from flashmoe_tools.audit.resources import check_launches, check_parameters, check_resources, launches
from flashmoe_tools.report import Check
from flashmoe_tools.tables import Tables, Unit

BUILD = "`python -m flashmoe_build --archs all`"


@dataclass(frozen=True)
class KernelAudit:
    """The result: the checks, and one row per kernel and GPU."""

    checks: tuple[Check, ...]
    launches: tuple[Launch, ...]


def audit_kernels(binaries: Sequence[Binary], tables: Tables, targets: Sequence[str] | None) -> KernelAudit:
    """All checks on embedded binaries. ``targets``: what the build declares it holds; None means the whole table."""
    requested = tuple(targets) if targets is not None else tuple(t.name for t in tables.targets)
    expected = {(u.name, u.target.name): u for u in tables.units(requested)}
    rows = tuple(launches(binaries, tables))
    checks = [
        *_check_targets(binaries, tables, requested),
        *_check_readable(binaries),
        *_check_set(binaries, expected),
        *_check_entries(binaries, expected),
        *_check_arch(binaries),
        *_check_hashes(binaries),
        *_check_forbidden(binaries, tables),
        *check_resources(binaries, expected),
        *check_parameters(binaries, expected),
        *check_launches(rows),
    ]
    return KernelAudit(tuple(checks), rows)


def _check_targets(binaries: Sequence[Binary], tables: Tables, requested: Sequence[str]) -> Iterator[Check]:
    used = {u.target.name for u in tables.units()}
    held, name = {b.target for b in binaries}, "targets"
    unknown = sorted(held - {t.name for t in tables.targets})
    for target in unknown:
        yield failed(
            f"{name}: {target}",
            found=f"binaries for {target}",
            expected=f"a target of arch.toml: {listing(sorted(used))}",
            why="No GPU in the table can load it, so it cannot be checked.",
            cause="built from another arch.toml",
            next_step="add the target to csrc/tables/arch.toml, or build again",
        )
    missing = [t for t in requested if t in used and t not in held]
    for target in missing:
        gpus = listing(tables.target(target).gpus)
        yield failed(
            f"missing architecture: {target}",
            found=f"binaries for {listing(sorted(held))}",
            expected=f"binaries for {target} too",
            why=f"On {gpus} the first call would fail with `no kernel for this GPU`, or fall back to slower code.",
            cause="the target was left out of the build, or its binaries were dropped at the link",
            next_step=f"build it: {BUILD}",
        )
    left_out = sorted(used - set(requested))
    if left_out:
        yield warned(
            name,
            f"a partial build: it declares {listing(sorted(requested))} and leaves out {listing(left_out)}",
            "every target of the table",
            "GPUs of the other targets have no kernel in this file.",
            f"for a release: {BUILD}",
        )
    elif not unknown and not missing:
        yield passed(name, listing(sorted(held), 12), "every target of the table")


def _check_readable(binaries: Sequence[Binary]) -> list[Check]:
    bad = [
        failed(
            f"unreadable binary: {b.label}",
            found=str(b.error),
            expected="a valid cubin or PTX module",
            why="The driver refuses it at the first launch.",
            cause="the binary or its index was damaged or edited",
            next_step=b.error.next_step,
        )
        for b in binaries
        if b.error is not None
    ]
    return limited(bad) or [passed("embedded binaries", f"{len(binaries)}, all readable")]


def _check_set(binaries: Sequence[Binary], expected: dict[tuple[str, str], Unit]) -> list[Check]:
    held = [(b.name, b.target) for b in binaries]
    present = {target for _, target in held}
    checks = []
    for key in sorted(set(expected) - set(held)):
        unit = expected[key]
        if unit.target.name not in present:
            continue  # already covered by one failure for the whole target
        others = sorted(
            {dtype for b, t in held if t == key[1] for dtype in unit.row.dtypes if b == replace(unit, dtype=dtype).name}
        )
        cause = (
            f"the unit for {unit.dtype} was not compiled or not embedded; {', '.join(others)} is there"
            if others
            else "the unit was not compiled or not embedded"
        )
        checks.append(
            failed(
                f"missing kernel: {unit.name} for {key[1]}",
                found=f"no binary {unit.name} for {key[1]}",
                expected=f"{listing(symbol for _, symbol in unit.entries)}",
                why=f"The table promises {unit.name}; a call that needs it would fail at launch.",
                cause=cause,
                next_step=f"build it ({BUILD}), or drop {unit.row.source}",
            )
        )
    for key in sorted(set(held) - set(expected)):
        checks.append(
            failed(
                f"kernel outside the table: {key[0]} for {key[1]}",
                found=f"{key[0]} for {key[1]}",
                expected="only units that csrc/attention/kernels.toml lists for the declared targets",
                why="Nothing dispatches to it, and no row states its limits.",
                cause="built from another kernels.toml, or a stale cache",
                next_step="clean the build folder and build again",
            )
        )
    for key in sorted({k for k in held if held.count(k) > 1}):
        checks.append(
            failed(
                f"kernel twice: {key[0]} for {key[1]}",
                found=f"{held.count(key)} binaries",
                expected="one",
                why="Which of them is launched is undefined.",
                cause="the link embedded it twice",
                next_step="build again",
            )
        )
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
            checks.append(
                failed(
                    f"missing entry: {symbol}",
                    found=f"{binary.label} holds {same}",
                    expected=symbol,
                    why="cuModuleGetFunction fails at the first launch.",
                    cause="the unit was never instantiated for this dtype and these axes",
                    next_step="look at the generated unit and build again",
                )
            )
        for symbol in sorted(binary.symbols - stated):
            checks.append(
                failed(
                    f"entry outside the table: {symbol}",
                    found=f"{symbol} in {binary.label}",
                    expected=listing(sorted(stated), 4),
                    why="Nothing dispatches to it, and no row states its limits.",
                    cause="another unit's binary under this name, or a leftover entry",
                    next_step="build again; if it stays, add it to csrc/attention/kernels.toml",
                )
            )
        if set(binary.entries) != stated:
            checks.append(
                failed(
                    f"index entries: {binary.label}",
                    found=listing(sorted(binary.entries), 4),
                    expected=listing(sorted(stated), 4),
                    why="The host looks kernels up by the index.",
                    cause="index and table were not generated together",
                    next_step="build again",
                )
            )
    return limited(checks) or [passed("kernel entries", f"{count} symbols, each in its binary")]


def _check_arch(binaries: Sequence[Binary]) -> list[Check]:
    bad = [
        failed(
            f"architecture: {b.label}",
            found=f"code for {b.facts.arch}",
            expected=f"code for {b.target}",
            why="The driver refuses it (`no kernel image`), or a GPU runs code made for another.",
            cause="compiled with another -arch than the index says",
            next_step="build again; the cache key must hold the target",
        )
        for b in binaries
        if b.facts is not None and b.facts.arch != b.target
    ]
    return limited(bad) or [passed("architecture of each binary", "equal to its declared target")]


def _check_hashes(binaries: Sequence[Binary]) -> list[Check]:
    bad = [
        failed(
            f"edited binary: {b.label}",
            found=f"sha256 {b.actual_sha256[:16]}...",
            expected=f"sha256 {b.sha256[:16]}... (index)",
            why="It is not what the compiler produced, so no test or audit of that binary applies to this one.",
            cause="changed after the build",
            next_step="build again from the recorded commit",
        )
        for b in binaries
        if b.actual_sha256 != b.sha256
    ]
    return limited(bad) or [passed("sha256 of each binary", "equal to the index")]


def _check_forbidden(binaries: Sequence[Binary], tables: Tables) -> list[Check]:
    """Finds bf16 on hardware that lacks it: by name in a cubin, by name and instruction in PTX."""
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
            checks.append(
                failed(
                    f"bf16 for {binary.target}: {binary.label}",
                    found=listing(words, 4),
                    expected=f"no bf16 code for {binary.target}",
                    why=f"Compute capability {target.capability[0]}.{target.capability[1]} has no bf16 arithmetic; 8.0 is the first to have it.",
                    cause=f"{binary.target} is among the targets of a bf16 row",
                    next_step=f"take {binary.target} out of that row's targets; float16 works there",
                )
            )
    return limited(checks) or [passed("forbidden code", "no bf16 for targets below 8.0")]
