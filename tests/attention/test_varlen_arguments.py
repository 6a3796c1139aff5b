"""Ragged, paged and windowed attention inside torch's machinery, and the errors for wrong arguments."""

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
from flashmoe.errors import ArgumentError, FlashmoeError
from flashmoe.rules import check, translate
from tests.torch_warnings import COMPILED

from .varlen_calls import SIZES, banded, call_operator, ints, paged, ragged
from .varlen_reference import Ragged

pytestmark = COMPILED

LAYOUTS = {"ragged": ragged, "banded": banded, "paged": paged}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@every_layout
def test_opcheck(layout: Callable[[str], dict[str, Any]], device: str) -> None:
    arguments = layout(device)
    out, lse = call_operator(**arguments)
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
        (*caches, new.half(), new.half(), ints(device, 1, 4), None),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiled(device: str) -> None:
    """One graph for all lengths, forward and backward; a cache is appended to inside a graph."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> Tensor:
        return flashmoe.attention_varlen(q, k, v, *lengths, causal=True, window=(4, -1), softcap=3.0)

    def band(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashmoe.attention(q, k, v, window=(3, 0), attn_mask=torch.ones(k.shape[2], device=q.device) > 0)

    # The first sizes differ from each other, because torch treats equal sizes as the same symbol.
    batches = [
        (*one.tensors(device, torch.float16), *one.cu_seqlens(device), *one.longest)
        for one in (Ragged((12, 1), (6, 30), 4, 2, 16, 24), SIZES)
    ]
    dense = tuple(banded(device).values())[:3]
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
    wanted = decode(q, caches[0], new, ints(device, 3, 0))
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, caches[1], new, ints(device, 3, 0)), wanted)
    assert torch.equal(caches[0], caches[1])
    assert caches[0].any()
    with pytest.raises(ArgumentError, match="in place"):
        torch.vmap(lambda one, cache: decode(one, cache, new, ints(device, 3, 0)))(q[None], caches[0][None])


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
    """Each sequence's own products, hidden scores included; without data every sequence counts as the longest."""
    arguments = ragged(device)
    leaves = [arguments[name].requires_grad_() for name in ("q", "k", "v")]
    scores = sum(rows * keys for rows, keys in zip(SIZES.lengths_q, SIZES.lengths_k, strict=True))
    _extension.load()  # a counter created before the library is loaded knows none of its operators
    with FlopCounterMode(display=False) as counter:
        out, _ = call_operator(**arguments)
    assert counter.get_total_flops() == 2 * 4 * scores * (16 + 24)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out.float().sum(), leaves)
    assert counter.get_total_flops() == 2 * 4 * scores * (3 * 16 + 2 * 24)
    meta = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()}
    with FlopCounterMode(display=False) as counter:
        call_operator(**meta)
    assert counter.get_total_flops() == 2 * 4 * 3 * 9 * 9 * (16 + 24)
    pages = paged(device)
    with FlopCounterMode(display=False) as counter:
        call_operator(**pages)
    assert counter.get_total_flops() == 2 * 4 * 5 * (7 + 4) * (16 + 24)


def test_wrong_arguments(device: str) -> None:
    """A call and a description of its tensors give the same error; tests/arguments covers every rule."""
    for layout, change in (
        (ragged, {"window_left": -2}),
        (banded, {"seqused_k": ints(device, 1)}),
        (paged, {"seqused_k": None}),
    ):
        arguments = layout(device)
        check("attention_varlen_forward", arguments.values())
        arguments.update(change)
        with pytest.raises((FlashmoeError, RuntimeError)) as raised:
            call_operator(**arguments)
        with pytest.raises(FlashmoeError) as described:
            check("attention_varlen_forward", arguments.values())
        told = str(translate(raised.value))
        assert told == str(described.value) == str(explain_varlen(raised.value, Varlen(**arguments)))


@pytest.mark.parametrize("window", [(3, -2), (-2, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_no_side_of_a_window_is_below_minus_one(window: tuple[int, int], causal: bool, device: str) -> None:
    given = ragged(device)
    lengths = [given[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    with pytest.raises(ArgumentError, match=r"window.* found \(.*-2"):
        flashmoe.attention_varlen(*lengths, causal=causal, window=window)
