"""The model and the tokens of a training step, and the rule for its gradients.

All weight gradients together are one vector. Its relative error against the same step in float32, with attention
composed of torch's matrix products, may be twice that of torch's default attention in the problem's dtype.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, rms_norm, scaled_dot_product_attention, silu

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.train_step.problem import TrainStepProblem

Attention = Callable[..., Tensor]  # with the signature of scaled_dot_product_attention
ROTARY_BASE = 10000.0


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of x [B, heads, S, D]; cos and sin [S, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    """Attention and SwiGLU, each after a norm and with a residual connection."""

    def __init__(self, problem: TrainStepProblem) -> None:
        super().__init__()
        self.problem = problem
        width, kv = problem.width, problem.heads_kv * problem.head_dim
        self.qkv = nn.Linear(width, width + 2 * kv, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * problem.ffn, bias=False)
        self.down = nn.Linear(problem.ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        p = self.problem
        batch, seq, width = x.shape
        kv = p.heads_kv * p.head_dim
        q, k, v = self.qkv(rms_norm(x, (width,))).split((width, kv, kv), dim=-1)
        q = _rotate(q.view(batch, seq, p.heads, p.head_dim).transpose(1, 2), cos, sin)
        k = _rotate(k.view(batch, seq, p.heads_kv, p.head_dim).transpose(1, 2), cos, sin)
        v = v.view(batch, seq, p.heads_kv, p.head_dim).transpose(1, 2)
        heads = attention(q, k, v, None, is_causal=True, enable_gqa=p.heads != p.heads_kv)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, seq, width))
        return x + self.feed_forward(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """SwiGLU's contribution to x [B, S, width]."""
        gate, up = self.gate_up(rms_norm(x, x.shape[-1:])).chunk(2, dim=-1)
        return cast("Tensor", self.down(silu(gate) * up))


class Decoder(nn.Module):
    """Next-token loss of a stack of layers; the embedding is also the output head."""

    def __init__(self, problem: TrainStepProblem) -> None:
        super().__init__()
        self.embedding = nn.Embedding(problem.vocabulary, problem.width)
        self.layers = nn.ModuleList(Layer(problem) for _ in range(problem.layers))
        self.head_dim = problem.head_dim

    def forward(self, tokens: Tensor, attention: Attention) -> Tensor:
        """The scalar loss of tokens [B, S + 1]."""
        x = self.embedding(tokens[:, :-1])
        positions = torch.arange(x.shape[1], device=x.device)
        rates = ROTARY_BASE ** (-torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim)
        angles = torch.outer(positions, rates).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        logits = linear(rms_norm(x, (x.shape[-1],)), self.embedding.weight)
        return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class StepInputs:
    """A model, tokens [B, S + 1], and what poisons the memory of the next results."""

    problem: TrainStepProblem
    model: Decoder
    tokens: Tensor

    def poison(self) -> None:
        torch.full((self.problem.batch, self.problem.seq, self.problem.width), math.nan, device=self.tokens.device)

    def step(self, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        """The gradients of all weights, in the model's order."""
        return torch.autograd.grad(loss(self.tokens), tuple(self.model.parameters()))


def make_inputs(problem: TrainStepProblem, device: str, seed: int) -> StepInputs:
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(f"{seed} {problem.key}".encode()))
    with torch.device(device):
        model = Decoder(problem).to(TORCH_DTYPES[problem.dtype])
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    tokens = torch.randint(problem.vocabulary, (problem.batch, problem.seq + 1), generator=generator, device=device)
    return StepInputs(problem, model, tokens)


@dataclass(frozen=True)
class StepReference:
    """Gradients in float32, and the allowed relative error of all of them together."""

    gradients: tuple[Tensor, ...]
    tolerance: float
    coverage: float = 1.0

    def judge(self, result: Sequence[Tensor], lse: Tensor | None = None) -> Verification:
        del lse
        error = relative_error(result, self.gradients)
        reason = "" if error <= self.tolerance else f"relative error {error:.3g} of the gradients"  # NaN fails
        return Verification(not reason, error, self.tolerance, None, self.coverage, reason)


def make_reference(inputs: StepInputs) -> StepReference:
    """Two steps: in float32 by matrix products, and in the problem's dtype with torch's default attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    exact = StepInputs(inputs.problem, Decoder(inputs.problem).to(inputs.tokens.device), inputs.tokens)
    exact.model.load_state_dict(inputs.model.state_dict())
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        gradients = exact.step(lambda tokens: cast("Tensor", exact.model(tokens, _float32_attention)))
    plain = inputs.step(lambda tokens: cast("Tensor", inputs.model(tokens, scaled_dot_product_attention)))
    return StepReference(gradients, 2.0 * relative_error(plain, gradients))


def _float32_attention(q: Tensor, k: Tensor, v: Tensor, mask: None, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    """Repeats key heads, so that the memory-efficient backend accepts it: a long sequence's scores do not fit memory."""
    del enable_gqa
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Relative Euclidean error of all values as one vector; infinite if shapes differ."""
    if [one.shape for one in found] != [one.shape for one in expected]:
        return math.inf
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    return math.sqrt(difference / sum(float(one.double().square().sum()) for one in expected))
