"""The backward operator: the error rule over the forward pass's grid, and by name each bug that other libraries have shipped.

On a GPU these test the kernels, of the best family and of forced families; on the CPU the CPU's kernels.
"""

import math
import os
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe import _extension
from flashmoe.attn import backward
from flashmoe.errors import DtypeError, FlashmoeError, ShapeError
from flashmoe.rules import translate
from flashmoe_tools.tables import load_tables

from .gradients import assert_kernel_ran, check_gradients, has_kernel, make_leaves, ours
from .reference import DTYPES, Problem, make_inputs

HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = (
    (1, 239),
    (3, 799),
    (64, 64),
    (65, 65),
    (113, 203),
    (128, 128),
    (192, 192),
    (512, 512),
    (799, 3),
    (1023, 1024),
    (1024, 1023),
)
HEADS = ((2, 2), (2, 1), (8, 1))  # groups of 1, 2 and 8 query heads per key head
KINDS = ("normal", "shifted", "logits")
REPEATS = {"cpu": 3, "cuda": 1000}
WIDTHS = {"cpu": (59, 128), "cuda": (59, 64, 128, 256)}
GIB = 1 << 30


def _like(tensor: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator(tensor.device).manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, device=tensor.device).to(tensor.dtype)


def _poison(device: str, *tensors: Tensor) -> None:
    """Fills freed memory with NaN, so that the next allocations of these sizes contain it."""
    filled = [torch.full_like(tensor, math.nan) for tensor in tensors for _ in range(3)]
    workspace = [torch.full((size,), math.nan, device=device) for size in (256, 4096, 65536, 1 << 20)]
    del filled, workspace


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"q{lengths[0]}k{lengths[1]}")
def test_grid(lengths: tuple[int, int], device: str) -> None:
    """On a GPU every head dim, mask and dtype; on the CPU some of them, in rotation."""
    place = LENGTHS.index(lengths)
    for index, (head_dim, causal) in enumerate(product(HEAD_DIMS, (False, True))):
        if device == "cpu" and (index + place) % 7 != 0:
            continue
        for turn, dtype in enumerate(DTYPES[device]):
            heads = HEADS[(index + place + turn) % 3]
            if device == "cpu" and (index + place) % 3 != turn:
                continue
            if device == "cpu" and min(lengths) > 512:
                heads = (2, 1)
            problem = Problem(*lengths, head_dim, *heads, batch=2 if max(lengths) < 256 else 1, causal=causal)
            kind = KINDS[(index + turn) % 3]
            tensors = make_inputs(problem, device, dtype, kind, bshd=index % 4 == 1, seed=index)
            check_gradients(problem, tensors, _like(tensors[0]), slack=_slack(dtype))


def _slack(dtype: torch.dtype) -> float:
    """If a row sees only one key, dS is a difference that plain PyTorch makes exactly zero."""
    return 6e-6 if dtype is torch.float32 else torch.finfo(dtype).eps / 8


@pytest.mark.gpu
def test_two_thousand_rows() -> None:
    for (head_dim, causal), dtype in product(product((64, 128, 256), (False, True)), DTYPES["cuda"]):
        problem = Problem(2048, 2048, head_dim, 4, 2, causal=causal)
        tensors = make_inputs(problem, "cuda", dtype)
        check_gradients(problem, tensors, _like(tensors[0]))


@pytest.mark.parametrize("head_dim", [1, 3, 7, 8, 9, 31, 33, 65, 129, 255])
def test_odd_head_dims(head_dim: int, device: str) -> None:
    for dtype, causal in product(DTYPES[device], (False, True)):
        problem = Problem(65, 70, head_dim, 2, 1, causal=causal)
        tensors = make_inputs(problem, device, dtype, seed=head_dim)
        check_gradients(problem, tensors, _like(tensors[0]), slack=_slack(dtype))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_padded_keys_where_logits_are_near_minus_120(causal: bool, device: str) -> None:
    """A key past the end has score 0, and exp(0 - lse) overflows if lse < -88.7: the mask must be applied after it."""
    for dtype, seq_k, head_dim in product(DTYPES[device], (5, 70, 130, 193), (64, 128)):
        problem = Problem(70, seq_k, head_dim, 2, 1, causal=causal)
        noise = make_inputs(problem, device, dtype)
        level = (120 / head_dim**0.5) ** 0.5
        q, k, v = noise[0] * 0.25 + level, noise[1] * 0.25 - level, noise[2]
        check_gradients(problem, (q, k, v), _like(q), slack=4 * _slack(dtype) + 3e-4)  # lse in float32: 2^-17 at 120


