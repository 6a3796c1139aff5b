"""scaled_dot_product_attention against torch's, call by call: the same result, or the same error with the same message."""

import math
import re
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import flashmoe
from flashmoe.attn.sdpa_dispatch import Backend
from flashmoe.errors import ShapeError

from .reference import CLOSE

# torch 2.15 returns the query's own shape if there are no queries or no keys, without broadcasting.
FORGETS_TO_BROADCAST = torch_attention(*(torch.empty(n, 0, 1) for n in (1, 2, 2))).shape[0] == 1


@dataclass(frozen=True)
class Call:
    """Arguments of one call, with tensors as their shapes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    options: tuple[tuple[str, Any], ...]
    mask: str
    seed: int

    def has_unequal_lengths(self) -> bool:
        _, key, value = self.shapes
        return min(len(key), len(value)) > 1 and key[-2] != value[-2]

    def tensors(self, device: str) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [
            torch.randn(shape, generator=generator).to(device, dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    def keywords(self, query: Tensor, key: Tensor) -> dict[str, Any]:
        if self.mask == "none":
            return dict(self.options)
        shape = (query.shape[-2], key.shape[-2] + (1 if self.mask == "wrong" else 0))
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
        return {**dict(self.options), "attn_mask": mask if self.mask != "float" else mask.to(query.dtype)}


_SIZES = st.sampled_from([1, 1, 2, 3, 4])
_LENGTHS = st.sampled_from([0, 1, 2, 5, 33, 64, 65])
_HEAD_DIMS = st.sampled_from([1, 8, 16, 59, 64, 128, 256, 257, 513])
_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "is_causal": st.sampled_from([False, True, True, 1, None]),
    "enable_gqa": st.sampled_from([False, True, True, 0]),
    "scale": st.sampled_from([None, 0.3, 0.0, 1, 2, True, math.nan, math.inf, "0.1"]),
    "dropout_p": st.sampled_from([0.0, 0, False, 1.5, -0.5, None]),
}


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Mostly valid calls, some with something wrong or unusual."""
    lead = draw(st.lists(_SIZES, min_size=0, max_size=3))
    seq_q, seq_k, head_dim = draw(_LENGTHS), draw(_LENGTHS), draw(_HEAD_DIMS)
    query = [*lead, seq_q, head_dim]
    key = [*lead, seq_k, head_dim]
    value = list(key)
    options = {name: draw(_OPTIONS[name]) for name in draw(st.sets(st.sampled_from(sorted(_OPTIONS))))}
    if lead and draw(st.booleans()):  # heads in groups, if the flag says so
        query[-3] *= draw(st.sampled_from([1, 2, 3]))
    if lead and draw(st.integers(0, 3)) == 0:  # a dimension to broadcast, or a mismatch
        draw(st.sampled_from([query, key, value]))[draw(st.integers(0, len(lead) - 1))] = draw(_SIZES)
    if draw(st.integers(0, 7)) == 0:
        changed = draw(st.sampled_from([query, key, value]))
        changed[draw(st.integers(0, len(changed) - 1))] = draw(_SIZES)
    if draw(st.integers(0, 7)) == 0 and len(lead) > 1:
        for shape in draw(st.sampled_from([(query,), (key, value), (value,)])):
            del shape[0]
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float32, torch.float64]))
    dtypes = [dtype] * 3
    if draw(st.integers(0, 15)) == 0:
        dtypes[draw(st.integers(0, 2))] = draw(st.sampled_from([torch.float32, torch.int32]))
    mask = draw(st.sampled_from(["none"] * 6 + ["bool", "float", "wrong"]))
    return Call(
        (tuple(query), tuple(key), tuple(value)), tuple(dtypes), tuple(options.items()), mask, draw(st.integers(0, 9))
    )


def _outcome(function: Any, tensors: list[Tensor], keywords: dict[str, Any]) -> Tensor | Exception:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result: Tensor = function(*tensors, **keywords)
            return result
    except Exception as error:
        return error


