"""The calls of tests/arguments, on the fake GPUs.

Accepted calls give the CPU's results, and in any layout the bits of contiguous tensors; every element is written."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.arguments.described import BrokenError, Call, T, changes

EXPECTED = "expected.pt"  # beside the library: the CPU's results
LIMIT = 2e-2  # of the largest element of a result
MOST_ELEMENTS = 10**5
# Calls that the loops have no kernel for, or in which they read what no kernel reads: wide heads, float16, pages that
# no sequence owns, scores near a float's limits; and ids of experts that do not exist, whose rows are not written, or
# rows of none.
BEYOND = (
    *("d is 512", "dv is 512", "block_table is (", "scale is 2.35", "scale is -2.35", "scale is 1.17"),
    *("experts is 1", "expert_offsets is expanded", "slot_rows is expanded", "row_slots is expanded"),
)
LAYOUTS = ("as it is", "gaps", "transposed", "expanded", "a part", "column")
FLOAT32 = {"sinks", "lse", "grad_lse", "k_scale", "v_scale", "q_scale", "row_weights"}
RESULTS = {"out", "k_cache", "v_cache"}


def in_16_bits(call: Call) -> Call:
    """As the kernels of a GPU take them."""

    def changed(name: str, value: Any) -> Any:
        is_slopes = name == "mask" and isinstance(value, T) and value.rank == 2
        if not isinstance(value, T) or value.dtype != "float32" or name in FLOAT32 or is_slopes:
            return value
        return replace(value, dtype="bfloat16")

    halves = {name: changed(name, value) for name, value in call.items()}
    # The loops leave the gradients of keys that no row sees, which the kernels clear.
    return {**halves, "seqused_k": None} if {"grad_out", "seqused_k"} <= call.keys() else halves


def accepted(name: str, make: Callable[..., Call], rule: Callable[..., Any], part: Any) -> Iterator[tuple[str, Call]]:
    """Calls with small tensors that the rules of both devices accept and that the loops can read."""
    arguments = getattr(torch.ops.flashmoe, name).default._schema.arguments
    required = [one.name for one in arguments if "Optional" not in str(one.type)]
    for what, call in changes(lambda **sizes: in_16_bits(make(**sizes)), part.SIZES, part.NUMBERS, of=make):
        tensors = [value for value in call.values() if isinstance(value, T)]
        if what.startswith(BEYOND) or any(one.dtype == "float16" for one in tensors):
            continue
        if "grad_out" in call and call.get("softcap", 0.0) > 0 and call["mask"] and call["mask"].rank == 2:
            continue  # slopes with a softcap, which the forward refuses
        is_small = all(one.device == "cpu" and math.prod(one.sizes) < MOST_ELEMENTS for one in tensors)
        if not is_small or any(call[one] is None for one in required):
            continue
        ints = {n: v.real().tolist() for n, v in call.items() if isinstance(v, T) and v.dtype == "int32"}
        there = {n: replace(v, device="cuda:0") if isinstance(v, T) else v for n, v in call.items()}
        try:
            rule(call, ints)
            rule(there, ints)
        except BrokenError:
            continue
        if not has_rows_of_no_sequence(call, ints):
            yield what, call


def has_rows_of_no_sequence(call: Call, ints: dict[str, list[int]]) -> bool:
    """A GPU's kernels leave such rows undefined."""
    return any(
        ends in ints and isinstance(call[of], T) and ints[ends][-1] < call[of].sizes[0]
        for of, ends in (("q", "cu_seqlens_q"), ("k", "cu_seqlens_k"))
    )


def results(
    name: str, call: Call, contiguous: bool, watch: Callable[[list[Tensor]], None] = lambda results: None
) -> list[Tensor]:
    given = [value.real(is_written=True) if isinstance(value, T) else value for value in call.values()]
    if contiguous:
        whole = torch.contiguous_format
        given = [value.clone(memory_format=whole) if isinstance(value, Tensor) else value for value in given]
    with torch.inference_mode():
        found = getattr(torch.ops.flashmoe, name)(*given)
    listed = list(found) if isinstance(found, tuple) else [found]
    listed += [value for one, value in zip(call, given, strict=True) if one in RESULTS and "grad_out" not in call]
    watch([value for value in listed if isinstance(value, Tensor)])
    return [value.float() for value in listed if isinstance(value, Tensor)]


def on_the_cpu(part: Any, path: Path) -> None:
    """Writes the results of each call of each row whose operator the CPU has."""
    known = {}
    for number, (name, make, rule) in enumerate(part.ROWS):
        if hasattr(torch.ops.flashmoe, name) and torch._C._dispatch_has_kernel_for_dispatch_key(
            f"flashmoe::{name}", "CPU"
        ):
            for what, call in accepted(name, make, rule, part):
                known[f"{number}, {what}"] = results(name, call, False)
    torch.save(known, path)


def is_close(one: Tensor, other: Tensor) -> bool:
    finite = other[other.isfinite()].abs()
    return torch.allclose(one, other, rtol=0, atol=LIMIT * float(finite.max()) if finite.numel() else 0.0)


@cache
def given_by_the_cpu() -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = torch.load(Path(os.environ["FLASHMOE_LIBRARY"]).with_name(EXPECTED))
    return found


def differences(
    number: int, part: Any, layouts_alone: bool, watch: Callable[[list[Tensor]], None] = lambda results: None
) -> list[str]:
    """``watch`` receives the results of each call as it returns."""
    name, make, rule = part.ROWS[number]
    wrong, known = [], given_by_the_cpu()
    for what, call in accepted(name, make, rule, part):
        is_layout = any(word in what for word in LAYOUTS)
        if layouts_alone and not is_layout:
            continue
        found, told = results(name, call, False, watch), f"{name}, {what}"
        wrong += [f"{told}: not every number is written" for one in found if one.isnan().any()]
        for one, other in zip(found, known.get(f"{number}, {what}", ()), strict=False):
            if one.shape != other.shape or not is_close(one, other):
                wrong.append(f"{told}: {tuple(one.shape)}, not the results of the CPU")
        if is_layout:
            plain = results(name, call, True, watch)
            wrong += [f"{told}: not the bits of contiguous tensors" for one, other in zip(found, plain, strict=True)
                      if not torch.equal(one.nan_to_num(), other.nan_to_num())]  # fmt: skip
    return wrong
