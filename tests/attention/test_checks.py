"""Wrong arguments: every rule has a typed error with what was found and what to do, with and without memory behind the tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
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


# name: (q, k, v, keywords, error, words that the message must hold)
Case = tuple[Any, Any, Any, dict[str, Any], type[FlashmoeError], tuple[str, ...]]


def _cases(device: str) -> dict[str, Case]:
    q, k = _t(Q, device), _t(K, device)
    return {
        "rank 3": (
            q[0],
            k[0],
            k[0],
            {},
            ShapeError,
            ("q must be [batch, heads, length, head_dim]", "[4, 5, 64]", "unsqueeze"),
        ),
        "rank 2": (q, k[0, 0], k, {}, ShapeError, ("k must be", "2 dimensions")),
        "rank 5": (q, k, k[None], {}, ShapeError, ("v must be", "flatten")),
        "batch": (q, k[:1], k[:1], {}, ShapeError, ("batch size", "2 in q and 1 in k")),
        "key and value": (
            q,
            k,
            k[:, :, :3],
            {},
            ShapeError,
            ("k and v may differ in head_dim alone", "[2, 2, 7, 64]", "[2, 2, 3, 64]"),
        ),
        "head dims": (
            q,
            _t((2, 2, 7, 32), device),
            _t((2, 2, 7, 32), device),
            {},
            ShapeError,
            ("head_dim", "64", "32"),
        ),
        "key head dim": (q, _t((2, 2, 7, 32), device), k, {}, ShapeError, ("q and k must share head_dim", "64", "32")),
        "head dim 513": (_t((1, 1, 3, 513), device),) * 3 + ({}, ShapeError, ("head_dim of q is 513", "1 to 512")),
        "head dim 0": (_t((1, 1, 3, 0), device),) * 3 + ({}, ShapeError, ("head_dim of q is 0",)),
        "heads": (_t((2, 3, 5, 64), device), k, k, {}, ShapeError, ("multiple", "3 and 2", "[batch, heads,")),
        "no key heads": (q, k[:, :0], k[:, :0], {}, ShapeError, ("multiple", "4 and 0")),
        "last stride": (_t((2, 4, 64, 5), device).mT, k, k, {}, ShapeError, ("last dimension of q", "contiguous()")),
        "value stride": (q, k, _t((2, 2, 64, 7), device).mT, {}, ShapeError, ("last dimension of v",)),
        "dtypes": (q, k.bfloat16(), k, {}, DtypeError, ("one dtype", "float16", "bfloat16")),
        "float64": (q.double(), k.double(), k.double(), {}, DtypeError, ("torch.float64", "float16, bfloat16")),
        "integers": (q.int(), k.int(), k.int(), {}, DtypeError, ("torch.int32",)),
        "complex": (q.to(torch.complex64),) * 3 + ({}, DtypeError, ("complex64",)),
        "devices": (q, k.to("meta"), k, {}, DeviceError, ("one device", "meta", ".to(q.device)")),
        "no tensor": ([[1.0]], k, k, {}, ArgumentTypeError, ("q must be a torch.Tensor", "list")),
        "None": (q, None, k, {}, ArgumentTypeError, ("k must be", "NoneType")),
        "sparse": (q.to_sparse(), k, k, {}, ArgumentError, ("q must be a dense", "sparse")),
        "scale nan": (q, k, k, {"scale": math.nan}, ArgumentError, ("scale must be finite", "nan")),
        "scale inf": (q, k, k, {"scale": -math.inf}, ArgumentError, ("scale must be finite", "-inf")),
        "scale text": (q, k, k, {"scale": "0.1"}, ArgumentTypeError, ("scale must be a number", "str")),
        "scale tensor": (q, k, k, {"scale": torch.ones(2)}, ArgumentTypeError, ("scale must be a number", "Tensor")),
        "causal text": (q, k, k, {"causal": "yes"}, ArgumentTypeError, ("causal must be True or False", "'yes'")),
        "causal list": (q, k, k, {"causal": [True]}, ArgumentTypeError, ("causal must be", "list")),
    }


@pytest.mark.parametrize("name", _cases("cpu"))
def test_each_rule_has_a_typed_error(name: str, device: str) -> None:
    q, k, v, keywords, error, words = _cases(device)[name]
    with pytest.raises(error) as caught:
        flashmoe.attention(q, k, v, **keywords)
    for word in words:
        assert word in str(caught.value)
    assert type(caught.value) is error
    if isinstance(q, Tensor) and isinstance(k, Tensor) and q.device == k.device and q.layout is torch.strided:
        with FakeTensorMode() as mode, pytest.raises(error, match=re.escape(str(caught.value))):
            flashmoe.attention(*(mode.from_tensor(tensor) for tensor in (q, k, v)), **keywords)


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
    """torch's dispatcher takes numbers and None for flags by their truth value, and flags for numbers."""
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
    """Integers of any type are taken, as by torch; flags are not, as by torch, and are told apart from Python's."""
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


