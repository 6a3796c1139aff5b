"""Operator calls as data: descriptions for the extension, tensors made from them, and calls with one field changed."""

from __future__ import annotations

import ctypes
import inspect
import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "bool", "float8_e4m3fn")
HUGE = 2**31  # a size that no kernel supports
FAR = 2**32  # elements between the first and the last, which do not fit 32 bits
RESERVED = 2**30  # bytes; above this size only pages that are touched are allocated
MAP_NORESERVE = 0x4000
MPROTECT = ctypes.CDLL(None, use_errno=True).mprotect


class BrokenError(Exception):
    """The first rule that a call breaks, with the values that its message contains."""

    def __init__(self, rule: str, **values: object) -> None:
        super().__init__(rule)
        self.rule, self.values = rule, {name: text_of(value) for name, value in values.items()}


def text_of(value: object) -> str:
    """The value as a C++ stream writes it."""
    if isinstance(value, tuple):
        return str(list(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def need(holds: bool, rule: str, **values: object) -> None:
    if not holds:
        raise BrokenError(rule, **values)


def contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in sizes[axis + 1 :]) for axis in range(len(sizes)))


@dataclass(frozen=True)
class T:
    """A tensor's description. ``values``: its first elements, which repeat; if empty, numbers around 0."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    device: str = "cpu"
    values: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def words(self) -> str:
        return " ".join(map(str, ("tensor", self.dtype, self.device, self.rank, *self.sizes, *self.strides)))

    def with_sizes(self, sizes: tuple[int, ...]) -> T:
        return replace(self, sizes=sizes, strides=contiguous(sizes))

    def with_large_stride(self, axis: int) -> T:
        """The same elements, with those of one axis far apart; rows stay aligned to 16 bytes."""
        step = -(-FAR // (self.sizes[axis] - 1) // 64) * 64
        return replace(self, strides=(*self.strides[:axis], step, *self.strides[axis + 1 :]))

    def real(self, is_written: bool = False) -> Tensor:
        """A tensor with these elements in this layout, and NaN between them; cached unless it is written. The page after
        its last element is inaccessible, and a tensor that is not written is read-only: a kernel that violates this ends the process."""
        is_kept = not is_written and max(self.strides, default=0) < RESERVED
        return self._real() if is_kept else self._real.__wrapped__(self, is_written)

    @lru_cache(maxsize=4096)  # noqa: B019  # descriptions in one test
    def _real(self, is_written: bool = False) -> Tensor:
        dtype, count = getattr(torch, self.dtype), math.prod(self.sizes)
        span = (
            1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)) if count else 0
        )
        flat = elements(dtype, max(count, span * (0 in self.strides)), self.values, len(self.sizes) + count)
        if not span:
            return flat.as_strided(self.sizes, self.strides)
        memory, protect = guarded_buffer(span * dtype.itemsize)
        made = memory.view(dtype).as_strided(self.sizes, self.strides)
        if 0 in self.strides:
            memory.view(dtype).copy_(flat[:span])
        else:
            made.copy_(flat[:count].view(self.sizes))
        protect(mmap.PROT_READ | (mmap.PROT_WRITE if is_written else 0))
        return made


@lru_cache(maxsize=4096)
def elements(dtype: torch.dtype, count: int, values: tuple[int, ...], seed: int) -> Tensor:
    if values:
        return torch.tensor(values)[torch.arange(count) % len(values)].to(dtype)
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) / 3).to(dtype)


def guarded_buffer(size: int) -> tuple[Tensor, Callable[[int], None]]:
    """A buffer of ``size`` bytes, each 255 (0 if there are many), that ends at an inaccessible page; and a function that sets its access."""
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    held = mmap.mmap(-1, length + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(held))

    def protect(access: int, first: int = begin, extent: int = length) -> None:
        status = MPROTECT(ctypes.c_void_p(first), ctypes.c_size_t(extent), access)
        assert status == 0, ctypes.get_errno()

    protect(0, begin + length, mmap.PAGESIZE)
    memory = torch.frombuffer(held, dtype=torch.uint8, count=size, offset=length - size)
    return memory if size > RESERVED else memory.fill_(255), protect


def outside(tensor: Tensor) -> Tensor:
    """The bytes of its memory that belong to none of its elements; empty for tensors with elements far apart."""
    if tensor.untyped_storage().nbytes() > RESERVED:
        return torch.empty(0)
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()
    memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).zero_()
    return memory


Call = dict[str, Any]  # an operator's arguments in the order of its schema


def t(dtype: str, *sizes: int, values: tuple[int, ...] = ()) -> T:
    return T(dtype, sizes, contiguous(sizes), values=values)


def ints(*values: int) -> T:
    return t("int32", len(values), values=values)


def words_of(call: Call) -> str:
    """The call in the text form that csrc/host/arguments.h reads."""

    def line(value: Any) -> str:
        if value is None or isinstance(value, T):
            return "none" if value is None else value.words
        return (
            f"text {value}" if isinstance(value, str) else f"value {int(value) if isinstance(value, bool) else value}"
        )

    return "".join(f"{line(value)}\n" for value in call.values())


def changed_tensor(tensor: T) -> Iterator[tuple[str, T | None]]:
    """The tensor with each field changed in turn."""
    yield "is None", None
    for dtype in DTYPES:
        if dtype != tensor.dtype:
            yield f"is {dtype}", replace(tensor, dtype=dtype)
    yield "is on meta", replace(tensor, device="meta")
    yield "is on another GPU", replace(tensor, device="cuda:1")
    yield "has one dimension more", tensor.with_sizes((1, *tensor.sizes))
    if tensor.rank:
        yield "has one dimension less", tensor.with_sizes(tensor.sizes[1:])
        yield "has gaps", replace(tensor, strides=tuple(2 * stride for stride in tensor.strides))
    if tensor.rank > 1:
        yield "has its first stride one longer", replace(tensor, strides=(tensor.strides[0] + 1, *tensor.strides[1:]))
        last, second = tensor.sizes[-1], tensor.strides[-1]
        transposed = (*contiguous((*tensor.sizes[:-2], last, tensor.sizes[-2]))[:-2], second, tensor.sizes[-2])
        yield "is transposed", replace(tensor, strides=transposed)
        yield "is a column", replace(tensor.with_sizes((*tensor.sizes[:-1], 1)), strides=transposed)
    for axis, size in enumerate(tensor.sizes):
        for other in dict.fromkeys((size + 1, size - 1, 0, 1, HUGE)):
            if other not in (size, -1):
                sizes = (*tensor.sizes[:axis], other, *tensor.sizes[axis + 1 :])
                yield f"has size {other} in {axis}", tensor.with_sizes(sizes)
        strides = (*tensor.strides[:axis], 0, *tensor.strides[axis + 1 :])
        yield f"is expanded in {axis}", replace(tensor, strides=strides)
        wider = (*tensor.sizes[:axis], size + 1, *tensor.sizes[axis + 1 :])
        yield f"is a part in {axis}", replace(tensor, strides=contiguous(wider))


def changes(
    make: Callable[..., Call],
    sizes: dict[str, tuple[int, ...]],
    numbers: dict[str, tuple[Any, ...]],
    of: Callable[..., Call] | None = None,
) -> Iterator[tuple[str, Call]]:
    """The valid call itself on each device; with each size changed everywhere it occurs; with each argument changed separately.

    ``sizes``: more sizes by the names of ``make``'s parameters, or ``of``'s. ``numbers``: values for arguments that are not tensors, and for tensor elements.
    """
    call = make()
    yield "as it is", call
    for name, parameter in inspect.signature(of or make).parameters.items():
        for size in dict.fromkeys((0, parameter.default + 1, 1, *sizes.get(name, ()))):
            yield f"{name} is {size}", make(**{name: size})
    for device in ("cpu", "cuda:0", "xpu:0"):
        there = {name: replace(value, device=device) if isinstance(value, T) else value for name, value in call.items()}
        if device != "cpu":
            yield f"all on {device}", there
            for dtype in DTYPES:
                first = next(value.dtype for value in call.values() if isinstance(value, T))
                alike = {
                    n: replace(v, dtype=dtype) if isinstance(v, T) and v.dtype == first else v for n, v in there.items()
                }
                yield f"all {first} is {dtype} on {device}", alike
        for name, value in there.items():
            if isinstance(value, T) and device != "xpu:0":
                for what, other in changed_tensor(value):
                    yield f"{name} {what}, {device}", {**there, name: other}
    for name, values in numbers.items():
        for value in values if call.get(name) is not None else ():
            other = replace(call[name], values=value) if isinstance(value, tuple) else value
            yield f"{name} is {value}", {**call, name: other}
