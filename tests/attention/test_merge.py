"""Merging two results: flashmoe.merge_attention and the merge of ring attention, against the sum in float64; on a GPU one kernel."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashmoe
from flashmoe import _extension
from flashmoe.attn import merge

SHAPES = {
    "dense": (2, 3, 37, 64),
    "one column": (1, 2, 5, 1),
    "odd columns": (2, 2, 9, 59),
    "wide": (1, 2, 7, 512),
    "ragged": (41, 3, 80),
}
PARTS = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def _parts(shape: tuple[int, ...], dtype: torch.dtype, device: str, of_sums: torch.dtype | None = None) -> list[Tensor]:
    """(out, lse) of two parts; some rows see no key in one part, which then holds NaN, and one row sees none in either."""
    generator = torch.Generator().manual_seed(len(shape))
    rows = (shape[1], shape[0]) if len(shape) == 3 else shape[:-1]
    parts = []
    for out_dtype in (of_sums or dtype, dtype):
        out, lse = torch.randn(shape, generator=generator), torch.randn(rows, generator=generator) * 4
        empty = torch.rand(rows, generator=generator) < 0.2
        empty.view(-1)[0] = True
        lse[empty] = -math.inf
        out[empty.mT if len(shape) == 3 else empty] = math.nan
        parts += [out.to(out_dtype).to(device), lse.to(device)]
    return parts


def _expected(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The expected result in float64, by softmax over the two."""
    both = torch.stack((parts[1], parts[3])).double()
    weights = both.softmax(0).nan_to_num(0.0)
    weights = weights.mT if parts[0].dim() == 3 else weights
    terms = (weight[..., None] * out.double().nan_to_num(0.0) for weight, out in zip(weights, parts[::2], strict=True))
    return sum(terms, torch.zeros(())), both.logsumexp(0)


def _check(found: tuple[Tensor, Tensor], parts: list[Tensor]) -> None:
    out, lse = _expected(parts)
    eps = torch.finfo(found[0].dtype).eps
    torch.testing.assert_close(found[0].double(), out, rtol=eps, atol=max(eps / 4, 2e-6))
    torch.testing.assert_close(found[1].double(), lse, rtol=2e-6, atol=4e-6)


