"""Signatures and names in Python sources, read from their syntax trees: nothing is imported or run."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

Scope = ast.Module | ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Parameter:
    name: str
    is_keyword_only: bool = False
    default: str | None = None  # as written

    def __str__(self) -> str:
        return self.name if self.default is None else f"{self.name}={self.default}"


@dataclass(frozen=True)
class Signature:
    """A function's signature without self or cls."""

    parameters: tuple[Parameter, ...]
    takes_more: bool  # **options
    returns: str | None

    def named(self, name: str) -> Parameter | None:
        return next((one for one in self.parameters if one.name == name), None)

    def __str__(self) -> str:
        """Python syntax, which :func:`parse` reads."""
        by_name = [one for one in self.parameters if one.is_keyword_only]
        words = [str(one) for one in self.parameters if not one.is_keyword_only]
        words += [*(["*"] if by_name else []), *map(str, by_name), *(["**more"] if self.takes_more else [])]
        return f"({', '.join(words)})" + ("" if self.returns is None else f" -> {self.returns}")


def parse(text: str) -> Signature:
    """The inverse of ``str(signature)``."""
    found = signature(f"def f{text}: ...", "f")
    assert found is not None
    return found


def find(source: str, path: str) -> Scope | None:
    """The definition at ``path`` ("Class.method", "function.Class.method"); the module itself for "". If several, the last, as in Python."""
    scope: Scope | None = ast.parse(source)
    for name in filter(None, path.split(".")):
        scope = None if scope is None else _named(scope, name)
    return scope


def _named(scope: Scope, name: str) -> Scope | None:
    """The definition of that name, also through an alias: ``name = other``."""
    for node in reversed([*_statements(scope)]):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name)
            and name in _defined(node)
            and node.value.id != name
        ):
            return _named(scope, node.value.id)
    return None


def signature(source: str, path: str) -> Signature | None:
    """The signature of the function at ``path``, or of a class's ``__init__``, or of its fields if it has none; None if there is neither."""
    scope = find(source, path)
    if isinstance(scope, ast.FunctionDef):
        return _of_function(scope)
    if not isinstance(scope, ast.ClassDef):
        return None
    made = [node for node in scope.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return _of_function(made[-1]) if made else _of_fields(scope)


def names(source: str, path: str) -> frozenset[str]:
    """Names that the module or class at ``path`` defines: definitions, assignments, imports, fields, and attributes that its methods assign to self."""
    scope = find(source, path)
    if scope is None:
        return frozenset()
    found = {name for node in _statements(scope) for name in _defined(node)}
    if isinstance(scope, ast.ClassDef):
        found |= {
            node.attr
            for node in ast.walk(scope)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
    return frozenset(found)


def abstract_methods(source: str, path: str) -> frozenset[str]:
    """The methods that a subclass of the class at ``path`` must define."""
    scope = find(source, path)
    methods = [node for node in getattr(scope, "body", []) if isinstance(node, ast.FunctionDef)]
    return frozenset(
        node.name
        for node in methods
        for mark in node.decorator_list
        if ast.unparse(mark).rpartition(".")[2] == "abstractmethod"
    )


def _statements(scope: ast.stmt | Scope) -> Iterator[ast.stmt]:
    """The statements of a scope, including those under a condition."""
    for node in getattr(scope, "body", []):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(node)
            yield from getattr(node, "orelse", [])


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _of_function(node: ast.FunctionDef) -> Signature:
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    found = [Parameter(one.arg, default=_text(default)) for one, default in zip(positional, defaults, strict=True)]
    found += [
        Parameter(one.arg, True, _text(default))
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    found = [one for index, one in enumerate(found) if not (index == 0 and one.name in ("self", "cls"))]
    return Signature(tuple(found), given.kwarg is not None, _text(node.returns))


def _of_fields(node: ast.ClassDef) -> Signature:
    """The signature of a dataclass or NamedTuple."""
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
    return Signature(
        tuple(Parameter(one.target.id, default=_text(one.value)) for one in fields if isinstance(one.target, ast.Name)),
        False,
        node.name,
    )


def _text(node: ast.expr | None) -> str | None:
    """The annotation as written; for a quoted one its content."""
    if node is None:
        return None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node)
