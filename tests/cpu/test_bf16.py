"""bf16: weights in fixed point without row maxima, and the groups of rows that must not use this path."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.attention.reference import Problem, make_inputs, plain_attention

from .backend import Backend
from .checking import compare_lse

LN2 = math.log(2.0)
BOTH = (False, True)
BF16 = torch.bfloat16


def errors(out: Tensor, expected: Tensor) -> tuple[float, float]:
    """(root mean square, maximum)."""
    difference = out.double() - expected
    return difference.square().mean().sqrt().item(), difference.abs().max().item()


@pytest.mark.parametrize(("length", "head_dim"), [(128, 64), (128, 128), (600, 64), (300, 256)])
@pytest.mark.parametrize("kind", ["normal", "shifted", "steep"])
def test_error_is_close_to_sdpas(backend: Backend, length: int, head_dim: int, kind: str) -> None:
    """Relative to fp64, over 8 heads: at most 1.2 times the rms error of torch's bf16, and 2.5 times its largest error."""
    for causal in BOTH:
        problem = Problem(length, length, head_dim, 8, 8, causal=causal)
        q, k, v = make_inputs(problem, "cpu", BF16, "normal" if kind == "steep" else kind)
        q = q * 3 if kind == "steep" else q
        expected, _ = plain_attention(q.double(), k.double(), v.double(), causal)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        (rms, largest), (their_rms, their_largest) = (
            errors(backend.forward(q, k, v, causal)[0], expected),
            errors(theirs, expected),
        )
        assert rms <= 1.2 * their_rms
        assert largest <= 2.5 * their_largest


def exact_scores(x: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """q [1, 1, 32, dims] and k [1, 1, n, dims] in bf16 with q k^T = x, multiples of 1/512 below 128, in every row."""
    q = torch.zeros(1, 1, 32, dims)
    q[..., :2] = 1.0
    k = torch.zeros(1, 1, len(x), dims)
    k[0, 0, :, 0] = (x * 2).floor() / 2
    k[0, 0, :, 1] = x - (x * 2).floor() / 2
    assert torch.equal(k, k.to(BF16).float())
    return q.to(BF16), k.to(BF16)


@pytest.mark.parametrize("exponent", [-100, -40, -3, 0, 30, 60])
def test_every_fraction(backend: Backend, exponent: int) -> None:
    """Each weight separately, for 512 fractions of a power of two: its error includes the output's rounding."""
    x = exponent + torch.arange(512) / 512.0
    q, k = exact_scores(x, 256)
    weights = torch.exp2(x.double() - exponent)
    for first in (0, 256):
        v = torch.zeros(1, 1, 512, 256)
        v[0, 0, first : first + 256] = torch.eye(256)
        out, lse = backend.forward(q, k, v.to(BF16), scale=LN2)
        expected = (weights[first : first + 256] / weights.sum()).expand(32, 256)
        assert (out[0, 0].double() / expected - 1).abs().max().item() <= 3 / 256
        compare_lse(lse, torch.full((1, 1, 32), math.log(weights.sum().item()) + exponent * LN2))


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_every_size(backend: Backend, sign: int) -> None:
    """All scores of a row are equal, well inside the window, at its ends or far outside: the output is the mean of V."""
    v = torch.randn(1, 1, 96, 64).to(BF16)
    expected = v.double().mean(2, keepdim=True).expand(1, 1, 32, 64)
    for half in (
        *range(0, 127, 2),
        *(48.5 + torch.arange(9) / 4).tolist(),
        *(77 + torch.arange(13) / 8).tolist(),
        127.5,
    ):
        q, k = exact_scores(torch.full((96,), float(half)), 64)
        out, lse = backend.forward(q * sign, k, v, scale=2 * LN2)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=4e-3)
        compare_lse(lse, torch.full((1, 1, 32), sign * 2 * half * LN2 + math.log(96)).double())


def test_both_ends_in_a_row(backend: Backend) -> None:
    """Alternating scores far below and far above 0: inside the window, at its ends and beyond."""
    for span, causal in product((20.0, 40.0, 48.5, 49.0, 49.5, 75.0, 127.0), BOTH):
        x = torch.where(torch.arange(96) % 2 == 0, -span, span)
        q, k = exact_scores(x, 64)
        v = torch.randn(1, 1, 96, 64).to(BF16)
        out, lse = backend.forward(q, k, v, causal, scale=2 * LN2)
        expected, expected_lse = plain_attention(q.double(), k.double(), v.double(), causal, 2 * LN2)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-2)
        compare_lse(lse, expected_lse)


@pytest.mark.parametrize("factor", [12.0, 1e3, 1e5])
@pytest.mark.parametrize("where", ["q", "k"])
def test_some_groups_outside(backend: Backend, factor: float, where: str) -> None:
    """A few rows or keys are too large: only their groups use the other path, and the result does not depend on a task's height."""
    for causal, wants_lse in product(BOTH, BOTH):
        inputs = dict(zip("qkv", make_inputs(Problem(300, 700, 64, 2, 1, causal=causal), "cpu", BF16), strict=True))
        for row in (5, 130, 131, 290):
            inputs[where][0, 0, row] *= factor
        expected, expected_lse = plain_attention(*(t.double() for t in inputs.values()), causal)
        results = [
            backend.forward(**inputs, causal=causal, threads=threads, **({} if wants_lse else {"lse": 0}))
            for threads in (1, 2, 8)
        ]
        for out, lse in results:
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-2)
            assert torch.equal(out, results[0][0])
            if wants_lse:
                compare_lse(lse, expected_lse)


@pytest.mark.parametrize("size", [1e-36, 1e-20, 1e20, 1e37])
def test_size_of_values(backend: Backend, size: float) -> None:
    """V near both ends of bf16's range: as accurate as V of order 1, because weights do not under- or overflow with it."""
    for length, causal in product((128, 700), BOTH):
        q, k, v = make_inputs(Problem(length, length, 64, causal=causal), "cpu", BF16)
        v = (v.double().sign() * v.double().abs().clamp(0.25, 4) * size).to(BF16)
        out, _ = backend.forward(q, k, v, causal)
        expected, _ = plain_attention(q.double(), k.double(), v.double(), causal)
        torch.testing.assert_close(out.double() / size, expected / size, rtol=0, atol=5e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_key_in_the_same_panel(backend: Backend, bad: float) -> None:
    """A key that is not finite does not affect the rows from which it is hidden."""
    q, k, v = make_inputs(Problem(128, 128, 64, causal=True), "cpu", BF16)
    clean, _ = backend.forward(q, k, v, True)
    k[0, 0, 75] = bad
    out, _ = backend.forward(q, k, v, True)
    torch.testing.assert_close(out[0, 0, :75], clean[0, 0, :75], rtol=0, atol=2e-2)
    assert out[0, 0, 75:].isnan().all()
    assert torch.equal(out[0, 1], clean[0, 1])


@pytest.mark.parametrize("length", [32, 96, 511, 512, 513, 1100])
def test_one_group(backend: Backend, length: int) -> None:
    """A single group, whose scores, sums and output follow each other directly; passes of 512 keys."""
    for rows, causal in product((5, 32), BOTH):
        q, k, v = make_inputs(Problem(rows, length, 96, 1, 1, causal=causal), "cpu", BF16)
        out, lse = backend.forward(q, k, v, causal)
        expected, expected_lse = plain_attention(q.double(), k.double(), v.double(), causal)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-2)
        compare_lse(lse, expected_lse)
