"""What torch must know about an operator, as data, and its registration with torch's dispatcher.

There is no list of operations: each is a subpackage with an ``operators.py`` whose OPERATORS is a tuple of :class:`Operator`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashmoe._operations import modules
from flashmoe.transforms import autocast_dtype

NAMESPACE = "flashmoe"
_AUTOCAST_KEYS = (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"))
_registrations: list[torch.library.Library] = []  # a Library drops its registrations when it is garbage-collected


@dataclass(frozen=True)
class Operator:
    """One operator of ``torch.ops.flashmoe``.

    The extension defines and implements it, unless ``schema`` is given: then it is written in Python, in ``impls``.
    """

    name: str
    # Returns the result's shapes, dtypes and strides; raises the typed errors that eager mode raises
    fake: Callable[..., Any]
    flops: Callable[..., int]  # from the arguments' shapes, as FlopCounterMode counts torch's own operators
    counts_raw: bool = False  # flops takes the tensors themselves, because lengths held in tensors change the count
    # The tensors (or None) that autocast may cast: their positions, or the number of leading arguments; is_cast selects among them.
    autocast: int | tuple[int, ...] = 0
    is_cast: Callable[[Any], bool] = lambda value: value is not None
    # By dispatch key; the function for Autograd gets the keyset as its first argument
    impls: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    vmap: Callable[..., Any] | None = None  # as torch.library.register_vmap takes it
    gradient: Callable[..., Any] | None = None  # as torch.library.register_autograd takes it
    setup_context: Callable[..., None] | None = (
        None  # as torch.library.register_autograd takes it; None: nothing is saved for the gradient
    )
    schema: str = ""


def find_operators() -> tuple[Operator, ...]:
    """The operators of all operations of this package."""
    return tuple(operator for package in modules("operators") for operator in package.OPERATORS)


def register(operators: Iterable[Operator]) -> None:
    """Called once by ``_extension.load``, after the extension's own definitions."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for operator in operators:
        _register(operator, library)
    _registrations.append(library)


def _register(operator: Operator, library: torch.library.Library) -> None:
    name = f"{NAMESPACE}::{operator.name}"
    if operator.schema:
        library.define(operator.schema, tags=(torch.Tag.needs_fixed_stride_order,))
    for key, function in operator.impls.items():
        library.impl(operator.name, function, key, with_keyset=key == "Autograd")
    torch.library.register_fake(name, operator.fake, lib=library)
    if operator.vmap is not None:
        torch.library.register_vmap(name, operator.vmap, lib=library)
    if operator.gradient is not None:
        torch.library.register_autograd(name, operator.gradient, setup_context=operator.setup_context, lib=library)
    for device_type, key in _AUTOCAST_KEYS if operator.autocast else ():
        library.impl(operator.name, _autocast_rule(operator, device_type, key), key)
    register_flop_formula(getattr(torch.ops.flashmoe, operator.name), get_raw=operator.counts_raw)(operator.flops)


def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The ``setup_context`` of an operator whose gradient needs nothing from the forward pass."""


def _autocast_rule(operator: Operator, device_type: str, key: str) -> Callable[..., Any]:
    """Autocast's rules sit above autograd in torch's dispatcher and run only under autocast: a plain call pays nothing."""
    call = getattr(torch.ops.flashmoe, operator.name).default
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    positions = operator.autocast
    cast = frozenset(range(positions) if isinstance(positions, int) else positions)
    is_cast = operator.is_cast

    def cast_and_call(*arguments: Any) -> Any:
        """Like scaled_dot_product_attention: casts every floating input to autocast's dtype and turns autocast off below."""
        target = torch.get_autocast_dtype(device_type)
        casted = (
            value.to(autocast_dtype(value, device_type, target)) if position in cast and is_cast(value) else value
            for position, value in enumerate(arguments)
        )
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return call(*casted)

    return cast_and_call
