"""The errors for what attention over float8_e4m3fn caches, or with ``out=``, does not support."""

from __future__ import annotations

from typing import Any, NoReturn

from flashmoe.errors import ArgumentError, DifferentiationError

NO_GRADIENT = (
    "attention over a torch.float8_e4m3fn cache has no gradient; call it under torch.no_grad(), or dequantise k and v "
    "with .to(q.dtype) * scale for training"
)
NO_TRANSFORM = "torch.func's transforms (vmap, functionalize) do not support a torch.float8_e4m3fn cache; make the mapped dimension part of the batch"
NO_OUT_TRANSFORM = (
    "out= is written in place, which torch.func's transforms (vmap, functionalize) do not support; remove out="
)


def raise_no_gradient(*_: Any) -> NoReturn:
    raise DifferentiationError(NO_GRADIENT)


def raise_no_vmap(*_: Any) -> NoReturn:
    raise ArgumentError(NO_TRANSFORM)


def raise_no_vmap_out(*_: Any) -> NoReturn:
    raise ArgumentError(NO_OUT_TRANSFORM)
