"""flashmoe.fused_moe with mxfp4 weights: the bits of the bfloat16 layer on dequantised weights, rejected calls, torch's machinery."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe.errors import ArgumentError, DifferentiationError, DtypeError, FlashmoeError, ShapeError
from flashmoe.moe.mxfp4 import dequantize
from flashmoe.moe.packed import can_pack, pack_mxfp4, unpack_mxfp4
from flashmoe_tools.operations.moe_mxfp4 import formats
from flashmoe_tools.operations.moe_mxfp4.reference import compose
from tests.moe.layer import changed, check_that_a_graph_follows_the_routing

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@dataclass(frozen=True)
class Layer:
    """Arguments of ``fused_moe``. Scales of experts that are not chosen are NaN."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    w13_scale: Tensor | None
    w2_scale: Tensor | None
    b13: Tensor | None = None
    b2: Tensor | None = None
    shared: Tensor | None = None
    expert_map: Tensor | None = None
    activation: str = "swiglu"
    layout: str = "concat"

    def __call__(self, **changes: Any) -> Tensor:
        return flashmoe.fused_moe(**{**vars(self), **changes})

    def packed(self) -> Layer:
        gated: Any = self.layout
        w13, w2 = pack_mxfp4(self.w13, self.w13_scale, gated=gated), pack_mxfp4(self.w2, self.w2_scale)
        return replace(self, w13=w13, w2=w2, w13_scale=None, w2_scale=None)

    def in_bfloat16(self) -> Tensor:
        """The expected result: the layer with 16-bit weights, by the format's definition."""
        w13, w2 = formats.as_bfloat16(self.w13, self.w13_scale), formats.as_bfloat16(self.w2, self.w2_scale)
        return self(w13=w13, w2=w2, w13_scale=None, w2_scale=None)


def make(
    device: str,
    tokens: int = 11,
    experts: int = 4,
    top_k: int = 3,
    hidden: int = 160,
    intermediate: int = 96,
    seed: int = 0,
    **more: Any,
) -> Layer:
    """Biases and the activation of gpt-oss. Ids of one expert are out of range, and with enough experts one is never chosen."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.rand((tokens, experts + 1), generator=random).argsort(1)[:, :top_k]
    ids = torch.where(ids == 1, experts + 3, ids)

    def weights(n: int, k: int) -> tuple[Tensor, Tensor]:
        codes, scales = formats.encode(torch.randn((experts, n, k), generator=random) / math.sqrt(k))
        scales[[expert for expert in range(experts) if not (ids == expert).any()]] = formats.NAN
        return codes, scales

    (w13, s13), (w2, s2) = weights(2 * intermediate, hidden), weights(hidden, intermediate)
    x = torch.randn((tokens, hidden), generator=random).bfloat16()
    chosen = torch.rand((tokens, top_k), generator=random)
    b13 = torch.randn((experts, 2 * intermediate), generator=random).bfloat16()
    b2 = torch.randn((experts, hidden), generator=random).bfloat16()
    names = ("x", "w13", "w2", "topk_weights", "topk_ids", "w13_scale", "w2_scale", "b13", "b2")
    tensors = (x, w13, w2, chosen, ids, s13, s2, b13, b2)
    given = {name: tensor.to(device) for name, tensor in zip(names, tensors, strict=True)}
    return Layer(**{"activation": "clamped_swiglu", "layout": "interleaved", **given, **more})


def assert_same(layer: Layer) -> None:
    assert_equal(layer(), layer.in_bfloat16())


def assert_equal(out: Tensor, expected: Tensor) -> None:
    """Equality, where NaN equals NaN and infinities differ from large numbers."""
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.masked_fill(out.isnan(), 0.0), expected.masked_fill(expected.isnan(), 0.0))


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"layout": "concat", "activation": "swiglu"},
        {"tokens": 1, "experts": 6, "top_k": 4, "hidden": 2880, "intermediate": 32},
        {"tokens": 9, "experts": 20, "hidden": 352, "intermediate": 96, "layout": "concat"},
        {"tokens": 300, "experts": 3, "top_k": 2, "hidden": 352, "intermediate": 352, "seed": 3},
        {"tokens": 70, "experts": 2, "top_k": 1, "hidden": 32, "intermediate": 32, "layout": "concat", "seed": 4},
    ],
    ids=["few tokens", "concat", "one token", "many experts", "tiles", "smallest"],
)
def test_has_the_bits_of_the_bfloat16_layer(device: str, sizes: dict[str, Any]) -> None:
    assert_same(make(device, **sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 39, 390])
def test_tiles_have_the_bits_of_the_kernel_for_few_rows(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens are forced to use tiles; the first of many tokens, called separately, have few rows."""
    layer = make("cuda", tokens=tokens, experts=3, top_k=1, hidden=352, intermediate=320, seed=6)
    some = {name: getattr(layer, name)[:8] for name in ("x", "topk_weights", "topk_ids")}
    few = layer(**some)
    monkeypatch.setenv("FLASHMOE_KERNEL", "sm90")
    assert torch.equal(layer()[:8], few)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 39])
