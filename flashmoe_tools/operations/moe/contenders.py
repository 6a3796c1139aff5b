"""The mixture-of-experts layer: ours, torch's compositions, vLLM's two products if it is installed.

Ours and torch's start from top-k ids and weights: sorting is timed, the router is not.
"""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import Contender, Prepared, always, family, flashmoe_available, installed
from flashmoe_tools.operations.moe import vllm
from flashmoe_tools.operations.moe.reference import Inputs

FAMILIES = ("sm75", "sm80", "sm90")
Layer = Callable[..., torch.Tensor]  # called with x, w13, w2, topk_weights, topk_ids


def grouped(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """torch's composition: argsort, F.grouped_mm, index_add in float32."""
    experts, top_k = w13.shape[0], ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
    counts = counts.index_add(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=torch.int32))
    ends, tokens = counts.cumsum(0, dtype=torch.int32), order // top_k
    gate, up = F.grouped_mm(x[tokens], w13.mT, offs=ends).chunk(2, dim=1)
    y = F.grouped_mm(F.silu(gate) * up, w2.mT, offs=ends)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return out.index_add(0, tokens, y.float() * weights.flatten()[order, None]).to(x.dtype)


def _loop(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """A loop over experts, as transformers does without kernels."""
    out = torch.zeros_like(x)
    w13s, w2s = w13.unbind(), w2.unbind()  # indexing each expert would give gradients as large as all experts
    for expert in ids.unique().tolist():
        tokens, choices = torch.where(ids == expert)
        gate, up = F.linear(x[tokens], w13s[expert]).chunk(2, dim=1)
        y = F.linear(F.silu(gate) * up, w2s[expert])
        out = out.index_add(0, tokens, y * weights[tokens, choices, None].to(x.dtype))
    return out


def _compiled(function: Layer) -> Layer:
    torch._dynamo.reset()  # each case compiles again, and Dynamo refuses the ninth
    return torch.compile(function, fullgraph=True, dynamic=False)


def flashmoe_layer() -> Layer:
    import flashmoe

    layer: Layer = flashmoe.fused_moe
    return layer


def _vllm(inputs: Inputs) -> Prepared:
    if inputs.x.dtype is not torch.bfloat16:
        msg = f"{inputs.problem.key}: vLLM's products are called in bf16 here"
        raise ArgumentError(msg)
    layer = vllm.Layer((inputs.w13, None), (inputs.w2, None), inputs.topk_weights)
    return vllm.products(inputs.x, layer, (inputs.topk_ids,))


def _prepared(make_layer: Callable[[], Layer]) -> Callable[[Inputs], Prepared]:
    def prepare(inputs: Inputs) -> Prepared:
        layer = make_layer()
        arguments: tuple[Any, ...] = (inputs.x, inputs.w13, inputs.w2, inputs.topk_weights, inputs.topk_ids)
        return Prepared(lambda: layer(*arguments))

    return prepare


def round_robin(bind: Callable[[Any], Callable[[torch.Tensor], Any]]) -> Callable[[Any], Prepared]:
    """For inputs with several routings: each call uses the next one."""

    def prepare(inputs: Any) -> Prepared:
        layer, ids = bind(inputs), cycle(inputs.routings)
        return Prepared(lambda: layer(next(ids)))

    return prepare


BOTH = ("cpu", "cuda")
LAYERS: tuple[tuple[str, str, tuple[str, ...], Callable[[str], str], Callable[[], Layer]], ...] = (
    ("torch-grouped", "torch grouped_mm", BOTH, always, lambda: grouped),
    ("torch-grouped-compiled", "torch grouped_mm, compiled", BOTH, always, lambda: _compiled(grouped)),
    ("torch-loop", "torch, a loop over experts", BOTH, always, lambda: _loop),
)


def contenders() -> tuple[Contender, ...]:
    ours = _prepared(flashmoe_layer)
    return (
        Contender("flashmoe", "flashmoe", BOTH, flashmoe_available, ours, ours=True),
        *(
            Contender(f"flashmoe-{one}", f"flashmoe {one}", ("cuda",), flashmoe_available, ours, family(one), ours=True)
            for one in FAMILIES
        ),
        *(Contender(name, title, devices, test, _prepared(make)) for name, title, devices, test, make in LAYERS),
        Contender("vllm", "vLLM's Triton products alone", ("cuda",), installed(vllm.MODULE), _vllm),
    )
