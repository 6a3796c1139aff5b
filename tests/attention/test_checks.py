"""Wrong arguments: every rule has a typed error that says what was found and what to do, also for tensors without memory."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashmoe
from flashmoe import rules
from flashmoe.attn.arguments import explain_dense
from flashmoe.attn.fake import matches_sdpa
from flashmoe.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DriverError,
    DtypeError,
    FlashmoeError,
    InternalError,
    ShapeError,
    UnsupportedGpuError,
)

from .drawn import lengths
from .reference import check_attention

Q, K = (2, 4, 5, 64), (2, 2, 7, 64)


def _t(shape: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, device=device, dtype=dtype)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda q, k: (q[0], k, k), ShapeError),
        (lambda q, k: (q, k.bfloat16(), k), DtypeError),
        (lambda q, k: (q[:, :3], k, k), ShapeError),
        (lambda q, k: (q, k, k.mT.contiguous().mT), ShapeError),
    ],
)
def test_a_call_and_a_tracer_hear_the_same(wrong: Callable[..., Any], error: type[FlashmoeError], device: str) -> None:
    """A few rules; tests/arguments covers every rule of the operators, and tests/mistakes what users are told."""
    tensors = wrong(_t(Q, device), _t(K, device))
    with pytest.raises(error) as caught:
        flashmoe.attention(*tensors)
    assert type(caught.value) is error
    with FakeTensorMode() as mode, pytest.raises(error, match=re.escape(str(caught.value))):
        flashmoe.attention(*(mode.from_tensor(tensor) for tensor in tensors))


@pytest.mark.gpu
def test_float32_on_a_gpu_says_what_is_supported() -> None:
    q, k = _t(Q, "cuda", torch.float32), _t(K, "cuda", torch.float32)
    with pytest.raises(DtypeError, match=r"no kernel for torch.float32 on cuda(:0)?; supported: float16, bfloat16"):
        flashmoe.attention(q, k, k)


@pytest.mark.gpu
def test_mixed_cpu_and_gpu() -> None:
    with pytest.raises(DeviceError, match=r"found cuda:0, cpu and cuda:0"):
        flashmoe.attention(_t(Q, "cuda:0"), _t(K), _t(K, "cuda:0"))


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("causal", (None, 0, 1, 1.0, "no")),
        ("return_lse", (None, 0, 1, "no")),
        ("scale", (True, False, "1")),
        ("softcap", (True, False, "50", None)),
        ("window", (True, 3, (True, 1), (1.0, 2), "ab", (2, "x"))),
        ("num_splits", (True, "1", 1.0, None)),
    ],
)
def test_options_of_a_wrong_type(option: str, values: tuple[Any, ...]) -> None:
    """torch's dispatcher would take numbers and None as flags by their truth value, and flags as numbers."""
    q, ends, length = (
        torch.randn(1, 2, 3, 8),
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
    )
    rows = q[0].transpose(0, 1)
    calls: list[Callable[..., Any]] = [
        lambda **given: flashmoe.attention_varlen(rows, rows, rows, ends, ends, 3, 3, **given),
        lambda **given: flashmoe.attention_with_kvcache(q, q, q, cache_seqlens=length, **given),
    ]
    if option != "num_splits":
        calls.append(lambda **given: flashmoe.attention(q, q, q, **given))
        calls.append(lambda **given: flashmoe.attention(*(q.to("meta") for _ in range(3)), **given))
    for value in values:
        for call in calls:
            with pytest.raises(ArgumentTypeError, match=f"{option} must be"):
                call(**{option: value})


