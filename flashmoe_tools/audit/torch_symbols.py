"""Checks on what an extension uses from torch: no C++ symbols, only stable C shims that exist in a needed library."""

import re
from collections.abc import Sequence

from flashmoe_tools.audit.binutils import demangle
from flashmoe_tools.audit.context import Context, failed, limited, listing, may_stay_open, passed, skipped, warned
from flashmoe_tools.audit.errors import ShimDataError
from flashmoe_tools.audit.names import is_torch, root
from flashmoe_tools.audit.torch_libraries import SHIM, release, shims_for
from flashmoe_tools.report import Check


def check_torch_symbols(context: Context) -> list[Check]:
    """C++ names of torch that the file imports or exports. torch's C++ ABI changes with every release."""
    required = [s.name for s in context.facts.undefined if is_torch(s.name)]
    given = [s.name for s in context.facts.exported if is_torch(s.name)] if context.ours else []
    if not required and not given:
        local = sum(is_torch(n) for n in context.facts.defined_names)
        return [passed("torch C++ symbols", f"none required, none exported ({local} header-only ones stayed local)")]
    names = demangle([*required, *given])
    checks = []
    if required:
        checks.append(
            failed(
                "torch C++ symbols",
                found=f"{len(required)} required: {listing(names[n] for n in required)}",
                expected="none: only the stable C shims (aoti_torch_*, torch_*)",
                why="C++ symbols of torch change between releases, so the file works only with the torch it was built for.",
                cause=f"sources include torch's C++ headers (namespaces {', '.join(sorted({root(n) for n in required}))})",
                next_step="use only torch/csrc/stable and torch/headeronly, and build with TORCH_TARGET_VERSION set",
            )
        )
    if given:
        checks.append(
            failed(
                "torch C++ symbols exported",
                found=f"{len(given)} exported: {listing(names[n] for n in given)}",
                expected="header-only templates of torch stay local",
                why="Another library could bind to this copy, built from other headers.",
                cause="compiled without -fvisibility=hidden, or the version script exports too much",
                next_step="compile with -fvisibility=hidden and link with the version script",
            )
        )
    return [*checks, *_check_resolves(context, required)]


def _check_resolves(context: Context, required: Sequence[str]) -> list[Check]:
    """Whether the installed torch has the C++ names that the file imports; if not, the file was built for another torch."""
    name, torch = "resolves against the installed torch", context.torch
    if not required or torch is None:
        return [skipped(name, "torch is not installed here", "install the torch you mean to use")] if required else []
    symbols = {s.name: s for s in context.facts.undefined}
    lost = [n for n in required if not may_stay_open(context, symbols[n]) and not context.closure.gives(symbols[n])]
    if not lost:
        return [passed(name, f"all {len(required)} are exported by torch {torch.version}: it imports with this one")]
    names = demangle(lost)
    return limited(
        [
            failed(
                f"not in torch {torch.version}: {names[mangled]}",
                found=f"{names[mangled]} is undefined [{mangled}]",
                expected=f"exported by a library of torch {torch.version} that the file brings in",
                why="The loader stops at it: `undefined symbol` at import.",
                cause=f"built against another torch than {torch.version}, or not linked with the library that has it",
                next_step="build it again with this torch, install the torch it was built for, or move it to the stable ABI",
            )
            for mangled in lost
        ]
    )


def check_shims(context: Context) -> list[Check]:
    """Checks that each stable C shim is known for the target torch version and exported by a needed library."""
    name = "torch shims"
    used = sorted(s.name for s in context.facts.undefined if SHIM.fullmatch(s.name))
    if not used:
        return (
            [skipped(name, "uses none")]
            if not context.ours
            else [
                failed(
                    name,
                    found="no shim is used",
                    expected="aoti_torch_* or torch_* symbols",
                    why="Without them no operator can be registered with torch.",
                    cause="the registration was not linked in",
                    next_step="link the object that registers the operators",
                )
            ]
        )
    try:
        shims = shims_for(context.torch_version)
    except ShimDataError as error:
        return [
            failed(
                name,
                found=str(error),
                expected=f"the shims of torch {context.torch_version}",
                why="Without it they cannot be checked.",
                next_step=error.next_step,
            )
        ]
    unknown = [s for s in used if s not in shims.library]
    checks = [
        failed(
            f"unknown shim: {s}",
            found=f"{s} is undefined",
            expected=f"a shim of torch {release(shims.version)}",
            why="The loader stops at it: `undefined symbol` at import.",
            cause=f"torch {release(context.torch_version)} does not have it: a misspelt name, or one of a later torch",
            next_step="use a shim that the target has, or raise the target torch version (--torch-version)",
        )
        for s in unknown
    ]
    absent = sorted({shims.library[s] for s in used if s in shims.library} - set(context.facts.needed))
    checks += [
        failed(
            f"shim library: {library}",
            found=f"needed: {listing(context.facts.needed) or 'nothing'}",
            expected=f"{library} in DT_NEEDED, which exports {listing((s for s in used if shims.library.get(s) == library), 3)}",
            why="The loader resolves them only if something else has loaded that library for everyone.",
            cause="linked without it, or with --as-needed before the objects",
            next_step=f"link with {library} after the objects",
        )
        for library in absent
    ]
    return limited(checks) or [
        passed(name, f"{len(used)} used, all exported by torch {shims.version}", "known and in DT_NEEDED")
    ]


def check_run_time_names(context: Context, strings: Sequence[str]) -> list[Check]:
    """Shims looked up by name with dlsym: not visible in symbol tables, only in string constants."""
    names = sorted({s for s in strings if re.fullmatch(r"aoti_torch_\w+", s)})
    if not names:
        return []
    try:
        known = shims_for(context.torch_version).library
    except ShimDataError:
        return []
    unknown = [n for n in names if n not in known]
    if unknown:
        return [
            warned(
                "shims looked up at run time",
                listing(unknown),
                f"shims of torch {context.torch_version}",
                "dlsym gives a null pointer for a name that the loaded torch does not have.",
                "make sure that the code handles its absence",
            )
        ]
    return [passed("shims looked up at run time", listing(names))]
