"""Attention over a sequence that is split over ranks: keys and values are sent around, queries stay.

For a causal mask the work is balanced by giving each of the W ranks two of 2 W equal chunks: rank r has chunks r and 2 W - 1 - r. Every
rank then does the same work in each step of the ring: its own chunks in the first step; later, against keys of a lower rank, all
queries with the first half of the keys, and against keys of a higher rank, the second half of the queries with all keys.
Partial results are merged by their log-sum-exp, in float32 and in the fixed order of the ring: two runs give the same bits.

Memory: the ring needs its own keys and values and two buffers of the same size; "all_gather" holds all keys and values during a call.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from flashmoe import _extension
from flashmoe.attn.arguments import check_scalars
from flashmoe.attn.merge import merge_into
from flashmoe.distributed.agreement import agree, explained, ranks_of
from flashmoe.errors import ArgumentError, ShapeError

_extension.load()
Method = Literal["ring", "all_gather"]
METHODS = ("ring", "all_gather")
TIMEOUT = timedelta(seconds=120)
CALL = "context_parallel_attention"


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: ProcessGroup | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    method: Method = "ring",
    return_lse: bool = False,
    timeout: timedelta = TIMEOUT,
) -> Tensor | tuple[Tensor, Tensor]:
    """flashmoe.attention over a sequence that the ranks of ``group`` hold in equal shards; every rank gets its shard of the result.

    Args:
        q: [B, Hq, S / W, D], this rank's shard of S queries, as :func:`shard_sequence` returns it; W ranks.
        k, v: [B, Hkv, S / W, D], the same shard of the keys and values.
        group: of torch.distributed; None for the default group.
        causal: query i sees keys j <= i of the whole sequence. S / W must then be even.
        scale: 1 / sqrt(D) by default.
        method: "ring": keys and values are passed from rank to rank while the previous ones are used, W - 1 messages of one shard each.
            "all_gather": every rank first gathers all of them; fewer, larger messages, memory for S keys and values.
        return_lse: also return the log-sum-exp [B, Hq, S / W], float32; it has no gradient.
        timeout: how long to wait for ranks that do not make the call.

    Returns:
        out [B, Hq, S / W, D] in q's dtype. Differentiable once, in q, k and v.

    Raises:
        DistributedError: torch.distributed is not initialised; the ranks disagree about a shape, dtype or option; a rank does not
            join the call; the message names it. ShapeError, DtypeError, DeviceError, ArgumentError: as in flashmoe.attention.
    """
    found, rank, size = ranks_of(group)
    if method not in METHODS:
        msg = f"method is {method!r}; supported: {', '.join(METHODS)}"
        raise ArgumentError(msg)
    check_scalars(scale, causal, return_lse)
    if q.dim() != 4 or k.dim() != 4 or q.shape[2] != k.shape[2]:
        msg = f"q has shape {list(q.shape)} and k {list(k.shape)}; both must be [B, heads, S / W, D] with the same slice of S"
        raise ShapeError(msg)
    if causal and q.shape[2] % 2:
        msg = f"a rank has {q.shape[2]} queries; with causal=True it needs two chunks of equal length: pad S to a multiple of {2 * size}"
        raise ShapeError(msg)
    arguments = {
        "q": list(q.shape),
        "k": list(k.shape),
        "v": list(v.shape),
        "dtype": str(q.dtype),
        "causal": causal,
        "scale": scale,
        "method": method,
    }
    agree(found, CALL, arguments, timeout)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    function = _Ring if method == "ring" else _Gathered
    out, lse = function.apply(q, k, v, found, rank, size, factor, causal)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


def shard_sequence(tensor: Tensor, group: ProcessGroup | None = None, dim: int = 2) -> Tensor:
    """This rank's shard of a full sequence: chunks rank and 2 W - 1 - rank of 2 W along ``dim``, whose length must be a multiple of 2 W."""
    _, rank, size = ranks_of(group)
    if tensor.shape[dim] % (2 * size):
        msg = f"dimension {dim} has {tensor.shape[dim]} elements; a multiple of {2 * size} is needed for {size} ranks: pad it"
        raise ShapeError(msg)
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim)


def unshard_sequence(tensor: Tensor, group: ProcessGroup | None = None, dim: int = 2) -> Tensor:
    """The full sequence on every rank, from the shards of :func:`shard_sequence`; without gradients."""
    found, rank, size = ranks_of(group)
    parts = _all_gather(tensor.detach().contiguous(), found, rank, size)
    return torch.cat(_in_order(parts, size, dim), dim)


