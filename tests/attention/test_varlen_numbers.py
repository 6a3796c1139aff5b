"""Errors in a ragged or cached call that only the numbers in its tensors reveal, and errors of the functions themselves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe.errors import ArgumentError, ArgumentTypeError, DeviceError, DtypeError, FlashmoeError, ShapeError
from flashmoe.rules import translate
from tests.torch_warnings import COMPILED

from .varlen_calls import NAMES, banded, call_operator, ints, paged, ragged

pytestmark = COMPILED

# Errors that only the numbers reveal: on a GPU with FLASHMOE_CHECK_VALUES=1.
NUMBERS: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[str], dict[str, Any]], str]] = {
    "decreasing": (ragged, lambda device: {"cu_seqlens_q": ints(device, 0, 6, 5, 14)}, "from 6 to 5 at sequence 1"),
    "negative": (ragged, lambda device: {"cu_seqlens_k": ints(device, -1, 3, 5, 9)}, "cu_seqlens_k starts at -1"),
    "plain lengths": (ragged, lambda device: {"cu_seqlens_q": ints(device, 5, 6, 8, 14)}, "starts at 5.*cumsum"),
    "past the tokens": (
        ragged,
        lambda device: {"cu_seqlens_k": ints(device, 0, 7, 11, 20)},
        "reaches 20.* 19 tokens",
    ),
    "longer than the longest": (ragged, lambda _: {"max_seqlen_q": 8}, "sequence 2 has 9 tokens.*max_seqlen_q is 8"),
    "more keys than there are": (
        banded,
        lambda device: {"seqused_k": ints(device, 7, 8)},
        r"seqused_k\[1\] is 8; sequence 1 has room for 0 to 7 keys$",
    ),
    "more keys in pages than the longest has": (
        paged,
        lambda _: {"max_seqlen_k": 6},
        r"seqused_k\[0\] is 7; sequence 0 has room for 0 to 6 keys according to max_seqlen_k$",
    ),
    "negative keys": (banded, lambda device: {"seqused_k": ints(device, -1, 7)}, r"seqused_k\[0\] is -1"),
    "no such page": (
        paged,
        lambda device: {"block_table": torch.full((2, 2), 99, dtype=torch.int32, device=device)},
        r"block_table\[0, 0\] is 99, but there are",
    ),
    "more keys than the pages hold": (
        paged,
        lambda device: {"seqused_k": ints(device, 9, 1)},
        r"seqused_k\[0\] is 9",
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_wrong_numbers(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, change, words = NUMBERS[name]
    arguments = layout(device)
    arguments.update(change(device))
    if device != "cpu":  # unchecked numbers are clamped to the tensors: no fault, and the next call is right
        call_operator(**arguments)
        torch.cuda.synchronize()
    monkeypatch.setenv("FLASHMOE_CHECK_VALUES", "1")
    with pytest.raises((FlashmoeError, RuntimeError)) as raised:
        call_operator(**arguments)
    with pytest.raises(ArgumentError, match=words):
        raise translate(raised.value) or raised.value
    good = layout(device)
    assert call_operator(**good)[0].isfinite().all()


def test_functions_raise_typed_errors(device: str) -> None:
    """The functions' own checks, and that the operator's errors arrive typed."""
    a = ragged(device)
    q, k, v, cu_q, cu_k = (a[name] for name in NAMES[:5])
    varlen: Any = flashmoe.attention_varlen
    cached: Any = flashmoe.attention_with_kvcache
    cases: list[tuple[Callable[[], Any], Any, str]] = [
        (lambda: varlen(q, k, v, cu_q, None, 9, 9), ArgumentError, "pass block_table and seqused_k"),
        (
            lambda: varlen(q, k, v, [0, 9], cu_k, 9, 9),
            ArgumentTypeError,
            r"an int32 tensor \[sequences \+ 1\]; found list",
        ),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, window=(1.5, 0)), ArgumentTypeError, "window"),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, sinks=cu_q), DtypeError, "sinks"),
        (lambda: varlen(q, k, v, cu_q.to("meta"), cu_k, 9, 9), DeviceError, "cu_seqlens_q"),
        (lambda: flashmoe.attention(q, k, v, window=(1, 1)), ShapeError, "q must be"),
        (
            lambda: flashmoe.attention(*_dense(a), attn_mask=torch.ones(14, 19, device=device).to_sparse()),
            ArgumentError,
            "attn_mask must be a dense",
        ),
        (lambda: cached(*_dense(a), k, cache_seqlens=cu_q), ArgumentError, "belong together"),
        (lambda: cached(*_dense(a), cache_seqlens=cu_k[:1].long()), DtypeError, "cache_seqlens must be torch.int32"),
        (
            lambda: cached(*_dense(a), *_dense(a)[1:], cache_seqlens=cu_k[:1].long()),
            DtypeError,
            "cache_seqlens must be torch.int32",
        ),
        (lambda: cached(*_dense(a), cache_seqlens=cu_k), ShapeError, "cache_seqlens must have 1 elements"),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, softmax_scale=1.0), ArgumentTypeError, "write scale="),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, window_size=(1, 1)), ArgumentTypeError, "write window="),
        (lambda: cached(q, k, v, cache_seqlens=cu_q, page_table=cu_q), ArgumentTypeError, "write block_table="),
        (lambda: cached(q, k, v, cache_seqlens=cu_q, seqused_k=cu_q), ArgumentTypeError, "write cache_seqlens="),
        (lambda: cached(q, k, v, cache_seqlens=cu_q, rotary_cos=q), ArgumentTypeError, "rotate q and k_new before"),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, s_aux=cu_q), ArgumentTypeError, "write sinks="),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, k_descale=cu_q), ArgumentTypeError, "8-bit keys are not supported"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()


def _dense(arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the ragged tensors as [1, H, tokens, D]."""
    q, k, v = (arguments[name].transpose(0, 1).unsqueeze(0) for name in ("q", "k", "v"))
    return q, k, v


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_lengths_are_not_checked_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error instead of an invalid capture."""
    monkeypatch.setenv("FLASHMOE_CHECK_VALUES", "1")
    arguments = ragged("cuda")
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises((FlashmoeError, RuntimeError), match=r"flashmoe:variable\.captured"),
        torch.cuda.graph(graph),
    ):
        call_operator(**arguments)
    assert call_operator(**arguments)[0].isfinite().all()


def test_the_switch_has_two_values(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        return  # lengths on the CPU are always checked
    monkeypatch.setenv("FLASHMOE_CHECK_VALUES", "often")
    with pytest.raises(RuntimeError, match=r"flashmoe:variable\.switch\|name=FLASHMOE_CHECK_VALUES\|found=often"):
        call_operator(**ragged(device))
