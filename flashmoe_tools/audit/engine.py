"""The audit itself: takes a path, returns one report. Nothing under audit is imported, loaded or executed."""

import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from flashmoe_tools.audit.context import Context, failed, skipped, warned
from flashmoe_tools.audit.elf import MAX_SYMBOLS, ElfFacts, open_elf, read_bytes, read_elf, section_data
from flashmoe_tools.audit.embedded import INDEX_SECTION, Binary, read_embedded
from flashmoe_tools.audit.errors import AuditError, DamagedWheelError, EmptyInputError, NoBinariesError, UnreadableError
from flashmoe_tools.audit.guard import guarded
from flashmoe_tools.audit.imports import check_imports
from flashmoe_tools.audit.inputs import OUR_LIBRARY, Wheel, collect, unpack
from flashmoe_tools.audit.kernels import KernelAudit, audit_kernels
from flashmoe_tools.audit.launch import Launch
from flashmoe_tools.audit.loading import check_loading
from flashmoe_tools.audit.package import check_loads
from flashmoe_tools.audit.policy import load_policy
from flashmoe_tools.audit.resolve import Closure, Resolver
from flashmoe_tools.audit.sources import default_source
from flashmoe_tools.audit.symbols import check_duplicates, check_symbols
from flashmoe_tools.audit.torch_libraries import installed_torch
from flashmoe_tools.audit.torch_symbols import check_run_time_names
from flashmoe_tools.audit.wheels import check_provenance, check_tables, check_wheel, read_provenance
from flashmoe_tools.report import Check, Report, Verdict, host_environment, utc_now
from flashmoe_tools.tables import Tables, load_tables

OUR_TORCH_VERSION = "2.10.0"  # TORCH_TARGET_VERSION of the build
INPUT = "input: "  # prefix of the check that reports an unusable input


@dataclass(frozen=True)
class Options:
    """``targets``: what the library should hold; None takes it from its provenance, or else from the whole table."""

    torch_version: str | None = None
    foreign: bool = False
    objects: Path | None = None
    source: Path | None = None
    targets: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Subject:
    """The result for one shared object."""

    label: str
    ours: bool
    checks: tuple[Check, ...]
    facts: ElfFacts | None = None
    launches: tuple[Launch, ...] = ()
    binaries: tuple[Binary, ...] = ()
    closure: Closure | None = None


def audit(path: Path, options: Options | None = None, tables: Tables | None = None) -> Report:
    """Audits a shared object, a wheel, or a folder of them. Unusable input becomes a failure in the report."""
    chosen, started, clock = options or Options(), utc_now(), time.monotonic()
    subjects: list[Subject] = []
    shown = path.name or path.resolve().name  # `.` has no name
    try:
        if chosen.source is not None and not chosen.source.is_dir():
            msg = f"--source {chosen.source} is not a folder, so declarations cannot be looked up"
            raise UnreadableError(msg, "give the folder of the sources, or leave --source out")
        inputs = collect(path)
        objects = read_objects(chosen.objects)
        subjects += [_guarded(label, file, chosen, tables, objects) for label, file in inputs.libraries]
        for wheel in inputs.wheels:
            subjects += audit_wheel(wheel, chosen, tables, objects)
        if objects:
            subjects.append(Subject("object files", ours=not chosen.foreign, checks=tuple(check_duplicates(objects))))
    except AuditError as error:
        subjects.append(Subject(shown, ours=False, checks=(input_check(error),)))
    named = len(subjects) > 1
    return Report(
        kind="audit",
        checks=tuple(replace(c, name=f"{s.label}: {c.name}") if named else c for s in subjects for c in s.checks),
        data={"path": shown, "subjects": [_subject_json(s) for s in subjects]},
        environment={**host_environment(), "torch": getattr(installed_torch(), "version", None)},
        started=started,
        seconds=round(time.monotonic() - clock, 3),
    )


def input_check(error: AuditError) -> Check:
    """The failed check for an unusable input."""
    return failed(
        f"{INPUT}{error.kind}",
        found=str(error),
        expected="an ELF shared object, or a wheel or folder that holds one",
        why="Nothing about it could be proved.",
        next_step=error.next_step,
    )