def _in_order(parts: list[Tensor], size: int, dim: int) -> list[Tensor]:
    """The 2 W chunks of W shards, first to last."""
    halves = [part.chunk(2, dim) for part in parts]
    return [halves[rank][0] for rank in range(size)] + [halves[rank][1] for rank in reversed(range(size))]


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = torch.ops.flashmoe.flash_attention_forward.default(q, k, v, scale, causal)
    return result


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.flashmoe.flash_attention_backward.default(
        grad, None, q, k, v, out, lse.contiguous(), scale, causal
    )
    return result


class _Step:
    """The queries and keys that one step combines, when this rank has the keys of ``source``."""

    def __init__(self, rank: int, source: int, rows: int, causal: bool) -> None:
        half = rows // 2
        self.is_causal = causal and source == rank
        self.queries = slice(half if causal and source > rank else 0, rows)
        self.keys = slice(0, half if causal and source < rank else rows)


class Exchange:
    """Sends tensors to the next rank of the ring and receives as many from the previous rank at the same time."""

    def __init__(self, group: ProcessGroup, rank: int, size: int, call: str = CALL) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.group, self.rank, self.call = group, rank, call
        self.to, self.come_from = ranks[(rank + 1) % size], ranks[(rank - 1) % size]
        self.pending: list[Any] = []
        self.received: list[Tensor] = []
        self.sent: list[Tensor] = []  # references that keep the buffers alive until they are sent

    def start(self, *tensors: Tensor, rows: int | None = None) -> None:
        """``rows``: the number of rows to receive, if it differs from the number sent."""
        self.sent = [tensor.contiguous() for tensor in tensors]
        self.received = [
            torch.empty_like(tensor) if rows is None else tensor.new_empty((rows, *tensor.shape[1:]))
            for tensor in self.sent
        ]
        operations = [dist.P2POp(dist.isend, one, self.to, self.group) for one in self.sent if one.numel()]
        operations += [dist.P2POp(dist.irecv, one, self.come_from, self.group) for one in self.received if one.numel()]
        with explained(self.call, self.group):
            self.pending = dist.batch_isend_irecv(operations) if operations else []

    def finish(self) -> list[Tensor]:
        with explained(self.call, self.group):
            for work in self.pending:
                work.wait()
        return self.received


