"""The fp32 tile kernel: what it does differently from the others, on every instruction set."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.attention.reference import Problem, make_inputs, plain_attention

from .backend import Backend
from .checking import compare_lse

BOTH = (False, True)
# Further above the first 32 scores than this (in units of log 2) a group goes another way (kMaxLog2, amx_units_f32.h).
LIMIT = 90.0


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> tuple[Tensor, Tensor]:
    return plain_attention(q.double(), k.double(), v.double(), causal, scale)


def close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual.double(), expected, rtol=0, atol=2e-6 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("rise", [0.5 * LIMIT, 0.99 * LIMIT, 1.01 * LIMIT, 4 * LIMIT])
@pytest.mark.parametrize("key", [20, 40, 127, 200])
@pytest.mark.parametrize("causal", BOTH)
def test_scores_rise_after_the_first_step(backend: Backend, rise: float, key: int, causal: bool) -> None:
    """Weights are relative to the first 32 keys of a block: one key far above them, for some rows only."""
    torch.manual_seed(1)
    q, k, v = (0.1 * torch.randn(1, 2, 220, 64) for _ in range(3))
    q[:, :, ::3, 0] = 1.0
    k[0, 0, key, 0] = rise * math.log(2) * 8
    out, lse = backend.forward(q, k, v, causal)
    expected, expected_lse = exact(q, k, v, causal)
    assert close(out, expected)
    compare_lse(lse, expected_lse)


@pytest.mark.parametrize("causal", BOTH)
def test_first_step_is_minus_infinite(backend: Backend, causal: bool) -> None:
    """A maximum of -inf, then scores that are not: in the same block and in the next."""
    q, k, v = make_inputs(Problem(200, 200, 64), "cpu", torch.float32)
    q = q.abs() + 0.1
    for keys in (32, 128, 150):
        k[0, 0, :keys, 3] = -math.inf
        out, lse = backend.forward(q, k, v, causal)
        expected, expected_lse = exact(q, k, v, causal)
        seen = expected_lse.isfinite()
        assert torch.equal(lse.isfinite(), seen)
        assert close(out[seen], expected[seen])
        compare_lse(lse[seen], expected_lse[seen])


@pytest.mark.parametrize(("seq_q", "seq_k"), [(128, 128), (64, 100), (100, 33), (300, 128), (97, 1)])
@pytest.mark.parametrize("head_dim", [32, 64, 59, 224])
def test_next_task_is_packed_ahead(backend: Backend, seq_q: int, seq_k: int, head_dim: int) -> None:
    """One worker runs many heads one after the other: each as if it were alone."""
    for causal, scale in product(BOTH, (None, -0.3)):
        q, k, v = make_inputs(Problem(seq_q, seq_k, head_dim, 6, 3, batch=2), "cpu", torch.float32)
        out, lse = backend.forward(q, k, v, causal, scale, threads=1)
        for batch, head in product(range(2), range(6)):
            one = (q[batch, head], k[batch, head // 2], v[batch, head // 2])
            alone, alone_lse = backend.forward(*(t[None, None] for t in one), causal, scale, threads=1)
            assert torch.equal(out[batch, head], alone[0, 0])
            assert torch.equal(lse[batch, head], alone_lse[0, 0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_head_that_is_computed_again_spoils_no_other(backend: Backend, bad: float) -> None:
    """The group is computed again while the next head's operands lie in the same scratch memory."""
    q, k, v = make_inputs(Problem(128, 128, 64, 8, 8), "cpu", torch.float32)
    clean, _ = backend.forward(q, k, v, threads=1)
    for head in range(8):
        spoiled = v.clone()
        spoiled[0, head, 77, 5] = bad
        out, _ = backend.forward(q, k, spoiled, threads=1)
        assert not out[0, head, :, 5].isfinite().any()
        others = [i for i in range(8) if i != head]
        assert torch.equal(out[0, others], clean[0, others])


@pytest.mark.parametrize("kind", ["normal", "shifted", "logits", "outlier"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_less_exact_than_torch(library: Backend, kind: str, head_dim: int) -> None:
    """The root mean square error against fp64 is at most that of torch's own fp32 attention."""
    if "amx" not in library.supported:
        pytest.skip("not run: this machine has no amx")
    library.set_isa("amx")
    try:
        for causal in BOTH:
            ours, theirs = [], []
            for seed in range(8):
                q, k, v = make_inputs(Problem(128, 128, head_dim, 8, 8), "cpu", torch.float32, kind, seed=seed)
                expected, _ = exact(q, k, v, causal)
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
                theirs.append((out.double() - expected).square().mean().item())
                ours.append((library.forward(q, k, v, causal)[0].double() - expected).square().mean().item())
            assert sum(ours) <= sum(theirs)
    finally:
        library.set_isa(None)