def test_integers_and_flags_of_numpy() -> None:
    """Integers of any type are accepted, as in torch; NumPy's flags are not, as in torch, and the message names their type."""
    numpy = pytest.importorskip("numpy")
    rows, ends = torch.randn(3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    three, side = numpy.int64(3), numpy.array([1, 0])
    found = flashmoe.attention_varlen(
        rows, rows, rows, ends, ends, three, three, window=side, num_splits=numpy.int32(1)
    )
    assert torch.equal(
        found, flashmoe.attention_varlen(rows, rows, rows, ends, ends, 3, 3, window=(1, 0), num_splits=1)
    )
    with pytest.raises(
        ArgumentTypeError, match=r"causal must be True or False; found .*\(numpy\.bool_?\); use bool\(causal\)"
    ):
        flashmoe.attention_varlen(rows, rows, rows, ends, ends, 3, 3, causal=numpy.bool_(True))


def test_errors_are_the_built_ins_one_would_catch() -> None:
    q, k = _t(Q), _t(K)
    with pytest.raises(ValueError, match="3 dimensions"):
        flashmoe.attention(q[0], k[0], k[0])
    with pytest.raises(TypeError, match="dtype"):
        flashmoe.attention(q, k.float(), k.float())
    with pytest.raises(TypeError, match="Tensor"):
        flashmoe.attention(None, k, k)
    with pytest.raises(ValueError, match="scale"):
        flashmoe.attention(q, k, k, scale=math.inf)


def test_the_cause_is_kept() -> None:
    with pytest.raises(ShapeError) as caught:
        flashmoe.attention(_t(Q)[0], _t(K), _t(K))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "flashmoe:attention.too_few_dimensions|name=q|" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("flashmoe:variable.switch|name=a|found=b%7C|", ArgumentError),
        ("flashmoe:dtype: a", DtypeError),
        ("flashmoe:device: a", DeviceError),
        ("flashmoe:argument: a", ArgumentError),
        ("flashmoe:gpu: a", UnsupportedGpuError),
        ("flashmoe:driver: a", DriverError),
        ("flashmoe:internal: a", InternalError),
        ("flashmoe:memory: a", rules.OutOfMemoryError),
        ("prefix\nflashmoe:gpu: a\nException raised from", UnsupportedGpuError),
    ],
)
def test_translation_of_coded_messages(text: str, error: type[FlashmoeError]) -> None:
    translated = rules.translate(RuntimeError(text))
    assert type(translated) is error
    assert str(translated) == ("a is b|; supported: 0, 1; correct it, or unset it" if "|" in text else "a")


def test_messages_that_are_not_ours_stay_as_they_are() -> None:
    other = RuntimeError("CUDA error: an illegal memory access was encountered")
    q, k = _t(Q), _t(K)
    assert rules.translate(other) is None
    assert explain_dense(other, q, k, k, None, False) is other
    for unknown in ("flashmoe:newer: a", "flashmoe:attention.newer|name=q|"):
        assert isinstance(rules.translate(RuntimeError(unknown)), InternalError)
    driver = explain_dense(RuntimeError("flashmoe:driver: gone"), q, k, k, None, False)
    assert isinstance(driver, DriverError)
    typed = ShapeError("x")
    assert explain_dense(typed, q, k, k, None, False) is typed
    memory = rules.translate(RuntimeError("flashmoe:memory: 5 elements"))
    assert isinstance(memory, torch.OutOfMemoryError)


def _sizes(most: int, dtypes: list[torch.dtype]) -> dict[str, Any]:
    return {
        "batch": st.integers(1, 3),
        "heads_kv": st.integers(1, 3),
        "group": st.integers(1, 4),
        "sizes": lengths(most=most),
        "head_dim": st.integers(1, 256),
        "causal": st.booleans(),
        "dtype": st.sampled_from(dtypes),
        "bshd": st.booleans(),
    }


@settings(max_examples=100, deadline=None, derandomize=True)
@given(**_sizes(140, [torch.float16, torch.bfloat16, torch.float32]))
def test_any_supported_sizes_are_right_on_the_cpu(**drawn: Any) -> None:
    _check_sizes(**drawn, device="cpu")


@pytest.mark.gpu
@settings(max_examples=300, deadline=None, derandomize=True)
@given(**_sizes(400, [torch.float16, torch.bfloat16]))
def test_any_supported_sizes_are_right_on_a_gpu(**drawn: Any) -> None:
    _check_sizes(**drawn, device="cuda")


def _check_sizes(
    batch: int,
    heads_kv: int,
    group: int,
    sizes: tuple[int, int],
    head_dim: int,
    causal: bool,
    dtype: torch.dtype,
    bshd: bool,
    device: str,
) -> None:
    from .reference import Problem, make_inputs

    problem = Problem(*sizes, head_dim, heads_kv * group, heads_kv, batch=batch, causal=causal)
    check_attention(*make_inputs(problem, device, dtype, bshd=bshd, seed=sizes[0]), causal)


_FEW = st.sampled_from([1, 2, 4])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(_FEW, _FEW, _FEW, _FEW, _FEW, _FEW, st.booleans(), st.booleans(), st.sampled_from([3, 4, 5]))
def test_cpp_and_python_agree_on_what_is_scaled_dot_product_attention_itself(
    batch: int, k_batch: int, heads: int, k_heads: int, rows: int, keys: int, causal: bool, gqa: bool, rank: int
) -> None:
    q = torch.randn(batch, heads, rows, 8)
    k = torch.randn((1,) * (rank - 4) + (k_batch, k_heads, keys, 8)[max(0, 4 - rank) :])
    expected = matches_sdpa(q.shape, k.shape, causal, gqa)
    if expected and heads % k_heads:
        return  # four dimensions that the operator itself rejects
    out = torch.ops.flashmoe._flash_attention_drop_in(q, k, k, None, causal, gqa)
    assert (out is not None) == expected
