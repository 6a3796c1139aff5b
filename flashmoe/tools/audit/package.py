"""Whether the package loads the file that the wheel holds: by name, before anything is imported."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from flashmoe._version import WHEEL_PREFIX
from flashmoe.tools.audit.context import failed, listing, passed, warned
from flashmoe.tools.audit.elf import ElfFacts
from flashmoe.tools.audit.inputs import OUR_LIBRARY, Wheel
from flashmoe.tools.report import Check

_LOADERS = frozenset({"load_library", "CDLL", "PyDLL", "dlopen", "LoadLibrary"})
_FILE_NAME = re.compile(r"[\w.+/-]*?([\w.+-]+\.so(?:\.\d+)*)")
_PLATFORM_LIBRARY = re.compile(r"lib(?:torch|c10|cuda|cudart|nv|dl|c|m|pthread|gomp)\w*\.so.*")


@dataclass(frozen=True)
class Loads:
    """One thing that the package's sources load: a file by name, or a module by import."""

    source: str
    line: int
    what: str
    is_module: bool
    satisfied_by: str | None
    optional: bool = False  # inside a try statement


def check_loads(wheel: Wheel, facts: Mapping[str, ElfFacts]) -> list[Check]:
    """Every extension is loaded under its own file name, and nothing else is loaded."""
    name = "the package loads this file"
    loads = tuple(_all_loads(wheel))
    used = {load.satisfied_by for load in loads} | {n for f in facts.values() for n in f.needed}
    idle = [e for e in wheel.extensions if e not in used and PurePosixPath(e).name not in used]
    lost = [load for load in loads if load.satisfied_by is None]
    checks = [_lost_check(name, load, idle) for load in lost if idle or not load.optional]
    checks += _init_checks(wheel, facts)
    if OUR_LIBRARY in {PurePosixPath(e).name for e in wheel.extensions} or wheel.path.name.startswith(WHEEL_PREFIX):
        extra = [e for e in wheel.extensions if e != f"flashmoe/{OUR_LIBRARY}"]
        if extra or not wheel.extensions:
            checks.append(
                failed(
                    name,
                    found=listing(wheel.extensions),
                    expected=f"flashmoe/{OUR_LIBRARY} and no other",
                    why="The package loads that one file.",
                    cause="the build named or placed the library differently",
                    next_step=f"name it {OUR_LIBRARY} and put it into flashmoe/",
                )
            )
    if checks:
        return checks
    if idle:
        return [
            warned(
                name,
                f"no import and no load_library names {listing(idle, 4)}",
                "each extension loaded by name",
                "The name may be built at run time, which cannot be followed in the sources.",
                "import the package once to be sure",
            )
        ]
    return [
        passed(
            name,
            listing(f"{load.source}:{load.line} loads {load.satisfied_by}" for load in loads if load.satisfied_by)
            or "needed by another library",
        )
    ]


def _lost_check(name: str, load: Loads, idle: list[str]) -> Check:
    kind = "module" if load.is_module else "file"
    if idle:
        cause = f"built as `{PurePosixPath(idle[0]).name}`, loaded as `{load.what}`"
    else:
        cause = f"nothing in the wheel is called `{load.what}`; it was left out, or is a generated file that was not written"
    return failed(
        f"{name}: {load.what}",
        found=f"{load.source}:{load.line} loads {kind} `{load.what}`; the wheel holds {listing(idle, 4) or 'no such file'}",
        expected=f"an extension named `{load.what}`",
        why="`import` fails with ModuleNotFoundError or a missing file, although the build succeeded.",
        cause=cause,
        next_step="use one name in the build and in the import",
    )


