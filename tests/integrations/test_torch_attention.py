"""torch's attention functions on flashmoe: which calls it runs, which go to torch's kernel, and that nothing is left behind."""

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import flashmoe
from flashmoe.attn.dropout import draw_state
from flashmoe.errors import ArgumentError
from flashmoe.integrations import torch_attention
from tests.torch_warnings import COMPILED

from .jagged import LENGTHS, RAGGED_FORWARD, jagged, operators, ragged

pytestmark = COMPILED
FORWARD = {"cpu": "flashmoe::flash_attention_forward", "cuda": "flashmoe::flash_attention_forward"}


@pytest.fixture(autouse=True)
def inactive() -> Iterator[None]:
    yield
    flashmoe.deactivate()


def tensors(device: str, requires_grad: bool = False, heads_kv: int = 4, length: int = 33) -> tuple[Tensor, ...]:
    torch.manual_seed(3)
    dtype = torch.float16 if device == "cuda" else torch.float32
    shapes = [(2, 4, length, 64), (2, heads_kv, length, 64), (2, heads_kv, length, 64)]
    return tuple(torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad) for shape in shapes)


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, causal: bool) -> Tensor:
    """``varlen_attn``, whose causal mask is a flag in torch 2.10 and a window in later versions."""
    longest = max(LENGTHS)
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = (
        {"is_causal": causal} if "is_causal" in names else {"window_size": (-1, 0 if causal else -1)}
    )
    out = varlen_attn(q, k, v, lengths, lengths, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_runs_on_flashmoe_with_the_same_bits_as_a_direct_call(device: str, causal: bool) -> None:
    q, k, v = tensors(device, requires_grad=True)
    upstream = torch.randn_like(q)
    expected = flashmoe.attention(q, k, v, causal=causal)
    gradients = torch.autograd.grad(expected, (q, k, v), upstream)
    with torch_attention.activated():
        assert flashmoe.is_active()
        seen = operators(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        found = torch.autograd.grad(out, (q, k, v), upstream)
    assert FORWARD[device] in seen
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
def test_dropout_runs_on_flashmoe(is_compiled: bool) -> None:
    """Seed and offset come from torch's generator and are kept for the gradients; the bits match a direct call with them."""
    q, k, v = tensors("cuda", requires_grad=True)
    upstream = torch.randn_like(q)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True)

    torch.manual_seed(1)
    state = draw_state(q.device)
    expected = flashmoe.attention(q, k, v, causal=True, dropout_p=0.4, rng_state=state)
    gradients = torch.autograd.grad(expected, (q, k, v), upstream)
    with torch_attention.activated():
        call = torch.compile(step, fullgraph=True, backend="aot_eager") if is_compiled else step
        torch.manual_seed(1)
        out = call(q, k, v)
        found = torch.autograd.grad(out, (q, k, v), upstream)
        assert not torch.equal(call(q, k, v), out)
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


@pytest.mark.gpu
def test_a_captured_graph_draws_anew() -> None:
    q, k, v = tensors("cuda")
    with torch_attention.activated(), torch.no_grad():
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        graph.replay()
        first = out.clone()
        graph.replay()
        assert not torch.equal(out, first)


def test_ragged_dropout(device: str) -> None:
    """torch's ragged operators: both passes use the state that the forward pass returns."""
    q, k, v = (torch.randn(50, 2, 64, device=device).half() for _ in range(3))
    ends = torch.tensor([0, 13, 50], dtype=torch.int32, device=device)
    upstream = torch.randn_like(q)
    with torch_attention.activated():
        aten = torch.ops.aten
        out, lse, state, unused, _ = aten._flash_attention_forward(q, k, v, ends, ends, 37, 37, 0.4, True, False)
        found = aten._flash_attention_backward(
            upstream, q, k, v, out, lse, ends, ends, 37, 37, 0.4, True, state, unused
        )
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    options = {"causal": True, "dropout_p": 0.4, "rng_state": state.view(torch.int64)}
    expected = flashmoe.attention_varlen(*leaves, ends, ends, 37, 37, **options)
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, torch.autograd.grad(expected, leaves, upstream), strict=True))


