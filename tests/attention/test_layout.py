"""Strides, offsets and alignment of the inputs; strides of the output; addresses beyond 2^31 elements."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe.attn.fake import output_strides

from .reference import DTYPES, Problem, assert_ran_here, check_attention, make_inputs

GIB = 1 << 30


def _head_last(tensor: Tensor) -> Tensor:
    """The same values stored as [B, S, H, D]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _sliced(tensor: Tensor) -> Tensor:
    """Every second row and head of a larger tensor, with a margin of columns."""
    batch, heads, rows, columns = tensor.shape
    larger = torch.zeros(batch, 2 * heads, 2 * rows, columns + 24, dtype=tensor.dtype, device=tensor.device)
    view = larger[:, ::2, 1::2, 8 : 8 + columns]
    return view.copy_(tensor)


def _shifted(tensor: Tensor) -> Tensor:
    """Contiguous, but starting one element past an aligned address."""
    buffer = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return buffer[1:].view(tensor.shape).copy_(tensor)


def _odd_rows(tensor: Tensor) -> Tensor:
    """A row stride that is not a multiple of 8 elements (16 bytes)."""
    batch, heads, rows, columns = tensor.shape
    return torch.zeros(batch, heads, rows, columns + 3, dtype=tensor.dtype, device=tensor.device)[..., :columns].copy_(
        tensor
    )


def _batch_innermost(tensor: Tensor) -> Tensor:
    """Stored as [S, H, B, D]."""
    return tensor.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "bshd": _head_last,
    "sliced": _sliced,
    "shifted": _shifted,
    "odd rows": _odd_rows,
    "shbd": _batch_innermost,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [59, 64, 128])
def test_layouts_give_the_same_numbers(layout: str, head_dim: int, device: str) -> None:
    change = LAYOUTS[layout]
    for dtype, causal in product(DTYPES[device], (False, True)):
        plain = make_inputs(Problem(70, 133, head_dim, 4, 2, batch=2), device, dtype)
        expected, expected_lse = flashmoe.attention(*plain, causal=causal, return_lse=True)
        for which in ((0,), (1,), (2,), (0, 1, 2)):
            tensors = [change(tensor) if position in which else tensor for position, tensor in enumerate(plain)]
            out, lse = flashmoe.attention(*tensors, causal=causal, return_lse=True)
            assert_ran_here(device)
            assert torch.equal(out, expected), f"inputs {which} {layout}, {dtype}"
            assert torch.equal(lse, expected_lse)


def test_mixed_layouts(device: str) -> None:
    q, k, v = make_inputs(Problem(70, 133, 64, 4, 2, batch=2), device, torch.float16)
    check_attention(_head_last(q), _sliced(k), v, causal=True)
    check_attention(_shifted(q), _batch_innermost(k), _odd_rows(v), causal=False)


def test_slices_of_one_fused_projection(device: str) -> None:
    """q, k and v as views of one [B, S, 3, H, D] tensor, as a fused projection returns them."""
    fused = torch.randn(2, 65, 3, 4, 64, device=device).to(torch.bfloat16)
    q, k, v = (fused[:, :, part].transpose(1, 2) for part in range(3))
    out, _ = check_attention(q, k, v, causal=True)
    assert out.transpose(1, 2).is_contiguous()


def test_expanded_keys(device: str) -> None:
    """One key head, or one batch element, repeated with stride 0."""
    for causal in (False, True):
        q, k, v = make_inputs(Problem(65, 70, 64, 4, 1, batch=2), device, torch.float16)
        expected = flashmoe.attention(q, k, v, causal=causal)
        by_head = flashmoe.attention(q, k.expand(2, 4, 70, 64), v.expand(2, 4, 70, 64), causal=causal)
        assert torch.equal(by_head, expected)
        check_attention(q, k[:1].expand(2, 1, 70, 64), v[:1].expand(2, 1, 70, 64), causal=causal)
        check_attention(q[:, :, :1].expand(2, 4, 65, 64), k, v, causal=causal)
        check_attention(q, k[:, :, :1].expand(2, 1, 70, 64), v, causal=causal)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_output_keeps_the_order_of_strides(order: tuple[int, int, int], device: str) -> None:
    sizes = (2, 3, 5)
    stored = torch.randn(*(sizes[axis] for axis in order), 64, device=device).to(torch.float16)
    q = stored.permute(*(order.index(axis) for axis in range(3)), 3)
    assert q.shape == (*sizes, 64)
    out = flashmoe.attention(q, q, q)
    assert out.stride() == torch.empty_like(q).stride()


