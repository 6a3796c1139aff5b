"""Jagged nested tensors in torch's attention: those of its flash backend run on flashmoe; for all others the reason is reported."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nested._internal import sdpa
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashmoe
from flashmoe.attn.sdpa_dispatch import Backend
from flashmoe.errors import ArgumentError
from flashmoe.integrations import torch_attention
from tests.torch_warnings import COMPILED

from .jagged import RAGGED_FORWARD, jagged, operators, ragged

pytestmark = [
    *COMPILED,
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def inactive() -> Iterator[None]:
    yield
    flashmoe.deactivate()


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
def test_jagged_tensors_run_on_flashmoe(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, lengths = ragged("cuda", requires_grad=True)
    upstream = torch.randn_like(tensors[0])
    expected = flashmoe.attention_varlen(*tensors, lengths, lengths, 13, 13, causal=True)
    gradients = torch.autograd.grad(expected, tensors, upstream)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    with torch_attention.activated():
        call = torch.compile(attend) if is_compiled else attend
        out = call(*jagged(tensors, lengths)).transpose(1, 2).values()
        found = torch.autograd.grad(out, tensors, upstream)
        assert RAGGED_FORWARD in operators(lambda: call(*jagged(tensors, lengths)))
        nested = jagged(tensors, lengths)
        assert flashmoe.explain(*nested, is_causal=True).path == Backend.FLASHMOE
        assert RAGGED_FORWARD in operators(lambda: flashmoe.scaled_dot_product_attention(*nested, is_causal=True))
    assert torch.allclose(out, expected, atol=1e-3)
    assert all(torch.allclose(a, b, atol=2e-3) for a, b in zip(found, gradients, strict=True))


@pytest.mark.gpu
def test_dropout_of_jagged_tensors_runs_on_flashmoe() -> None:
    tensors, lengths = ragged("cuda")
    call = partial(F.scaled_dot_product_attention, *jagged(tensors, lengths), dropout_p=0.5)
    with torch_attention.activated():
        assert "flashmoe::attention_dropout_forward" in operators(call)
        assert flashmoe.explain(*jagged(tensors, lengths), dropout_p=0.5).path == Backend.FLASHMOE


@dataclass(frozen=True)
class Case:
    """A call whose tensors or settings torch's flash backend does not accept."""

    device: str
    backend: str
    reason: str
    dtype: torch.dtype = torch.float16
    head_dim_v: int = 64
    lengths: tuple[int, ...] = (10, 1, 13)
    is_compiled: bool = False
    settings: Callable[[], AbstractContextManager[Any]] = nullcontext

    def tensors(self) -> list[Tensor]:
        torch.manual_seed(3)
        make = partial(torch.randn, device=self.device, dtype=self.dtype)
        return [make(sum(self.lengths), 4, size).requires_grad_() for size in (64, 64, self.head_dim_v)]

    def nested(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        ends = torch.tensor([0, *self.lengths], device=self.device).cumsum(0)
        least_and_most: dict[str, Any] = {"min_seqlen": min(self.lengths), "max_seqlen": max(self.lengths)}
        make = partial(torch.nested.nested_tensor_from_jagged, offsets=ends, **least_and_most)
        q, k, v = (make(tensor).transpose(1, 2) for tensor in tensors)
        return q, k, v


FLOAT32 = "float16 and bfloat16, not torch.float32"
GPU_CASES = {
    "float32": Case("cuda", "efficient attention", FLOAT32, torch.float32),
    "float32-compiled": Case("cuda", "efficient attention", FLOAT32, torch.float32, is_compiled=True),
    "head-dims": Case("cuda", "efficient attention", "a multiple of 8 up to 256, not 64, 64 and 32", head_dim_v=32),
    "empty": Case("cuda", "math", "empty sequences", lengths=(10, 0, 13)),
    "efficient": Case(
        "cuda", "efficient attention", "switched off", settings=partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION)
    ),
    "math": Case("cuda", "math", "switched off", settings=partial(sdpa_kernel, SDPBackend.MATH)),
}
CPU_CASES = {
    "cpu": Case("cpu", "math", "on a GPU, not on cpu", torch.float32),
    "cpu-compiled": Case("cpu", "math", "on a GPU, not on cpu", torch.float32, is_compiled=True),
}
CASES = [
    *(pytest.param(case, id=name) for name, case in CPU_CASES.items()),
    *(pytest.param(case, id=f"cuda-{name}", marks=pytest.mark.gpu) for name, case in GPU_CASES.items()),
]


@pytest.mark.parametrize("case", CASES)
def test_jagged_calls_that_torch_hands_to_another_backend_are_told_with_the_reason(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is still torch's; the policy may be set after activating."""
    tensors = case.tensors()
    told = f"torch chose its {case.backend} backend for these jagged tensors, not flash: .*{case.reason}"

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def values(out: Tensor) -> Tensor:
        return out.transpose(1, 2).values()

    with case.settings():
        expected = values(step(*case.nested(tensors)))
        gradients = torch.autograd.grad(expected.sum(), tensors)
        with torch_attention.activated():
            call = torch.compile(step, backend="aot_eager") if case.is_compiled else step
            monkeypatch.setenv("FLASHMOE_FALLBACK", "warn")
            with pytest.warns(UserWarning, match=told) as warned:
                out = values(call(*case.nested(tensors)))
            route = flashmoe.explain(*case.nested(tensors))
            monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
            with pytest.raises(ArgumentError, match=told):
                step(*case.nested(tensors))
            with pytest.raises(ArgumentError, match=told):
                flashmoe.scaled_dot_product_attention(*case.nested(tensors))
        found = torch.autograd.grad(out.sum(), tensors)
        step(*case.nested(tensors))  # no longer reported
    assert route.path == Backend.TORCH
    assert case.reason in route.reason
    assert case.is_compiled or warned[0].filename == __file__, "it names the line of the call"
    assert torch.allclose(out, expected, atol=1e-3)
    assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(found, gradients, strict=True))


def test_torchs_choice_is_wrapped_while_active_and_then_its_own_again() -> None:
    before = sdpa._select_sdp_backend
    with torch_attention.activated():
        assert sdpa._select_sdp_backend is not before
    assert sdpa._select_sdp_backend is before


def test_explain_of_jagged_tensors_says_what_torch_does_with_them() -> None:
    tensors, lengths = ragged("cpu")
    nested = jagged(tensors, lengths)
    assert "flashmoe.activate()" in flashmoe.explain(*nested).reason
    rows = torch.randn(24, 4, 9, 64)
    dense = torch.nested.nested_tensor_from_jagged(rows, lengths.long())  # ragged before the heads
    with torch_attention.activated():
        assert "has no backend" in flashmoe.explain(*nested, is_causal=True).reason
        assert "Masks are not yet supported" in flashmoe.explain(*nested, attn_mask=torch.zeros(1)).reason
        assert "not on cpu" in flashmoe.explain(*nested, dropout_p=0.5).reason
        assert flashmoe.explain(dense, dense, dense).path == Backend.FLASHMOE
        assert "flashmoe::flash_attention_forward" in operators(
            lambda: F.scaled_dot_product_attention(dense, dense, dense)
        )
        wide = dense.to(torch.float64)
        assert "float64" in flashmoe.explain(wide, wide, wide).reason
