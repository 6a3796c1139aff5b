"""A small language model with mixtures of experts trains like one with torch operators."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

import flashmoe
from flashmoe_tools.operations.train_step.problem import TrainStepProblem
from flashmoe_tools.operations.train_step.reference import Decoder, Layer
from tests.moe.composed import ComposedMoE
from tests.training import assert_learns_alike, train

STEPS = {"cpu": 40, "cuda": 250}
MODELS = {  # ffn: per expert
    "cpu": TrainStepProblem("f32", 2, width=48, heads=4, heads_kv=2, ffn=48, vocabulary=128, batch=8, seq=48),
    "cuda": TrainStepProblem("bf16", 2, width=256, heads=4, heads_kv=2, ffn=256, vocabulary=128, batch=16, seq=256),
}
EXPERTS = {"cpu": 4, "cuda": 8}
TOP_K = 2
BALANCE = 0.01  # weight of the load-balancing loss


class SparseLayer(Layer):
    """A layer whose feed-forward part is a mixture of experts plus a shared one for every token."""

    def __init__(self, problem: TrainStepProblem, mixture: type[flashmoe.MoE], experts: int) -> None:
        super().__init__(problem)
        del self.gate_up, self.down
        self.mixture = mixture(problem.width, problem.ffn, experts, TOP_K, shared_intermediate=problem.ffn)
        self.balance = torch.zeros(())

    def feed_forward(self, x: Tensor) -> Tensor:
        out, self.balance = self.mixture(rms_norm(x, x.shape[-1:]), return_loss=True)
        return out


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_a_character_model_learns_as_it_does_with_torch(device: str) -> None:
    problem = MODELS[device]

    def with_mixture(mixture: type[flashmoe.MoE], seed: int) -> Tensor:
        def make() -> Decoder:
            model = Decoder(problem)
            model.layers = nn.ModuleList(SparseLayer(problem, mixture, EXPERTS[device]) for _ in range(problem.layers))
            return model

        def balance(model: Decoder) -> Tensor:
            return BALANCE * torch.stack([layer.balance for layer in model.layers]).sum()

        attention = flashmoe.scaled_dot_product_attention
        return train(make, problem, STEPS[device], seed, device, attention, balance)

    assert_learns_alike(partial(with_mixture, ComposedMoE), partial(with_mixture, flashmoe.MoE))