def test_the_kernels_of_compute_capability_8_0_are_as_exact(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make("cuda", tokens=tokens, experts=3, top_k=1, hidden=352, intermediate=320, seed=6)
    expected = layer.in_bfloat16()
    monkeypatch.setenv("FLASHMOE_KERNEL", "sm80")
    assert_equal(layer(), expected)
    assert "_few_rows_sm80" in flashmoe._extension.last_kernel()


@pytest.mark.parametrize("which", ["w13", "w2"])
@pytest.mark.parametrize("repeats", [1, 20], ids=["few rows", "tiles"])
def test_every_code_times_every_scale(device: str, repeats: int, which: str) -> None:
    """Expert e has scale e and one nonzero weight, for each code in turn and in either half of a byte: the result is that weight."""
    experts, width = 256, 32
    scales = (
        torch.arange(experts, dtype=torch.uint8, device=device)[:, None, None].expand(experts, width, 1).contiguous()
    )
    even = torch.full_like(scales, 127)
    zeros = torch.zeros(experts, width, width // 2, dtype=torch.uint8, device=device)
    units, row = zeros.clone(), torch.arange(width, device=device)
    units[:, row, row // 2] = torch.where(row % 2 == 0, 2, 32).to(torch.uint8)
    # The gate is 1, so that up keeps its sign.
    bias = torch.cat((torch.ones(experts, width), torch.zeros(experts, width)), 1).to(device, torch.bfloat16)
    options: dict[str, Any] = {"b13": bias, "activation": "reglu"}
    ids = torch.arange(experts, dtype=torch.int32, device=device).repeat(repeats)[:, None]
    routing = (torch.ones(len(ids), 1, device=device), ids)
    eye, even_gate = torch.eye(width, dtype=torch.bfloat16, device=device), torch.cat((zeros, zeros), 2).bfloat16()
    for code, column in itertools.product(range(16), (6, 7)):
        codes = zeros.clone()
        codes[:, 0, column // 2] = code << (4 * (column % 2))
        numbers = formats.as_bfloat16(codes[:, 0], scales[:, 0])[:, column]
        weights = torch.where(scales == formats.NAN, torch.nan, 0.0).bfloat16().repeat(1, 1, width)
        weights[:, 0, column] = numbers
        x = eye[[column] * len(ids)]
        if which == "w13":
            packed = (torch.cat((zeros, codes), 1), units, torch.cat((even, scales), 1), even)
            in_16_bits = (torch.cat((even_gate, weights), 1), eye.expand(experts, -1, -1))
        else:
            packed = (torch.cat((zeros, units), 1), codes, torch.cat((even, even), 1), scales)
            in_16_bits = (torch.cat((even_gate, eye.expand(experts, -1, -1)), 1), weights)
        out = flashmoe.fused_moe(x, *packed[:2], *routing, **options, w13_scale=packed[2], w2_scale=packed[3])
        assert_equal(out, flashmoe.fused_moe(x, *in_16_bits, *routing, **options))
        found = out[:, 0].view(repeats, experts)
        held = (numbers.abs() >= 2.0**-126) | (numbers == 0)  # smaller values may become zero in a sum
        assert_equal(found[:, held], numbers[held].expand(repeats, -1))
        assert found[:, formats.NAN].isnan().all()
        assert found[:, 254].isinf().all() == (code % 8 >= 4)  # 2^127 times 2 or more


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 20, 39, 90, 150, 600, 1500])
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_packed_weights_have_the_bits_of_the_bfloat16_layer(tokens: int, layout: str) -> None:
    """Every width of every tile; 64 columns that are divided unevenly between consumers; an odd and an even number of blocks of k."""
    sizes = {"experts": 5 if tokens > 1 else 16, "top_k": 2, "hidden": 320, "intermediate": 448, "seed": tokens}
    layer = make("cuda", tokens=tokens, layout=layout, **sizes)
    shared = torch.randn_like(layer.x)
    layer = replace(layer, activation="clamped_swiglu" if layout == "interleaved" else "geglu", shared=shared)
    out = layer.packed()()
    assert "mxfp4_packed" in flashmoe._extension.last_kernel()
    assert_equal(out, layer.in_bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["m16", "m16_wide"])
@pytest.mark.parametrize("is_gated", [False, True])
def test_packed_tiles_of_many_weight_rows_have_those_bits(tile: str, is_gated: bool) -> None:
    """In the first or the second product, with enough columns for waves of tiles. Up to 16 rows per expert, and a few more."""
    columns = 1920 if tile == "m16" else 2304
    sizes = {"hidden": 192, "intermediate": columns // 2} if is_gated else {"hidden": columns, "intermediate": 128}
    layer = make("cuda", tokens=200, experts=64, top_k=2, seed=columns, **sizes)
    out = layer.packed()()
    if is_gated and torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert flashmoe._extension.last_kernel().endswith(f"bf16_{tile}")
    assert_equal(out, layer.in_bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("repeats", [1, 12, 40, 130])
def test_packed_codes_and_scales_of_every_kind(repeats: int) -> None:
    """Random codes and scales, including NaN and infinity: the same as the kernels for unpacked weights, which are tested with every code and scale."""
    layer = make("cuda", 8, 8, 1, 128, 64, seed=9)
    generator = torch.Generator("cuda").manual_seed(5)
    changed = {}
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        changed[name] = torch.randint(
            0, 256, getattr(layer, name).shape, dtype=torch.uint8, device="cuda", generator=generator
        )
    ids = torch.arange(8, dtype=torch.int32, device="cuda").repeat(repeats)[:, None]
    x = torch.zeros(len(ids), 128, device="cuda", dtype=torch.bfloat16)
    x[torch.arange(len(ids)), torch.arange(len(ids)) * 7 % 128] = 1
    layer = replace(
        layer, **changed, x=x, topk_ids=ids, topk_weights=torch.ones(len(ids), 1, device="cuda"), b13=None, b2=None
    )
    assert_equal(layer.packed()(), layer())
    quiet = replace(layer, w2_scale=torch.full_like(changed["w2_scale"], 127), activation="reglu")
    assert_equal(quiet.packed()(), quiet())


@pytest.mark.gpu
def test_packed_tokens_have_their_bits_whatever_else_is_there() -> None:
    """In all tiles, because the first of many tokens, called separately, have few rows."""
    layer = make("cuda", tokens=1400, experts=4, top_k=2, hidden=192, intermediate=128, seed=6).packed()
    out = layer()
    assert torch.equal(layer(), out)
    for tokens in (1, 7, 30, 90, 400):
        some = {name: getattr(layer, name)[:tokens] for name in ("x", "topk_weights", "topk_ids")}
        assert torch.equal(layer(**some), out[:tokens])


@pytest.mark.gpu
def test_packed_weights_in_a_graph_and_compiled() -> None:
    layer = make("cuda", hidden=192, intermediate=128).packed()
    check_that_a_graph_follows_the_routing(layer)
    others = {name: value for name, value in vars(layer).items() if name != "x"}
    assert torch.equal(torch.compile(lambda x: flashmoe.fused_moe(x, **others), fullgraph=True)(layer.x), layer())
    tensors = (layer.x, layer.w13, layer.w2, None, None, layer.topk_weights, layer.topk_ids)
    arguments = (*tensors, layer.b13, layer.b2, None, None, layer.activation, layer.layout)
    torch.library.opcheck(torch.ops.flashmoe._fused_moe_mxfp4.default, arguments)
    experts = {name: getattr(layer, name)[1:] for name in ("w13", "w2", "b13", "b2")}
    moved = layer.topk_ids - 1
    apart = {**experts, "w13": experts["w13"].clone(), "w2": experts["w2"].clone()}
    assert torch.equal(layer(**experts, topk_ids=moved), layer(**apart, topk_ids=moved))


def test_packed_words_are_what_a_thread_turns_and_masks() -> None:
    """Compared with the layout's definition: each thread's operands and scales for random codes, as spread_packed makes them."""
    random = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (2, 128, 64), dtype=torch.uint8, generator=random)
    scales = torch.randint(0, 256, (2, 128, 4), dtype=torch.uint8, generator=random)
    packed = pack_mxfp4(codes, scales)
    assert packed.shape == (2, 2, 2, 2176)
    nibbles = torch.stack((codes % 16, codes // 16), -1).flatten(2).long()
    thread = torch.arange(128)
    warp, g, q = thread // 32, thread % 32 // 4, thread % 4
    words = packed[..., :2048].contiguous().view(torch.int32).long().view(2, 2, 2, 128, 2, 2) % 2**32
    mask, left = 0x81C081C0, 0x0C180C18

    def turn(word: Tensor, bits: int) -> Tensor:
        return (word << bits | word >> (32 - bits)) % 2**32

    first, second = words.unbind(-1)
    rest = first & left | turn(second, 2) & ~left
    pairs = [turned & mask for word in (first, second) for turned in (word, word << 6, turn(word, 26))]
    pairs += [turn(rest, 28) & mask, rest << 2 & mask]
    for pair, found in enumerate(pairs):
        for block, half in itertools.product(range(2), range(2)):
            row = 16 * warp + g + 8 * (pair % 2)
            k = 32 * block + 16 * (pair // 4) + 2 * q + 8 * (pair // 2 % 2) + half
            code = nibbles.view(2, 2, 64, 2, 64)[:, :, row, :, k].permute(1, 2, 3, 0)
            assert torch.equal(found[..., block] >> 16 * half & 0xFFFF, code // 8 << 15 | code % 8 << 6)
    expected = scales.view(2, 2, 4, 2, 8, 2, 2).permute(0, 1, 5, 2, 4, 6, 3)  # [E, rows, k, warp, g, 32 k, row]
    assert torch.equal(packed[..., 2048:], expected.reshape(2, 2, 2, 128))


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_packed_rows_of_gate_and_up_are_neighbours(layout: str) -> None:
    codes = torch.arange(128, dtype=torch.uint8)[None, :, None].expand(1, 128, 32)
    scales = torch.arange(128, dtype=torch.uint8)[None, :, None].expand(1, 128, 2)
    gated: Any = layout
    found = pack_mxfp4(codes, scales, gated=gated)[..., 2048:].view(2, 4, 8, 2, 2)[..., 0, :]  # [rows, warp, g, row]
    column = torch.arange(64).view(2, 4, 8)
    gate, up = (2 * column, 2 * column + 1) if layout == "interleaved" else (column, column + 64)
    assert torch.equal(found.long(), torch.stack((gate, up), -1))


@pytest.mark.parametrize(
    ("codes", "scales", "gated", "error", "message"),
    [
        (torch.zeros(2, 64, 32), torch.zeros(2, 64, 2), None, DtypeError, "codes is float32; uint8 is needed"),
        ((2, 96, 32), (2, 96, 2), None, ShapeError, "N and K multiples of 64"),
        ((2, 64, 48), (2, 64, 3), None, ShapeError, "N and K multiples of 64"),
        ((2, 64, 2, 32), (2, 64, 4), None, ShapeError, r"codes has shape \[2, 64, 2, 32\]"),
        ((2, 64, 32), (2, 64, 1), None, ShapeError, r"scales has shape \[2, 64, 1\] on cpu; \[2, 64, 2\]"),
        ((2, 64, 32), (2, 64, 2), "pairs", ArgumentError, "gated is 'pairs'; supported: None, 'concat', 'interleaved'"),
    ],
    ids=["dtype", "rows", "k", "blocks", "scales", "layout"],
)
def test_what_is_not_packed(codes: Any, scales: Any, gated: Any, error: type[FlashmoeError], message: str) -> None:
    def tensor(given: Any) -> Tensor:
        return given if isinstance(given, Tensor) else torch.zeros(given, dtype=torch.uint8)

    with pytest.raises(error, match=message):
        pack_mxfp4(tensor(codes), tensor(scales), gated=gated)


def test_packed_refusals() -> None:
    layer = make("cpu", hidden=192, intermediate=128)
    packed = layer.packed()
    with pytest.raises(ArgumentError, match="packed mxfp4 weights are on the CPU"):
        packed()
    with pytest.raises(ArgumentError, match="w2 is not packed, and the other weights are"):
        packed(w2=layer.w2, w2_scale=layer.w2_scale)
    with pytest.raises(ArgumentError, match="scales are given with packed mxfp4 weights"):
        packed(w13_scale=layer.w13_scale)
    with pytest.raises(ShapeError, match=r"w13 has shape \[4, 4, 2, 2176\]; \[4, 4, 3, 2176\]"):
        packed(w13=packed.w13[:, :, :2])
    with pytest.raises(
        ShapeError, match="the hidden size is 160; with packed mxfp4 weights it must be a multiple of 64"
    ):
        packed(x=packed.x[:, :160])


def test_dequantize_is_the_formats_definition() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.arange(256, dtype=torch.uint8)[:, None, None].expand(256, 16, 1)
    found, expected = dequantize(codes.expand(256, 16, 16), scales), formats.decode(codes.expand(256, 16, 16), scales)
    assert found[255].isnan().all()
    assert torch.equal(
        found[:255].double().abs().clamp(max=2.0**128) % 2.0**128, expected[:255].abs().clamp(max=2.0**128) % 2.0**128
    )
    assert torch.equal(found[:255].signbit(), expected[:255].signbit())
    assert found[:255].isinf().equal(expected[:255].abs() >= 2.0**128)


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_beside_fp64(device: str, layout: str) -> None:
    layer = make(device, layout=layout)
    shared = torch.randn_like(layer.x)
    layer = replace(layer, shared=shared)
    given = (layer.x, layer.w13, layer.w2, layer.w13_scale, layer.w2_scale, layer.topk_weights, layer.topk_ids)
    biases: dict[str, Any] = {"b13": layer.b13, "b2": layer.b2, "shared": shared}
    expected = compose(*given, torch.float64, **biases, activation=layer.activation, layout=layout)
    error = (layer().double() - expected).abs()
    assert error.max() <= 1.2e-2 * expected.abs().max()
    assert error.norm() <= 4e-3 * expected.norm()


def test_expert_map_strides_blocks_and_out(device: str) -> None:
    layer = make(device)
    out = layer()
    table = torch.full((9,), -1, dtype=torch.int32, device=device)
    table[torch.arange(4) + 2] = torch.arange(4, dtype=torch.int32, device=device)
    moved = torch.where(layer.topk_ids < 4, layer.topk_ids + 2, 0)
    assert torch.equal(layer(topk_ids=moved, expert_map=table), out)
    wide = torch.zeros(4, 192, 81, dtype=torch.uint8, device=device)
    w13 = wide[..., 1:].copy_(layer.w13)
    assert torch.equal(layer(w13=w13, w2=layer.w2.mT.contiguous().mT, w2_scale=layer.w2_scale.mT.contiguous().mT), out)
    assert torch.equal(layer(w13=layer.w13.unflatten(2, (-1, 16)), w2=layer.w2.unflatten(2, (-1, 16))), out)
    into = torch.full_like(layer.x, float("nan"))
    assert layer(out=into) is into
    assert torch.equal(into, out)
    none = {name: getattr(layer, name)[:0] for name in ("x", "topk_weights", "topk_ids")}
    assert layer(**none).shape == (0, 160)


@pytest.mark.parametrize(("tokens", "experts"), [(9, 20), (300, 2)], ids=["few rows", "tiles"])
def test_a_token_has_its_bits_whatever_else_is_there(device: str, tokens: int, experts: int) -> None:
    layer = make(device, tokens, experts, min(experts, 3))
    out = layer()
    assert torch.equal(layer(), out)
    for part in (slice(4, 5), slice(0, tokens, 3)):
        some = {name: getattr(layer, name)[part] for name in ("x", "topk_weights", "topk_ids")}
        assert torch.equal(layer(**some), out[part])


def test_compile_autocast_vmap_and_opcheck(device: str) -> None:
    layer = make(device)
    out = layer()
    others = {name: value for name, value in vars(layer).items() if name != "x"}

    def call(x: Tensor) -> Tensor:
        return flashmoe.fused_moe(x, **others)

    assert torch.equal(torch.compile(call, fullgraph=True)(layer.x), out)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(layer(x=layer.x.float()), out)
    assert torch.equal(torch.vmap(call)(torch.stack((layer.x, layer.x)))[1], out)
    tensors = (layer.x, layer.w13, layer.w2, layer.w13_scale, layer.w2_scale, layer.topk_weights, layer.topk_ids)
    arguments = (*tensors, layer.b13, layer.b2, None, None, layer.activation, layer.layout)
    torch.library.opcheck(torch.ops.flashmoe._fused_moe_mxfp4.default, arguments)


@pytest.mark.gpu
def test_a_cuda_graph_follows_the_routing() -> None:
    check_that_a_graph_follows_the_routing(make("cuda"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"w2_scale": None}, ArgumentError, "w2_scale is None"),
        ({"w13_scale": None, "w2_scale": None}, ArgumentError, "w13_scale is None"),
        ({"w13": torch.bfloat16}, DtypeError, "w13 is bfloat16; uint8 is needed"),
        ({"x_scale": (11, 2)}, ArgumentError, "x_scale is given with mxfp4"),
        ({"transposed": True}, ArgumentError, "transposed is given"),
        ({"weights_on_input": True}, ArgumentError, "weights_on_input is given"),
        ({"precision": "fp8", "b13": None, "b2": None}, ArgumentError, "w13_scale is given with precision='fp8'"),
    ],
    ids=str,
)
def test_refusals(device: str, changes: dict[str, Any], error: type[FlashmoeError], message: str) -> None:
    layer = make(device)
    with pytest.raises(error, match=message):
        layer(**changed(layer, changes, torch.uint8))


@pytest.mark.parametrize(
    "change", [lambda x: x.float(), lambda x: x[:1], lambda x: x[:, :-1], lambda x: x.T, Tensor.tolist]
)
def test_what_is_no_place_for_the_result(device: str, change: Callable[[Tensor], Any]) -> None:
    """Copying into it would have converted or broadcast the result."""
    layer = make(device)
    with pytest.raises(FlashmoeError, match="out"):
        layer(out=change(torch.empty_like(layer.x)))


def test_gradients_are_refused(device: str) -> None:
    layer = make(device)
    with pytest.raises(
        DifferentiationError, match=r"with mxfp4 \(uint8\) weights has none; call it under torch\.no_grad"
    ):
        layer(x=layer.x.clone().requires_grad_())
    with torch.no_grad():
        assert layer(x=layer.x.clone().requires_grad_()).shape == layer.x.shape


@pytest.mark.parametrize("gated", [None, "concat", "interleaved"])
def test_unpacking_gives_the_checkpoints_bytes(gated: Any) -> None:
    random = torch.Generator().manual_seed(4)
    codes, scales = (torch.randint(0, 256, (3, 128, k), generator=random, dtype=torch.uint8) for k in (96, 6))
    packed = pack_mxfp4(codes, scales, gated=gated)
    found = unpack_mxfp4(packed, gated=gated)
    assert torch.equal(found[0], codes)
    assert torch.equal(found[1], scales)


@pytest.mark.parametrize(
    ("kind", "capability", "sizes", "expected"),
    [
        ("cuda", (9, 0), (2880, 2880), True),
        ("cuda", (9, 0), (2880, 96), False),
        ("cuda", (8, 0), (64, 64), False),
        ("cuda", (10, 0), (64, 64), False),
        ("cpu", (9, 0), (64, 64), False),
    ],
)
def test_where_packing_pays(
    kind: str, capability: tuple[int, int], sizes: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert can_pack(torch.device(kind), *sizes) is expected
