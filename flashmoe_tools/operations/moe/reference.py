"""The tensors of a mixture-of-experts problem: random inputs, the reference by definition, and the rule for a result.

max|out - ref| <= 2 max|plain - ref| + 2 units in the last place of the largest value, where ref is a loop over experts
in float32 (float64 on a CPU) and plain the same loop in the problem's dtype by ordinary torch operations. In float32
the factor is four: with so few roundings, two orders of summation differ by chance.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F

from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.dtypes import TORCH_DTYPES
from flashmoe_tools.operations.judging import high_dtype, judge_result, max_abs, wrong_form
from flashmoe_tools.operations.moe.problem import MoeProblem

CLAMP, STEEPNESS = 7.0, 1.702  # of clamped_swiglu
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": partial(F.gelu, approximate="tanh"), "reglu": F.relu}
)
# Tokens that are checked, spread over the batch; the report states their share.
MAX_TOKENS = {"cuda": 4096, "cpu": 64}


@dataclass(frozen=True)
class Inputs:
    """x [T, H], w13 [E, 2I, H], w2 [E, H, I], topk_weights float32 and topk_ids int32 [T, k]."""

    problem: MoeProblem
    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    def poison(self) -> None:
        """Fills the memory that the allocator will use for the next result with NaN."""
        torch.full_like(self.x, math.nan)


def make_inputs(problem: MoeProblem, device: str, seed: int) -> Inputs:
    """Standard normal tokens and scaled weights; the seed depends only on the run's seed and the problem."""
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(f"{seed} {problem.key}".encode()))
    dtype = TORCH_DTYPES[problem.dtype]

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale)

    p = problem
    weights, ids = choices(p, device, generator)
    return Inputs(
        problem,
        normal(p.tokens, p.hidden),
        normal(p.experts, 2 * p.intermediate, p.hidden, scale=p.hidden**-0.5),
        normal(p.experts, p.hidden, p.intermediate, scale=p.intermediate**-0.5),
        weights,
        ids,
    )


def choices(problem: MoeProblem, device: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32, ids int32) [T, k] of the problem's routing."""
    p = problem
    values, ids = choose_experts(p.tokens, p.experts, p.top_k, p.routing, torch.device(device), generator)
    return torch.softmax(values, dim=1), ids.int()


def choose_experts(
    tokens: int, experts: int, top_k: int, routing: str, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, ids) [T, k] with distinct ids.

    uniform; zipf: expert e with probability proportional to 1 / (e + 1); hot: all tokens go to the same k experts, the
    last ones.
    """
    logits = torch.zeros(tokens, experts, device=device)
    if routing == "zipf":
        logits -= torch.arange(1.0, experts + 1, device=device).log()
    elif routing == "hot":
        logits += 100.0 * torch.arange(experts, device=device)
    noise = torch.rand(logits.shape, generator=generator, device=device).clamp_min_(1e-20)
    values, ids = (logits - (-noise.log()).log()).topk(top_k, dim=1)
    return values, ids


def activate(z: torch.Tensor, activation: str = "swiglu", layout: str = "concat") -> torch.Tensor:
    """The activation [rows, I] of the preactivation [rows, 2I]."""
    gate, up = (z[:, ::2], z[:, 1::2]) if layout == "interleaved" else z.chunk(2, dim=1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        return gate * torch.sigmoid(STEEPNESS * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up


def mix(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: int,
    run_expert: Callable[[int, torch.Tensor], torch.Tensor],
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, H]: the sum of ``run_expert`` (index, rows of x) times the weight over each token's choices.

    Ids outside the range of experts contribute nothing.
    """
    out = torch.zeros_like(x) if shared is None else shared.to(x.dtype)
    flat = ids.flatten().long()
    flat = torch.where((flat >= 0) & (flat < experts), flat, -1)
    counts = torch.bincount(flat + 1, minlength=experts + 1).tolist()  # the first count: ids that name no expert
    order = flat.argsort(stable=True)[counts[0] :]
    if not len(order):
        return out.clone()
    tokens = order // ids.shape[1]
    rows = [run_expert(expert, own) for expert, own in enumerate(x[tokens].split(counts[1:])) if len(own)]
    return out.index_add(0, tokens, (torch.cat(rows) * weights.flatten()[order, None]).to(out.dtype))


