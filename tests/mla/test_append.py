"""flashmoe.mla_append against the format's description: every number, rows by lengths, pages and slots, rejected arguments."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe.errors import (
    ArgumentError,
    ArgumentTypeError,
    DifferentiationError,
    DtypeError,
    FlashmoeError,
    ShapeError,
)
from tests.mla.coded import KEY_BYTES, quantized

F16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
either = pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])


def make(batch: int, tokens: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random latents whose magnitudes differ from one scale to the next."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-16, 5, (batch, tokens, 9, 1), generator=generator).float()
    return (torch.randn(batch, tokens, 9, 64, generator=generator) * 2.0**exponents).flatten(2).to(dtype)


def row(cache: Tensor, page: int, index: int) -> bytes:
    return bytes(cache.view(torch.uint8)[page, index].cpu().tolist())


@either
@pytest.mark.parametrize("view", [torch.uint8, E4M3], ids=["uint8", "e4m3"])
def test_pages_behind_the_lengths(dtype: torch.dtype, view: torch.dtype, device: str) -> None:
    latents, held = make(3, 5, dtype), (0, 14, 30)
    table = torch.tensor([[3, 0, 6], [5, 1, 6], [4, 7, 2]], dtype=torch.int32)
    cache = torch.full((8, 16, KEY_BYTES), 0xA5, dtype=torch.uint8, device=device)
    flashmoe.mla_append(
        latents.to(device),
        cache.view(view),
        cache_seqlens=torch.tensor(held, dtype=torch.int32, device=device),
        block_table=table.to(device),
    )
    expected = torch.full((8, 16, KEY_BYTES), 0xA5, dtype=torch.uint8)
    for sequence, first in enumerate(held):
        for token in range(5):
            page = int(table[sequence, (first + token) // 16])
            own = bytearray(quantized(latents[sequence, token]))
            expected[page, (first + token) % 16] = torch.frombuffer(own, dtype=torch.uint8)
    assert torch.equal(cache.cpu(), expected)


@either
def test_slots_and_a_dense_cache(dtype: torch.dtype, device: str) -> None:
    latents = make(2, 3, dtype)
    slots = torch.tensor([[7, -1, 0], [19, 4, 13]])
    by_slots = torch.zeros(4, 5, KEY_BYTES, dtype=torch.uint8, device=device)
    flashmoe.mla_append(latents.to(device), by_slots, slots=slots.to(device))
    dense = torch.zeros(2, 9, 2 * KEY_BYTES, dtype=torch.uint8, device=device)[..., :KEY_BYTES]
    lengths = torch.tensor([6, 0], dtype=torch.int32, device=device)
    flashmoe.mla_append(latents.to(device), dense, cache_seqlens=lengths)
    for sequence, first in enumerate((6, 0)):
        for token in range(3):
            wanted = quantized(latents[sequence, token])
            assert row(dense, sequence, first + token) == wanted
            slot = int(slots[sequence, token])
            if slot >= 0:
                assert row(by_slots, slot // 5, slot % 5) == wanted
    assert int((by_slots != 0).any(-1).sum()) == 5
    assert int((dense != 0).any(-1).sum()) == 6


@either
def test_every_number(dtype: torch.dtype, device: str) -> None:
    """All bit patterns: once with neighbouring ones in a group, so that many scales occur, and once spread, in groups that contain large ones."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    latents = torch.zeros(1, 256, 576, dtype=dtype)
    latents[0, :128, :512] = patterns.view(128, 512)
    latents[0, 128:, :512] = patterns.view(512, 128).T.reshape(128, 512)
    latents[0, :, 512:] = patterns.view(-1, 64)[::4]
    cache = torch.zeros(1, 256, KEY_BYTES, dtype=torch.uint8, device=device)
    flashmoe.mla_append(latents.to(device), cache, cache_seqlens=torch.zeros(1, dtype=torch.int32, device=device))
    for token in range(0, 256, 3):
        assert row(cache, 0, token) == quantized(latents[0, token]), token


@pytest.mark.gpu
def test_tokens_without_a_row_are_dropped() -> None:
    """On a GPU, where the host reads no numbers."""
    latents = make(3, 2, BF16).cuda()
    cache = torch.zeros(3, 16, KEY_BYTES, dtype=torch.uint8, device="cuda")
    flashmoe.mla_append(
        latents, cache, cache_seqlens=torch.tensor([15, -1, 2**31 - 1], dtype=torch.int32, device="cuda")
    )
    assert (cache != 0).any(-1).nonzero().tolist() == [[0, 15], [1, 0]]
    cache.zero_()
    slots = torch.tensor([[48, -1], [47, -5], [2**40, 3]], device="cuda")
    flashmoe.mla_append(latents, cache, slots=slots)
    assert (cache != 0).any(-1).nonzero().tolist() == [[0, 3], [2, 15]]


