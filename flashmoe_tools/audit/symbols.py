"""Checks on names: undefined ones, torch's, exported ones, and ones defined twice."""

from collections import defaultdict
from collections.abc import Sequence

from flashmoe_tools.audit.binutils import demangle
from flashmoe_tools.audit.context import Context, failed, limited, listing, passed, warned
from flashmoe_tools.audit.elf import ElfFacts, Symbol, provided
from flashmoe_tools.audit.lookup import Lookup, built_for, here, look_up
from flashmoe_tools.audit.names import explain, qualified_name
from flashmoe_tools.audit.sources import find_mentions
from flashmoe_tools.audit.torch_symbols import check_shims, check_torch_symbols
from flashmoe_tools.report import Check

_LINKER_NAMES = frozenset({"_init", "_fini", "_edata", "_end", "__bss_start"})


def check_symbols(context: Context) -> list[Check]:
    """Every check on names, in the order of the report."""
    return [
        *check_symbol_table(context),
        *check_undefined(context),
        *check_torch_symbols(context),
        *check_shims(context),
        *check_exports(context),
    ]


def check_symbol_table(context: Context) -> list[Check]:
    name = "symbol table"
    if context.facts.static is not None:
        return [passed(name, f".symtab with {len(context.facts.static)} symbols")]
    found, expected = "stripped: there is no .symtab", "the file as the linker wrote it"
    why = (
        "Hidden definitions cannot be seen: it is unknown whether header-only templates of torch stayed local, and "
        "which function nearly matches an undefined one."
    )
    next_step = "build without stripping and audit that file; strip a copy later"
    if not context.ours:  # released wheels are stripped, and what they import is in .dynsym
        return [warned(name, found, expected, why, next_step)]
    cause = "strip, -s or -Wl,-s removed it"
    return [failed(name, found=found, expected=expected, why=why, cause=cause, next_step=next_step)]


def check_undefined(context: Context) -> list[Check]:
    """Names that neither this file nor anything it needs defines: each of them makes the import fail."""
    name, lookup = "undefined symbols", look_up(context)
    if not lookup.missing:
        return [passed(name, _summary(context, lookup)), *_not_looked_up(context, lookup)]
    names = demangle([s.name for s in lookup.missing])
    if context.closure.absent:  # the missing library may define the names, so no other cause is proved
        unread = [names[s.name] for s in lookup.missing]
        return [_unread_check(unread, tuple(context.closure.absent))]
    candidates = _defined_names(context)
    return limited([_undefined_check(context, s, names[s.name], candidates) for s in lookup.missing])


def _summary(context: Context, lookup: Lookup) -> str:
    """A summary of how each undefined symbol was judged, including those only compared with the floor."""
    newer = sorted({s.version for s in lookup.floor})
    counts = (
        (lookup.found, "found by name and version in the libraries that it needs"),
        (len(lookup.python), f"exported by Python {here()}"),
        (lookup.torch, "of torch, judged by its own checks"),
        (len(lookup.floor), f"newer than this machine's libraries, so only compared with the floor: {listing(newer)}"),
        (lookup.open, "weak, and may stay undefined"),
    )
    judged = "; ".join(f"{count} {words}" for count, words in counts if count)
    return f"{len(context.facts.undefined)} undefined" + (f": {judged}" if judged else "")


def _not_looked_up(context: Context, lookup: Lookup) -> list[Check]:
    if not lookup.other_python:
        return []
    found = f"{len(lookup.other_python)} not known to Python {here()}: {listing(lookup.other_python)}"
    return [
        warned(
            "Python names",
            found,
            f"names that Python {built_for(context) or here()} exports",
            "They could not be looked up: that Python is not this one.",
            f"audit with Python {built_for(context)}" if built_for(context) else "audit with a complete Python",
        )
    ]


def _unread_check(names: Sequence[str], absent: Sequence[str]) -> Check:
    return failed(
        "undefined symbols",
        found=f"{len(names)} could not be looked up: {listing(names)}",
        expected="every name found in a needed library",
        why="It is not proved that the file can be imported.",
        cause=f"not on this machine: {', '.join(absent)}",
        next_step="install the packages that provide these libraries, or audit the wheel that carries them",
    )


def _defined_names(context: Context) -> tuple[str, ...]:
    names = set(context.facts.defined_names)
    for facts in context.objects:
        names |= facts.defined_names
    return tuple(sorted(demangle(n for n in names if n.startswith("_Z")).values()))


def _undefined_check(context: Context, symbol: Symbol, name: str, candidates: Sequence[str]) -> Check:
    cause, next_step = _cause(context, symbol, name, candidates)
    missing = f"{name}, version {symbol.version}" if symbol.version else name
    return failed(
        f"undefined symbol: {name}",
        found=f"{missing} is undefined" + (f" [{symbol.name}]" if symbol.name != name else ""),
        expected="every name defined here or exported by a needed library",
        why="The loader stops at it: `undefined symbol` at import.",
        cause=cause,
        next_step=next_step,
    )