def compose(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    dtype: torch.dtype,
    *,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    activation: str = "swiglu",
    layout: str = "concat",
    transposed: bool = False,
) -> torch.Tensor:
    """The layer in ``dtype``, expert by expert; shapes as in `fused_moe`.

    Only rows that chose an expert are multiplied with its weights.
    """
    # unbind instead of indexing: the gradient of each index would be as large as all experts' weights.
    w13s, w2s = w13.unbind(), w2.unbind()
    b13s, b2s = (None if bias is None else bias.unbind() for bias in (b13, b2))

    def run_expert(expert: int, rows: torch.Tensor) -> torch.Tensor:
        up, down = (one.mT if transposed else one for one in (w13s[expert].to(dtype), w2s[expert].to(dtype)))
        z = F.linear(rows, up, None if b13s is None else b13s[expert].to(dtype))
        return F.linear(activate(z, activation, layout), down, None if b2s is None else b2s[expert].to(dtype))

    return mix(x.to(dtype), weights, ids, len(w13), run_expert, shared)


@dataclass(frozen=True)
class Products:
    """The second product's rows [M, H] from a contender that computes only the products.

    ``row`` [T, k]: the row of each choice.
    """

    y: torch.Tensor
    row: torch.Tensor
    weights: torch.Tensor

    def combined(self) -> torch.Tensor:
        """[T, H]"""
        total = torch.zeros(len(self.row), self.y.shape[1], device=self.y.device)
        for row, weight in zip(self.row.unbind(1), self.weights.unbind(1), strict=True):
            total += self.y[row].float() * weight[:, None]
        return total.to(self.y.dtype)


@dataclass(frozen=True)
class Reference:
    """Expected rows of the checked tokens, and the allowed error."""

    problem: MoeProblem
    tokens: torch.Tensor
    out: torch.Tensor
    tolerance: float
    coverage: float

    def judge(self, result: torch.Tensor | Products, lse: torch.Tensor | None = None) -> Verification:
        """``result`` is [T, H], or only the products, which are summed here."""
        del lse
        result = result.combined() if isinstance(result, Products) else result
        form = (self.problem.tokens, self.problem.hidden), TORCH_DTYPES[self.problem.dtype]
        if text := wrong_form("result", result, form):
            return Verification(False, math.inf, self.tolerance, None, self.coverage, text)
        error = max_abs(result[self.tokens].to(self.out.dtype) - self.out)
        return judge_result(result, error, self.tolerance, self.coverage)


def checked_tokens(problem: MoeProblem, device: torch.device) -> torch.Tensor:
    """At most MAX_TOKENS tokens, spread evenly over the batch."""
    count = min(problem.tokens, MAX_TOKENS[device.type])
    return torch.linspace(0, problem.tokens - 1, count, device=device).round().long()


def make_reference(inputs: Inputs) -> Reference:
    problem = inputs.problem
    tokens = checked_tokens(problem, inputs.x.device)

    def run(dtype: torch.dtype) -> torch.Tensor:
        weights = inputs.topk_weights[tokens].to(dtype)
        return compose(inputs.x[tokens], inputs.w13, inputs.w2, weights, inputs.topk_ids[tokens], dtype)

    out = run(high_dtype(inputs.x.device))
    tolerance = allowed(out, run(inputs.x.dtype), inputs.x.dtype)
    return Reference(problem, tokens, out, tolerance, tokens.numel() / problem.tokens)


def allowed(exact: torch.Tensor, plain: torch.Tensor | Sequence[torch.Tensor], dtype: torch.dtype) -> float:
    """The largest error of a result in ``dtype`` that the rule allows; ``plain``: results with the expected error."""
    if exact.numel() == 0:
        return 0.0
    largest = max_abs(exact)
    ulp = math.ldexp(torch.finfo(dtype).eps, math.frexp(largest)[1] - 1) if largest else 0.0
    factor = 4 if dtype == torch.float32 else 2
    natural = [max_abs(one.to(exact.dtype) - exact) for one in ([plain] if isinstance(plain, torch.Tensor) else plain)]
    return factor * max(natural) + 2 * ulp
