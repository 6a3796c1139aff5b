"""A Qwen3-shaped decoder, dense or with experts: head norms, rotary positions, grouped queries, SwiGLU.

Sampling and training share one forward pass; they differ in the function that attends: over a paged cache, or within
ragged rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, silu
from torch.nn.functional import linear as torch_linear

import flashmoe

EPSILON = 1e-6
ROTARY_BASE = 1e6
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q [N, Hq, D], k, v [N, Hkv, D]: out [N, Hq, D]


@dataclass(frozen=True)
class Shape:
    """``ffn``: inner width of SwiGLU, per expert if there are ``experts``."""

    layers: int
    width: int
    heads: int
    heads_kv: int
    head_dim: int
    ffn: int
    vocabulary: int
    experts: int = 0
    top_k: int = 0


@dataclass(frozen=True)
class Stack:
    """The functions that a decoder computes with.

    ``ragged`` attends within sequences, ``cached`` appends to pages and attends over them.
    """

    linear: Callable[[Tensor, Tensor], Tensor]
    ragged: Callable[..., Tensor]
    cached: Callable[..., Tensor]


def _ragged(*, consistent: bool) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        lengths = (cu_seqlens, cu_seqlens, longest, longest)
        return flashmoe.attention_varlen(q, k, v, *lengths, causal=True, consistent=consistent)

    return attend


def _cached(*, consistent: bool) -> Callable[..., Tensor]:
    def attend(q: Tensor, pages: tuple[Tensor, Tensor], k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        return flashmoe.attention_with_kvcache(
            q, *pages, k, v, cache_seqlens=lengths, block_table=table, causal=True, consistent=consistent
        )

    return attend


CONSISTENT = Stack(flashmoe.linear, _ragged(consistent=True), _cached(consistent=True))
DEFAULT = Stack(torch_linear, _ragged(consistent=False), _cached(consistent=False))


def _parameter(*shape: int, device: str, dtype: torch.dtype) -> nn.Parameter:
    """Normal values scaled to preserve the size of what they multiply; a vector is a norm's weight, about 1."""
    values = torch.randn(shape, device=device)
    values = values * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.1 * values
    return nn.Parameter(values.to(dtype))


