"""Values that break a careless softmax: extremes, NaN and Inf, rows without keys, empty tensors, poisoned memory."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

import flashmoe

from .reference import CLOSE, DTYPES, LSE_TOLERANCE, Problem, assert_ran_here, check_attention, make_inputs, visible


def _inputs(
    device: str, dtype: torch.dtype, seq_q: int = 70, seq_k: int = 130, **sizes: int
) -> tuple[Tensor, Tensor, Tensor]:
    return make_inputs(Problem(seq_q, seq_k, **sizes), device, dtype)


@pytest.mark.parametrize("factor", [10, 50])
def test_large_logits(factor: int, device: str) -> None:
    for dtype, causal in product(DTYPES[device], (False, True)):
        q, k, v = _inputs(device, dtype)
        check_attention(q * factor, k, v, causal)


def test_scores_beyond_the_range_of_half(device: str) -> None:
    """q k^T of 4e6 overflows float16 but not the float32 that scores are kept in: each row picks one key.

    The largest weight is exp2(fma(s, c, -round(m c))) on a GPU, which differs from 1 by a few percent here; the row sum contains the
    same factor, so what remains is the rounding of that weight to the inputs' dtype.
    """
    for dtype in DTYPES[device]:
        q = torch.full((1, 1, 40, 64), 250.0, dtype=dtype, device=device)
        k = torch.full((1, 1, 100, 64), 200.0, dtype=dtype, device=device)
        k[:, :, 37] = 256.0
        v = torch.randn(1, 1, 100, 64, device=device).to(dtype)
        out, lse = flashmoe.attention(q, k, v, return_lse=True)
        rounding = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(out, v[:, :, 37:38].expand_as(out), rtol=rounding, atol=0)
        assert torch.allclose(lse, torch.full_like(lse, 250.0 * 256.0 * 8.0), rtol=1e-6)


def test_constant_inputs_average_the_values(device: str) -> None:
    """All scores are equal: the result is the mean of the visible values, known exactly for each row."""
    for dtype, causal in product(DTYPES[device], (False, True)):
        q = torch.ones(1, 2, 65, 64, dtype=dtype, device=device)
        v = torch.randn(1, 2, 65, 64, device=device).to(dtype)
        out = flashmoe.attention(q, q, v, causal=causal)
        mean = v.double().cumsum(2) / torch.arange(1, 66, device=device).view(-1, 1)
        expected = mean if causal else mean[:, :, -1:].expand_as(mean)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2 if dtype is torch.bfloat16 else 2e-3, atol=4e-3)


@pytest.mark.parametrize("size", [24.0, 48.0, 384.0, 448.0, 3072.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_equal_scores_of_any_size(head_dim: int, size: float, device: str) -> None:
    """A maximum that stays the same over 64 tiles: the first keys weigh as much as the last, at scores of up to 2e8."""
    heads = 2 if device == "cpu" else 256  # enough that no GPU splits the keys of a row
    for dtype, causal in product(DTYPES[device], (False, True)):
        q = torch.full((1, heads, 150, head_dim), size, dtype=dtype, device=device)
        k = torch.full((1, 1, 4097, head_dim), size, dtype=dtype, device=device)
        v = torch.ones(1, 1, 4097, head_dim, dtype=dtype, device=device)
        v[:, :, 2048:] = 3.0
        seen = 4097 - 149 + torch.arange(150, device=device) if causal else torch.tensor(4097, device=device)
        expected = (3.0 - 2.0 * 2048 / seen.double()).view(1, 1, -1, 1).expand(q.shape)
        out, lse = flashmoe.attention(q, k, v, causal=causal, return_lse=True)
        # Equal terms all round the same way: 128 keys summed in fp32 have an error of up to 64.5 * 2^-24.
        torch.testing.assert_close(out.double(), expected, rtol=max(torch.finfo(dtype).eps, 4e-6), atol=0.0)
        scores = torch.full_like(lse, size * size * head_dim**0.5)
        torch.testing.assert_close(lse, scores + seen.log().float(), rtol=1e-6, atol=2e-4)


def test_nan_in_a_query_stays_in_its_row(device: str) -> None:
    for dtype, causal in product(DTYPES[device], (False, True)):
        q, k, v = _inputs(device, dtype)
        clean, clean_lse = flashmoe.attention(q, k, v, causal=causal, return_lse=True)
        q[0, 1, 33, 5] = math.nan
        out, lse = flashmoe.attention(q, k, v, causal=causal, return_lse=True)
        assert out[0, 1, 33].isnan().all()
        assert lse[0, 1, 33].isnan()
        others = torch.ones_like(lse, dtype=torch.bool)
        others[0, 1, 33] = False
        # close, not equal: a backend may take another code path for a block that holds a NaN
        torch.testing.assert_close(out[others], clean[others], rtol=0, atol=CLOSE[dtype])
        torch.testing.assert_close(lse[others], clean_lse[others], rtol=0, atol=LSE_TOLERANCE)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_bad_key_reaches_exactly_the_rows_that_see_it(bad: float, device: str) -> None:
    for dtype, causal in product(DTYPES[device], (False, True)):
        q, k, v = _inputs(device, dtype)
        clean = flashmoe.attention(q, k, v, causal=causal)
        k[0, 0, 100, 0] = bad
        q[0, 0, :, 0] = 1.0  # the score is +inf, not -inf, where the key is inf
        touched = visible(70, 130, device)[:, 100] if causal else torch.ones(70, dtype=torch.bool, device=device)
        out = flashmoe.attention(q, k, v, causal=causal)
        assert out[0, 0, touched].isnan().all()
        assert out[0, 0, ~touched].isfinite().all()
        torch.testing.assert_close(out[0, 1], clean[0, 1], rtol=0, atol=CLOSE[dtype])


def test_key_with_score_minus_infinity_has_no_weight(device: str) -> None:
    for dtype in DTYPES[device]:
        q, k, v = _inputs(device, dtype)
        q[..., 0] = 1.0
        k[..., 77, 0] = -math.inf
        out = flashmoe.attention(q, k, v)
        keep = [j for j in range(130) if j != 77]
        expected = flashmoe.attention(q, k[:, :, keep].contiguous(), v[:, :, keep].contiguous())
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2 if dtype is torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("seq_q", [1, 70])
def test_the_rule_for_scores_that_are_not_finite(seq_q: int, device: str) -> None:
    """A NaN score gives NaN. +inf gives NaN, also in lse (plain attention: +inf). -inf has no weight. All -inf: on the CPU like no key at
    all, gradients included; on a GPU that, or NaN as in a plain softmax, because tiles without a mask do not check rows for keys."""
    for dtype in DTYPES[device]:
        for value, keys, wanted in (
            (math.nan, [77], math.nan),
            (math.inf, [77], math.nan),
            (-math.inf, [77], None),
            (-math.inf, list(range(130)), -math.inf),
        ):
            q, k, v = _inputs(device, dtype, seq_q)
            q[..., 0], k[..., 0] = 1.0, 0.0
            k[..., keys, 0] = value
            v.requires_grad_()
            out, lse = flashmoe.attention(q, k, v, return_lse=True)
            (grad_v,) = torch.autograd.grad(out.float().sum(), v)
            if wanted is None:
                assert out.isfinite().all()
                assert lse.isfinite().all()
                assert device == "cuda" or not grad_v[:, :, 77].any()
            elif math.isnan(wanted):
                assert out.isnan().all()
                assert lse.isnan().all()
            elif device == "cuda":
                assert ((out == 0) | out.isnan()).all()
                assert ((lse == wanted) | lse.isnan()).all()
            else:
                assert not out.any()
                assert (lse == wanted).all()
                assert not grad_v.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_bad_value_stays_in_its_column(bad: float, device: str) -> None:
    for dtype in DTYPES[device]:
        q, k, v = _inputs(device, dtype)
        clean = flashmoe.attention(q, k, v)
        v[0, 1, 100, 9] = bad
        out = flashmoe.attention(q, k, v)
        assert not out[0, 1, :, 9].isfinite().any()
        columns = [column for column in range(64) if column != 9]
        torch.testing.assert_close(out[..., columns], clean[..., columns], rtol=0, atol=CLOSE[dtype])
        torch.testing.assert_close(out[0, 0], clean[0, 0], rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize(("seq_q", "seq_k"), [(2, 1), (65, 64), (130, 5), (200, 136), (300, 44)])
def test_rows_without_a_visible_key(seq_q: int, seq_k: int, device: str) -> None:
    """Bottom-right causal mask, more queries than keys: the first Sq - Sk rows are exactly 0, their lse exactly -inf."""
    for dtype, head_dim in product(DTYPES[device], (40, 64, 128)):
        q, k, v = _inputs(device, dtype, seq_q, seq_k, head_dim=head_dim)
        out, lse = check_attention(q, k, v, causal=True)
        assert torch.equal(out[:, :, : seq_q - seq_k], torch.zeros_like(out[:, :, : seq_q - seq_k]))
        assert (lse[:, :, : seq_q - seq_k] == -math.inf).all()
        assert lse[:, :, seq_q - seq_k :].isfinite().all()


@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_kv", "seq_q", "seq_k"),
    [
        (0, 2, 2, 5, 7),
        (2, 0, 0, 5, 7),
        (2, 0, 2, 5, 7),
        (2, 2, 2, 0, 7),
        (2, 4, 2, 5, 0),
        (0, 0, 0, 0, 0),
        (2, 2, 1, 0, 0),
    ],
)
def test_empty_sizes(batch: int, heads_q: int, heads_kv: int, seq_q: int, seq_k: int, device: str) -> None:
    for dtype, causal in product(DTYPES[device], (False, True)):
        problem = Problem(seq_q, seq_k, 64, heads_q, heads_kv, batch=batch)
        q, k, v = make_inputs(problem, device, dtype)
        out, lse = flashmoe.attention(q, k, v, causal=causal, return_lse=True)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:3]
        assert (out == 0).all()  # if there are rows, there are no keys
        assert (lse == -math.inf).all()


def _poison(device: str, dtype: torch.dtype, shape: tuple[int, ...], copies: int) -> set[int]:
    """Returns freed blocks of the given size, full of NaN, to the allocator; returns their addresses."""
    blocks = [torch.full(shape, math.nan, dtype=dtype, device=device) for _ in range(copies)]
    return {block.data_ptr() for block in blocks}


@pytest.mark.parametrize("head_dim", [40, 59, 64, 128, 192, 256])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (65, 65), (113, 203), (130, 5), (4, 0)])
def test_poisoned_outputs_are_written_in_full(seq_q: int, seq_k: int, head_dim: int, device: str) -> None:
    reused = 0
    for dtype, causal in product(DTYPES[device], (False, True)):
        q, k, v = make_inputs(Problem(seq_q, seq_k, head_dim), device, dtype)
        out_blocks = _poison(device, dtype, tuple(q.shape), 8)
        lse_blocks = _poison(device, torch.float32, tuple(q.shape[:3]), 8)
        out, lse = flashmoe.attention(q, k, v, causal=causal, return_lse=True)
        reused += out.data_ptr() in out_blocks or lse.data_ptr() in lse_blocks
        assert not out.isnan().any()
        assert not lse.isnan().any()
    assert reused > 0 or device == "cpu", "no output took poisoned memory: the test proved nothing"


@pytest.mark.parametrize("head_dim", [40, 59, 64, 128, 256])
def test_nothing_outside_the_inputs_is_read(head_dim: int, device: str) -> None:
    """Each input is a view into a buffer full of NaN: a read past a row, a column or the end shows in the result."""
    for dtype, causal in product(DTYPES[device], (False, True)):
        q, k, v = make_inputs(Problem(65, 67, head_dim), device, dtype)
        windows = []
        for tensor in (q, k, v):
            batch, heads, rows, columns = tensor.shape
            buffer = torch.full((batch, heads + 2, rows + 64, columns + 16), math.nan, dtype=dtype, device=device)
            window = buffer[:, 1:-1, 32:-32, 8:-8]
            window.copy_(tensor)
            windows.append(window)
        out, lse = flashmoe.attention(*windows, causal=causal, return_lse=True)
        assert_ran_here(device)
        expected, expected_lse = flashmoe.attention(q, k, v, causal=causal, return_lse=True)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
