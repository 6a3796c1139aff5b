"""flashmoe's operators on DTensors (torch.distributed.tensor).

``strategies`` lists the ways to shard each operator over a mesh dimension. For each mesh dimension one is chosen by how the
operator's main tensors are sharded, the other inputs are redistributed to match, every rank computes its share, and the results
become DTensors. Any other sharding is rejected with an error: nothing large is gathered silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from flashmoe import _extension
from flashmoe.distributed.strategies import RULES, MeshStrategies, Rule, ShardingStrategy, axes_of_weights
from flashmoe.errors import ArgumentError, ShapeError

_extension.load()
_registered = False


def register_dtensor_rules() -> None:
    """Register flashmoe's operators for DTensors; a second call changes nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    for name, rule in RULES.items():
        operator = getattr(torch.ops.flashmoe, name).default
        torch.library.register_torch_dispatch(f"flashmoe::{name}", DTensor, _handler(operator, rule))


def _handler(operator: Any, rule: Rule) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    written = {one.name for one in operator._schema.arguments if one.alias_info is not None and one.alias_info.is_write}

    @torch.no_grad()  # below autograd: redistributing a tensor must record nothing
    def handle(
        cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        tensors = {name: value for name, value in given.items() if isinstance(value, DTensor)}
        mesh = next(iter(tensors.values())).device_mesh
        if any(tensor.device_mesh != mesh for tensor in tensors.values()):
            msg = f"{rule.call} got tensors of several device meshes; distribute {', '.join(tensors)} over one"
            raise ArgumentError(msg)
        _raise_plain_tensor(rule, given)
        chosen = [_choose(rule, given, tensors, mesh, dim) for dim in range(mesh.ndim)]
        _check_sizes(rule, given, mesh, chosen)
        local = dict(given)
        for name, tensor in tensors.items():
            wanted = [strategy.inputs.get(name, Replicate()) for strategy in chosen]
            if name in written and list(tensor.placements) != wanted:
                msg = f"{name} has placements {tensor.placements} and is written in place, which needs {tuple(wanted)}; redistribute it"
                raise ShapeError(msg)
            bare: Any = tensor.detach()  # a tensor that requires a gradient cannot be redistributed here
            local[name] = bare.redistribute(mesh, wanted).to_local()
        local = rule.prepare(local, given, MeshStrategies(mesh, tuple(chosen)))
        found = operator(*(local[name] for name in names if name in local))
        if rule.outputs == 0:
            return None
        shapes = rule.shapes(given, local)
        is_single = isinstance(found, Tensor) or found is None
        results = [
            _wrapped(result, mesh, [strategy.outputs[index] for strategy in chosen], shape)
            for index, (result, shape) in enumerate(zip((found,) if is_single else found, shapes, strict=True))
        ]
        for index in rule.added_up:
            if isinstance(results[index], DTensor):
                wanted = [Replicate() if one.is_partial() else one for one in results[index].placements]
                results[index] = results[index].redistribute(mesh, wanted)
        return results[0] if is_single else tuple(results)

    return handle


def _raise_plain_tensor(rule: Rule, given: Mapping[str, Any]) -> None:
    for name in rule.main:
        value = given.get(name)
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            msg = f"{name} is a plain tensor among DTensors; convert it with DTensor.from_local or distribute_tensor"
            raise ArgumentError(msg)


def _choose(
    rule: Rule, given: Mapping[str, Any], tensors: Mapping[str, DTensor], mesh: DeviceMesh, dim: int
) -> ShardingStrategy:
    """The strategy over this mesh dimension that all sharded main tensors agree with."""
    sharded = {
        name: tensors[name].placements[dim]
        for name in rule.main
        if name in tensors
        and not (tensors[name].placements[dim].is_replicate() or tensors[name].placements[dim].is_partial())
    }
    if not sharded:
        return rule.replicated
    strategies = rule.strategies(given)
    for strategy in strategies:
        if all(strategy.inputs.get(name) == placement for name, placement in sharded.items()):
            return strategy
    found = " and ".join(
        f"{name} is sharded by its {_axis(rule, name, tensors[name], placement)} ({placement})"
        for name, placement in sharded.items()
    )
    known = ", ".join(strategy.name for strategy in strategies) or "nothing"
    msg = (
        f"{found} over mesh dimension {dim}; {rule.call} takes tensors sharded by {known}, or replicated; {rule.advice}"
    )
    raise ShapeError(msg)


def _check_sizes(rule: Rule, given: Mapping[str, Any], mesh: DeviceMesh, chosen: Sequence[ShardingStrategy]) -> None:
    for strategy in chosen:
        if strategy.divisible_size is None:
            continue
        ranks = prod(mesh.size(dim) for dim, other in enumerate(chosen) if other.name == strategy.name)
        if strategy.divisible_size(given) % ranks:
            msg = (
                f"{rule.call} is sharded by {strategy.name} over {ranks} ranks, which must divide {strategy.divisible_size(given)}; "
                "use another number of ranks, or replicate"
            )
            raise ShapeError(msg)


def _axis(rule: Rule, name: str, tensor: DTensor, placement: Any) -> str:
    axes = next((axes for axes in rule.main[name] if len(axes) == tensor.dim()), ())
    is_known = isinstance(placement, Shard) and 0 <= placement.dim < len(axes)
    return axes[placement.dim] if is_known else "elements"


def _wrapped(result: Tensor | None, mesh: DeviceMesh, placements: list[Any], shape: Sequence[int] | None) -> Any:
    """A rank's result as a shard of the full tensor; unchanged without a placement or shape."""
    if result is None or shape is None or None in placements:
        return result
    strides, step = [0] * len(shape), 1
    for dim in sorted(
        range(len(shape)), key=lambda d: (result.stride(d), -d)
    ):  # dense strides, in the order of the shard's dimensions
        strides[dim], step = step, step * max(1, shape[dim])
    return DTensor.from_local(result, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides))