def test_nothing_is_left_behind(device: str) -> None:
    q, k, v = tensors(device)
    before = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    for _ in range(2):  # it can be activated again
        with torch_attention.activated():
            flashmoe.activate()  # idempotent
            assert torch.nn.attention.current_flash_attention_impl() == "flashmoe"
        assert not flashmoe.is_active()
        assert torch.nn.attention.current_flash_attention_impl() is None
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    seen = operators(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert not any(name.startswith("flashmoe::") for name in seen)
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), before)


def test_what_is_lacking_goes_to_torchs_kernel_and_is_told(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(device)
    if device == "cpu":
        # torch sends dropout to the math backend on the CPU; float64 reaches torch's flash kernel but not ours.
        call = partial(F.scaled_dot_product_attention, q.double(), k.double(), v.double())
        reason = "there is no kernel for torch.float64"
    else:
        call = partial(torch.ops.aten._scaled_dot_product_flash_attention, q, k, v, 0.5, False, True)
        reason = "a debug mask"
    flashmoe.activate()
    assert not any(name.startswith("flashmoe::") for name in operators(call))
    monkeypatch.setenv("FLASHMOE_FALLBACK", "warn")
    with pytest.warns(UserWarning, match=reason):
        call()
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    with pytest.raises(ArgumentError, match=reason):
        call()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_calls_that_torch_hands_to_another_backend_are_told(
    device: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU calls with dropout, on a GPU calls with a mask; torch's result is unchanged, and calls that we support still run here."""
    q, k, v = tensors(device, requires_grad=True)
    other: dict[str, Any] = {"dropout_p": 1e-9} if device == "cpu" else {"attn_mask": q.new_zeros(33, 33)}
    reason = "torch chose its math backend" if device == "cpu" else "torch chose its efficient attention backend"

    def step(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)

    expected = step(q, k, v, **other)
    gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    call = torch.compile(step, fullgraph=True, backend="aot_eager") if is_compiled else step
    monkeypatch.setenv("FLASHMOE_FALLBACK", "warn")
    with torch_attention.activated():
        assert FORWARD[device] in operators(lambda: call(q, k, v, is_causal=True)), "and nothing is told of it"
        with pytest.warns(UserWarning, match=reason):
            out = call(q, k, v, **other)
        found = torch.autograd.grad(out.sum(), (q, k, v))
        monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
        with pytest.raises(ArgumentError, match=reason):
            step(q, k, v, **other)
    assert torch.allclose(out, expected, atol=1e-3)
    assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(found, gradients, strict=True))
    step(q, k, v, **other)  # no longer reported


def test_a_compiled_function_keeps_to_flashmoe(device: str) -> None:
    q, k, v = tensors(device, requires_grad=True)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True).sum()

    with torch_attention.activated():
        expected = torch.autograd.grad(step(q, k, v), (q, k, v))
        compiled = torch.compile(step, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
        found = torch.autograd.grad(compiled(q, k, v), (q, k, v))
        seen = operators(lambda: compiled(q, k, v))
    assert FORWARD[device] in seen
    assert all(torch.allclose(a, b, atol=2e-3) for a, b in zip(found, expected, strict=True))


def test_torchs_own_choice_of_backends_is_respected(device: str) -> None:
    q, k, v = tensors(device)
    with torch_attention.activated(), sdpa_kernel(SDPBackend.MATH):
        seen = operators(lambda: F.scaled_dot_product_attention(q, k, v))
    assert not any(name.startswith("flashmoe::") for name in seen)


def test_an_encoder_layer_of_torch(device: str) -> None:
    layer = torch.nn.TransformerEncoderLayer(128, 2, 256, dropout=0.0, batch_first=True, device=device)
    x = torch.randn(2, 17, 128, device=device)
    context = torch.autocast(device, torch.bfloat16)
    with context:
        expected = layer(x)
        with torch_attention.activated():
            seen = operators(lambda: layer(x))
            out = layer(x)
    assert FORWARD[device] in seen
    assert torch.allclose(out, expected, atol=0.05)


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_attn_runs_on_flashmoe_with_the_same_bits_as_a_direct_call(device: str, causal: bool) -> None:
    tensors, lengths = ragged(device, requires_grad=True)
    upstream = torch.randn_like(tensors[0])
    expected = flashmoe.attention_varlen(*tensors, lengths, lengths, 13, 13, causal=causal)
    gradients = torch.autograd.grad(expected, tensors, upstream)
    with torch_attention.activated():
        out = torch_varlen(*tensors, lengths, causal)
        found = torch.autograd.grad(out, tensors, upstream)
        seen = operators(lambda: torch_varlen(*tensors, lengths, causal))
    assert RAGGED_FORWARD in seen
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


def test_a_compiled_call_of_varlen_attn_keeps_to_flashmoe(device: str) -> None:
    tensors, lengths = ragged(device, requires_grad=True)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch_varlen(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, lengths, True).square().sum()

    with torch_attention.activated():
        expected = torch.autograd.grad(step(*tensors), tensors)
        compiled = torch.compile(step, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
        found = torch.autograd.grad(compiled(*tensors), tensors)
        assert RAGGED_FORWARD in operators(lambda: compiled(*tensors))
    assert all(torch.allclose(a, b, atol=2e-3, rtol=2e-3) for a, b in zip(found, expected, strict=True))


def test_without_torchs_kernel_for_the_cpu_what_is_lacking_is_an_error_by_name() -> None:
    tensors, lengths = ragged("cpu")
    q, k, v = (tensor.double() for tensor in tensors)
    with torch_attention.activated(), pytest.raises(ArgumentError, match=r"torch\.float64 on cpu; and torch has no"):
        torch_varlen(q, k, v, lengths, causal=True)
    with pytest.raises(NotImplementedError):  # torch's error, as before
        torch_varlen(*tensors, lengths, True)


TORCHS_KERNELS = ("flash_fwd", "flash_bwd", "pytorch_flash", "fmha", "cudnn", "efficient_attention")


def kernels(call: Callable[[], object]) -> list[str]:
    """The names of the GPU kernels that run."""
    call()  # compilation and tuning happen at the first call
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type.name == "CUDA"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dense", "varlen", "jagged"])
def test_the_profile_of_an_unmodified_model_shows_our_kernels_and_none_of_torchs_attention(name: str) -> None:
    layer = torch.nn.Linear(256, 3 * 256, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([0, 10, 11, 24], dtype=torch.int32, device="cuda")

    def step() -> None:
        """A training step of one layer, in code that is not aware of flashmoe."""
        x = torch.randn(2, 24, 256, device="cuda", dtype=torch.bfloat16)
        if name == "dense":
            q, k, v = layer(x).view(2, 24, 3, 4, 64).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            given: tuple[Tensor, Tensor, Tensor] = layer(x[0]).view(24, 3, 4, 64).unbind(1)
            if name == "varlen":
                out = torch_varlen(*given, lengths, True)
            else:
                nested = jagged(given, lengths)
                out = F.scaled_dot_product_attention(*nested, is_causal=True).transpose(1, 2).values()
        out.square().sum().backward()

    before = kernels(step)
    assert any(part in kernel for kernel in before for part in TORCHS_KERNELS), before  # torch still uses these names
    with torch_attention.activated():
        found = kernels(step)
    ours = [kernel for kernel in found if kernel.startswith("flashmoe_")]
    backward = [kernel for kernel in ours if "backward" in kernel]
    assert backward, found
    assert len(ours) > len(backward), found  # the forward pass may be one for decoding: the sequences are short
    assert not any(part in kernel for kernel in found for part in TORCHS_KERNELS), found


RECORDED = """
import torch, flashmoe
q, k, v = (torch.randn(1, heads, 1024, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
row = q[:, :, :1].contiguous()
with torch.no_grad():
    step = torch.compile(lambda q, k, v: flashmoe.attention(q, k, v) + 0, mode="reduce-overhead")
    for _ in range(4):  # warming up, recording, replaying
        out = step(row, k, v).clone()
assert torch.allclose(out, flashmoe.attention(row, k, v), atol=1e-2)
"""


@pytest.mark.gpu
def test_the_first_call_may_be_one_that_torch_compile_records_as_a_cuda_graph(tmp_path: Path) -> None:
    """In a separate process: permanent allocations of the first call must not be in the graph's memory."""
    words = [sys.executable, "-W", "ignore", "-c", RECORDED]  # -c looks for modules in its folder: not in a checkout
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
