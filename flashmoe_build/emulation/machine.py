"""ctypes binding of an emulated kernel library: buffers in, a report out."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from flashmoe.errors import InternalError


class AsyncPolicy(int, Enum):
    """When work in flight (cp.async, tensor copies, wgmma) takes effect."""

    FROM_SEED = -1
    LAZY = 0  # at the wait that guarantees it, no earlier
    EAGER = 1  # immediately
    RANDOM = 2  # at random moments in a random order, both seeded


@dataclass(frozen=True)
class TensorCore:
    """How a generation of tensor cores adds: products per step, and extra bits kept below a float's 24."""

    block: int
    extra_bits: int


# Khattak and Mikaitis, arXiv 2512.07004: A100 and H100. T4 is taken to be like their V100.
TENSOR_CORES: Mapping[str, TensorCore] = {"t4": TensorCore(4, 0), "a100": TensorCore(8, 1), "h100": TensorCore(16, 2)}


class _Launch(ctypes.Structure):
    """struct Launch of csrc/emulation/api.h."""

    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_int32),
        ("first_block", ctypes.c_int32),
        ("run_blocks", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("resident_blocks", ctypes.c_int32),
        ("registers", ctypes.c_int32),
        ("tensor_core_block", ctypes.c_int32),
        ("tensor_core_extra_bits", ctypes.c_int32),
        ("async_policy", ctypes.c_int32),
        ("check_races", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("step_limit", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Geometry:
    """The launch configuration."""

    grid: int
    threads: int
    shared_bytes: int
    registers: int  # per thread, at launch
    only_block: int | None = None  # the only block to run if the problem is too large


@dataclass(frozen=True)
class Settings:
    """Settings that may differ between runs of the same launch."""

    seed: int = 0
    policy: AsyncPolicy = AsyncPolicy.FROM_SEED
    resident_blocks: int = 2
    check_races: bool = True
    core: TensorCore = TENSOR_CORES["h100"]
    step_limit: int = 20_000_000


@dataclass(frozen=True)
class Failure:
    """A typed failure. ``kind`` is a name of FailureKind (csrc/emulation/failure.h)."""

    kind: str
    message: str
    what: str
    file: str
    line: int
    function: str
    block: int
    thread: int
    warp: int
    lane: int

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} ({self.function})" if self.line else "no single call site"
        who = f"block {self.block}, warp {self.warp}, lane {self.lane}" if self.thread >= 0 else "no single thread"
        return f"{self.kind}: {self.what}: {self.message}\n  at {where}\n  {who}"


@dataclass(frozen=True)
class LaunchReport:
    """What one emulated launch did."""

    kernel: str
    seed: int
    seconds: float  # on one core
    async_policy: str
    statistics: Mapping[str, int] = field(default_factory=dict)
    failure: Failure | None = None

    @classmethod
    def from_json(cls, text: str) -> LaunchReport:
        fields: dict[str, Any] = json.loads(text)
        failure = fields.pop("failure")
        return cls(failure=None if failure is None else Failure(**failure), **fields)


class KernelLibrary:
    """One emulated kernel unit. The addresses that it returns are for kernel parameters; the host never dereferences them."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "emulation_add_buffer": (
                ctypes.c_uint64,
                [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_char_p],
            ),
            "emulation_reserve": (ctypes.c_uint64, [ctypes.c_uint64]),
            "emulation_map_buffer": (
                None,
                [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_char_p],
            ),
            "emulation_expect_from_grid_in_front": (None, [ctypes.c_uint64]),
            "emulation_clear_buffers": (None, []),
            "emulation_launch": (ctypes.c_char_p, [ctypes.POINTER(_Launch)]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self._library, name)
            function.restype = result
            function.argtypes = arguments

    def function(self, name: str) -> Any:
        """Another C function of the library."""
        return getattr(self._library, name)

    def add_buffer(self, pointer: int, size: int, *, writable: bool, initialised: bool, name: str) -> int:
        """Maps host memory and returns its address for the kernel."""
        return int(self._library.emulation_add_buffer(pointer, size, writable, initialised, name.encode()))

    def reserve(self, size: int) -> int:
        """Reserves address space for ``map_buffer``."""
        return int(self._library.emulation_reserve(size))

    def map_buffer(
        self, address: int, pointer: int, size: int, *, writable: bool, initialised: bool, name: str
    ) -> None:
        self._library.emulation_map_buffer(address, pointer, size, writable, initialised, name.encode())

    def expect_from_preceding_grid(self, address: int) -> int:
        """The buffer at ``address`` is written by the preceding launch, which a dependent launch must wait for."""
        self._library.emulation_expect_from_grid_in_front(address)
        return address

    def clear_buffers(self) -> None:
        self._library.emulation_clear_buffers()

    def launch(self, symbol: str, arguments: tuple[int, ...], geometry: Geometry, settings: Settings) -> LaunchReport:
        """Runs ``emulation_entry_<symbol>``; ``arguments`` are host addresses of the kernel's parameters."""
        entry = ctypes.cast(self.function(f"emulation_entry_{symbol}"), ctypes.c_void_p)
        table = (ctypes.c_void_p * len(arguments))(*arguments)
        launch = _Launch(
            entry=entry,
            arguments=ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p)),
            name=symbol.encode(),
            grid=geometry.grid,
            first_block=geometry.only_block or 0,
            run_blocks=geometry.grid if geometry.only_block is None else 1,
            block=geometry.threads,
            shared_bytes=geometry.shared_bytes,
            resident_blocks=settings.resident_blocks,
            registers=geometry.registers,
            tensor_core_block=settings.core.block,
            tensor_core_extra_bits=settings.core.extra_bits,
            async_policy=settings.policy.value,
            check_races=settings.check_races,
            seed=settings.seed,
            step_limit=settings.step_limit,
        )
        text = self._library.emulation_launch(ctypes.byref(launch))
        if text is None:
            msg = "the emulated launch returned no report"
            raise InternalError(msg)
        return LaunchReport.from_json(text.decode())