def _replicated(x: Any, mesh: DeviceMesh) -> Any:
    """``x`` replicated on every rank; a plain tensor is assumed to be there already."""
    if not isinstance(x, Tensor):
        return x
    whole = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Replicate()])


class AttentionParallel(ParallelStyle):
    """How ``parallelize_module`` shards a :class:`flashmoe.Attention`: every rank has all rows and a share of the heads.

    One collective in the forward pass, which sums the ranks' results, and one in the backward pass, for the gradient of x (and one for
    that of context).

    Args:
        output: placement of the result; Replicate() gives every rank the full sum, Shard(1) a share of the rows.
        use_local_output: return a plain tensor instead of a DTensor.

    Raises ShapeError when applied to a layer whose kv_heads is not a multiple of the number of ranks.
    """

    def __init__(self, *, output: Any = None, use_local_output: bool = True) -> None:
        super().__init__()
        self.use_local_output = use_local_output
        self.output = Replicate() if output is None else output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        register_dtensor_rules()
        heads: Any = module.kv_heads
        if heads % device_mesh.size():
            msg = f"the layer has {heads} key and value heads, which {device_mesh.size()} ranks do not divide; use a number of ranks that divides them"
            raise ShapeError(msg)
        plan: dict[str, ParallelStyle] = {
            f"{name}_proj": ColwiseParallel(input_layouts=Replicate(), use_local_output=False) for name in "qkv"
        }
        plan["out_proj"] = RowwiseParallel(output_layouts=self.output, use_local_output=self.use_local_output)
        parallelize_module(module, device_mesh, plan)

        def replicate(_: nn.Module, inputs: Any, named: Any) -> Any:
            # Here, not in each projection, where the gradients of x would be reduced separately.
            return (
                tuple(_replicated(one, device_mesh) for one in inputs),
                {name: _replicated(one, device_mesh) for name, one in named.items()},
            )

        module.register_forward_pre_hook(replicate, with_kwargs=True)
        return module


class MoEParallel(ParallelStyle):
    """How ``parallelize_module`` shards a :class:`flashmoe.MoE`: every rank has all tokens and a share of the experts' weights.

    Args:
        divide: "experts", or "intermediate" for a share of every expert, which needs the layer's layout "interleaved".
        output: placement of the result; Replicate() gives every rank the full sum, Shard(0) a share of the first dimension.
        use_local_output: return a plain tensor instead of a DTensor.
    """

    def __init__(
        self,
        *,
        divide: Literal["experts", "intermediate"] = "experts",
        output: Any = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        if divide not in ("experts", "intermediate"):
            msg = f"divide is {divide!r}; supported: experts, intermediate"
            raise ArgumentError(msg)
        self.divide, self.use_local_output = divide, use_local_output
        self.output = Replicate() if output is None else output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        register_dtensor_rules()
        return distribute_module(
            module, device_mesh, self._shard_parameters, self._replicate_input, self._place_outputs
        )

    def _shard_parameters(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if not hasattr(module, "w13"):
            return  # the router is replicated
        if self.divide == "intermediate" and module.layout != "interleaved":
            msg = f"the layer's layout is {module.layout!r}: gate and up would fall to different ranks; build it with 'interleaved'"
            raise ShapeError(msg)
        both, inner = axes_of_weights(bool(module.transposed))
        dims = (
            {"w13": both, "w2": inner, "b13": 1}
            if self.divide == "intermediate"
            else dict.fromkeys(("w13", "w2", "b13", "b2"), 0)
        )
        for key, dim in dims.items():
            parameter = getattr(module, key)
            if parameter is not None:
                shard = distribute_tensor(parameter, mesh, [Shard(dim)])
                module.register_parameter(key, nn.Parameter(shard, requires_grad=parameter.requires_grad))

    @staticmethod
    def _replicate_input(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return (_replicated(inputs[0], mesh), *inputs[1:])

    def _place_outputs(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if isinstance(outputs, tuple):  # with the loss
            return tuple(
                self._place_output(output, Replicate() if output.dim() == 0 else self.output) for output in outputs
            )
        return self._place_output(outputs, self.output)

    def _place_output(self, output: DTensor, placement: Any) -> Tensor:
        placed = output.redistribute(placements=[placement])
        return placed.to_local() if self.use_local_output else placed
