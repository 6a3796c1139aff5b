"""A small language model trains: with our attention as with torch's, and the same bits when it trains again."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashmoe
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.train_step.problem import TrainStepProblem
from flashmoe_tools.operations.train_step.reference import Attention, Decoder

STEPS = {"cpu": 80, "cuda": 400}
LAST = 20  # steps whose mean loss is compared
MODELS = {
    "cpu": TrainStepProblem("f32", 2, width=64, heads=4, heads_kv=2, ffn=128, vocabulary=128, batch=8, seq=64),
    "cuda": TrainStepProblem("bf16", 4, width=256, heads=4, heads_kv=2, ffn=512, vocabulary=128, batch=16, seq=256),
}


@pytest.fixture
def deterministic_torch() -> Iterator[None]:
    """The other operations of the model, the embedding's gradient among them, are not so by default on a GPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuBLAS wants an environment variable, and warns
    yield
    torch.use_deterministic_algorithms(False)


def _text() -> Tensor:
    """The Python language reference, as characters."""
    return torch.frombuffer(bytearray("\n".join(topics.values()), "ascii", "replace"), dtype=torch.uint8).long()


def _train(attention: Attention, seed: int, device: str) -> Tensor:
    """The loss of every step."""
    problem = MODELS[device]
    torch.manual_seed(seed)
    model = Decoder(problem)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.5 * weight.shape[-1] ** -0.5)
    text = _text()
    starts = torch.randint(len(text) - problem.seq - 1, (STEPS[device], problem.batch, 1))
    batches = text[starts + torch.arange(problem.seq + 1)].to(device)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for tokens in batches:
        with torch.autocast(device, TORCH_DTYPES[problem.dtype], enabled=problem.dtype != "f32"):
            loss = model(tokens, attention)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).float().cpu()


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_a_character_model_learns_as_it_does_with_torch(device: str, deterministic_torch: None) -> None:
    seeds = range(3)
    theirs = torch.stack([_train(scaled_dot_product_attention, seed, device)[-LAST:].mean() for seed in seeds])
    ours = [_train(flashmoe.scaled_dot_product_attention, seed, device) for seed in seeds]
    assert all(curve[-LAST:].mean() < 0.75 * curve[0] for curve in ours)  # it learns at all
    finals = torch.stack([curve[-LAST:].mean() for curve in ours])
    spread = theirs.max() - theirs.min()
    assert bool(((finals - theirs).abs() <= spread).all()), (finals, theirs)
    assert torch.equal(_train(flashmoe.scaled_dot_product_attention, 0, device), ours[0])
