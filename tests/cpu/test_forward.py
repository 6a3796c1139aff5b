"""Every instruction set against fp64: head dims, lengths, masks, grouped heads, strides, extreme values."""

import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention.drawn import lengths
from tests.attention.reference import Problem, make_inputs, plain_attention, tolerance, visible

from .backend import Backend, BackendError
from .checking import DTYPES, check, compare_lse, with_guard_page, with_large_stride

HEAD_DIMS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 40, 59, 63, 64, 65, 80, 96, 111, 127, 128, 160, 192, 224, 255, 256)
LENGTHS = (
    *((1, 1), (1, 239), (3, 799), (4, 4), (32, 32), (33, 31), (64, 64), (65, 65), (113, 203), (128, 128), (129, 127)),
    *((192, 192), (256, 256), (257, 300), (512, 512), (799, 3), (1023, 1024), (1024, 1023)),
)
BOTH = (False, True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dims(backend: Backend, dtype: torch.dtype) -> None:
    for head_dim, causal in product(HEAD_DIMS, BOTH):
        check(backend, Problem(65, 70, head_dim, causal=causal), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths(backend: Backend, dtype: torch.dtype) -> None:
    for (seq_q, seq_k), causal in product(LENGTHS, BOTH):
        check(backend, Problem(seq_q, seq_k, 64, 1, 1, causal=causal), dtype)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths(), st.integers(1, 256), st.sampled_from([(1, 1), (2, 1), (6, 2)]), st.booleans(), st.sampled_from(DTYPES)
)
def test_any_lengths(
    backend: Backend, sizes: tuple[int, int], head_dim: int, heads: tuple[int, int], causal: bool, dtype: torch.dtype
) -> None:
    check(backend, Problem(*sizes, head_dim, *heads, causal=causal), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long(backend: Backend, dtype: torch.dtype) -> None:
    check(backend, Problem(2048, 2048, 40, 1, 1, causal=True), dtype)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(2, 2), (4, 2), (8, 1), (6, 2)])
def test_grouped_heads_and_batch(backend: Backend, heads_q: int, heads_kv: int) -> None:
    for dtype, causal in product(DTYPES, BOTH):
        check(backend, Problem(33, 97, 40, heads_q, heads_kv, batch=3, causal=causal), dtype)


@pytest.mark.parametrize("head_dim", [40, 64])
def test_strides(backend: Backend, head_dim: int) -> None:
    """[B, S, H, D] by transposing input and output, and rows and heads far apart in a larger tensor."""
    for dtype, causal in product(DTYPES, BOTH):
        problem = Problem(70, 150, head_dim, 4, 2, batch=2, causal=causal)
        plain_out, plain_lse = check(backend, problem, dtype, bshd=True)
        q, k, v = make_inputs(problem, "cpu", dtype, bshd=True)
        store = torch.full((2, 70, 4, 2 * head_dim + 3), 7.0, dtype=dtype)
        out = store[..., 1 : head_dim + 1].transpose(1, 2)
        wide = torch.full((2, 2, 300, head_dim + 5), math.nan, dtype=dtype)
        wide[:, :, ::2, 3 : head_dim + 3] = k
        _, lse = backend.forward(q, wide[:, :, ::2, 3 : head_dim + 3], v, causal, out=out)
        assert torch.equal(out, plain_out)
        assert torch.equal(lse, plain_lse)
        assert (store[..., :1] == 7.0).all()
        assert (store[..., head_dim + 1 :] == 7.0).all()


@pytest.mark.parametrize("kind", ["shifted", "logits", "outlier"])
def test_kinds_of_values(backend: Backend, kind: str) -> None:
    for dtype, causal in product(DTYPES, BOTH):
        check(backend, Problem(113, 203, 64, causal=causal), dtype, kind)


@pytest.mark.parametrize("scale", [0.0, -0.25, 1.0, 1e-30, 3.0])
def test_scales(backend: Backend, scale: float) -> None:
    for dtype in DTYPES:
        q, k, v = make_inputs(Problem(33, 140, 40), "cpu", dtype)
        out, lse = backend.forward(q, k, v, scale=scale)
        expected, expected_lse = plain_attention(q.double(), k.double(), v.double(), False, scale)
        plain, _ = plain_attention(q, k, v, False, scale)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance(expected, plain))
        compare_lse(lse, expected_lse)