def _cause(context: Context, symbol: Symbol, name: str, candidates: Sequence[str]) -> tuple[str, str]:
    """Why the name is missing and what to do; the most specific explanation comes first."""
    if symbol.version:
        there = context.closure.libraries.get(symbol.library)
        known = there is not None and symbol.version in provided(there).defined_versions
        lacks = f"has {symbol.version} but no `{symbol.name}` in it" if known else f"does not define {symbol.version}"
        return (
            f"linked against another {symbol.library}: the one found here {lacks}",
            f"link against the {symbol.library} that it will be loaded with, or ship the one it was linked against",
        )
    library = context.resolver.elsewhere(symbol.name, context.closure)
    if library is not None:
        return f"{library} exports it, but no needed library loads that one", f"link with {library}"
    if not context.ours and symbol.name.startswith(("Py", "_Py")):
        return (
            f"Python {here()} does not export it: a misspelt name, or one of another version",
            "build it again with the headers of this Python",
        )
    near = explain(name, candidates)
    if near is not None:
        where = f"so that both sides say `{name}`; defined now: {listing(near.defined, 4)}"
        return near.cause, f"instantiate or rename {where}"
    return _nobody_defines(context, name)


def _nobody_defines(context: Context, name: str) -> tuple[str, str]:
    function = qualified_name(name).rsplit("::", 1)[-1]
    users = [
        f.path.name
        for f in context.objects
        if name in demangle(s.name for s in f.static or () if not s.defined).values()
    ]
    used = f"; used by {listing(users, 4)}" if users else ""
    if context.source is not None:
        mentions = find_mentions(context.source, function)
        declared = [m.place for m in mentions if not m.is_definition]
        defined = [m.place for m in mentions if m.is_definition]
        if declared and not defined:
            return (
                f"`{function}` is declared in {listing(declared, 4)} and called, but no source defines it{used}",
                f"write the definition of `{function}` (declared in {declared[0]}), or remove the call",
            )
        if defined:
            return (
                f"`{function}` is defined in {listing(defined, 4)}, but that file was not compiled or linked{used}",
                f"add {defined[0].rsplit(':', 1)[0]} to the build, or instantiate the template there",
            )
    return (
        f"declared and called, and nothing that was linked defines it{used}",
        f"`grep -rn '{function}'` in the sources (or --source DIR): write the definition or link the file that has it",
    )


def check_exports(context: Context) -> list[Check]:
    name = "exports"
    exported = sorted(s.name for s in context.facts.exported if s.name not in _LINKER_NAMES)
    if not context.ours:
        return (
            [passed(name, f"{len(exported)}: {listing(demangle(exported).values(), 4)}")]
            if exported
            else [
                warned(
                    name,
                    "nothing is exported",
                    "PyInit_<name>, or static registration",
                    "Only static constructors can make it known to Python.",
                    "load it with torch.ops.load_library",
                )
            ]
        )
    names = demangle(exported)
    extra = [n for n in exported if n not in context.policy.exports]
    lost = sorted(set(context.policy.exports) - set(exported))
    checks = [
        failed(
            f"export: {names[n]}",
            found=f"{names[n]} is exported",
            expected=f"only {listing(sorted(context.policy.exports))}",
            why="Every exported name is an interface, and can collide with another library's in the same process.",
            cause="compiled without -fvisibility=hidden, or missing from the version script's local list",
            next_step="hide it, or add it to flashmoe_tools/audit/data/policy.toml with its reason",
        )
        for n in extra
    ]
    checks += [
        failed(
            f"export: {n}",
            found="not exported",
            expected=f'extern "C" {n}',
            why=f"The package calls it: {context.policy.exports[n]}.",
            cause="not defined, or hidden by the version script",
            next_step="export it from the host sources",
        )
        for n in lost
    ]
    return limited(checks) or [passed(name, f'{len(exported)} extern "C" names, nothing else')]


def check_duplicates(objects: Sequence[ElfFacts]) -> list[Check]:
    """Strong definitions that appear in more than one object file."""
    name = "duplicate definitions"
    places: dict[str, list[str]] = defaultdict(list)
    for facts in objects:
        for symbol in facts.static or ():
            if symbol.defined and symbol.binding == "global":
                places[symbol.name].append(facts.path.name)
    twice = {symbol: files for symbol, files in places.items() if len(files) > 1}
    if not twice:
        return [passed(name, f"{len(places)} strong definitions in {len(objects)} object files, each once")]
    names = demangle(twice)
    return limited(
        [
            failed(
                f"{name}: {names[symbol]}",
                found=f"defined in {' and in '.join(files)}",
                expected="one definition",
                why="The linker refuses it, or takes the first and silently drops the other (static libraries, -z muldefs).",
                cause="two sources hold the same function",
                next_step="keep one definition, in the header that both include or in one source",
            )
            for symbol, files in sorted(twice.items())
        ]
    )
