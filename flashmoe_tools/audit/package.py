"""Whether the package loads the files that the wheel holds: by name, before anything is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from flashmoe_tools.audit.context import failed, limited, listing, passed, warned
from flashmoe_tools.audit.elf import ElfFacts
from flashmoe_tools.audit.imports import Imports, Request
from flashmoe_tools.audit.inputs import OUR_LIBRARY, Wheel
from flashmoe_tools.report import Check

NAME = "the package loads this file"


def check_loads(wheel: Wheel, facts: Mapping[str, ElfFacts]) -> list[Check]:
    """Every extension is loaded under its own file name, and nothing that is not there is loaded."""
    imports = Imports(wheel)
    used = _mentioned(wheel, imports) | {n for f in facts.values() for n in f.needed}
    idle = [e for e in wheel.extensions if e not in used and PurePosixPath(e).name not in used]
    lost = _lost_modules(imports, idle)
    modules = [e for e in idle if e in facts and any(s.name.startswith("PyInit_") for s in facts[e].exported)]
    checks = [
        *limited([_lost_check(load, modules, is_module=True) for load in lost]),
        *limited([_lost_check(load, idle, is_module=False) for load in _lost_files(wheel, imports)]),
        *_unread_checks(imports),
        *_init_checks(wheel, facts),
    ]
    checks += _our_checks(wheel)
    if checks:
        return checks
    unnamed = [e for e in idle if not _is_module_of_users(e)]
    if unnamed:
        return [
            warned(
                NAME,
                f"no import and no load_library names {listing(unnamed, 4)}",
                "each extension loaded by name",
                "The name may be built at run time, which cannot be followed in the sources.",
                "import the package once to be sure",
            )
        ]
    elsewhere = imports.lost_elsewhere()
    if elsewhere:  # another platform's modules, or a build without an option
        rows = listing(f"{lost.source}:{lost.line} asks for {lost.what}" for lost in elsewhere)
        why = "Nothing imports these modules with the package, so a user meets the ImportError later."
        return [warned(NAME, rows, "every module of the wheel importable", why, "import them once, or leave them out")]
    if idle:
        return [passed(NAME, f"{listing(wheel.extensions, 4)}: modules that are imported by their own names")]
    return [passed(NAME, f"{listing(wheel.extensions, 4)}: named in the sources, or needed by another library")]


def _is_module_of_users(extension: str) -> bool:
    """A public module outside of any package: what the wheel installs for users to import."""
    path = PurePosixPath(extension)
    return len(path.parts) == 1 and not path.name.startswith(("_", "lib"))


def _mentioned(wheel: Wheel, imports: Imports) -> set[str]:
    """Extensions whose module or file name stands in some source, wherever it stands."""
    words = {member: name.rpartition(".")[2] for name, member in imports.modules.items()}
    left = {member: {PurePosixPath(member).name, words.get(member, member)} for member in wheel.extensions}
    found: set[str] = set()
    for text in filter(None, wheel.sources.values()):
        found |= {member for member, names in left.items() if any(name in text for name in names)}
        left = {member: names for member, names in left.items() if member not in found}
    return found


def _lost_modules(imports: Imports, idle: list[str]) -> list[Request]:
    """Modules of the wheel's own packages that are not there; where an extension is idle, also private top-level ones."""
    lost: dict[str, Request] = {}
    for request in imports.requests:
        name = request.what
        is_private = idle and "." not in name and name.startswith("_") and name not in imports.modules
        if name not in lost and (imports.is_lost(name) or (is_private and not _is_installed(name))):
            lost[name] = request
    return list(lost.values())


def _is_installed(module: str) -> bool:
    """Whether a top-level module is in this environment; nothing of it is imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # loaded, but by something that left no specification
        return True


def _lost_files(wheel: Wheel, imports: Imports) -> list[Request]:
    held = {PurePosixPath(e).name for e in wheel.extensions}
    return [request for asked in imports.asked for request in asked.files if request.what not in held]


def _lost_check(load: Request, idle: list[str], *, is_module: bool) -> Check:
    """``idle``: extensions of that kind which nothing loads; a single one is most likely the one that is meant."""
    kind = "module" if is_module else "file"
    what = load.what.rpartition(".")[2] if is_module else load.what
    if len(idle) == 1 and (not is_module or what.startswith("_")):
        cause = f"built as `{PurePosixPath(idle[0]).name}`, loaded as `{what}`"
    else:
        cause = f"nothing in the wheel is called `{what}`; it was left out, or is a generated file that was not written"
    return failed(
        f"{NAME}: {what}",
        found=f"{load.source}:{load.line} loads {kind} `{what}`; the wheel holds {listing(idle, 4) or 'no such file'}",
        expected=f"a {kind} named `{what}`",
        why="It runs at `import`, which fails although the build succeeded.",
        cause=cause,
        next_step="use one name in the build and in the import",
    )


def _unread_checks(imports: Imports) -> Iterator[Check]:
    """Sources that run at import and cannot be parsed: what they load is unknown."""
    for unread in imports.unread:
        name, expected = f"unreadable source: {unread.source}", "Python that this interpreter can parse"
        why = "It runs at `import`, and what it loads could not be followed."
        if unread.is_syntax:
            yield warned(name, unread.reason, expected, why, "audit with the Python that the wheel is for")
        else:
            cause = "no program writes such a source"
            step = "look at the file before you install the wheel"
            yield failed(name, found=unread.reason, expected=expected, why=why, cause=cause, next_step=step)


def _init_checks(wheel: Wheel, facts: Mapping[str, ElfFacts]) -> list[Check]:
    """A Python extension module must export PyInit_ with its own file's name."""
    checks = []
    for member, elf in facts.items():
        stem = PurePosixPath(member).name.split(".", 1)[0]
        inits = sorted(s.name for s in elf.exported if s.name.startswith("PyInit_"))
        named = {init.removeprefix("PyInit_") for init in inits}
        quoted = any(
            f"{quote}{word}{quote}" in (text or "")
            for text in wheel.sources.values()
            for word in named
            for quote in "'\""
        )
        if (
            inits and stem not in named and not quoted
        ):  # a loader may give the name: spec_from_file_location(name, path)
            checks.append(
                failed(
                    f"module name: {PurePosixPath(member).name}",
                    found=f"it exports {listing(inits, 3)}",
                    expected=f"PyInit_{stem}",
                    why="`import` fails: dynamic module does not define module export function.",
                    cause="compiled under another module name (TORCH_EXTENSION_NAME) than its file has",
                    next_step=f"compile it as `{stem}`, or rename the file to {inits[0].removeprefix('PyInit_')}.so",
                )
            )
    return checks


def _our_checks(wheel: Wheel) -> list[Check]:
    """Our package loads one file, under a name that every part of it knows."""
    if OUR_LIBRARY not in {PurePosixPath(e).name for e in wheel.extensions} and not wheel.is_ours:
        return []
    if not [e for e in wheel.extensions if e != f"flashmoe/{OUR_LIBRARY}"]:
        return []
    return [
        failed(
            NAME,
            found=listing(wheel.extensions),
            expected=f"flashmoe/{OUR_LIBRARY} and no other",
            why="The package loads that one file.",
            cause="the build named or placed the library differently",
            next_step=f"name it {OUR_LIBRARY} and put it into flashmoe/",
        )
    ]
