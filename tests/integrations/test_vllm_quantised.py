"""vLLM's fp8 and mxfp4 experts on flashmoe: called with the arguments of vLLM's modular kernel, compared with the layer on dequantised weights."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashmoe.errors import ArgumentError
from flashmoe.moe.mxfp4 import dequantize
from tests.integrations import engines
from tests.integrations.engines import MoEActivation, MoEConfig, QuantConfig

T, E, K, H, INNER, BLOCK = 9, 4, 2, 256, 128, 128
FP8 = ("kFp8Static128BlockSym", "kFp8Dynamic128Sym")
LARGE = {"hidden_dim": H, "intermediate_size_per_partition": INNER}


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("FLASHMOE_FALLBACK", raising=False)
    with engines.installed(engines.vllm_stand_ins(), "flashmoe.integrations.vllm"):
        yield importlib.import_module("flashmoe.integrations.vllm.quantised")


def blocks(weights: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 and float32 scales of float32 [..., N, K], one per 128 x 128 block."""
    tiles = weights.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., N/128, 128, K/128, 128]
    scale = tiles.abs().amax((-1, -3)) / 448
    codes = (tiles / scale[..., None, :, None]).flatten(-4, -3).flatten(-2)
    return codes.to(torch.float8_e4m3fn), scale


def wide(codes: Tensor, scale: Tensor) -> Tensor:
    tiles = codes.double().unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    return (tiles * scale.double()[..., None, :, None]).flatten(-4, -3).flatten(-2)


def rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 and float32 scales of x [T, H], one per 128 elements of a row, as in vLLM's prepare step."""
    tiles = x.float().unflatten(-1, (-1, BLOCK))
    scale = tiles.abs().amax(-1) / 448
    return (tiles / scale.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn), scale


