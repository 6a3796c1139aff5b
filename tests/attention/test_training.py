"""A small language model trains with flashmoe's attention as it does with torch's."""

from functools import partial

import pytest
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashmoe
from flashmoe_tools.operations.train_step.problem import TrainStepProblem
from flashmoe_tools.operations.train_step.reference import Attention, Decoder
from tests.training import assert_learns_alike, train

STEPS = {"cpu": 40, "cuda": 400}
MODELS = {
    "cpu": TrainStepProblem("f32", 2, width=64, heads=4, heads_kv=2, ffn=128, vocabulary=128, batch=8, seq=64),
    "cuda": TrainStepProblem("bf16", 4, width=256, heads=4, heads_kv=2, ffn=512, vocabulary=128, batch=16, seq=256),
}


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_a_character_model_learns_as_it_does_with_torch(device: str) -> None:
    problem = MODELS[device]

    def with_attention(attention: Attention, seed: int) -> Tensor:
        return train(lambda: Decoder(problem), problem, STEPS[device], seed, device, attention)

    assert_learns_alike(
        partial(with_attention, scaled_dot_product_attention),
        partial(with_attention, flashmoe.scaled_dot_product_attention),
    )