def sums_dtype(size: int, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results of W ranks are summed: for two ranks their own dtype, because their sum is rounded only once in it too."""
    return dtype if size <= 2 else torch.float32


class _Ring(torch.autograd.Function):
    """Keys and values go around the ring once in the forward pass, and once in the backward pass with the sums of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, rank: int, size: int, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        exchange = Exchange(group, rank, size)
        pair = [k, v]
        out = lse = torch.empty(0)
        for number in range(size):
            if number + 1 < size:
                exchange.start(*pair)
            step = _Step(rank, (rank - number) % size, q.shape[2], causal)
            keys, values = (tensor[:, :, step.keys] for tensor in pair)
            part, part_lse = _forward(q[:, :, step.queries], keys, values, scale, step.is_causal)
            if number == 0:
                out, lse = part.to(sums_dtype(size, q.dtype)), part_lse
            else:
                merge_into(out[:, :, step.queries], lse[:, :, step.queries], part, part_lse)
            if number + 1 < size:
                pair = exchange.finish()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = (group, rank, size, scale, causal)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """A rank uses its own keys first and last, half of the heads each, while the next keys arrive and the last gradients leave."""
        q, k, v, out, lse = ctx.saved_tensors
        group, rank, size, scale, causal = ctx.ring
        keys, sums = Exchange(group, rank, size), Exchange(group, rank, size)
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        if size == 1:
            return *_backward(grad, q, k, v, out, lse, scale, causal), None, None, None, None, None
        queries, pair = (grad, q, out, lse), [k, v]
        keys.start(*pair)
        halves = halves_of_heads(k, q)
        own = [_own_heads(halves[0], queries, k, v, scale, causal)]
        dq = torch.empty(0)
        travelling: list[Tensor] = []
        for number in range(1, size):
            pair = keys.finish()
            if number + 1 < size:
                keys.start(*pair)
            step = _Step(rank, (rank - number) % size, q.shape[2], causal)
            rows = [tensor[:, :, step.queries] for tensor in queries]
            key_rows, value_rows = (tensor[:, :, step.keys] for tensor in pair)
            part_q, *parts = _backward(rows[0], rows[1], key_rows, value_rows, rows[2], rows[3], scale, step.is_causal)
            if number == 1:
                dq = _among_zeros(part_q.to(sums_dtype(size, q.dtype)), step.queries, q.shape[2])
                travelling = [_among_zeros(part, step.keys, k.shape[2]) for part in parts]
            else:  # the sums that earlier ranks found for these keys
                dq[:, :, step.queries] += part_q
                travelling = [tensor.float() for tensor in sums.finish()]
                for tensor, part in zip(travelling, parts, strict=True):
                    tensor[:, :, step.keys] += part
            sums.start(*travelling)  # after the last step they are back at their owner
        own += [_own_heads(half, queries, k, v, scale, causal) for half in halves[1:]]
        dk, dv = sums.finish()
        for half, found in zip(halves, own, strict=True):
            for total, heads, part in zip((dq, dk, dv), (half[0], half[1], half[1]), found, strict=True):
                total[:, heads] += part
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None


def halves_of_heads(k: Tensor, q: Tensor) -> list[tuple[slice, slice]]:
    """(query heads, key heads): the first half of the key heads and the second, or all of them if there is only one."""
    heads, group = k.shape[1], q.shape[1] // max(1, k.shape[1])
    ends = [0, heads // 2, heads] if heads > 1 else [0, heads]
    return [(slice(a * group, b * group), slice(a, b)) for a, b in pairwise(ends)]


def _own_heads(
    half: tuple[slice, slice], queries: tuple[Tensor, ...], k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's queries and keys, for some of the heads."""
    grad, q, out, lse = (tensor[:, half[0]] for tensor in queries)
    return _backward(grad, q, k[:, half[1]], v[:, half[1]], out, lse, scale, causal)


def _among_zeros(part: Tensor, rows: slice, length: int) -> Tensor:
    """[B, H, length, D], zero outside of ``rows``."""
    if part.shape[2] == length:
        return part
    return torch.nn.functional.pad(part, (0, 0, rows.start, length - rows.stop))


class _Gathered(torch.autograd.Function):
    """All keys and values on every rank; their gradients are summed in float32 and reduce-scattered to their owners."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, rank: int, size: int, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        pair = _gather(torch.stack((k, v)), group, rank, size)
        results = [
            _forward(q[:, :, rows], pair[0][:, :, :end], pair[1][:, :, :end], scale, causal)
            for rows, end in _views(rank, size, q.shape[2], causal)
        ]
        out = torch.cat([part for part, _ in results], dim=2)
        lse = torch.cat([part for _, part in results], dim=2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = (group, rank, size, scale, causal)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, rank, size, scale, causal = ctx.ring
        pair = _gather(torch.stack((k, v)), group, rank, size)
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        sums = torch.zeros(pair.shape, dtype=torch.float32, device=q.device)
        parts_q = []
        for rows, end in _views(rank, size, q.shape[2], causal):
            keys, values = pair[0][:, :, :end], pair[1][:, :, :end]
            dq, dk, dv = _backward(
                grad[:, :, rows], q[:, :, rows], keys, values, out[:, :, rows], lse[:, :, rows], scale, causal
            )
            parts_q.append(dq)
            sums[0][:, :, :end] += dk
            sums[1][:, :, :end] += dv
        chunks = sums.chunk(2 * size, dim=3)
        by_owner = torch.cat([torch.cat((chunks[r], chunks[2 * size - 1 - r]), dim=3) for r in range(size)])
        own = torch.empty_like(by_owner[:2])
        with explained(CALL, group):
            dist.reduce_scatter_tensor(own, by_owner, group=group)
        dk, dv = own.to(k.dtype).unbind(0)
        return torch.cat(parts_q, dim=2), dk, dv, None, None, None, None, None


def _all_gather(tensor: Tensor, group: ProcessGroup, rank: int, size: int) -> list[Tensor]:
    # Gloo needs them concatenated, not stacked
    gathered = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
    with explained(CALL, group):
        dist.all_gather_into_tensor(gathered, tensor, group=group)
    return list(gathered.unflatten(0, (size, -1)).unbind(0))


def _gather(pair: Tensor, group: ProcessGroup, rank: int, size: int) -> Tensor:
    """[2, B, Hkv, S / W, D] of every rank as [2, B, Hkv, S, D], in the sequence's order."""
    return torch.cat(_in_order(_all_gather(pair, group, rank, size), size, 3), dim=3)


def _views(rank: int, size: int, rows: int, causal: bool) -> list[tuple[slice, int]]:
    """This rank's slices of rows, and the number of leading keys that each sees; each slice's causal mask is bottom-right aligned."""
    if not causal:
        return [(slice(0, rows), rows * size)]
    half = rows // 2
    return [(slice(0, half), (rank + 1) * half), (slice(half, rows), (2 * size - rank) * half)]
