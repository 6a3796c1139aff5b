"""Changes every argument of every operator, one at a time, and compares the errors with an independent statement of the rules.

Starting from a valid call of each operator, every tensor gets another dtype, device, rank, size or stride, or is removed; every number gets values at
and beyond its bounds; every size changes everywhere it occurs. The extension's error, for a description and for a call on the CPU, must be what the rules
of attention.py and experts.py give, including the values. An accepted call must have the shapes that a tracer gets, and bits that do not depend on strides; it
must read nothing past its tensors, and write only its results.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from flashmoe import _extension, rules
from flashmoe.errors import FlashmoeError

from . import attention, experts, others
from .described import BrokenError, Call, T, changes, outside, words_of

# Python operators with the same arguments as the operators that they call; they have separate tests.
IN_PYTHON = {
    "flash_attention_backward", "attention_varlen_backward", "attention_dropout_backward", "attention_bias_gradient",
    "attention_mask_backward",
}  # fmt: skip
KEPT = {"out", "k_cache", "v_cache"}  # arguments that are also results
DESCRIBED_ALONE = {"mla_decode", "mla_append_"}  # Python on the CPU, tested in tests/mla
PAIRS = 150  # pairs of changes per call
MOST_ELEMENTS = 10**6  # limit for tensors that are allocated, not only described
WRITTEN = {*KEPT, "preactivation"}  # _fused_moe_backward_consuming leaves the latter's contents undefined
# On the CPU: the rounding of its products depends on their strides
BY_TORCH = {"_fused_moe_scaled_torch", "_fused_moe_scaled_kept", "_fused_moe_scaled_backward"}
ROWS = [(*row, part) for part in (attention, experts, others) for row in part.ROWS]


def _heard(text: str) -> str:
    """The message that a user gets for an error of the extension or of a Python operator; empty if the call is accepted."""
    told = rules.translate(RuntimeError(text))
    return text if told is None else str(told)


def _expected(rule: Callable[..., Any], call: Call, values: dict[str, Any] | None = None) -> str:
    try:
        rule(call) if values is None else rule(call, values)
    except BrokenError as broken:
        return str(rules.broken(broken.rule, **broken.values))
    return ""


def _is_real(call: Call) -> bool:
    tensors = [value for value in call.values() if isinstance(value, T)]
    return all(one.device == "cpu" and math.prod(one.sizes) < MOST_ELEMENTS for one in tensors)


def _real(call: Call) -> list[Any]:
    return [value.real(one in WRITTEN) if isinstance(value, T) else value for one, value in call.items()]


def _run(name: str, call: Call, given: list[Any]) -> tuple[str, list[Any]]:
    """The operator's error message, and its results including arguments that are results."""
    kept = [given[at] for at, one in enumerate(call) if one in KEPT and given[at].device.type == "cpu"]
    between = [outside(tensor) for tensor in kept]
    try:
        with torch.inference_mode():
            result = getattr(torch.ops.flashmoe, name)(*given)
    except (RuntimeError, FlashmoeError) as error:
        return str(error), []
    for tensor, before in zip(kept, between, strict=True):
        assert torch.equal(outside(tensor), before), f"{name} wrote between the elements of {call}"
    results = list(result) if isinstance(result, tuple) else [result]
    return "", [*results, *(given[at] for at, one in enumerate(call) if one in KEPT)]


def _ids(row: tuple[Any, ...]) -> str:
    return str(row[0])


@dataclass(frozen=True)
class Row:
    """An operator, its rules, and how it can be tested here."""

    name: str
    rule: Callable[..., Any]
    is_described: bool
    is_on_cpu: bool
    required: frozenset[str]

    def wrong(self, what: str, call: Call) -> list[str]:
        """Deviations from the rules, for the description and for the call itself."""
        found = []
        if self.is_described:
            needed, heard = _expected(self.rule, call), _heard(_extension.check(self.name, words_of(call)))
            found += [f"{what}, described: {heard!r}; needed {needed!r}"] if heard != needed else []
        is_run = self.is_on_cpu and self.name not in DESCRIBED_ALONE and _is_real(call)
        # The output of moe_sort is trusted, and expanded offsets belong to other rows.
        if not is_run or "expert_offsets is expanded" in what or any(call[one] is None for one in self.required):
            return found
        given = _real(call)
        values = {
            one: value.tolist()
            for one, value in zip(call, given, strict=True)
            if isinstance(value, Tensor) and value.dtype is torch.int32
        }
        needed, (text, results) = _expected(self.rule, call, values), _run(self.name, call, given)
        if _heard(text) != needed:
            return [*found, f"{what}: {_heard(text)!r}; needed {needed!r}"]
        return found if needed else found + [f"{what}: {why}" for why in _differences(self.name, call, results, what)]


def _row(number: int) -> Row:
    name, make, rule, _ = ROWS[number]
    _extension.load()
    is_described = "no check is registered" not in _extension.check(name, words_of(make()))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    is_on_cpu = hasattr(torch.ops.flashmoe, name) and has_kernel(f"flashmoe::{name}", "CPU")
    arguments = getattr(torch.ops.flashmoe, name).default._schema.arguments if is_on_cpu else ()
    required = frozenset(one.name for one in arguments if "Optional" not in str(one.type))
    return Row(name, rule, is_described, is_on_cpu, required)


EVERY = pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: f"{ROWS[number][0]}-{number}")


@EVERY
def test_every_change_of_an_argument(number: int) -> None:
    _, make, _, part = ROWS[number]
    row = _row(number)
    wrong = [why for what, call in changes(make, part.SIZES, part.NUMBERS) for why in row.wrong(what, call)]
    assert not wrong, "\n".join(wrong[:20]) + f"\n{len(wrong)} in all"


