"""vLLM's experts on flashmoe: called with the arguments of vLLM's modular kernel, compared with float64 torch."""

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashmoe.errors import ArgumentError
from tests.integrations import engines
from tests.integrations.engines import MoEActivation, MoEConfig, QuantConfig

T, E, K, H, INNER = 11, 8, 2, 32, 16


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("FLASHMOE_FALLBACK", raising=False)
    with engines.installed(engines.vllm_stand_ins(), "flashmoe.integrations.vllm"):
        yield importlib.import_module("flashmoe.integrations.vllm.experts")


def gated(activation: Any, both: Tensor) -> Tensor:
    """vLLM's definitions: two halves, except for gpt-oss, whose columns alternate."""
    if activation is MoEActivation.SWIGLUOAI:
        gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    gate, up = both.chunk(2, -1)
    if activation is MoEActivation.SILU:
        return gate * torch.sigmoid(gate) * up
    if activation is MoEActivation.GELU:
        return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    return gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


@pytest.mark.parametrize(
    "activation", [MoEActivation.SILU, MoEActivation.GELU, MoEActivation.GELU_TANH, MoEActivation.SWIGLUOAI]
)
@pytest.mark.parametrize("form", ["plain", "expert parallel", "weights on input", "bias"])
def test_a_layer_is_the_weighted_sum_of_its_experts(experts: Any, device: str, activation: Any, form: str) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    x, w13, w2 = random(T, H), random(E, 2 * INNER, H) / 6, random(E, H, INNER) / 4
    b13, b2 = (random(E, 2 * INNER), random(E, H)) if form == "bias" else (None, None)
    weights = torch.rand(T, K, generator=generator).to(device)
    everywhere = 2 * E if form == "expert parallel" else E
    ids = torch.stack([torch.randperm(everywhere, generator=generator)[:K] for _ in range(T)]).to(device, torch.int32)
    expert_map = None
    if form == "expert parallel":  # this rank has the odd ones
        expert_map = torch.full((everywhere,), -1, dtype=torch.int32, device=device)
        expert_map[1::2] = torch.arange(E, dtype=torch.int32, device=device)
    kernel = experts.FlashmoeExperts(MoEConfig(activation), QuantConfig(b13, b2))
    shapes = kernel.workspace_shapes(T, 2 * INNER, H, K, everywhere, E, None, activation)
    output = torch.full(shapes[2], 7.0, device=device, dtype=torch.bfloat16)
    kernel.apply(
        output, x, w13, w2, weights, ids, activation, everywhere, expert_map, None, None, torch.empty(0), torch.empty(0), None,
        form == "weights on input",
    )  # fmt: skip
    wanted = torch.zeros(T, H, dtype=torch.float64, device=device)
    for token in range(T):
        for slot in range(K):
            expert = int(ids[token, slot])
            expert = expert if expert_map is None else int(expert_map[expert])
            if expert < 0:
                continue
            inner = w13[expert].double() @ x[token].double() + (0 if b13 is None else b13[expert].double())
            row = w2[expert].double() @ gated(activation, inner) + (0 if b2 is None else b2[expert].double())
            wanted[token] += row * (1.0 if form == "weights on input" else float(weights[token, slot]))
    assert torch.allclose(output.double(), wanted, atol=3e-2, rtol=3e-2)


def test_the_method_takes_our_experts_and_vllms_layout(experts: Any) -> None:
    method = experts.FlashmoeExpertsMethod(MoEConfig())
    assert (method.experts_cls, method.unquantized_backend) == (experts.FlashmoeExperts, "triton")
    experts.register_experts()
    experts.register_experts()
    assert {"ExpertsMethod": experts.FlashmoeExpertsMethod} == engines.REGISTERED


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MoEConfig(MoEActivation.RELU2), "RELU2"),
        (MoEConfig(hidden_dim=36), "hidden_dim is 36"),
        (MoEConfig(intermediate_size_per_partition=20), "intermediate_size_per_partition is 20"),
        (MoEConfig(num_experts=2048), "2048 experts"),
        (MoEConfig(in_dtype=torch.float32), "float32"),
        (MoEConfig(swiglu_limit=7.0), "gemm1_clamp_limit is 7.0; fused_moe's swiglu has none"),
        (
            MoEConfig(MoEActivation.SWIGLUOAI, swiglu_alpha=1.5),
            "gemm1_alpha is 1.5; fused_moe's clamped_swiglu has 1.702",
        ),
    ],
)
def test_other_experts_stay_vllms_or_are_refused(
    experts: Any, config: MoEConfig, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match="experts, not flashmoe") as told:
        method = experts.FlashmoeExpertsMethod(config)
    assert reason in str(told[0].message)
    assert (method.experts_cls, method.unquantized_backend) == (None, "vllm's choice")
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    with pytest.raises(ArgumentError, match="would not run on flashmoe"):
        experts.FlashmoeExpertsMethod(config)


def test_a_vllm_whose_experts_have_no_kernel_on_a_cpu_keeps_them(experts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts.current_platform, "capability", None)
    assert experts.FlashmoeExpertsMethod(MoEConfig(in_dtype=torch.float32)).experts_cls is experts.FlashmoeExperts
    monkeypatch.setattr(engines.ExpertsMethod, "is_monolithic", True, raising=False)
    with pytest.warns(UserWarning, match="fuses the experts with their router"):
        assert experts.FlashmoeExpertsMethod(MoEConfig()).experts_cls is None


def test_numbers_that_come_with_the_layer_are_not_dropped(experts: Any) -> None:
    with pytest.raises(ArgumentError, match=r"gemm1_clamp_limit is 5\.0"):
        experts.FlashmoeExperts(MoEConfig(), QuantConfig(gemm1_clamp_limit=5.0))
    kernel = experts.FlashmoeExperts(
        MoEConfig(MoEActivation.SWIGLUOAI), QuantConfig(gemm1_clamp_limit=7.0, gemm1_alpha=1.702)
    )
    kernel.post_gemm2_hook = print
    with pytest.raises(ArgumentError, match="post_gemm2_hook"):
        kernel.apply(*[torch.empty(0)] * 6, MoEActivation.SILU, 8, *[None] * 6, False)


def test_experts_are_registered_for_who_asks(experts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = importlib.import_module("flashmoe.integrations.vllm")
    monkeypatch.delenv("FLASHMOE_VLLM_EXPERTS", raising=False)
    plugin.register()
    assert not engines.REGISTERED
    monkeypatch.setenv("FLASHMOE_VLLM_EXPERTS", "1")
    plugin.register()
    assert list(engines.REGISTERED) == ["ExpertsMethod"]
