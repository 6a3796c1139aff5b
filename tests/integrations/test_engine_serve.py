"""The comparison of two engines that serve the same model; running the engines needs vLLM (flashmoe_build/engines/serve.py)."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashmoe_build.engines import serve, speed


def test_tokens_count_up_to_the_first_other_one() -> None:
    theirs = [[(1, -0.5), (2, -1.0), (3, -0.1)], [(4, -2.0)]]
    ours = [[(1, -0.4), (9, -3.0), (3, -0.1)], [(4, -2.05)]]
    equal, total, largest = serve.compare(theirs, ours)
    assert (equal, total) == (2, 4)
    assert largest == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("model", "dtype", "token", "value", "calls", "verdict"),
    [
        ("dense", "float32", 5, -1.0, (3, 0), 0),
        ("dense", "float32", 5, -1.1, (3, 0), 1),  # another probability
        ("dense", "float32", 6, -1.0, (3, 0), 1),  # another token
        ("dense", "bfloat16", 6, -1.0, (3, 0), 0),  # may be a tie
        ("dense", "float32", 5, -1.0, (0, 0), 1),  # flashmoe did not run
        ("moe", "float32", 5, -1.0, (3, 0), 1),
        ("moe", "float32", 5, -1.0, (3, 3), 0),
    ],
)
def test_a_run_passes_where_flashmoe_ran_and_gave_the_same(
    model: str,
    dtype: str,
    token: int,
    value: float,
    calls: tuple[int, int],
    verdict: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(command: list[str], **options: Any) -> None:
        is_ours = command[-2] == "CUSTOM"
        assert options["env"]["FLASHMOE_VLLM_EXPERTS"] == ("1" if is_ours else "0")
        found = [[(token, value) if is_ours else (5, -1.0)]]
        counts = dict(zip(("attention", "experts"), calls, strict=True))
        Path(command[-1]).write_text(json.dumps({"found": found, "calls": counts}))

    monkeypatch.setattr(serve, "save_model", lambda kind, folder: None)
    monkeypatch.setattr(serve.subprocess, "run", run)
    assert serve.main(["--model", model, "--dtype", dtype]) == verdict


def test_a_checkpoint_is_rewritten_with_codes_and_scales(tmp_path: Path) -> None:
    expert = torch.randn(256, 128)
    weights = {"model.layers.0.mlp.experts.0.up_proj.weight": expert, "lm_head.weight": torch.ones(4, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"hidden_size": 128}')
    serve.quantise(tmp_path, *serve.QUANTISED["fp8"])
    found = load_file(tmp_path / "model.safetensors")
    scale = found["model.layers.0.mlp.experts.0.up_proj.weight_scale_inv"]
    codes = found["model.layers.0.mlp.experts.0.up_proj.weight"]
    assert (codes.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, (2, 1))
    assert (codes.float() * scale.repeat_interleave(128, 0) - expert).abs().max() < 0.07 * expert.abs().max()
    assert torch.equal(found["lm_head.weight"], weights["lm_head.weight"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["hidden_size"], config["quantization_config"]["weight_block_size"]) == (128, [128, 128])


def test_mxfp4_blocks_lie_along_the_inner_size() -> None:
    made = serve.mxfp4_codes("mlp.experts.gate_up_proj", torch.zeros(2, 64, 96))  # [E, K, N]
    assert {name: tuple(one.shape) for name, one in made.items()} == {
        "mlp.experts.gate_up_proj_blocks": (2, 96, 2, 16),
        "mlp.experts.gate_up_proj_scales": (2, 96, 2),
    }
    bias = torch.zeros(2, 96)
    assert serve.mxfp4_codes("mlp.experts.gate_up_proj_bias", bias) == {"mlp.experts.gate_up_proj_bias": bias}


class Engine:
    """Generates the requested number of tokens."""

    def __init__(self) -> None:
        self.prompts = 0

    def generate(self, prompts: list[Any], how: list[Any], use_tqdm: bool) -> list[Any]:
        self.prompts += len(prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * one.max_tokens)]) for one in how]


def test_every_workload_has_a_rate_and_the_table_their_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))  # type: ignore[arg-type]
    engine = Engine()
    rates = dict(speed.measure(engine, 0.01))
    assert list(rates) == list(speed.workloads(0.01))
    assert engine.prompts == 16 + sum(times * len(requests) for times, requests in speed.workloads(0.01).values())
    assert min(rates.values()) > 0
    runs = [{"burst": 100.0}, {"burst": 300.0}, {"burst": 200.0}]
    assert (
        speed.table({"own": runs, "flashmoe": [{"burst": 250.0}]}).splitlines()[-1] == "| burst | 200 | 250 | 1.250 |"
    )
