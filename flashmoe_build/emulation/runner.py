"""What an operation defines for its kernels (``Runner``), and the execution of launches, given as data, on the emulated machine.

An operation's ``emulation`` package defines ``RUNNERS``: for each kernel operation of the tables the problems that its kernels run on, and
for each problem the launches and the check of the results. Parameters are bound by the names in the C header.
"""

import argparse
import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from flashmoe.errors import BuildError, InternalError
from flashmoe_build.compile.codegen import map_parameters
from flashmoe_build.emulation.build import MAP_BYTES, Options, kernel_library
from flashmoe_build.emulation.machine import Geometry, KernelLibrary, LaunchReport, Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_tools.tables import Unit

EMULATED_MULTIPROCESSORS = 3  # blocks of a persistent grid: few, so that each processes several tiles
STRIDES = ("batch", "head", "row")  # members of a struct of strides


class TensorMapError(InternalError):
    """cuTensorMapEncodeTiled would reject the map that the host describes."""


@dataclass(frozen=True)
class Buffer:
    """Host memory that a pointer of the parameters points to.

    ``row_stride``: each row of the last dimension is a separate buffer, this many elements from the next, so that reading past a row is out
    of bounds; ``rows``: the rows that exist. ``end``: the tensor is the end of an array of this many elements, the rest of which is
    address space without memory.
    """

    tensor: torch.Tensor
    writable: bool = False
    initialised: bool = True
    is_from_preceding_grid: bool = False  # a dependent launch must wait before it reads this
    is_counter: bool = False  # must be zero after the launch
    row_stride: int | None = None
    rows: Iterable[int] | None = None
    end: int | None = None
    name: str = ""  # of the parameter

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next, for each dimension but the last."""
        if self.row_stride is None:
            return self.tensor.stride()[:-1]
        return torch.empty((*self.tensor.shape[:-1], self.row_stride), device="meta").stride()[:-1]

    def map(self, library: KernelLibrary, name: str) -> int:
        """Maps the memory and returns its address for the kernel."""
        tensor, size, name = self.tensor, self.tensor.element_size(), self.name or name
        flags = {"writable": self.writable, "initialised": self.initialised}
        if self.row_stride is None and self.end is None:
            address = library.add_buffer(tensor.data_ptr(), span(tensor) * size, **flags, name=name)
            return library.expect_from_preceding_grid(address) if self.is_from_preceding_grid else address
        memory = tensor.flatten()[None] if self.row_stride is None else tensor.reshape(-1, tensor.shape[-1])
        count, columns = memory.shape
        stride = self.row_stride or columns
        skipped = 0 if self.end is None else self.end - (count - 1) * stride - columns
        base = library.reserve((self.end or max(1, count) * stride) * size)
        for row in range(count) if self.rows is None else self.rows:
            address = base + (skipped + row * stride) * size
            library.map_buffer(address, memory[row].data_ptr(), columns * size, **flags, name=f"{name}, row {row}")
            if self.is_from_preceding_grid:
                library.expect_from_preceding_grid(address)
        return base


def span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last of a tensor."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def output(tensor: torch.Tensor, **options: Any) -> Buffer:
    """A buffer that the kernel writes and must not read before."""
    return Buffer(tensor, writable=True, initialised=False, **options)


def preceding(tensor: torch.Tensor | None, **options: Any) -> Buffer | None:
    """A buffer written by the grid that precedes a dependent launch."""
    return None if tensor is None else Buffer(tensor, is_from_preceding_grid=True, **options)


def counter(count: int = 1) -> Buffer:
    """A zeroed counter of tiles, which the kernel must leave at zero."""
    return Buffer(torch.zeros(count, dtype=torch.int32), writable=True, is_counter=True)


@dataclass(frozen=True)
class Launch:
    """One launch. ``values``: the members of the parameter struct by name, with a mapping for a nested struct; tensors become buffers, and
    ``x_stride`` is that of ``x`` unless given. Omitted members are zero."""

    values: Mapping[str, Any]
    blocks: int  # one per tile
    words: tuple[str, ...] = ()  # values of the axes that choose the entry point
    only_block: int | None = None  # if the problem is too large to run in full
    max_blocks: int = EMULATED_MULTIPROCESSORS  # limit for a persistent grid

    def buffers(self) -> Iterator[tuple[str, Buffer]]:
        """The buffers by parameter name."""
        for name, value in self.values.items():
            if isinstance(value, Mapping):
                yield from Launch(value, 0).buffers()
            elif isinstance(value, (torch.Tensor, Buffer)):
                yield name, value if isinstance(value, Buffer) else Buffer(value)


@dataclass(frozen=True)
class Trial:
    """One problem, ready to run: its launches in order, and a function that describes what is wrong with the results (empty if nothing is)."""

    launches: Sequence[Launch]
    check: Callable[[], list[str]]
    results: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Runner:
    """How to run the kernels of one operation. A problem has a ``name``; see ``NamedProblem``."""

    problems: Callable[[Unit], Iterable[Any]]
    trial: Callable[[Unit, Any], Trial]
    custom: Callable[[Unit, argparse.Namespace], Iterable[Any]] | None = None  # problems that a command line describes


@dataclass(frozen=True)
class NamedProblem:
    """A problem identified by its name, which states everything that differs from the other problems of the suite."""

    name: str
    causal = False
    huge = False  # offsets past 2^31: only the last block runs


def by_family(**runners: Runner) -> Runner:
    """A runner for an operation whose families have different runners."""
    return Runner(
        lambda unit: runners[unit.row.family].problems(unit),
        lambda unit, problem: runners[unit.row.family].trial(unit, problem),
    )


@dataclass(frozen=True)
class Outcome:
    """The outcome of one emulated run."""

    symbol: str
    report: LaunchReport
    wrong: tuple[str, ...]
    results: Mapping[str, torch.Tensor]

    @property
    def passed(self) -> bool:
        return self.report.failure is None and not self.wrong

    def explain(self) -> str:
        """What failed, in words; empty if nothing did."""
        failure = [] if self.report.failure is None else [str(self.report.failure)]
        return "\n".join([*failure, *self.wrong])


load = lru_cache(maxsize=64)(KernelLibrary)


def execute(unit: Unit, trial: Trial, settings: Settings, options: Options) -> Outcome:
    """Compiles the kernel (or takes it from the cache), runs the trial on it and checks the results."""
    library = load(kernel_library(unit, options))
    for launch in trial.launches:
        report = _start(unit, launch, library, settings, options)
        if report.failure is not None:
            return Outcome(report.kernel, report, (), trial.results)
    wrong = trial.check()
    for name, buffer in trial.launches[-1].buffers():
        if buffer.is_counter and buffer.tensor.any():
            wrong.append(f"{name} is {buffer.tensor.tolist()} after the launch; the next launch needs zeros")
    return Outcome(report.kernel, report, tuple(wrong), trial.results)


def _start(unit: Unit, launch: Launch, library: KernelLibrary, settings: Settings, options: Options) -> LaunchReport:
    with _mapped(library):
        params = bind(structure(unit.row.descriptor.params, options.roots()), launch.values, library)
        maps, keep = _tensor_map_arguments(unit, library, params)
        arguments = (ctypes.addressof(params), *maps)
        symbol = unit.symbol(*launch.words) if launch.words or len(unit.entries) > 1 else unit.entries[0].symbol
        report = library.launch(symbol, arguments, geometry(unit, launch), settings)
        del keep
    return report


def geometry(unit: Unit, launch: Launch) -> Geometry:
    """Grid, threads, shared memory and registers at launch, as the host chooses them."""
    row = unit.row
    is_cut = row.schedule == "persistent" and launch.only_block is None
    grid = min(launch.blocks, launch.max_blocks) if is_cut else launch.blocks
    registers = min(255, 65536 // (row.threads * row.min_blocks) // 8 * 8)  # per thread, as __launch_bounds__ allows
    return Geometry(grid, row.threads, row.smem_bytes(unit.dtype), registers, launch.only_block)


@contextmanager
def _mapped(library: KernelLibrary) -> Iterator[None]:
    try:
        yield
    finally:
        library.clear_buffers()


def bind(kind: Any, values: Mapping[str, Any], library: KernelLibrary) -> ctypes.Structure:
    """The parameter struct, filled by member name; a buffer given for several members is mapped once. An unknown name is a BuildError."""
    members = {name: member for name, member, _ in kind.members}
    if unknown := values.keys() - members:
        msg = f"struct {kind.__name__} has no member {', '.join(sorted(unknown))}; it has: {', '.join(members)}"
        raise BuildError(msg)
    filled: dict[str, Any] = {}
    mapped: dict[int, int] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            filled[name] = bind(members[name], value, library)
        elif isinstance(value, (torch.Tensor, Buffer)):
            buffer = value if isinstance(value, Buffer) else Buffer(value)
            filled[name] = mapped[id(value)] = mapped.get(id(value)) or buffer.map(library, name)
            if (stride := f"{name}_stride") in members and stride not in values:
                filled[stride] = _stride(members[stride], buffer)
        elif value is not None:
            filled[name] = value
    return kind(**filled)  # type: ignore[no-any-return]


def _stride(kind: Any, buffer: Buffer) -> Any:
    """The stride of rows, or (batch, head, row) strides for a struct."""
    if not issubclass(kind, ctypes.Structure):
        return buffer.strides[-1]
    return kind(**dict(zip(STRIDES, buffer.strides, strict=True)))


def _tensor_map_arguments(
    unit: Unit, library: KernelLibrary, params: ctypes.Structure
) -> tuple[tuple[int, ...], object]:
    """Addresses of the kernel's tensor maps, and the object that keeps their memory alive."""
    count = len(map_parameters(unit.row.descriptor))
    if count == 0:
        return (), None
    memory = ctypes.create_string_buffer(count * MAP_BYTES + 64)
    base = (ctypes.addressof(memory) + 63) // 64 * 64
    encode = library.function("emulation_encode_maps")
    encode.restype = ctypes.c_char_p
    encode.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    problem = encode(ctypes.addressof(params), base)
    if problem is not None:
        msg = f"the host's tensor maps are refused: {problem.decode()}"
        raise TensorMapError(msg)
    return tuple(base + MAP_BYTES * index for index in range(count)), memory
