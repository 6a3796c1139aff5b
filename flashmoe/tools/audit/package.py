"""Whether the package loads the files that the wheel holds: by name, before anything is imported."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from flashmoe.tools.audit.context import failed, limited, listing, passed, warned
from flashmoe.tools.audit.elf import ElfFacts
from flashmoe.tools.audit.imports import Imports
from flashmoe.tools.audit.inputs import OUR_LIBRARY, Wheel
from flashmoe.tools.report import Check

NAME = "the package loads this file"
_LOADERS = frozenset({"load_library", "CDLL", "PyDLL", "dlopen", "LoadLibrary"})
_JOINERS = frozenset({"join", "joinpath", "with_name", "files"})
_FILE_NAME = re.compile(r"[\w.+/-]*?([\w.+-]+\.so(?:\.\d+)*)")


@dataclass(frozen=True)
class Loads:
    """One thing that certainly is asked for when the package is imported: a file by name, or a module."""

    source: str
    line: int
    what: str
    is_module: bool


def check_loads(wheel: Wheel, facts: Mapping[str, ElfFacts]) -> list[Check]:
    """Every extension is loaded under its own file name, and nothing that is not there is loaded."""
    imports = Imports(wheel)
    used = _mentioned(wheel, imports) | {n for f in facts.values() for n in f.needed}
    idle = [e for e in wheel.extensions if e not in used and PurePosixPath(e).name not in used]
    lost = [*_lost_modules(imports, idle), *_lost_files(wheel, imports)]
    modules = [e for e in idle if e in facts and any(s.name.startswith("PyInit_") for s in facts[e].exported)]
    checks = [
        *limited([_lost_check(load, modules if load.is_module else idle) for load in lost]),
        *_unread_checks(imports),
        *_init_checks(wheel, facts),
    ]
    checks += _our_checks(wheel)
    if checks:
        return checks
    if idle:
        return [
            warned(
                NAME,
                f"no import and no load_library names {listing(idle, 4)}",
                "each extension loaded by name",
                "The name may be built at run time, which cannot be followed in the sources.",
                "import the package once to be sure",
            )
        ]
    return [passed(NAME, f"{listing(wheel.extensions, 4)}: named in the sources, or needed by another library")]


def _mentioned(wheel: Wheel, imports: Imports) -> set[str]:
    """Extensions whose module or file name stands in some source, wherever it stands."""
    words = {member: name.rpartition(".")[2] for name, member in imports.modules.items()}
    left = {member: {PurePosixPath(member).name, words.get(member, member)} for member in wheel.extensions}
    found: set[str] = set()
    for text in filter(None, wheel.sources.values()):
        found |= {member for member, names in left.items() if any(name in text for name in names)}
        left = {member: names for member, names in left.items() if member not in found}
    return found


def _lost_modules(imports: Imports, idle: list[str]) -> Iterator[Loads]:
    """Modules of the wheel's own packages that are not there; where an extension is idle, also private top-level ones."""
    seen: set[str] = set()
    for request in imports.requests:
        name = request.module
        top = name.partition(".")[0]
        is_private = idle and name == top and top.startswith("_") and top not in imports.modules
        if name in seen or not (imports.is_lost(name) or (is_private and not _is_installed(top))):
            continue
        seen.add(name)
        yield Loads(request.source, request.line, name.rpartition(".")[2], is_module=True)


def _is_installed(module: str) -> bool:
    """Whether a top-level module is in this environment; nothing of it is imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # loaded, but by something that left no specification
        return True


def _lost_files(wheel: Wheel, imports: Imports) -> Iterator[Loads]:
    """Files that a loader is given by a path of the package's own. A bare name is left to the loader's search path."""
    held = {PurePosixPath(e).name for e in wheel.extensions}
    for source in wheel.sources:
        for statement in imports.running(source):
            calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and _callee(n) in _LOADERS]
            for node in (part for call in calls for part in ast.walk(call)):
                for line, file in _joined_names(node):
                    if file not in held:
                        yield Loads(source, line, file, is_module=False)


def _callee(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _joined_names(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Names of shared objects that are put together with a folder by ``/``, ``+`` or ``join``."""
    is_joined = (isinstance(node, ast.Call) and _callee(node) in _JOINERS) or isinstance(node, ast.BinOp)
    for part in ast.iter_child_nodes(node) if is_joined else ():
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            match = _FILE_NAME.fullmatch(part.value)
            if match is not None:
                yield part.lineno, match[1]


def _lost_check(load: Loads, idle: list[str]) -> Check:
    """``idle``: extensions of that kind which nothing loads; a single one is most likely the one that is meant."""
    kind = "module" if load.is_module else "file"
    if len(idle) == 1 and (not load.is_module or load.what.startswith("_")):
        cause = f"built as `{PurePosixPath(idle[0]).name}`, loaded as `{load.what}`"
    else:
        cause = f"nothing in the wheel is called `{load.what}`; it was left out, or is a generated file that was not written"
    return failed(
        f"{NAME}: {load.what}",
        found=f"{load.source}:{load.line} loads {kind} `{load.what}`; the wheel holds {listing(idle, 4) or 'no such file'}",
        expected=f"a {kind} named `{load.what}`",
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