@PARTS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_against_the_sum(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    parts = _parts(shape, dtype, device)
    _check(flashmoe.merge_attention(*parts), parts)
    if device == "cuda" and dtype is not torch.float32:
        assert "attention_merge" in _extension.last_kernel()
        transposed = [part.mT.contiguous().mT for part in parts]
        for one, other in zip(flashmoe.merge_attention(*parts), flashmoe.merge_attention(*transposed), strict=True):
            assert torch.equal(one, other)


@PARTS
@pytest.mark.parametrize("of_sums", [torch.bfloat16, torch.float32])
def test_in_place_of_some_rows(shape: tuple[int, ...], of_sums: torch.dtype, device: str) -> None:
    """As the ring merges: the other rows are unchanged."""
    parts = _parts(shape, torch.bfloat16, device, of_sums)
    dims = (0, 1) if len(shape) == 3 else (2, 2)  # the dimensions of rows
    whole = [torch.cat((torch.full_like(part, 7.0), part), dim) for part, dim in zip(parts, dims, strict=False)]
    before, own = (
        [one.narrow(dim, first, one.shape[dim] // 2) for one, dim in zip(whole, dims, strict=True)]
        for first in (0, whole[1].shape[-1] // 2)
    )
    merge.merge_into(own[0], own[1], *parts[2:])
    _check((own[0], own[1]), parts)
    assert all((one == 7.0).all() for one in before)
    if device == "cuda":
        assert "attention_merge" in _extension.last_kernel()


@pytest.mark.parametrize("leaves", range(1, 16))
def test_the_kernel_has_the_gradients_of_torchs_operations(
    leaves: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First and second derivatives, for each subset of the four inputs; on the CPU torch's operations stand in for the kernel."""
    dtype = torch.float64 if device == "cpu" else torch.float16
    parts = [torch.randn(size, device=device) for size in ((2, 2, 5, 8), (2, 2, 5)) * 2]
    parts = [
        part.to(dtype) if part.dim() == 4 else part.to(torch.promote_types(dtype, torch.float32)) for part in parts
    ]
    given = [part.requires_grad_(bool(leaves >> index & 1)) for index, part in enumerate(parts)]
    wanted = [part for part in given if part.requires_grad]
    upstream = [torch.randn_like(parts[0]).requires_grad_(), torch.randn_like(parts[1]).requires_grad_()]

    def gradients(found: tuple[Tensor, Tensor]) -> list[Tensor]:
        count = 1 + found[1].requires_grad
        assert count == 1 + bool(leaves & 0b1010)
        first = torch.autograd.grad(found[:count], wanted, upstream[:count], create_graph=True)
        second = torch.autograd.grad(
            sum(one.double().square().sum() for one in first), [*wanted, *upstream], allow_unused=True
        )
        return [one for one in (*first, *second) if one is not None]

    plain = gradients(merge._merged(*given))
    if device == "cpu":
        monkeypatch.setattr(merge, "_has_kernel", lambda *_: True)
        monkeypatch.setattr(
            merge,
            "_call",
            lambda *some: [one.copy_(new) for one, new in zip(some[4:], merge._merged(*some[:4]), strict=True)],
        )
    found = flashmoe.merge_attention(*given)
    assert "_Merge" in type(found[0].grad_fn).__name__
    for mine, other in zip(gradients(found), plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2 if dtype is torch.float16 else 1e-12, atol=1e-2)


@pytest.mark.gpu
def test_the_same_bits_on_every_run_and_a_graph() -> None:
    parts = _parts((2, 4, 300, 128), torch.bfloat16, "cuda")
    first = flashmoe.merge_attention(*parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashmoe.merge_attention(*parts)
    for _ in range(100):
        graph.replay()
        for one, other in zip(first, captured, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("change", ["head_dim", "float64", "vmap", "compiled"])
def test_what_the_kernel_leaves_to_torch(change: str) -> None:
    parts: list[Any] = _parts((2, 3, 7, 520 if change == "head_dim" else 64), torch.float16, "cuda")
    if change == "float64":
        parts = [part.double() for part in parts]
    calls = {
        "vmap": lambda *some: torch.func.vmap(flashmoe.merge_attention)(*(one[None] for one in some)),
        "compiled": torch.compile(flashmoe.merge_attention, fullgraph=True, backend="eager"),
    }
    found = calls.get(change, flashmoe.merge_attention)(*parts)
    _check(tuple(one[0] if change == "vmap" else one for one in found), parts)


class Part:
    """An object that looks like a tensor to the rule for the kernel."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, is_cuda: bool = True) -> None:
        self.shape, self.dtype, self.is_cuda = shape, dtype, is_cuda

    def numel(self) -> int:
        return math.prod(self.shape)


@pytest.mark.parametrize(
    ("change", "has_kernel"),
    [
        ({}, True), ({"dtype_a": torch.float32}, True), ({"dtype_a": torch.bfloat16}, False), ({"dtype_a": torch.float64}, False),
        ({"dtype_a": torch.float32, "dtype_b": torch.float32}, False), ({"is_cuda": False}, False), ({"lse_a": torch.float64}, False),
        ({"lse_b": torch.float64}, False), ({"dim": 0}, False), ({"dim": 1}, True), ({"dim": 512}, True), ({"dim": 513}, False),
        ({"rows": 2**31 - 1}, True), ({"rows": 2**31}, False), ({"kind": "other"}, False), ({"is_compiling": True}, False),
    ],
)  # fmt: skip
def test_what_the_kernel_merges(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], has_kernel: bool) -> None:
    if change.get("kind") != "other":
        monkeypatch.setattr(merge, "Tensor", Part)
    monkeypatch.setattr(merge, "is_compiling", lambda: change.get("is_compiling", False))
    rows, half = (1, 1, change.get("rows", 3)), torch.float16
    outs = [
        Part((*rows, change.get("dim", 64)), change.get(f"dtype_{one}", half), change.get("is_cuda", True))
        for one in "ab"
    ]
    lses = [Part(rows, change.get(f"lse_{one}", torch.float32)) for one in "ab"]
    assert merge._has_kernel(outs[0], lses[0], outs[1], lses[1]) is has_kernel  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's warnings about itself
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)])
@pytest.mark.parametrize("how", ["plain", "no_grad", "gradient", "mapped", "tangent"])
def test_which_way_parts_are_merged(monkeypatch: pytest.MonkeyPatch, how: str, order: tuple[int, ...]) -> None:
    """With the kernel, with its autograd function, or with torch operations if torch must see the merge; in out_a's memory order."""
    used: list[Tensor] = []

    def call(*given: Tensor) -> None:
        used.append(given[4])
        for one, new in zip(given[4:], merge._merged(*given[:4]), strict=True):
            one.copy_(new)

    monkeypatch.setattr(merge, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(merge, "_call", call)
    back = sorted(range(4), key=order.__getitem__)
    out = torch.randn([(2, 3, 4, 8)[axis] for axis in order]).permute(back)
    parts = (out, torch.randn(2, 3, 4), torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4))
    expected = merge._merged(*parts)
    if how == "mapped":
        found = [one[0] for one in torch.func.vmap(flashmoe.merge_attention)(*(part[None] for part in parts))]
    elif how == "tangent":
        with forward_ad.dual_level():
            found = [
                forward_ad.unpack_dual(one).primal
                for one in flashmoe.merge_attention(forward_ad.make_dual(out, out), *parts[1:])
            ]
    else:
        asked = out if how == "plain" else out.detach().requires_grad_()
        with torch.set_grad_enabled(how == "gradient"):
            found = list(flashmoe.merge_attention(asked, *parts[1:]))
        assert found[0].requires_grad is (how == "gradient")
        assert found[0].stride() == (out.stride() if order[3] == 3 else torch.empty(out.shape).stride())
    assert len(used) == (how not in ("mapped", "tangent"))
    torch.testing.assert_close(found, list(expected))


@pytest.mark.parametrize("has_kernel", [False, True])
def test_a_part_is_merged_into_another(monkeypatch: pytest.MonkeyPatch, has_kernel: bool) -> None:
    monkeypatch.setattr(merge, "_has_kernel", lambda *_: has_kernel)
    used: list[tuple[Tensor, ...]] = []
    monkeypatch.setattr(merge, "_call", lambda *given: used.append(given))
    parts = [torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4), torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)]
    expected = merge._merged(*(part.clone() for part in parts))
    merge.merge_into(*parts)
    if has_kernel:
        assert [
            all(one is other for one, other in zip(given, (*parts, *parts[:2]), strict=True)) for given in used
        ] == [True]
    else:
        torch.testing.assert_close(parts[:2], list(expected))
