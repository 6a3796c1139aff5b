"""Attention over ragged batches whose sequences are split over ranks: each sequence in zig-zag order, whatever its length.

Of the 2 W chunks of a sequence of L rows, chunk i has the rows i L / 2W to (i + 1) L / 2W, rounded down; rank r has the chunks r and
2 W - 1 - r of every sequence, one after the other. So each rank has the same share of every sequence's causal work, to within a row, and
the split of one sequence does not depend on the others. Keys and values go around a ring; partials are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from flashmoe.attn.arguments import check_scalars
from flashmoe.attn.merge import merge_into
from flashmoe.distributed.agreement import agree, explained, ranks_of
from flashmoe.distributed.context_parallel import TIMEOUT, Exchange, halves_of_heads, sums_dtype
from flashmoe.errors import ArgumentError, ShapeError

CALL = "context_parallel_attention_varlen"
Lengths = Sequence[int] | Tensor


def context_parallel_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Lengths,
    group: ProcessGroup | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    timeout: timedelta = TIMEOUT,
) -> Tensor | tuple[Tensor, Tensor]:
    """flashmoe.attention_varlen of sequences that the ranks of ``group`` hold in shards; every rank gets its shard of the result.

    Args:
        q: [N, Hq, D], this rank's shard of the rows of all sequences, as :func:`shard_ragged` returns it.
        k, v: [N, Hkv, D] and [N, Hkv, Dv], the same shard of the keys and values.
        cu_seqlens: [B + 1], where the full sequences begin and end, the same on every rank. The host needs the numbers, because the sizes
            of messages follow from them; if they are in a tensor on a GPU, the host waits for it.
        group: of torch.distributed; None for the default group.
        causal: query i of a sequence sees its keys j <= i.
        scale: 1 / sqrt(D) by default.
        return_lse: also return the log-sum-exp [Hq, N], float32; it has no gradient.
        timeout: how long to wait for ranks that do not make the call.

    Returns:
        out [N, Hq, Dv] in q's dtype. Differentiable once, in q, k and v.

    Raises:
        DistributedError: the ranks disagree, or one does not respond; the message names it. The errors of attention_varlen; ShapeError
            for tensors that are not such a shard.
    """
    found, rank, size = ranks_of(group)
    ends = _ends(cu_seqlens)
    plan = _plan(ends, rank, size)
    check_scalars(scale, causal, return_lse)
    if q.dim() != 3 or any(tensor.dim() != 3 or tensor.shape[0] != plan.rows[rank] for tensor in (q, k, v)):
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in (("q", q), ("k", k), ("v", v)))
        msg = f"{shapes}; rank {rank} of {size} has {plan.rows[rank]} rows [rows, heads, head_dim] of these sequences: see shard_ragged"
        raise ShapeError(msg)
    arguments = {
        "cu_seqlens": list(ends),
        "q": list(q.shape[1:]),
        "k": list(k.shape[1:]),
        "v": list(v.shape[1:]),
        "dtype": str(q.dtype),
        "causal": causal,
        "scale": scale,
    }
    agree(found, CALL, arguments, timeout)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out, lse = _Ring.apply(q, k, v, found, plan, factor, causal)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


def shard_ragged(tensor: Tensor, cu_seqlens: Lengths, group: ProcessGroup | None = None) -> Tensor:
    """This rank's shard [N, ...] of the rows of all sequences: chunks rank and 2 W - 1 - rank of each sequence's 2 W."""
    _, rank, size = ranks_of(group)
    return tensor[_rows_of(_ends(cu_seqlens), rank, size).to(tensor.device)]


def unshard_ragged(tensor: Tensor, cu_seqlens: Lengths, group: ProcessGroup | None = None) -> Tensor:
    """The rows of all sequences on every rank, from the shards of :func:`shard_ragged`; without gradients."""
    found, rank, size = ranks_of(group)
    ends = _ends(cu_seqlens)
    plan = _plan(ends, rank, size)
    longest = max(plan.rows)
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor.detach()
    gathered = tensor.new_empty((size * longest, *tensor.shape[1:]))
    with explained(CALL, found):
        dist.all_gather_into_tensor(gathered, padded, group=found)
    whole = tensor.new_zeros((ends[-1], *tensor.shape[1:]))
    for other, part in enumerate(gathered.split(longest) if longest else ()):
        whole[_rows_of(ends, other, size).to(tensor.device)] = part[: plan.rows[other]]
    return whole


def _ends(cu_seqlens: Lengths) -> tuple[int, ...]:
    found = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if not found or found[0] != 0 or any(a > b for a, b in pairwise(found)):
        shown = f"{found[:8]}{'...' if len(found) > 8 else ''}"
        msg = f"cu_seqlens is {shown}; it must begin with 0 and never decrease"
        raise ArgumentError(msg)
    return tuple(found)


def _chunks(begin: int, end: int, rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The row ranges of a rank's two chunks of a sequence."""
    length, count = end - begin, 2 * size

    def at(chunk: int) -> int:
        return begin + chunk * length // count

    last = count - 1 - rank
    return (at(rank), at(rank + 1)), (at(last), at(last + 1))