def test_sizes_over_31_bits() -> None:
    huge = torch.zeros(1, 1, 1, 64, dtype=torch.float16).expand(1, 1, 2**31, 64)
    with pytest.raises(ShapeError, match=r"each size of k must be below 2\^31"):
        flashmoe.attention(huge[:, :, :1], huge, huge)


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


# One tensor argument: mostly fit for use, sometimes wrong in one way or another.
_SIZES = st.sampled_from([0, 1, 2, 3, 4, 6])
_HEAD_DIMS = st.sampled_from([0, 1, 2, 8, 64, 256, 257, 513])
_DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.bool])
_CHANGES = st.sampled_from(["", "", "", "", "transpose", "drop", "add", "step", "expand"])


def _changed(tensor: Tensor, change: str) -> Tensor:
    if change == "transpose":
        return tensor.mT.contiguous().mT
    if change == "drop":
        return tensor.select(0, 0) if tensor.shape[0] else tensor.flatten(0, 1)
    if change == "add":
        return tensor.unsqueeze(0)
    if change == "step":
        return tensor.repeat_interleave(2, 3)[..., ::2]
    if change == "expand":
        return tensor[:, :1].expand(tensor.shape) if tensor.shape[1] else tensor
    return tensor


@st.composite
def _arguments(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, float, bool]:
    batch, heads_q, heads_kv = draw(_SIZES), draw(_SIZES), draw(st.sampled_from([0, 1, 1, 2, 3]))
    seq_q, seq_k, head_dim, dtype = draw(_SIZES), draw(_SIZES), draw(_HEAD_DIMS), draw(_DTYPES)
    q_shape, k_shape = [batch, heads_q, seq_q, head_dim], [batch, heads_kv, seq_k, head_dim]
    v_shape = list(k_shape)
    if draw(st.integers(0, 3)) == 0:
        shape = draw(st.sampled_from([q_shape, k_shape, v_shape]))
        shape[draw(st.integers(0, 3))] = draw(_SIZES)
    tensors = [torch.randn(shape).to(dtype) for shape in (q_shape, k_shape, v_shape)]
    if draw(st.integers(0, 9)) == 0:
        which = draw(st.integers(0, 2))
        tensors[which] = tensors[which].to(draw(_DTYPES))
    tensors = [_changed(tensor, draw(_CHANGES)) for tensor in tensors]
    scale = draw(st.sampled_from([0.125, 1.0, -1.0, 0.0, math.nan, math.inf]))
    return tensors[0], tensors[1], tensors[2], scale, draw(st.booleans())


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(_arguments())
def test_a_description_is_refused_exactly_where_the_tensors_are(
    arguments: tuple[Tensor, Tensor, Tensor, float, bool],
) -> None:
    """Same verdict, and the same kind of error; of an accepted call the same result, as meta tensors see it."""
    described = _kind_of_error(lambda: rules.check("flash_attention_forward", arguments))
    called = _kind_of_error(lambda: torch.ops.flashmoe.flash_attention_forward(*arguments))
    assert described is called, [list(t.shape) for t in arguments[:3]]


def _kind_of_error(call: Callable[[], Any]) -> type[BaseException] | None:
    """The type of the typed error, C++ messages translated; a message without a code keeps its type and so differs."""
    try:
        call()
    except FlashmoeError as error:
        return type(error)
    except RuntimeError as error:
        return type(rules.translate(error) or error)
    return None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(_arguments())
def test_what_cpp_accepts_python_fake_tensors_accept_too(arguments: tuple[Tensor, Tensor, Tensor, float, bool]) -> None:
    q, k, v, scale, causal = arguments
    metas = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (q, k, v)]
    try:
        out, lse = torch.ops.flashmoe.flash_attention_forward(q, k, v, scale, causal)
    except FlashmoeError:
        with pytest.raises(FlashmoeError):
            torch.ops.flashmoe.flash_attention_forward(*metas, scale, causal)
        return
    fake_out, fake_lse = torch.ops.flashmoe.flash_attention_forward(*metas, scale, causal)
    assert fake_out.shape == out.shape
    assert fake_out.stride() == out.stride()
    assert fake_lse.shape == lse.shape
    assert fake_out.dtype == out.dtype


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
        return  # four dimensions that the operator itself refuses
    out = torch.ops.flashmoe._flash_attention_drop_in(q, k, k, None, causal, gqa)
    assert (out is not None) == expected
