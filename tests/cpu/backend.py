"""The CPU backend without operators, called through ctypes and run on torch's thread pool."""

import ctypes
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashmoe_build.compile.cache import Cache
from flashmoe_build.compile.host import compile_source, is_for, sanitizers
from flashmoe_build.compile.jobs import run_all
from flashmoe_build.compile.toolchain import find_toolchain
from flashmoe_build.emulation.parameters import structure
from flashmoe_tools.descriptors import Header

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
# The layer in moe/cpu is tested through its operators (tests/moe); here only that no wide instructions leave its objects.
FOLDERS = ("cpu", "attention/cpu", "moe/cpu")
SOURCES = [path for name in FOLDERS for path in sorted((CSRC / name).glob("*.cpp")) if is_for(path, platform.machine())]
ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx") if platform.machine() == "x86_64" else ("neon",)
SCALAR_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MESSAGE_BYTES = 1024


def _structure(name: str, header: str) -> Any:
    return structure(Header(name, header), [CSRC])


Params = _structure("ForwardParams", "attention/params/forward.h")
BackwardParams = _structure("BackwardParams", "attention/params/backward.h")
STRIDES = dict(Params._fields_)["q_stride"]


class BackendError(RuntimeError):
    """A C++ exception with its message."""


def build(folder: Path) -> Path:
    """Compiles the backend's objects as the build does, using its cache, and the shim; returns the shared library. Objects are
    named after their sources."""
    toolchain = find_toolchain()
    cache = Cache(Path(os.environ.get("FLASHMOE_CACHE_DIR") or ROOT / "build" / "cache"))
    sources = [*SOURCES, Path(__file__).with_name("shim.cpp")]

    def compiled(source: Path) -> Path:
        made, _ = compile_source(source, root=ROOT, out=folder, toolchain=toolchain, cache=cache)
        return made.replace(folder / f"{source.stem}.o")

    objects = run_all(sources, compiled, jobs=2)
    library = folder / "libcpu.so"
    link = [toolchain.cxx, "-shared", "-Wl,--exclude-libs,ALL", *sanitizers(os.environ)]
    if not sanitizers(os.environ):  # the process provides their functions
        link.append("-Wl,--no-undefined")
    subprocess.run([*link, "-o", str(library), *map(str, objects)], check=True)
    return library


def _tensors(**tensors: Tensor | None) -> dict[str, Any]:
    """Members of parameters: addresses and, for tensors with four dimensions, strides."""
    members: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        members[name] = tensor.data_ptr()
        if tensor.dim() == 4:
            assert tensor.stride(3) == 1 or tensor.shape[-1] <= 1
            members[f"{name}_stride"] = STRIDES(*tensor.stride()[:3])
    return members


def _sizes(q: Tensor, k: Tensor) -> dict[str, int]:
    names = ("batch", "heads_q", "seq_q", "head_dim", "heads_kv", "seq_k", "head_dim_v")
    return dict(zip(names, (*q.shape, *k.shape[1:]), strict=True))


class Backend:
    """The library. Outputs are filled with NaN before each call, to detect elements that are not written."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.cpu_supported_isas.restype = ctypes.c_char_p
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        self._parallel_for = ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p)
        self._message = ctypes.create_string_buffer(MESSAGE_BYTES)

    def _check(self, status: int) -> None:
        if status != 0:
            raise BackendError(self._message.value.decode())

    @property
    def supported(self) -> list[str]:
        names: bytes = self._library.cpu_supported_isas()
        return names.decode().split(", ")

    def set_isa(self, name: str | None) -> None:
        encoded = None if name is None else name.encode()
        self._check(self._library.cpu_set_isa(encoded, self._message, ctypes.c_size_t(MESSAGE_BYTES)))

    def selected_isa(self) -> str:
        self._check(self._library.cpu_selected_isa(self._message, ctypes.c_size_t(MESSAGE_BYTES)))
        return self._message.value.decode()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        scale: float | None = None,
        *,
        threads: int = 2,
        out: Tensor | None = None,
        **changes: int,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse). ``out``: where to write, any strides. ``changes``: fields of Params to set."""
        batch, heads, seq_q, head_dim = q.shape
        out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format) if out is None else out
        lse = torch.full((batch, heads, seq_q), torch.nan)
        params = Params(
            **_tensors(q=q, k=k, v=v, out=out, lse=lse),
            **_sizes(q, k),
            num_splits=1,
            scale=head_dim**-0.5 if scale is None else scale,
        )
        for name, value in changes.items():
            setattr(params, name, value)
        status = self._library.cpu_forward(
            ctypes.byref(params),
            SCALAR_TYPES[q.dtype],
            int(causal),
            self._parallel_for,
            threads,
            self._message,
            ctypes.c_size_t(MESSAGE_BYTES),
        )
        self._check(status)
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        grad_lse: Tensor | None = None,
        threads: int = 2,
        wanted: tuple[bool, bool, bool] = (True, True, True),
        gradients: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """(dq, dk, dv), in contiguous memory unless given; NaN if a gradient is not ``wanted``."""
        head_dim = q.shape[3]
        gradients = list(gradients) or [torch.full(x.shape, torch.nan, dtype=x.dtype) for x in (q, k, v)]
        dq, dk, dv = (gradient if is_wanted else None for gradient, is_wanted in zip(gradients, wanted, strict=True))
        params = BackwardParams(
            **_tensors(q=q, k=k, v=v, out=out, dout=grad_out, lse=lse, dlse=grad_lse, dq=dq, dk=dk, dv=dv),
            **_sizes(q, k),
            scale=head_dim**-0.5 if scale is None else scale,
        )
        status = self._library.cpu_backward(
            ctypes.byref(params),
            SCALAR_TYPES[q.dtype],
            int(causal),
            self._parallel_for,
            threads,
            self._message,
            ctypes.c_size_t(MESSAGE_BYTES),
        )
        self._check(status)
        return gradients
