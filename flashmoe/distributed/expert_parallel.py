"""A layer's experts split over ranks: rank r of W has experts r E / W to (r + 1) E / W - 1.

A token is sent once to each other rank that has any of its experts, with its ids and weights; that rank computes their weighted sum.
The sums are sent back and added to the sum of the token's own rank, in float32 and in rank order. Two runs give the same bits.

    counts    one integer per pair of ranks, which the host then reads: the sizes of the messages
    rows      [rows, H], each preceded by its ids and weights; meanwhile the shared expert and the experts of the tokens' own rank run
    results   [rows, H], sent back

With ``padded=True`` every rank gets all rows: no size depends on the routing, the host never waits and the call can be captured
in a CUDA graph, at the cost of W - 1 times the bytes of x in each direction.

With ``dispatch_dtype=torch.float8_e4m3fn`` rows are sent to the experts as e4m3 codes, with a float32 scale per 128 columns. The
receiver converts them back to x's dtype; everything else, results included, is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

import flashmoe
from flashmoe.checks import check_flag
from flashmoe.distributed.agreement import agree, explained, ranks_of
from flashmoe.distributed.rows import E4M3, decode, pack, quantize, unpack, unpack_fp8
from flashmoe.errors import ArgumentError, DtypeError, ShapeError
from flashmoe.moe.scaled import BLOCK

TIMEOUT = timedelta(seconds=120)
CALL = "ExpertParallel"
Layer = Callable[..., Tensor]
Shared = Callable[[Tensor], Tensor] | Tensor | None


class ExpertParallel:
    """Dispatch to, computation on, and combination from the ranks that share a layer's experts.

    Args:
        group: of torch.distributed; None for the default group. All its ranks must call together.
        padded: messages of fixed sizes, no synchronisation with the host.
        dispatch_dtype: None sends rows to other ranks' experts in x's dtype. torch.float8_e4m3fn sends e4m3 codes with a float32
            scale per 128 columns of a row (its largest magnitude / 448), 0.52 of the bytes of 16 bits. H must be a multiple
            of 128. The cost: an element of a row has an error of up to 1/16 of its value (2.7% root mean square), and the results of
            other ranks' experts are off by 3 to 4%, because gate and up both have the error. The token's own rank reads it unrounded.
            Results and gradients are sent in x's dtype; dx is the gradient of the rounded rows.
        timeout: how long to wait for ranks that do not make the call.

    Raises:
        ArgumentTypeError: padded is neither True nor False. DtypeError: another dispatch_dtype.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        padded: bool = False,
        dispatch_dtype: torch.dtype | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        check_flag("padded", padded)
        if dispatch_dtype not in (None, E4M3):
            msg = f"dispatch_dtype is {dispatch_dtype}; supported: None, for x's dtype, and torch.float8_e4m3fn"
            raise DtypeError(msg)
        self.dispatch_dtype = dispatch_dtype
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
        """flashmoe.fused_moe of this rank's tokens with all ranks' experts.

        Args:
            x: [T, H], this rank's tokens; T may differ from rank to rank, unless padded.
            w13, w2: this rank's experts, [E / W, 2I, H] and [E / W, H, I] (or as ``options`` say), with the same shape on every rank.
            topk_weights, topk_ids: [T, k]; ids count all E experts. Ids outside [0, E) contribute nothing.
            shared: [T, H], or a function of x that returns it and that runs while rows are being sent; added to the result.
            options: activation, layout, transposed, b13 and b2 of fused_moe.

        Returns:
            [T, H] in x's dtype. Differentiable once, in x, w13, w2, topk_weights, biases and shared.

        Raises:
            DistributedError: the ranks disagree about shapes or options, or one does not respond; the message names it. The errors of
            fused_moe; ArgumentError for expert_map, weights_on_input and out, which this class sets or does not support; ShapeError
            with dispatch_dtype if H is not a multiple of 128.
        """
        _check(x, topk_weights, topk_ids, options)
        if self.dispatch_dtype is not None and x.shape[1] % BLOCK:
            msg = f"x has {x.shape[1]} columns; dispatch_dtype has one scale per {BLOCK}; pad H to a multiple, or remove dispatch_dtype"
            raise ShapeError(msg)
        arguments = {
            "experts": list(w13.shape),
            "k": topk_ids.shape[1],
            "dtype": str(x.dtype),
            "padded": self.padded,
            "dispatch_dtype": str(self.dispatch_dtype),
            "tokens": x.shape[0] if self.padded else "any",
            "options": sorted((name, value) for name, value in options.items() if not isinstance(value, Tensor)),
        }
        agree(self.group, CALL, arguments, self.timeout)

        def layer(rows: Tensor, weights: Tensor, ids: Tensor, added: Tensor | None = None) -> Tensor:
            return flashmoe.fused_moe(rows, w13, w2, weights, ids, shared=added, **options)

        experts = w13.shape[0]
        # An id beyond int32 is not an expert; it must not become one by truncation.
        ids = topk_ids if topk_ids.dtype is torch.int32 else topk_ids.clamp(-1, experts * self.size).int()
        if self.size == 1:
            return layer(x, topk_weights, ids, shared(x) if callable(shared) else shared)
        if self.padded:
            return self._to_all(layer, x, topk_weights, ids, experts, shared)
        weighted = (w13, w2, *options.values())
        has_gradient = any(isinstance(one, Tensor) and one.requires_grad for one in weighted)
        is_joint = has_gradient and torch.is_grad_enabled()
        return self._to_owners(layer, x, topk_weights, ids, experts, shared, is_joint=is_joint)

    def _to_owners(
        self,
        layer: Layer,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        experts: int,
        shared: Shared,
        *,
        is_joint: bool,
    ) -> Tensor:
        """Sends rows to the ranks that have an expert for them; own tokens are computed while the others are being sent.

        ``is_joint``: one call of the layer for own and received tokens, so that its weights have one gradient: two would each be rounded, and
        adding them would read and write three times the weights' bytes.
        """
        exchange = _Exchange(self.group, self.rank, self.size, self.dispatch_dtype is not None)
        with torch.no_grad():
            exchange.plan(x, weights, ids, experts)
        first = self.rank * experts
        added = shared(x) if callable(shared) else shared
        if is_joint:
            rows, their_weights, their_ids = _Dispatch.apply(x, weights, exchange)  # type: ignore[no-untyped-call]
            exchange.wait()
            if added is not None:
                added = torch.cat((added.new_zeros(rows.shape), added))
            pairs = ((rows, x), (their_weights, weights.float()), (their_ids, ids))
            all_rows, all_weights, all_ids = (torch.cat(pair) for pair in pairs)
            partial, own = layer(all_rows, all_weights, all_ids - first, added).split((rows.shape[0], x.shape[0]))
        else:
            own = layer(x, weights, ids - first, added)  # the GPU is busy while the host waits for the sizes
            rows, their_weights, their_ids = _Dispatch.apply(x, weights, exchange)  # type: ignore[no-untyped-call]
            exchange.wait()
            partial = layer(rows, their_weights, their_ids - first)
        result: Tensor = _Combine.apply(own, partial, exchange)  # type: ignore[no-untyped-call]
        return result

    def _to_all(self, layer: Layer, x: Tensor, weights: Tensor, ids: Tensor, experts: int, shared: Shared) -> Tensor:
        """Sends all rows to all ranks; each sums what its own experts compute for them."""
        exchange = _Exchange(self.group, self.rank, self.size, self.dispatch_dtype is not None)
        rows, all_weights, all_ids = _Gather.apply(x, weights, ids, exchange)  # type: ignore[no-untyped-call]
        added = shared(x) if callable(shared) else shared
        exchange.wait()
        partial = layer(rows, all_weights, all_ids - self.rank * experts)
        result: Tensor = _Return.apply(partial, added, exchange)  # type: ignore[no-untyped-call]
        return result


