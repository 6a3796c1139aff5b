"""Two GPUs in one process: the tensors' device decides, whichever is current, and no per-device state is shared."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import flashmoe
from flashmoe import _extension
from flashmoe.errors import DeviceError
from tests.torch_warnings import COMPILED

from .reference import DTYPES, Problem, assert_ran_here, check_attention, make_inputs

pytestmark = [pytest.mark.gpu, *COMPILED]
NOT_ENOUGH = "needs two CUDA GPUs"
FIRST, SECOND = "cuda:0", "cuda:1"
# Several kernels: padded copies, one tile per block, more tiles than blocks (drawn from a counter), partial results.
PROBLEMS = {
    "padded": Problem(65, 70, 59, 4, 2, batch=2, causal=True),
    "short": Problem(64, 64, 64, 8, 8),
    "many tiles": Problem(1100, 1100, 128, 16, 16, causal=True),
    "wide": Problem(300, 333, 256, 4, 4, causal=True),
    "one query": Problem(1, 8192, 128, 8, 2),
    "no keys": Problem(33, 0),
}


@pytest.fixture(autouse=True)
def two_gpus() -> Iterator[None]:
    """The first GPU is current, before and after."""
    if torch.cuda.device_count() < 2:
        pytest.skip(NOT_ENOUGH)
    with torch.cuda.device(FIRST):
        yield
        assert torch.cuda.current_device() == 0


def _both(problem: Problem, dtype: torch.dtype = torch.float16, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """The same values on each GPU."""
    first = list(make_inputs(problem, FIRST, dtype, seed=seed))
    return first, [tensor.to(SECOND) for tensor in first]


def _same_gpu_twice() -> bool:
    return torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1)


def _assert_alike(a: Tensor, b: Tensor) -> None:
    """Bit for bit if both GPUs are the same model and so choose the same kernel."""
    if _same_gpu_twice():
        assert torch.equal(a.cpu(), b.cpu())
    else:
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_second_gpu_while_the_first_is_current(name: str) -> None:
    for dtype in DTYPES["cuda"]:
        q, k, v = make_inputs(PROBLEMS[name], SECOND, dtype)
        torch.cuda.synchronize(SECOND)
        before = torch.cuda.memory_allocated(FIRST)
        out, lse = check_attention(q, k, v, PROBLEMS[name].causal)
        assert out.device == lse.device == torch.device(SECOND)
        assert torch.cuda.memory_allocated(FIRST) == before
        assert torch.cuda.current_device() == 0
        same = [tensor.to(FIRST) for tensor in (q, k, v)]
        _assert_alike(out, flashmoe.attention(*same, causal=PROBLEMS[name].causal))


def test_tensors_on_both_are_refused() -> None:
    (q, k, v), (_, far_k, far_v) = _both(PROBLEMS["short"])
    flashmoe.attention(q, k, v)
    for arguments, found in (
        ((q, far_k, v), "cuda:0, cuda:1 and cuda:0"),
        ((q, k, far_v), "cuda:0, cuda:0 and cuda:1"),
    ):
        for call in (
            lambda a: flashmoe.attention(*a),
            lambda a: torch.ops.flashmoe.flash_attention_forward(*a, 0.1, False),
            lambda a: flashmoe.attention(*(t.clone().requires_grad_() for t in a)),
        ):
            with pytest.raises(DeviceError, match=f"one device; found {found}"):
                call(arguments)
        with pytest.raises(RuntimeError) as theirs:
            torch_attention(*arguments)
        with pytest.raises(type(theirs.value)) as ours:
            flashmoe.scaled_dot_product_attention(*arguments)
        assert str(ours.value) == str(theirs.value)
    assert torch.cuda.current_device() == 0
    assert torch.equal(flashmoe.attention(q, k, v), flashmoe.attention(q, k, v))  # a rejected call breaks nothing


def test_two_threads_each_with_its_gpu() -> None:
    """The second thread has never used a GPU; both launch at once, kernels with tile counters and with partial results."""
    problems = [PROBLEMS["many tiles"], PROBLEMS["one query"], PROBLEMS["padded"]]
    inputs = [[make_inputs(problem, device, torch.float16) for problem in problems] for device in (FIRST, SECOND)]
    expected = [
        [flashmoe.attention(*tensors, causal=p.causal) for tensors, p in zip(one, problems, strict=True)]
        for one in inputs
    ]
    for device in (FIRST, SECOND):
        torch.cuda.synchronize(device)
    barrier = threading.Barrier(2)

    def work(which: int) -> bool:
        barrier.wait(timeout=60)
        current = torch.cuda.current_device()
        equal = torch.ones((), dtype=torch.bool, device=f"cuda:{which}")
        for _ in range(30):
            for tensors, problem, wanted in zip(inputs[which], problems, expected[which], strict=True):
                out = flashmoe.attention(*tensors, causal=problem.causal)
                equal &= (out == wanted).all()
        return bool(equal.item()) and torch.cuda.current_device() == current

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, range(2)))


def test_one_thread_takes_turns() -> None:
    """The same stream handle (the default stream) on two devices: one device's tile counter must not be used for the other."""
    near, far = _both(PROBLEMS["many tiles"], torch.bfloat16)
    expected = flashmoe.attention(*near, causal=True)
    outs = []
    for _ in range(20):
        outs.append(flashmoe.attention(*near, causal=True))
        outs.append(flashmoe.attention(*far, causal=True))
    for out in outs:
        _assert_alike(out, expected)


