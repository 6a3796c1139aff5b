"""Builds the library of small test kernels, and launches them."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashmoe_build.emulation.build import Options, library
from flashmoe_build.emulation.machine import Geometry, KernelLibrary, LaunchReport, Settings

KERNELS = Path(__file__).parent / "kernels" / "machine.cuh"
BARRIER_OFFSET = 2 * 2 * 64 * 128 + 64 * 128


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For references of thousands of small problems."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Params(ctypes.Structure):
    """machine_test::Params of kernels/machine.cuh."""

    _fields_ = [
        ("input", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("counter", ctypes.c_uint64),
        ("fault", ctypes.c_int32),
        ("size", ctypes.c_int32),
    ]


class PipelineParams(ctypes.Structure):
    """machine_test::PipelineParams."""

    _fields_ = [("fault", ctypes.c_int32), ("size", ctypes.c_int32)]


class Machine:
    """Launches the kernels of machine.cuh on torch tensors."""

    def __init__(self, path: Path) -> None:
        self.library = KernelLibrary(path)

    def run(
        self,
        name: str,
        given: torch.Tensor,
        out: torch.Tensor,
        *,
        threads: int,
        shared: int,
        grid: int = 1,
        fault: int = 0,
        size: int = 0,
        registers: int = 128,
        settings: Settings | None = None,
        is_dependent: bool = False,
    ) -> tuple[LaunchReport, int]:
        """One launch; returns the report and the counter afterwards."""
        counter = torch.zeros(1, dtype=torch.int32)
        self.library.clear_buffers()
        params = Params(
            input=self._add(given, "in", writable=False),
            output=self._add(out, "out", writable=True),
            counter=self.library.add_buffer(counter.data_ptr(), 4, writable=True, initialised=True, name="counter"),
            fault=fault,
            size=size,
        )
        if is_dependent:
            self.library.expect_from_preceding_grid(params.input)
        geometry = Geometry(grid, threads, shared, registers)
        report = self.library.launch(name, (ctypes.addressof(params),), geometry, settings or Settings())
        self.library.clear_buffers()
        return report, int(counter[0])

    def pipeline(
        self, name: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, fault: int, settings: Settings
    ) -> LaunchReport:
        """a [64, 64 tiles], b [64 tiles, 64], out [64, 64]."""
        self.library.clear_buffers()
        maps = ctypes.create_string_buffer(3 * 128 + 64)
        base = (ctypes.addressof(maps) + 63) // 64 * 64
        for index, (tensor, writable) in enumerate(((a, False), (b, False), (out, True))):
            self.encode_map(base + 128 * index, self._add(tensor, "ab?"[index], writable=writable), tensor)
        params = PipelineParams(fault=fault, size=a.shape[1] // 64)
        arguments = (ctypes.addressof(params), *(base + 128 * i for i in range(3)))
        report = self.library.launch(name, arguments, Geometry(1, 256, BARRIER_OFFSET + 64, 128), settings)
        self.library.clear_buffers()
        return report

    def encode_map(self, at: int, address: int, tensor: torch.Tensor) -> None:
        rows, columns = tensor.shape
        encode = self.library.function("emulation_encode_tensor_map")
        encode.restype = ctypes.c_char_p
        encode.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_uint64 * 4,
            ctypes.c_uint64 * 3,
            ctypes.c_uint32 * 4,
            ctypes.c_int,
        ]
        dims = (ctypes.c_uint64 * 4)(columns, rows, 1, 1)
        strides = (ctypes.c_uint64 * 3)(columns * 2, 16, 16)
        problem = encode(at, 2, 4, address, dims, strides, (ctypes.c_uint32 * 4)(64, 64, 1, 1), 128)
        assert problem is None, problem

    def _add(self, tensor: torch.Tensor, name: str, *, writable: bool) -> int:
        assert tensor.is_contiguous()
        size = tensor.numel() * tensor.element_size()
        return self.library.add_buffer(tensor.data_ptr(), size, writable=writable, initialised=not writable, name=name)


@pytest.fixture(scope="session")
def machine() -> Machine:
    path = library("machine_test", KERNELS.read_text(encoding="utf-8"), "sm90", Options())
    return Machine(path)
