"""The rules for arguments: C++ checks a call and names the rule it breaks, with the values; RULES turns that into an error and a message.

An operator checks its arguments once, in C++, and throws ``flashmoe:<rule>|name=value|...`` (csrc/host/error.h). RULES maps each rule
to an error class and a message; the rules of one operation are in ``rules.py`` of its package. An eager call pays for this only when
it fails. When there is no tensor with data (fake tensors, torch.compile), :func:`check` calls the same C++ checks.

What C++ cannot see is checked in ``checks.py``: types, nested and named tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

import torch
from torch import Tensor

from flashmoe import _extension
from flashmoe._operations import modules
from flashmoe.checks import OutOfMemoryError
from flashmoe.errors import (
    ArgumentError,
    DeviceError,
    DriverError,
    DtypeError,
    FlashmoeError,
    InternalError,
    ShapeError,
    UnsupportedGpuError,
)


class Rule(NamedTuple):
    """The error and message for a broken rule. ``message`` has a {name} for each value; it says what was found, what is supported, what to do."""

    error: type[FlashmoeError]
    message: str


def by_error(messages: Mapping[type[FlashmoeError], Mapping[str, str]]) -> Mapping[str, Rule]:
    """Maps each rule's name to its Rule, from messages grouped by error class."""
    return MappingProxyType(
        {name: Rule(kind, text) for kind, texts in messages.items() for name, text in texts.items()}
    )


# The rules shared by all operations.
RULES = by_error(
    {
        ArgumentError: {
            "tensor.missing": "{name} is None; a tensor is needed",
            "variable.switch": "{name} is {found}; supported: 0, 1; correct it, or unset it",
            "variable.captured": "{name} is 1, but no numbers can be read while a CUDA graph is captured; unset it",
        },
        ShapeError: {
            "tensor.size": "each size of {name} must be below 2^31; found {sizes}; split that dimension",
            "tensor.stride": "the last dimension of {name} must be contiguous; found strides {strides}; call .contiguous() on it",
        },
    }
)
# Failures that are not about arguments: C++ words these itself.
_ERROR_CODES: Mapping[str, type[FlashmoeError]] = MappingProxyType(
    {
        "shape": ShapeError,
        "dtype": DtypeError,
        "device": DeviceError,
        "argument": ArgumentError,
        "gpu": UnsupportedGpuError,
        "driver": DriverError,
        "memory": OutOfMemoryError,
        "internal": InternalError,
    }
)
_BROKEN_RULE = re.compile(r"flashmoe:(?P<rule>[a-z0-9_.]+)\|(?P<values>[^\n]*)")
_CODED_MESSAGE = re.compile(r"flashmoe:(?P<code>[a-z]+): (?P<text>[^\n]*)")


@lru_cache(maxsize=1)
def _all_rules() -> Mapping[str, Rule]:
    rules = dict(RULES)
    for module in modules("rules"):
        rules.update(module.RULES)
    return rules


def broken(rule: str, **values: object) -> FlashmoeError:
    """The typed error for a rule that these values break."""
    if rule not in _all_rules():
        return InternalError(f"the extension reports an unknown rule {rule!r}; found {values}")
    kind, message = _all_rules()[rule]
    return kind(message.format_map(values))


def translate(error: BaseException) -> FlashmoeError | None:
    """The typed error for what C++ threw, or None if the text is not in flashmoe's format."""
    match = _BROKEN_RULE.search(str(error))
    if match is not None:
        pairs = (value.partition("=") for value in match["values"].split("|") if "=" in value)
        return broken(match["rule"], **{name: unquote(text) for name, _, text in pairs})
    match = _CODED_MESSAGE.search(str(error))
    if match is None:
        return None
    kind = _ERROR_CODES.get(match["code"])
    if kind is None:
        return InternalError(f"the extension raised an unknown error code {match['code']!r}: {match['text']}")
    return kind(match["text"])


def check(operator: str, arguments: Iterable[Any]) -> None:
    """Raise the typed error that calling ``operator`` with these arguments would raise; nothing is computed, tensors need no memory.

    A symbolic size counts as its hint and is not guarded on: the operator checks again when it runs. If a size has no hint,
    nothing is checked.
    """
    try:
        description = "".join(f"{_describe(argument)}\n" for argument in arguments)
    except _NoHintError:
        return
    found = translate(RuntimeError(_extension.check(operator, description)))
    if found is not None:
        raise found


def explain(error: BaseException, operator: str, arguments: Iterable[Any]) -> BaseException:
    """Why a call failed whose arguments have the right types: flashmoe's typed error if there is one, else ``error`` itself.

    The caller's own arguments are checked first: a transform of torch.func may have passed the operator others, and torch's
    dispatcher rejects some calls before they reach it.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return error
    try:
        check(operator, arguments)
    except FlashmoeError as reason:
        return reason
    typed = error if isinstance(error, FlashmoeError) else translate(error)
    return error if typed is None else typed


class _NoHintError(Exception):
    """A symbolic number without a hint."""


def _describe(argument: Any) -> str:
    """In the format that csrc/host/arguments.h reads."""
    if argument is None:
        return "none"
    if isinstance(argument, str):
        return f"text {argument}".replace("\n", " ")
    if not isinstance(argument, Tensor):
        value = _hint(argument)
        return f"value {int(value) if isinstance(value, bool) else value}"
    numbers = " ".join(str(_hint(number)) for number in (*argument.shape, *argument.stride()))
    return f"tensor {str(argument.dtype).removeprefix('torch.')} {argument.device} {argument.dim()} {numbers}"


def _hint(number: Any) -> Any:
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    if not number.node.has_hint():
        raise _NoHintError
    return number.node.hint
