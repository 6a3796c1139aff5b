"""Gradients of attention, recomputed in blocks from the log-sum-exp: by the extension on the CPU and on GPUs that have kernels,
otherwise with torch operations.

Nothing of size Sq x Sk is stored. The torch operations are correct and bounded in memory, but no faster than their matrix products
in float32.

With P = exp(scale * q k^T - lse), the gradients (Dao et al., FlashAttention-2, section 3.2, with a term for lse) are
    dV = P^T dO        dP = dO V^T        dS = P * (dP - rowsum(dO * O) + dLSE)
    dQ = scale * dS K          dK = scale * dS^T Q
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashmoe.attn import fake, varlen_backward
from flashmoe.attn.options import VarlenBackward


@dataclass(frozen=True)
class BlockSize:
    """The number of keys in a block, and the bytes that its scores may take: float32 [batch, heads, rows, keys].

    About three such blocks are live at once. On the CPU they should fit the L2 cache: 128 keys and 1 MiB took 0.7 of
    the time of 512 keys and 8 MiB (one core, S = 2048, D = 64, causal).
    """

    keys: int
    bytes: int


BLOCKS = {"cpu": BlockSize(128, 1 << 20), "cuda": BlockSize(512, 256 << 20)}
MIN_ROWS_PER_BLOCK = 64

SCHEMA = (
    "flash_attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "float scale, bool causal, int needs=7) -> (Tensor, Tensor, Tensor)"
)


def backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    needs: int = fake.ALL_GRADIENTS,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), in the dtypes and layouts of q, k and v; a gradient whose bit in ``needs`` (see ``fake.py``) is 0 is empty.

    q, out, grad_out [B, Hq, Sq, D]; k, v [B, Hkv, Sk, D]; lse, grad_lse [B, Hq, Sq]; a missing gradient counts as zero.
    Accumulates in float32 (float64 for float64). Memory beyond the results: float32 dq and a few blocks of scores. A row
    without a visible key (lse -inf) has zero gradients.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    batch, heads_q, seq_q, head_dim = q.shape
    heads_kv, seq_k = k.shape[1], k.shape[2]
    dq_result, dk, dv = fake.backward(grad_out, grad_lse, q, k, v, out, lse, scale, causal, needs)
    dk.zero_()
    dv.zero_()
    if 0 in (q.numel(), k.numel()):
        return dq_result.zero_(), dk, dv
    needs_dq, needs_dk, needs_dv = (bool(needs >> index & 1) for index in range(3))

    group = heads_q // heads_kv  # query head h reads key head h // group
    grouped = (batch, heads_kv, group, seq_q)
    q_rows = q.reshape(*grouped, head_dim)
    do_rows = (torch.zeros_like(q) if grad_out is None else grad_out).reshape(*grouped, head_dim)
    # row_term is rowsum(dO * O) - dLSE. The lse of a fully masked row becomes +inf, so that exp gives 0 and not NaN.
    row_term = _row_term(grad_out, grad_lse, out, lse, work).reshape(grouped)
    safe_lse = lse.to(work).masked_fill(lse == -math.inf, math.inf).reshape(grouped)

    dq = torch.zeros((*grouped, head_dim), dtype=work, device=q.device)
    block = BLOCKS[q.device.type]
    row_step = rows_per_block(batch * heads_q, min(block.keys, seq_k), block)
    for key_start in range(0, seq_k, block.keys):
        keys = slice(key_start, min(key_start + block.keys, seq_k))
        k_block = k[:, :, keys].to(work).flatten(0, 1)  # [B*Hkv, keys, D]
        v_block = v[:, :, keys].to(work).flatten(0, 1)
        dk_block, dv_block = torch.zeros_like(k_block), torch.zeros_like(v_block)
        first_row = max(0, key_start - (seq_k - seq_q)) if causal else 0
        for row_start in range(first_row, seq_q, row_step):
            rows = slice(row_start, min(row_start + row_step, seq_q))
            q_block = _flatten_rows(q_rows, rows, work)  # [B*Hkv, group*rows, D]
            do_block = _flatten_rows(do_rows, rows, work)
            scores = (q_block @ k_block.mT).mul_(scale)
            if causal:
                _mask(scores, rows, keys, seq_k - seq_q, group)
            p = scores.sub_(safe_lse[..., rows].flatten(0, 1).flatten(1).unsqueeze(-1)).exp_()
            if needs_dv:
                dv_block += p.mT @ do_block
            if not (needs_dq or needs_dk):
                continue
            ds = (do_block @ v_block.mT).sub_(row_term[..., rows].flatten(0, 1).flatten(1).unsqueeze(-1)).mul_(p)
            ds.mul_(scale)
            if needs_dk:
                dk_block += ds.mT @ q_block
            if needs_dq:
                dq[..., rows, :] += (ds @ k_block).unflatten(1, (group, -1)).unflatten(0, (batch, heads_kv))
        if needs_dk:
            dk[:, :, keys] = dk_block.unflatten(0, (batch, heads_kv)).to(k.dtype)
        if needs_dv:
            dv[:, :, keys] = dv_block.unflatten(0, (batch, heads_kv)).to(v.dtype)
    return dq_result.copy_(dq.reshape(q.shape)) if needs_dq else dq_result, dk, dv


KERNEL_DTYPES = {"cpu": (torch.float32, torch.float16, torch.bfloat16), "cuda": (torch.float16, torch.bfloat16)}


def backward_by_kernels(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    needs: int = fake.ALL_GRADIENTS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like :func:`backward`, but by the extension on the CPU and on GPUs that have kernels. Either way the bits are the same on every run,
    whichever gradients are needed.

    Under autocast q, k and v keep the caller's dtype; the forward pass computed in ``out``'s dtype, and so does this. If the values have
    another head_dim than q, the varlen kernels run, as in the forward pass.
    """
    if q.shape[3] != v.shape[3]:
        lengths, longest = (None,) * 5, (0, 0)  # no cu_seqlens, seqused_k, sinks or mask
        window = (-1, 0 if causal else -1)
        given = VarlenBackward(
            *(grad_out, grad_lse, q, k, v, *lengths, out, lse, *longest, scale, *window), softcap=0.0, needs=needs
        )
        return varlen_backward.backward_by_kernels(*given)[:3]
    if out.dtype in KERNEL_DTYPES[out.device.type] and 0 not in (q.numel(), k.numel()):
        upstream = torch.zeros_like(out) if grad_out is None else grad_out
        if upstream.stride(-1) != 1:
            upstream = upstream.contiguous()
        statistic = None if grad_lse is None else grad_lse.contiguous()
        dq, dk, dv = torch.ops.flashmoe._flash_attention_backward.default(
            upstream, statistic, *(t.to(out.dtype) for t in (q, k, v)), out, lse.contiguous(), scale, causal, needs
        )
        if not (dq is None and dk is None and dv is None):
            return _as(q, dq), _as(k, dk), _as(v, dv)
    return backward(grad_out, grad_lse, q, k, v, out, lse, scale, causal, needs)


