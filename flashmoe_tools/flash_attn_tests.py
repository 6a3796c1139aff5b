"""A pytest plugin that runs flash_attn's unchanged test files on flashmoe's functions.

    python -m pytest -p flashmoe_tools.flash_attn_tests -c /dev/null -n 12 --draw 400 --draw-seed 7 FOLDER/test_flash_attn.py

The caller provides the file; it needs einops. Of its hundreds of thousands of parameter sets the same number is drawn
by seed for each test function; they are named as pytest names them without this plugin. ``--draw-pairs`` draws enough
that each pair of values of two parameters occurs. ``--on-cpu`` replaces "cuda" by the CPU.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

import flashmoe.compat

HOPPER = (9, 0)
PAIRS = -1  # used as a count


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flash_attn")
    group.addoption("--draw", type=int, default=0, help="parameters of each test function; 0 for all")
    group.addoption(
        "--draw-pairs", action="store_true", help="parameters in which each pair of values of two occurs, instead"
    )
    group.addoption("--draw-seed", type=int, default=0, help="which ones")
    group.addoption("--on-cpu", action="store_true", help="run on the CPU what asks for a GPU")


def pytest_configure(config: pytest.Config) -> None:
    flashmoe.compat.install_as_flash_attn()
    flashmoe.compat.install_as_flash_attn_3()
    if config.getoption("--on-cpu"):
        stack = ExitStack()
        card = SimpleNamespace(total_memory=80 << 30, multi_processor_count=132)
        for name, answer in (
            *(("get_device_capability", HOPPER), ("get_device_properties", card)),
            *(("synchronize", None), ("empty_cache", None)),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
        stack.enter_context(OnCpu())
        config.add_cleanup(stack.close)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: Any) -> Iterator[Any]:
    config = collector.config
    count = PAIRS if config.getoption("--draw-pairs") else config.getoption("--draw")
    if count and name.startswith("test_") and getattr(obj, "pytestmark", None):
        obj.pytestmark = drawn(obj.pytestmark, count, random.Random(f"{config.getoption('--draw-seed')} {name}"))
    return (yield)


def drawn(marks: Sequence[pytest.Mark], count: int, numbers: random.Random) -> list[pytest.Mark]:
    """Replaces all parametrize marks by one with ``count`` (or PAIRS) tuples from their product, without repetition."""
    axes = [Axis(mark) for mark in marks if mark.name == "parametrize"]
    others = [mark for mark in marks if mark.name != "parametrize"]
    sizes = [len(axis.values) for axis in axes]
    if count != PAIRS and math.prod(sizes) <= count:
        return list(marks)
    chosen = pairwise(sizes, numbers) if count == PAIRS else sampled(sizes, count, numbers)
    rows = []
    for indices in chosen:
        row = [value for axis, index in zip(axes, indices, strict=True) for value in axis.values[index]]
        rows.append(
            pytest.param(*row, id="-".join(axis.words(index) for axis, index in zip(axes, indices, strict=True)))
        )
    names = [name for axis in axes for name in axis.names]
    return [pytest.mark.parametrize(names, rows).mark, *others]


def sampled(sizes: Sequence[int], count: int, numbers: random.Random) -> list[tuple[int, ...]]:
    """``count`` tuples of indices below ``sizes``, the first index changing fastest."""
    found = []
    for number in sorted(numbers.sample(range(math.prod(sizes)), count)):
        indices = []
        for size in sizes:
            number, index = divmod(number, size)
            indices.append(index)
        found.append(tuple(indices))
    return found


def pairwise(sizes: Sequence[int], numbers: random.Random) -> list[tuple[int, ...]]:
    """Tuples of indices below ``sizes`` that contain every pair of indices of every two axes.

    Each tuple starts from a missing pair. Every other axis, in random order, gets the index that covers the most
    missing pairs.
    """
    axes = range(len(sizes))
    missing = {((a, i), (b, j)) for a in axes for b in axes if a < b for i in range(sizes[a]) for j in range(sizes[b])}
    if len(sizes) < 2:
        return [(index,) for size in sizes for index in range(size)]
    order = sorted(missing)
    numbers.shuffle(order)
    found = []
    for pair in order:
        if pair not in missing:
            continue
        row = dict(pair)
        for axis in numbers.sample([axis for axis in axes if axis not in row], len(sizes) - 2):
            choices = numbers.sample(range(sizes[axis]), sizes[axis])
            row[axis] = max(choices, key=lambda i: sum(_pair((axis, i), at) in missing for at in row.items()))
        missing -= {_pair(one, other) for one in row.items() for other in row.items()}
        found.append(tuple(row[axis] for axis in axes))
    return sorted(found)


def _pair(one: tuple[int, int], other: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return (one, other) if one < other else (other, one)


class Axis:
    """The names and values of one parametrize mark."""

    def __init__(self, mark: pytest.Mark) -> None:
        names, values = mark.args[:2]
        self.names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        self.values = [list(value) if len(self.names) > 1 else [value] for value in values]

    def words(self, index: int) -> str:
        """pytest's name for the values at this index."""
        pairs = zip(self.names, self.values[index], strict=True)
        return "-".join(
            str(value) if value is None or isinstance(value, (int, float, str)) else f"{name}{index}"
            for name, value in pairs
        )


class OnCpu(TorchFunctionMode):
    """Replaces device "cuda" by the CPU in every call."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def there(value: Any) -> Any:
            is_gpu = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
            return torch.device("cpu") if is_gpu else value

        named = {name: there(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        return func(*map(there, args), **named)