@pytest.mark.parametrize("seq_k", [1, 2, 63, 64, 65, 300])
def test_one_query(seq_k: int, device: str) -> None:
    for dtype, heads, causal in product(DTYPES[device], HEADS, (False, True)):
        problem = Problem(1, seq_k, 64, *heads, batch=2, causal=causal)
        tensors = make_inputs(problem, device, dtype)
        check_gradients(problem, tensors, _like(tensors[0]), slack=_slack(dtype))


@pytest.mark.parametrize("seq_k", [1, 2, 3, 5, 8])
def test_few_keys(seq_k: int, device: str) -> None:
    for dtype, head_dim, causal in product(DTYPES[device], WIDTHS[device], (False, True)):
        problem = Problem(150, seq_k, head_dim, 2, 1, causal=causal)
        tensors = make_inputs(problem, device, dtype)
        check_gradients(problem, tensors, _like(tensors[0]), slack=2 * _slack(dtype))


def test_every_length_up_to_two_tiles(device: str) -> None:
    dtype = torch.float16
    for seq_q in range(1, 161, 1 if device == "cuda" else 13):
        problem = Problem(seq_q, (seq_q * 7) % 161 + 1, 64, 2, 1, causal=seq_q % 2 == 0)
        tensors = make_inputs(problem, device, dtype, seed=seq_q)
        check_gradients(problem, tensors, _like(tensors[0]), slack=_slack(dtype))


def test_expanded_gradient_of_a_sum(device: str) -> None:
    """``out.sum()`` gives a gradient of stride 0 in every dimension."""
    for dtype, head_dim, causal in product(DTYPES[device], WIDTHS[device], (False, True)):
        problem = Problem(70, 90, head_dim, 4, 2, batch=2, causal=causal)
        tensors = make_inputs(problem, device, dtype)
        one = torch.ones((), device=device, dtype=dtype).expand(tensors[0].shape)
        expected = check_gradients(problem, tensors, one)
        inputs = make_leaves(*tensors)
        flashmoe.attention(*inputs, causal=causal).sum().backward()
        for leaf, gradient in zip(inputs, expected, strict=True):
            torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=0)


def _odd_rows(tensor: Tensor) -> Tensor:
    """A row stride that is not a multiple of 8 elements (16 bytes)."""
    larger = torch.zeros(*tensor.shape[:3], tensor.shape[3] + 3, dtype=tensor.dtype, device=tensor.device)
    return larger[..., : tensor.shape[3]].copy_(tensor)


def _shifted(tensor: Tensor) -> Tensor:
    """Contiguous, but starting one element past an aligned address."""
    buffer = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return buffer[1:].view(tensor.shape).copy_(tensor)


# Each function copies a tensor into a layout that is not contiguous.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "bshd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "shbd": lambda x: x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3),
    "columns first": lambda x: x.mT.contiguous().mT,
    "odd rows": _odd_rows,
    "shifted": _shifted,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_out_laid_out_unlike_out(layout: str, device: str) -> None:
    for dtype, head_dim, bshd in product(DTYPES[device], WIDTHS[device], (False, True)):
        problem = Problem(70, 133, head_dim, 4, 2, batch=2, causal=bshd)
        tensors = make_inputs(problem, device, dtype, bshd=bshd)
        grad_out = _like(tensors[0])
        changed = ours(problem, tensors, LAYOUTS[layout](grad_out))
        expected_gradients = ours(problem, tensors, grad_out.contiguous())
        for tensor, gradient, expected in zip(tensors, changed, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=0, atol=0 if device == "cuda" else 1e-3)
            assert gradient.stride() == torch.empty_like(tensor).stride()


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "row"])
def test_offsets_beyond_two_to_the_31_elements(axis: int) -> None:
    """For each tensor that the kernels read: the last index is past 2^31 elements."""
    _need_memory(6 * GIB)
    problem = Problem(65, 65, 64, 2, 2, batch=2, causal=True)
    q, k, v = make_inputs(problem, "cuda", torch.float16)
    out, lse = flashmoe.attention(q, k, v, causal=True, return_lse=True)
    given = {"grad_out": _like(q), "q": q, "k": k, "v": v, "out": out}
    rest = {"grad_lse": None, "lse": lse, "scale": 0.125, "causal": True}
    expected = torch.ops.flashmoe.flash_attention_backward(**given, **rest)
    for name, tensor in given.items():
        strides = list(tensor.stride())
        strides[axis] = ((1 << 31) // (tensor.shape[axis] - 1) // 64 + 1) * 64
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
        storage = torch.empty(last + 1, dtype=tensor.dtype, device="cuda")
        far = torch.as_strided(storage, tensor.shape, strides).copy_(tensor)
        actual = torch.ops.flashmoe.flash_attention_backward(**{**given, name: far}, **rest)
        assert_kernel_ran(q)
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b), name
        del storage, far


