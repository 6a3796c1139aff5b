"""The promise above the kernels: log-probabilities of sampled tokens have the same bits in generation and in training.

What is compared is not the sampled tokens' alone but those of the whole vocabulary at every position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import flashmoe
from flashmoe_tools.operations.decoder.model import CONSISTENT, Decoder, Shape, generate

SMALL = Shape(layers=2, width=64, heads=4, heads_kv=2, head_dim=64, ffn=96, vocabulary=512)
SMALL_EXPERTS = Shape(layers=2, width=64, heads=4, heads_kv=2, head_dim=64, ffn=96, vocabulary=512, experts=8, top_k=2)
# Qwen3-0.6B's layers, and those of Qwen3-30B-A3B; the vocabulary is smaller.
QWEN3 = Shape(layers=8, width=1024, heads=16, heads_kv=8, head_dim=128, ffn=3072, vocabulary=8192)
QWEN3_EXPERTS = Shape(
    layers=8, width=2048, heads=32, heads_kv=4, head_dim=128, ffn=768, vocabulary=8192, experts=128, top_k=8
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(3)
    yield
    torch.set_num_threads(before)


def differing(model: Decoder, batch: int, prompt: int, count: int, chunk: int, *, graph: bool) -> tuple[int, int]:
    """(values that differ, values) of a generation and one training forward pass, whose sequences go in other company."""
    device = str(model.table.device)
    prompts = torch.randint(0, model.shape.vocabulary, (batch, prompt), device=device)
    tokens, sampled = generate(model, prompts, count, chunk, graph=graph)
    wrong = 0
    for start in range(0, batch, 13):
        scored = model.score(tokens[start : start + 13])  # records for a backward pass, as training does
        assert scored.requires_grad
        wrong += int((scored.detach()[:, :-1] != sampled[start : start + 13]).sum())
    return wrong, sampled.numel()


@pytest.mark.parametrize("shape", [SMALL, SMALL_EXPERTS], ids=["dense", "experts"])
def test_generation_and_training_agree_on_the_cpu(shape: Shape) -> None:
    model = Decoder(replace(shape, layers=8, vocabulary=8192), "cpu", torch.bfloat16)
    values = 0
    for batch, chunk in ((1, 40), (7, 16), (24, 5)):
        wrong, found = differing(model, batch, 40, 8, chunk, graph=False)
        assert wrong == 0, f"{wrong} of {found} differ: batch {batch}, chunks of {chunk}"
        values += found
    assert values >= 10_000_000


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [QWEN3, QWEN3_EXPERTS], ids=["dense", "experts"])
def test_generation_and_training_agree_on_a_gpu(shape: Shape) -> None:
    model = Decoder(shape, "cuda", torch.bfloat16)
    values = 0
    for batch, chunk, graph in ((1, 128, True), (7, 512, True), (64, 600, False), (64, 128, True), (256, 512, True)):
        wrong, found = differing(model, batch, 600, 12, chunk, graph=graph)
        assert wrong == 0, f"{wrong} of {found} differ: batch {batch}, chunks of {chunk}, graph {graph}"
        values += found
    assert values >= 10_000_000


def test_the_importance_ratio_is_one_before_a_step_and_after_it(device: str) -> None:
    """A loop of reinforcement learning: sample, score, a step of policy gradient; and again with the new weights."""
    model = Decoder(SMALL, device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    prompts = torch.randint(0, SMALL.vocabulary, (5, 20), device=device)
    before = model.head.detach().clone()
    for _ in range(2):
        tokens, sampled = generate(model, prompts, 9, 8, graph=False)
        chosen = tokens[:, 1:, None]
        old = sampled.gather(-1, chosen)[:, 19:]
        new = model.score(tokens)[:, :-1].gather(-1, chosen)[:, 19:]
        ratio = torch.exp(new - old)
        assert bool((ratio == 1).all())
        rewards = torch.randn(5, 1, 1, device=device)
        (-(ratio * rewards).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model.head, before)


def test_another_order_of_one_sum_is_noticed() -> None:
    """A linear layer whose sum over k follows the number of rows, as a library's may, differs, and the comparison says so."""

    def divided(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if len(x) > 8:
            return flashmoe.linear(x, w)
        half = w.shape[1] // 16 * 8
        return flashmoe.linear(x[:, :half], w[:, :half]) + flashmoe.linear(x[:, half:], w[:, half:])

    model = Decoder(SMALL, "cpu", torch.bfloat16)
    tokens, sampled = generate(model, torch.randint(0, 512, (3, 20)), 4, 20, graph=False)
    assert torch.equal(model.score(tokens)[:, :-1], sampled)
    stack = replace(CONSISTENT, linear=divided)
    tokens, sampled = generate(model, tokens[:, :20], 4, 20, graph=False, stack=stack)
    assert not torch.equal(model.score(tokens, stack)[:, :-1], sampled)
