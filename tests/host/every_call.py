"""The calls of tests/arguments, on the fake GPUs: a layout that is taken gives the bits of contiguous tensors, each number written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.arguments.described import HUGE, BrokenError, Call, T, changes

LAYOUTS = ("as it is", "gaps", "transposed", "expanded", "a part", "column")
FLOAT32 = {"sinks", "lse", "grad_lse", "k_scale", "v_scale", "q_scale"}
RESULTS = {"out", "k_cache", "v_cache"}


def in_16_bits(call: Call) -> Call:
    """What kernels of a GPU take."""

    def changed(name: str, value: Any) -> Any:
        is_slopes = name == "mask" and isinstance(value, T) and value.rank == 2
        if not isinstance(value, T) or value.dtype != "float32" or name in FLOAT32 or is_slopes:
            return value
        return replace(value, dtype="bfloat16")

    halves = {name: changed(name, value) for name, value in call.items()}
    # The loops leave the gradients of keys that no row sees, which the kernels clear.
    return {**halves, "seqused_k": None} if "grad_out" in call else halves


def accepted(make: Callable[..., Call], rule: Callable[..., Any]) -> Iterator[tuple[str, Call]]:
    for what, call in changes(lambda: in_16_bits(make()), {}, {}):
        tensors = [value for value in call.values() if isinstance(value, T)]
        is_real = all(one.device == "cpu" and max(one.sizes, default=0) < HUGE for one in tensors)
        if is_real and any(word in what for word in LAYOUTS):
            ints = {n: v.real().tolist() for n, v in call.items() if isinstance(v, T) and v.dtype == "int32"}
            there = {n: replace(v, device="cuda:0") if isinstance(v, T) else v for n, v in call.items()}
            try:
                rule(there, ints)
            except BrokenError:
                continue
            yield what, call


def results(name: str, call: Call, contiguous: bool) -> list[Tensor]:
    given = [value.real(is_written=True) if isinstance(value, T) else value for value in call.values()]
    if contiguous:
        whole = torch.contiguous_format
        given = [value.clone(memory_format=whole) if isinstance(value, Tensor) else value for value in given]
    with torch.inference_mode():
        found = getattr(torch.ops.flashmoe, name)(*given)
    listed = list(found) if isinstance(found, tuple) else [found]
    listed += [value for one, value in zip(call, given, strict=True) if one in RESULTS]
    return [value.float() for value in listed if isinstance(value, Tensor)]


def differences(name: str, make: Callable[..., Call], rule: Callable[..., Any]) -> list[str]:
    wrong = []
    for what, call in accepted(make, rule):
        for mine, plain in zip(results(name, call, False), results(name, call, True), strict=True):
            if mine.isnan().any():
                wrong.append(f"{name}, {what}: not every number is written")
            elif not torch.equal(mine, plain):
                wrong.append(f"{name}, {what}: not the bits of contiguous tensors")
    return wrong