def test_rows_without_keys(backend: Backend) -> None:
    for dtype, (seq_q, seq_k) in product(DTYPES, ((2, 1), (65, 1), (200, 64), (300, 137))):
        out, lse = check(backend, Problem(seq_q, seq_k, 40, causal=True), dtype)
        assert (out[:, :, : seq_q - seq_k] == 0).all()
        assert (lse[:, :, : seq_q - seq_k] == -math.inf).all()


def test_lse_is_not_wanted(backend: Backend) -> None:
    """With a null lse the output is the same and no lse is written; for few rows, whole groups, recomputed NaN, no keys."""
    for dtype, seq_q, seq_k in product(DTYPES, (1, 70, 200), (0, 150)):
        for spoiled in BOTH:
            q, k, v = make_inputs(Problem(seq_q, seq_k, 64, 2, 2), "cpu", dtype)
            v[0, 0, : int(spoiled), 3] = math.nan
            expected, _ = backend.forward(q, k, v)
            out, lse = backend.forward(q, k, v, lse=0)
            torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
            assert lse.isnan().all()


@pytest.mark.parametrize("causal", BOTH)
def test_no_keys(backend: Backend, causal: bool) -> None:
    for dtype in DTYPES:
        out, lse = backend.forward(*make_inputs(Problem(5, 0, 64, batch=2), "cpu", dtype), causal)
        assert torch.equal(out, torch.zeros_like(out))
        assert (lse == -math.inf).all()


@pytest.mark.parametrize(("batch", "heads", "seq_q"), [(0, 2, 5), (2, 0, 5), (2, 2, 0)])
def test_nothing_to_write(backend: Backend, batch: int, heads: int, seq_q: int) -> None:
    q = torch.zeros(batch, heads, seq_q, 64)
    k = torch.zeros(batch, heads, 7, 64)
    out, lse = backend.forward(q, k, k)
    assert out.numel() == lse.numel() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("head_dim", [40, 64])
def test_bad_value_reaches_the_rows_that_see_it(backend: Backend, bad: float, head_dim: int) -> None:
    """On the diagonal, too, where a weight of 0 times Inf would give NaN to rows that do not see the key."""
    for dtype, causal, key in product(DTYPES, BOTH, (3, 100, 139)):
        q, k, v = make_inputs(Problem(140, 140, head_dim), "cpu", dtype)
        clean, clean_lse = backend.forward(q, k, v, causal)
        v[0, 1, key, 5] = bad
        out, lse = backend.forward(q, k, v, causal)
        touched = visible(140, 140, "cpu")[:, key] if causal else torch.ones(140, dtype=torch.bool)
        column = out[0, 1, :, 5]
        wanted = torch.full_like(column[touched], bad)
        assert torch.equal(column[touched].isnan(), wanted.isnan())
        assert math.isnan(bad) or torch.equal(column[touched], wanted)
        close = {"rtol": 0, "atol": 1e-5 if dtype is torch.float32 else 2e-2}
        torch.testing.assert_close(column[~touched], clean[0, 1, ~touched, 5], **close)
        others = [i for i in range(head_dim) if i != 5]
        torch.testing.assert_close(out[..., others], clean[..., others], **close)
        torch.testing.assert_close(lse, clean_lse)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k"])
def test_bad_score(backend: Backend, bad: float, where: str) -> None:
    """Like fp64: NaN in the same places, close elsewhere. Inf times a negative number gives a weight of 0."""
    for dtype, causal in product(DTYPES, BOTH):
        inputs = dict(zip("qkv", make_inputs(Problem(70, 140, 64), "cpu", dtype), strict=True))
        inputs[where][0, 0, 37, 9] = bad
        out, lse = backend.forward(**inputs, causal=causal)
        expected, _ = plain_attention(*(t.double() for t in inputs.values()), causal)
        assert torch.equal(out.isnan(), expected.isnan())
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance, equal_nan=True)
        assert torch.equal(lse.isfinite(), expected.isfinite().all(-1))