def _init_checks(wheel: Wheel, facts: Mapping[str, ElfFacts]) -> list[Check]:
    """A Python extension module must export PyInit_ with its own file's name."""
    checks = []
    for member, elf in facts.items():
        stem = PurePosixPath(member).name.split(".", 1)[0]
        inits = sorted(s.name for s in elf.exported if s.name.startswith("PyInit_"))
        named = {init.removeprefix("PyInit_") for init in inits}
        quoted = any(
            f"{quote}{word}{quote}" in text for text in wheel.sources.values() for word in named for quote in "'\""
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


def _all_loads(wheel: Wheel) -> Iterator[Loads]:
    for source, text in sorted(wheel.sources.items()):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue  # a template, or Python 2: nothing imports it
        yield from _file_loads(wheel, source, tree)
        yield from _module_loads(wheel, source, tree)


def _file_loads(wheel: Wheel, source: str, tree: ast.Module) -> Iterator[Loads]:
    """String constants that name a shared object, in modules that call a loader."""
    called = {getattr(n.func, "attr", getattr(n.func, "id", "")) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    if not called & _LOADERS:
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        match = _FILE_NAME.fullmatch(node.value)
        if match is None or (_PLATFORM_LIBRARY.fullmatch(match.group(1)) and match.group(1) != OUR_LIBRARY):
            continue
        found = next((e for e in wheel.extensions if PurePosixPath(e).name == match.group(1)), None)
        yield Loads(source, node.lineno, match.group(1), is_module=False, satisfied_by=found)


def _module_loads(wheel: Wheel, source: str, tree: ast.Module) -> Iterator[Loads]:
    """Imports inside the wheel's own packages that are not Python modules: each must be an extension."""
    folder = PurePosixPath(source).parent
    tried = {id(n) for t in ast.walk(tree) if isinstance(t, ast.Try) for b in t.body for n in ast.walk(b)}
    for node in ast.walk(tree):
        for package, name in _imported(node, folder):
            target = package / name
            found = next((e for e in wheel.extensions if str(target) == e.split(".", 1)[0]), None)
            if found is not None:
                yield Loads(source, getattr(node, "lineno", 0), name, is_module=True, satisfied_by=found)
            elif (
                _looks_like_extension(name)
                and f"{package}.py" not in wheel.names
                and not _is_python(wheel, package, name)
            ):
                yield Loads(
                    source,
                    getattr(node, "lineno", 0),
                    name,
                    is_module=True,
                    satisfied_by=None,
                    optional=id(node) in tried,
                )


def _looks_like_extension(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in sys.stdlib_module_names


def _imported(node: ast.AST, folder: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    """(package folder, name) of each thing that an import statement takes from a package of this wheel."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            parts = alias.name.split(".")
            if len(parts) == 1 or (folder.parts and parts[0] == folder.parts[0]):
                yield PurePosixPath(*parts[:-1]), parts[-1]
    elif isinstance(node, ast.ImportFrom):
        base = folder
        for _ in range(max(0, node.level - 1)):
            base = base.parent
        parts = (node.module or "").split(".") if node.module else []
        if node.level == 0:
            if not parts or not folder.parts or parts[0] != folder.parts[0]:
                return
            base = PurePosixPath()
        package = base.joinpath(*parts)
        if parts:
            yield package.parent, package.name
        for alias in node.names:
            yield package, alias.name


def _is_python(wheel: Wheel, package: PurePosixPath, name: str) -> bool:
    """Whether ``package.name`` is a Python module, a folder of modules, or a name that the package's module binds."""
    target = str(package / name)
    if f"{target}.py" in wheel.names or any(n.startswith(f"{target}/") for n in wheel.names):
        return True
    text = wheel.sources.get(f"{package}/__init__.py")
    return text is not None and _binds(text, name)


def _binds(text: str, name: str) -> bool:
    """Whether a package's __init__ binds ``name``, other than by taking it from the package itself."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return True
    given: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name in (
            name,
            "__getattr__",
        ):
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if isinstance(node, ast.Import) or (
            isinstance(node, ast.ImportFrom) and not (node.level == 1 and node.module is None)
        ):
            given |= {alias.asname or alias.name for alias in node.names}
    return bool({name, "*"} & given)