@EVERY
def test_two_changes_at_once(number: int) -> None:
    """Random pairs: each rule applies to its argument whatever another one is, and of two broken rules the right one is reported."""
    _, make, _, part = ROWS[number]
    row, call, random = _row(number), make(), Random(number)
    single = [
        (what, {name: value for name, value in changed.items() if value is not call[name] and value != call[name]})
        for what, changed in changes(make, part.SIZES, part.NUMBERS)
    ]
    single = [(what, changed) for what, changed in single if len(changed) == 1]
    wrong = []
    for _ in range(PAIRS):
        (one, first), (other, second) = random.sample(single, 2)
        wrong += row.wrong(f"{one}; {other}", {**call, **first, **second})
    assert not wrong, "\n".join(wrong[:20]) + f"\n{len(wrong)} in all"


@EVERY
def test_elements_far_apart(number: int) -> None:
    """Each tensor with each of its axes in turn so long that its offsets do not fit 32 bits."""
    _, make, _, _ = ROWS[number]
    row, call = _row(number), make()
    far = [
        (f"{name} is far apart in {axis}", {**call, name: value.with_large_stride(axis)})
        for name, value in call.items()
        if isinstance(value, T)
        for axis, size in enumerate(value.sizes)
        if size > 1
    ]
    wrong = [why for what, changed in far for why in row.wrong(what, changed)]
    assert not wrong, "\n".join(wrong[:20]) + f"\n{len(wrong)} in all"


def _differences(name: str, call: Call, results: list[Any], what: str) -> list[str]:
    """For an accepted call: differences from the shapes that a tracer gets, and from the values for contiguous tensors."""
    drawn = _real(call)
    text, traced = _run(name, call, [value.to("meta") if isinstance(value, Tensor) else value for value in drawn])
    wrong = [] if not text else [f"a tracer hears {text}"]
    for mine, told in zip(results, traced, strict=False):
        if (mine is None) != (told is None):
            wrong.append(f"{mine}; a tracer hears of {told}")
        elif isinstance(mine, Tensor) and (mine.shape, mine.dtype) != (told.shape, told.dtype):
            wrong.append(f"{mine.dtype} {tuple(mine.shape)}; a tracer hears of {told.dtype} {tuple(told.shape)}")
    rtol = 0.02 if name in BY_TORCH else 0.0
    if "expert_offsets" not in what and any(
        word in what for word in ("gaps", "transposed", "expanded", "a part", "column", "far")
    ):
        _, plain = _run(
            name,
            call,
            [
                value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
                for value in drawn
            ],
        )
        for mine, other in zip(results, plain, strict=True):
            if isinstance(mine, Tensor) and not torch.allclose(mine.float(), other.float(), rtol, rtol, equal_nan=True):
                wrong.append("other values than of contiguous tensors")
    return wrong


@pytest.mark.parametrize("sizes", [(2,), (2, 7), (3, 7), (2, 8), (7, 2), (2, 7, 1), (2, 7, 5), (2, 1, 5, 7, 1)])
def test_masks_of_other_ranks(sizes: tuple[int, ...]) -> None:
    """For a padding mask, [batch, keys], the error says which layout it needs."""
    for number, (_, make, _, _) in enumerate(ROWS):
        if make is attention._masked:
            call = {**make(), "mask": attention.t("bool", *sizes)}
            assert _row(number).wrong("a mask", call) == []


def test_every_operator_is_here() -> None:
    """Every operator is here or has separate tests, and has a GPU kernel."""
    _extension.load()
    every = {
        schema.name.removeprefix("flashmoe::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("flashmoe::")
    } - {"toy_double"}  # test_extension.py's, if this process has run it
    assert every - {row[0] for row in ROWS} == {*IN_PYTHON, *attention.ELSEWHERE, *experts.ELSEWHERE}
    named = [f"flashmoe::{name}" for name in sorted(every)]
    without = [name for name in named if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")]
    assert without == []


@pytest.mark.parametrize("head_dim_v", [16, 24])
def test_the_default_scale(head_dim_v: int) -> None:
    """1 / sqrt(head_dim), whichever kernels run the values' width; another scale is used as given."""
    _extension.load()
    q, k, v = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, head_dim_v)
    operator = torch.ops.flashmoe._flash_attention_inference
    for given, scale in ((None, 0.25), (0.5, 0.5)):
        expected = torch.softmax(q.double() @ k.double().mT * scale, -1) @ v.double()
        torch.testing.assert_close(operator(q, k, v, given, False).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 3, 2)])
@pytest.mark.parametrize("codes", [False, True])
def test_rows_of_any_number_are_appended(sizes: tuple[int, int, int], codes: bool) -> None:
    _extension.load()
    batch, heads, rows = sizes
    new = [torch.randn(batch, heads, rows, width) for width in (16, 24)]
    new = [rows.bfloat16() if codes else rows for rows in new]
    caches = [
        torch.zeros(batch, heads, 4, width).to(torch.float8_e4m3fn if codes else torch.float32) for width in (16, 24)
    ]
    used = torch.ones(batch, dtype=torch.int32)
    if codes:
        torch.ops.flashmoe.attention_append_e4m3_(*caches, *new, used, None, None, None, 1.0, 1.0)
    else:
        torch.ops.flashmoe.attention_append_(*caches, *new, used, None)
    for cache, row in zip(caches, new, strict=True):
        expected = torch.zeros(cache.shape)
        expected[:, :, 1 : 1 + rows] = row.to(cache.dtype).float()
        assert torch.equal(cache.float(), expected)
