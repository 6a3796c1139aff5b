"""Few query rows over many keys: several blocks share the keys of a tile, and their partial results are summed."""

from itertools import product

import pytest
import torch

import flashmoe
from flashmoe import _extension

from .reference import DTYPES, Problem, check_attention, make_inputs

pytestmark = pytest.mark.gpu

# seq_q, seq_k, query heads, key heads, batch
PROBLEMS = (
    (1, 4096, 8, 2, 1),  # decoding: the group's heads are the rows of one tile
    (1, 5001, 4, 4, 3),
    (5, 2048, 2, 2, 1),
    (64, 3000, 2, 1, 2),
    (130, 2500, 4, 2, 1),  # a second tile of two rows
    (300, 4096, 3, 3, 1),
    (512, 8192, 8, 8, 1),
    (1000, 9001, 2, 1, 1),
)


def _split_ran() -> bool:
    """Whether the last call split keys, which needs sm_80 and more multiprocessors than tiles."""
    return any(word in _extension.last_kernel() for word in ("_split_", "_decode_", "_chunk_"))


def _inputs(
    problem: tuple[int, int, int, int, int], head_dim: int, dtype: torch.dtype, kind: str = "normal", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seq_q, seq_k, heads, kv_heads, batch = problem
    shape = Problem(seq_q, seq_k, head_dim, heads, kv_heads, batch=batch)
    return make_inputs(shape, "cuda", dtype, kind, bshd=seed % 2 == 1, seed=seed)


@pytest.fixture(autouse=True)
def _needs_splitting_kernels() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernels of this GPU do not divide keys")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [40, 64, 111, 128, 200, 256])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"q{p[0]}k{p[1]}h{p[2]}b{p[4]}")
def test_divided_keys(problem: tuple[int, int, int, int, int], head_dim: int, causal: bool) -> None:
    for seed, (dtype, kind) in enumerate(product(DTYPES["cuda"], ("normal", "logits", "outlier"))):
        check_attention(*_inputs(problem, head_dim, dtype, kind, seed), causal)
        assert _split_ran(), f"{_extension.last_kernel()} does not divide the keys of this problem"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 111, 128, 256])
@pytest.mark.parametrize(
    "problem", [(2, 9000, 8, 2, 2), (7, 16384, 32, 8, 1), (24, 16000, 40, 8, 2)], ids=lambda p: f"q{p[0]}"
)
def test_few_rows_of_grouped_heads_fold(problem: tuple[int, int, int, int, int], head_dim: int, causal: bool) -> None:
    """The kernels for caches run, with the same bits."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("measured on Hopper alone")
    for seed, dtype in enumerate(DTYPES["cuda"]):
        q, k, v = _inputs(problem, head_dim, dtype, seed=seed)
        out, _ = check_attention(q, k, v, causal)
        assert any(word in _extension.last_kernel() for word in ("_decode_", "_chunk_"))
        lengths = torch.full((problem[4],), problem[1], dtype=torch.int32, device="cuda")
        assert torch.equal(out, flashmoe.attention_with_kvcache(q, k, v, cache_seqlens=lengths, causal=causal))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_repeats_are_bitwise_equal(head_dim: int) -> None:
    """Partial results are summed in order, whichever block finishes first."""
    q, k, v = _inputs((200, 5000, 4, 2, 1), head_dim, torch.bfloat16)
    first, first_lse = flashmoe.attention(q, k, v, causal=True, return_lse=True)
    assert _split_ran()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out, lse = flashmoe.attention(q, k, v, causal=True, return_lse=True)
        different += (out.view(torch.int16) != first.view(torch.int16)).sum()
        different += (lse.view(torch.int32) != first_lse.view(torch.int32)).sum()
    assert different.item() == 0, f"{different.item()} values differ over 1000 repeats"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_bad_key_reaches_every_row_that_sees_it(head_dim: int, bad: float) -> None:
    q, k, v = _inputs((100, 4000, 2, 2, 1), head_dim, torch.float16)
    v[0, 1, 1234] = bad
    out = flashmoe.attention(q, k, v)
    assert _split_ran()
    assert torch.isfinite(out[:, 0]).all()
    assert not torch.isfinite(out[0, 1]).any()
    k[0, 0, 777] = float("nan")
    out, lse = flashmoe.attention(q, k, v, return_lse=True)
    assert torch.isnan(out[0, 0]).all()
    assert torch.isnan(lse[0, 0]).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_graph_and_streams_at_once(head_dim: int) -> None:
    """A replayed graph and launches on another stream at once: each has separate partial results."""
    inputs = _inputs((150, 3000, 4, 2, 1), head_dim, torch.bfloat16)
    expected = flashmoe.attention(*inputs, causal=True)
    assert _split_ran()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashmoe.attention(*inputs, causal=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        captured.zero_()
        graph.replay()
        with torch.cuda.stream(side):
            beside = flashmoe.attention(*inputs, causal=True)
        same = torch.equal(captured, expected)
        side.synchronize()
        assert same
        assert torch.equal(beside, expected)
