"""Why a call failed. C++ checks values (rules.py explains them); this module checks types, which C++ cannot see.

An eager call runs none of this if its arguments have the usual types.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flashmoe import rules
from flashmoe.checks import check_flag, has_names, is_number
from flashmoe.errors import ArgumentError, ArgumentTypeError, DtypeError, FlashmoeError
from flashmoe.moe.options import ACTIVATIONS, LAYOUTS, SCORINGS

_WORDS = {"activation": ACTIVATIONS, "layout": LAYOUTS, "scoring": SCORINGS}


def raise_cause(error: Exception, operator: str, arguments: Iterable[Any]) -> None:
    """Raise the typed error for what ``operator`` rejects in these arguments; return if flashmoe has no explanation."""
    if isinstance(error, (FlashmoeError, torch.OutOfMemoryError)):
        return
    arguments = tuple(arguments)
    cause: BaseException | None = rules.translate(error)
    if cause is None:
        try:
            check_types(operator, arguments)
        except FlashmoeError as wrong_type:
            cause = wrong_type
        else:
            cause = rules.explain(error, operator, arguments)
    if cause is not error:
        raise cause from error


def check(operator: str, arguments: Iterable[Any]) -> None:
    """Raise the typed error that calling ``operator`` would raise; nothing is computed."""
    arguments = tuple(arguments)
    check_types(operator, arguments)
    rules.check(operator, arguments)


def check_types(operator: str, arguments: Iterable[Any]) -> None:
    """Raise for the first argument whose type is not the one in the operator's schema."""
    schema = getattr(torch.ops.flashmoe, operator).default._schema
    for argument, value in zip(schema.arguments, arguments, strict=True):
        kind, name = str(argument.type), argument.name
        if kind == "Tensor" or (kind == "Optional[Tensor]" and value is not None):
            check_tensor(name, value)
        elif kind == "str" and not isinstance(value, str):
            msg = f"{name} must be text; found {type(value).__name__}; use one of {', '.join(_WORDS[name])}"
            raise ArgumentTypeError(msg)
        elif kind == "bool":
            check_flag(name, value)
        elif kind == "int":
            check_integer(name, value)
        elif kind == "float":
            check_number(name, value)


def check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        msg = f"{name} must be a torch.Tensor; found {type(value).__name__}; convert it with torch.as_tensor"
        raise ArgumentTypeError(msg)
    if value.is_nested or value.layout is not torch.strided:
        found = "nested" if value.is_nested else str(value.layout)
        msg = f"{name} must be a dense (strided) tensor; found a {found} tensor; pad or densify it"
        raise ArgumentError(msg)
    if value.is_quantized:
        msg = f"{name} is a quantised tensor ({value.dtype}), which no kernel supports; pass {name}.dequantize()"
        raise DtypeError(msg)
    if has_names(value):
        msg = f"{name} has named dimensions {value.names}; named tensors are not supported; drop the names with .rename(None)"
        raise ArgumentError(msg)


def check_integer(name: str, value: Any) -> None:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        msg = f"{name} must be an integer; found {value!r} ({type(value).__name__})"
        raise ArgumentTypeError(msg)


def check_number(name: str, value: Any) -> None:
    if not is_number(value):
        msg = f"{name} must be a number; found {type(value).__name__}; multiply the weights by a tensor afterwards"
        raise ArgumentTypeError(msg)
