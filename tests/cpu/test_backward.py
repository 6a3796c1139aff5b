"""The backward pass with every instruction set: errors, the same bits for any number of workers, NaN only where it is visible."""

import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashmoe.attn import backward as by_torch
from tests.attention.drawn import lengths
from tests.attention.reference import Problem, make_inputs

from .backend import Backend
from .checking import DTYPES, with_guard_page, with_large_stride
from .test_forward import SMALL

# Error relative to the largest gradient. bf16: P and dS are rounded too when pairs of bf16 are multiplied.
LIMITS = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
PROBLEMS = (
    Problem(128, 128, 64),  # whole blocks
    Problem(65, 129, 59, 4, 2, batch=2),  # one past a block, one word short of a row
    Problem(131, 70, 128, 6, 2),  # rows without keys if causal
    Problem(1, 300, 33),
    Problem(200, 1, 1),
    Problem(63, 257, 255),
    Problem(129, 130, 256, 2, 1),
)
WORKERS = (1, 2, 3, 64)


@cache
def _case(problem: Problem, dtype: torch.dtype, scale: float, *, with_lse: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The arguments of ``Backend.backward``, and float64 gradients from torch operations."""
    q, k, v = (t.double() for t in make_inputs(problem, "cpu", dtype, bshd=True))
    group = problem.heads_q // problem.heads_kv
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if problem.causal:
        seen = torch.ones(problem.seq_q, problem.seq_k, dtype=torch.bool).tril(problem.seq_k - problem.seq_q)
        scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    out = (
        (scores - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)).exp() @ v.repeat_interleave(group, 1)
    ).to(dtype)
    generator = torch.Generator().manual_seed(1)
    grad_out = torch.randn(out.shape, generator=generator).to(dtype)
    grad_lse = torch.randn(lse.shape, generator=generator) if with_lse else None
    wide = (grad_out.double(), None if grad_lse is None else grad_lse.double())
    expected = by_torch.backward(*wide, q, k, v, out.double(), lse, scale, problem.causal)
    inputs = make_inputs(problem, "cpu", dtype, bshd=True)
    return [grad_out, *inputs, out, lse.float(), *([] if grad_lse is None else [grad_lse])], list(expected)


def _run(
    backend: Backend, given: list[Tensor], causal: bool, scale: float | None = None, threads: int = 2
) -> list[Tensor]:
    grad_out, q, k, v, out, lse, *rest = given
    grad_lse = rest[0] if rest else None
    return backend.backward(grad_out, q, k, v, out, lse, causal=causal, scale=scale, grad_lse=grad_lse, threads=threads)


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bitwise equality, including NaN."""
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(backend: Backend, dtype: torch.dtype, causal: bool) -> None:
    """Every tail, strided inputs, groups of heads, a gradient of lse, scales of either sign; elements that are not written stay NaN."""
    for index, sizes in enumerate(PROBLEMS):
        _check_gradients(backend, replace(sizes, causal=causal), dtype, index)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths(), st.integers(1, 256), st.sampled_from([(1, 1), (2, 1), (6, 2)]), st.booleans(), st.sampled_from(DTYPES)
)
def test_gradients_of_any_lengths(
    backend: Backend, sizes: tuple[int, int], head_dim: int, heads: tuple[int, int], causal: bool, dtype: torch.dtype
) -> None:
    _check_gradients(backend, Problem(*sizes, head_dim, *heads, causal=causal), dtype, sizes[0])


def _check_gradients(backend: Backend, problem: Problem, dtype: torch.dtype, index: int) -> None:
    scale = problem.head_dim**-0.5 * (-0.5 if index % 2 else 1.0)
    given, expected = _case(problem, dtype, scale, with_lse=index % 3 == 1)
    largest = max(tensor.abs().max().item() for tensor in expected)  # dq and dk can be just rounding errors (one key)
    for name, found, wanted in zip("qkv", _run(backend, given, problem.causal, scale), expected, strict=True):
        error = (found.double() - wanted).abs().max().item()
        assert error <= LIMITS[dtype] * largest, f"d{name}: {error:.2e} of {largest:.2e}, {problem}, {dtype}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spoil", [None, 1, 3, 0], ids=["nothing", "q", "v", "grad_out"])