def _as(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    """The gradient in the dtype and layout of ``tensor``; empty if it is not needed."""
    if gradient is None:
        return fake.unneeded(tensor)
    return gradient if gradient.dtype == tensor.dtype else fake.gradient_like(tensor).copy_(gradient)


def rows_per_block(batch_heads: int, keys: int, block: BlockSize) -> int:
    """The number of query rows of one block, so that [batch_heads, rows, keys] in float32 stays within ``block.bytes``."""
    return max(MIN_ROWS_PER_BLOCK, block.bytes // (4 * batch_heads * keys))


def _row_term(grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, work: torch.dtype) -> Tensor:
    """rowsum(dO * O) - dLSE, [B, Hq, Sq]."""
    term = torch.zeros(lse.shape, dtype=work, device=lse.device)
    if grad_out is not None:
        term = torch.linalg.vecdot(grad_out.to(work), out.to(work))
    return term if grad_lse is None else term - grad_lse.to(work)


def _flatten_rows(tensor: Tensor, rows: slice, work: torch.dtype) -> Tensor:
    """[B, Hkv, group, S, D] to [B*Hkv, group*rows, D], so that the matrix product sums over a group of heads."""
    return tensor[..., rows, :].to(work).flatten(0, 1).flatten(1, 2)


def _mask(scores: Tensor, rows: slice, keys: slice, offset: int, group: int) -> None:
    """Set to -inf the scores that query i may not see: key j with j > i + offset. scores is [B*Hkv, group*rows, keys]."""
    if keys.stop - 1 <= rows.start + offset:
        return  # the whole block is visible
    i = torch.arange(rows.start, rows.stop, device=scores.device).unsqueeze(1)
    j = torch.arange(keys.start, keys.stop, device=scores.device)
    scores.unflatten(1, (group, -1)).masked_fill_(j > i + offset, -math.inf)
