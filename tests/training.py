"""A small language model that trains on the Python language reference: compared with torch operators, with the same bits in a second run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pydoc_data.topics import topics

import torch
from torch import Tensor

from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.train_step.problem import TrainStepProblem
from flashmoe_tools.operations.train_step.reference import Attention, Decoder

LAST = 20  # steps whose mean loss is compared


@contextmanager
def deterministic_torch() -> Iterator[None]:
    """The model's other operations, such as the embedding's gradient, are not deterministic by default on a GPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuBLAS requires an environment variable, and warns
    yield
    torch.use_deterministic_algorithms(False)


def train(
    make: Callable[[], Decoder],
    problem: TrainStepProblem,
    steps: int,
    seed: int,
    device: str,
    attention: Attention,
    further: Callable[[Decoder], Tensor | float] = lambda model: 0.0,
) -> Tensor:
    """The language model's loss at every step; the optimiser minimises it plus ``further``."""
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.5 * weight.shape[-1] ** -0.5)
    text = torch.frombuffer(bytearray("\n".join(topics.values()), "ascii", "replace"), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - problem.seq - 1, (steps, problem.batch, 1))
    batches = text[starts + torch.arange(problem.seq + 1)].to(device)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for tokens in batches:
        with torch.autocast(device, TORCH_DTYPES[problem.dtype], enabled=problem.dtype != "f32"):
            loss = model(tokens, attention)
        optimizer.zero_grad()
        (loss + further(model)).backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).float().cpu()


def assert_learns_alike(theirs: Callable[[int], Tensor], ours: Callable[[int], Tensor]) -> None:
    """Compares the losses of a seed: ours fall, end where theirs do, and are the same in a second run."""
    with deterministic_torch():
        expected = torch.stack([theirs(seed)[-LAST:].mean() for seed in range(3)])
        curves = [ours(seed) for seed in range(3)]
        again = ours(0)
    assert all(curve[-LAST:].mean() < 0.75 * curve[0] for curve in curves)  # the model learns
    finals = torch.stack([curve[-LAST:].mean() for curve in curves])
    spread = expected.max() - expected.min()
    assert bool(((finals - expected).abs() <= spread).all()), (finals, expected)
    assert torch.equal(again, curves[0])