def test_same_bits(backend: Backend, causal: bool, spoil: int | None) -> None:
    """One pass over a key head, or separate tasks for dk and dv and for dq: the bits must not depend on it."""
    for dtype in DTYPES:
        given, _ = _case(Problem(300, 333, 72, 4, 2, causal=causal), dtype, 0.1, with_lse=True)
        given = [tensor.clone() for tensor in given]
        if spoil is not None:
            given[spoil][0, 0, 70, 3] = torch.nan
            given[spoil][0, 1, 200, 7] = torch.inf
        first = _run(backend, given, causal, 0.1, threads=WORKERS[0])
        for workers in WORKERS[1:]:
            assert _same(_run(backend, given, causal, 0.1, threads=workers), first), f"{workers} workers, {dtype}"


def test_repetitions(backend: Backend) -> None:
    given, _ = _case(Problem(130, 130, 64, 2, 2, causal=True), torch.bfloat16, 0.125, with_lse=False)
    first = _run(backend, given, True)
    assert all(_same(_run(backend, given, True), first) for _ in range(20))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["grad_out", "q", "k", "v"])
def test_hidden_rows_and_keys_stay_apart(backend: Backend, name: str, bad: float) -> None:
    """NaN in a row or key reaches everything that sees it and nothing that the mask hides from it, which 0 * NaN would."""
    for dtype in DTYPES:
        given, clean = _case(Problem(150, 150, 40, causal=True), dtype, 0.15, with_lse=False)
        given, place = [tensor.clone() for tensor in given], 90
        given[["grad_out", "q", "k", "v"].index(name)][0, 0, place, 5] = bad
        dq, dk, dv = _run(backend, given, True, 0.15)
        limit = LIMITS[dtype] * max(tensor.abs().max().item() for tensor in clean)
        of_a_row = name in ("grad_out", "q")
        rows = [dq[0, 0, :place], dq[0, 0, place + 1 :]] if of_a_row else [dq[0, 0, :place]]
        wanted = [clean[0][0, 0, :place], clean[0][0, 0, place + 1 :]] if of_a_row else [clean[0][0, 0, :place]]
        if of_a_row:  # keys after the row are hidden from it
            rows += [gradient[0, 0, place + 1 :] for gradient in (dk, dv)]
            wanted += [gradient[0, 0, place + 1 :] for gradient in clean[1:]]
            assert not (dk[0, 0, : place + 1].isfinite() & dv[0, 0, : place + 1].isfinite()).all()
        for found, expected in zip(rows, wanted, strict=True):
            assert (found.double() - expected).abs().max().item() <= limit, (dtype, name)
        assert not dq[0, 0, place:].isfinite().all()
        assert all(dq[0, 1].isfinite().all() for dq in (dq, dk, dv))  # the other head


def test_only_what_is_wanted(backend: Backend) -> None:
    given, _ = _case(Problem(140, 150, 64, 4, 2, causal=True), torch.float32, 0.125, with_lse=False)
    grad_out, q, k, v, out, lse = given
    run = partial(backend.backward, grad_out, q, k, v, out, lse, causal=True)
    whole = run()
    for wanted in ((True, False, False), (False, True, True), (False, False, True), (True, True, False)):
        for found, expected, is_wanted in zip(run(wanted=wanted), whole, wanted, strict=True):
            assert torch.equal(found, expected) if is_wanted else found.isnan().all()


@pytest.mark.parametrize("far", [0.0, 30.0, 300.0])
def test_a_log_sum_exp_off_by_its_rounding_is_mended(backend: Backend, far: float) -> None:
    """For rows with a single block of keys P is divided by its sum, which corrects the rounding of a large float32 log-sum-exp."""
    (grad_out, q, k, v, out, lse), _ = _case(Problem(1100, 100, 16), torch.float32, 0.25, with_lse=False)
    lane = torch.zeros_like(q[..., :1])
    lane_k = torch.zeros_like(k[..., :1])
    q, k, v = torch.cat((q, lane + 1.0), -1), torch.cat((k, lane_k + 4 * far), -1), torch.cat((v, lane_k), -1)
    grad_out, out = (torch.cat((one, lane), -1) for one in (grad_out, out))
    run = partial(backend.backward, grad_out, q, k, v, out, scale=0.25)
    expected = run(lse + far)
    for off in (0.8, -0.8):
        for one, other in zip(run(lse + far + off * (8e-6 + 2e-6 * far)), expected, strict=True):
            limit = 1e-6 * other[..., :-1].abs().max().item()  # the last lane multiplies a sum of 0 by `far`
            torch.testing.assert_close(one[..., :-1], other[..., :-1], rtol=0.0, atol=limit)


