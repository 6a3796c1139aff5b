"""Finds the operations. There is no list: each operation is a subpackage of flashmoe with OPERATORS (flashmoe.operator.Operator) in
operators.py and RULES (flashmoe.rules.Rule) in rules.py."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import flashmoe


def modules(name: str) -> Iterator[ModuleType]:
    """The module called ``name`` of each operation; imports torch."""
    for folder in flashmoe.__path__:
        for path in sorted(Path(folder).glob(f"*/{name}.py")):
            yield import_module(f"flashmoe.{path.parent.name}.{name}")
