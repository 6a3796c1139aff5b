"""A pytest plugin that runs the test files of flash_attn, as they are, on flashmoe's functions.

    python -m pytest -p flashmoe_tools.flash_attn_tests -c /dev/null -n 12 --draw 400 --draw-seed 7 FOLDER/test_flash_attn.py

The file is the caller's; it needs einops. Its hundreds of thousands of parameters are drawn by seed, the same number of each test function, and
named as pytest names them without this plugin. ``--on-cpu`` answers "cuda" by the CPU.
"""

from __future__ import annotations

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


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flash_attn")
    group.addoption("--draw", type=int, default=0, help="parameters of each test function; 0 for all")
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
    count = collector.config.getoption("--draw")
    if count and name.startswith("test_") and getattr(obj, "pytestmark", None):
        obj.pytestmark = drawn(
            obj.pytestmark, count, random.Random(f"{collector.config.getoption('--draw-seed')} {name}")
        )
    return (yield)


def drawn(marks: Sequence[pytest.Mark], count: int, numbers: random.Random) -> list[pytest.Mark]:
    """One parametrize mark of ``count`` tuples in place of all, whose product is drawn from without repetition."""
    axes = [Axis(mark) for mark in marks if mark.name == "parametrize"]
    others = [mark for mark in marks if mark.name != "parametrize"]
    total = math.prod(len(axis.values) for axis in axes)
    if total <= count:
        return list(marks)
    rows = []
    for number in sorted(numbers.sample(range(total), count)):
        row, words = [], []
        for axis in axes:
            number, index = divmod(number, len(axis.values))
            row += axis.values[index]
            words.append(axis.words(index))
        rows.append(pytest.param(*row, id="-".join(words)))
    names = [name for axis in axes for name in axis.names]
    return [pytest.mark.parametrize(names, rows).mark, *others]


class Axis:
    """The names and values of one parametrize mark."""

    def __init__(self, mark: pytest.Mark) -> None:
        names, values = mark.args[:2]
        self.names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        self.values = [list(value) if len(self.names) > 1 else [value] for value in values]

    def words(self, index: int) -> str:
        """What pytest calls the values of this index."""
        pairs = zip(self.names, self.values[index], strict=True)
        return "-".join(
            str(value) if value is None or isinstance(value, (int, float, str)) else f"{name}{index}"
            for name, value in pairs
        )


class OnCpu(TorchFunctionMode):
    """Every call's device "cuda" is the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def there(value: Any) -> Any:
            is_gpu = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
            return torch.device("cpu") if is_gpu else value

        named = {name: there(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        return func(*map(there, args), **named)
