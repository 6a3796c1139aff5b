"""Checks on names: what is undefined, what belongs to torch, what is exported, what is defined twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from flashmoe.tools.audit.binutils import compare, demangle
from flashmoe.tools.audit.context import Context, failed, limited, listing, may_stay_open, passed, warned
from flashmoe.tools.audit.elf import ElfFacts, Symbol
from flashmoe.tools.audit.errors import ToolMissingError
from flashmoe.tools.audit.names import explain, is_torch, qualified_name
from flashmoe.tools.audit.sources import find_mentions
from flashmoe.tools.audit.torch_libraries import SHIM
from flashmoe.tools.audit.torch_symbols import check_shims, check_torch_symbols
from flashmoe.tools.report import Check

_LINKER_NAMES = frozenset({"_init", "_fini", "_edata", "_end", "__bss_start"})


def check_symbols(context: Context) -> list[Check]:
    """Every check on names, in the order in which a reader wants them."""
    return [
        *check_readers(context),
        *check_symbol_table(context),
        *check_undefined(context),
        *check_torch_symbols(context),
        *check_shims(context),
        *check_exports(context),
    ]


def check_readers(context: Context) -> list[Check]:
    name = "two readers agree"
    why = "A symbol that one reader does not see is a symbol that was not checked."
    try:
        differences = compare(context.facts)
    except ToolMissingError as error:
        return [
            failed(
                name,
                found=str(error),
                expected="nm and pyelftools both read the file",
                why=why,
                next_step=error.next_step,
            )
        ]
    if not differences:
        count = len(context.facts.dynamic) + len(context.facts.static or ())
        return [passed(name, f"nm and pyelftools see the same {count} symbols")]
    return [
        failed(
            f"{name}: {d.table}",
            found=f"only nm: {listing(d.only_nm) or '-'}; only pyelftools: {listing(d.only_elf) or '-'}",
            expected="the same names and kinds from both",
            why=why,
            cause="the table is damaged, or was edited by a program that left it inconsistent",
            next_step="link the file again; if it stays, compare `readelf -Ws` with `nm` and report it",
        )
        for d in differences
    ]


def check_symbol_table(context: Context) -> list[Check]:
    name = "symbol table"
    if context.facts.static is not None:
        return [passed(name, f".symtab with {len(context.facts.static)} symbols")]
    return [
        failed(
            name,
            found="stripped: there is no .symtab",
            expected="the file as the linker wrote it",
            why="Hidden definitions cannot be seen: neither that header-only templates of torch stayed local, nor "
            "which function nearly matches an undefined one.",
            cause="strip, -s or -Wl,-s removed it",
            next_step="build without stripping and audit that file; strip a copy later",
        )
    ]


def check_undefined(context: Context) -> list[Check]:
    """Names that neither this file nor anything it needs defines: they fail at import, one by one."""
    missing = [s for s in context.facts.undefined if _is_missing(context, s)]
    if not missing:
        return [
            passed("undefined symbols", f"{len(context.facts.undefined)} undefined, each given by a library it needs")
        ]
    candidates = _defined_names(context)
    names = demangle([s.name for s in missing])
    unread = context.resolver.unread(context.facts.needed)
    if unread:  # what is missing may well be in there: one failure says so, and only near misses are listed
        near = [s for s in missing if explain(names[s.name], candidates) is not None]
        rest = [names[s.name] for s in missing if s not in near]
        head = [_unread_check(rest, unread)] if rest else []
        return [*head, *limited([_undefined_check(context, s.name, names[s.name], candidates) for s in near])]
    return limited([_undefined_check(context, s.name, names[s.name], candidates) for s in missing])


def _unread_check(names: Sequence[str], unread: Sequence[str]) -> Check:
    return failed(
        "undefined symbols",
        found=f"{len(names)} could not be looked up: {listing(names)}",
        expected="every name found in a needed library",
        why="Whether the file can be imported is not proved.",
        cause=f"not on this machine: {', '.join(unread)}",
        next_step="install what brings these libraries, or audit the wheel that carries them",
    )


def _is_missing(context: Context, symbol: Symbol) -> bool:
    facts = context.facts
    if may_stay_open(context, symbol):
        return False
    if symbol.version or is_torch(symbol.name) or SHIM.fullmatch(symbol.name):
        return False  # the version, torch and shim checks judge those
    if symbol.name.startswith(("Py", "_Py")) and not context.ours:
        return False  # the interpreter exports them
    if symbol.name in facts.defined_names:
        return False
    return context.resolver.provider(symbol.name, facts.needed) is None


def _defined_names(context: Context) -> tuple[str, ...]:
    names = set(context.facts.defined_names)
    for facts in context.objects:
        names |= facts.defined_names
    return tuple(sorted(demangle(n for n in names if n.startswith("_Z")).values()))


def _undefined_check(context: Context, mangled: str, name: str, candidates: Sequence[str]) -> Check:
    near = explain(name, candidates)
    if near is not None:
        cause = near.cause
        next_step = f"instantiate or rename so that both sides say `{name}`; defined now: {listing(near.defined, 4)}"
    else:
        cause, next_step = _nobody_defines(context, name)
    return failed(
        f"undefined symbol: {name}",
        found=f"{name} is undefined" + (f" [{mangled}]" if mangled != name else ""),
        expected="every name defined here or exported by a needed library",
        why="The loader stops at it: `undefined symbol` at import.",
        cause=cause,
        next_step=next_step,
    )


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
            next_step="hide it, or add it to flashmoe/tools/audit/data/policy.toml with its reason",
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
    """Strong definitions that stand in more than one object file (F4)."""
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
