"""What happens when a wheel's packages are imported, followed through the sources: which modules run, what they ask for.

Only what certainly runs is followed: statements at the top level of a module, and of functions that are called there.
What stands under ``if``, in a ``try`` that swallows an error, or in a function that nothing calls at import may never run,
so nothing there can prove that an import fails.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from flashmoe_tools.audit.inputs import EXTENSION, Wheel

_DATA = re.compile(r"[^/]+\.data/(?:purelib|platlib)/")
# A module that mentions one of these may bind names or modules that its text does not show.
_DYNAMIC = re.compile(r"\b(?:__getattr__|globals|setattr|exec|vars|__dict__|__path__|sys\.modules|meta_path|lazy\w*)\b")


_LOADERS = frozenset({"load_library", "CDLL", "PyDLL", "dlopen", "LoadLibrary"})
_JOINERS = frozenset({"join", "joinpath", "with_name", "files"})
_FILE_NAME = re.compile(r"[\w.+/-]*?([\w.+-]+\.so(?:\.\d\w*)*)")
MAX_TOKENS = 300_000  # of one source; its syntax tree takes up to about 1 KB for each
_SIMPLE = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)


@dataclass(frozen=True)
class Request:
    """One module that certainly runs asks for another, by its dotted name, or for a file."""

    source: str
    line: int
    what: str


@dataclass(frozen=True)
class Unread:
    """A module that certainly runs and cannot be parsed."""

    source: str
    reason: str
    is_syntax: bool  # perhaps of a newer Python


@dataclass(frozen=True)
class Asked:
    """What one module asks for at import."""

    modules: tuple[Request, ...] = ()
    files: tuple[Request, ...] = ()
    unread: Unread | None = None


class Imports:
    """The modules of one wheel, and what those ask for that run when its packages are imported."""

    def __init__(self, wheel: Wheel) -> None:
        self.wheel = wheel
        self.modules = _modules(wheel)
        self.reached: set[str] = set()
        self._bound: dict[str, frozenset[str]] = {}
        self.asked = self._follow()

    @property
    def requests(self) -> list[Request]:
        return [request for asked in self.asked for request in asked.modules]

    @property
    def unread(self) -> list[Unread]:
        return [asked.unread for asked in self.asked if asked.unread is not None]

    @cached_property
    def folders(self) -> frozenset[str]:
        """Every folder with a module below it, as a dotted name: packages, with an ``__init__`` or without."""
        names = (name.split(".") for name in self.modules)
        return frozenset(".".join(parts[:n]) for parts in names for n in range(1, len(parts)))

    def is_lost(self, module: str) -> bool:
        """Whether importing ``module`` fails for certain: its package is in the wheel, whole, and does not have it."""
        if module in self.modules or module in self.folders:
            return False
        parent, _, name = module.rpartition(".")
        source = self.modules.get(parent, "")
        text = self.wheel.sources.get(source)
        if not source.endswith("/__init__.py") or text is None or _DYNAMIC.search(text):
            return False  # another distribution's, a module and no package, or one that may find it in its own way
        if parent not in self._bound:
            self._bound[parent] = _bound(text)
        return not self._bound[parent] & {name, "*"}

    def lost_elsewhere(self) -> list[Request]:
        """Modules of the wheel that its packages do not import, and that cannot be imported: what they ask for is lost."""
        rest = [(m, s) for m, s in self.modules.items() if m not in self.reached and s.endswith(".py")]
        return [request for m, s in rest for request in self._ask(m, s).modules if self.is_lost(request.what)]

    def _follow(self) -> list[Asked]:
        above = {name: [name[: m.start()] for m in re.finditer(r"\.", name)] for name in self.modules}
        waiting = [name for name, parents in above.items() if not any(parent in self.modules for parent in parents)]
        every = []
        while waiting:
            module = waiting.pop()
            if module in self.reached:
                continue
            self.reached.add(module)
            source = self.modules.get(module, "")
            if source.endswith(".py"):
                every.append(self._ask(module, source))
                parts = [request.what.split(".") for request in every[-1].modules]
                waiting += [".".join(names[:n]) for names in parts for n in range(1, len(names) + 1)]
        return every

    def _ask(self, module: str, source: str) -> Asked:
        """Parse one module. Its syntax tree, which may be large, is not kept."""
        text = self.wheel.sources.get(source)
        if text is None or _is_too_dense(text):
            return Asked(unread=Unread(source, "too large to be parsed", is_syntax=False))
        try:
            running = list(_certain(ast.parse(text)))
        except SyntaxError as error:
            return Asked(unread=Unread(source, f"SyntaxError: {error.msg}, line {error.lineno}", is_syntax=True))
        except (ValueError, RecursionError, MemoryError) as error:  # NUL bytes; nested too deeply
            return Asked(unread=Unread(source, f"{type(error).__name__}: {error}", is_syntax=False))
        package = module if source.endswith("/__init__.py") else module.rpartition(".")[0]
        modules = (Request(source, line, name) for node in running for line, name in self._imported(node, package))
        files = (Request(source, line, name) for node in running for line, name in _loaded_files(node))
        return Asked(tuple(modules), tuple(files))

    def _imported(self, node: ast.stmt, package: str) -> Iterator[tuple[int, str]]:
        """What an import statement asks for. A name taken from a module that is no package is an attribute, not a module."""
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if node.level else []
            base = ".".join([*parts[: len(parts) - max(0, node.level - 1)], *filter(None, [node.module])])
            if base:
                yield node.lineno, base
            if base in self.folders:
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names if alias.name != "*")


def _loaded_files(statement: ast.stmt) -> Iterator[tuple[int, str]]:
    """Shared objects that a loader is given by a path of the package's own, put together by ``/``, ``+`` or ``join``.

    A bare name is left to the loader's search path.
    """
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and _callee(n) in _LOADERS]
    for node in (part for call in calls for part in ast.walk(call)):
        is_joined = (isinstance(node, ast.Call) and _callee(node) in _JOINERS) or isinstance(node, ast.BinOp)
        for part in ast.iter_child_nodes(node) if is_joined else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                match = _FILE_NAME.fullmatch(part.value)
                if match is not None:
                    yield part.lineno, match[1]


def _callee(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _modules(wheel: Wheel) -> Mapping[str, str]:
    """Dotted name -> member, of each module that the wheel installs: Python files and extensions."""
    found: dict[str, str] = {}
    for member in wheel.names:
        place = PurePosixPath(_DATA.sub("", member))
        stem = place.name.split(".", 1)[0]
        if place.suffix != ".py" and not EXTENSION.fullmatch(place.name):
            continue
        parts = [*place.parts[:-1], *([] if stem == "__init__" else [stem])]
        if parts and all(part.isidentifier() for part in parts) and not (place.suffix == ".py" and place.stem != stem):
            name = ".".join(parts)
            if place.suffix != ".py" or name not in found:
                found[name] = member
    return found


def _is_too_dense(text: str) -> bool:
    """More than MAX_TOKENS; a text has at most as many as characters, so few are counted."""
    return len(text) > MAX_TOKENS and sum(1 for _ in re.finditer(r"\w+|[^\w\s]", text)) > MAX_TOKENS


def _certain(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run whenever the module is imported, with the bodies of its functions that they call."""
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    waiting, called = list(reversed(tree.body)), set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef):
            waiting += reversed(node.body)
        if isinstance(node, ast.Try) and all(isinstance(handler.body[-1], ast.Raise) for handler in node.handlers):
            waiting += reversed(node.body)
        if not isinstance(node, _SIMPLE):  # if, try, with (it may swallow an error), loops, definitions
            continue
        yield node
        for name in _plain_calls(node):
            if name in functions and name not in called:
                called.add(name)
                waiting += reversed(_until_return(functions[name].body))


def _until_return(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements before the first one that may leave the function."""
    for index, node in enumerate(body):
        if any(isinstance(n, (ast.Return, ast.Raise, ast.Yield)) for n in ast.walk(node)):
            return body[: index + isinstance(node, ast.Return)]
    return body


def _plain_calls(node: ast.stmt) -> Iterator[str]:
    """Names called in a plain statement, outside of what may be skipped: ``f()``, ``x = f()``, ``g(f())``."""
    waiting: list[ast.AST] = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(
            one, (ast.Lambda, ast.IfExp, ast.BoolOp, ast.GeneratorExp, ast.ListComp, ast.DictComp, ast.SetComp)
        ):
            continue
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name):
            yield one.func.id
        waiting += ast.iter_child_nodes(one)


def _bound(text: str) -> frozenset[str]:
    """Names that a package's ``__init__`` binds, other than by taking them from the package itself. ``*``: any name."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset("*")
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom) and node.level == 1 and not node.module:
            names |= {alias.asname for alias in node.names if alias.asname}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return frozenset(names)
