"""The calls that each workload times once they are checked: flashmoe on several GPUs, on one GPU, and torch's equivalent."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import flashmoe
from flashmoe.distributed import (
    ExpertParallel,
    context_parallel_attention,
    context_parallel_attention_varlen,
    shard_ragged,
    shard_sequence,
    unshard_ragged,
    unshard_sequence,
)
from flashmoe.distributed.expert_parallel import _Exchange, _Return
from flashmoe.moe.scaled import E4M3
from flashmoe_tools.bench.distributed.measure import Call, Ranks
from flashmoe_tools.bench.distributed.ring_flash import load
from flashmoe_tools.bench.distributed.workloads import AttentionWorkload, ExpertsWorkload
from flashmoe_tools.operations.moe.contenders import grouped

Calls = dict[str, Call]
MOST_ROWS, PEERS_LIMIT = 1 << 16, 2e-2  # limits for ring-flash-attn
CODES = "e4m3"  # part of the names of forms that send rows as codes


def _both_ways(call: Callable[..., Any], tensors: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    out = call(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, upstream)


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference, relative to the largest wanted element."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def _dtype(ranks: Ranks) -> torch.dtype:
    return torch.bfloat16 if ranks.is_gpu else torch.float32


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def _add_ring_flash(
    found: Calls, absent: dict[str, str], ranks: Ranks, rows: int, call: Callable[[Any], tuple[Tensor, ...]]
) -> None:
    """Adds ring-flash-attn on our functions, checked against our ring; on every rank or on none."""
    reason, package = "", None
    if not ranks.is_gpu or rows > MOST_ROWS:
        reason = f"timed up to {MOST_ROWS} rows" if ranks.is_gpu else "needs GPUs"
    else:
        try:
            package = load()
            ours = zip(call(package), found["ring"](), strict=True)
            worst = max(_difference(theirs, own) for theirs, own in ours)
            reason = "" if worst < PEERS_LIMIT else f"its result is off by {worst:.2g} of the largest element"
        except Exception as error:  # another project's package: whatever it raises is reported
            reason = _message(error)
    reasons = [one for one in ranks.everywhere(reason) if one]
    if reasons:
        absent["ring-flash-attn"] = reasons[0]
    else:
        found["ring-flash-attn"] = lambda: call(package)


class AttentionCalls:
    """Forward and backward of the complete problem on every GPU, and of one shard on each."""

    def __init__(self, work: AttentionWorkload, ranks: Ranks) -> None:
        self.ranks = ranks
        torch.manual_seed(0)
        heads = (work.heads, work.heads_kv, work.heads_kv, work.heads)
        whole = [
            torch.randn(1, count, work.length, work.head_dim, device=ranks.device, dtype=_dtype(ranks))
            for count in heads
        ]
        for tensor in whole:
            dist.broadcast(tensor, 0)
        self.whole, self.own = whole, [shard_sequence(tensor) for tensor in whole]
        # Ranks that make a new kind of call first agree on it. If both forms alternated on one group, they would do so
        # in every call.
        self.groups = {method: dist.new_group() for method in ("ring", "all_gather")}

    def one(self) -> tuple[Tensor, ...]:
        return _both_ways(lambda q, k, v: flashmoe.attention(q, k, v, causal=True), self.whole[:3], self.whole[3])

    def divided(self, method: Any) -> tuple[Tensor, ...]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return context_parallel_attention(q, k, v, self.groups[method], causal=True, method=method)

        return _both_ways(call, self.own[:3], self.own[3])

    def error(self) -> float:
        """The largest difference to one GPU, relative to the largest element of each result."""
        expected = self.one()
        return max(
            _difference(unshard_sequence(found), wanted)
            for method in self.groups
            for found, wanted in zip(self.divided(method), expected, strict=True)
        )

    @contextmanager
    def calls(self) -> Iterator[tuple[Calls, dict[str, str]]]:
        """The calls by name, and why a peer is missing."""
        found: Calls = {
            "one": self.one,
            "ring": lambda: self.divided("ring"),
            "all_gather": lambda: self.divided("all_gather"),
        }
        with ExitStack() as stack:
            absent = {"torch": "needs GPUs"}
            _add_ring_flash(found, absent, self.ranks, self.whole[0].shape[2], self.of_ring_flash)
            if self.ranks.is_gpu and self.whole[0].shape[1] == self.whole[1].shape[1]:
                try:
                    found["torch"] = self._of_torch(stack)
                    del absent["torch"]
                except Exception as error:  # an experimental part of torch: whatever it raises is reported
                    absent["torch"] = _message(error)
            elif self.ranks.is_gpu:
                absent["torch"] = "its ring takes as many key heads as query heads"
            yield found, absent

    def of_ring_flash(self, package: Any) -> tuple[Tensor, ...]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            rows = (tensor.transpose(1, 2) for tensor in (q, k, v))
            return package.zigzag_ring_flash_attn_func(*rows, causal=True).transpose(1, 2)

        return _both_ways(call, self.own[:3], self.own[3])

    def _of_torch(self, stack: ExitStack) -> Call:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        mesh = init_device_mesh("cuda", (self.ranks.size,))
        buffers = [tensor.clone() for tensor in self.whole]
        stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
        stack.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)))

        def call() -> Any:
            attend = torch.nn.functional.scaled_dot_product_attention
            return _both_ways(lambda q, k, v: attend(q, k, v, is_causal=True), buffers[:3], buffers[3])

        call()
        return call


class RaggedCalls:
    """Like AttentionCalls, for a ragged batch, with the ring."""

    def __init__(self, work: AttentionWorkload, ranks: Ranks) -> None:
        self.ranks = ranks
        self.ends, generator = work.ends(), torch.Generator(ranks.device).manual_seed(0)  # the same on every rank
        heads = (work.heads, work.heads_kv, work.heads_kv, work.heads)
        self.whole = [
            torch.randn(
                (work.length, count, work.head_dim), device=ranks.device, dtype=_dtype(ranks), generator=generator
            )
            for count in heads
        ]
        self.own = [shard_ragged(tensor, self.ends) for tensor in self.whole]
        self.cu_seqlens = torch.tensor(self.ends, dtype=torch.int32, device=ranks.device)
        self.longest = max(b - a for a, b in pairwise(self.ends))

    def one(self) -> tuple[Tensor, ...]:
        lengths = (self.cu_seqlens, self.cu_seqlens, self.longest, self.longest)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flashmoe.attention_varlen(q, k, v, *lengths, causal=True)

        return _both_ways(call, self.whole[:3], self.whole[3])

    def divided(self, _: str = "ring") -> tuple[Tensor, ...]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return context_parallel_attention_varlen(q, k, v, self.ends, causal=True)

        return _both_ways(call, self.own[:3], self.own[3])

    def error(self) -> float:
        pairs = zip(self.divided(), self.one(), strict=True)
        return max(_difference(unshard_ragged(found, self.ends), wanted) for found, wanted in pairs)

    @contextmanager
    def calls(self) -> Iterator[tuple[Calls, dict[str, str]]]:
        found: Calls = {"one": self.one, "ring": self.divided}
        absent = {"torch": "its context parallel takes no ragged batch"}
        _add_ring_flash(found, absent, self.ranks, self.ends[-1], self.of_ring_flash)
        yield found, absent

    def of_ring_flash(self, package: Any) -> tuple[Tensor, ...]:
        ends, longest = self.cu_seqlens // self.ranks.size, self.longest // self.ranks.size

        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return package.zigzag_ring_flash_attn_varlen_func(q, k, v, ends, longest, causal=True)

        return _both_ways(call, self.own[:3], self.own[3])


def all_to_all_composition(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """torch's equivalent: all_to_all, F.grouped_mm, all_to_all.

    Sends one row per token and expert, sorted by expert.
    """
    share, size = w13.shape[0], group.size()
    order = ids.flatten().argsort(stable=True)
    sorted_ids, tokens = ids.flatten()[order], order // ids.shape[1]
    outgoing = torch.bincount(sorted_ids // share, minlength=size)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    sent, received = outgoing.tolist(), incoming.tolist()
    exchange = funcol.all_to_all_single_autograd
    rows = exchange(x[tokens], received, sent, group)
    their_ids = sorted_ids.new_empty(sum(received))
    dist.all_to_all_single(their_ids, sorted_ids, received, sent, group=group)
    local = (their_ids - group.rank() * share).view(-1, 1)
    results = exchange(
        grouped(rows, w13, w2, torch.ones_like(local, dtype=torch.float32), local), sent, received, group
    )
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return out.index_add(0, tokens, results.float() * weights.flatten()[order, None]).to(x.dtype)


class ExpertsCalls:
    """The layer with all experts on every GPU, with a share of them on each, and a rank's share without communication."""

    def __init__(self, work: ExpertsWorkload, ranks: Ranks) -> None:
        device, dtype = ranks.device, _dtype(ranks)
        self.backward, self.ranks = work.backward, ranks
        generator = torch.Generator(device).manual_seed(1)  # the same on every rank

        def weight(rows: int, columns: int) -> Tensor:
            size = (work.experts, rows, columns)
            return torch.randn(size, device=device, dtype=dtype, generator=generator).mul_(columns**-0.5)

        self.whole = weight(2 * work.inner, work.hidden), weight(work.hidden, work.inner)
        torch.manual_seed(2 + ranks.rank)
        self.x, self.upstream = torch.randn(2, work.tokens, work.hidden, device=device, dtype=dtype)
        likely = -torch.arange(1, work.experts + 1, device=device).log() if work.skewed else torch.zeros(work.experts)
        gumbel = -torch.empty(work.tokens, work.experts, device=device).exponential_().log()
        self.weights, self.ids = flashmoe.topk_route(gumbel + likely.to(device), work.top_k)
        share = work.experts // ranks.size
        self.first = ranks.rank * share
        self.own = tuple(weight[self.first : self.first + share].clone() for weight in self.whole)
        self.layers = {
            "experts": ExpertParallel(dist.new_group()),
            "padded": ExpertParallel(dist.new_group(), padded=True),
        }
        if work.codes:
            self.layers |= {
                f"{name}, {CODES}": ExpertParallel(dist.new_group(), padded=layer.padded, dispatch_dtype=E4M3)
                for name, layer in list(self.layers.items())
            }
        self.names = (*self.layers, "torch") if ranks.is_gpu else tuple(self.layers)  # F.grouped_mm needs a GPU
        self.group = dist.new_group()
        owners = self.ids // share
        sent = [(owners == other).any(dim=1).sum() for other in range(ranks.size) if other != ranks.rank]
        self.rows_sent = int(torch.stack(sent).sum()) if sent else 0
        self.arriving = self._arriving()

    def _arriving(self) -> tuple[Tensor, ...]:
        """x, upstream gradients, weights and ids of the rows from all ranks that need this rank's experts."""
        found = []
        for tensor in (self.x, self.upstream, self.weights, self.ids):
            gathered = tensor.new_empty((self.ranks.size * tensor.shape[0], tensor.shape[1]))
            dist.all_gather_into_tensor(gathered, tensor)
            found.append(gathered)
        local = found[3] - self.first
        is_needed = ((local >= 0) & (local < self.own[0].shape[0])).any(dim=1)
        return tuple(tensor[is_needed].contiguous() for tensor in (*found[:3], local))

    def _run(self, layer: Callable[..., Tensor], x: Tensor, weights: tuple[Tensor, ...], upstream: Tensor) -> Any:
        if not self.backward:
            return (layer(x, *weights),)
        return _both_ways(layer, [x, *weights], upstream)

    def one(self) -> tuple[Tensor, ...]:
        def layer(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
            return flashmoe.fused_moe(x, w13, w2, self.weights, self.ids)

        found: tuple[Tensor, ...] = self._run(layer, self.x, self.whole, self.upstream)
        return found

    def share(self) -> Any:
        """Without communication: the arriving rows on this rank's experts."""
        x, upstream, weights, ids = self.arriving

        def layer(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
            return flashmoe.fused_moe(x, w13, w2, weights, ids)

        return self._run(layer, x, self.own, upstream)

    def divided(self, name: str) -> tuple[Tensor, ...]:
        def layer(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
            if name == "torch":
                return all_to_all_composition(x, w13, w2, self.weights, self.ids, self.group)
            return self.layers[name](x, w13, w2, self.weights, self.ids)

        found: tuple[Tensor, ...] = self._run(layer, self.x, self.own, self.upstream)
        return found

    def error(self) -> float:
        """Error of output and dx against one GPU, and of the own experts' gradients against a local computation.

        The local computation uses the rows of all ranks.
        """
        expected = (*self.one()[:2], *self.share()[2:])
        return max(
            _difference(found, wanted)
            for name in self.names
            if CODES not in name
            for found, wanted in zip(self.divided(name), expected, strict=True)
        )

    def root_mean_squares(self) -> dict[str, float]:
        """Root mean square of each form's output error relative to one GPU's output: the accuracy cost of codes."""
        wanted = self.one()[0].float()
        found = {name: self.divided(name)[0].float() for name in self.layers}
        return {name: float((out - wanted).norm() / wanted.norm()) for name, out in found.items()}

    def calls(self) -> Calls:
        return {"one": self.one, "share": self.share, **{name: partial(self.divided, name) for name in self.names}}

    def exchanges(self) -> dict[str, tuple[Call, int]]:
        """The padded form's communication without the experts, and how many bytes of it leave this rank."""
        exchange = _Exchange(dist.new_group(), self.ranks.rank, self.ranks.size, False)
        ids, others = self.ids.int(), self.ranks.size - 1
        partial_sums = self.x.repeat(self.ranks.size, 1)
        rows = others * self.x.numel() * self.x.element_size()

        def dispatch() -> Any:
            found = exchange.gather_rows(self.x, self.weights, ids)
            exchange.wait()
            return found

        def combine() -> Any:
            return _Return.apply(partial_sums, None, exchange)  # type: ignore[no-untyped-call]

        return {"dispatch": (dispatch, rows + others * 8 * ids.numel()), "combine": (combine, rows)}

    def graph(self, name: str = "padded") -> Call:
        """A padded form as a CUDA graph."""
        return captured(partial(self.divided, name))


def captured(call: Call) -> Call:
    """A call of all ranks as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay
