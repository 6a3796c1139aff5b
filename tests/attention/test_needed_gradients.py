"""If only some gradients are needed, the others are not computed; those that are have the bits of the full call."""

import os
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import flashmoe
from flashmoe import _extension
from flashmoe.attn import backward, fake

from .gradients import has_kernel, make_leaves
from .reference import DTYPES, Problem, make_inputs
from .varlen_reference import Ragged

NEEDS = [needed for needed in product((False, True), repeat=3) if any(needed)]
ids_of_needs = pytest.mark.parametrize(
    "needed", NEEDS, ids=lambda needed: "".join(name for name, need in zip("qkv", needed, strict=True) if need)
)
GRADIENTS = {"dq": "backward_dq", "dkv": "backward_dkv"}  # for dense and ragged kernels


def _gradients(function: Any, tensors: tuple[Tensor, ...], needed: tuple[bool, ...]) -> list[Tensor | None]:
    """Gradients by autograd; only the needed tensors are leaves."""
    leaves = make_leaves(*tensors)
    for leaf, need in zip(leaves, needed, strict=True):
        leaf.requires_grad_(need)
    out, lse = function(*leaves)
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.full_like(lse, 0.5)])
    return [leaf.grad for leaf in leaves]


def _dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return flashmoe.attention(q, k, v, causal=True, return_lse=True)


def _ragged(device: str) -> tuple[Any, Ragged]:
    ragged = Ragged((65, 1, 0, 70), (65, 90, 4, 131), 4, 2, 64, 40, spare=2)

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        offsets, longest = ragged.cu_seqlens(device), ragged.longest
        out, lse = flashmoe.attention_varlen(q, k, v, *offsets, *longest, causal=True, sinks=sinks, return_lse=True)
        return out, lse.nan_to_num(neginf=0.0)

    return function, ragged


def _assert_same(found: list[Tensor | None], whole: list[Tensor | None], needed: tuple[bool, ...]) -> None:
    for some, every, need in zip(found, whole, needed, strict=True):
        assert (some is not None) == need
        assert some is None or every is None or torch.equal(some, every)


@ids_of_needs
def test_dense(needed: tuple[bool, ...], device: str) -> None:
    """For the kernels, including a head dim that is padded to their width, and for the torch operations."""
    for dtype, head_dim in product(DTYPES[device], (64, 59)):
        q, k, v = make_inputs(Problem(70, 90, head_dim, 4, 2, batch=2, causal=True), device, dtype)
        _assert_same(_gradients(_dense, (q, k, v), needed), _gradients(_dense, (q, k, v), (True,) * 3), needed)
    out, lse = _dense(q, k, v)
    arguments = (torch.ones_like(out), None, q, k, v, out, lse, 0.125, True)
    whole = backward.backward(*arguments)
    for some, every, need in zip(backward.backward(*arguments, fake.bits(needed)), whole, needed, strict=True):
        assert torch.equal(some, every) if need else some.numel() == 0


@ids_of_needs
def test_ragged(needed: tuple[bool, ...], device: str) -> None:
    function, ragged = _ragged(device)
    tensors = tuple(tensor.nan_to_num() for tensor in ragged.tensors(device, DTYPES[device][-1]))
    for sinks in ((), (torch.linspace(-1, 1, 4, device=device),)):
        wanted = (*needed, *(not needed[0] for _ in sinks))
        given = (*tensors, *sinks)
        _assert_same(_gradients(function, given, wanted), _gradients(function, given, (True,) * len(given)), wanted)


def test_sinks_alone(device: str) -> None:
    """Their gradient needs rowsum(dO * O), but no gradient kernel."""
    function, ragged = _ragged(device)
    tensors = tuple(tensor.nan_to_num() for tensor in ragged.tensors(device, DTYPES[device][-1]))
    given, wanted = (*tensors, torch.linspace(-1, 1, 4, device=device)), (False, False, False, True)
    _assert_same(_gradients(function, given, wanted), _gradients(function, given, (True,) * 4), wanted)