@pytest.mark.parametrize("causal", BOTH)
def test_first_keys_are_minus_infinite(backend: Backend, causal: bool) -> None:
    """A maximum of -inf, then finite scores: in the same block of keys and in the next."""
    for dtype, keys in product(DTYPES, (32, 128, 150)):
        q, k, v = make_inputs(Problem(200, 200, 64), "cpu", dtype)
        q = q.abs() + 0.1
        k[0, 0, :keys, 3] = -math.inf
        out, lse = backend.forward(q, k, v, causal)
        expected, expected_lse = plain_attention(q.double(), k.double(), v.double(), causal)
        seen = expected_lse.isfinite()
        assert torch.equal(lse.isfinite(), seen)
        close = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(out[seen].double(), expected[seen], rtol=0, atol=close)
        compare_lse(lse[seen], expected_lse[seen])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_head_that_is_computed_again_spoils_no_other(backend: Backend, bad: float) -> None:
    """One thread runs the heads one after another in the same scratch memory."""
    for dtype in DTYPES:
        q, k, v = make_inputs(Problem(128, 128, 64, 8, 8), "cpu", dtype)
        clean, _ = backend.forward(q, k, v, threads=1)
        for head in (0, 3, 7):
            spoiled = v.clone()
            spoiled[0, head, 77, 5] = bad
            out, _ = backend.forward(q, k, spoiled, threads=1)
            assert not out[0, head, :, 5].isfinite().any()
            others = [i for i in range(8) if i != head]
            assert torch.equal(out[0, others], clean[0, others])


def test_scores_far_apart(backend: Backend) -> None:
    """Weights that underflow, and a maximum that rises in every block of keys, by far more than a float's range."""
    for dtype in DTYPES:
        q = torch.ones(1, 1, 40, 64, dtype=dtype)
        k = (torch.arange(600.0) * 2).view(1, 1, 600, 1).expand(1, 1, 600, 64).to(dtype).contiguous()
        v = torch.randn(1, 1, 600, 64).to(dtype)
        for causal, sign in product(BOTH, (1, -1)):
            out, lse = backend.forward(q, k * sign, v, causal)
            expected, expected_lse = plain_attention(q.double(), (k * sign).double(), v.double(), causal)
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3 if dtype is torch.float32 else 3e-2)
            compare_lse(lse, expected_lse)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 149), st.floats(100.0, 1000.0), st.sampled_from(DTYPES))
