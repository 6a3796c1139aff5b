"""Ragged, paged and banded attention inside torch's machinery, and what wrong arguments are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import flashmoe
from flashmoe import _extension
from flashmoe.attn.arguments import explain_varlen
from flashmoe.attn.options import Varlen
from flashmoe.errors import ArgumentError, ArgumentTypeError, DeviceError, DtypeError, FlashmoeError, ShapeError
from flashmoe.rules import check, translate

from .varlen_reference import Ragged, to_pages

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning"),
]

NAMES = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "sinks", "mask"),
    *("max_seqlen_q", "max_seqlen_k", "scale", "window_left", "window_right", "softcap", "num_splits"),
)
SIZES = Ragged((5, 0, 9), (7, 3, 9), 4, 2, 16, 24)


def _ints(device: str, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _ragged(device: str) -> dict[str, Any]:
    """The operator's arguments by name: ragged rows and keys."""
    q, k, v = SIZES.tensors(device, torch.float16)
    cu_seqlens_q, cu_seqlens_k = SIZES.cu_seqlens(device)
    given = (q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, None, None, 9, 9, 0.25, -1, 0, 0.0, 0)
    return dict(zip(NAMES, given, strict=True))


def _banded(device: str) -> dict[str, Any]:
    """Dense, with everything."""
    q, k, v = (torch.randn(2, h, s, d, device=device).half() for h, s, d in ((4, 5, 16), (2, 7, 16), (2, 7, 24)))
    mask = torch.ones(5, 7, dtype=torch.bool, device=device).expand(2, 4, 5, 7)
    sinks = torch.zeros(4, device=device)
    given = (q, k, v, None, None, _ints(device, 7, 4), None, sinks, mask, 0, 0, 0.25, 3, 2, 5.0, 0)
    return dict(zip(NAMES, given, strict=True))


def _paged(device: str) -> dict[str, Any]:
    dense = _banded(device)
    pages = to_pages(dense["k"], dense["v"], (7, 4), 4)
    changed = {"k": pages.k, "v": pages.v, "block_table": pages.block_table, "mask": None, "max_seqlen_k": 8}
    return {**dense, **changed}


LAYOUTS = {"ragged": _ragged, "banded": _banded, "paged": _paged}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def _operator(**arguments: Any) -> tuple[Tensor, Tensor]:
    assert flashmoe.attention_varlen  # loads the extension
    result: tuple[Tensor, Tensor] = torch.ops.flashmoe.attention_varlen_forward(*arguments.values())
    return result


@every_layout
def test_opcheck(layout: Callable[[str], dict[str, Any]], device: str) -> None:
    arguments = layout(device)
    out, lse = _operator(**arguments)
    operators = torch.ops.flashmoe
    torch.library.opcheck(operators._attention_varlen_inference.default, tuple(arguments.values()))
    torch.library.opcheck(operators.attention_varlen_forward.default, tuple(arguments.values()))
    if arguments["block_table"] is not None:
        return
    leaves = {name: arguments[name].requires_grad_() for name in ("q", "k", "v")}
    torch.library.opcheck(operators.attention_varlen_forward.default, (*{**arguments, **leaves}.values(),))
    kept = [value.detach() if isinstance(value, Tensor) else value for value in arguments.values()]
    given = (
        torch.randn_like(out),
        torch.randn_like(lse),
        *kept[:6],
        *kept[7:9],
        out.detach(),
        lse.detach(),
        *kept[9:-1],
    )
    torch.library.opcheck(operators.attention_varlen_backward.default, given)
    torch.library.opcheck(operators.attention_varlen_backward.default, (*given, 1))
    torch.library.opcheck(
        operators._attention_varlen_backward.default, given, test_utils=("test_schema", "test_faketensor")
    )