@pytest.mark.gpu
@either
def test_the_gpu_writes_the_bytes_of_the_cpu(dtype: torch.dtype) -> None:
    latents = make(5, 700, dtype, seed=3)
    slots = torch.randperm(64 * 64)[: 5 * 700].view(5, 700)
    caches = [torch.zeros(64, 64, KEY_BYTES, dtype=torch.uint8, device=device) for device in ("cpu", "cuda")]
    for cache in caches:
        flashmoe.mla_append(latents.to(cache.device), cache, slots=slots.to(cache.device))
    assert torch.equal(caches[0], caches[1].cpu())


LENGTHS = torch.tensor([3, 0], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"latents": [1.0]}, ArgumentTypeError, "found list"),
        ({"latents": torch.zeros(2, 2, 576).half().requires_grad_()}, DifferentiationError, "no gradient"),
        ({"kv_cache": torch.zeros(2, 16, 576).half()}, DtypeError, "must be an FP8 cache"),
        ({"kv_cache": torch.zeros(2, 16, 664, dtype=torch.uint8)[..., :656]}, ShapeError, "multiples of 16 bytes"),
        ({"cache_seqlens": LENGTHS + 12}, ArgumentError, r"cache_seqlens\[0\] is 15, appending 2 tokens"),
        ({"cache_seqlens": LENGTHS - 1}, ArgumentError, r"cache_seqlens\[1\] is -1"),
        ({"block_table": torch.full((2, 1), 7, dtype=torch.int32)}, ArgumentError, r"block_table\[0, 0\] is 7"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], error: type[FlashmoeError], words: str) -> None:
    given: dict[str, Any] = {
        "latents": torch.zeros(2, 2, 576).half(),
        "kv_cache": torch.zeros(2, 16, 656, dtype=torch.uint8),
        "cache_seqlens": LENGTHS,
    }
    with pytest.raises(error, match=words):
        flashmoe.mla_append(**{**given, **change})


@pytest.mark.parametrize(
    ("slots", "error", "words"),
    [
        (torch.tensor([[0, 32], [1, 2]]), ArgumentError, r"slots\[0, 1\] is 32; the cache has rows 0 to 31"),
        (torch.tensor([[0, 1], [-2, 2]]), ArgumentError, r"slots\[1, 0\] is -2"),
    ],
)
def test_a_wrong_slot_is_named(slots: Tensor, error: type[FlashmoeError], words: str) -> None:
    cache = torch.zeros(2, 16, 656, dtype=torch.uint8)
    with pytest.raises(error, match=words):
        flashmoe.mla_append(torch.zeros(2, 2, 576).half(), cache, slots=slots)
    with pytest.raises(ArgumentError, match="block_table is only used with cache_seqlens"):
        flashmoe.mla_append(
            torch.zeros(2, 2, 576).half(), cache, slots=slots.long().view(2, 2), block_table=LENGTHS[:, None]
        )
    assert not cache.any()


def test_it_compiles_whole(device: str) -> None:
    latents, lengths = make(2, 2, BF16).to(device), LENGTHS.to(device)
    caches = [torch.zeros(2, 16, KEY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    flashmoe.mla_append(latents, caches[0], cache_seqlens=lengths)
    compiled = torch.compile(
        lambda cache: flashmoe.mla_append(latents, cache, cache_seqlens=lengths), fullgraph=True, backend="aot_eager"
    )
    compiled(caches[1])
    assert torch.equal(*caches)
    torch.library.opcheck(
        torch.ops.flashmoe.mla_append_.default,
        (latents, caches[0], lengths, None, None),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_what_the_extension_says_is_worded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where C++ checks the arguments and names a rule."""

    def fails(*_: Any) -> None:
        raise RuntimeError("flashmoe:mla.append_table|")

    monkeypatch.setattr(importlib.import_module("flashmoe.mla.append"), "_append", fails)
    cache = torch.zeros(1, 16, 656, dtype=torch.uint8)
    with pytest.raises(FlashmoeError):
        flashmoe.mla_append(torch.zeros(1, 1, 576).bfloat16(), cache, cache_seqlens=torch.zeros(1, dtype=torch.int32))