def test_one_key_far_above_the_others(backend: Backend, key: int, score: float, dtype: torch.dtype) -> None:
    """Anywhere in its block: outside every window of exponents, so that the other keys get no weight."""
    q, k, v = make_inputs(Problem(40, 150, 64), "cpu", dtype)
    q[..., 0], k[..., 0], k[:, :, key] = 8.0, 0.0, 0.0
    k[:, :, key, 0] = score
    out, lse = backend.forward(q, k, v)
    torch.testing.assert_close(out, v[:, :, key : key + 1].expand_as(out), rtol=0.0, atol=1e-6)
    compare_lse(lse, (q.double() @ k.double().mT / 8.0).logsumexp(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seq_q", [2, 130])
@pytest.mark.parametrize("size", [1e3, 3e4, 1e6, 1e10, 1e15])
def test_far_scores(backend: Backend, size: float, seq_q: int, dtype: torch.dtype) -> None:
    """Scores of up to 1e31, where the rounding error of the maximum's product exceeds the range of exp2: one key still gets all the weight."""
    if dtype == torch.float16 and size > 1e4:
        size = 1e4  # the largest element becomes 5e4; the fp16 maximum is 65504
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for n in (seq_q, 300, 300))
    q, k, v = (q * size).to(dtype), (k * size).to(dtype), v.to(dtype)
    for causal in (False, True):
        out, lse = backend.forward(q, k, v, causal)
        scores = q.double() @ k.double().mT / 8.0
        if causal:
            scores = scores.masked_fill(~visible(seq_q, 300, q.device), -math.inf)
        best = scores.topk(2).values
        decided = best[..., 0] - best[..., 1] > 1e-5 * best[..., 0].abs() + 20.0
        assert decided.float().mean() > 0.9
        winner = torch.gather(v.expand_as(k), 2, scores.argmax(-1)[..., None].expand(-1, -1, -1, 64))
        torch.testing.assert_close(out[decided], winner[decided], rtol=0.0, atol=1e-6)
        torch.testing.assert_close(lse.double(), torch.logsumexp(scores, -1), rtol=1e-5, atol=1e-3)


RANGES = {
    "batch": (0, None),
    "heads_q": (0, None),
    "seq_q": (0, 2**31 - 1025),
    "seq_k": (0, 2**31 - 1025),
    "head_dim": (1, 512),
}


@pytest.mark.parametrize("name", RANGES)
def test_sizes_out_of_range(library: Backend, name: str) -> None:
    """One below the minimum and one above the maximum are rejected; both limits are accepted, with zero sequences, so that nothing is computed."""
    (least, most), inputs = RANGES[name], make_inputs(Problem(5, 5, 64, 4, 4), "cpu", torch.float32)
    rule = {"batch": "not be negative", "heads_q": "not be negative", "head_dim": r"be in 1\.\.512"}.get(
        name, r"be in 0\.\.2\^31-1025"
    )
    for value in (least - 1, -(2**31), *((most + 1, 2**31 - 1) if most else ())):
        with pytest.raises(BackendError, match=f"{name} must {rule}, got {value}$"):
            library.forward(*inputs, **{name: value})
    for value in (least, *((most,) if most else ())):
        library.forward(*inputs, **{"batch": 0, name: value})


@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "fits"),
    [(4, 3, False), (4, 0, False), (4, -2, False), (0, 0, True), (0, -1, True), (4, 2, True)],
)
def test_groups_of_heads(library: Backend, heads_q: int, heads_kv: int, fits: bool) -> None:
    inputs, heads = (
        make_inputs(Problem(5, 5, 64, 4, 4), "cpu", torch.float32),
        {"heads_q": heads_q, "heads_kv": heads_kv},
    )
    with nullcontext() if fits else pytest.raises(BackendError, match=f"heads_kv must divide heads_q, got {heads_kv}$"):
        library.forward(*inputs, **heads)


def test_no_thread(library: Backend) -> None:
    q, k, v = make_inputs(Problem(5, 5), "cpu", torch.float32)
    with pytest.raises(BackendError, match="num_threads must be at least 1, got 0"):
        library.forward(q, k, v, threads=0)


@pytest.mark.parametrize("rows", [3, 17])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_offsets_of_more_than_32_bits(backend: Backend, name: str, rows: int) -> None:
    inputs = dict(zip("qkv", make_inputs(Problem(rows, 17, 40, 2, 2, batch=2), "cpu", torch.bfloat16), strict=True))
    expected, _ = backend.forward(**inputs)
    for axis in range(3):
        changed = {name: with_large_stride(expected if name == "out" else inputs[name], axis)}
        found, _ = backend.forward(**{**inputs, **changed})
        assert torch.equal(found, expected), axis


# Rows, keys, head dim, heads: less than a vector of each, and one more than a block.
SMALL = ((1, 5, 17, 2), (3, 37, 8, 1), (5, 129, 59, 1), (65, 70, 33, 1), (70, 131, 72, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_touched_behind_the_last_element(backend: Backend, dtype: torch.dtype) -> None:
    for rows, keys, head_dim, heads in SMALL:
        for causal in (False, True):
            inputs = make_inputs(Problem(rows, keys, head_dim, heads, 1, causal=causal), "cpu", dtype)
            walled = [with_guard_page(one) for one in inputs]
            out, lse = backend.forward(*walled, causal, out=with_guard_page(torch.full_like(inputs[0], math.nan)))
            expected, expected_lse = backend.forward(*inputs, causal)
            assert torch.equal(out.nan_to_num(), expected.nan_to_num())
            assert torch.equal(lse, expected_lse)
