"""What the Python sources of a wheel import, from their syntax trees; nothing is executed."""

import ast
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from flashmoe_tools.audit.context import failed, limited, listing, warned
from flashmoe_tools.audit.elf import ElfFacts
from flashmoe_tools.audit.inputs import Wheel
from flashmoe_tools.audit.resolve import Closure
from flashmoe_tools.audit.wheels import installed_name
from flashmoe_tools.report import Check

# Same suffixes as importlib's EXTENSION_SUFFIXES.
_SUFFIX = re.compile(r"\.cpython-(\d+)\w*-(\w+?)-linux-\w+\.so$")


def check_imports(wheel: Wheel, facts: Mapping[str, ElfFacts], closures: Mapping[str, Closure]) -> list[Check]:
    """Checks extension suffixes, PyInit_ functions, the import order relative to torch, and that the sources compile."""
    trees, broken = _parsed(wheel)
    imported = {name for source, tree in trees.items() for name in _modules(source, tree.body)}
    return [
        *_suffix_checks(wheel, facts),
        *limited([_broken_check(wheel, source, error) for source, error in broken.items()]),
        *_init_checks(wheel, facts, imported),
        *_torch_checks(wheel, trees, closures),
    ]


def module_of(member: str) -> str:
    """The name under which Python imports an extension or a source: pkg._C for pkg/_C.cpython-311-x86_64-linux-gnu.so."""
    path = PurePosixPath(installed_name(member))
    parts = [*path.parts[:-1], path.name.split(".", 1)[0]]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _parsed(wheel: Wheel) -> tuple[dict[str, ast.Module], dict[str, str]]:
    """Syntax trees of the relevant sources, and why those that the import executes have none.

    Relevant are sources that importing an extension executes, and sources that name an extension.
    """
    stems = {PurePosixPath(member).name.split(".", 1)[0] for member in wheel.extensions}
    above = {
        str(parent / "__init__.py") for e in wheel.extensions for parent in PurePosixPath(installed_name(e)).parents
    }
    trees, broken = {}, {}
    for source, text in wheel.sources.items():
        on_the_way = installed_name(source) in above
        if not (on_the_way or any(stem in text for stem in stems)):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
                compile(tree, source, "exec", dont_inherit=True)
            trees[source] = tree
        except Exception as error:  # SyntaxError, ValueError, RecursionError, MemoryError: the import would raise it
            if on_the_way:
                broken[source] = f"{type(error).__name__}: {error}"
    return trees, broken


def _modules(source: str, statements: list[ast.stmt]) -> Iterator[str]:
    """Absolute names that the statements import unconditionally, both modules and their attributes."""
    package = module_of(source).split(".")
    package = package if PurePosixPath(source).name == "__init__.py" else package[:-1]
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            base = package[: len(package) - statement.level + 1] if statement.level else []
            full = [*base, *(statement.module.split(".") if statement.module else [])]
            yield ".".join(full)
            yield from (".".join([*full, alias.name]) for alias in statement.names)


def _pythons(wheel: Wheel) -> set[str]:
    """The CPython versions that the tag names, such as 311; empty for a tag that covers all of them or the stable ABI."""
    python, abi = [*wheel.path.stem.split("-")[-3:-1], "", ""][:2]
    return set() if "abi3" in abi else {tag[2:] for tag in python.split(".") if re.fullmatch(r"cp3\d+", tag)}


def _suffix_checks(wheel: Wheel, facts: Mapping[str, ElfFacts]) -> list[Check]:
    """A module cannot be found if all of its files have the suffix of another Python or machine."""
    found: dict[str, list[str]] = {}
    for member, elf in facts.items():
        suffix = _SUFFIX.search(member)
        fits = suffix is None or ((not _pythons(wheel) or suffix[1] in _pythons(wheel)) and suffix[2] == elf.machine)
        found.setdefault(module_of(member), []).append("" if fits else member)
    return [
        failed(
            f"module name: {module}",
            found=f"{listing(members, 4)} in {wheel.path.name}",
            expected=f".cpython-{' or '.join(sorted(_pythons(wheel))) or '3XX'}-{facts[members[0]].machine}-linux-gnu.so, or only .so",
            why="`import` fails: no module of that name, because Python looks for its own suffix.",
            cause="built by another Python or for another machine than the wheel's tag says",
            next_step="build it with the Python of the tag",
        )
        for module, members in found.items()
        if all(members)
    ]


def _broken_check(wheel: Wheel, source: str, error: str) -> Check:
    newest = max((int(version[1:]) for version in _pythons(wheel)), default=0)
    why, step = "It runs at `import`, which fails.", "build the wheel again; do not install this one"
    name, expected = f"source: {source}", "a source that Python compiles"
    if newest > sys.version_info.minor and error.startswith("SyntaxError"):
        step = f"audit with Python 3.{newest}, the wheel's version"
        return warned(name, error[:200], expected, "This Python is older than the wheel's.", step)
    return failed(
        name, found=error[:200], expected=expected, why=why, cause="damaged or made to look complete", next_step=step
    )


def _init_checks(wheel: Wheel, facts: Mapping[str, ElfFacts], imported: set[str]) -> list[Check]:
    """Every extension that a source imports as a module must export PyInit_ with its name."""
    sources = {module_of(source) for source in wheel.sources}
    checks = []
    for member, elf in facts.items():
        module, stem = module_of(member), module_of(member).rpartition(".")[2]
        # Named differently: check_loads judges it
        has_init = any(symbol.name.startswith("PyInit") for symbol in elf.exported)
        if module in imported and module not in sources and not has_init:
            checks.append(
                failed(
                    f"module name: {PurePosixPath(member).name}",
                    found="a source imports it as a module; it exports no PyInit_ function",
                    expected=f"PyInit_{stem}",
                    why="`import` fails: dynamic module does not define module export function.",
                    cause="a library without a Python module in it, or the function is hidden",
                    next_step="load it with torch.ops.load_library or ctypes, or define the module",
                )
            )
    return checks


def _torch_checks(wheel: Wheel, trees: Mapping[str, ast.Module], closures: Mapping[str, Closure]) -> list[Check]:
    """An extension that finds libtorch or libc10 only because torch has loaded them must be imported after torch."""
    checks = []
    for member, closure in closures.items():
        module, lent = module_of(member), closure.from_torch
        users = {s: names for s, tree in trees.items() if module in (names := list(_modules(s, tree.body)))}
        if not lent or any(_imports_torch(text) for source, text in wheel.sources.items() if source not in users):
            continue
        late = [source for source, names in users.items() if not _is_before(names, module)]
        if late:
            checks.append(
                failed(
                    f"torch before {PurePosixPath(member).name}",
                    found=f"{listing(late, 3)} imports {module} without `import torch` before it",
                    expected="`import torch` first",
                    why=f"The loader does not find {listing(lent, 3)}: only torch, once loaded, brings them.",
                    cause="the import is missing or comes later",
                    next_step="import torch in the package before the extension",
                )
            )
    return checks


def _imports_torch(text: str) -> bool:
    return re.search(r"^\s*(?:import|from)\s+torch\b", text, re.MULTILINE) is not None


def _is_before(names: list[str], module: str) -> bool:
    return any(name.split(".")[0] == "torch" for name in names[: names.index(module)])