@pytest.mark.gpu
def test_gradient_of_more_than_two_to_the_31_elements() -> None:
    _need_memory(32 * GIB)
    rows = (1 << 25) + 129  # times 64 columns: 2^31 + 8256 elements
    generator = torch.Generator("cuda").manual_seed(3)
    q = torch.randn(1, 1, rows, 64, device="cuda", dtype=torch.float16, generator=generator)
    k = torch.randn(1, 1, 70, 64, device="cuda", dtype=torch.float16, generator=generator)
    if not has_kernel("cuda"):
        pytest.skip("this GPU has no backward kernel, and the torch operations take float32 copies of 2^31 elements")
    dq, dk, dv = ours(Problem(rows, 70, 64, 1, 1, causal=True), (q, k, k), q)
    assert not dq[:, :, :-70].any()
    tail = q[:, :, -70:].contiguous()
    for actual, expected in zip(
        (dq[:, :, -70:], dk, dv), ours(Problem(70, 70, 64, 1, 1, causal=True), (tail, k, k), tail), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("head_dim", [59, 64, 128, 256])
def test_rows_without_keys_and_poisoned_memory(head_dim: int, device: str) -> None:
    """Rows that see no key get zeros; the rest is as if those rows did not exist; old memory contents never show."""
    for dtype in DTYPES[device]:
        problem = Problem(230, 30, head_dim, 4, 2, batch=2, causal=True)
        q, k, v = make_inputs(problem, device, dtype)
        grad_out = _like(q)
        _poison(device, q, k, v)
        dq, dk, dv = check_gradients(problem, (q, k, v), grad_out, slack=_slack(dtype))
        assert not dq[:, :, :200].any()
        seen = Problem(30, 30, head_dim, 4, 2, batch=2, causal=True)
        tail = ours(seen, (q[:, :, 200:], k, v), grad_out[:, :, 200:])
        for actual, expected in zip((dq[:, :, 200:], dk, dv), tail, strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_keys_that_no_query_sees(causal: bool, device: str) -> None:
    """Without queries no key is seen (otherwise the last query sees all): gradients are zero, whatever memory held before."""
    for dtype in DTYPES[device]:
        q, k, v = make_inputs(Problem(0, 70, 64), device, dtype)
        out, lse = flashmoe.attention(q, k, v, causal=causal, return_lse=True)
        _poison(device, k, v)
        dq, dk, dv = torch.ops.flashmoe.flash_attention_backward(out, None, q, k, v, out, lse, 0.125, causal)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
        assert not dk.any()
        assert not dv.any()


def test_poisoned_gradients_and_workspace(device: str) -> None:
    """The allocator returns memory that holds NaN: a value that was never written, or a sum that started from it, would show."""
    for dtype, head_dim, causal in product(DTYPES[device], WIDTHS[device], (False, True)):
        problem = Problem(193, 131, head_dim, 4, 2, causal=causal)
        tensors = make_inputs(problem, device, dtype)
        grad_out = _like(tensors[0])
        out, lse = flashmoe.attention(*tensors, causal=causal, return_lse=True)
        arguments = (grad_out, None, *tensors, out, lse, head_dim**-0.5, causal)
        expected = torch.ops.flashmoe.flash_attention_backward(*arguments)
        _poison(device, *tensors, lse)
        for actual, before in zip(torch.ops.flashmoe.flash_attention_backward(*arguments), expected, strict=True):
            assert torch.equal(actual, before), (dtype, head_dim, causal)


def _assert_repeats_are_equal(head_dim: int, causal: bool, device: str, dtype: torch.dtype) -> None:
    """A race between copies and products, or a sum in random order, would show as a difference in some repeat."""
    problem = Problem(449, 515, head_dim, 4, 2, batch=2, causal=causal)
    q, k, v = make_inputs(problem, device, dtype)
    out, lse = flashmoe.attention(q, k, v, causal=causal, return_lse=True)
    arguments = (_like(q), _like(lse), q, k, v, out, lse, head_dim**-0.5, causal)
    first = torch.ops.flashmoe.flash_attention_backward(*arguments)
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(REPEATS[device]):
        for a, b in zip(torch.ops.flashmoe.flash_attention_backward(*arguments), first, strict=True):
            different += (a.view(torch.int16) != b.view(torch.int16)).sum()
    assert_kernel_ran(q)
    assert different.item() == 0, f"{different.item()} values differ over {REPEATS[device]} repeats"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_repeats_are_bitwise_equal(head_dim: int, causal: bool, device: str) -> None:
    _assert_repeats_are_equal(head_dim, causal, device, torch.bfloat16)


@pytest.mark.gpu
def test_the_fused_kernel() -> None:
    """When it is selected: the error rule with partial tiles and groups, the same bits on every run, with two streams at once, in poisoned memory."""
    if torch.cuda.get_device_capability() != (9, 0) or os.environ.get("FLASHMOE_KERNEL") not in (None, "", "sm90"):
        pytest.skip("not run: only compute capability 9.0 has a fused kernel")
    problems = (
        (Problem(3111, 4165, 64, 8, 4, batch=4, causal=False), torch.bfloat16),
        (Problem(3111, 4165, 40, 8, 4, batch=4, causal=False), torch.float16),
        (Problem(3111, 4165, 64, 8, 4, batch=4, causal=True), torch.bfloat16),
        # Many tiles, so they run in the other order; the first rows see no key.
        (Problem(2222, 2100, 64, 16, 16, batch=4, causal=True), torch.float16),
        (Problem(4101, 4165, 128, 8, 4, batch=4, causal=False), torch.bfloat16),
        (Problem(4101, 4165, 104, 8, 4, batch=4, causal=False), torch.float16),
        (Problem(8201, 8265, 128, 16, 8, causal=True), torch.bfloat16),  # all tiles in descending order
        # The last section in descending order; the first rows see no key.
        (Problem(8265, 8201, 104, 18, 18, causal=True), torch.float16),
    )
    for problem, dtype in problems:
        tensors = make_inputs(problem, "cuda", dtype)
        grad_out = _like(tensors[0])
        _poison("cuda", *tensors, torch.empty(1 << 25, device="cuda"))  # the last tensor has the size of dq's sums
        first = check_gradients(problem, tensors, grad_out)
        assert "attention_backward_fused" in _extension.last_kernel()
        assert ("d128" in _extension.last_kernel()) is (problem.head_dim > 64)
        out, lse = flashmoe.attention(*tensors, causal=problem.causal, return_lse=True)
        arguments = (grad_out, None, *tensors, out, lse, problem.head_dim**-0.5, problem.causal)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        for _ in range(20):
            results = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(torch.ops.flashmoe.flash_attention_backward(*arguments))
            torch.cuda.synchronize()
            for result in results:
                for actual, before in zip(result, first, strict=True):
                    assert torch.equal(actual, before)


@pytest.mark.parametrize("with_out", [True, False], ids=["out and lse", "lse"])
def test_gradient_of_the_log_sum_exp(with_out: bool, device: str) -> None:
    for dtype, head_dim, causal in product(DTYPES[device], WIDTHS[device], (False, True)):
        problem = Problem(130, 97, head_dim, 4, 2, batch=2, causal=causal)
        tensors = make_inputs(problem, device, dtype)
        grad_lse = _like(tensors[0].float()[..., 0])
        _, _, dv = check_gradients(problem, tensors, _like(tensors[0]) if with_out else None, grad_lse)
        assert with_out or not dv.any()


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.0])
def test_scale(scale: float, device: str) -> None:
    for dtype, head_dim, causal in product(DTYPES[device], WIDTHS[device], (False, True)):
        problem = Problem(65, 90, head_dim, causal=causal)
        tensors = make_inputs(problem, device, dtype)
        gradients = check_gradients(problem, tensors, _like(tensors[0]), scale=scale)
        if scale == 0.0:
            assert not gradients[0].any()
            assert not gradients[1].any()


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_autocast(target: torch.dtype, device: str) -> None:
    """float32 leaves under autocast: gradients are float32, with the values of the 16-bit computation."""
    tensors = make_inputs(Problem(90, 70, 64, 4, 2, causal=True), device, torch.float32)
    grad_out = _like(tensors[0]).to(target)
    mixed, plain = make_leaves(*tensors), make_leaves(*tensors, dtype=target)
    with torch.autocast(device, target):
        out = flashmoe.attention(*mixed, causal=True)
    assert out.dtype == target
    out.backward(grad_out)
    flashmoe.attention(*plain, causal=True).backward(grad_out)
    eps = torch.finfo(target).eps
    for a, b in zip(mixed, plain, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.dtype == torch.float32
        torch.testing.assert_close(a.grad, b.grad.float(), rtol=2 * eps, atol=4 * eps)


def _families() -> list[str]:
    """Kernel families of this machine's GPU, best first; without a GPU those of the newest, so that the tests are counted."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    known = [gpu for gpu in load_tables().gpus if gpu.compute_capability <= capability]
    return list(max(known, key=lambda gpu: gpu.compute_capability).families)


def _dtypes_of(family: str) -> tuple[tuple[torch.dtype, str], ...]:
    every = ((torch.float16, "f16"), (torch.bfloat16, "bf16"))
    return tuple(
        (dtype, word)
        for dtype, word in every
        if any(
            row.operation == "attention_backward_dq" and row.family == family and word in row.dtypes
            for row in load_tables().kernels
        )
    )


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"q{lengths[0]}k{lengths[1]}")
@pytest.mark.parametrize("family", _families())
def test_every_family_of_this_gpu(family: str, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each family that this GPU runs, forced: the error rule, and the same bits twice."""
    monkeypatch.setenv("FLASHMOE_KERNEL", family)
    for index, (head_dim, causal) in enumerate(product(HEAD_DIMS, (False, True))):
        for turn, (dtype, _) in enumerate(_dtypes_of(family)):
            heads = HEADS[(index + turn) % 3]
            problem = Problem(*lengths, head_dim, *heads, batch=2 if max(lengths) < 256 else 1, causal=causal)
            tensors = make_inputs(problem, "cuda", dtype, KINDS[(index + turn) % 3], bshd=index % 4 == 1, seed=index)
            grad_out = _like(tensors[0])
            first = check_gradients(problem, tensors, grad_out, slack=_slack(dtype))
            for actual, expected in zip(ours(problem, tensors, grad_out), first, strict=True):
                assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [1, 59, 64, 65, 128, 129, 256])