def test_opcheck_append(device: str) -> None:
    cache, new = torch.zeros(2, 2, 9, 16, device=device), torch.ones(2, 2, 3, 16, device=device)
    caches = [cache.half(), cache.half()]
    _extension.load()
    torch.library.opcheck(
        torch.ops.flashmoe.attention_append_.default,
        (*caches, new.half(), new.half(), _ints(device, 1, 4), None),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiled(device: str) -> None:
    """One graph for all lengths, forward and backward; a cache is appended to inside it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> Tensor:
        return flashmoe.attention_varlen(q, k, v, *lengths, causal=True, window=(4, -1), softcap=3.0)

    def band(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashmoe.attention(q, k, v, window=(3, 0), attn_mask=torch.ones(k.shape[2], device=q.device) > 0)

    # The first sizes differ from each other: torch takes equal ones for the same.
    batches = [
        (*one.tensors(device, torch.float16), *one.cu_seqlens(device), *one.longest)
        for one in (Ragged((12, 1), (6, 30), 4, 2, 16, 24), SIZES)
    ]
    dense = tuple(_banded(device).values())[:3]
    for function, calls in ((attend, batches), (band, [[tensor.repeat(3, 1, 1, 1) for tensor in dense], dense])):
        graphs = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=graphs)
        counts = []
        for tensors in calls:
            leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
            found, wanted = (call(*leaves, *tensors[3:]) for call in (compiled, function))
            assert torch.equal(found, wanted)
            upstream = torch.randn_like(wanted)
            for a, b in zip(
                torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(wanted, leaves, upstream), strict=True
            ):
                assert torch.equal(a, b)
            counts.append(graphs.frame_count)
        assert counts[0] == counts[1]

    def decode(q: Tensor, cache: Tensor, new: Tensor, used: Tensor) -> Tensor:
        return flashmoe.attention_with_kvcache(q, cache, cache, new, new, cache_seqlens=used)

    q, new = (torch.randn(2, h, 1, 16, device=device).half() for h in (4, 2))
    caches = [torch.zeros(2, 2, 9, 16, device=device).half() for _ in range(2)]
    wanted = decode(q, caches[0], new, _ints(device, 3, 0))
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, caches[1], new, _ints(device, 3, 0)), wanted)
    assert torch.equal(caches[0], caches[1])
    assert caches[0].any()
    with pytest.raises(ArgumentError, match="in place"):
        torch.vmap(lambda one, cache: decode(one, cache, new, _ints(device, 3, 0)))(q[None], caches[0][None])


def test_exported(device: str) -> None:
    """With any number of tokens and sequences."""

    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, *cu_seqlens: Tensor) -> Tensor:
            return flashmoe.attention_varlen(q, k, v, *cu_seqlens, 64, 64, causal=True)

    first, second = (
        (*one.tensors(device, torch.float16), *one.cu_seqlens(device))
        for one in (SIZES, Ragged((40, 1), (50, 9), 4, 2, 16, 24))
    )
    tokens, keys, ends = (torch.export.Dim(name, min=2, max=4096) for name in ("tokens", "keys", "ends"))
    sizes = ({0: tokens}, {0: keys}, {0: keys}, ({0: ends}, {0: ends}))
    exported = torch.export.export(Attend(), first, dynamic_shapes=sizes)
    assert torch.equal(exported.module()(*second), Attend()(*second))


def test_autocast(device: str) -> None:
    """Rows, keys and an additive mask in autocast's dtype; gradients in the dtypes of the leaves."""
    q, k, v = (torch.randn(1, 2, s, 16, device=device, requires_grad=True) for s in (5, 7, 7))
    mask = torch.randn(5, 7, device=device)
    with torch.autocast(device, torch.bfloat16):
        out = flashmoe.attention(q, k, v, attn_mask=mask, sinks=torch.zeros(2, device=device))
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype is torch.float32
    wanted = flashmoe.attention(
        *(t.bfloat16() for t in (q, k, v)), attn_mask=mask.bfloat16(), sinks=torch.zeros(2, device=device)
    )
    assert torch.equal(out, wanted)


def test_operations_are_counted(device: str) -> None:
    """Each sequence's own products, hidden scores included; what has no data counts as its longest."""
    arguments = _ragged(device)
    leaves = [arguments[name].requires_grad_() for name in ("q", "k", "v")]
    scores = sum(rows * keys for rows, keys in zip(SIZES.lengths_q, SIZES.lengths_k, strict=True))
    _extension.load()  # a counter that is older than the library knows none of its operators
    with FlopCounterMode(display=False) as counter:
        out, _ = _operator(**arguments)
    assert counter.get_total_flops() == 2 * 4 * scores * (16 + 24)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out.float().sum(), leaves)
    assert counter.get_total_flops() == 2 * 4 * scores * (3 * 16 + 2 * 24)
    meta = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()}
    with FlopCounterMode(display=False) as counter:
        _operator(**meta)
    assert counter.get_total_flops() == 2 * 4 * 3 * 9 * 9 * (16 + 24)
    paged = _paged(device)
    with FlopCounterMode(display=False) as counter:
        _operator(**paged)
    assert counter.get_total_flops() == 2 * 4 * 5 * (7 + 4) * (16 + 24)


