"""The operators as torch sees them: what ``torch.ops.flashmoe`` holds and how autograd, transforms and compilers treat it.

One module or package for each operation. It has ``OPERATORS``, a tuple of :class:`~flashmoe.operators._operator.Operator`;
nothing else lists the operations. Names with a leading underscore are shared parts.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashmoe.operators._operator import Operator


def find_operators() -> tuple[Operator, ...]:
    """The operators of every operation in this folder; imports torch."""
    operations = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return tuple(operator for name in operations for operator in import_module(f"{__name__}.{name}").OPERATORS)