def _exact(tensors: list[Tensor], keywords: dict[str, Any]) -> Tensor:
    """torch's formula in double precision, because its fused kernels have faults of their own (NaN for scale < 0 and causal)."""
    wide = [tensor.double() for tensor in tensors]
    mask = keywords.get("attn_mask")
    if mask is not None and mask.dtype is not torch.bool:
        keywords = {**keywords, "attn_mask": mask.double()}
    with sdpa_kernel(SDPBackend.MATH):
        return torch_attention(*wide, **keywords)


def _compare(call: Call, device: str) -> None:
    tensors = call.tensors(device)
    keywords = call.keywords(*tensors[:2])
    if call.has_unequal_lengths():
        # Unlike torch, which reads past the end of the shorter one, or divides by zero and ends the process.
        assert isinstance(_outcome(flashmoe.scaled_dot_product_attention, tensors, keywords), ShapeError)
        return
    theirs = _outcome(torch_attention, tensors, keywords)
    ours = _outcome(flashmoe.scaled_dot_product_attention, tensors, keywords)
    if isinstance(theirs, Exception):
        assert isinstance(ours, Exception), f"torch raises {theirs!r}, we return {ours!r}"
        assert type(ours) is type(theirs)
        assert _words(ours) == _words(theirs)
        return
    assert isinstance(ours, Tensor), f"we raise {ours!r}, torch returns a result"
    if FORGETS_TO_BROADCAST and 0 in (tensors[0].shape[-2], tensors[1].shape[-2]):
        return
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert ours.device == theirs.device
    if flashmoe.explain(*tensors, **keywords).path is Backend.TORCH:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        return
    _assert_near(ours, tensors, keywords)


def _assert_near(ours: Tensor, tensors: list[Tensor], keywords: dict[str, Any]) -> None:
    """The shape and, within rounding, the values of torch's formula in double precision."""
    expected = _exact(tensors, keywords)
    close = CLOSE[tensors[0].dtype] * max(1.0, expected.abs().max().item() if expected.numel() else 1.0)
    torch.testing.assert_close(ours.double(), expected, rtol=close, atol=close)


def _words(error: Exception) -> str:
    """torch names a wrong argument by position if it was passed by position, and a fallback passes more of them by position.

    After torch's message about sizes that do not match, flashmoe may add the option for grouped heads.
    """
    text = re.sub(
        r"(The size of tensor a .*) \(query has \d+ heads and key \d+: pass enable_gqa=True\)$", r"\1", str(error)
    )
    for position in range(1, 9):
        text = text.replace(f" (position {position})", "")
    return text


@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(calls())
def test_every_call_is_as_torchs_on_the_cpu(call: Call) -> None:
    _compare(call, "cpu")


@pytest.mark.gpu
@settings(max_examples=1500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(calls())
def test_every_call_that_runs_here_is_as_torchs_on_a_gpu(call: Call) -> None:
    """Against torch's formula. Calls that go to torch are compared on the CPU: comparing the same fused kernel with itself would prove nothing
    here, and one such comparison of four ended in a crash inside torch's function (2.11, H200)."""
    tensors = call.tensors("cuda")
    keywords = call.keywords(*tensors[:2])
    if call.has_unequal_lengths():
        assert isinstance(_outcome(flashmoe.explain, tensors, keywords), ShapeError)
        return
    if flashmoe.explain(*tensors, **keywords).path is Backend.TORCH:
        return
    ours = flashmoe.scaled_dot_product_attention(*tensors, **keywords)
    assert ours.dtype == tensors[0].dtype
    assert ours.device == tensors[0].device
    _assert_near(ours, tensors, keywords)


def test_the_calls_that_are_compared_take_both_paths() -> None:
    """The strategy above reaches both implementations and both kinds of outcome; otherwise the comparison would prove little."""
    seen = {"flashmoe": 0, "torch": 0, "error": 0}

    @settings(max_examples=600, deadline=None, derandomize=True, database=None)
    @given(calls())
    def count(call: Call) -> None:
        tensors = call.tensors("cpu")
        keywords = call.keywords(*tensors[:2])
        if call.has_unequal_lengths():
            return
        if isinstance(_outcome(torch_attention, tensors, keywords), Exception):
            seen["error"] += 1
        else:
            seen[flashmoe.explain(*tensors, **keywords).path.value] += 1

    count()
    assert min(seen.values()) >= 10, seen