def _check(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, options: dict[str, Any]) -> None:
    for name in ("expert_map", "weights_on_input", "out"):
        if name in options:
            msg = f"{name} is given; ExpertParallel does not support it; remove it"
            raise ArgumentError(msg)
    is_matrix = x.dim() == topk_ids.dim() == 2
    if not is_matrix or topk_ids.shape[0] != x.shape[0] or topk_weights.shape != topk_ids.shape:
        msg = (
            f"x has shape {list(x.shape)}, topk_ids {list(topk_ids.shape)}, topk_weights {list(topk_weights.shape)}; "
            "needed: [T, H], [T, k] and [T, k]"
        )
        raise ShapeError(msg)


class _Exchange:
    """Messages between the ranks in one call: how many rows go where, and what has been sent but not waited for.

    token   [N], the token of each outgoing row: sorted by destination, then by token
    rows    [T, W], the index of a token's outgoing row for each rank; -1: none
    """

    def __init__(self, group: ProcessGroup, rank: int, size: int, is_fp8: bool) -> None:
        self.group, self.rank, self.size, self.is_fp8 = group, rank, size, is_fp8
        self.undecoded: Callable[[], None] | None = None  # decodes the received codes into rows
        self.works: list[Any] = []
        self.outgoing: list[int] | None = None  # None: equal shares
        self.incoming: list[int] | None = None
        self.token = self.rows = self.slots = self.packed = self.counts = torch.empty(0)
        self.sizes = (0, 0)  # H, k
        self.ready: torch.cuda.Event | None = None

    def plan(self, x: Tensor, weights: Tensor, ids: Tensor, experts: int) -> None:
        """Find the ranks that have experts [T, k] of tokens, and send each rank its number of rows. The host does not wait yet."""
        ranks, marks = _ranks(self.rank, self.size, ids.device)
        needed = (torch.div(ids, experts, rounding_mode="floor").unsqueeze(1) == ranks).any(dim=2)  # [T, W]
        wanted = torch.where(needed, marks, -1)
        offsets, self.slots, rows, _ = torch.ops.flashmoe.moe_sort.default(
            wanted, wanted.new_empty(wanted.shape, dtype=torch.float32), None, self.size
        )
        self.rows = rows.view(-1, self.size)
        counts = ids.new_empty(2 * self.size)
        torch.sub(offsets[1:], offsets[:-1], out=counts[: self.size])
        with explained(CALL, self.group):
            work = dist.all_to_all_single(counts[self.size :], counts[: self.size], group=self.group, async_op=True)
        self.works.append(work)
        self.packed, self.sizes = pack(x, weights, ids, is_fp8=self.is_fp8), (x.shape[1], ids.shape[1])
        self.dtype = x.dtype
        self.wait()
        self.counts = counts.to("cpu", non_blocking=True)
        if x.is_cuda:
            self.ready = torch.cuda.Event()
            self.ready.record()

    def send_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Send the rows: (x, weights, ids) received from other ranks, valid after :meth:`wait`.

        The host waits for the sizes of the messages. A separate stream gathers the rows, so that they need not wait for what
        this rank computes meanwhile.
        """
        if self.ready is None:
            return self._unpack(self._gather_and_send())
        self.ready.synchronize()
        stream, side = torch.cuda.current_stream(), _side_stream(self.packed.device)
        side.wait_event(self.ready)
        with torch.cuda.stream(side):
            received = self._gather_and_send()
        for tensor in (self.packed, self.slots):
            tensor.record_stream(side)
        for tensor in (received, self.token):
            tensor.record_stream(stream)
        self.packed = self.slots = self.counts  # releases their memory
        return self._unpack(received)

    def _unpack(self, received: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.is_fp8:
            return unpack(received, *self.sizes)
        codes, scales, weights, ids = unpack_fp8(received, *self.sizes)
        rows = received.new_empty(codes.shape, dtype=self.dtype)
        self.undecoded = partial(decode, codes, scales, rows)
        return rows, weights, ids

    def gather_rows(self, x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Every rank's (x, weights, ids); valid after :meth:`wait`."""
        # Two tensors, sent together: x is sent uncopied, and the layer reads contiguous rows.
        columns = [ids, weights.float().view(torch.int32)]
        codes = scales = x
        if self.is_fp8:
            codes, scales = quantize(x)
            columns.append(scales.view(torch.int32))
        rows, words = self.all_gather(codes, torch.cat(columns, dim=1))
        top_k = ids.shape[1]
        if self.is_fp8:
            all_codes, all_scales = rows, words[:, 2 * top_k :].view(torch.float32)
            rows = x.new_empty(rows.shape)

            def decode_others() -> None:
                decode(all_codes, all_scales, rows)
                rows.view(self.size, *x.shape)[self.rank] = x  # this rank's own rows are not rounded

            self.undecoded = decode_others
        return rows, words[:, top_k : 2 * top_k].view(torch.float32), words[:, :top_k]

    def _gather_and_send(self) -> Tensor:
        numbers = self.counts.tolist()
        self.outgoing, self.incoming = numbers[: self.size], numbers[self.size :]
        self.token = torch.div(self.slots[: sum(self.outgoing)], self.size, rounding_mode="floor")
        return self.all_to_all(self.packed.index_select(0, self.token))

    def all_to_all(self, tensor: Tensor, *, is_back: bool = False, room: int = 0) -> Tensor:
        """What the other ranks send of [rows, ...], in rank order, after ``room`` empty rows; valid after :meth:`wait`."""
        outgoing, incoming = (self.incoming, self.outgoing) if is_back else (self.outgoing, self.incoming)
        rows = tensor.shape[0] if incoming is None else sum(incoming)
        received = tensor.new_empty((rows + room, *tensor.shape[1:]))
        with explained(CALL, self.group):
            work = dist.all_to_all_single(
                received[room:], tensor.contiguous(), incoming, outgoing, group=self.group, async_op=True
            )
        self.works.append(work)
        return received

    def all_gather(self, *tensors: Tensor) -> list[Tensor]:
        """[W rows, ...] of every rank's [rows, ...], for each tensor; valid after :meth:`wait`."""
        own = [tensor.contiguous() for tensor in tensors]
        gathered = [tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:])) for tensor in own]
        with explained(CALL, self.group):
            if own[0].is_cuda:
                self.works.append(self.group.allgather_into_tensor_coalesced(gathered, own))
            else:  # gloo only coalesces tensors of one dtype
                for whole, part in zip(gathered, own, strict=True):
                    self.works.append(dist.all_gather_into_tensor(whole, part, group=self.group, async_op=True))
        return gathered

    def wait(self) -> None:
        with explained(CALL, self.group):
            for work in self.works:
                work.wait()
        self.works.clear()
        if self.undecoded is not None:
            with torch.no_grad():
                self.undecoded()
            self.undecoded = None

    def return_rows(self, tensor: Tensor) -> Tensor:
        """Send rows [R, ...] back to the ranks they came from; returns [W - 1, T, ...] for own tokens, zeros if a token sent none."""
        returned = self.all_to_all(tensor, is_back=True, room=1)
        returned[0].zero_()
        others = self.rows[:, 1 - self.rank].unsqueeze(0) if self.size == 2 else self._rows_of_others()
        indices = others + 1
        self.wait()
        return returned.index_select(0, indices.flatten()).view(*indices.shape, *tensor.shape[1:])

    def _rows_of_others(self) -> Tensor:
        return torch.cat((self.rows[:, : self.rank], self.rows[:, self.rank + 1 :]), dim=1).t()


@lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@lru_cache(maxsize=64)
def _ranks(rank: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(all ranks [W, 1], all ranks [W] with -1 in place of this rank)."""
    ranks = torch.arange(size, dtype=torch.int32, device=device)
    return ranks.unsqueeze(1), torch.where(ranks == rank, -1, ranks)


def _add_up(partials: Tensor, more: Tensor | None = None) -> Tensor:
    """more + partials[0] + partials[1] + ..., in float32, rounded once to their dtype."""
    if partials.shape[0] == 1:
        return partials[0] if more is None else more + partials[0]
    if partials.shape[0] == 2 and more is None:
        return partials[0] + partials[1]
    total = partials.sum(0, dtype=torch.float32)
    return (total if more is None else total.add_(more)).to(partials.dtype)


class _Dispatch(torch.autograd.Function):
    """Sends tokens' rows, weights and ids to the ranks of their experts; the backward pass returns their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, exchange: _Exchange) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange, ctx.weights_dtype = exchange, weights.dtype
        found = exchange.send_rows()
        ctx.mark_non_differentiable(found[2])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        exchange: _Exchange = ctx.exchange
        dx = _add_up(exchange.return_rows(grad_rows)) if ctx.needs_input_grad[0] else None
        dweights = (
            _add_up(exchange.return_rows(grad_weights)).to(ctx.weights_dtype) if ctx.needs_input_grad[1] else None
        )
        return dx, dweights, None


class _Combine(torch.autograd.Function):
    """out[t] = own[t] + the other ranks' sums for it, in rank order in float32."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, partial: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return _add_up(exchange.return_rows(partial), own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        exchange: _Exchange = ctx.exchange
        received = exchange.all_to_all(gradient.index_select(0, exchange.token))
        exchange.wait()
        return gradient, received, None


class _Gather(torch.autograd.Function):
    """Gathers every rank's rows, weights and ids; the backward pass sums the ranks' gradients of each."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, exchange: _Exchange
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange, ctx.weights_dtype = exchange, weights.dtype
        found = exchange.gather_rows(x, weights, ids)
        ctx.mark_non_differentiable(found[2])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        returned = [
            ctx.exchange.all_to_all(t) if need else None
            for t, need in zip((grad_rows, grad_weights), needs[:2], strict=True)
        ]
        ctx.exchange.wait()
        dx, dweights = (None if t is None else _add_up(t.unflatten(0, (ctx.exchange.size, -1))) for t in returned)
        return dx, None if dweights is None else dweights.to(ctx.weights_dtype), None, None


class _Return(torch.autograd.Function):
    """out[t] = shared[t] + the ranks' sums for it; in the backward pass every rank gets every gradient."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, shared: Tensor | None, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        returned = exchange.all_to_all(partial)
        exchange.wait()
        return _add_up(returned.unflatten(0, (exchange.size, -1)), shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (gathered,) = ctx.exchange.all_gather(gradient)
        ctx.exchange.wait()
        return gathered, gradient if ctx.needs_input_grad[1] else None, None
