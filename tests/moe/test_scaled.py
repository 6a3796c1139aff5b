"""flashmoe.fused_moe with float8_e4m3fn weights: results compared with fp64 of the operands' values, rejected calls, torch's machinery."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashmoe
from flashmoe.errors import ArgumentError, DifferentiationError, DtypeError, FlashmoeError, ShapeError
from flashmoe.moe import scaled
from flashmoe_tools.operations.moe_scaled import formats
from flashmoe_tools.operations.moe_scaled.reference import compose, rounded
from tests.moe.layer import changed, check_that_a_graph_follows_the_routing
from tests.torch_warnings import COMPILED

pytestmark = COMPILED
E4M3, NAN, BLOCK = torch.float8_e4m3fn, formats.NAN, formats.BLOCK


@dataclass(frozen=True)
class Layer:
    """Arguments of ``fused_moe``; weights and scales of experts that are not chosen are NaN."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    w13_scale: Tensor
    w2_scale: Tensor
    x_scale: Tensor | None = None
    shared: Tensor | None = None
    expert_map: Tensor | None = None
    activation: str = "swiglu"

    def __call__(self, **changes: Any) -> Tensor:
        arguments = {**vars(self), **changes}
        return flashmoe.fused_moe(**arguments)


def ceil(size: int) -> int:
    return -(-size // 128)


def make(
    device: str,
    tokens: int = 11,
    experts: int = 4,
    top_k: int = 3,
    hidden: int = 256,
    intermediate: int = 256,
    seed: int = 0,
) -> Layer:
    """Ids of one expert are out of range; another expert is never chosen."""
    random = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=random) * 80).clamp(-448, 448).to(E4M3)

    def scales(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=random) + 0.2) / (80 * math.sqrt(hidden))

    ids = torch.rand((tokens, experts + 1), generator=random).argsort(1)[:, :top_k]
    ids = torch.where(ids == 1, experts + 3, ids)
    w13, w2 = values(experts, 2 * intermediate, hidden), values(experts, hidden, intermediate)
    s13 = scales(experts, ceil(2 * intermediate), ceil(hidden))
    s2 = scales(experts, ceil(hidden), ceil(intermediate))
    nobody = [expert for expert in range(experts) if not (ids == expert).any()]
    w13.view(torch.uint8)[nobody], w2.view(torch.uint8)[nobody] = NAN, NAN
    s13[nobody], s2[nobody] = float("nan"), float("nan")
    x = torch.randn((tokens, hidden), generator=random).bfloat16()
    weights = torch.rand((tokens, top_k), generator=random)
    x, w13, w2, weights, ids, s13, s2 = (t.to(device) for t in (x, w13, w2, weights, ids, s13, s2))
    return Layer(x, w13, w2, weights, ids, s13, s2)


def expected(layer: Layer) -> Tensor:
    """fp64, except for the two quantisations. Ids are those of the layer."""
    x = rounded(layer.x.double()) if layer.x_scale is None else formats.dequantize(layer.x, layer.x_scale)
    weights = (layer.w13, layer.w2, layer.w13_scale, layer.w2_scale, layer.topk_weights.double(), layer.topk_ids)
    return compose(x, *weights, torch.float64, shared=layer.shared, activation=layer.activation)


def assert_close(out: Tensor, reference: Tensor, limit: float = 1.5e-2) -> None:
    """A sum on the boundary between two e4m3 values may be rounded to either: an error of 2^-4 in one of at least 128 terms."""
    assert torch.isfinite(out).all()
    error = (out.double() - reference).abs()
    assert error.norm() <= limit * reference.norm() + 1e-12
    assert error.max() <= 4e-2 * reference.abs().max() + 1e-12


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu"])
def test_beside_fp64(activation: str, device: str) -> None:
    layer = replace(make(device), activation=activation)
    assert_close(layer(), expected(layer))


@settings(max_examples=8, deadline=None)
@given(
    tokens=st.integers(1, 20),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 4),
    hidden=st.sampled_from([128, 256, 384]),
    intermediate=st.sampled_from([128, 256]),
    seed=st.integers(0, 99),
)
def test_any_sizes(
    device: str, tokens: int, experts: int, top_k: int, hidden: int, intermediate: int, seed: int
) -> None:
    layer = make(device, tokens, experts, min(top_k, experts), hidden, intermediate, seed)
    # If an expert has a single token, one of its 128 terms rounded to the other side is 1.6% (tokens=11, experts=1, seed=44 on an H200).
    assert_close(layer(), expected(layer), limit=3e-2)


def test_sizes_of_part_of_a_block_on_the_cpu() -> None:
    layer = make("cpu", hidden=200, intermediate=72)
    assert_close(layer(), expected(layer))


def test_float16_shared_and_expert_map(device: str) -> None:
    layer = make(device)
    shared = torch.randn_like(layer.x).half()
    layer = replace(layer, x=layer.x.half(), shared=shared)
    assert layer().dtype is torch.float16
    assert_close(layer(), expected(layer))
    experts = layer.w13.shape[0]
    table = torch.full((experts + 5,), -1, dtype=torch.int32, device=device)
    table[torch.arange(experts) + 2] = torch.arange(experts, dtype=torch.int32, device=device)
    moved = torch.where(layer.topk_ids < experts, layer.topk_ids + 2, 0)
    assert torch.equal(layer(topk_ids=moved, expert_map=table), layer())
    same = torch.arange(experts, dtype=torch.int32, device=device)
    assert torch.equal(layer(expert_map=same), layer())


def test_x_that_comes_quantised_gives_the_same_bits(device: str) -> None:
    layer = make(device)
    values, scales = formats.quantize(layer.x)
    out = layer(x=values.view(E4M3), x_scale=scales)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, layer())


def test_nan_and_zeros_stay_in_their_rows(device: str) -> None:
    layer = make(device)
    layer.x[3] = 0.0
    clean = layer()
    layer.x[5, 7] = float("nan")
    layer.x[6, 200] = float("inf")
    out = layer()
    others = torch.ones(len(out), dtype=torch.bool, device=device)
    others[5:7] = False
    assert torch.equal(out[others], clean[others])
    assert out[5:7].isnan().all()
    assert torch.equal(out[3], torch.zeros_like(out[3]))


@pytest.mark.parametrize(
    ("tokens", "experts", "family"), [(40, 4, "sm90"), (9, 40, "")], ids=["one family", "few rows"]
)
def test_a_token_has_its_bits_whatever_else_is_there(
    device: str, tokens: int, experts: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Plain products with shorter sums stop using the kernel for few rows at an eighth of a row.
    layer = make(device, tokens, experts, hidden=384, intermediate=512)
    if family:
        monkeypatch.setenv("FLASHMOE_KERNEL", family)  # otherwise a single token may use the kernel for few rows
    out = layer()
    assert_close(out, expected(layer))
    assert torch.equal(layer(), out)
    for part in (slice(4, 5), slice(0, tokens, 3)):
        some = {name: getattr(layer, name)[part] for name in ("x", "topk_weights", "topk_ids")}
        if device == "cuda":  # the order of the CPU's float32 products depends on sizes
            assert torch.equal(layer(**some), out[part])
        else:
            assert_close(layer(**some), out[part].double())


def test_memory_of_any_strides(device: str) -> None:
    layer = make(device)
    out = layer()
    wide = torch.zeros(layer.w13.shape[0], layer.w13.shape[1], layer.w13.shape[2] + 3, device=device).to(E4M3)
    w13 = wide[..., : layer.w13.shape[2]].copy_(layer.w13)
    x = layer.x.mT.contiguous().mT
    w2 = layer.w2.mT.contiguous().mT
    assert torch.equal(layer(w13=w13, x=x, w2=w2, w2_scale=layer.w2_scale.mT.contiguous().mT), out)


def test_no_token_and_out(device: str) -> None:
    layer = make(device)
    none = {name: getattr(layer, name)[:0] for name in ("x", "topk_weights", "topk_ids")}
    assert layer(**none).shape == (0, 256)
    out = torch.full_like(layer.x, float("nan"))
    assert layer(out=out) is out
    assert torch.equal(out, layer())
    with pytest.raises(ShapeError, match="out has shape"):
        layer(out=out[1:])


def test_compile_autocast_and_opcheck(device: str) -> None:
    layer = make(device)
    out = layer()

    others = {name: value for name, value in vars(layer).items() if name != "x"}

    def call(x: Tensor) -> Tensor:
        return flashmoe.fused_moe(x, **others)

    assert torch.equal(torch.compile(call, fullgraph=True)(layer.x), out)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(layer(x=layer.x.float()), out)
    name = "_fused_moe_scaled" if device == "cuda" else "_fused_moe_scaled_torch"
    tensors = (layer.x, layer.w13, layer.w2, layer.w13_scale, layer.w2_scale, layer.topk_weights, layer.topk_ids)
    torch.library.opcheck(
        getattr(torch.ops.flashmoe, name).default,
        (*tensors, None, None, None, "swiglu"),
        # test_schema multiplies 8-bit tensors, which torch does not support
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.gpu
def test_a_cuda_graph_follows_the_routing() -> None:
    check_that_a_graph_follows_the_routing(make("cuda"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"w2_scale": None}, ArgumentError, "w2_scale is None"),
        ({"w13_scale": None, "w2_scale": None}, ArgumentError, "w13_scale is None"),
        ({"w13": torch.bfloat16}, DtypeError, "w13 is bfloat16, and there are scales"),
        ({"x": E4M3}, ArgumentError, "x_scale is None"),
        ({"x_scale": (11, 2)}, ArgumentError, "x is bfloat16; remove x_scale="),
        ({"b2": (4, 256)}, ArgumentError, "b2 is given with float8_e4m3fn"),
        ({"layout": "interleaved"}, ArgumentError, "layout is given"),
        ({"transposed": True}, ArgumentError, "transposed is given"),
        ({"weights_on_input": True}, ArgumentError, "weights_on_input is given"),
    ],
    ids=str,
)
def test_refusals(device: str, changes: dict[str, Any], error: type[FlashmoeError], message: str) -> None:
    layer = make(device)
    with pytest.raises(error, match=message):
        layer(**changed(layer, changes))


