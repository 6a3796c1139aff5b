"""Checks on how the loader will treat the file: libraries, version floor, search paths, memory protection."""

from collections.abc import Iterator

from flashmoe_tools.audit.context import Context, failed, listing, passed, skipped, warned
from flashmoe_tools.audit.policy import version_key
from flashmoe_tools.report import Check

_EXECUTE = 1  # PF_X
TLS = "thread-local storage"
# Bytes that glibc reserves for thread-local storage of libraries that are opened later: 512 according to its manual
# (rtld.optional_static_tls). Up to 1664 were available in a glibc 2.36 process that had opened nothing else.
SURE_TLS, MOST_TLS = 512, 1664


def check_loading(context: Context) -> list[Check]:
    return [
        *check_needed(context),
        *check_versions(context),
        *check_run_paths(context),
        *check_protection(context),
        *check_start(context),
    ]


def check_needed(context: Context) -> list[Check]:
    name, policy, needed = "needed libraries", context.policy, context.facts.needed
    if not context.ours:
        closure = context.closure
        lost = [_absent_check(context, soname, user) for soname, user in closure.absent.items()]
        named = [
            warned(
                f"{name}: {soname}",
                "in no run path, but a source names it",
                "a run path relative to $ORIGIN",
                "The loader finds it only if that source has loaded it before.",
                "import the package once to be sure",
            )
            for soname in closure.from_sources
        ]
        computed = "found by a search as the loader's; nothing was loaded"
        return [*lost, *named] or [passed(name, listing(needed) or "none", computed)]
    extra = [soname for soname in needed if soname not in policy.needed]
    checks = [
        failed(
            f"{name}: {soname}",
            found=soname,
            expected=f"only {listing(sorted(policy.needed), 12)}",
            why=f"Refused: {policy.refused.get(soname, 'it is not part of the platform, so it may be absent')}.",
            cause=f"linked with {soname}",
            next_step="drop it from the link line, or allow it in flashmoe_tools/audit/data/policy.toml with the reason",
        )
        for soname in extra
    ]
    if "libtorch_cpu.so" not in needed:
        checks.append(
            failed(
                f"{name}: libtorch_cpu.so",
                found=listing(needed) or "DT_NEEDED is empty",
                expected="libtorch_cpu.so among them",
                why="The stable C shims live there.",
                cause="linked without it, or dropped by --as-needed",
                next_step="link with -ltorch_cpu after the objects",
            )
        )
    return checks or [passed(name, listing(needed), "the allow-list of policy.toml")]


def _absent_check(context: Context, soname: str, user: str) -> Check:
    name, expected = f"needed libraries: {soname}", "every needed library found where the loader looks"
    why = "The loader stops at it, and what it exports could not be looked up."
    if "/" in soname:
        return failed(
            name,
            found=f"{user} needs the path {soname}",
            expected=expected,
            why="The loader opens that path, from the current folder if it is relative, and searches nowhere else.",
            cause="linked with a file that has no soname",
            next_step="give that library a soname (-Wl,-soname) and link with -l",
        )
    members = [member for member in context.wheel.names if member.endswith(f"/{soname}")] if context.wheel else []
    beside = members or [soname] * (context.facts.path.parent / soname).is_file()
    if beside:
        return failed(
            name,
            found=f"{user} needs {soname}; {beside[0]} is there, but no run path leads to it",
            expected=expected,
            why=f"{why} It does not search the folder of the file.",
            cause="linked without -rpath, or with a wrong one",
            next_step="link with -Wl,-rpath,'$ORIGIN' and the relative folder, or `auditwheel repair`",
        )
    return failed(
        name,
        found=f"{soname}, needed by {user}, was not found in the run paths, torch, the CUDA packages or the system",
        expected=expected,
        why=why,
        cause="not installed here, or left out of the wheel",
        next_step="install what provides it and audit again, or put it into the wheel (`auditwheel repair`)",
    )


def check_start(context: Context) -> list[Check]:
    """Other reasons for dlopen to fail: libraries loaded beside DT_NEEDED, and thread-local storage fixed at start."""
    checks, facts = [], context.facts
    if facts.loads:
        checks.append(
            failed(
                "loaded beside DT_NEEDED",
                found=listing(facts.loads),
                expected="no DT_AUDIT, DT_DEPAUDIT, DT_FILTER or DT_AUXILIARY",
                why="The loader, and tools that ask it, run code of these libraries or give their symbols in place of the file's.",
                cause="linked with --audit, --depaudit, --filter or --auxiliary",
                next_step="link without them",
            )
        )
    if facts.static_tls > SURE_TLS:
        found = f"{facts.static_tls} bytes in the block that is set up when the process starts"
        why, step = (
            "dlopen fails: cannot allocate memory in static TLS block.",
            "compile it with -fPIC and the default model",
        )
        expected, cause = f"at most {SURE_TLS} bytes", "compiled with -ftls-model=initial-exec"
        if facts.static_tls > MOST_TLS:
            checks.append(failed(TLS, found=found, expected=expected, why=why, cause=cause, next_step=step))
        else:
            checks.append(warned(TLS, found, expected, f"Where other libraries have taken their share, {why}", step))
    return checks or [passed("loaded beside DT_NEEDED", "nothing; thread-local storage needs no place fixed at start")]


