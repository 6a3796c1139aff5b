"""The operations: each package here is one operation, with everything that proves and times it.

problem.py       PROBLEM, its problem type; naming one and counting its FLOPs and bytes needs no torch
reference.py     inputs, the result computed independently of our code in higher precision, and the tolerance
contenders.py    contenders(): ours, and what it is compared with
suites/*.toml    what the benchmark times
emulation/       how its kernels run on the emulated GPU, and the planted bugs; only in a checkout

Packages are discovered; no other file lists the operations.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from flashmoe.errors import ArgumentError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

DEFAULT_OPERATION = "attention"
DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"f16": 2, "bf16": 2, "f32": 4})


@dataclass(frozen=True)
class Verification:
    """How a result compares with the reference; ``passed`` only if every checked value was finite and close enough."""

    passed: bool
    max_error: float
    tolerance: float
    lse_error: float | None
    coverage: float  # checked share of the result
    reason: str = ""


class Inputs(Protocol):
    """The tensors of one problem on one device."""

    def poison(self) -> None:
        """Fills the memory that the next result will get with NaN, so that an element that is not written shows."""


class Reference(Protocol):
    """The expected result and the error allowed."""

    tolerance: float
    coverage: float

    def judge(self, result: Any, lse: torch.Tensor | None = None) -> Verification: ...


class Problem(Protocol):
    """A frozen dataclass that determines everything about a problem except the values of its inputs.

    ``heaviest_kernel`` (optional): the kernel operation that takes most of its time, for profiles.
    """

    operation: ClassVar[str]

    @property
    def key(self) -> str:
        """A name that is the same in every run, so that two reports can be compared."""

    @property
    def title(self) -> str:
        """The problem as readable text."""

    @property
    def dtype(self) -> str: ...
    @property
    def flops(self) -> int: ...
    @property
    def bytes_moved(self) -> int: ...
    def to_json(self) -> dict[str, Any]: ...
    def make_inputs(self, device: str, seed: int) -> Any: ...
    def make_reference(self, inputs: Any) -> Reference: ...
    def fit(self, dtypes: Collection[str], max_tokens: int) -> Problem:
        """The nearest problem with one of these dtypes and at most ``max_tokens`` tokens, for a GPU with less memory."""

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Problem: ...
    @classmethod
    def from_key(cls, key: str) -> Problem: ...
    @classmethod
    def smallest(cls) -> Problem:
        """The problem checked before anything is timed: if it is wrong or hangs, nothing larger is worth the time."""

    @classmethod
    def expand(cls, row: Mapping[str, Any], where: str) -> Iterator[Problem]:
        """The problems in one table of a suite's ``cases``; ``where`` names the table in errors (fields.SuiteError)."""


class ProblemBase:
    """Base of all problems: their fields as JSON, and inputs and reference from the package's ``reference.py``."""

    operation: ClassVar[str]

    def to_json(self: Any) -> dict[str, Any]:
        return {"key": self.key, "operation": self.operation, **asdict(self)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        return cls(**{name: value for name, value in row.items() if name not in ("key", "operation")})

    @classmethod
    def read_key(cls, pattern: re.Pattern[str], key: str, example: str) -> re.Match[str]:
        """Matches a key; one that is not written like ``example`` is an ArgumentError."""
        match = pattern.fullmatch(key)
        if match is None or match["dtype"] not in DTYPE_BYTES:
            msg = f"{key!r} is not a case key; example: {example}"
            raise ArgumentError(msg)
        return match

    def make_inputs(self, device: str, seed: int) -> Any:
        """Fresh random tensors; this and what follows needs torch."""
        return self._reference().make_inputs(self, device, seed)

    def make_reference(self, inputs: Any) -> Any:
        return self._reference().make_reference(inputs)

    def _reference(self) -> Any:
        return import_module(f"{__name__}.{self.operation}.reference")


def packages() -> Mapping[str, Path]:
    """The folder of every operation, by name."""
    found = (Path(path) / module.name for path in __path__ for module in pkgutil.iter_modules([path]) if module.ispkg)
    return {folder.name: folder for folder in sorted(found, key=lambda folder: folder.name)}


def operations() -> tuple[str, ...]:
    """The operations that have a problem type."""
    return tuple(name for name, folder in packages().items() if (folder / "problem.py").is_file())


def problem_type(operation: str) -> type[Problem]:
    """The problem type of ``operation``; an unknown one is an ArgumentError."""
    if operation not in operations():
        msg = f"no operation {operation!r}; known: {', '.join(operations())}"
        raise ArgumentError(msg)
    return cast("type[Problem]", import_module(f"{__name__}.{operation}.problem").PROBLEM)


def problem_from_key(key: str) -> Problem:
    """The problem with this key, of any operation; otherwise an ArgumentError with a sample key of each."""
    kinds = [problem_type(operation) for operation in operations()]
    for kind in kinds:
        try:
            problem = kind.from_key(key)
        except ArgumentError:
            continue
        if problem.key == key:
            return problem
    msg = (
        f"{key!r} is not a case key; an example for each operation: {', '.join(kind.smallest().key for kind in kinds)}"
    )
    raise ArgumentError(msg)


def problem_from_json(row: Mapping[str, Any]) -> Problem:
    """The problem of a report's ``case``; reports from before there were several operations name none."""
    return problem_type(row.get("operation", DEFAULT_OPERATION)).from_json(row)
