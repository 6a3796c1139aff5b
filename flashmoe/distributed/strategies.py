"""The ways in which each operator can be sharded over one dimension of a device mesh, as data.

Attention: by batch, or by heads in complete GQA groups. The experts' layer: by tokens, by experts, or by intermediate size; with the
last two the ranks' results are partial sums. Grouped products: by columns, or by the dimension they sum over. All: replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

Given = Mapping[str, Any]
Shapes = list[Sequence[int] | None]


@dataclass(frozen=True)
class ShardingStrategy:
    """A sharding over one mesh dimension: the placements of the inputs that are not replicated, and of all outputs.

    An output without a placement (None) stays a local tensor on each rank: only its own backward pass reads it.
    """

    name: str
    inputs: Mapping[str, Any]
    outputs: tuple[Any, ...]
    divisible_size: Callable[[Given], int] | None = None  # a size that must be a multiple of the number of ranks


@dataclass(frozen=True)
class MeshStrategies:
    """This rank's coordinates in the mesh, and the strategy over each mesh dimension."""

    mesh: DeviceMesh
    chosen: tuple[ShardingStrategy, ...]

    def share(self, name: str) -> tuple[int, int]:
        """(index, number of shares): this rank's share of the mesh dimensions that use the strategy ``name``."""
        which, of = 0, 1
        for dim, strategy in enumerate(self.chosen):
            if strategy.name == name:
                which, of = which * self.mesh.size(dim) + self.mesh.get_local_rank(dim), of * self.mesh.size(dim)
        return which, of


def _as_given(local: dict[str, Any], given: Given, chosen: MeshStrategies) -> dict[str, Any]:
    return local


@dataclass(frozen=True)
class Rule:
    """An operator's rule for DTensors. ``main``: the tensors whose sharding decides, each with the names of its axes, one tuple
    per supported number of dimensions."""

    call: str
    main: Mapping[str, tuple[tuple[str, ...], ...]]
    strategies: Callable[[Given], list[ShardingStrategy]]
    outputs: int
    shapes: Callable[[Given, Given], Shapes]  # of the full results
    advice: str
    prepare: Callable[[dict[str, Any], Given, MeshStrategies], dict[str, Any]] = _as_given
    # Indices of results that are reduced here, because their users would otherwise reduce them several times
    added_up: frozenset[int] = frozenset()

    @property
    def replicated(self) -> ShardingStrategy:
        return ShardingStrategy("replicated", {}, (Replicate(),) * self.outputs)


def _same(names: Sequence[str], placement: Any) -> dict[str, Any]:
    return dict.fromkeys(names, placement)


# Attention.
_QKV = ("q", "k", "v")
_DENSE = ("batch", "heads", "sequence", "head_dim")
_RAGGED = ("rows of all sequences", "heads", "head_dim")
_SEQUENCES = "for a sharded sequence use flashmoe.distributed.context_parallel_attention"


def _key_heads(given: Given) -> int:
    return int(given["k"].shape[2 if given.get("block_table") is not None else 1])


def _dense_strategies(names: Sequence[str], outputs: int) -> Callable[[Given], list[ShardingStrategy]]:
    def strategies(given: Given) -> list[ShardingStrategy]:
        return [
            ShardingStrategy("batch", _same(names, Shard(0)), (Shard(0),) * outputs),
            ShardingStrategy("heads", _same(names, Shard(1)), (Shard(1),) * outputs, _key_heads),
        ]

    return strategies


def _dense_shapes(given: Given, _: Given) -> Shapes:
    q, v = given["q"], given["v"]
    return [(*q.shape[:3], v.shape[3]), tuple(q.shape[:3])]


def _shapes_of_gradients(*names: str) -> Callable[[Given, Given], Shapes]:
    """The shapes of the inputs; None for non-tensors, and for gradients whose bit in ``needs`` is 0."""

    def shapes(given: Given, _: Given) -> Shapes:
        needs = given.get("needs", -1)
        return [
            tuple(given[name].shape) if given[name] is not None and needs >> bit & 1 else None
            for bit, name in enumerate(names)
        ]

    return shapes


def _first(shapes: Callable[[Given, Given], Shapes]) -> Callable[[Given, Given], Shapes]:
    return lambda given, local: shapes(given, local)[:1]


def _varlen_inputs(given: Given) -> dict[str, dict[str, Any]]:
    """For each strategy: the placements of the inputs of ragged, paged and windowed attention that are not replicated."""
    has_pages = given.get("block_table") is not None
    is_ragged = given["cu_seqlens_q"] is not None
    heads = {"q": Shard(1), **_same(("k", "v"), Shard(2 if has_pages else 1)), "sinks": Shard(0), "mask": Shard(1)}
    heads |= {"grad_out": Shard(1), "out": Shard(1), **_same(("lse", "grad_lse"), Shard(0 if is_ragged else 1))}
    found = {"heads": heads}
    if not is_ragged and given["cu_seqlens_k"] is None:
        names = ("q", "seqused_k", "block_table", "mask", "grad_out", "out", "lse", "grad_lse")
        found["batch"] = _same(names if has_pages else (*names, "k", "v"), Shard(0))
    return found


