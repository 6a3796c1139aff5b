"""Checks that DTensors, parallelize_module and FSDP2 give the results of a single process. Run by jobs.py."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flashmoe
from flashmoe.distributed import AttentionParallel, MoEParallel, register_dtensor_rules
from flashmoe.errors import ArgumentError, ShapeError

NO = Replicate()


def mesh_of(size: int) -> DeviceMesh:
    register_dtensor_rules()
    register_dtensor_rules()
    return init_device_mesh("cuda" if torch.distributed.get_backend() == "nccl" else "cpu", (size,))


def place(tensors: list[Tensor], mesh: DeviceMesh, places: list[Any]) -> list[Any]:
    return [
        distribute_tensor(tensor.detach(), mesh, [one]).requires_grad_(tensor.requires_grad)
        for tensor, one in zip(tensors, places, strict=True)
    ]


def random(mesh: DeviceMesh, *shape: int) -> Tensor:
    dtype = torch.float32 if mesh.device_type == "cpu" else torch.bfloat16
    return torch.randn(shape).to(mesh.device_type, dtype).requires_grad_()


def same(found: Any, expected: Tensor) -> None:
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    limit = 2e-5 if expected.device.type == "cpu" else 3e-2  # bfloat16 is compared with float32 on GPUs
    assert whole.shape == expected.shape
    error, scale = (whole.float() - expected.float()).abs().max(), expected.float().abs().max().clamp(min=1)
    assert error <= limit * scale, (error, scale)


def compare(call: Any, tensors: list[Tensor], mesh: DeviceMesh, ways: list[tuple[list[Any], Any]]) -> None:
    """Compares ``call`` on the tensors with DTensors in each placement: result, its placement, gradients, and a call without gradients."""
    expected = call(*tensors)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    gradients = torch.autograd.grad(expected.float().square().sum(), wanted)
    for places, out_place in ways:
        parts = place(tensors, mesh, places)
        out = call(*parts)
        assert out.placements == (out_place,)
        same(out, expected)
        needed = [part for part in parts if part.requires_grad]
        loss = out.redistribute(placements=[NO if out_place == Partial() else out_place]).float().square().sum()
        for found, gradient in zip(torch.autograd.grad(loss, needed), gradients, strict=True):
            same(found, gradient)
        with torch.no_grad():
            same(call(*parts), expected)


def attention(rank: int, size: int) -> None:
    mesh = mesh_of(size)
    torch.manual_seed(4)
    qkv = [random(mesh, 2, heads, 16, 64) for heads in (4, 2, 2)]
    every: list[tuple[list[Any], Any]] = [([one] * 3, one) for one in (Shard(0), Shard(1), NO)]
    compare(lambda q, k, v: flashmoe.attention(q, k, v, causal=True), qkv, mesh, every)
    sinks = torch.randn(4, device=qkv[0].device).requires_grad_()
    banded: list[tuple[list[Any], Any]] = [
        ([one] * 3 + [place], one) for one, place in ((Shard(0), NO), (Shard(1), Shard(0)))
    ]
    compare(lambda q, k, v, s: flashmoe.attention(q, k, v, window=(5, 0), sinks=s), [*qkv, sinks], mesh, banded)
    lengths = torch.tensor([0, 5, 5, 16], dtype=torch.int32, device=qkv[0].device)
    ragged = [random(mesh, 16, heads, 64) for heads in (4, 2, 2)]

    def varlen(q: Any, k: Any, v: Any) -> Any:
        return flashmoe.attention_varlen(q, k, v, lengths, lengths, 11, 11, causal=True)

    compare(varlen, ragged, mesh, [([Shard(1)] * 3, Shard(1)), ([NO] * 3, NO)])
    divided = place(qkv, mesh, [Shard(2)] * 3)
    with pytest.raises(ShapeError, match=r"sharded by its sequence.*context_parallel_attention"):
        flashmoe.attention(*divided)
    with pytest.raises(ShapeError, match=r"rows of all sequences"):
        varlen(*place(ragged, mesh, [Shard(0)] * 3))
    with pytest.raises(ArgumentError, match="k is a plain tensor among DTensors"):
        flashmoe.attention(place(qkv, mesh, [NO] * 3)[0], qkv[1], qkv[2])
    one_head = place([t[:, :1] for t in qkv], mesh, [NO, Shard(1), NO])
    with pytest.raises(ShapeError, match=r"by heads over \d ranks"):
        flashmoe.attention(*one_head)


def caches(rank: int, size: int) -> None:
    mesh = mesh_of(size)
    torch.manual_seed(5)
    with torch.no_grad():
        q, new_k, new_v = random(mesh, 2, 4, 1, 64), random(mesh, 2, 2, 1, 64), random(mesh, 2, 2, 1, 64)
        device, used = q.device, torch.tensor([3, 7], dtype=torch.int32, device=q.device)
        dense = [random(mesh, 2, 2, 9, 64) for _ in range(2)]
        pages = [random(mesh, 4, 8, 2, 64) for _ in range(2)]
        table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device=device)
        for cache, block_table, kinds in (
            (dense, None, ((Shard(0), Shard(0)), (Shard(1), Shard(1)))),
            (pages, table, ((Shard(1), Shard(2)),)),
        ):
            whole = [tensor.clone() for tensor in cache]
            expected = flashmoe.attention_with_kvcache(
                q, whole[0], whole[1], new_k, new_v, cache_seqlens=used, block_table=block_table
            )
            for one, in_cache in kinds:
                parts = place([q, *cache, new_k, new_v], mesh, [one, in_cache, in_cache, one, one])
                counts: Any = distribute_tensor(used, mesh, [Shard(0) if one == Shard(0) else NO])
                shown: Any = None if block_table is None else distribute_tensor(block_table, mesh, [NO])
                out: Any = flashmoe.attention_with_kvcache(*parts, cache_seqlens=counts, block_table=shown)
                assert out.placements == (one,)
                same(out, expected)
                same(parts[1], whole[0])
        halves = [
            flashmoe.attention(q, t[:, :, part], t[:, :, part], return_lse=True)
            for t in dense[:1]
            for part in (slice(0, 4), slice(4, 9))
        ]
        merged, _ = flashmoe.merge_attention(*halves[0], *halves[1])
        placed = [distribute_tensor(tensor, mesh, [Shard(1)]) for half in halves for tensor in half]
        same(flashmoe.merge_attention(*placed)[0], merged)


def layer(rank: int, size: int) -> None:
    mesh = mesh_of(size)
    torch.manual_seed(6)
    tokens, experts, hidden, inner, top_k = 6, 4, 16, 32, 2
    x, w13, w2 = (
        random(mesh, tokens, hidden),
        random(mesh, experts, 2 * inner, hidden),
        random(mesh, experts, hidden, inner),
    )
    b13, b2, shared = random(mesh, experts, 2 * inner), random(mesh, experts, hidden), random(mesh, tokens, hidden)
    logits = torch.randn(tokens, experts, device=x.device, requires_grad=True)
    given = [x, w13, w2, b13, b2, shared, logits]

    def call(x: Any, w13: Any, w2: Any, b13: Any, b2: Any, shared: Any, logits: Any) -> Any:
        weights, ids = flashmoe.topk_route(logits, top_k)
        return flashmoe.fused_moe(x, w13, w2, weights, ids, b13=b13, b2=b2, shared=shared, layout="interleaved")

    ways: list[tuple[list[Any], Any]] = [
        ([NO] * 7, NO),
        ([Shard(0), NO, NO, NO, NO, Shard(0), Shard(0)], Shard(0)),
        ([NO, Shard(0), Shard(0), Shard(0), Shard(0), NO, NO], Partial()),
        ([NO, Shard(1), Shard(2), Shard(1), NO, NO, NO], Partial()),
    ]
    compare(call, given, mesh, ways)
    with pytest.raises(ShapeError, match=r"tokens.*experts.*ExpertParallel"):
        call(*place(given, mesh, [Shard(0), Shard(0), Shard(0), NO, NO, NO, NO]))
    weights, ids = (distribute_tensor(t, mesh, [NO]) for t in flashmoe.topk_route(logits.detach(), top_k))
    placed = place([x, w13, w2], mesh, [NO, Shard(1), NO])
    with pytest.raises(ShapeError, match=r"w13 is sharded by its second axis.*tokens, experts, or replicated"):
        flashmoe.fused_moe(placed[0], placed[1], placed[2], weights, ids)
    with pytest.raises(ShapeError, match="routing needs all"):
        flashmoe.topk_route(distribute_tensor(logits.detach(), mesh, [Shard(1)]), top_k)
    ends = torch.tensor([1, 3, 3, 6], dtype=torch.int32, device=x.device)
    compare(
        lambda a, b: flashmoe.grouped_mm(a, b, ends if type(a) is Tensor else distribute_tensor(ends, mesh, [NO])),
        [x, w2],
        mesh,
        [([NO, Shard(2)], Shard(1)), ([Shard(1), Shard(1)], Partial()), ([NO, NO], NO)],
    )
    with pytest.raises(ShapeError, match="neither rows nor experts"):
        flashmoe.grouped_mm(distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w2, mesh, [NO]), ends)


class Block(nn.Module):
    """A model layer as written for one process."""

    def __init__(self, dim: int = 32, layout: Any = "concat") -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(dim, 64, bias=False),
            nn.Linear(dim, 32, bias=False),
            nn.Linear(dim, 32, bias=False),
        )
        self.o = nn.Linear(64, dim, bias=False)
        self.moe = flashmoe.MoE(dim, 16, 4, 2, shared_intermediate=8, layout=layout, bias=layout != "concat")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(flashmoe.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))
        moved: Tensor = x + self.moe(x)
        return moved


def models(rank: int, size: int) -> None:
    """parallelize_module and FSDP2 on a model that is not aware of them; the single-process reference gets the whole batch."""
    mesh = mesh_of(size)
    device, dtype = mesh.device_type, torch.float32 if mesh.device_type == "cpu" else torch.bfloat16
    for layout, divide in (("concat", "experts"), ("interleaved", "intermediate"), ("concat", "")):
        torch.manual_seed(7)
        reference = Block(layout=layout).to(device, dtype)
        model = Block(layout=layout).to(device, dtype)
        model.load_state_dict(reference.state_dict())
        x = torch.randn(2 * size, 8, 32).to(device, dtype)
        expected = reference(x)
        expected.square().sum().backward()
        if divide:
            rows, columns = RowwiseParallel(), ColwiseParallel()
            style = MoEParallel(divide=divide)  # type: ignore[arg-type]
            parallelize_module(
                model, mesh, {"q": columns, "k": ColwiseParallel(), "v": ColwiseParallel(), "o": rows, "moe": style}
            )
            own = slice(None)
        else:
            fully_shard(model.moe, mesh=mesh)
            fully_shard(model, mesh=mesh)
            own = slice(2 * rank, 2 * rank + 2)
        out = model(x[own])
        same(out, expected[own].detach())
        (out.square().sum() * (1 if divide else size)).backward()
        for (name, parameter), (_, whole) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            assert parameter.grad is not None, name
            assert whole.grad is not None
            same(parameter.grad, whole.grad)
    concat = Block().to(device, dtype)
    with pytest.raises(ShapeError, match="interleaved"):
        parallelize_module(concat, mesh, {"moe": MoEParallel(divide="intermediate")})
    with pytest.raises(ArgumentError, match="divide is 'rows'"):
        MoEParallel(divide="rows")  # type: ignore[arg-type]


def _exchanges(module: nn.Module, given: list[Tensor], names: dict[str, Any]) -> list[dict[str, int]]:
    """How often each collective is called in forward and backward."""
    found = []
    with CommDebugMode() as forward:
        out = module(*given, **names)
    with CommDebugMode() as backward:
        out.float().square().sum().backward()
    for mode in (forward, backward):
        counts: Any = mode.get_comm_counts()
        found.append({str(name).rsplit(".", maxsplit=1)[-1]: count for name, count in counts.items()})
    return found


def exchanges(rank: int, size: int) -> None:
    """Tensor parallel layers give the results of a single process, and communicate no more than necessary."""
    mesh = mesh_of(size)
    device, dtype = mesh.device_type, torch.float32 if mesh.device_type == "cpu" else torch.bfloat16
    torch.manual_seed(11)
    x, context = (torch.randn(2, rows, 64).to(device, dtype).requires_grad_() for rows in (8, 6))
    cases: list[tuple[nn.Module, Any, dict[str, Any], int]] = [
        (flashmoe.Attention(64, 2 * size, size, causal=True, bias=True), AttentionParallel(), {}, 1),
        (flashmoe.Attention(64, 2 * size, size), AttentionParallel(), {"context": context}, 2),
        # x's gradient, and the small one of the routing weights
        (flashmoe.MoE(64, 32, 2 * size, 2), MoEParallel(), {}, 2),
        (
            flashmoe.MoE(64, 32, 4, 2, layout="interleaved", shared_intermediate=16),
            MoEParallel(divide="intermediate"),
            {},
            2,
        ),
        (flashmoe.MoE(64, 32, 2 * size, 2, scoring="sigmoid"), MoEParallel(), {}, 2),
    ]
    for module, style, names, back in cases:
        reference = module.to(device, dtype)
        divided = nn.Sequential(copy.deepcopy(reference))
        parallelize_module(divided, mesh, {"0": style})
        inputs = [x, *names.values()]
        expected = reference(x, **names)
        gradients = torch.autograd.grad(expected.float().square().sum(), [*inputs, *reference.parameters()])
        same(divided[0](x, **names), expected)
        own = [tensor.detach().clone().requires_grad_() for tensor in inputs]  # the mode leaves hooks on its inputs
        found = _exchanges(divided[0], own[:1], dict(zip(names, own[1:], strict=True)))
        assert found == [{"all_reduce": 1}, {"all_reduce": back}], (divided, found)
        grads = [tensor.grad for tensor in (*own, *divided.parameters())]
        for grad, gradient in zip(grads, gradients, strict=True):
            assert grad is not None
            same(grad, gradient)
    rows = AttentionParallel(output=Shard(1), use_local_output=False)
    sharded = parallelize_module(nn.Sequential(copy.deepcopy(cases[0][0])), mesh, {"0": rows})[0]  # type: ignore[index]
    assert _exchanges(sharded, [x.detach()], {})[0] == {"reduce_scatter_tensor": 1}
    if size > 1:
        with pytest.raises(ShapeError, match="has 1 key and value heads"):
            parallelize_module(flashmoe.Attention(64, 4, 1), mesh, AttentionParallel())


JOBS = {
    "exchanges": exchanges,
    "dtensor": attention,
    "dtensor_caches": caches,
    "dtensor_layer": layer,
    "models": models,
}