def test_output_strides_follow_the_stated_rule(device: str) -> None:
    base = torch.randn(2, 4, 6, 64, device=device).to(torch.float16)
    for q in (base, _head_last(base), _sliced(base), base[:1].expand(2, 4, 6, 64), base[:, :1], base[:, :, :0]):
        out, lse = flashmoe.attention(
            q, base[: q.shape[0], : q.shape[1]], base[: q.shape[0], : q.shape[1]], return_lse=True
        )
        assert out.stride() == output_strides(q.shape, q.stride())
        assert lse.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_transposed_inputs_are_not_copied(head_dim: int) -> None:
    """[B, S, H, D] needs no memory except for the results."""
    problem = Problem(1024, 1024, head_dim, 16, 16, batch=8)  # enough tiles for every GPU: nothing is split over blocks
    q, k, v = make_inputs(problem, "cuda", torch.bfloat16, bshd=True)
    flashmoe.attention(q, k, v)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, lse = flashmoe.attention(q, k, v, return_lse=True)
    results = out.numel() * out.element_size() + lse.numel() * lse.element_size()
    assert torch.cuda.max_memory_allocated() - before <= results + (1 << 20)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "row"])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_offsets_beyond_two_to_the_31_elements(which: str, axis: int, device: str) -> None:
    """One stride is so large that the last index is past 2^31 elements (4 GiB of addresses, few of them touched)."""
    _need_memory(device, 5 * GIB)
    dtype = torch.float16
    q, k, v = make_inputs(Problem(65, 65, 64, 2, 2, batch=2), device, dtype)
    tensors = {"q": q, "k": k, "v": v}
    original = tensors[which]
    strides = list(original.stride())
    strides[axis] = ((1 << 31) // (original.shape[axis] - 1) // 64 + 1) * 64
    last = sum((size - 1) * stride for size, stride in zip(original.shape, strides, strict=True))
    assert last > 1 << 31
    storage = torch.empty(last + 1, dtype=dtype, device=device)
    far = torch.as_strided(storage, original.shape, strides)
    far.copy_(original)
    expected = flashmoe.attention(q, k, v, causal=True)
    out = flashmoe.attention(**{**tensors, which: far}, causal=True)
    assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_output_of_more_than_two_to_the_31_elements(causal: bool) -> None:
    rows = (1 << 25) + 129  # times 64 columns: 2^31 + 8256 elements
    _need_memory("cuda", 20 * GIB)
    generator = torch.Generator("cuda").manual_seed(3)
    q = torch.randn(1, 1, rows, 64, device="cuda", dtype=torch.float16, generator=generator)
    k = torch.randn(1, 1, 70, 64, device="cuda", dtype=torch.float16, generator=generator)
    out, lse = flashmoe.attention(q, k, k, causal=causal, return_lse=True)
    if causal:  # only the last 70 rows see a key
        assert not out[:, :, :-70].any()
        assert torch.isneginf(lse[:, :, :-70]).all()
    tail = flashmoe.attention(q[:, :, -300:], k, k, causal=causal)
    torch.testing.assert_close(out[:, :, -300:], tail, rtol=0, atol=2e-3)
    assert not out.isnan().any()


@pytest.mark.gpu
def test_many_batches_and_heads() -> None:
    """More (batch, head) pairs than a grid's second dimension could hold (65535)."""
    q = torch.randn(2200, 32, 3, 64, device="cuda").to(torch.bfloat16)
    out = flashmoe.attention(q, q, q)
    for index in (0, 2047, 2048, 2199):
        one = q[index : index + 1].contiguous()
        torch.testing.assert_close(out[index : index + 1], flashmoe.attention(one, one, one), rtol=0, atol=1e-2)


def _need_memory(device: str, wanted: int) -> None:
    if device != "cuda":
        return
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < wanted:
        pytest.skip(f"needs {wanted / GIB:.0f} GiB of free GPU memory; nothing is proved here")