def _varlen_strategies(is_backward: bool, outputs: int) -> Callable[[Given], list[ShardingStrategy]]:
    def strategies(given: Given) -> list[ShardingStrategy]:
        inputs = _varlen_inputs(given)
        found = []
        for name, placed in inputs.items():
            out, lse = placed["out"], placed["lse"]
            sinks = Shard(0) if name == "heads" else Partial()
            placements = (out, out, out, sinks) if is_backward else (out, lse)[:outputs]
            found.append(ShardingStrategy(name, placed, placements, _key_heads if name == "heads" else None))
        return found

    return strategies


def _varlen_shapes(given: Given, _: Given) -> Shapes:
    q, v = given["q"], given["v"]
    lse = tuple(q.shape[:3]) if given["cu_seqlens_q"] is None else (q.shape[1], q.shape[0])
    return [(*q.shape[:-1], v.shape[-1]), lse]


def _append_strategies(given: Given) -> list[ShardingStrategy]:
    has_pages = given["block_table"] is not None
    caches = _same(("k_cache", "v_cache"), Shard(2 if has_pages else 1))
    found = [ShardingStrategy("heads", {**caches, **_same(("k_new", "v_new"), Shard(1))}, ())]
    if not has_pages:
        found.append(
            ShardingStrategy("batch", _same(("k_cache", "v_cache", "k_new", "v_new", "cache_seqlens"), Shard(0)), ())
        )
    return found


_ATTENTION_AXES = MappingProxyType(dict.fromkeys(_QKV, (_DENSE,)))
_VARLEN_AXES = MappingProxyType(dict.fromkeys(_QKV, (_RAGGED, _DENSE)))
_CACHE_AXES = MappingProxyType(dict.fromkeys(("k_cache", "v_cache", "k_new", "v_new"), (_DENSE,)))


# The experts' layer.
_EXPERTS = "for tokens and experts sharded over the same ranks use flashmoe.distributed.ExpertParallel"
_LAYER_AXES = MappingProxyType(
    {
        "x": (("tokens", "hidden size"),),
        "w13": (("experts", "second axis", "third axis"),),
        "w2": (("experts", "second axis", "third axis"),),
    }
)
_ROUTED = ("x", "topk_weights", "topk_ids", "shared", "grad_out")


def axes_of_weights(transposed: bool) -> tuple[int, int]:
    """The axes of 2I in w13 and of I in w2."""
    return (2, 1) if transposed else (1, 2)


def _layer_strategies(outputs: Callable[[str, Given], tuple[Any, ...]]) -> Callable[[Given], list[ShardingStrategy]]:
    def strategies(given: Given) -> list[ShardingStrategy]:
        both, inner = axes_of_weights(given["transposed"])
        weights = ("w13", "w2", "b13", "b2")
        found = [
            ShardingStrategy("tokens", _same(_ROUTED, Shard(0)), outputs("tokens", given)),
            ShardingStrategy(
                "experts", _same(weights, Shard(0)), outputs("experts", given), lambda g: int(g["w13"].shape[0])
            ),
        ]
        if given["layout"] == "interleaved":  # otherwise gate and up would be on different ranks
            placed = {"w13": Shard(both), "w2": Shard(inner), "b13": Shard(1)}
            size = ShardingStrategy(
                "intermediate", placed, outputs("intermediate", given), lambda g: int(g["w2"].shape[inner])
            )
            found.append(size)
        return found

    return strategies


def _layer_outputs(kept: int) -> Callable[[str, Given], tuple[Any, ...]]:
    return lambda name, _: (Shard(0) if name == "tokens" else Partial(), *((None,) * kept))


def _layer_gradients(name: str, given: Given) -> tuple[Any, ...]:
    """The placements of dx, dw13, dw2, dtopk_weights, db13, db2."""
    both, inner = axes_of_weights(given["transposed"])
    if name == "tokens":
        return Shard(0), Partial(), Partial(), Shard(0), Partial(), Partial()
    if name == "experts":
        return Partial(), Shard(0), Shard(0), Partial(), Shard(0), Shard(0)
    return Partial(), Shard(both), Shard(inner), Partial(), Shard(1), Replicate()


def _prepare_layer(local: dict[str, Any], given: Given, chosen: MeshStrategies) -> dict[str, Any]:
    """Numbers a rank's experts from 0; keeps terms that are not matrix products (shared, b2) on one rank of a sum only."""
    which, of = chosen.share("experts")
    if of > 1 and "topk_ids" in local:
        first = which * local["w13"].shape[0]
        if local["expert_map"] is not None:
            local["expert_map"] = local["expert_map"] - first
        else:
            local["topk_ids"] = local["topk_ids"] - first
    share = chosen.share("intermediate")[0]
    if (which or share) and local.get("shared") is not None:
        local["shared"] = None
    if share and local["b2"] is not None:
        local["b2"] = torch.zeros_like(local["b2"])
    return local


def _layer_shapes(given: Given, _: Given) -> Shapes:
    return [tuple(given["x"].shape), *((None,) * 5)]


