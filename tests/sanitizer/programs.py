"""Programs to run under compute-sanitizer: every public operation with inputs that use each form of its kernels.

python tests/sanitizer/programs.py NAME [cuda|cpu]

Results are not compared here; the sanitizer judges. test_sanitizer.py runs each program on the CPU, to check that none stops before its kernels.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashmoe

HEAD_DIMS = (64, 128, 256)
SCORES: tuple[dict[str, Any], ...] = ({}, {"window": (20, 0)}, {"softcap": 30.0})


@dataclass
class Inputs:
    """Random tensors on one device."""

    device: str
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    @property
    def long(self) -> int:
        """A number of keys above the threshold for the fused backward pass; the CPU has no such form."""
        return 4224 if self.device == "cuda" else 130

    def normal(self, *sizes: int, grad: bool = False) -> Tensor:
        made = torch.randn(*sizes, generator=self.generator, device=self.device).to(self.dtype)
        return made.requires_grad_(grad)

    def floats(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self.generator, device=self.device)

    def integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def ends(self, lengths: Sequence[int]) -> Tensor:
        return self.integers([0, *itertools.accumulate(lengths)])

    def tables(self, entries: int, pages: int) -> Tensor:
        """Pages in random order, each used once."""
        order = torch.randperm(entries * pages, generator=self.generator, device=self.device)
        return order.view(entries, pages).to(torch.int32)


def attention(inputs: Inputs) -> None:
    """Dense, forward and backward: full and partial tiles, a single row; the fused form; grouped heads."""
    shapes = [(1, 4, 2, rows, dim) for dim in HEAD_DIMS for rows in (1, 200, 1100 if dim < 256 else 300)]
    shapes += [(1, 2, 2, inputs.long, dim) for dim in (64, 128)]
    for (batch, heads, heads_kv, rows, dim), causal in itertools.product(shapes, (False, True)):
        if rows == inputs.long and not causal:
            continue
        q = inputs.normal(batch, heads, rows, dim, grad=True)
        k, v = (inputs.normal(batch, heads_kv, rows, dim, grad=True) for _ in range(2))
        flashmoe.attention(q, k, v, causal=causal).sum().backward()


def attention_in_8_bits(inputs: Inputs) -> None:
    """q, k and v in e4m3: full and partial tiles, grouped heads, rows that are copied, scales in memory."""
    for dim, (rows, keys) in itertools.product((*HEAD_DIMS, 40), ((64, 64), (131, 300), (1, 200))):
        q = inputs.normal(2, 4, rows, dim).to(torch.float8_e4m3fn)
        k, v = (inputs.normal(2, 2, keys, dim).to(torch.float8_e4m3fn) for _ in range(2))
        scale = inputs.floats(2, 2).abs()
        for causal in (False, True):
            flashmoe.attention(q, k, v, causal=causal, k_scale=scale, v_scale=scale[0], return_lse=True)


def masks(inputs: Inputs) -> None:
    """Additive and bool masks, broadcast or not, forward and backward."""
    for mask in (inputs.normal(1, 1, 200, 200), inputs.normal(2, 4, 200, 200) > 0):
        for dim in (64, 128):
            q, k, v = (inputs.normal(2, 4, 200, dim, grad=True) for _ in range(3))
            flashmoe.attention(q, k, v, attn_mask=mask).sum().backward()


def ragged(inputs: Inputs) -> None:
    """Sequences with zero, one, and many rows, forward and backward."""
    for dim in HEAD_DIMS:
        for lengths in ([1, 0, 65, 300, 129], [33, 1100, inputs.long] if dim < 256 else [33, 500]):
            for options in ({}, {"window": (100, 0)}, {"softcap": 30.0}):
                q = inputs.normal(sum(lengths), 4, dim, grad=True)
                k, v = (inputs.normal(sum(lengths), 2, dim, grad=True) for _ in range(2))
                ends, most = inputs.ends(lengths), max(lengths)
                sinks = inputs.floats(4).requires_grad_()
                out = flashmoe.attention_varlen(q, k, v, ends, ends, most, most, causal=True, sinks=sinks, **options)
                out.sum().backward()


def _caches(inputs: Inputs, pages: int, page: int, dim: int) -> tuple[Tensor, Tensor]:
    return inputs.normal(pages, page, 2, dim), inputs.normal(pages, page, 2, dim)


def _decoding(inputs: Inputs) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
    """(page, head dim, K pages, V pages, block table of 5 sequences with 12 pages each)."""
    for page, dim in itertools.product((16, 64), HEAD_DIMS):
        yield page, dim, *_caches(inputs, 60, page, dim), inputs.tables(5, 12)


def decode(inputs: Inputs) -> None:
    """One query or a few over pages: windows past released pages, softcap, sinks, undivided items; pages that sequences share; no keys."""
    for page, dim, k, v, table in _decoding(inputs):
        used = inputs.integers([1, 0, page, 7 * page + 3, 12 * page])
        prefix = table.clone()
        prefix[:, :7] = prefix[0, :7]
        left = table.clone()
        left[3, : 7 - 2] = -1  # before the window
        sinks = inputs.floats(8)
        for options in (*SCORES, {"num_splits": 1}, {"sinks": sinks}, {"window": (page, 0), "block_table": left}):
            q = inputs.normal(5, 8, 1, dim)
            given = {"cache_seqlens": used, "block_table": prefix, "causal": True, **options}
            flashmoe.attention_with_kvcache(q, k, v, **given)
        flashmoe.attention_with_kvcache(
            inputs.normal(5, 8, 4, dim), k, v, cache_seqlens=used, block_table=table, causal=True, return_lse=True
        )
        dense = inputs.normal(5, 2, 300, dim)
        flashmoe.attention_with_kvcache(
            inputs.normal(5, 8, 1, dim), dense, dense, cache_seqlens=inputs.integers([0, 1, 64, 299, 300])
        )


def append(inputs: Inputs) -> None:
    """New keys up to, across and from the end of a page, and to the end of the last one; on a GPU also past it."""
    for page, dim, k, v, table in _decoding(inputs):
        for new in (1, 3):
            k_new, v_new = inputs.normal(5, 2, new, dim), inputs.normal(5, 2, new, dim)
            held = [page - new, page - 1, 5 * page, 0, 12 * page - new]
            if inputs.device == "cuda":
                held[1] = 12 * page - new + 1  # dropped; the CPU rejects it
            given = {"cache_seqlens": inputs.integers(held), "block_table": table, "causal": True}
            for options in ({}, {"window": (20, 0), "sinks": inputs.floats(8)}):
                flashmoe.attention_with_kvcache(inputs.normal(5, 8, new, dim), k, v, k_new, v_new, **given, **options)
        room = 12
        caches = inputs.normal(5, 2, room, dim), inputs.normal(5, 2, room, dim)
        news = inputs.normal(5, 2, 2, dim), inputs.normal(5, 2, 2, dim)
        held = inputs.integers([0, 1, 7, 9, room - 2])
        flashmoe.attention_with_kvcache(inputs.normal(5, 8, 2, dim), *caches, *news, cache_seqlens=held)


def chunks(inputs: Inputs) -> None:
    """Prefill of chunks over pages: sequences with many rows, and enough short ones with grouped heads that share tiles."""
    for page, dim, k, v, table in _decoding(inputs):
        for options in SCORES:
            rows, used = [30, 1, 70], inputs.integers([5 * page, 17, 12 * page])
            given = {"causal": True, "seqused_k": used, "block_table": table[:3].contiguous(), **options}
            q = inputs.normal(sum(rows), 8, dim)
            flashmoe.attention_varlen(q, k, v, inputs.ends(rows), None, 70, 12 * page, **given)
        entries = 24  # times 16 heads: more than two rounds of tiles on 132 multiprocessors
        rows = [(1, 64, 33, 17)[entry % 4] for entry in range(entries)]
        used = inputs.integers([12 * page - 5 * (entry % 4) for entry in range(entries)])
        prefix = table[torch.arange(entries, device=table.device) % 5].clone()
        prefix[:, :7] = table[0, :7]
        for options in (*SCORES, {"sinks": inputs.floats(16)}):
            q = inputs.normal(sum(rows), 16, dim)
            given = {"causal": True, "seqused_k": used, "block_table": prefix, **options}
            flashmoe.attention_varlen(q, k, v, inputs.ends(rows), None, 64, 12 * page, **given)


def moe(inputs: Inputs) -> None:
    """A layer, forward and backward, with few rows per expert and with many."""
    for tokens in (1, 5, 300, 2048 if inputs.device == "cuda" else 64):
        x = inputs.normal(tokens, 256, grad=True)
        gate_up, down = (
            (inputs.normal(*sizes) * 0.05).detach().requires_grad_() for sizes in ((8, 512, 256), (8, 256, 256))
        )
        weights, experts = flashmoe.topk_route(inputs.normal(tokens, 8), 2)[:2]
        flashmoe.fused_moe(x, gate_up, down, weights, experts).sum().backward()


def fp8(inputs: Inputs) -> None:
    """A layer with e4m3 weights, forward; activations in 16 bits and already quantised."""
    hidden, inner, count = 256, 128, 8
    gate_up, down = (
        (inputs.floats(*sizes) * 80).clamp(-448, 448).to(torch.float8_e4m3fn)
        for sizes in ((count, 2 * inner, hidden), (count, hidden, inner))
    )
    scales = {
        "w13_scale": inputs.floats(count, 2 * inner // 128, hidden // 128).abs() / 1000,
        "w2_scale": inputs.floats(count, hidden // 128, inner // 128).abs() / 1000,
    }
    for tokens in (1, 5, 300, 2048 if inputs.device == "cuda" else 64):
        weights, experts = flashmoe.topk_route(inputs.normal(tokens, count), 2)[:2]
        for dtype in (torch.bfloat16, torch.float16):
            x = inputs.floats(tokens, hidden).to(dtype)
            flashmoe.fused_moe(x, gate_up, down, weights, experts, **scales)
        quantised = inputs.floats(tokens, hidden).to(torch.float8_e4m3fn)
        x_scale = inputs.floats(tokens, hidden // 128).abs()
        flashmoe.fused_moe(quantised, gate_up, down, weights, experts, x_scale=x_scale, **scales)


PROGRAMS: dict[str, Callable[[Inputs], None]] = {
    program.__name__: program
    for program in (attention, attention_in_8_bits, masks, ragged, decode, append, chunks, moe, fp8)
}

if __name__ == "__main__":
    chosen, where = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cuda"
    PROGRAMS[chosen](Inputs(where))
    if where == "cuda":
        torch.cuda.synchronize()
    print(chosen, "ran")