# What is changed in a good call, the error, its words.
WRONG: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]], Any, str]] = {
    "int64 lengths": (_ragged, lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].long()}, DtypeError, "cu_seqlens_q.*int32"),
    "lengths of another batch": (
        _ragged,
        lambda a: {"cu_seqlens_k": a["cu_seqlens_k"][:-1]},
        ShapeError,
        "cu_seqlens_k",
    ),
    "no lengths": (_ragged, lambda a: {"cu_seqlens_q": a["cu_seqlens_q"][:0]}, ShapeError, "cu_seqlens_q is empty"),
    "two dimensions": (
        _ragged,
        lambda a: {"cu_seqlens_q": a["cu_seqlens_q"][None]},
        ShapeError,
        "1-dimensional; .*reshape",
    ),
    "strided lengths": (
        _ragged,
        lambda a: {"cu_seqlens_k": a["cu_seqlens_k"].repeat_interleave(2)[::2]},
        ShapeError,
        "last dimension of cu_seqlens_k must be contiguous.*call",
    ),
    "dense rows": (_ragged, lambda a: {"q": a["q"][None]}, ShapeError, "tokens, heads, head_dim"),
    "no such heads": (_ragged, lambda a: {"q": a["q"][:, :3]}, ShapeError, "multiple"),
    "head dims": (_ragged, lambda a: {"q": a["q"][..., :8]}, ShapeError, "head_dim"),
    "wide values": (_ragged, lambda a: {"v": a["v"].repeat(1, 1, 22)}, ShapeError, "head_dim.* 528"),
    "other tokens": (_ragged, lambda a: {"v": a["v"][:-1]}, ShapeError, "differ in head_dim alone"),
    "strided": (_ragged, lambda a: {"k": a["k"].mT.contiguous().mT}, ShapeError, "last dimension"),
    "dtypes": (_ragged, lambda a: {"v": a["v"].bfloat16()}, DtypeError, "share one dtype"),
    "negative maximum": (_ragged, lambda _: {"max_seqlen_q": -1}, ArgumentError, "max_seqlen_q"),
    "huge maximum": (_ragged, lambda _: {"max_seqlen_k": 2**30}, ArgumentError, "max_seqlen_k"),
    "window": (_ragged, lambda _: {"window_left": -2}, ArgumentError, "window"),
    "softcap": (_ragged, lambda _: {"softcap": -1.0}, ArgumentError, "softcap"),
    "vast softcap": (_ragged, lambda _: {"softcap": 4097.0}, ArgumentError, "softcap"),
    "softcap that is no number": (_ragged, lambda _: {"softcap": float("nan")}, ArgumentError, "softcap"),
    "scale": (_ragged, lambda _: {"scale": float("inf")}, ArgumentError, "scale"),
    "splits": (_ragged, lambda _: {"num_splits": 33}, ArgumentError, "num_splits"),
    "sinks": (_banded, lambda a: {"sinks": a["sinks"][:3]}, ShapeError, "sinks"),
    "half sinks": (_banded, lambda a: {"sinks": a["sinks"].half()}, DtypeError, "sinks"),
    "mask": (_banded, lambda a: {"mask": a["mask"][..., :6]}, ShapeError, "mask"),
    "float32 mask": (_banded, lambda a: {"mask": a["mask"].float()}, DtypeError, "mask"),
    "used keys": (_banded, lambda a: {"seqused_k": a["seqused_k"][:1]}, ShapeError, "seqused_k"),
    "another batch": (_banded, lambda a: {"k": a["k"][:1], "v": a["v"][:1]}, ShapeError, "batch size"),
    "pages without lengths": (_paged, lambda _: {"seqused_k": None}, ArgumentError, "seqused_k"),
    "pages and lengths": (_paged, lambda a: {"cu_seqlens_k": a["seqused_k"]}, ArgumentError, "both given"),
    "flat table": (_paged, lambda a: {"block_table": a["block_table"][0]}, ShapeError, "block_table"),
    "short table": (_paged, lambda a: {"block_table": a["block_table"][:1]}, ShapeError, "block_table"),
    "empty pages": (_paged, lambda a: {"k": a["k"][:, :0], "v": a["v"][:, :0]}, ShapeError, "page"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str, device: str) -> None:
    """A call and a description of its tensors are told the same."""
    layout, change, kind, words = WRONG[name]
    arguments = layout(device)
    check("attention_varlen_forward", arguments.values())
    arguments.update(change(arguments))
    with pytest.raises((FlashmoeError, RuntimeError)) as raised:
        _operator(**arguments)
    called = translate(raised.value)
    assert isinstance(called, kind), raised.value
    with pytest.raises(kind, match=words) as described:
        check("attention_varlen_forward", arguments.values())
    assert str(described.value) == str(called) == str(explain_varlen(raised.value, Varlen(**arguments)))


