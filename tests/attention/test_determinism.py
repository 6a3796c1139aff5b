"""The same inputs give the same bits: repeats, threads, streams, graphs, devices."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

import flashmoe

from .reference import DTYPES, Problem, assert_ran_here, check_attention, make_inputs

REPEATS = {"cpu": 20, "cuda": 1000}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_repeats_are_bitwise_equal(head_dim: int, causal: bool, device: str) -> None:
    """A race between the copies and the products of a tile would show as a difference in some repeat."""
    dtype = torch.bfloat16
    q, k, v = make_inputs(Problem(449, 515, head_dim, 4, 2, batch=2), device, dtype)
    first, first_lse = flashmoe.attention(q, k, v, causal=causal, return_lse=True)
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(REPEATS[device]):
        out, lse = flashmoe.attention(q, k, v, causal=causal, return_lse=True)
        different += (out.view(torch.int16) != first.view(torch.int16)).sum()
        different += (lse.view(torch.int32) != first_lse.view(torch.int32)).sum()
    assert_ran_here(device)
    assert different.item() == 0, f"{different.item()} values differ over {REPEATS[device]} repeats"


def test_batch_entries_do_not_depend_on_each_other(device: str) -> None:
    q, k, v = make_inputs(Problem(130, 150, 64, 4, 2, batch=5), device, torch.float16)
    together = flashmoe.attention(q, k, v, causal=True)
    for index in range(5):
        alone = flashmoe.attention(*(t[index : index + 1] for t in (q, k, v)), causal=True)
        torch.testing.assert_close(together[index : index + 1], alone, rtol=0, atol=2e-3)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_number_of_cpu_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    for dtype, causal in product(DTYPES["cpu"], (False, True)):
        q, k, v = make_inputs(Problem(257, 300, 64, 3, 1, batch=2), "cpu", dtype)
        check_attention(q, k, v, causal)


def test_calls_from_several_threads(device: str) -> None:
    """Eight threads at once, each with different sizes; results equal those of sequential calls."""
    problems = [Problem(33 + 17 * index, 40 + 29 * index, 64, 2, 1, causal=index % 2 == 1) for index in range(8)]
    inputs = [make_inputs(problem, device, torch.float16, seed=index) for index, problem in enumerate(problems)]
    expected = [flashmoe.attention(*tensors, causal=p.causal) for tensors, p in zip(inputs, problems, strict=True)]
    barrier = threading.Barrier(8)

    def work(index: int) -> bool:
        barrier.wait(timeout=60)
        equal = True
        for _ in range(5):
            out = flashmoe.attention(*inputs[index], causal=problems[index].causal)
            equal = equal and torch.equal(out, expected[index])
        return equal

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.gpu
def test_runs_on_the_current_stream() -> None:
    """Inputs are written on a side stream after a long delay: a kernel on any other stream would read old values."""
    q, k, v = make_inputs(Problem(256, 256, 64, 4, 4), "cuda", torch.float16)
    expected = flashmoe.attention(q, k, v)
    late = torch.full_like(q, float("nan"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out = flashmoe.attention(late, k, v)
        done = torch.cuda.Event()
        done.record()
    assert not done.query(), "the delay was over too soon: the test proved nothing"
    side.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_outputs_belong_to_the_stream_they_were_made_on() -> None:
    """Memory of results that are freed while their kernel still waits on a side stream is not reused on the default stream."""
    q, k, v = make_inputs(Problem(512, 512, 64, 4, 4), "cuda", torch.float16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        address = flashmoe.attention(q, k, v).data_ptr()
    fresh = [torch.zeros_like(q) for _ in range(4)]
    assert all(tensor.data_ptr() != address for tensor in fresh)
    torch.cuda.synchronize()
    assert not any(tensor.any() for tensor in fresh)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [59, 64, 128, 256])
def test_cuda_graph(head_dim: int) -> None:
    """Captured once, replayed on new inputs; D = 59 captures the padded copies too."""
    inputs = make_inputs(Problem(300, 333, head_dim, 4, 2), "cuda", torch.bfloat16)
    flashmoe.attention(*inputs, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashmoe.attention(*inputs, causal=True, return_lse=True)
    for seed in range(1, 4):
        fresh = make_inputs(Problem(300, 333, head_dim, 4, 2), "cuda", torch.bfloat16, seed=seed)
        for old, new in zip(inputs, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        expected, expected_lse = flashmoe.attention(*fresh, causal=True, return_lse=True)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_streams_and_a_graph_at_once(head_dim: int) -> None:
    """Launches in flight together: with more tiles than blocks each draws its tiles from a counter, which no other launch may use."""
    inputs = [
        make_inputs(Problem(1100, 1100, head_dim, 16, 16), "cuda", torch.bfloat16, seed=seed) for seed in range(3)
    ]
    expected = [flashmoe.attention(*tensors, causal=True) for tensors in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashmoe.attention(*inputs[2], causal=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for index in range(2):
            with torch.cuda.stream(streams[index]):
                outs[index].append(flashmoe.attention(*inputs[index], causal=True))
        with torch.cuda.stream(streams[2]):
            graph.replay()
    torch.cuda.synchronize()
    for index in range(2):
        assert all(torch.equal(out, expected[index]) for out in outs[index])
    assert torch.equal(captured, expected[2])


CAPTURE_FIRST = """
import torch, flashmoe
flashmoe.attention
q, k, v = (torch.randn(1, 2, 200, 64, device="cuda").half() for _ in range(3))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = flashmoe.attention(q, k, v)
graph.replay()
torch.cuda.synchronize()
captured = out.clone()
assert captured.isfinite().all() and captured.any()
assert torch.equal(captured, flashmoe.attention(q, k, v))
print("captured before the first launch")
"""


@pytest.mark.gpu
def test_cuda_graph_captured_before_the_first_launch(tmp_path: Path) -> None:
    """Loading the kernel during capture must neither fail nor break the capture; needs a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", CAPTURE_FIRST],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ),
        cwd=tmp_path,  # python -c searches its folder first, which may contain the sources
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "captured before the first launch" in done.stdout


@pytest.mark.gpu
def test_every_device() -> None:
    """On each GPU, while another is current: the tensors' device decides. With one GPU: that device, by index."""
    count = torch.cuda.device_count()
    for index in range(count):
        with torch.cuda.device((index + 1) % count):
            current = torch.cuda.current_device()
            q, k, v = make_inputs(Problem(100, 120, 64), f"cuda:{index}", torch.float16)
            out, _ = check_attention(q, k, v, causal=True)
            assert out.device.index == index
            assert torch.cuda.current_device() == current
