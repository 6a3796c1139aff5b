"""What each part times, after it has been checked: flashmoe on several GPUs, on one, and torch's own context parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flashmoe
from flashmoe.distributed import ExpertParallel, context_parallel_attention, shard_sequence, unshard_sequence
from flashmoe_tools.bench.distributed.measure import Call, Ranks
from flashmoe_tools.bench.distributed.parts import AttentionPart, ExpertsPart

Calls = dict[str, Call]


def _both_ways(call: Callable[..., Any], tensors: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    out = call(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, upstream)


def _dtype(ranks: Ranks) -> torch.dtype:
    return torch.bfloat16 if ranks.is_gpu else torch.float32


class AttentionCalls:
    """Forward and backward of the whole on every GPU at once, and of a part on each."""

    def __init__(self, part: AttentionPart, ranks: Ranks) -> None:
        self.ranks = ranks
        torch.manual_seed(0)
        heads = (part.heads, part.heads_kv, part.heads_kv, part.heads)
        whole = [
            torch.randn(1, count, part.length, part.head_dim, device=ranks.device, dtype=_dtype(ranks))
            for count in heads
        ]
        for tensor in whole:
            dist.broadcast(tensor, 0)
        self.whole, self.own = whole, [shard_sequence(tensor) for tensor in whole]
        # Ranks that call with something new agree about it first: in turn on one group, both forms would do so in every call.
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
        worst = 0.0
        for method in ("ring", "all_gather"):
            for found, wanted in zip(self.divided(method), expected, strict=True):
                difference = (unshard_sequence(found).float() - wanted.float()).abs().max()
                worst = max(worst, float(difference / wanted.float().abs().max()))
        return worst

    @contextmanager
    def calls(self) -> Iterator[tuple[Calls, str]]:
        """The calls by name, and why torch's own are not among them ("" where they are)."""
        found: Calls = {
            "one": self.one,
            "ring": lambda: self.divided("ring"),
            "all_gather": lambda: self.divided("all_gather"),
        }
        with ExitStack() as stack:
            reason = "needs GPUs"
            if self.ranks.is_gpu and self.whole[0].shape[1] == self.whole[1].shape[1]:
                try:
                    found["torch"] = self._of_torch(stack)
                    reason = ""
                except Exception as error:  # an experimental part of torch: whatever it raises is the finding
                    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
            elif self.ranks.is_gpu:
                reason = "its ring takes as many key heads as query heads"
            yield found, reason

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


class ExpertsCalls:
    """The layer with all experts on every GPU at once, and with its share of them on each."""

    def __init__(self, part: ExpertsPart, ranks: Ranks) -> None:
        device, dtype = ranks.device, _dtype(ranks)
        torch.manual_seed(1)
        both = torch.randn(part.experts, 2 * part.inner, part.hidden, device=device, dtype=dtype) / part.hidden**0.5
        down = torch.randn(part.experts, part.hidden, part.inner, device=device, dtype=dtype) / part.inner**0.5
        for tensor in (both, down):
            dist.broadcast(tensor, 0)
        torch.manual_seed(2 + ranks.rank)
        self.x = torch.randn(part.tokens, part.hidden, device=device, dtype=dtype)
        logits = torch.randn(part.tokens, part.experts, device=device)
        self.weights, self.ids = flashmoe.topk_route(logits, part.top_k)
        share = part.experts // ranks.size
        self.whole = both, down
        self.own = tuple(weight[ranks.rank * share : (ranks.rank + 1) * share].clone() for weight in self.whole)
        self.layers = {
            "experts": ExpertParallel(dist.new_group()),
            "padded": ExpertParallel(dist.new_group(), padded=True),
        }
        owners = self.ids // share
        sent = [(owners == other).any(dim=1).sum() for other in range(ranks.size) if other != ranks.rank]
        self.rows_sent = int(torch.stack(sent).sum()) if sent else 0

    def one(self) -> Tensor:
        return flashmoe.fused_moe(self.x, *self.whole, self.weights, self.ids)

    def divided(self, name: str) -> Tensor:
        return self.layers[name](self.x, self.own[0], self.own[1], self.weights, self.ids)

    def error(self) -> float:
        expected = self.one().float()
        return max(
            float((self.divided(name).float() - expected).abs().max() / expected.abs().max()) for name in self.layers
        )

    def calls(self) -> Calls:
        return {"one": self.one, **{name: partial(self.divided, name) for name in self.layers}}

    def graph(self) -> Call:
        """The padded form as a CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.divided("padded")
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.divided("padded")
        return graph.replay
