"""Whether two tensors share memory, by the addresses of their elements: operators that write into a caller's tensor reject it."""

import random

import pytest
import torch
from torch import Tensor

from flashmoe import _extension

DRAWS = 400
DIM = 4


def elements(tensor: Tensor) -> set[int]:
    every = torch.arange(tensor.untyped_storage().nbytes() // 4)
    return set(every.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist())


def drawn(source: random.Random, memory: Tensor, sizes: tuple[int, ...], like: Tensor | None) -> Tensor:
    """A view of the memory whose rows do not overlap; with the strides of another view, or with random ones."""
    order, step = source.sample(range(3), 3), DIM + source.choice((0, 0, 1, DIM))
    strides = [0, 0, 0, 1]
    for axis in order:
        strides[axis] = step
        step *= sizes[axis] + source.choice((0, 0, 1))
    strides = list(like.stride()) if like is not None else strides
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return memory.as_strided(sizes, strides, source.randrange(memory.numel() - last))


@pytest.mark.parametrize("seed", range(4))
def test_new_rows_beside_a_cache(seed: int) -> None:
    """Exact for equal strides; for others the ranges from first to last element are compared."""
    _extension.load()
    source, found = random.Random(seed), {True: 0, False: 0}
    for _ in range(DRAWS):
        batch, heads, rows = (source.randint(1, 2) for _ in range(3))
        memory = torch.zeros(source.choice((250, 500)))
        cache = drawn(source, memory, (batch, heads, 3, DIM), None)
        new = drawn(source, memory, (batch, heads, rows, DIM), source.choice((cache, None)))
        counts = [axis for axis in range(4) if max(cache.shape[axis], new.shape[axis]) > 1]
        ours, theirs = elements(cache), elements(new)
        needed = bool(ours & theirs)
        if any(cache.stride(axis) != new.stride(axis) for axis in counts):
            needed = max(min(ours), min(theirs)) <= min(max(ours), max(theirs))
        values = torch.zeros(batch, heads, 3, DIM), torch.ones(batch, heads, rows, DIM)
        given = (cache, values[0], new, values[1], torch.zeros(batch, dtype=torch.int32), None)
        told = ""
        try:
            torch.ops.flashmoe.attention_append_(*given)
        except RuntimeError as error:
            told = str(error)
        refused = "attention.shared_memory|name=k_new|cache=k_cache|" in told
        assert refused or not told
        assert refused is needed, (
            cache.shape,
            cache.stride(),
            cache.storage_offset(),
            new.stride(),
            new.storage_offset(),
        )
        found[needed] += 1
    assert min(found.values()) > DRAWS // 10
