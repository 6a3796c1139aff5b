"""Dynamic shared memory of one thread block, itemised by the formula of its kernel's descriptor (operations.toml).

Every generated translation unit asserts that the sum equals the kernel's own ``Spec::kSharedBytes``, so a formula that
drifts from its kernel does not compile.
"""

import ast
import operator
from collections.abc import Mapping
from functools import lru_cache

Items = tuple[tuple[str, int], ...]
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


class FormulaError(ValueError):
    """An expression that is not integer arithmetic over known names."""


def itemise(formula: Mapping[str, str], values: Mapping[str, int]) -> Items:
    """(name, bytes) of each item. Raises FormulaError with the item that cannot be computed."""
    return tuple((name, _value(_parse(text), values, f"{name} = {text!r}")) for name, text in formula.items())


@lru_cache(maxsize=256)
def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError) as error:
        msg = f"{text!r} is not an arithmetic expression: {error}"
        raise FormulaError(msg) from error


def _value(node: ast.expr, values: Mapping[str, int], where: str) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id in values:
            return values[node.id]
        msg = f"{where}: no value {node.id!r}; known: {', '.join(values)}"
        raise FormulaError(msg)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, values, where), _value(node.right, values, where)
        if isinstance(node.op, ast.FloorDiv) and right == 0:
            msg = f"{where}: division by 0"
            raise FormulaError(msg)
        return int(_OPERATORS[type(node.op)](left, right))
    msg = f"{where}: {ast.unparse(node)!r} is not allowed; use integers, names, + - * // and parentheses"
    raise FormulaError(msg)
