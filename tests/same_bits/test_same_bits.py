"""The end-to-end guarantee: log-probabilities of sampled tokens have the same bits in generation and in training.

Not only the sampled tokens' values are compared but those of the whole vocabulary at every position. Each test prints their number (-rP).
"""

import copy
import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashmoe
from flashmoe_tools.operations.decoder.model import CONSISTENT, Decoder, Shape, generate
from tests.forked_python import SAFE_PATH

SMALL = Shape(layers=2, width=64, heads=4, heads_kv=2, head_dim=64, ffn=96, vocabulary=512)
SMALL_EXPERTS = Shape(layers=2, width=64, heads=4, heads_kv=2, head_dim=64, ffn=96, vocabulary=512, experts=8, top_k=2)
# The layers of Qwen3-0.6B and of Qwen3-30B-A3B; the vocabulary is smaller.
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


def differing(
    model: Decoder,
    batch: int,
    prompt: int,
    count: int,
    chunk: int,
    *,
    graph: bool,
    page_size: int = 16,
    trainer: Decoder | None = None,
) -> int:
    """Compares a generation with one training forward pass on other batches: no value may differ. Returns their number. ``trainer``: the same model on
    another GPU."""
    device = str(model.table.device)
    trainer = trainer or model
    prompts = torch.randint(0, model.shape.vocabulary, (batch, prompt), device=device)
    tokens, sampled = generate(model, prompts, count, chunk, graph=graph, page_size=page_size)
    wrong = 0
    for start in range(0, batch, 13):
        given = tokens[start : start + 13].to(trainer.table.device)
        scored = trainer.score(given)  # records for a backward pass, as in training
        assert scored.requires_grad
        wrong += int((scored.detach()[:, :-1].to(device) != sampled[start : start + 13]).sum())
    what = f"batch {batch}, chunks of {chunk}, pages of {page_size}, graph {graph}"
    assert wrong == 0, f"{wrong} of {sampled.numel()} differ: {what}"
    return sampled.numel()


def enough(values: int) -> None:
    print(f"0 of {values:,} log-probabilities differ")
    assert values >= 10_000_000


@pytest.mark.parametrize("shape", [SMALL, SMALL_EXPERTS], ids=["dense", "experts"])
def test_generation_and_training_agree_on_the_cpu(shape: Shape) -> None:
    model = Decoder(replace(shape, layers=8, vocabulary=8192), "cpu", torch.bfloat16)
    enough(sum(differing(model, batch, 40, 8, chunk, graph=False) for batch, chunk in ((1, 40), (7, 16), (24, 5))))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [QWEN3, QWEN3_EXPERTS], ids=["dense", "experts"])
def test_generation_and_training_agree_on_a_gpu(shape: Shape) -> None:
    """Prompts of 600 tokens read in chunks of 128, in chunks of 512 and at once, steps in CUDA graphs; one batch without a graph."""
    model = Decoder(shape, "cuda", torch.bfloat16)
    pages = itertools.cycle((16, 64, 256))
    cases = [(*case, True) for case in itertools.product((1, 7, 64, 256), (128, 512, 600))]
    cases.append((7, 512, False))
    enough(
        sum(
            differing(model, batch, 600, 12, chunk, graph=graph, page_size=next(pages)) for batch, chunk, graph in cases
        )
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [QWEN3, QWEN3_EXPERTS], ids=["dense", "experts"])
def test_one_gpu_samples_and_another_trains(shape: Shape) -> None:
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
        pytest.skip("needs two GPUs of one kind")
    model = Decoder(shape, "cuda:0", torch.bfloat16)
    trainer = copy.deepcopy(model).to("cuda:1")
    enough(differing(model, 7, 600, 12, 128, graph=True, trainer=trainer))


RANK = """
import hashlib, sys, torch
from flashmoe_tools.operations.decoder.model import Decoder, Shape, generate
device, company = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(2)
torch.manual_seed(5)
shape = Shape(layers=2, width=64, heads=64, heads_kv=2, head_dim=64, ffn=96, vocabulary=512, experts=8, top_k=2)
model = Decoder(shape, device, torch.bfloat16)
tokens, sampled = generate(model, torch.randint(0, 512, (4, 20), device=device), 4, 8, graph=device != "cpu")
scored = torch.cat([model.score(part).detach() for part in tokens.split(company)])
assert torch.equal(scored[:, :-1], sampled)
print(hashlib.sha256(scored.cpu().numpy().tobytes()).hexdigest())
"""


def test_every_rank_computes_the_same(device: str, tmp_path: Path) -> None:
    """Attention, linear layers (with 64 heads: sums in segments) and experts, in two processes that score the same sequences at once, one
    as a single batch, the other one by one; on a GPU they share it."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *SAFE_PATH, "-c", RANK, device, company], stdout=subprocess.PIPE, cwd=tmp_path
        )
        for company in ("4", "1")
    ]
    digests = {rank.communicate(timeout=100)[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(digests) == 1


def test_the_importance_ratio_is_one_before_a_step_and_after_it(device: str) -> None:
    """A reinforcement learning loop: sample, score, a policy gradient step; then again with the new weights."""
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
    """A linear layer whose sum over k depends on the number of rows, as a library's may, gives other bits, and the comparison reports it."""

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