def test_side_streams_of_both_gpus() -> None:
    """Each call runs on its own device's current stream, after the work already queued there."""
    sides = [torch.cuda.Stream(device) for device in (FIRST, SECOND)]
    inputs = _both(PROBLEMS["many tiles"])
    expected = flashmoe.attention(*inputs[0], causal=True)
    late = [torch.full_like(tensors[0], float("nan")) for tensors in inputs]
    for device in (FIRST, SECOND):
        torch.cuda.synchronize(device)
    outs, finished = [], []
    for side, tensors, empty in zip(sides, inputs, late, strict=True):
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            empty.copy_(tensors[0])
            with torch.cuda.device(
                FIRST
            ):  # for the second: its stream is current on its device, which is not the current device
                outs.append(flashmoe.attention(empty, *tensors[1:], causal=True))
            event = torch.cuda.Event()
            event.record(side)
            finished.append(event)
    assert not all(event.query() for event in finished), "the delays were over too soon: the test proved nothing"
    for side, out in zip(sides, outs, strict=True):
        side.synchronize()
        _assert_alike(out, expected)


@pytest.mark.parametrize("name", ["many tiles", "one query", "padded"])
def test_graph_captured_on_the_second_gpu(name: str) -> None:
    """Replayed with new inputs while the first GPU is current, and between eager calls on both."""
    problem = PROBLEMS[name]
    near, far = _both(problem)
    flashmoe.attention(*near, causal=problem.causal)
    with torch.cuda.device(SECOND):
        graph = torch.cuda.CUDAGraph()
        # A stream of this GPU: torch's default capture stream is one per process, on the GPU that captured first.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            captured = flashmoe.attention(*far, causal=problem.causal)
    for seed in range(1, 4):
        fresh, fresh_far = _both(problem, seed=seed)
        for old, new in zip(far, fresh_far, strict=True):
            old.copy_(new)
        torch.cuda.synchronize(SECOND)
        graph.replay()
        torch.cuda.synchronize(SECOND)
        expected = flashmoe.attention(*fresh, causal=problem.causal)
        _assert_alike(captured, expected)
        _assert_alike(flashmoe.attention(*fresh_far, causal=problem.causal), expected)


