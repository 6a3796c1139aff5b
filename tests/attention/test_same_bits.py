"""consistent=True: a row has the same bits in every call: complete or in chunks, alone or in a batch, dense, ragged or paged."""

import itertools
import random
from typing import Any

import pytest
import torch

import flashmoe
from flashmoe.errors import ArgumentError, ArgumentTypeError

from .reference import DTYPES
from .varlen_reference import to_pages

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (70, -1)},
    "softcap": {"causal": True, "softcap": 20.0},
    "sinks": {"causal": True},
    "alibi": {"causal": True},
    "alibi, full": {},
    "alibi, window, softcap": {"causal": True, "window": (70, -1), "softcap": 20.0},
}
HEADS, HEADS_KV = 4, 2
Result = tuple[torch.Tensor, torch.Tensor]


def _ints(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _rows(result: Result, begin: int, end: int) -> Result:
    """Rows ``begin`` to ``end`` of results [B, H, S, D] and [B, H, S]."""
    return result[0][:, :, begin:end], result[1][:, :, begin:end]


def _assert_same(found: Result, wanted: Result, what: str) -> None:
    for name, one, other in zip(("out", "lse"), found, wanted, strict=True):
        different = int((one != other).sum())
        assert different == 0, f"{what}: {different} of {one.numel()} values of {name} differ"


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (256, 256), (192, 128)])
def test_a_row_has_the_same_bits_in_every_call(head_dim: int, head_dim_v: int, name: str, device: str) -> None:
    """Scores so large that the softmax references change, with random lengths, chunks, page sizes and neighbours for each case."""
    draw = random.Random(f"{head_dim} {name}")
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    lengths = [draw.randrange(3, 90), draw.randrange(250, 450), draw.randrange(1, 300)]
    for dtype in DTYPES[device]:
        sequences = [
            tuple(
                (torch.randn(1, heads, length, columns, generator=generator) * factor).to(dtype).to(device)
                for heads, columns, factor in (
                    (HEADS, head_dim, 3.0),
                    (HEADS_KV, head_dim, 1.0),
                    (HEADS_KV, head_dim_v, 1.0),
                )
            )
            for length in lengths
        ]
        sinks = torch.linspace(-1, 4, HEADS, device=device) if name == "sinks" else None
        slopes = torch.tensor([2.0, -0.3, 0.25, 0.01], device=device) if name.startswith("alibi") else None
        options = {**OPTIONS[name], "sinks": sinks, "alibi_slopes": slopes, "consistent": True, "return_lse": True}
        q, k, v = sequences[1]
        length = lengths[1]
        whole = flashmoe.attention(q, k, v, **options)
        for rows in (1, 2, 16, 64):
            tail = flashmoe.attention(q[:, :, length - rows :], k, v, **options)
            _assert_same(tail, _rows(whole, length - rows, length), f"the last {rows} rows")
        size = draw.randrange(17, 130)
        for begin in range(0, length if options.get("causal") else 0, size):
            end = min(length, begin + size)
            chunk = flashmoe.attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], **options)
            _assert_same(chunk, _rows(whole, begin, end), f"rows {begin} to {end}")
        _assert_batches(sequences, whole, draw.choice((8, 16, 48)), options, device)


def _assert_batches(
    sequences: list[tuple[torch.Tensor, ...]], whole: Result, page_size: int, options: dict[str, Any], device: str
) -> None:
    """The second sequence between two others: ragged, paged, and its last rows from a cache."""
    lengths = [sequence[0].shape[2] for sequence in sequences]
    packed = [torch.cat([tensor[0].transpose(0, 1) for tensor in kind]) for kind in zip(*sequences, strict=True)]
    cu, used = _ints(device, 0, *itertools.accumulate(lengths)), _ints(device, *lengths)
    longest = max(lengths)
    own = slice(lengths[0], lengths[0] + lengths[1])

    def mine(result: Result) -> Result:
        return result[0][own].transpose(0, 1)[None], result[1][:, own][None]

    ragged = flashmoe.attention_varlen(*packed, cu, cu, longest, longest, **options)
    _assert_same(mine(ragged), whole, "ragged")
    padded = [
        torch.cat([torch.nn.functional.pad(t, (0, 0, 0, longest - t.shape[2])) for t in kind])
        for kind in list(zip(*sequences, strict=True))[1:]
    ]
    pages = to_pages(padded[0], padded[1], tuple(lengths), page_size)
    given = {"block_table": pages.block_table, **options}
    paged = flashmoe.attention_varlen(packed[0], pages.k, pages.v, cu, None, longest, longest, seqused_k=used, **given)
    _assert_same(mine(paged), whole, f"pages of {page_size}")
    rows = min(3, *lengths)
    for count in {1, rows}:
        tail = torch.cat([sequence[0][:, :, -count:] for sequence in sequences])
        cached = flashmoe.attention_with_kvcache(tail, pages.k, pages.v, cache_seqlens=used, **given)
        expected = _rows(whole, lengths[1] - count, lengths[1])
        _assert_same((cached[0][1:2], cached[1][1:2]), expected, f"{count} rows from a cache")


def test_the_variable_is_the_same_for_every_call(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including training: the rows of a sequence, and one row in its own call; gradients exist."""
    dtype = DTYPES[device][-1]
    q, k, v = (torch.randn(1, 2, 300, 64, device=device).to(dtype).requires_grad_() for _ in range(3))
    wanted = flashmoe.attention(q * 3, k, v, causal=True, consistent=True)
    monkeypatch.setenv("FLASHMOE_CONSISTENT", "1")
    assert torch.equal(flashmoe.attention(q * 3, k, v, causal=True), wanted)
    last = flashmoe.attention(q[:, :, -1:] * 3, k, v, causal=True)
    assert torch.equal(last, wanted[:, :, -1:])
    for gradient in torch.autograd.grad(wanted, (q, k, v), torch.ones_like(wanted)):
        assert bool(gradient.isfinite().all())
    monkeypatch.setenv("FLASHMOE_CONSISTENT", "yes")
    with pytest.raises(ArgumentError, match="FLASHMOE_CONSISTENT is yes; supported: 0, 1"):
        flashmoe.attention(q, k, v)


def test_what_consistent_takes(device: str) -> None:
    q = torch.zeros(1, 2, 5, 64, device=device, dtype=DTYPES[device][-1])
    for wrong in (1, None, "yes"):
        with pytest.raises(ArgumentTypeError, match="consistent"):
            flashmoe.attention(q, q, q, consistent=wrong)  # type: ignore[arg-type]
    lengths = _ints(device, 5)
    with pytest.raises(ArgumentError, match=r"0 to 32 \(remove it if consistent is True\); found 4$"):
        flashmoe.attention_with_kvcache(q, q, q, cache_seqlens=lengths, num_splits=4, consistent=True)
    with pytest.raises(
        ArgumentError, match=r"num_splits must be from 0 to 32 \(0 lets the kernels choose\); found -1$"
    ):
        flashmoe.attention_with_kvcache(q, q, q, cache_seqlens=lengths, num_splits=-1)