def _rows_of(ends: tuple[int, ...], rank: int, size: int) -> Tensor:
    found = [
        torch.arange(first, last) for begin, end in pairwise(ends) for first, last in _chunks(begin, end, rank, size)
    ]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class _Plan:
    """Lengths of both chunks of every sequence, for all ranks."""

    rank: int
    size: int
    lengths: tuple[tuple[tuple[int, int], ...], ...]  # by rank, by sequence

    @property
    def rows(self) -> list[int]:
        return [sum(map(sum, lengths)) for lengths in self.lengths]


@lru_cache(maxsize=64)
def _plan(ends: tuple[int, ...], rank: int, size: int) -> _Plan:
    lengths = tuple(
        tuple((b - a, d - c) for begin, end in pairwise(ends) for (a, b), (c, d) in [_chunks(begin, end, other, size)])
        for other in range(size)
    )
    return _Plan(rank, size, lengths)


@dataclass(frozen=True)
class _Step:
    """The arguments of attention_varlen for the queries of one rank and the keys of another."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor | None
    longest_q: int
    longest_k: int
    is_causal: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.flashmoe.attention_varlen_forward.default(
            *(q, k, v, self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k, None, None, None),
            *(self.longest_q, self.longest_k, scale, -1, 0 if self.is_causal else -1, 0.0, 0),
        )
        return result

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = torch.ops.flashmoe.attention_varlen_backward.default(
            *(grad, None, q, k, v, self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k, None, None, out, lse),
            *(self.longest_q, self.longest_k, scale, -1, 0 if self.is_causal else -1, 0.0),
        )
        dq, dk, dv = found[:3]
        return dq, dk, dv


@lru_cache(maxsize=256)
def _step(plan: _Plan, source: int, causal: bool, device: torch.device) -> _Step:
    """Own keys: causal, with both chunks as one sequence. Causal, keys of a lower rank: only its first chunks, for all queries. Keys of a
    higher rank: all of them, but only for second chunks; each sequence is passed as two there, the first without keys."""
    mine, theirs = plan.lengths[plan.rank], plan.lengths[source]

    def cumulative(lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)

    rows, keys = [sum(pair) for pair in mine], [sum(pair) for pair in theirs]
    used = None
    if causal and source > plan.rank:
        rows = [length for pair in mine for length in pair]
        keys = [length for pair in theirs for length in (0, sum(pair))]
    elif causal and source < plan.rank:
        used = torch.tensor([first for first, _ in theirs], dtype=torch.int32).to(device, non_blocking=True)
    longest = max(rows, default=0), max(keys, default=0)
    return _Step(cumulative(rows), cumulative(keys), used, *longest, causal and source == plan.rank)


class _Ring(torch.autograd.Function):
    """Like the dense ring, with a rank's rows of all sequences in one tensor."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, plan: _Plan, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        exchange = Exchange(group, plan.rank, plan.size, CALL)
        pair = [k, v]
        out = lse = torch.empty(0)
        for number in range(plan.size):
            source = (plan.rank - number) % plan.size
            if number + 1 < plan.size:
                exchange.start(*pair, rows=plan.rows[(source - 1) % plan.size])
            part, part_lse = _step(plan, source, causal, q.device).forward(q, pair[0], pair[1], scale)
            if number == 0:
                out, lse = part.to(sums_dtype(plan.size, q.dtype)), part_lse
            else:
                merge_into(out, lse, part, part_lse)
            if number + 1 < plan.size:
                pair = exchange.finish()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = (group, plan, scale, causal)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """A rank uses its own keys first and last, half of the heads each, while the next keys arrive and the last gradients leave."""
        q, k, v, out, lse = ctx.saved_tensors
        group, plan, scale, causal = ctx.ring
        rank, size = plan.rank, plan.size
        keys, sums = (Exchange(group, rank, size, CALL) for _ in range(2))
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        own = _step(plan, rank, causal, q.device)
        if size == 1:
            return *own.backward(grad, q, k, v, out, lse, scale), None, None, None, None

        def own_heads(half: tuple[slice, slice]) -> tuple[Tensor, Tensor, Tensor]:
            grad_rows, rows, results = (tensor[:, half[0]] for tensor in (grad, q, out))
            return own.backward(grad_rows, rows, k[:, half[1]], v[:, half[1]], results, lse[half[0]], scale)

        keys.start(k, v, rows=plan.rows[(rank - 1) % size])
        halves = halves_of_heads(k, q)
        found = [own_heads(halves[0])]
        dq = torch.empty(0)
        for number in range(1, size):
            source = (rank - number) % size
            pair = keys.finish()
            if number + 1 < size:
                keys.start(*pair, rows=plan.rows[(source - 1) % size])
            step = _step(plan, source, causal, q.device)
            part_q, *partials = step.backward(grad, q, pair[0], pair[1], out, lse, scale)
            if number == 1:
                dq = part_q.to(sums_dtype(size, q.dtype))
            else:  # the sums that earlier ranks found for these keys
                dq += part_q
                partials = [tensor.float().add_(part) for tensor, part in zip(sums.finish(), partials, strict=True)]
            sums.start(*partials, rows=plan.rows[(source - 1) % size])
        found += [own_heads(half) for half in halves[1:]]
        dk, dv = sums.finish()  # what the other ranks found for this rank's keys
        for half, own_partials in zip(halves, found, strict=True):
            for total, heads, part in zip((dq, dk, dv), (half[0], half[1], half[1]), own_partials, strict=True):
                total[:, heads] += part
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None