def test_backward_on_the_second_gpu_and_across_both() -> None:
    problem = Problem(130, 150, 64, 4, 2, batch=2, causal=True)
    near, far = ([tensor.requires_grad_() for tensor in tensors] for tensors in _both(problem))
    flashmoe.attention(*near, causal=True).float().square().sum().backward()
    flashmoe.attention(*far, causal=True).float().square().sum().backward()
    for a, b in zip(near, far, strict=True):
        assert b.grad.device == torch.device(SECOND)
        torch.testing.assert_close(a.grad.cpu(), b.grad.cpu(), rtol=1e-2, atol=1e-2)
    singles = [[tensor.grad.clone() for tensor in tensors] for tensors in (near, far)]
    for tensor in (*near, *far):
        tensor.grad = None
    losses = [flashmoe.attention(*tensors, causal=True).float().square().sum() for tensors in (near, far)]
    (losses[0] + losses[1].to(FIRST)).backward()  # one backward pass, with a thread per device
    for tensors, wanted in zip((near, far), singles, strict=True):
        for tensor, one in zip(tensors, wanted, strict=True):
            torch.testing.assert_close(tensor.grad, one, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore::UserWarning")  # from torch's DataParallel
def test_module_on_the_second_gpu_and_in_parallel() -> None:
    module = flashmoe.Attention(256, 4, 2, causal=True, device=FIRST, dtype=torch.bfloat16)
    x = torch.randn(6, 70, 256, device=FIRST, dtype=torch.bfloat16)
    expected = module(x)
    with torch.no_grad():
        replicas = torch.nn.DataParallel(module, device_ids=[0, 1])(x)
    torch.testing.assert_close(replicas, expected, rtol=2e-2, atol=2e-2)
    moved = module.to(SECOND)
    out = moved(x.to(SECOND))
    assert out.device == torch.device(SECOND)
    torch.testing.assert_close(out.to(FIRST), expected, rtol=2e-2, atol=2e-2)
    out.float().sum().backward()
    assert {parameter.grad.device for parameter in moved.parameters()} == {torch.device(SECOND)}


def test_autocast_and_sdpa_on_the_second_gpu() -> None:
    near, far = _both(Problem(33, 60, 64, 4, 4, batch=2), torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        out = flashmoe.attention(*far)
        assert_ran_here(SECOND)
        assert out.dtype == torch.bfloat16
        _assert_alike(out, flashmoe.attention(*near))
    halves = [tensor.half() for tensor in far]
    for causal in (False, True):
        out = flashmoe.scaled_dot_product_attention(*halves, is_causal=causal)
        torch.testing.assert_close(out, torch_attention(*halves, is_causal=causal), rtol=2e-3, atol=2e-3)
        assert out.device == torch.device(SECOND)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_on_the_second_gpu(backend: str) -> None:
    if backend == "inductor":
        pytest.importorskip("setuptools", reason="torch's inductor imports setuptools, which is not installed here")
        pytest.importorskip("triton", reason="torch's inductor needs triton for a GPU, which is not installed here")
    torch._dynamo.reset()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashmoe.attention(q * 0.5, k + 1, v.relu(), causal=True).sin()

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    near, far = ([tensor.requires_grad_() for tensor in tensors] for tensors in _both(Problem(65, 70, 64, 4, 2)))
    for tensors in (far, near):
        out, expected = compiled(*tensors), block(*tensors)
        assert out.device == tensors[0].device
        torch.testing.assert_close(out, expected, rtol=4e-3, atol=4e-3)
        grads = torch.autograd.grad(out.float().sum(), tensors)
        for a, b in zip(grads, torch.autograd.grad(expected.float().sum(), tensors), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


FIRST_USE = """
import sys, torch, flashmoe
capture = sys.argv[1] == "capture"
shape = (1, 16, 1100, 128)
far = [torch.randn(shape, device="cuda:1").half() for _ in range(3)]
assert torch.cuda.current_device() == 0
if capture:
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flashmoe.attention(*far, causal=True)
    graph.replay()
else:
    out = flashmoe.attention(*far, causal=True)
torch.cuda.synchronize(1)
assert torch.cuda.memory_reserved(0) == 0, "memory was taken on the first GPU"
assert torch.cuda.current_device() == 0
assert out.isfinite().all() and out.any()
assert torch.equal(out, flashmoe.attention(*far, causal=True))
near = [tensor.to("cuda:0") for tensor in far]
other = flashmoe.attention(*near, causal=True)
torch.testing.assert_close(other.cpu(), out.cpu(), rtol=2e-2, atol=2e-2)
print("first used on the second GPU")
"""


@pytest.mark.parametrize("how", ["eager", "capture"])
def test_first_use_of_all_on_the_second_gpu(how: str, tmp_path: Path) -> None:
    """A process that has used neither GPU loads driver, context, module and kernel for the second one."""
    environment = {**os.environ, _extension.LIBRARY_VARIABLE: str(_extension.load())}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE, how],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
        cwd=tmp_path,  # python -c searches its folder first, which may contain the sources
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "first used on the second GPU" in done.stdout


def test_devices_hidden_and_reordered(tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES=1: torch's device 0 is the second GPU, and flashmoe's driver calls must use the same one."""
    code = (
        "import torch, flashmoe\n"
        "assert torch.cuda.device_count() == 1\n"
        "q = torch.randn(1, 2, 100, 64, device='cuda').half()\n"
        "expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "torch.testing.assert_close(flashmoe.attention(q, q, q), expected, rtol=2e-3, atol=2e-3)\n"
        "print(torch.cuda.get_device_properties(0).uuid)\n"
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": visible[1],
        _extension.LIBRARY_VARIABLE: str(_extension.load()),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(torch.cuda.get_device_properties(1).uuid)
