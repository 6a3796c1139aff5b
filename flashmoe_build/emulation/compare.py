"""How a kernel's results are compared with what they must be."""

from collections.abc import Mapping

import torch

from flashmoe_tools.operations.dtypes import TORCH_DTYPES

DTYPES = {name: TORCH_DTYPES[name] for name in ("f16", "bf16")}
# Half a unit in the last place, relative: what rounding to the type may cost.
UNIT_ROUNDOFF = {"f16": 2.0**-11, "bf16": 2.0**-8}
UNTOUCHED = 7.0  # stands where a kernel must leave memory alone

Expected = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # by result: value in fp64, and bound of the error


def worst_element(name: str, actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> list[str]:
    """Where a result is furthest outside its bound, in words; empty when nowhere. NaN must be NaN, infinity the same infinity."""
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
    """The first element of a result that must be exact and is not."""
    wrong = (actual != expected).nonzero()
    if wrong.numel() == 0:
        return []
    index = tuple(int(i) for i in wrong[0])
    text = f"{name} is wrong at {len(wrong)} of {actual.numel()} elements; first at {list(index)}: "
    return [f"{text}{actual[index].item()} instead of {expected[index].item()}"]


def touched(name: str, beside: torch.Tensor, value: float = UNTOUCHED) -> list[str]:
    """What stands beside a result must stay."""
    kept = torch.isnan(beside) if value != value else beside == value
    changed = int((~kept).sum())
    return [f"{changed} elements beside {name} were written"] if changed else []