def test_an_out_that_cannot_take_the_result_is_refused(device: str) -> None:
    layer = make(device)
    row = torch.empty_like(layer.x[:1])
    with pytest.raises(ShapeError, match="out must have contiguous rows that do not overlap"):
        layer(out=row.expand(layer.x.shape))
    with pytest.raises(DtypeError, match="out is float32; bfloat16 is needed"):
        layer(out=torch.empty_like(layer.x, dtype=torch.float32))


@pytest.mark.gpu
def test_a_gpu_needs_whole_blocks() -> None:
    with pytest.raises(ShapeError, match=r"the hidden size is 200; .* multiple of 128"):
        make("cuda", hidden=200)()


def test_gradients_are_refused(device: str) -> None:
    layer = make(device)
    with pytest.raises(DifferentiationError, match=r"under torch\.no_grad"):
        layer(x=layer.x.clone().requires_grad_())
    with pytest.raises(DifferentiationError, match=r"under torch\.no_grad"):
        layer(out=torch.empty_like(layer.x).requires_grad_())
    with pytest.raises(DifferentiationError, match=r"under torch\.no_grad"):
        torch.func.grad(lambda weights: layer(topk_weights=weights).float().sum())(layer.topk_weights)
    with torch.no_grad():
        assert layer(x=layer.x.clone().requires_grad_()).shape == layer.x.shape


def test_what_torch_computes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make("cpu")
    monkeypatch.setenv("FLASHMOE_FALLBACK", "warn")
    with pytest.warns(
        UserWarning, match="falls back to torch for fused_moe with float8_e4m3fn weights: tensors on cpu"
    ):
        layer()
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    with pytest.raises(ArgumentError, match="FLASHMOE_FALLBACK=error forbids"):
        layer()


@pytest.mark.parametrize("reason", ["", None])
def test_the_kernels_are_asked_where_there_are_some(monkeypatch: pytest.MonkeyPatch, reason: str | None) -> None:
    """The kernels do not support CPU tensors, which torch reports."""
    monkeypatch.setattr(scaled, "_why_torch", lambda x: reason)
    layer = make("cpu")
    if reason is None:
        with pytest.raises(NotImplementedError, match=r"_fused_moe_scaled'.*CPU"):
            layer()
    else:
        assert layer().shape == layer.x.shape
