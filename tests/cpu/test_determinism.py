"""The same bits for any number of workers, threads and repetitions."""

from collections.abc import Iterator

import pytest
import torch

from tests.attention.reference import Problem, make_inputs

from .backend import Backend
from .checking import DTYPES

WORKERS = (1, 2, 5, 64)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spoil", ["nothing", "q", "k", "v"])
def test_same_bits(backend: Backend, threads: int, causal: bool, spoil: str) -> None:
    """Few workers get tall tasks, many get low ones; with NaN or Inf some blocks use another path. The bits must not depend on either."""
    for dtype in DTYPES:
        inputs = dict(zip("qkv", make_inputs(Problem(300, 333, 72, 2, 1, causal=causal), "cpu", dtype), strict=True))
        if spoil != "nothing":
            inputs[spoil][0, 0, 70, 3] = torch.nan
            inputs[spoil][0, 0, 200, 7] = torch.inf
        results = [backend.forward(**inputs, causal=causal, threads=workers) for workers in WORKERS]
        first_out, first_lse = results[0]
        for workers, (out, lse) in zip(WORKERS, results, strict=True):
            assert torch.equal(out.view(_bits(out)), first_out.view(_bits(out))), f"{workers} workers, {dtype}"
            assert torch.equal(lse.view(torch.int32), first_lse.view(torch.int32)), f"{workers} workers, {dtype}"


def _bits(tensor: torch.Tensor) -> torch.dtype:
    return torch.int32 if tensor.dtype == torch.float32 else torch.int16


def test_repetitions(backend: Backend, threads: int) -> None:
    inputs = make_inputs(Problem(130, 130, 64, 4, 4, causal=True), "cpu", torch.bfloat16)
    first, _ = backend.forward(*inputs, causal=True, threads=threads)
    for _ in range(40):
        out, _ = backend.forward(*inputs, causal=True, threads=threads)
        assert torch.equal(out, first)


@pytest.mark.parametrize("seen", [40, 300])
def test_a_consistent_call_has_the_bits_of_a_row_whatever_is_beside_it(backend: Backend, seen: int) -> None:
    """In other calls a row with large scores or NaN makes its whole block use another path, and few rows use another path than many; here neither."""
    for dtype in DTYPES:
        q, k, v = make_inputs(Problem(70, seen, 72, 2, 1), "cpu", dtype)
        expected = backend.forward(q, k, v, is_consistent=1)
        for spoiled in (3e4, torch.nan):
            other = q.clone()
            other[:, :, 9] = spoiled
            found = backend.forward(other, k, v, is_consistent=1)
            few = backend.forward(q[:, :, 33:35].contiguous(), k, v, is_consistent=1)
            for mine, theirs, alone in zip(found, expected, few, strict=True):
                assert torch.equal(mine[:, :, 10:], theirs[:, :, 10:]), dtype
                assert torch.equal(alone, theirs[:, :, 33:35]), dtype