def test_no_rows_or_no_keys(backend: Backend) -> None:
    for seq_q, seq_k in ((0, 70), (70, 0)):
        q, k, v = make_inputs(Problem(seq_q, seq_k, 24, 4, 2), "cpu", torch.float32)
        gradients = backend.backward(q, q, k, v, q, torch.full(q.shape[:3], -math.inf))
        assert not any(gradient.any() for gradient in gradients)


def test_a_head_of_more_than_the_kept_scratch(backend: Backend) -> None:
    """dq of 8 heads of one key head is 9 MiB in fp32, which is allocated for this call only; with two workers it is split."""
    given, expected = _case(Problem(1130, 9, 255, 8, 1), torch.float32, 0.06, with_lse=False)
    alone = _run(backend, given, False, 0.06, threads=1)
    assert _same(_run(backend, given, False, 0.06, threads=2), alone)
    torch.testing.assert_close(alone[0].double(), expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seq_q", [1, 3, 40])  # few rows are summed in a different order
def test_one_key_is_exact_at_any_magnitude(backend: Backend, seq_q: int) -> None:
    """P is 1 and dS is 0: lse and the scores are rounded alike, and so are dO V^T and rowsum(dO * O)."""
    for head_dim, factor in ((64, 1.0), (33, 30.0), (256, 300.0)):
        q, k, v = make_inputs(Problem(seq_q, 1, head_dim), "cpu", torch.float32)
        out, lse = backend.forward(q * factor, k, v)
        grad_out = torch.randn_like(out)
        dq, dk, dv = backend.backward(grad_out, q * factor, k, v, out, lse)
        assert not dq.any()
        assert not dk.any()
        torch.testing.assert_close(dv[:, :, 0], grad_out.double().sum(2).float(), rtol=1e-6, atol=1e-6 * seq_q)


@pytest.mark.parametrize("seq_q", [2, 40])
@pytest.mark.parametrize("seq_k", [100, 200])  # one block of keys, and two
def test_a_key_with_all_of_the_weight_is_exact(backend: Backend, seq_q: int, seq_k: int) -> None:
    """Scores in the thousands: a rounded lse caused a thousand times plain PyTorch's error."""
    q, k, v = make_inputs(Problem(seq_q, seq_k, 128), "cpu", torch.float32)
    chosen = torch.arange(seq_q) * 7 % seq_k
    q = 300.0 * k[:, :, chosen].repeat_interleave(q.shape[1] // k.shape[1], 1)
    out, lse = backend.forward(q, k, v)
    assert lse.min().item() > 1000.0
    grad_out = torch.randn_like(out)
    dq, dk, dv = backend.backward(grad_out, q, k, v, out, lse)
    assert not dq.any()
    assert not dk.any()
    grouped = grad_out.unflatten(1, (k.shape[1], -1)).double().sum(2)
    torch.testing.assert_close(
        dv, torch.zeros_like(v).double().index_add(2, chosen, grouped).float(), rtol=1e-6, atol=1e-6
    )


# (rows, keys, head_dim, factor of q and k, mean of v, causal), each with two query heads: the cases with the largest errors relative to torch.
EXACT = (
    (1, 33, 1, 1.0, 0.0, False),  # one number in dq
    (5, 247, 111, 10.0, 2.0, False),  # an lse of hundreds, rounded
    (4, 141, 160, 10.0, 0.0, True),  # gradients are what is left after cancellation
    (193, 56, 224, 7.0, 0.0, True),  # one block of keys; scores of hundreds, rounded
    (33, 156, 32, 1.0, 2.0, False),  # dP is a small difference of large sums
    (173, 2, 1, 1.0, 0.0, False),
    (79, 1, 96, 10.0, 0.0, False),  # dq and dk are 0
)


@pytest.mark.parametrize("seed", [0, 1])
def test_small_problems_are_exact_in_float32(backend: Backend, seed: int) -> None:
    """Compared with float64 from the same inputs, a gradient only has the error of storing it, however lse and out were rounded."""
    for index, (rows, keys, head_dim, factor, mean, causal) in enumerate(EXACT):
        generator = torch.Generator().manual_seed(100 * seed + index)
        draw = partial(torch.randn, generator=generator)
        q, grad_out = factor * draw(1, 2, rows, head_dim), draw(1, 2, rows, head_dim)
        k, v = factor * draw(1, 1, keys, head_dim), draw(1, 1, keys, head_dim) + mean
        scores = (q.double() @ k.double().mT) * head_dim**-0.5
        if causal:
            scores = scores.masked_fill(~torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows), -math.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        products = grad_out.double() @ v.double().mT
        products = products - products.gather(-1, weights.argmax(-1, keepdim=True))
        dscores = weights * (products - (weights * products).sum(-1, keepdim=True)) * head_dim**-0.5
        expected = (
            dscores @ k.double(),
            (dscores.mT @ q.double()).sum(1, keepdim=True),
            (weights.mT @ grad_out.double()).sum(1, keepdim=True),
        )
        out, lse = backend.forward(q, k, v, causal=causal)
        for name, found, wanted in zip(
            "qkv", backend.backward(grad_out, q, k, v, out, lse, causal=causal), expected, strict=True
        ):
            error = (found.double() - wanted).abs().max().item()
            assert error <= 2.0**-24 * (1 + 1e-4) * wanted.abs().max().item() + 1e-30, (
                f"d{name}, {EXACT[index]}: {error:.2e}"
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_key_that_a_row_does_not_see_does_not_reach_its_gradient(
    backend: Backend, dtype: torch.dtype, name: str
) -> None:
    inputs = dict(zip("qkv", make_inputs(Problem(60, 60, 64, 1, 1), "cpu", dtype), strict=True))
    inputs[name][:, :, 50] = torch.nan
    out, lse = backend.forward(**inputs, causal=True)
    dq, _, _ = backend.backward(torch.ones_like(out), **inputs, out=out, lse=lse, causal=True)
    assert dq[:, :, :50].isfinite().all()


# Heads with few scores are computed in double for these
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offsets_of_more_than_32_bits(backend: Backend, dtype: torch.dtype) -> None:
    for problem in (Problem(3, 17, 40, 2, 2, batch=2), Problem(70, 150, 40, 2, 2, batch=2)):
        given, _ = _case(problem, dtype, 0.2, with_lse=False)
        expected = _run(backend, given, False, 0.2)
        for number, tensor in enumerate(given[:5]):
            for axis in range(3):
                changed = [with_large_stride(tensor, axis) if at == number else other for at, other in enumerate(given)]
                assert _same(_run(backend, changed, False, 0.2), expected), (number, axis)
        for number, gradient in enumerate(expected):
            for axis in range(3):
                into = [
                    with_large_stride(gradient, axis) if at == number else torch.empty_like(other)
                    for at, other in enumerate(expected)
                ]
                into[number].zero_()
                grad_out, q, k, v, out, lse = given
                found = backend.backward(grad_out, q, k, v, out, lse, scale=0.2, gradients=into)
                assert _same([one.contiguous() for one in found], expected), (number, axis)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_touched_behind_the_last_element(backend: Backend, dtype: torch.dtype) -> None:
    """In every form: in double, by one task or several, alone or with other gradients."""
    for sizes in (*SMALL, (300, 290, 24, 1)):
        for causal in (False, True):
            problem = Problem(*sizes, 1, causal=causal)
            inputs, _ = _case(problem, dtype, problem.head_dim**-0.5, with_lse=True)
            inputs = [one.contiguous() for one in inputs]
            walled = [with_guard_page(one) for one in inputs]
            for wanted in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
                kinds: list[list[Tensor]] = []
                for grad_out, q, k, v, out, lse, grad_lse in (inputs, walled):
                    empty = [torch.full(one.shape, math.nan, dtype=dtype) for one in (q, k, v)]
                    given = {"gradients": [with_guard_page(one) for one in empty], "grad_lse": grad_lse}
                    call = partial(backend.backward, grad_out, q, k, v, out, lse, causal=causal, wanted=wanted)
                    kinds.append(call(**given))
                assert _same(*kinds)
