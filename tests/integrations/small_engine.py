"""A small serving engine with the calls of nano-vllm: blocks with a prefix cache, prefill before decoding, preemption by recomputation.

It imports attention from flash_attn, as such engines do: flash_attn_varlen_func for new keys, or for the cache's blocks if a prefix
is cached, and flash_attn_with_kvcache for decoding.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

BLOCK = 16
LAYERS, HEADS, KV_HEADS, D, WIDTH, WORDS = 2, 4, 2, 16, 64, 96
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder(nn.Module):
    """A decoder with rotary positions; the attention function is passed with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * D, bias=False) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(HEADS * D, WIDTH, bias=False) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 96), nn.SiLU(), nn.Linear(96, WIDTH)) for _ in range(LAYERS)
        )

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed(tokens)
        for layer, (qkv, out, mlp) in enumerate(zip(self.qkv, self.out, self.mlp, strict=True)):
            heads = qkv(nn.functional.rms_norm(x, (WIDTH,))).unflatten(-1, (HEADS + 2 * KV_HEADS, D))
            q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), -2)
            x = x + out(attend(layer, rotate(q, positions), rotate(k, positions), v.contiguous()).flatten(-2))
            x = x + mlp(nn.functional.rms_norm(x, (WIDTH,)))
        logits: Tensor = nn.functional.rms_norm(x, (WIDTH,)) @ self.embed.weight.T
        return logits


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    frequency = 100.0 ** (-torch.arange(0, D, 2, device=x.device) / D)
    angle = (positions.unsqueeze(-1) * frequency).unsqueeze(-2)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).to(x.dtype)


@dataclass
class Request:
    tokens: list[int]
    wanted: int
    prompt: int = field(init=False)
    blocks: list[int] = field(default_factory=list)
    cached: int = 0  # tokens of an already cached prefix
    logits: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) - self.prompt >= self.wanted


class Blocks:
    """Full blocks are identified by their tokens and all preceding ones, reference-counted, and kept until the space is needed."""

    def __init__(self, number: int) -> None:
        self.free = deque(range(number))
        self.users = [0] * number
        self.held: dict[tuple[int, ...], int] = {}
        self.hits = 0

    def take(self) -> int:
        block = self.free.popleft()
        self.held = {prefix: one for prefix, one in self.held.items() if one != block}
        self.users[block] = 1
        return block

    def admit(self, request: Request) -> bool:
        """Allocates blocks for all tokens of a request; a prefix of full blocks is shared, but the last token is always computed."""
        needed = -(-len(request.tokens) // BLOCK)
        if needed > len(self.free):
            return False
        request.cached = 0
        for index in range(needed):
            prefix = tuple(request.tokens[: (index + 1) * BLOCK])
            known = self.held.get(prefix)
            if known is not None and request.cached == index * BLOCK and len(prefix) < len(request.tokens):
                if self.users[known] == 0:
                    self.free.remove(known)
                self.users[known] += 1
                request.cached += BLOCK
                self.hits += 1
                request.blocks.append(known)
            else:
                request.blocks.append(self.take())
        return True

    def grow(self, request: Request) -> bool:
        if len(request.tokens) <= len(request.blocks) * BLOCK:
            return True
        if not self.free:
            return False
        request.blocks.append(self.take())
        return True

    def remember(self, request: Request) -> None:
        for index in range(len(request.tokens) // BLOCK):
            self.held.setdefault(tuple(request.tokens[: (index + 1) * BLOCK]), request.blocks[index])

    def release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(block)
        request.blocks, request.cached = [], 0


class Engine:
    def __init__(self, model: Decoder, blocks: int, device: str, dtype: torch.dtype) -> None:
        import flash_attn  # type: ignore[import-not-found]

        self.attention = flash_attn
        self.model, self.device = model, device
        self.blocks = Blocks(blocks)
        self.caches = torch.zeros(2, LAYERS, blocks, BLOCK, KV_HEADS, D, device=device, dtype=dtype)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted = 0

    def run(self, requests: list[Request]) -> None:
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        fresh = []
        while self.waiting and self.blocks.admit(self.waiting[0]):
            fresh.append(self.waiting.popleft())
        if fresh:
            self.running += fresh
            self.finish(fresh, self.prefill(fresh))
            return
        for request in list(self.running):
            while request in self.running and not self.blocks.grow(request):
                last = self.running.pop()
                self.blocks.release(last)
                self.waiting.appendleft(last)
                self.preempted += 1
        self.finish(self.running, self.decode(self.running))

    def finish(self, requests: list[Request], logits: Tensor) -> None:
        for request, row in zip(list(requests), logits, strict=True):
            self.blocks.remember(request)
            request.logits.append(row)
            request.tokens.append(int(row.argmax()))
            if request.is_done:
                self.running.remove(request)
                self.blocks.release(request)

    def prefill(self, requests: list[Request]) -> Tensor:
        spans = [range(one.cached, len(one.tokens)) for one in requests]
        starts_q, starts_k = (self.integers([0, *lengths]).cumsum(0, dtype=torch.int32) for lengths in (
            [len(span) for span in spans], [len(one.tokens) for one in requests]
        ))  # fmt: skip
        longest = {"max_seqlen_q": max(map(len, spans)), "max_seqlen_k": max(len(one.tokens) for one in requests)}
        has_prefix = any(one.cached for one in requests)
        table = self.table(requests) if has_prefix else None
        slots = self.slots(requests, spans)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.store(layer, k, v, slots)
            if has_prefix:
                k, v = self.caches[:, layer]
            out: Tensor = self.attention.flash_attn_varlen_func(
                q,
                k,
                v,
                cu_seqlens_q=starts_q,
                cu_seqlens_k=starts_k,
                **longest,
                softmax_scale=D**-0.5,
                causal=True,
                block_table=table,
            )
            return out

        tokens = self.integers(
            [token for one, span in zip(requests, spans, strict=True) for token in one.tokens[span.start :]]
        )
        logits = self.model(tokens, self.integers([at for span in spans for at in span]), attend)
        return logits[starts_q[1:].long() - 1]

    def decode(self, requests: list[Request]) -> Tensor:
        lengths = self.integers([len(one.tokens) for one in requests])
        spans = [range(len(one.tokens) - 1, len(one.tokens)) for one in requests]
        table, slots = self.table(requests), self.slots(requests, spans)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.store(layer, k, v, slots)
            out: Tensor = self.attention.flash_attn_with_kvcache(
                q.unsqueeze(1),
                *self.caches[:, layer],
                cache_seqlens=lengths,
                block_table=table,
                softmax_scale=D**-0.5,
                causal=True,
            )
            return out.squeeze(1)

        return self.model(self.integers([one.tokens[-1] for one in requests]), lengths - 1, attend)

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        for cache, new in zip(self.caches[:, layer], (k, v), strict=True):
            cache.view(-1, KV_HEADS, D)[slots] = new

    def slots(self, requests: list[Request], spans: list[range]) -> Tensor:
        rows = [
            one.blocks[at // BLOCK] * BLOCK + at % BLOCK
            for one, span in zip(requests, spans, strict=True)
            for at in span
        ]
        return self.integers(rows).long()

    def table(self, requests: list[Request]) -> Tensor:
        width = max(len(one.blocks) for one in requests)
        return self.integers([one.blocks + [-1] * (width - len(one.blocks)) for one in requests])

    def integers(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
