"""Where the operations are. Nothing lists them: each is a package of this one, with its OPERATORS (flashmoe.operator.Operator) in
operators.py and its RULES (flashmoe.rules.Rule) in rules.py."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import flashmoe


def modules(name: str) -> Iterator[ModuleType]:
    """The module of that name of each operation; imports torch."""
    for folder in flashmoe.__path__:
        for path in sorted(Path(folder).glob(f"*/{name}.py")):
            yield import_module(f"flashmoe.{path.parent.name}.{name}")