def _gradient_shapes(given: Given, local: Given) -> Shapes:
    tokens = local["x"].shape[0]
    top_k = local["row_slots"].shape[0] // tokens if tokens else 1
    shapes = {
        name: None if given[name] is None else tuple(given[name].shape) for name in ("x", "w13", "w2", "b13", "b2")
    }
    return [shapes["x"], shapes["w13"], shapes["w2"], (given["x"].shape[0], top_k), shapes["b13"], shapes["b2"]]


def _route_strategies(given: Given) -> list[ShardingStrategy]:
    return [ShardingStrategy("tokens", {"logits": Shard(0)}, (Shard(0), Shard(0), Partial()))]


def _route_shapes(given: Given, _: Given) -> Shapes:
    tokens, experts = given["logits"].shape
    return [(tokens, given["k"]), (tokens, given["k"]), (experts,)]


# Products of groups of rows: a [M, K], b [E, K, N]; or a [N, M], b [M, K], grouped along M.
_ROWS_ADVICE = "groups of rows have no common length, so neither rows nor experts can be sharded"


def _grouped_strategies(_: Given) -> list[ShardingStrategy]:
    return [
        ShardingStrategy("columns", {"b": Shard(2)}, (Shard(1),)),
        ShardingStrategy("the reduction dimension", {"a": Shard(1), "b": Shard(1)}, (Partial(),)),
    ]


def _grouped_2d2d_strategies(_: Given) -> list[ShardingStrategy]:
    return [
        ShardingStrategy("rows", {"a": Shard(0)}, (Shard(1),)),
        ShardingStrategy("columns", {"b": Shard(1)}, (Shard(2),)),
    ]


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "flash_attention_forward": Rule(
            "attention", _ATTENTION_AXES, _dense_strategies(_QKV, 2), 2, _dense_shapes, _SEQUENCES
        ),
        "_flash_attention_inference": Rule(
            "attention", _ATTENTION_AXES, _dense_strategies(_QKV, 1), 1, _first(_dense_shapes), _SEQUENCES
        ),
        "_flash_attention_drop_in": Rule(
            "attention", _ATTENTION_AXES, _dense_strategies(_QKV, 1), 1, _first(_dense_shapes), _SEQUENCES
        ),
        "flash_attention_backward": Rule(
            "attention",
            _ATTENTION_AXES,
            _dense_strategies((*_QKV, "grad_out", "grad_lse", "out", "lse"), 3),
            3,
            _shapes_of_gradients(*_QKV),
            _SEQUENCES,
        ),
        "attention_varlen_forward": Rule(
            "attention_varlen", _VARLEN_AXES, _varlen_strategies(False, 2), 2, _varlen_shapes, _SEQUENCES
        ),
        "_attention_varlen_inference": Rule(
            "attention_varlen", _VARLEN_AXES, _varlen_strategies(False, 1), 1, _first(_varlen_shapes), _SEQUENCES
        ),
        "attention_varlen_backward": Rule(
            "attention_varlen",
            _VARLEN_AXES,
            _varlen_strategies(True, 4),
            4,
            _shapes_of_gradients(*_QKV, "sinks"),
            _SEQUENCES,
        ),
        "attention_append_": Rule(
            "attention_with_kvcache",
            _CACHE_AXES,
            _append_strategies,
            0,
            lambda *_: [],
            "do not shard a cache along its keys",
        ),
        "_fused_moe": Rule(
            "fused_moe", _LAYER_AXES, _layer_strategies(_layer_outputs(5)), 6, _layer_shapes, _EXPERTS, _prepare_layer
        ),
        "_fused_moe_inference": Rule(
            "fused_moe",
            _LAYER_AXES,
            _layer_strategies(_layer_outputs(0)),
            1,
            _first(_layer_shapes),
            _EXPERTS,
            _prepare_layer,
        ),
        "_fused_moe_backward": Rule(
            "fused_moe",
            _LAYER_AXES,
            _layer_strategies(_layer_gradients),
            6,
            _gradient_shapes,
            _EXPERTS,
            _prepare_layer,
            frozenset({3}),  # the gradient of topk_weights: small
        ),
        "topk_route": Rule(
            "topk_route",
            MappingProxyType({"logits": (("tokens", "experts"),)}),
            _route_strategies,
            3,
            _route_shapes,
            "routing needs all of a token's logits",
        ),
        "grouped_mm": Rule(
            "grouped_mm",
            MappingProxyType({"a": (("rows", "k"),), "b": (("experts", "k", "n"),)}),
            _grouped_strategies,
            1,
            lambda given, _: [(given["a"].shape[0], given["b"].shape[2])],
            _ROWS_ADVICE,
        ),
        "_grouped_mm_2d2d": Rule(
            "grouped_mm",
            MappingProxyType({"a": (("n", "rows"),), "b": (("rows", "k"),)}),
            _grouped_2d2d_strategies,
            1,
            lambda given, _: [(given["offsets"].shape[0], given["a"].shape[0], given["b"].shape[1])],
            _ROWS_ADVICE,
        ),
    }
)
