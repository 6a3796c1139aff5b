# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator,unused-ignore"
# ruff: noqa: N803 - Triton names what is known at compile time in capitals
"""Batch-invariant paged attention in Triton, like FlashAttention 2: blocks of 64 keys in ascending order, no splits."""

import torch
import triton
import triton.language as tl

from flashmoe_tools.operations.decoder.reference import append

BLOCK_N = 64


@triton.jit
def _attend(
    q, k_pages, v_pages, out, lengths, table, scale, rows, pages, heads_kv, GROUP: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1) // heads_kv
    head = tl.program_id(1) % heads_kv
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # the heads of a group are rows of one tile
    query = row // GROUP
    valid = query < rows
    at_d = tl.arange(0, D)
    q_row = (sequence * heads_kv * GROUP + head * GROUP + row % GROUP) * rows + query
    q_tile = tl.load(q + q_row[:, None] * D + at_d[None, :], mask=valid[:, None], other=0.0)
    before = tl.load(lengths + sequence)
    last = tl.minimum((tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // GROUP, rows - 1) + before
    maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, D), tl.float32)
    for begin in range(0, last + 1, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        page = tl.load(table + sequence * pages + key // PAGE, mask=key <= last, other=0)
        at = ((page.to(tl.int64) * PAGE + key % PAGE) * heads_kv + head)[:, None] * D + at_d[None, :]
        k = tl.load(k_pages + at, mask=(key <= last)[:, None], other=0.0)
        v = tl.load(v_pages + at, mask=(key <= last)[:, None], other=0.0)
        scores = tl.dot(q_tile, tl.trans(k)) * scale
        scores = tl.where(key[None, :] <= (query + before)[:, None], scores, -float("inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        factor = tl.exp2(maximum - new)
        total = total * factor + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * factor[:, None])
        maximum = new
    tl.store(
        out + q_row[:, None] * D + at_d[None, :], (sums / total[:, None]).to(out.dtype.element_ty), mask=valid[:, None]
    )


def cached(
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """See model.Stack.cached."""
    append(pages, k, v, lengths, table)
    batch, heads, rows, dim = q.shape
    q = q.contiguous()
    out, heads_kv = torch.empty_like(q), k.shape[1]
    group = heads // heads_kv
    block_m = 16 if rows * group <= 16 else 64
    sizes = {"GROUP": group, "D": dim, "PAGE": pages[0].shape[1], "BLOCK_M": block_m, "BLOCK_N": BLOCK_N}
    grid = (triton.cdiv(rows * group, block_m), batch * heads_kv)
    scale = dim**-0.5 * 1.4426950408889634
    _attend[grid](q, *pages, out, lengths, table, scale, rows, table.shape[1], heads_kv, **sizes, num_warps=4)
    return out