@pytest.mark.gpu
@ids_of_needs
def test_kernels_of_other_gradients_do_not_run(needed: tuple[bool, ...]) -> None:
    """Checked with torch's profiler."""
    wanted = {name for name, need in zip(("dq", "dkv"), (needed[0], needed[1] or needed[2]), strict=True) if need}
    function, ragged = _ragged("cuda")
    dense = make_inputs(Problem(70, 90, 64, 4, 2, batch=2, causal=True), "cuda", torch.float16)
    varlen = tuple(tensor.nan_to_num() for tensor in ragged.tensors("cuda", torch.float16))
    has_varlen = os.environ.get("FLASHMOE_KERNEL") != "sm75" and torch.cuda.get_device_capability() >= (8, 0)
    for call, tensors in ((_dense, dense), *([(function, varlen)] if has_varlen else [])):
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as record:
            _gradients(call, tensors, needed)
            torch.cuda.synchronize()
        names = [event.key for event in record.key_averages() if "flashmoe" in event.key]
        ran = {name for name, text in GRADIENTS.items() if any(f"{text}_" in key for key in names)}
        assert ran == wanted, names
        assert any("row_dot" in key for key in names) == ("dq" not in wanted), names


def test_the_operator_gives_what_is_needed(device: str) -> None:
    """The results' shapes, opcheck, the counted products, and the last kernel."""
    _extension.load()
    operator = torch.ops.flashmoe.flash_attention_backward.default
    q, k, v = make_inputs(Problem(70, 90, 64, 4, 2, batch=2, causal=True), device, torch.float16)
    out, lse = _dense(q, k, v)
    arguments = (torch.ones_like(out), None, q, k, v, out, lse, 0.125, True)
    product_flops = 2 * 2 * 4 * 70 * 90 * 64
    for needs, products in ((1, 3), (2, 3), (4, 2), (6, 4), (5, 4), (7, 5)):
        with FlopCounterMode(display=False) as counter:
            results = operator(*arguments, needs)
        assert counter.get_total_flops() == products * product_flops
        for place, (result, tensor) in enumerate(zip(results, (q, k, v), strict=True)):
            assert result.shape == (tensor.shape if needs >> place & 1 else (0,))
        if has_kernel(device):
            assert ("backward_dkv" if needs & 6 else "backward_dq") in _extension.last_kernel()
    torch.library.opcheck(operator, (*arguments, 1))
    torch.library.opcheck(operator, (*arguments, 6))


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, True)], ids=["q", "kv"])
def test_compiled_and_transformed(needed: tuple[bool, ...], device: str) -> None:
    """One graph; torch.func's vjp over some of the inputs; and vmap over the vjp."""
    tensors = make_inputs(Problem(33, 40, 64, 2, 1, causal=True), device, torch.float16)
    whole = _gradients(_dense, tensors, (True,) * 3)
    compiled = torch.compile(_dense, fullgraph=True, backend="aot_eager")
    _assert_same(_gradients(compiled, tensors, needed), whole, needed)
    places = [place for place, need in enumerate(needed) if need]

    def pull(*given: Tensor) -> tuple[Tensor, ...]:
        def chosen(*some: Tensor) -> tuple[Tensor, Tensor]:
            inputs = list(given)
            for place, tensor in zip(places, some, strict=True):
                inputs[place] = tensor
            return _dense(*inputs)

        (out, lse), back = torch.func.vjp(chosen, *(given[place] for place in places))
        result: tuple[Tensor, ...] = back((torch.ones_like(out), torch.full_like(lse, 0.5)))
        return result

    for gradient, place in zip(pull(*tensors), places, strict=True):
        assert torch.equal(gradient, whole[place])
    for gradient, place in zip(torch.vmap(pull)(*(t.unsqueeze(0) for t in tensors)), places, strict=True):
        assert torch.equal(gradient.squeeze(0), whole[place])