@pytest.mark.parametrize("family", _families())
def test_the_kernel_is_the_one_of_the_table(family: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's best family is selected by default, the others when forced by name."""
    if family != _families()[0]:
        monkeypatch.setenv("FLASHMOE_KERNEL", family)
    width = next(width for width in (64, 128, 256) if head_dim <= width)
    for (dtype, word), causal in product(_dtypes_of(family), (False, True)):
        problem = Problem(100, 100, head_dim, causal=causal)
        tensors = make_inputs(problem, "cuda", dtype)
        ours(problem, tensors, _like(tensors[0]))
        prefix = f"flashmoe_attention_backward_dkv_{family}_{word}_d{width}"
        assert _extension.last_kernel().startswith(prefix)
        assert _extension.last_kernel().endswith("causal" if causal else "full")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [59, 64, 128, 256])
@pytest.mark.parametrize("family", _families())
def test_every_family_agrees_with_torch_operations(family: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gradient of lse, grouped heads, and out in another layout than its gradient."""
    monkeypatch.setenv("FLASHMOE_KERNEL", family)
    for (dtype, _), causal in product(_dtypes_of(family), (False, True)):
        problem = Problem(230, 150, head_dim, 4, 2, batch=2, causal=causal)
        tensors = make_inputs(problem, "cuda", dtype)
        grad_out = LAYOUTS["bshd"](_like(tensors[0]))
        scale = head_dim**-0.5
        out, lse = flashmoe.attention(*tensors, causal=causal, return_lse=True)
        arguments = (grad_out, _like(lse), *tensors, out, lse, scale, causal)
        results = torch.ops.flashmoe.flash_attention_backward(*arguments)
        assert_kernel_ran(out)
        for actual, expected in zip(results, backward.backward(*arguments), strict=True):
            torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", _families()[1:])
def test_repeats_of_every_family_are_bitwise_equal(family: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_KERNEL", family)
    _assert_repeats_are_equal(head_dim, True, "cuda", _dtypes_of(family)[-1][0])


def _wrong(change: str) -> tuple[dict[str, object], type[FlashmoeError], str]:
    """Arguments of the extension's own operator with one error, the expected error type, and a word of its message."""
    q, k, v = make_inputs(Problem(65, 70, 64, 4, 2, batch=2), "cuda", torch.float16)
    lse = torch.zeros(2, 4, 65, device="cuda")
    given: dict[str, object] = {"grad_out": q, "grad_lse": None, "q": q, "k": k, "v": v, "out": q, "lse": lse}
    given |= {"scale": 0.125, "causal": False}
    changes: dict[str, tuple[dict[str, object], type[FlashmoeError], str]] = {
        "rows of grad_out": ({"grad_out": q[:, :, 1:]}, ShapeError, "grad_out"),
        "rank of grad_out": ({"grad_out": q[0]}, ShapeError, "grad_out"),
        "dtype of grad_out": ({"grad_out": q.float()}, DtypeError, "grad_out"),
        "columns of grad_out": ({"grad_out": q.mT.contiguous().mT}, ShapeError, "grad_out"),
        "heads of out": ({"out": q[:, :2]}, ShapeError, "out"),
        "dtype of out": ({"out": q.bfloat16()}, DtypeError, "out"),
        "rows of lse": ({"lse": lse[:, :, 1:].contiguous()}, ShapeError, "lse"),
        "dtype of lse": ({"lse": lse.half()}, DtypeError, "lse"),
        "order of lse": ({"lse": lse.mT.contiguous().mT}, ShapeError, "lse"),
        "rows of grad_lse": ({"grad_lse": lse[:, :, 1:].contiguous()}, ShapeError, "grad_lse"),
        "dtype of grad_lse": ({"grad_lse": lse.double()}, DtypeError, "grad_lse"),
        "heads of k and v": ({"k": k[:, [0, 0, 0]], "v": v[:, [0, 0, 0]]}, ShapeError, "heads"),
        "dtype of k": ({"k": k.bfloat16()}, DtypeError, "dtype"),
        "keys of v": ({"v": v[:, :, 1:]}, ShapeError, "v"),
    }
    wrong, error, word = changes[change]
    return {**given, **wrong}, error, word


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        *("rows of grad_out", "rank of grad_out", "dtype of grad_out", "columns of grad_out"),
        *("heads of out", "dtype of out", "rows of lse", "dtype of lse", "order of lse"),
        *("rows of grad_lse", "dtype of grad_lse", "heads of k and v", "dtype of k", "keys of v"),
    ],
)
def test_wrong_arguments_of_the_extension_have_typed_errors(change: str) -> None:
    arguments, error, word = _wrong(change)
    with pytest.raises((RuntimeError, FlashmoeError)) as caught:
        torch.ops.flashmoe._flash_attention_backward(**arguments)
    typed = caught.value if isinstance(caught.value, FlashmoeError) else translate(caught.value)
    assert isinstance(typed, error), caught.value
    assert word in str(typed)


def _need_memory(wanted: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < wanted:
        pytest.skip(f"needs {wanted / GIB:.0f} GiB of free GPU memory; nothing is proved here")