def read_objects(folder: Path | None) -> tuple[ElfFacts, ...]:
    """Every object file under ``folder``; raises EmptyInputError if there is none."""
    if folder is None:
        return ()
    paths = sorted(p for p in folder.rglob("*.o") if p.is_file())
    if not paths:
        msg = f"{folder} contains no object file (*.o), so duplicate definitions cannot be looked for"
        raise EmptyInputError(msg, "give the folder that the compiler wrote its .o files to (build/objects)")
    return tuple(read_elf(path) for path in paths)


def audit_wheel(path: Path, options: Options, tables: Tables | None, objects: Sequence[ElfFacts] = ()) -> list[Subject]:
    """The wheel as a whole, then each extension in it."""
    with tempfile.TemporaryDirectory(prefix="flashmoe-audit-") as folder:
        try:
            wheel = unpack(path, Path(folder))
        except AuditError as error:
            return [Subject(path.name, ours=False, checks=(input_check(error),))]
        subjects, facts, symbols = [], {}, 0
        for member in wheel.extensions:
            if PurePosixPath(member).parent.name.endswith(".libs"):
                subject = _carried(member, wheel.root / member)
            else:
                subject = _guarded(member, wheel.root / member, options, tables, objects, wheel)
            subjects.append(subject)
            if subject.facts is not None:
                facts[member] = subject.facts
                symbols += len(subject.facts.dynamic) + len(subject.facts.static or ())
            if symbols > MAX_SYMBOLS:
                msg = f"its shared objects hold more than {MAX_SYMBOLS} symbols together"
                many = input_check(DamagedWheelError(msg, "audit them one by one, unpacked"))
                return [Subject(path.name, ours=False, checks=(many,)), *subjects]
        closures = {s.label: s.closure for s in subjects if s.closure is not None}
        whole = check_wheel(wheel, facts)
        for check in (lambda: check_loads(wheel, facts), lambda: check_imports(wheel, facts, closures)):
            whole += guarded("sources", check)
        ours = wheel.is_ours and not options.foreign
        if ours:
            whole += guarded("tables", lambda: check_tables(wheel, tables or load_tables()))
        return [Subject(path.name, ours=ours, checks=tuple(whole)), *subjects]


def _guarded(
    label: str,
    path: Path,
    options: Options,
    tables: Tables | None,
    objects: Sequence[ElfFacts],
    wheel: Wheel | None = None,
) -> Subject:
    try:
        return audit_library(label, path, options, tables, objects, wheel)
    except AuditError as error:
        return Subject(label, ours=False, checks=(input_check(error),))


def _carried(label: str, path: Path) -> Subject:
    """A library that auditwheel grafted into the wheel; it is not an extension, so it only has to be readable."""
    try:
        facts = read_elf(path)
    except AuditError as error:
        return Subject(label, ours=False, checks=(input_check(error),))
    found = "a library bundled in the wheel, not an extension: used to look up symbols, not checked itself"
    return Subject(label, ours=False, checks=(skipped("carried library", found),), facts=facts)


def audit_library(
    label: str,
    path: Path,
    options: Options,
    tables: Tables | None = None,
    objects: Sequence[ElfFacts] = (),
    wheel: Wheel | None = None,
) -> Subject:
    """All checks on one shared object. Raises AuditError when it cannot be read at all."""
    facts = read_elf(path)
    if not facts.is_shared:
        msg = f"{path.name} is an object file, not a shared object"
        raise EmptyInputError(msg, "link it first, or give its folder with --objects")
    ours = not options.foreign and (path.name == OUR_LIBRARY or INDEX_SECTION in facts.sections)
    torch = installed_torch()
    version = options.torch_version or (OUR_TORCH_VERSION if ours or torch is None else torch.version)
    resolver = Resolver(torch, facts.machine, wheel.named_libraries if wheel is not None else {})
    context = Context(
        label=label,
        facts=facts,
        ours=ours,
        policy=load_policy(),
        resolver=resolver,
        closure=resolver.closure(path, facts.needed, facts.search),
        torch=torch,
        torch_version=version,
        source=options.source if options.source is not None else (default_source(Path.cwd()) if ours else None),
        objects=tuple(objects),
        wheel=wheel,
    )
    checks = [
        *guarded("symbols", lambda: check_symbols(context)),
        *guarded("constants", lambda: check_run_time_names(context, read_only_strings(path))),
        *guarded("dynamic section", lambda: check_loading(context)),
    ]
    if not ours:
        return Subject(label, ours, tuple(checks), facts, closure=context.closure)
    found = KernelAudit((), ())
    binaries: tuple[Binary, ...] = ()

    def embedded() -> tuple[Check, ...]:
        nonlocal found, binaries
        found, binaries = audit_embedded(path, options, tables or load_tables(), wheel)
        return found.checks

    checks += guarded("embedded binaries", embedded)
    return Subject(label, ours, tuple(checks), facts, found.launches, binaries)


