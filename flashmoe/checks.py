"""Checks of the types of an operator's arguments, which C++ cannot see. The rules for values are in rules.py."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from flashmoe.errors import ArgumentError, ArgumentTypeError, DtypeError, FlashmoeError


class OutOfMemoryError(FlashmoeError, torch.OutOfMemoryError):
    """torch could not allocate a result; also a torch.OutOfMemoryError, for callers that retry with less."""


def has_names(tensor: Tensor) -> bool:
    """Whether dimensions have names; later versions of torch have no named tensors."""
    return bool(getattr(tensor, "has_names", _no)())


def _no() -> bool:
    return False


def has_fx_proxies(*inputs: Any) -> bool:
    """Whether torch.fx proxies are among the inputs: they are not tensors, but torch functions accept them."""
    for x in inputs:  # noqa: SIM110, a generator would cost a microsecond
        if not isinstance(x, Tensor) and hasattr(type(x), "__torch_function__"):
            return True
    return False


def trace_call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Records the call as one node of the graph that the proxies among its arguments belong to."""
    return handle_torch_function(function, (*arguments, *options.values()), *arguments, **options)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number of any type, including symbolic numbers; not a tensor or a bool."""
    return isinstance(value, (float, int, torch.SymFloat, torch.SymInt, numbers.Real)) and not isinstance(value, bool)


def check_flag(name: str, value: Any, hint: str = "") -> None:
    """Raise for anything but True and False, because the dispatcher would take its truth value. A proxy may become either."""
    if isinstance(value, bool) or isinstance(value, torch.SymBool) or has_fx_proxies(value):  # noqa: SIM101, the usual type first
        return
    kind = type(value).__name__
    kind = f"numpy.{kind}" if kind in ("bool", "bool_") else kind  # Python's own bool has returned above
    found = f"a {kind} of shape {shape_of(value)}" if isinstance(value, Tensor) else f"{value!r} ({kind})"
    msg = f"{name} must be True or False; found {found}; use bool({name}){hint}"
    raise ArgumentTypeError(msg)


def check_size(name: str, value: Any, least: int = 1) -> int:
    """A module's size as an int, from an integer of any type, including NumPy's."""
    if isinstance(value, (bool, Tensor)) or not hasattr(type(value), "__index__"):
        msg = f"{name} must be an integer; found {value!r} ({type(value).__name__})"
        raise ArgumentTypeError(msg)
    if value < least:
        msg = f"{name} must be at least {least}; found {value}"
        raise ArgumentError(msg)
    return operator.index(value)


def check_parameter_dtype(dtype: Any, supported: Collection[torch.dtype]) -> None:
    """Raise for a module's dtype that is neither None nor one of ``supported``."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        msg = f"dtype must be a torch.dtype or None; found {dtype!r}; use torch.float16 or another"
        raise ArgumentTypeError(msg)
    if dtype is not None and dtype not in supported:
        names = ", ".join(str(known).removeprefix("torch.") for known in supported)
        msg = f"no kernel for {dtype}; supported: {names}; create the module in one of them"
        raise DtypeError(msg)


def check_input_dtype(name: str, tensor: Tensor, weight: Any) -> None:
    """Raise if a layer's input and weight have different floating dtypes and autocast, which would convert them, is off."""
    wanted = getattr(weight, "dtype", None)
    if tensor.dtype is wanted or not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        return
    kind = tensor.device.type
    if wanted.itemsize == 1 or (
        torch.amp.autocast_mode.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    ):
        return  # 8-bit weights, which their module converts
    msg = (
        f"{name} is {tensor.dtype} and the layer's parameters {wanted}; convert one, {name}.to({wanted}) or layer.to({tensor.dtype}), "
        "or call under torch.autocast"
    )
    raise DtypeError(msg)


def shape_of(tensor: Tensor) -> str:
    """The shape as messages show it: [2, 8, 65, 64]."""
    return str(list(tensor.shape))