def _above_floor(context: Context) -> Iterator[tuple[str, str, str]]:
    """(library, version name, highest allowed version) of every version newer than the floor."""
    for library, versions in context.facts.versions.items():
        for version in versions:
            family, _, number = version.partition("_")
            highest = context.policy.versions.get(family)
            if (highest is not None and number[:1].isdigit() and version_key(number) > version_key(highest)) or (
                highest is not None and number in ("PRIVATE", "ABI_DT_RELR")
            ):
                yield library, version, f"{family}_{highest}"


def check_versions(context: Context) -> list[Check]:
    """Compares required versions with the floor of policy.toml.

    A foreign wheel is compared with the floor that its own tag promises, by the checks on wheels.
    """
    name = "version floor"
    if not context.ours and "manylinux" in context.wheel_name:
        return [skipped(name, "judged by the wheel's own tag")]
    checks = []
    for library, version, highest in _above_floor(context):
        symbols = [s.name for s in context.facts.undefined if s.version == version]
        checks.append(
            failed(
                f"{name}: {version}",
                found=f"{version} of {library}, for {listing(symbols) or 'the file itself'}",
                expected=f"at most {highest} ({context.policy.floor})",
                why=f"A machine at the {context.policy.floor} floor refuses to load it: version `{version}' not found.",
                cause=f"compiled on a newer system, whose headers bind {listing(symbols, 3) or 'it'} to {version}",
                next_step="avoid the newer function, bind the older version, or build in the pinned image",
            )
        )
    if context.facts.has_packed_relocations and not any(
        "GLIBC_ABI_DT_RELR" in v for v in context.facts.versions.values()
    ):
        checks.append(
            failed(
                f"{name}: DT_RELR",
                found="packed relocations without GLIBC_ABI_DT_RELR",
                expected="GLIBC_ABI_DT_RELR required from libc.so.6, or no packed relocations",
                why="A loader before glibc 2.36 skips them silently, and the first pointer crashes.",
                cause="linked with -z pack-relative-relocs, but without a symbol of the C library",
                next_step="link without -z pack-relative-relocs",
            )
        )
    required = sorted({v for versions in context.facts.versions.values() for v in versions})
    if not required and not checks:
        return [skipped(name, "no versioned symbol is used")]
    highest_asked = {
        family: max(
            (v for v in required if v.startswith(f"{family}_") and v[len(family) + 1 :][:1].isdigit()),
            key=lambda v: version_key(v.partition("_")[2]),
            default="",
        )
        for family in context.policy.versions
    }
    return checks or [passed(name, listing(v for v in highest_asked.values() if v), context.policy.floor)]


def check_run_paths(context: Context) -> list[Check]:
    name, paths = "run path", context.facts.run_paths
    if not paths:
        return [passed(name, "no RPATH, no RUNPATH")]
    outside = [p for path in paths for p in path.split(":") if not p.startswith("$ORIGIN")]
    why = "A fixed folder of the build machine does not exist elsewhere, or holds another torch."
    remedy = "link without -rpath (or `patchelf --remove-rpath`)"
    if context.ours:
        return [
            failed(
                name,
                found=listing(outside or paths, 4),
                expected="none: torch has loaded its libraries already",
                why=why,
                cause="linked with -Wl,-rpath",
                next_step=remedy,
            )
        ]
    if outside:
        return [warned(name, listing(outside, 4), "relative to $ORIGIN", why, remedy)]
    return [passed(name, f"relative to the file only: {listing(paths, 2)[:160]}")]


def check_protection(context: Context) -> list[Check]:
    facts, checks = context.facts, []
    why = "Hardened kernels and SELinux refuse to load it."
    if facts.stack_flags is None or facts.stack_flags & _EXECUTE:
        found = "no PT_GNU_STACK header" if facts.stack_flags is None else "PT_GNU_STACK is executable"
        checks.append(
            failed(
                "executable stack",
                found=found,
                expected="a stack without execute permission",
                why=why,
                cause="an assembly object without .note.GNU-stack, or -z execstack",
                next_step='add `.section .note.GNU-stack,"",@progbits` to the assembly, or link with -z noexecstack',
            )
        )
    else:
        checks.append(passed("executable stack", "the stack is not executable"))
    if facts.has_text_relocations:
        checks.append(
            failed(
                "text relocations",
                found="DT_TEXTREL is set",
                expected="position-independent code",
                why=why,
                cause="an object compiled without -fPIC",
                next_step="compile every object with -fPIC",
            )
        )
    else:
        checks.append(passed("text relocations", "none"))
    return checks
