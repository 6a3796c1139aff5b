# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator,unused-ignore"
# ruff: noqa: N803 - Triton names what is known at compile time in capitals
"""A batch-invariant product in Triton, as such stacks use: one tile for every number of rows, k ascending, no split."""

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N, BLOCK_K, GROUP = 128, 128, 64, 8


@triton.jit
def _product(
    x, w, y, rows, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):
    index = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    first = index // (GROUP * column_tiles) * GROUP
    size = min(row_tiles - first, GROUP)
    within = index % (GROUP * column_tiles)
    at_row = (first + within % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_column = within // size * BLOCK_N + tl.arange(0, BLOCK_N)
    at_k = tl.arange(0, BLOCK_K)
    x_at = x + at_row[:, None].to(tl.int64) * k + at_k[None, :]
    w_at = w + at_column[None, :].to(tl.int64) * k + at_k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, k, BLOCK_K):
        left = at_k < k - begin
        a = tl.load(x_at, mask=(at_row < rows)[:, None] & left[None, :], other=0.0)
        b = tl.load(w_at, mask=(at_column < n)[None, :] & left[:, None], other=0.0)
        sums = tl.dot(a, b, sums)
        x_at += BLOCK_K
        w_at += BLOCK_K
    inside = (at_row < rows)[:, None] & (at_column < n)[None, :]
    tl.store(y + at_row[:, None].to(tl.int64) * n + at_column[None, :], sums.to(y.dtype.element_ty), mask=inside)


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [rows, k] w [n, k]^T, both contiguous."""
    y = x.new_empty(x.shape[0], w.shape[0])
    grid = (triton.cdiv(x.shape[0], BLOCK_M) * triton.cdiv(w.shape[0], BLOCK_N),)
    tiles = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "GROUP": GROUP}
    _product[grid](x, w, y, x.shape[0], *w.shape, **tiles, num_warps=8, num_stages=3)
    return y
