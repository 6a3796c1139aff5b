"""The experts of a layer divided among ranks: rank r of W has experts r E / W to (r + 1) E / W - 1.

A token is sent once to each rank that has any of its experts, with the ids and weights of those; that rank computes their weighted
sum, and the sums come back and are added in float32 in the order of the ranks. Two runs give the same bits.

    counts    one integer for each pair of ranks, which the host then reads: the sizes of the messages
    rows      [rows, H], and with them ids and weights [rows, k]
    results   [rows, H] back

With ``padded=True`` every rank sends T rows to every rank, most of them empty: no size depends on the routing, the host waits for
nothing and the call can be captured in a CUDA graph, for W times the bytes of x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

import flashmoe
from flashmoe.distributed.agreement import agree, explained, ranks_of
from flashmoe.errors import ArgumentError, ShapeError

TIMEOUT = timedelta(seconds=120)
CALL = "ExpertParallel"


class ExpertParallel:
    """Dispatch to, computation on, and combination from the ranks that share a layer's experts.

    Args:
        group: of torch.distributed; None for the default group. Every rank of it calls together.
        padded: messages of fixed sizes, no synchronisation with the host.
        timeout: how long to wait for ranks that do not call.
    """

    def __init__(
        self, group: ProcessGroup | None = None, *, padded: bool = False, timeout: timedelta = TIMEOUT
    ) -> None:
        self.group, self.rank, self.size = ranks_of(group)
        self.padded = padded
        self.timeout = timeout

    def __call__(
        self,
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        shared: Callable[[Tensor], Tensor] | Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """flashmoe.fused_moe of this rank's tokens and all ranks' experts.

        Args:
            x: [T, H], this rank's tokens; T may differ from rank to rank, unless padded.
            w13, w2: this rank's experts, [E / W, 2I, H] and [E / W, H, I] (or as ``options`` say), the same on every rank in shape.
            topk_weights, topk_ids: [T, k]; ids count all E experts. Ids outside [0, E) contribute nothing.
            shared: [T, H], or a function of x that gives it and that runs while the rows travel; added to the result.
            options: activation, layout, transposed, b13 and b2 of fused_moe.

        Returns:
            [T, H] in x's dtype. Gradients, once: x, w13, w2, topk_weights, biases and shared.

        Raises:
            DistributedError: the ranks disagree about shapes or options, or one does not answer; the message names it. What
            fused_moe raises; ArgumentError for expert_map, weights_on_input and out, which are the layer's own here.
        """
        for name in ("expert_map", "weights_on_input", "out"):
            if name in options:
                msg = f"{name} is given; ExpertParallel does not take it: leave it out"
                raise ArgumentError(msg)
        if (
            x.dim() != 2
            or topk_ids.dim() != 2
            or topk_ids.shape[0] != x.shape[0]
            or topk_weights.shape != topk_ids.shape
        ):
            msg = (
                f"x has shape {list(x.shape)}, topk_ids {list(topk_ids.shape)}, topk_weights {list(topk_weights.shape)}; "
                "needed: [T, H], [T, k] and [T, k]"
            )
            raise ShapeError(msg)
        said = {
            "experts": list(w13.shape),
            "k": topk_ids.shape[1],
            "dtype": str(x.dtype),
            "padded": self.padded,
            "tokens": x.shape[0] if self.padded else "any",
            "options": sorted((name, value) for name, value in options.items() if not isinstance(value, Tensor)),
        }
        agree(self.group, CALL, said, self.timeout)
        route = self._padded_route if self.padded else self._route
        with explained(CALL, self.rank, "the group"):
            rows, weights, ids, places, back = route(x, topk_weights, topk_ids, w13.shape[0])
        added = shared(x) if callable(shared) else shared
        partial = flashmoe.fused_moe(rows, w13, w2, weights, ids, **options)
        with explained(CALL, self.rank, "the group"):
            returned: Tensor = _Rows.apply(partial, back)  # type: ignore[no-untyped-call]
        return _combine(returned, places, added)

    def _destinations(self, topk_ids: Tensor, experts: int) -> Tensor:
        """[W, T], which ranks have an expert of a token."""
        owners = torch.where((topk_ids >= 0) & (topk_ids < experts * self.size), topk_ids // experts, -1)
        ranks = torch.arange(self.size, device=topk_ids.device)
        return (owners.unsqueeze(0) == ranks.view(-1, 1, 1)).any(dim=2)

    def _route(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, _Message]:
        """(rows, weights, ids) for this rank's experts, where the results belong [W, T], and the way back."""
        needed = self._destinations(topk_ids, experts)
        counts = needed.sum(dim=1)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        outgoing, incoming = torch.stack((counts, theirs)).tolist()  # the one place where the host waits
        destination, token = needed.nonzero(as_tuple=True)  # by rank, then by token
        places = torch.full((self.size, x.shape[0]), token.numel(), dtype=torch.int64, device=x.device)
        places[destination, token] = torch.arange(token.numel(), device=x.device)
        # Ids of other ranks' experts fall outside [0, experts) and contribute nothing there.
        ids = topk_ids[token].int() - (destination * experts).int().unsqueeze(1)
        send = _Message(self.group, outgoing, incoming)
        return *_Dispatch.apply(x, topk_weights, ids, token, places, send), places, send.back()  # type: ignore[no-untyped-call]

    def _padded_route(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, _Message]:
        tokens = x.shape[0]
        everywhere = torch.arange(self.size * tokens, device=x.device).view(self.size, tokens)
        places = torch.where(self._destinations(topk_ids, experts), everywhere, self.size * tokens)
        first = torch.arange(self.size, device=x.device, dtype=torch.int32).view(-1, 1, 1) * experts
        ids = (topk_ids.int().unsqueeze(0) - first).flatten(0, 1)
        token = torch.arange(tokens, device=x.device).repeat(self.size)
        sizes = [tokens] * self.size
        send = _Message(self.group, sizes, sizes)
        return *_Dispatch.apply(x, topk_weights, ids, token, places, send), places, send.back()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Message:
    """all_to_all_single of rows: how many go to each rank, and how many come from it."""

    group: ProcessGroup
    outgoing: list[int]
    incoming: list[int]

    def back(self) -> _Message:
        return _Message(self.group, self.incoming, self.outgoing)

    def __call__(self, *parts: Tensor) -> list[Tensor]:
        """Tensors [rows, ...] of any dtypes, in one message: their bytes side by side."""
        if len(parts) == 1:
            return [self._send(parts[0].contiguous())]
        flat = [part.contiguous().flatten(1).view(torch.uint8) for part in parts]
        joined = self._send(torch.cat(flat, dim=1))
        pieces = joined.split([part.shape[1] for part in flat], dim=1)
        return [
            piece.contiguous().view(part.dtype).view(-1, *part.shape[1:])
            for piece, part in zip(pieces, parts, strict=True)
        ]

    def _send(self, tensor: Tensor) -> Tensor:
        received = tensor.new_empty((sum(self.incoming), *tensor.shape[1:]))
        dist.all_to_all_single(received, tensor, self.incoming, self.outgoing, group=self.group)
        return received


