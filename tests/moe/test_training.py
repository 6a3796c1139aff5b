"""A small language model with mixtures of experts trains: as with torch's operators, and the same bits when it trains again."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

import flashmoe
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.train_step.problem import TrainStepProblem
from flashmoe_tools.operations.train_step.reference import Decoder, Layer
from tests.moe.composed import ComposedMoE

STEPS = {"cpu": 100, "cuda": 250}
LAST = 20  # steps whose mean loss is compared
MODELS = {  # ffn: of one expert
    "cpu": TrainStepProblem("f32", 2, width=48, heads=4, heads_kv=2, ffn=48, vocabulary=128, batch=8, seq=48),
    "cuda": TrainStepProblem("bf16", 2, width=256, heads=4, heads_kv=2, ffn=256, vocabulary=128, batch=16, seq=256),
}
EXPERTS = {"cpu": 4, "cuda": 8}
TOP_K = 2
BALANCE = 0.01  # weight of the load-balancing loss


@pytest.fixture
def deterministic_torch() -> Iterator[None]:
    """The other operations of the model, the embedding's gradient among them, are not so by default on a GPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuBLAS wants an environment variable, and warns
    yield
    torch.use_deterministic_algorithms(False)


class SparseLayer(Layer):
    """A layer whose feed-forward part is a mixture of experts, and one that every token takes."""

    def __init__(self, problem: TrainStepProblem, mixture: type[flashmoe.MoE], experts: int) -> None:
        super().__init__(problem)
        del self.gate_up, self.down
        self.mixture = mixture(problem.width, problem.ffn, experts, TOP_K, shared_intermediate=problem.ffn)
        self.balance = torch.zeros(())

    def feed_forward(self, x: Tensor) -> Tensor:
        out, self.balance = self.mixture(rms_norm(x, x.shape[-1:]), return_loss=True)
        return out


def sparse_decoder(mixture: type[flashmoe.MoE], device: str) -> Decoder:
    problem = MODELS[device]
    model = Decoder(problem)
    model.layers = nn.ModuleList(SparseLayer(problem, mixture, EXPERTS[device]) for _ in range(problem.layers))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.5 * weight.shape[-1] ** -0.5)
    return model.to(device)


def train(mixture: type[flashmoe.MoE], seed: int, device: str) -> Tensor:
    """The language model's loss at every step."""
    problem = MODELS[device]
    torch.manual_seed(seed)
    model = sparse_decoder(mixture, device)
    text = torch.frombuffer(bytearray("\n".join(topics.values()), "ascii", "replace"), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - problem.seq - 1, (STEPS[device], problem.batch, 1))
    batches = text[starts + torch.arange(problem.seq + 1)].to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for tokens in batches:
        with torch.autocast(device, TORCH_DTYPES[problem.dtype], enabled=problem.dtype != "f32"):
            loss = model(tokens, flashmoe.scaled_dot_product_attention)
        balance = sum(layer.balance for layer in model.layers)
        optimizer.zero_grad()
        (loss + BALANCE * balance).backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).float().cpu()


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_a_character_model_learns_as_it_does_with_torch(device: str, deterministic_torch: None) -> None:
    seeds = range(3)
    theirs = torch.stack([train(ComposedMoE, seed, device)[-LAST:].mean() for seed in seeds])
    ours = [train(flashmoe.MoE, seed, device) for seed in seeds]
    assert all(curve[-LAST:].mean() < 0.75 * curve[0] for curve in ours)  # it learns at all
    finals = torch.stack([curve[-LAST:].mean() for curve in ours])
    spread = theirs.max() - theirs.min()
    assert bool(((finals - theirs).abs() <= spread).all()), (finals, theirs)
    assert torch.equal(train(flashmoe.MoE, 0, device), ours[0])
