"""The CUDA driver through ctypes: version and GPUs, without torch and without a CUDA runtime."""

import ctypes
from collections.abc import Callable
from typing import Any

from flashmoe_tools.doctor.facts import Driver, Gpu

COMPUTE_CAPABILITY_MAJOR = 75  # CUdevice_attribute
COMPUTE_CAPABILITY_MINOR = 76
LIBRARY = "libcuda.so.1"


class CudaError(Exception):
    """A driver call failed; the text is CUDA's own name for the error."""


def read_driver(load: Callable[[str], Any] = ctypes.CDLL) -> Driver:
    """Version and GPUs; never raises: what failed is in ``error``."""
    try:
        cuda = load(LIBRARY)
    except OSError:
        return Driver()
    version = 0
    try:
        version = read_number(cuda, cuda.cuDriverGetVersion)
        check_status(cuda, cuda.cuInit(0))
        gpus = tuple(_gpu(cuda, index) for index in range(read_number(cuda, cuda.cuDeviceGetCount)))
    except (CudaError, AttributeError) as error:
        return Driver(version, error=str(error))
    return Driver(version, gpus)


def _gpu(cuda: Any, index: int) -> Gpu:
    device = read_number(cuda, cuda.cuDeviceGet, index)
    name = ctypes.create_string_buffer(256)
    check_status(cuda, cuda.cuDeviceGetName(name, len(name), device))
    major = read_number(cuda, cuda.cuDeviceGetAttribute, COMPUTE_CAPABILITY_MAJOR, device)
    minor = read_number(cuda, cuda.cuDeviceGetAttribute, COMPUTE_CAPABILITY_MINOR, device)
    return Gpu(name.value.decode(errors="replace"), (major, minor))


def read_number(cuda: Any, call: Callable[..., int], *arguments: int) -> int:
    result = ctypes.c_int()
    check_status(cuda, call(ctypes.byref(result), *arguments))
    return result.value


def check_status(cuda: Any, status: int) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(text))
    raise CudaError(text.value.decode() if text.value else f"CUDA error {status}")