class Layer(nn.Module):
    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}
        s, of_heads = shape, shape.heads * shape.head_dim
        self.shape = s
        self.norm, self.second_norm = _parameter(s.width, **made), _parameter(s.width, **made)  # type: ignore[arg-type]
        self.q_norm, self.k_norm = _parameter(s.head_dim, **made), _parameter(s.head_dim, **made)  # type: ignore[arg-type]
        self.qkv = _parameter(of_heads + 2 * s.heads_kv * s.head_dim, s.width, **made)  # type: ignore[arg-type]
        self.out = _parameter(s.width, of_heads, **made)  # type: ignore[arg-type]
        several = (s.experts,) if s.experts else ()
        self.gate_up = _parameter(*several, 2 * s.ffn, s.width, **made)  # type: ignore[arg-type]
        self.down = _parameter(*several, s.width, s.ffn, **made)  # type: ignore[arg-type]
        self.router = _parameter(s.experts, s.width, **made) if s.experts else None  # type: ignore[arg-type]

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor], stack: Stack) -> tuple[Tensor, ...]:
        s = self.shape
        both = stack.linear(rms_norm(x, x.shape[-1:], self.norm, EPSILON), self.qkv).unflatten(-1, (-1, s.head_dim))
        q, k, v = both.split((s.heads, s.heads_kv, s.heads_kv), dim=1)
        q, k = (
            _rotate(rms_norm(one, one.shape[-1:], weight, EPSILON), *rotary)
            for one, weight in ((q, self.q_norm), (k, self.k_norm))
        )
        return q, k, v

    def mix(self, x: Tensor, stack: Stack) -> Tensor:
        x = rms_norm(x, x.shape[-1:], self.second_norm, EPSILON)
        if self.router is not None:
            weights, ids = flashmoe.topk_route(stack.linear(x, self.router), self.shape.top_k)
            return flashmoe.fused_moe(x, self.gate_up, self.down, weights, ids)
        gate, up = stack.linear(x, self.gate_up).chunk(2, dim=-1)
        return stack.linear(silu(gate) * up, self.down)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [N, H, D] by float32 cos and sin [N, 1, D / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Decoder(nn.Module):
    """Random weights drawn from torch's current random state."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.table = _parameter(shape.vocabulary, shape.width, device=device, dtype=dtype)
        self.layers = nn.ModuleList(Layer(shape, device, dtype) for _ in range(shape.layers))
        self.norm = _parameter(shape.width, device=device, dtype=dtype)
        self.head = _parameter(shape.vocabulary, shape.width, device=device, dtype=dtype)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, stack: Stack) -> Tensor:
        """Log-probabilities [N, vocabulary], float32, of the next token after each of tokens [N] at positions [N]."""
        x = embedding(tokens, self.table)
        exponents = torch.arange(0, self.shape.head_dim, 2, device=x.device) / self.shape.head_dim
        angles = positions[:, None, None].float() * ROTARY_BASE**-exponents
        rotary = angles.cos(), angles.sin()
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            x = x + stack.linear(attend(index, *layer.project(x, rotary, stack)).flatten(1), layer.out)
            x = x + layer.mix(x, stack)
        logits = stack.linear(rms_norm(x, x.shape[-1:], self.norm, EPSILON), self.head)
        return torch.log_softmax(logits, dim=-1, dtype=torch.float32)

    def score(self, tokens: Tensor, stack: Stack = CONSISTENT) -> Tensor:
        """The training forward pass of complete sequences [B, S]: log-probabilities [B, S, vocabulary], differentiable."""
        batch, length = tokens.shape
        places = torch.arange(batch + 1, dtype=torch.int32, device=tokens.device) * length
        positions = torch.arange(length, device=tokens.device).repeat(batch)

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return stack.ragged(q, k, v, places, length)

        return self(tokens.flatten(), positions, attend, stack).view(batch, length, -1)  # type: ignore[no-any-return]


@dataclass
class Cache:
    """Pages of every layer for ``batch`` sequences of at most ``room`` keys, in random order.

    ``lengths``: how many keys each sequence has so far.
    """

    shape: Shape
    batch: int
    room: int
    page_size: int
    device: str
    dtype: torch.dtype
    pages: list[tuple[Tensor, Tensor]] = field(init=False)
    table: Tensor = field(init=False)
    lengths: Tensor = field(init=False)

    def __post_init__(self) -> None:
        each = -(-self.room // self.page_size)
        order = torch.randperm(self.batch * each, device=self.device).int()
        self.table = order.view(self.batch, each)
        self.lengths = torch.zeros(self.batch, dtype=torch.int32, device=self.device)
        size = (self.batch * each, self.page_size, self.shape.heads_kv, self.shape.head_dim)
        self.pages = [
            (
                torch.zeros(size, device=self.device, dtype=self.dtype),
                torch.zeros(size, device=self.device, dtype=self.dtype),
            )
            for _ in range(self.shape.layers)
        ]

    def step(self, model: Decoder, tokens: Tensor, stack: Stack = CONSISTENT) -> Tensor:
        """Feeds the next tokens [B, S] of each sequence; returns log-probabilities [B, S, vocabulary].

        The cache grows by S.
        """
        batch, count = tokens.shape
        positions = (self.lengths[:, None] + torch.arange(count, device=tokens.device)).flatten()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (one.unflatten(0, (batch, count)).transpose(1, 2) for one in (q, k, v))
            out = stack.cached(q, self.pages[layer], k, v, self.lengths, self.table)
            return out.transpose(1, 2).flatten(0, 1)

        found = model(tokens.flatten(), positions, attend, stack)
        self.lengths += count
        return found.view(batch, count, -1)  # type: ignore[no-any-return]


def sample(log_probabilities: Tensor, noise: Tensor) -> Tensor:
    """A token for each row [B, vocabulary], by Gumbel noise of that shape."""
    return (log_probabilities + noise).argmax(-1, keepdim=True)


def gumbel(shape: tuple[int, ...], device: str) -> Tensor:
    return -torch.empty(shape, device=device).exponential_().log()


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Tensor,
    count: int,
    chunk: int,
    *,
    graph: bool,
    page_size: int = 16,
    stack: Stack = CONSISTENT,
) -> tuple[Tensor, Tensor]:
    """Generates ``count`` tokens after prompts [B, P], which are read in chunks of ``chunk``.

    Returns (all tokens [B, P + count], log-probabilities [B, P + count - 1, vocabulary] of the token after each).
    ``graph``: every step after the first token replays a CUDA graph.
    """
    batch, given = prompts.shape
    device, shape = str(prompts.device), model.shape
    cache = Cache(shape, batch, given + count, page_size, device, model.table.dtype)
    found = [cache.step(model, part, stack) for part in prompts.split(chunk, dim=1)]
    noise = gumbel((batch, shape.vocabulary), device)
    token = sample(found[-1][:, -1], noise)
    tokens = [prompts, token.clone()]
    replay = _captured(model, cache, token, noise, stack) if graph else None
    for _ in range(count - 1):
        noise.copy_(gumbel((batch, shape.vocabulary), device))
        if replay is None:
            found.append(cache.step(model, token, stack))
            token.copy_(sample(found[-1][:, -1], noise))
        else:
            found.append(replay().clone())
        tokens.append(token.clone())
    return torch.cat(tokens, dim=1), torch.cat(found, dim=1)


def _captured(model: Decoder, cache: Cache, token: Tensor, noise: Tensor, stack: Stack) -> Callable[[], Tensor]:
    """A graph of a step and the choice of the next token, in place; capturing does not change the cache's lengths."""
    before, first = cache.lengths.clone(), token.clone()

    def step() -> Tensor:
        found = cache.step(model, token, stack)
        token.copy_(sample(found[:, -1], noise))
        return found

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    cache.lengths.copy_(before)
    token.copy_(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()

    def replay() -> Tensor:
        graph.replay()
        return found

    return replay