def routed(generator: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    return torch.rand(T, K, generator=generator).to(device), ids.to(device, torch.int32)


def call(
    kernel: Any, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, x_scale: Tensor | None
) -> Tensor:
    output = torch.full((T, H), 7.0, device=x.device, dtype=torch.bfloat16)
    kernel.apply(
        output, x, w13, w2, weights, ids, kernel.moe_config.activation, E, None, x_scale, None, torch.empty(0), torch.empty(0), None, False
    )  # fmt: skip
    return output


def layer(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, gate: Any) -> Tensor:
    """The weighted sum over each token's experts in float64."""
    out = torch.zeros(T, H, dtype=torch.float64, device=x.device)
    for token in range(T):
        for slot in range(K):
            expert = int(ids[token, slot])
            out[token] += float(weights[token, slot]) * (
                w2[expert].double() @ gate(w13[expert].double() @ x[token].double())
            )
    return out


def silu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def clamped(both: Tensor) -> Tensor:
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


@pytest.mark.parametrize("column_major", [False, True])
def test_fp8_experts_take_vllms_codes_and_scales(quantised: Any, device: str, column_major: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    w13, s13 = blocks(torch.randn(E, 2 * INNER, H, generator=generator).to(device) / 16)
    w2, s2 = blocks(torch.randn(E, H, INNER, generator=generator).to(device) / 11)
    x, x_scale = rows(torch.randn(T, H, generator=generator).to(device))
    weights, ids = routed(generator, device)
    kernel = quantised.FlashmoeFp8Experts(
        MoEConfig(**LARGE), QuantConfig(w1_scale=s13, w2_scale=s2, block_shape=[BLOCK, BLOCK])
    )
    assert not getattr(kernel, "expects_unquantized_inputs", False)  # vLLM quantises before it sends rows to other GPUs
    given = x_scale.t().contiguous().t() if column_major else x_scale
    out = call(kernel, x, w13, w2, weights, ids, given)
    widened = (x.double().unflatten(-1, (-1, BLOCK)) * x_scale.double().unsqueeze(-1)).flatten(-2)
    wanted = layer(widened, wide(w13, s13), wide(w2, s2), weights, ids, silu)
    assert (out.double() - wanted).norm() < 0.05 * wanted.norm()  # the activation also has 8 bits


def test_mxfp4_experts_are_the_layer_on_dequantised_weights(quantised: Any, device: str) -> None:
    generator = torch.Generator().manual_seed(2)

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device)

    w13, w2 = codes(E, 2 * INNER, H // 2), codes(E, H, INNER // 2)
    s13, s2 = (torch.full((*w.shape[:2], w.shape[2] // 16), 122, dtype=torch.uint8, device=device) for w in (w13, w2))
    x = torch.randn(T, H, generator=generator).to(device, torch.bfloat16)
    weights, ids = routed(generator, device)
    bias = QuantConfig(gemm1_alpha=1.702, gemm1_beta=1.0, gemm1_clamp_limit=7.0, w1_scale=s13, w2_scale=s2)
    kernel = quantised.FlashmoeMxfp4Experts(MoEConfig(MoEActivation.SWIGLUOAI, **LARGE), bias)
    assert kernel.expects_unquantized_inputs
    out = call(kernel, x, w13, w2, weights, ids, None)
    wanted = layer(x, dequantize(w13, s13), dequantize(w2, s2), weights, ids, clamped)
    assert (out.double() - wanted).norm() < 0.02 * wanted.norm()


def test_gpt_oss_is_packed_where_the_gpu_has_kernels(
    quantised: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion that vLLM calls once, then a call with its results; the bits match those of the checkpoint's codes."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((E, 2 * INNER, H // 2), (E, H, INNER // 2), (E, 2 * INNER, H // 32), (E, H, INNER // 32))
    tensors = [torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device) for shape in shapes]
    tensors[2:] = [tensor % 5 + 120 for tensor in tensors[2:]]
    biases = [torch.randn(E, size, generator=generator).to(device, torch.bfloat16) for size in (2 * INNER, H)]
    x = torch.randn(T, H, generator=generator).to(device, torch.bfloat16)
    routing = routed(generator, device)

    def run(w13: Tensor, w2: Tensor, s13: Tensor, s2: Tensor, b13: Tensor, b2: Tensor) -> Tensor:
        given = QuantConfig(b13, b2, 1.702, 1.0, 7.0, s13, s2)
        kernel = quantised.FlashmoeMxfp4Experts(MoEConfig(MoEActivation.SWIGLUOAI, **LARGE), given)
        return call(kernel, x, w13, w2, *routing, None)

    expected = run(*tensors, *biases)
    if device == "cpu":
        monkeypatch.setattr(quantised, "can_pack", engines.takes_packed)
    quantised.register_quantised()
    convert = quantised.mxfp4.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format
    names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias")
    given = dict(zip(names, (*tensors, *biases), strict=True))
    assert convert(mxfp4_backend="marlin", layer=None, **given)[0] is tensors[0]
    converted = convert(mxfp4_backend="xpu", layer=None, **given)
    assert [tuple(one.shape[:2]) for one in converted[:2]] == [(E, 2 * INNER), (E, H)]  # vLLM reads E and N there
    assert sum(one.numel() for one in converted[:4]) == sum(one.numel() for one in tensors)
    if device == "cpu":
        monkeypatch.setattr(
            importlib.import_module("flashmoe.integrations.vllm.experts"), "fused_moe", engines.packed_fused_moe
        )
    assert torch.equal(run(*converted), expected)


def test_vllms_methods_get_ours(quantised: Any) -> None:
    for _ in range(2):
        quantised.register_quantised()
    config = MoEConfig(**LARGE)
    chosen = quantised.fp8.select_fp8_moe_backend(
        config=config, weight_key=FP8[0], activation_key=FP8[1], allow_vllm_cutlass=False
    )
    assert chosen == ("triton", quantised.FlashmoeFp8Experts)
    oss = MoEConfig(MoEActivation.SWIGLUOAI, **LARGE, has_bias=True)
    assert quantised.mxfp4.select_mxfp4_moe_backend(oss) == ("xpu", quantised.FlashmoeMxfp4Experts)
    named = MoEConfig(**LARGE, moe_backend="marlin")
    assert quantised.fp8.select_fp8_moe_backend(named, *FP8)[0] == "vllm's fp8"
    assert quantised.mxfp4.select_mxfp4_moe_backend(named)[0] == "vllm's mxfp4"


@pytest.mark.parametrize(
    ("config", "keys", "reason"),
    [
        (MoEConfig(**LARGE), ("kFp8StaticTensorSym", "kFp8StaticTensorSym"), "quantization scheme kFp8StaticTensorSym"),
        (MoEConfig(**LARGE, has_bias=True), FP8, "fp8 experts with biases"),
        (MoEConfig(MoEActivation.SWIGLUOAI, **LARGE), FP8, "SWIGLUOAI"),
        (
            MoEConfig(hidden_dim=192, intermediate_size_per_partition=128),
            FP8,
            "hidden_dim is 192, which is not a multiple of 128",
        ),
        (MoEConfig(**LARGE, in_dtype=torch.float16), FP8, "torch.float16 is not one of torch.bfloat16"),
        (MoEConfig(**LARGE), "kFp8Dynamic128Sym", "quantization scheme kMxfp4StaticxkFp8Dynamic128Sym"),
        (MoEConfig(**LARGE, in_dtype=torch.float16), None, "torch.float16 is not one of torch.bfloat16"),
        (MoEConfig(hidden_dim=48), None, "hidden_dim is 48, which is not a multiple of 32"),
    ],
)
def test_other_quantised_experts_stay_vllms_or_are_refused(
    quantised: Any, config: MoEConfig, keys: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised.register_quantised()

    def chosen() -> Any:
        if isinstance(keys, tuple):
            return quantised.fp8.select_fp8_moe_backend(config, *keys)
        return quantised.mxfp4.select_mxfp4_moe_backend(config, keys)

    with pytest.warns(UserWarning, match="experts, not flashmoe") as told:
        assert chosen()[1] == "its experts"
    assert reason in str(told[0].message)
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    with pytest.raises(ArgumentError, match="would not run on flashmoe"):
        chosen()


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), None])
def test_the_gpu_decides(quantised: Any, capability: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 kernels exist only for 9.0; elsewhere torch would compute the layer, slower than vLLM's own."""
    found = None if capability is None else engines.Capability(*capability)
    monkeypatch.setattr(quantised.current_platform, "capability", found)
    quantised.register_quantised()
    with pytest.warns(UserWarning, match="current device"):
        assert quantised.fp8.select_fp8_moe_backend(MoEConfig(**LARGE), *FP8)[1] == "its experts"
    if capability == (8, 0):
        oss = MoEConfig(MoEActivation.SWIGLUOAI, **LARGE)
        assert quantised.mxfp4.select_mxfp4_moe_backend(oss)[1] is quantised.FlashmoeMxfp4Experts


def test_blocks_of_another_size_are_refused(quantised: Any) -> None:
    with pytest.raises(ArgumentError, match=r"blocks of \[1, 32\]; fused_moe's are 128 by 128"):
        quantised.FlashmoeFp8Experts(MoEConfig(**LARGE), QuantConfig(block_shape=[1, 32]))