def read_only_strings(path: Path) -> tuple[str, ...]:
    """C strings in .rodata that are identifiers, i.e. names that may be passed to dlsym."""
    data = section_data(open_elf(read_bytes(path), path.name), ".rodata") or b""
    return tuple(m.group(1).decode() for m in re.finditer(rb"(?<![^\0])([A-Za-z_]\w+)(?=\0)", data))


def audit_embedded(
    path: Path, options: Options, tables: Tables, wheel: Wheel | None
) -> tuple[KernelAudit, tuple[Binary, ...]]:
    """Checks the device binaries inside our library against the table and the provenance."""
    record = find_provenance(path, wheel)
    declared = options.targets
    if declared is None and record is not None and isinstance(record.get("targets"), list):
        declared = tuple(record["targets"])
    try:
        binaries = read_embedded(path)
    except NoBinariesError as error:
        if declared == ():
            check = warned(
                "targets",
                "a CPU-only build: it declares no GPU target",
                "every target of the table",
                "No GPU has a kernel in this file.",
                "for a release: `python -m flashmoe_build --archs all`",
            )
            return KernelAudit((check, *check_provenance(record, path, ())), ()), ()
        return KernelAudit((_no_kernel(error),), ()), ()
    except AuditError as error:
        return KernelAudit((_no_kernel(error),), ()), ()
    found = audit_kernels(binaries, tables, declared)
    return KernelAudit((*found.checks, *check_provenance(record, path, binaries)), found.launches), binaries


def _no_kernel(error: AuditError) -> Check:
    return failed(
        "embedded binaries",
        found=str(error),
        expected="cubins and their index",
        why="There is no kernel to launch.",
        next_step=error.next_step,
    )


def find_provenance(path: Path, wheel: Wheel | None) -> dict[str, Any] | None:
    """provenance.json in the wheel, next to the library, or one folder above it (where the build writes it)."""
    if wheel is not None:
        member = next((n for n in wheel.other if n.endswith("flashmoe/provenance.json")), "")
        return read_provenance(wheel.other[member]) if member else None
    for folder in (path.parent, path.parent.parent):
        file = folder / "provenance.json"
        if file.is_file():
            return read_provenance(read_bytes(file))
    return None


def _subject_json(subject: Subject) -> dict[str, Any]:
    facts = subject.facts
    row: dict[str, Any] = {
        "label": subject.label,
        "ours": subject.ours,
        "checks": len(subject.checks),
        "failures": sum(c.verdict is Verdict.FAIL for c in subject.checks),
    }
    if facts is None:
        return row
    return {
        **row,
        "sha256": facts.sha256,
        "needed": list(facts.needed),
        "versions": {library: list(names) for library, names in facts.versions.items()},
        "undefined": sorted(s.name for s in facts.undefined),
        "exported": sorted(s.name for s in facts.exported),
        "binaries": [
            {"name": b.name, "target": b.target, "kind": b.kind, "size": b.size, "sha256": b.actual_sha256}
            for b in subject.binaries
        ],
        "launchability": [launch_row(launch) for launch in subject.launches],
    }


def launch_row(launch: Launch) -> dict[str, Any]:
    """One row of the launchability table. Sizes in bytes; registers None: PTX, so the driver decides."""
    need = launch.need
    return {
        "kernel": need.kernel,
        "unit": need.unit,
        "target": need.target,
        "gpu": launch.gpu,
        "registers": need.registers,
        "threads": need.threads,
        "smem_static": need.smem_static,
        "smem_dynamic": need.smem_dynamic,
        "smem_limit": launch.smem_limit,
        "local_memory": need.local_memory,
        "blocks_per_sm": launch.blocks_per_sm,
        "limited_by": launch.limited_by,
        "problems": list(launch.problems),
    }


def exit_is_empty(report: Report) -> bool:
    """Whether there was nothing at all to check."""
    kinds = {c.name.rsplit(INPUT, 1)[-1] for c in report.checks if INPUT in c.name}
    return bool(report.checks) and all(INPUT in c.name for c in report.checks) and kinds <= {"empty", "unreadable"}
