"""Sharding rules of flashmoe's operators for torch.distributed.tensor.

Attention: by batch (dimension 0 of all), by heads (dimension 1 of all, where each rank then has whole groups of query heads), or
replicated. A tensor that is sharded in another way is refused in words: a silent gathering of a sequence is what
context_parallel_attention is there to avoid. Ragged attention and the experts' layer have no rules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from flashmoe import _extension
from flashmoe.errors import ShapeError

_extension.load()
_registered = False

_AXES = {0: "batch", 1: "heads", 2: "sequence", 3: "head_dim"}
Rule = tuple[list[Any], list[Any]]


def register_dtensor_rules() -> None:
    """Let flashmoe's operators take DTensors; a second call changes nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    operators = torch.ops.flashmoe
    register_sharding([operators.flash_attention_forward.default])(_forward_rules)
    register_sharding([operators._flash_attention_inference.default])(_inference_rules)
    register_sharding([operators.flash_attention_backward.default])(_backward_rules)


def _shardable(q: Any, k: Any) -> list[int]:
    """Dimensions that attention may be sharded by: the batch, and the heads where groups stay whole."""
    _refuse(q, "q")
    _refuse(k, "k")
    size = max(q.mesh.size(dim) for dim in range(q.mesh.ndim))
    return [0, 1] if k.shape[1] % size == 0 else [0]


def _refuse(spec: Any, name: str) -> None:
    for placement in spec.placements:
        if isinstance(placement, Shard) and placement.dim not in (0, 1):
            axis = _AXES.get(placement.dim, str(placement.dim))
            # torch hands on the text alone, in an error of its own; the code tells flashmoe.attention which error it was.
            msg = (
                f"flashmoe:shape: {name} is sharded by its {axis} (Shard({placement.dim})); attention takes tensors sharded by batch or heads, or "
                "replicated; for a divided sequence use flashmoe.distributed.context_parallel_attention"
            )
            raise ShapeError(msg)


def _forward_rules(q: Any, k: Any, v: Any, scale: float, causal: bool) -> list[Rule]:
    rules: list[Rule] = [([Replicate()] * 2, [Replicate()] * 3 + [None, None])]
    rules += [([Shard(dim)] * 2, [Shard(dim)] * 3 + [None, None]) for dim in _shardable(q, k)]
    return rules


def _inference_rules(q: Any, k: Any, v: Any, scale: float | None, causal: bool) -> list[Rule]:
    return [(out[:1], inputs) for out, inputs in _forward_rules(q, k, v, 1.0, causal)]


def _backward_rules(
    grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, causal: bool, *needs: int
) -> list[Rule]:
    def inputs(placement: Any) -> list[Any]:
        given = [placement if spec is not None else None for spec in (grad_out, grad_lse, q, k, v, out, lse)]
        return [*given, None, None, *(None for _ in needs)]

    def gradients(placement: Any) -> list[Any]:  # one that nobody needs has no dimension to shard
        return [placement if all(bits >> place & 1 for bits in needs) else Replicate() for place in range(3)]

    placements = [Replicate(), *(Shard(dim) for dim in _shardable(q, k))]
    return [(gradients(placement), inputs(placement)) for placement in placements]