@pytest.mark.parametrize(
    "change",
    [
        {"num_splits": 32},
        {"num_splits": 0},
        {"softcap": 4096.0},
        {"max_seqlen_q": 2**30 - 1},
        {"max_seqlen_k": 2**30 - 1},
        {"window_left": -1, "window_right": -1},
        {"window_left": 0, "window_right": 0},
        {"scale": -2.0e38},
    ],
    ids=str,
)
def test_the_last_value_that_is_taken(change: dict[str, Any], device: str) -> None:
    arguments = {**_ragged(device), **change}
    check("attention_varlen_forward", arguments.values())
    _operator(**arguments)


@pytest.mark.parametrize("window", [(3, -2), (-2, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_no_side_of_a_window_is_below_minus_one(window: tuple[int, int], causal: bool, device: str) -> None:
    given = _ragged(device)
    lengths = [given[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    with pytest.raises(ArgumentError, match=r"window.* found \(.*-2"):
        flashmoe.attention_varlen(*lengths, causal=causal, window=window)


# What only the numbers tell: on a GPU with FLASHMOE_CHECK_VALUES=1.
NUMBERS: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[str], dict[str, Any]], str]] = {
    "decreasing": (_ragged, lambda device: {"cu_seqlens_q": _ints(device, 0, 6, 5, 14)}, "from 6 to 5 at sequence 1"),
    "negative": (_ragged, lambda device: {"cu_seqlens_k": _ints(device, -1, 3, 5, 9)}, "cu_seqlens_k starts at -1"),
    "plain lengths": (_ragged, lambda device: {"cu_seqlens_q": _ints(device, 5, 6, 8, 14)}, "starts at 5.*cumsum"),
    "past the tokens": (
        _ragged,
        lambda device: {"cu_seqlens_k": _ints(device, 0, 7, 11, 20)},
        "reaches 20.* 19 tokens",
    ),
    "longer than the longest": (_ragged, lambda _: {"max_seqlen_q": 8}, "sequence 2 has 9 tokens.*max_seqlen_q is 8"),
    "more keys than there are": (
        _banded,
        lambda device: {"seqused_k": _ints(device, 7, 8)},
        r"seqused_k\[1\] is 8; sequence 1 has room for 0 to 7 keys$",
    ),
    "more keys in pages than the longest has": (
        _paged,
        lambda _: {"max_seqlen_k": 6},
        r"seqused_k\[0\] is 7; sequence 0 has room for 0 to 6 keys by max_seqlen_k$",
    ),
    "negative keys": (_banded, lambda device: {"seqused_k": _ints(device, -1, 7)}, r"seqused_k\[0\] is -1"),
    "no such page": (
        _paged,
        lambda device: {"block_table": torch.full((2, 2), 99, dtype=torch.int32, device=device)},
        r"block_table\[0, 0\] is 99, but there are",
    ),
    "more keys than the pages hold": (
        _paged,
        lambda device: {"seqused_k": _ints(device, 9, 1)},
        r"seqused_k\[0\] is 9",
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_wrong_numbers(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, change, words = NUMBERS[name]
    arguments = layout(device)
    arguments.update(change(device))
    if device != "cpu":  # unchecked they are held to the tensors: no fault, and what comes next is right
        _operator(**arguments)
        torch.cuda.synchronize()
    monkeypatch.setenv("FLASHMOE_CHECK_VALUES", "1")
    with pytest.raises((FlashmoeError, RuntimeError)) as raised:
        _operator(**arguments)
    with pytest.raises(ArgumentError, match=words):
        raise translate(raised.value) or raised.value
    good = layout(device)
    assert _operator(**good)[0].isfinite().all()


def test_functions_raise_typed_errors(device: str) -> None:
    """What the functions themselves check, and that the operator's errors arrive typed."""
    a = _ragged(device)
    q, k, v, cu_q, cu_k = (a[name] for name in NAMES[:5])
    varlen: Any = flashmoe.attention_varlen
    cached: Any = flashmoe.attention_with_kvcache
    cases: list[tuple[Callable[[], Any], Any, str]] = [
        (lambda: varlen(q, k, v, [0, 5], cu_k, 9, 9), ArgumentTypeError, "cu_seqlens_q must be an int32 tensor"),
        (lambda: varlen(q, k, v, cu_q, None, 9, 9), ArgumentError, "give block_table and seqused_k"),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9.0, 9), ArgumentTypeError, "max_seqlen_q must be an int"),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, window=5), ArgumentTypeError, "window must be"),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, window=(1.5, 0)), ArgumentTypeError, "window"),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, softcap="a"), ArgumentTypeError, "softcap"),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, causal=cu_q), ArgumentTypeError, "causal"),
        (lambda: varlen(q, None, v, cu_q, cu_k, 9, 9), ArgumentTypeError, "k must be a torch.Tensor"),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, sinks=cu_q), DtypeError, "sinks"),
        (lambda: varlen(q, k, v, cu_q.to("meta"), cu_k, 9, 9), DeviceError, "cu_seqlens_q"),
        (lambda: flashmoe.attention(q, k, v, window=(1, 1)), ShapeError, "q must be"),
        (
            lambda: flashmoe.attention(*_dense(a), attn_mask=torch.ones(3, 3, device=device) > 0),
            ShapeError,
            "broadcast",
        ),
        (lambda: flashmoe.attention(*_dense(a), attn_mask=3), ArgumentTypeError, "attn_mask"),  # type: ignore[call-overload]
        (
            lambda: flashmoe.attention(*_dense(a), attn_mask=torch.ones(14, 19, device=device).to_sparse()),
            ArgumentError,
            "attn_mask must be a dense",
        ),
        (lambda: cached(q, k, v, cache_seqlens=7), ArgumentTypeError, "cache_seqlens"),
        (lambda: cached(*_dense(a), k, cache_seqlens=cu_q), ArgumentError, "belong together"),
        (lambda: cached(*_dense(a), cache_seqlens=cu_k[:1].long()), DtypeError, "cache_seqlens must be torch.int32"),
        (
            lambda: cached(*_dense(a), *_dense(a)[1:], cache_seqlens=cu_k[:1].long()),
            DtypeError,
            "cache_seqlens must be torch.int32",
        ),
        (lambda: cached(*_dense(a), cache_seqlens=cu_k), ShapeError, "cache_seqlens must have 1 elements"),
        (
            lambda: cached(*_dense(a), *_dense(a)[1:], cache_seqlens=cu_k),
            ShapeError,
            "cache_seqlens must have 1 elements, one for each sequence",
        ),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, softmax_scale=1.0), ArgumentTypeError, "write scale="),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, window_size=(1, 1)), ArgumentTypeError, "write window="),
        (lambda: cached(q, k, v, cache_seqlens=cu_q, page_table=cu_q), ArgumentTypeError, "write block_table="),
        (lambda: cached(q, k, v, cache_seqlens=cu_q, seqused_k=cu_q), ArgumentTypeError, "write cache_seqlens="),
        (lambda: cached(q, k, v, cache_seqlens=cu_q, rotary_cos=q), ArgumentTypeError, "rotate q and k_new before"),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, s_aux=cu_q), ArgumentTypeError, "write sinks="),
        (lambda: varlen(q, k, v, cu_q, cu_k, 9, 9, k_descale=cu_q), ArgumentTypeError, "no 8-bit keys"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()


def _dense(arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """[1, H, tokens, D] of the ragged tensors."""
    q, k, v = (arguments[name].transpose(0, 1).unsqueeze(0) for name in ("q", "k", "v"))
    return q, k, v


def test_parts_that_do_not_belong_together(device: str) -> None:
    """Of integers merge_attention would make integers, without a word."""
    out, lse = torch.zeros(1, 2, 3, 8, device=device), torch.zeros(1, 2, 3, device=device)
    wrong: dict[str, tuple[type[FlashmoeError], tuple[Any, ...]]] = {
        "out_b must be a torch.Tensor": (ArgumentTypeError, (out, lse, None, lse)),
        "must have one floating dtype; found torch.int32": (DtypeError, (out.int(), lse, out.int(), lse)),
        "found torch.float16 in lse_b and torch.float32 in lse_a": (DtypeError, (out, lse, out, lse.half())),
        "out_b must be on out_a's device": (DeviceError, (out, lse, out.to("meta"), lse)),
    }
    for words, (kind, parts) in wrong.items():
        with pytest.raises(kind, match=words):
            flashmoe.merge_attention(*parts)


def test_a_padding_mask_is_told_how_to_broadcast(device: str) -> None:
    q, k = (torch.randn(2, h, s, 16, device=device).half() for h, s in ((4, 5), (2, 7)))
    with pytest.raises(ShapeError, match=r"of a padding mask \[batch, keys\] give mask\[:, None, None\]"):
        flashmoe.attention(q, k, k, attn_mask=torch.ones(2, 7, dtype=torch.bool, device=device))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_lengths_are_not_checked_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error instead of an invalid capture."""
    monkeypatch.setenv("FLASHMOE_CHECK_VALUES", "1")
    arguments = _ragged("cuda")
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises((FlashmoeError, RuntimeError), match=r"flashmoe:variable\.captured"),
        torch.cuda.graph(graph),
    ):
        _operator(**arguments)
    assert _operator(**arguments)[0].isfinite().all()


def test_the_switch_has_two_values(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        return  # lengths on the CPU are always checked
    monkeypatch.setenv("FLASHMOE_CHECK_VALUES", "often")
    with pytest.raises(RuntimeError, match=r"flashmoe:variable\.switch\|name=FLASHMOE_CHECK_VALUES\|found=often"):
        _operator(**_ragged(device))
