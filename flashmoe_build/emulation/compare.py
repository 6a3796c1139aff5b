"""Compares a kernel's results with the expected ones."""

from collections.abc import Mapping

import torch

from flashmoe_tools.operations.dtypes import TORCH_DTYPES

DTYPES = {name: TORCH_DTYPES[name] for name in ("f16", "bf16")}
# Half a unit in the last place, relative: the error of rounding to the type.
UNIT_ROUNDOFF = {"f16": 2.0**-11, "bf16": 2.0**-8}
UNTOUCHED = 7.0  # fills memory that a kernel must not write

Expected = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # by result: value in fp64, and error bound


def worst_element(name: str, actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> list[str]:
    """Describes the element furthest outside its bound; empty if there is none. NaN must be NaN, infinity the same infinity."""
    error = (actual.double() - expected).abs()
    same = (torch.isnan(actual) & torch.isnan(expected)) | (torch.isinf(expected) & (actual.double() == expected))
    wrong = ~((error <= bound) | same)
    if not wrong.any():
        return []
    worst = (error - bound).nan_to_num(float("inf")).where(wrong, float("-inf"))
    index = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
    text = (
        f"{name} is wrong at {int(wrong.sum())} of {wrong.numel()} elements; worst at {list(index)}: "
        f"{float(actual[index]):.6g} instead of {float(expected[index]):.6g} (bound {float(bound[index]):.2e})"
    )
    return [text]


def different(name: str, actual: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """Describes the first element that differs in a result that must be exact; empty if there is none."""
    wrong = (actual != expected).nonzero()
    if wrong.numel() == 0:
        return []
    index = tuple(int(i) for i in wrong[0])
    text = f"{name} is wrong at {len(wrong)} of {actual.numel()} elements; first at {list(index)}: "
    return [f"{text}{actual[index].item()} instead of {expected[index].item()}"]


def touched(name: str, beside: torch.Tensor, value: float = UNTOUCHED) -> list[str]:
    """Describes a change to memory beside a result, which must stay ``value``."""
    kept = torch.isnan(beside) if value != value else beside == value
    changed = int((~kept).sum())
    return [f"{changed} elements beside {name} were written"] if changed else []
