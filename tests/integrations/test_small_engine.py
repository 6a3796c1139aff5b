"""An engine that imports flash_attn runs on flashmoe: with prefix cache, preemption and ragged batches it gives the logits of complete sequences."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flashmoe.compat import install_as_flash_attn, uninstall_flash_attn
from tests.integrations.small_engine import BLOCK, WORDS, Decoder, Engine, Request


@pytest.fixture
def flash_attn() -> Iterator[None]:
    install_as_flash_attn()
    yield
    uninstall_flash_attn()


def whole(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one complete sequence in float64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.mT / q.shape[-1] ** 0.5
    hidden = torch.ones_like(scores[0]).triu(1).bool()
    return (torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v).transpose(0, 1).to(q.dtype)


def test_serving_gives_the_logits_of_whole_sequences(flash_attn: None, device: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = Decoder().to(device, dtype).eval()
    shared = torch.randint(0, WORDS, (2 * BLOCK + 5,)).tolist()
    prompts = [shared + torch.randint(0, WORDS, (n,)).tolist() for n in (1, 9, 20, 3)]
    prompts += [torch.randint(0, WORDS, (n,)).tolist() for n in (1, BLOCK, 2 * BLOCK)] + [shared[: 2 * BLOCK]]
    requests = [Request(prompt, wanted) for prompt, wanted in zip(prompts, (20, 3, 33, 9, 40, 17, 5, 12), strict=True)]
    engine = Engine(model, blocks=11, device=device, dtype=dtype)
    engine.run(requests)
    assert engine.blocks.hits > 0
    assert engine.preempted > 0
    assert sorted(engine.blocks.free) == list(range(11))
    assert not any(engine.blocks.users)
    limit = 1e-4 if dtype == torch.float32 else 0.15
    for request in requests:
        assert len(request.tokens) - request.prompt == request.wanted == len(request.logits)
        tokens = torch.tensor(request.tokens[:-1], device=device)
        wanted = model(tokens, torch.arange(tokens.numel(), device=device), whole)[request.prompt - 1 :]
        assert torch.allclose(torch.stack(request.logits).float(), wanted.float(), atol=limit, rtol=limit)
