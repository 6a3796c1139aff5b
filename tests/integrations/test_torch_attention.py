"""torch's own attention functions on flashmoe: what reaches it, what goes on to torch's kernel, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashmoe
from flashmoe.errors import ArgumentError
from flashmoe.integrations import torch_attention

pytestmark = [  # what torch's compilers say about torch itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning"),
]
FORWARD = {
    "cpu": "flashmoe::flash_attention_forward",
    "cuda": "flashmoe::flash_attention_forward",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def inactive() -> Iterator[None]:
    yield
    flashmoe.deactivate()


def tensors(device: str, requires_grad: bool = False, heads_kv: int = 4, length: int = 33) -> tuple[Tensor, ...]:
    torch.manual_seed(3)
    dtype = torch.float16 if device == "cuda" else torch.float32
    shapes = [(2, 4, length, 64), (2, heads_kv, length, 64), (2, heads_kv, length, 64)]
    return tuple(torch.randn(shape, device=device, dtype=dtype).requires_grad_(requires_grad) for shape in shapes)


def operators(call: Callable[[], object]) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        call()
    return {event.name for event in profile.events()}


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


def test_nothing_is_left_behind(device: str) -> None:
    q, k, v = tensors(device)
    before = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    for _ in range(2):  # it can be activated again
        with torch_attention.activated():
            flashmoe.activate()  # twice is once
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
        # torch takes dropout to the mathematical form on the CPU; float64 is what reaches the flash kernel and not ours.
        call = partial(F.scaled_dot_product_attention, q.double(), k.double(), v.double())
        reason = "there is no kernel for torch.float64"
    else:
        call = partial(F.scaled_dot_product_attention, q, k, v, dropout_p=0.5)
        reason = "dropout"
    flashmoe.activate()
    assert not any(name.startswith("flashmoe::") for name in operators(call))
    monkeypatch.setenv("FLASHMOE_FALLBACK", "warn")
    with pytest.warns(UserWarning, match=reason):
        call()
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    with pytest.raises(ArgumentError, match=reason):
        call()


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
