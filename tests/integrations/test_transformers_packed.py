"""Quantised transformers checkpoints, created here, on packed weights: gpt-oss in mxfp4, Qwen3-MoE in e4m3."""

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashmoe.errors import ArgumentError
from flashmoe.integrations.transformers import NAME, packed_config, register
from flashmoe.integrations.transformers import experts as experts_module
from flashmoe.integrations.transformers.experts import Mxfp4Experts, experts_forward, fp8_experts_forward
from flashmoe_tools.operations.moe_mxfp4 import formats
from flashmoe_tools.operations.moe_scaled import reference as scaled
from tests.integrations import engines
from tests.torch_warnings import WHOLE_MODELS

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = WHOLE_MODELS
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_experts_per_tok": 2}
SIZES: dict[str, dict[str, Any]] = {
    "GptOss": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 16,
        "num_local_experts": 4,
        "sliding_window": 7,
    },
    "Qwen3Moe": {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "head_dim": 64,
        "num_experts": 4,
        "decoder_sparse_step": 1,
    },
}
QUANTIZATION: dict[str, dict[str, Any]] = {
    "GptOss": {"quant_method": "mxfp4", "modules_to_not_convert": []},
    "Qwen3Moe": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
PROMPT = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def test_the_quantizers_that_this_version_takes() -> None:
    """If one is missing, requesting it is an error; a configuration for another method always is."""
    taken = _methods()
    for name, quantization in QUANTIZATION.items():
        config = getattr(transformers, f"{name}Config")(quantization_config=quantization)
        if quantization["quant_method"] in taken:
            assert packed_config(config).quantization_config == {
                **quantization,
                "quant_method": f"{NAME}_{quantization['quant_method']}",
            }
        else:
            with pytest.raises(ArgumentError, match=r"cannot keep the experts of an .* checkpoint packed"):
                packed_config(config)
    with pytest.raises(ArgumentError, match="quant_method is None; supported: fp8, mxfp4"):
        packed_config(transformers.LlamaConfig())


def _methods() -> set[str]:
    names = register()
    mapping = import_module("transformers.quantizers.auto").AUTO_QUANTIZER_MAPPING
    taken = {method for method in ("fp8", "mxfp4") if f"{NAME}_{method}" in mapping}
    assert taken <= set() if names.experts is None else "mxfp4" in taken
    return taken


def encode_e4m3(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 of [n, k], with a scale per 128 x 128 block that maps the largest value to 448."""
    blocks = weight.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scales = blocks.abs().amax((1, 3)) / 448
    return (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn), scales


def quantised(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors with the names and shapes of the released ones."""
    found = {}
    for key, tensor in tensors.items():
        if name == "Qwen3Moe" and key.endswith("proj.weight"):
            found[key], found[f"{key}_scale_inv"] = encode_e4m3(tensor)
        elif name == "GptOss" and key.endswith(("gate_up_proj", "down_proj")):
            codes, found[f"{key}_scales"] = formats.encode(tensor.mT.float())
            found[f"{key}_blocks"] = codes.unflatten(-1, (-1, 16))
        else:
            found[key] = tensor
    return {key: tensor.contiguous() for key, tensor in found.items()}


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quantised checkpoint: saved by transformers in 16 bits, then quantised as its format defines."""
    name: str = request.param
    if QUANTIZATION[name]["quant_method"] not in _methods():
        pytest.skip(
            "this transformers cannot be told how to load it; test_the_quantizers_that_this_version_takes holds the error"
        )
    folder = tmp_path_factory.mktemp(name)
    config = getattr(transformers, f"{name}Config")(**TOKENS, **HEADS, **SIZES[name], dtype="bfloat16")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    file, settings = folder / "model.safetensors", folder / "config.json"
    safetensors.save_file(quantised(name, safetensors.load_file(file)), file, metadata={"format": "pt"})
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "quantization_config": QUANTIZATION[name]}))
    return folder


def load(folder: Path, packed: bool, implementation: str = NAME) -> Any:
    options: dict[str, Any] = {"config": packed_config(folder)} if packed else {}
    options |= {"attn_implementation": implementation, "experts_implementation": implementation}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def generate(model: Any) -> tuple[Tensor, Tensor]:
    """Each prompt with eight more tokens, and the logits [2, 8, vocabulary] from which they were chosen."""
    options = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 8}
    found = model.generate(PROMPT, **options, eos_token_id=None)
    return found.sequences, torch.stack(found.logits, 1)


@torch.no_grad()
def assert_would_generate(model: Any, tokens: Tensor, logits: Tensor, tolerance: float) -> None:
    """Along ``tokens`` the model has these logits and chooses the same tokens, unless two logits are within the tolerance."""
    expected = model(tokens).logits[:, PROMPT.shape[1] - 1 : -1].float()
    assert (logits.float() - expected).norm() < tolerance * expected.norm()
    chosen = expected.gather(-1, tokens[:, PROMPT.shape[1] :, None])
    assert (expected.amax(-1, keepdim=True) - chosen).max() < 4 * tolerance * expected.std()


def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU accept packed weights, and no others."""
    monkeypatch.setattr(experts_module, "can_pack", engines.takes_packed)
    monkeypatch.setattr(experts_module, "fused_moe", engines.packed_fused_moe)


def in_use(model: Any, name: str) -> Tensor:
    found: Tensor = getattr(model.model.layers[0].mlp.experts, name)
    return found


@pytest.mark.parametrize("repacked", [False, True])
@pytest.mark.parametrize("checkpoint", ["GptOss"], indirect=True)
def test_gpt_oss_in_mxfp4_has_the_bits_of_the_dequantised_model(
    checkpoint: Path, repacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = safetensors.load_file(checkpoint / "model.safetensors")
    plain = load(checkpoint, packed=False)
    expected = generate(plain)
    if repacked:
        as_on_hopper(monkeypatch)
    model = load(checkpoint, packed=True)
    assert model.model.layers[1].mlp.experts.is_packed is repacked  # before the first call
    for kind in ("blocks", "scales", "bias"):
        for weight in ("gate_up_proj", "down_proj"):
            name = f"model.layers.0.mlp.experts.{weight}_{kind}"
            assert torch.equal(model.state_dict()[name], stored[name])
            assert repacked or torch.equal(in_use(model, f"{weight}_{kind}"), stored[name])
    assert in_use(plain, "gate_up_proj").dtype == torch.bfloat16
    tokens, logits = generate(model)
    assert torch.equal(tokens, expected[0])
    assert torch.equal(logits, expected[1])
    assert_would_generate(load(checkpoint, packed=False, implementation="eager"), tokens, logits, 2e-2)
    model.save_pretrained(tmp_path)  # the same kind of checkpoint again
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in stored.items())


@pytest.mark.parametrize("checkpoint", ["Qwen3Moe"], indirect=True)
def test_qwen3_moe_in_fp8_is_the_layer_that_its_format_means(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with an independent reference that quantises activations, and with transformers' dequantised model."""
    model, plain = load(checkpoint, packed=True), load(checkpoint, packed=False, implementation="eager")
    stored = safetensors.load_file(checkpoint / "model.safetensors")
    first = "model.layers.0.mlp.experts.0."
    half = torch.cat([stored[f"{first}{name}_proj.weight"].float() for name in ("gate", "up")])
    assert in_use(model, "gate_up_proj").dtype == torch.float8_e4m3fn
    assert torch.equal(in_use(model, "gate_up_proj")[0].float(), half)
    assert torch.equal(in_use(model, "down_proj_scale_inv")[0], stored[f"{first}down_proj.weight_scale_inv"])
    tokens, logits = generate(model)
    rows, ids, shares = (
        torch.randn(5, 256).bfloat16(),
        torch.tensor([[0, 1], [3, 2], [1, 3], [0, 2], [2, 3]]),
        torch.rand(5, 2),
    )
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        found, expected = (run(rows, ids, shares).float() for run in (experts, partial(composed, experts)))
    assert (found - expected).norm() < 4e-3 * expected.norm()  # from rounding to bfloat16
    interface = import_module("transformers.integrations.finegrained_fp8").FP8ExpertsInterface
    monkeypatch.setitem(interface._global_mapping, "composed", composed)
    model.set_experts_implementation("composed")
    assert_would_generate(model, tokens, logits, 1e-2)
    assert_would_generate(plain, tokens, logits, 3e-2)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(checkpoint / "again")


def composed(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    rows = scaled.rounded(hidden_states.double())
    weights = (experts.gate_up_proj, experts.down_proj, experts.gate_up_proj_scale_inv, experts.down_proj_scale_inv)
    return scaled.compose(rows, *weights, top_k_weights.double(), top_k_index, torch.float64).to(hidden_states.dtype)


def fp8_experts(**changes: Any) -> Any:
    """Like transformers' FP8Experts: 2 experts of 128 x 128."""
    random = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(2, rows, 128, generator=random).to(torch.float8_e4m3fn) for rows in (256, 128))
    given: dict[str, Any] = {
        "gate_up_proj": w13,
        "down_proj": w2,
        "block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    given |= {
        "gate_up_proj_scale_inv": torch.full((2, 2, 1), 0.125),
        "down_proj_scale_inv": torch.full((2, 1, 1), 0.25),
    }
    given["_apply_gate"] = lambda rows: (
        nn.functional.silu(rows[..., : rows.shape[-1] // 2]) * rows[..., rows.shape[-1] // 2 :]
    )
    return SimpleNamespace(**{**given, **changes})


ROUTED = (
    torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).bfloat16(),
    torch.tensor([[0], [1], [0]]),
    torch.ones(3, 1),
)


def test_scales_of_8_bits_are_those_of_32() -> None:
    experts = fp8_experts()
    scales = {
        name: getattr(experts, name).to(torch.float8_e8m0fnu)
        for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv")
    }
    assert torch.equal(fp8_experts_forward(fp8_experts(**scales), *ROUTED), fp8_experts_forward(experts, *ROUTED))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": [64, 128]}, r"block_size \(64, 128\)"),
        ({"block_size": None}, "block_size None"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"gate_up_proj": torch.zeros(2, 256, 64, dtype=torch.int8)}, "weights of torch.int8"),
        ({"has_gate": False}, "has no gate"),
        ({"_apply_gate": lambda rows: rows[..., :8]}, "is not one that fused_moe supports"),
        ({"down_proj": torch.zeros(2, 128, 64).to(torch.float8_e4m3fn)}, "cannot run on flashmoe: w13 and w2 disagree"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_none_of_this_format_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*; use (another )?experts"):
        fp8_experts_forward(fp8_experts(**changes), *ROUTED)


def test_a_norm_behind_the_experts_is_refused() -> None:
    with pytest.raises(ArgumentError, match="normalises each expert's output"):
        experts_forward(fp8_experts(has_post_expert_norm=True), *ROUTED)


def test_experts_without_a_gate_are_refused() -> None:
    with pytest.raises(ArgumentError, match="has no gate"):
        experts_forward(SimpleNamespace(has_gate=False, down_proj=torch.zeros(2, 128, 64)), *ROUTED)


def test_another_limit_than_gpt_oss_has_is_refused() -> None:
    sizes = {"num_experts": 2, "hidden_size": 64, "intermediate_size": 32, "alpha": 1.702}
    assert Mxfp4Experts(SimpleNamespace(**sizes, limit=7.0)).down_proj_blocks.shape == (2, 64, 1, 16)
    with pytest.raises(ArgumentError, match=r"alpha 1\.702 and limit 5\.0"):
        Mxfp4Experts(SimpleNamespace(**sizes, limit=5.0))


def mxfp4_experts(device: str, intermediate: int = 128) -> Mxfp4Experts:
    """2 experts of hidden size 64 with random codes and scales around 2^-5."""
    sizes = {"num_experts": 2, "hidden_size": 64, "intermediate_size": intermediate, "alpha": 1.702, "limit": 7.0}
    experts = Mxfp4Experts(SimpleNamespace(**sizes))
    random = torch.Generator().manual_seed(7)
    for name, tensor in experts.named_parameters():
        drawn = torch.randint(0, 256, tensor.shape, generator=random, dtype=torch.uint8)
        tensor.data = (
            drawn % 5 + 120 if name.endswith("scales") else drawn if name.endswith("blocks") else drawn.bfloat16() / 256
        )
    return experts.to(device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_first_call_repacks_in_place_and_bits_stay(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, rows = mxfp4_experts(device), torch.randn(5, 64, device=device).bfloat16()
    routing = torch.tensor([[0], [1], [0], [1], [1]], device=device), torch.rand(5, 1, device=device)
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    with monkeypatch.context() as never:
        never.setattr(experts_module, "can_pack", lambda device, *sizes: False)
        expected = experts(rows, *routing)
        assert not experts.is_packed
    with monkeypatch.context() as hopper:
        if device == "cpu":
            as_on_hopper(hopper)
        assert torch.equal(experts(rows, *routing), expected)
        assert experts.is_packed
        assert sum(tensor.numel() for tensor in experts.parameters()) == sum(
            tensor.numel() for tensor in before.values()
        )
        assert torch.equal(experts(rows, *routing), expected)
        found = experts.state_dict()
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    experts.to("cpu")  # the CPU only accepts the checkpoint's order
    assert experts(rows.cpu(), *(one.cpu() for one in routing)).isfinite().all()
    assert not experts.is_packed
    assert torch.equal(experts.down_proj_scales, before["down_proj_scales"].cpu())


def test_sizes_that_no_kernel_takes_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "can_pack", engines.takes_packed)
    experts = mxfp4_experts("cpu", intermediate=96)
    experts.pack()
    assert not experts.is_packed
