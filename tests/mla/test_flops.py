"""Flop counts of latent attention, as torch counts them: 576 columns of q k^T and 512 of P v for each key that memory holds."""

import torch
from torch.utils.flop_counter import FlopCounterMode

import flashmoe
from flashmoe import _extension

B, T, H, PAGE, PAGES = 2, 3, 4, 16, 5


def counted(q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor | None, **options: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        flashmoe.mla_decode(q, cache, cache_seqlens=lengths, scale=0.1, **options)
    return int(counter.get_total_flops())


def test_operations_count_memory_or_named_keys() -> None:
    _extension.load()  # a counter created before the library is loaded knows none of its operators
    q, lengths = torch.randn(B, T, H, 576), torch.tensor([9, 12], dtype=torch.int32)
    each = 2 * B * T * H * (576 + 512)
    assert counted(q, torch.randn(B, 20, 576), lengths) == 20 * each
    pages = torch.arange(2 * PAGES, dtype=torch.int32).view(B, PAGES)
    cache = torch.randn(2 * PAGES, PAGE, 576)
    assert counted(q, cache, lengths, block_table=pages) == PAGE * PAGES * each
    indices = torch.zeros(B, T, 8, dtype=torch.int32)
    assert counted(q, cache, None, indices=indices) == 8 * each
