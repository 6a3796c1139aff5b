"""A mixture-of-experts layer as an ``nn.Module``: a router, experts and, optionally, a shared expert for all tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._C import _get_tracing_state
from torch.nn import functional as F

from flashmoe.checks import check_flag, check_input_dtype, check_parameter_dtype, check_size, shape_of
from flashmoe.errors import ArgumentError, ArgumentTypeError, ShapeError
from flashmoe.moe.api import fused_moe, topk_route
from flashmoe.moe.errors import check
from flashmoe.moe.options import Activation, Layer, Layout, Precision, Routing, Scoring
from flashmoe.moe.scaled import activate


class MoE(nn.Module):
    """Router, experts, and their weighted sum for each token.

    Args:
        dim: H, size of the last dimension of the input and of the output.
        intermediate: I, the experts' inner size. On a GPU dim and intermediate must be multiples of 8.
        experts, top_k: the number of experts, at most 1024, and how many of them each token uses, at most 32.
        shared_intermediate: inner size of a shared expert that every token uses, with weight 1; 0 for none.
        bias: whether experts (w13 and w2) and the router have biases.
        selection_bias: a buffer float32 [experts] that is added to the scores only for the choice, for balancing without an
            auxiliary loss; not with scoring "topk_softmax", where the router's bias does that.
        scoring, groups, topk_groups, renormalize, scale: see :func:`flashmoe.topk_route`.
        activation, layout, transposed, weights_on_input, precision: see :func:`flashmoe.fused_moe`.
        device, dtype: of the parameters. On a GPU use float16 or bfloat16, or call under autocast.

    Parameters (names are stable): router.weight [E, H] and router.bias [E]; w13 [E, 2I, H], w2 [E, H, I] (transposed: [E, H, 2I],
    [E, I, H]), b13 [E, 2I], b2 [E, H]; shared_w13 [2S, H] and shared_w2 [H, S], gate and up in ``layout``'s order.

    Raises ArgumentError for sizes that do not fit together, ArgumentTypeError for a size that is not an integer or a flag that is
    not a bool, DtypeError for a dtype without kernels.
    """

    def __init__(
        self,
        dim: int,
        intermediate: int,
        experts: int,
        top_k: int,
        *,
        shared_intermediate: int = 0,
        bias: bool = False,
        selection_bias: bool = False,
        scoring: Scoring = "softmax",
        groups: int | None = None,
        topk_groups: int | None = None,
        renormalize: bool = True,
        scale: float = 1.0,
        activation: Activation = "swiglu",
        layout: Layout = "concat",
        transposed: bool = False,
        weights_on_input: bool = False,
        precision: Precision | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.intermediate = check_size("dim", dim), check_size("intermediate", intermediate)
        self.experts, self.top_k = check_size("experts", experts), check_size("top_k", top_k)
        self.shared_intermediate = check_size("shared_intermediate", shared_intermediate, least=0)
        self.scoring, self.groups, self.topk_groups = scoring, groups, topk_groups
        self.renormalize, self.scale = renormalize, scale
        self.activation, self.layout, self.transposed = activation, layout, transposed
        self.weights_on_input, self.precision = weights_on_input, precision
        self._check_options()
        flags = {"bias": bias, "selection_bias": selection_bias, "renormalize": renormalize, "transposed": transposed}
        for name, flag in {**flags, "weights_on_input": weights_on_input}.items():
            check_flag(name, flag)
        if selection_bias and scoring == "topk_softmax":
            msg = "selection_bias is True with scoring 'topk_softmax', which would add it to the weights too; use bias=True"
            raise ArgumentError(msg)
        check_parameter_dtype(dtype, (torch.float16, torch.bfloat16, torch.float32))
        self.router = nn.Linear(self.dim, self.experts, bias=bias, device=device, dtype=dtype)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        both = 2 * self.intermediate
        w13, w2 = (both, self.dim), (self.dim, self.intermediate)
        self.w13 = parameter(self.experts, *(w13[::-1] if transposed else w13))
        self.w2 = parameter(self.experts, *(w2[::-1] if transposed else w2))
        self.b13 = parameter(self.experts, both) if bias else None
        self.b2 = parameter(self.experts, self.dim) if bias else None
        has_shared = self.shared_intermediate > 0
        self.shared_w13 = parameter(2 * self.shared_intermediate, self.dim) if has_shared else None
        self.shared_w2 = parameter(self.dim, self.shared_intermediate) if has_shared else None
        balance = torch.zeros(self.experts, dtype=torch.float32, device=device) if selection_bias else None
        self.register_buffer("selection_bias", balance)
        self.selection_bias: Tensor | None
        self.reset_parameters()

    def _check_options(self) -> None:
        """Checks the options with the operators' own checks, on meta tensors with no tokens."""
        logits, x = (torch.empty(0, size, device="meta") for size in (self.experts, self.dim))
        w13 = torch.empty(self.experts, 2 * self.intermediate, self.dim, device="meta")
        w2 = torch.empty(self.experts, self.dim, self.intermediate, device="meta")
        groups = 1 if self.groups is None else self.groups
        topk_groups = groups if self.topk_groups is None else self.topk_groups
        options = (self.top_k, self.scoring, None, groups, topk_groups, self.renormalize, self.scale)
        weights = x.new_empty(0, self.top_k)
        given = (x, w13, w2, weights, weights.int(), None, None, None, None, self.activation, self.layout, False)
        try:
            check("topk_route", Routing(logits, *options))
            check("_fused_moe_inference", Layer(*given))
        except ShapeError as error:
            raise ArgumentError(str(error)) from None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        """The selection bias moves to other devices but stays float32: in 16 bits, the small steps that balance experts would be lost."""
        before = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.selection_bias is not None and self.selection_bias.dtype is not before.dtype:
            self.selection_bias = before.to(self.selection_bias.device)
        return self

    def reset_parameters(self) -> None:
        """Like nn.Linear: uniform in +-1 / sqrt(fan in)."""
        self.router.reset_parameters()
        for parameters, fan_in in (
            ((self.w13, self.b13, self.shared_w13), self.dim),
            ((self.w2, self.b2), self.intermediate),
            ((self.shared_w2,), self.shared_intermediate),
        ):
            for parameter in parameters:
                if parameter is not None:
                    nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def forward(self, x: Tensor, *, return_loss: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The layer's result for ``x`` [..., dim], in the same shape.

        With ``return_loss`` also the load-balancing loss of this call, a float32 scalar (see :func:`load_balancing_loss`), to be
        added to the model's loss with a factor of 0.001 to 0.01. Raises ShapeError and the errors of fused_moe and topk_route.
        """
        if not isinstance(x, Tensor):
            msg = f"x must be a torch.Tensor [..., {self.dim}]; found {type(x).__name__}"
            raise ArgumentTypeError(msg)
        check_flag("return_loss", return_loss)
        if _get_tracing_state() is None and (
            x.dim() < 1 or x.shape[-1] != self.dim
        ):  # a tracer would take the check for a branch
            msg = f"x must be [..., {self.dim}]; found {shape_of(x)}; reshape it, or create the layer with another dim"
            raise ShapeError(msg)
        if _get_tracing_state() is None:
            check_input_dtype("x", x, getattr(self.router, "weight", None))
        tokens = x.reshape(-1, self.dim)
        logits = self.router(tokens)
        weights, ids, counts = topk_route(
            logits,
            self.top_k,
            scoring=self.scoring,
            bias=self.selection_bias,
            groups=self.groups,
            topk_groups=self.topk_groups,
            renormalize=self.renormalize,
            scale=self.scale,
            return_counts=True,
        )
        out = fused_moe(
            tokens,
            self.w13,
            self.w2,
            weights,
            ids,
            b13=self.b13,
            b2=self.b2,
            activation=self.activation,
            layout=self.layout,
            transposed=self.transposed,
            shared=self._shared(tokens),
            weights_on_input=self.weights_on_input,
            precision=self.precision,
        ).reshape(x.shape)
        if not return_loss:
            return out
        scores = logits.float().sigmoid() if self.scoring == "sigmoid" else logits.float().softmax(1)
        return out, load_balancing_loss(scores, counts, self.top_k)

    def _shared(self, tokens: Tensor) -> Tensor | None:
        if self.shared_w13 is None or self.shared_w2 is None:
            return None
        both = F.linear(tokens, self.shared_w13)
        is_concat = self.layout == "concat"
        gate, up = both.chunk(2, dim=-1) if is_concat else (both[..., 0::2], both[..., 1::2])
        return F.linear(activate(gate, up, self.activation), self.shared_w2)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, intermediate={self.intermediate}, experts={self.experts}, top_k={self.top_k}, "
            f"shared_intermediate={self.shared_intermediate}, scoring={self.scoring}, activation={self.activation}"
        )


def load_balancing_loss(scores: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """E * sum over experts of (share of the choices) * (mean score): Fedus et al., Switch Transformers, equation 4.

    scores [T, E]: each token's score for each expert, before the choice (sigmoid scores are divided by their sum); counts [E] from
    topk_route(..., return_counts=True). 1 if all experts are chosen equally often; its gradient goes through the scores. Sum it over
    layers. For a loss over a batch that is split over data-parallel ranks, average counts and scores over the ranks first.
    """
    tokens, experts = scores.shape
    shares = counts.float() / max(1, tokens * top_k)
    probabilities = scores / scores.sum(1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    return experts * (shares * probabilities.sum(0)).sum() / max(1, tokens)