class _Dispatch(torch.autograd.Function):
    """Rows and weights of tokens to the ranks of their experts, with the ids; backward their gradients come home."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, token: Tensor, places: Tensor, send: _Message
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, their_weights, their_ids = send(x[token], weights[token], ids)
        ctx.save_for_backward(places)
        ctx.send = send
        ctx.mark_non_differentiable(their_ids)
        return rows, their_weights, their_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        with explained(CALL, dist.get_rank(ctx.send.group), "the group"):
            rows, weights = ctx.send.back()(grad_rows, grad_weights)
        return _sum_places(rows, places), _sum_places(weights, places), None, None, None, None


class _Rows(torch.autograd.Function):
    """Rows to other ranks; backward their gradients come home."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: _Message) -> Tensor:
        ctx.send = send
        return send(rows)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with explained(CALL, dist.get_rank(ctx.send.group), "the group"):
            return ctx.send.back()(gradient)[0], None


def _sum_places(rows: Tensor, places: Tensor) -> Tensor:
    """out[t] = the sum over ranks r of rows[places[r, t]], in float32 and in that order; a place past the end is nothing."""
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    total = padded[places[0]].float()
    for of_rank in places[1:].unbind(0):
        total += padded[of_rank]
    return total.to(rows.dtype)


class _Combine(torch.autograd.Function):
    """out[t] = shared[t] + the ranks' partial results, rank after rank in float32."""

    @staticmethod
    def forward(ctx: Any, returned: Tensor, places: Tensor, shared: Tensor | None) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = returned.shape[0]
        ctx.shared_dtype = None if shared is None else shared.dtype
        # A bag of rows for each token: one pass over the rows, summed in float32. Row `rows` is nothing, or the token's shared one.
        tokens = places.shape[1]
        bags = places.t().contiguous()
        if shared is None:
            table = torch.cat((returned, returned.new_zeros(1, returned.shape[1])))
        else:
            table = torch.cat((returned, returned.new_zeros(1, returned.shape[1]), shared.to(returned.dtype)))
            own = torch.arange(returned.shape[0] + 1, table.shape[0], device=places.device).unsqueeze(1)
            bags = torch.cat((own, bags), dim=1)
        if tokens == 0:
            return returned.new_empty((0, returned.shape[1]))
        return torch.nn.functional.embedding_bag(bags, table, mode="sum", padding_idx=returned.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        rows = gradient.new_zeros((ctx.rows + 1, gradient.shape[1]))
        for of_rank in places.unbind(0):
            rows[of_rank] = gradient
        shared = None if ctx.shared_dtype is None else gradient.to(ctx.shared_dtype)
        return rows[: ctx.rows], None, shared


def _combine(returned: Tensor, places: Tensor, shared: Tensor | None) -> Tensor:
    result: Tensor = _Combine.apply(returned, places, shared)  # type: ignore[no-untyped-call]
    return result
