"""What the layer's operators launch on each GPU, and their results.

Run by tests/host/test_moe_launch.py in a separate process, whose extension has a driver without a GPU."""

import ctypes
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe import _extension, operator
from flashmoe.moe import training
from flashmoe.moe.scaled import quantize
from tests.arguments import experts as calls
from tests.host.every_call import differences
from tests.moe.layer import leaf_names, run, run_backward
from tests.moe.reference import Case, compare, compare_all, expect, make_inputs
from tests.moe.test_mxfp4 import make as make_mxfp4

MULTIPROCESSORS = 132
OF_ANY_DTYPE = ("moe_route", "moe_sort", "moe_quantize")  # float32, or dtypes passed as parameters
SORTED_BY_SEVERAL = 4096  # slots: sort_plan.h
SMALL = Case(7, dtype=torch.bfloat16, hidden=32, intermediate=24)
FULL = replace(SMALL, biases=True, shared=True, mapped=True, sentinels=True)
LIBRARY = ctypes.CDLL(os.environ["FLASHMOE_LIBRARY"])
LIBRARY.fake_log.restype = ctypes.c_char_p
EVERY = operator.find_operators
# This library has the layer's operators, and attention's by name. What torch computes elsewhere, the library computes
# for the CPU, too.
operator.find_operators = lambda: tuple(
    o if o.schema else replace(o, impls={}) for o in EVERY() if o.schema or hasattr(torch.ops.flashmoe, o.name)
)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills uninitialised tensors with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert flashmoe.fused_moe is not None
    begin()
    yield
    torch.use_deterministic_algorithms(False)


def begin(capability: int = 90, *, capturing: bool = False) -> None:
    LIBRARY.fake_gpu(capability, MULTIPROCESSORS, capturing)


def launches() -> list[dict[str, Any]]:
    """Returns what was launched since the GPU was chosen; fails if anything was wrong with it."""
    found = [json.loads(line) for line in LIBRARY.fake_log().decode().splitlines()]
    for launch in found:
        assert launch["problem"] == "", launch
        assert "_bf16" in launch["symbol"] or launch["operation"] in OF_ANY_DTYPE, launch
    return found


def operations() -> list[str]:
    return [launch["operation"] for launch in launches()]


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("views", [False, True], ids=["dense", "views"])
def test_results(capability: int, layout: str, transposed: bool, views: bool) -> None:
    """Forward and every gradient; weights may be views of transposed memory."""
    activation = ("swiglu", "clamped_swiglu", "geglu", "geglu_tanh")[2 * views + transposed]
    case = replace(FULL, layout=layout, transposed=transposed, activation=activation)
    inputs = make_inputs(case)
    if views:
        inputs.w13, inputs.w2 = (w.mT.contiguous().mT for w in (inputs.w13, inputs.w2))
    dout = torch.randn(case.tokens, case.hidden).to(case.dtype)
    expected = expect(case, inputs, dout)
    begin(capability)
    out, gradients = run_backward(case, inputs, dout)
    launches()
    compare("out", out, expected.out, 2 * expected.tolerance)
    doubled = replace(expected, tolerances=tuple(2 * t for t in expected.tolerances))
    compare_all(leaf_names(inputs), gradients, doubled)


@pytest.mark.parametrize("forced", ["sm90", "sm80"])
@pytest.mark.parametrize("rows", [1, 200])
def test_order_of_the_forward(forced: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SMALL, tokens=2 * rows, experts=4, hidden=8, intermediate=8)
    monkeypatch.setenv("FLASHMOE_KERNEL", forced)
    run(case, make_inputs(case))
    found = launches()
    order = ["moe_sort", "grouped_gemm_gated", "grouped_gemm", "moe_combine"]
    assert [launch["operation"].removesuffix("_few_rows") for launch in found] == order
    assert all(f"_{forced}_" in launch["symbol"] for launch in found if "grouped" in launch["operation"])
    if forced == "sm90":  # code for older GPUs does not wait, so it does not begin early either
        assert all(launch["is_dependent"] for launch in found)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 2), (MULTIPROCESSORS, 2), (MULTIPROCESSORS + 1, 1)])
def test_few_tokens_share_their_columns_out_among_blocks(tokens: int, blocks: int) -> None:
    case = replace(SMALL, tokens=tokens, hidden=1032, intermediate=8, experts=2, top_k=1)
    run(case, make_inputs(case))
    assert launches()[-1]["grid"] == blocks * tokens


def test_a_product_for_few_rows_does_not_begin_before_the_sort_has_ended() -> None:
    """After a gated product that is not for few rows, it begins when that has ended."""
    for tokens in (1, 8, 30, 60, 120, 250):
        begin()
        case = replace(SMALL, tokens=tokens, hidden=8, intermediate=8)
        run(case, make_inputs(case))
        _, gated, down, _ = launches()
        is_mixed = down["operation"].endswith("few_rows") and not gated["operation"].endswith("few_rows")
        assert down["is_dependent"] is not is_mixed, tokens


def test_the_sort_of_many_slots_takes_two_steps() -> None:
    slots = SORTED_BY_SEVERAL + 1
    ids, weights = torch.randint(0, 5, (slots, 1)), torch.rand(slots, 1)
    offsets, row_slots, slot_rows, row_weights = torch.ops.flashmoe.moe_sort(ids, weights, None, 5)
    count, place = launches()
    assert count["symbol"].endswith("_count")
    assert place["symbol"].endswith("_place")
    assert count["is_dependent"]
    assert place["is_dependent"]
    assert count["grid"] == place["grid"] > 1
    order = ids[:, 0].argsort(stable=True)
    assert torch.equal(row_slots.long(), order)
    assert torch.equal(slot_rows[order].long(), torch.arange(slots))
    assert torch.equal(row_weights, weights[order, 0])
    assert offsets.tolist() == [0, *ids[:, 0].bincount(minlength=5).cumsum(0).tolist()]


ALL = [
    "moe_gather",
    "grouped_gemm_gated_backward",
    "grouped_gemm_weight_gradient",
    "grouped_gemm",
    "moe_combine_backward",
    "moe_gather",
    "grouped_gemm_weight_gradient",
    "moe_bias_gradient",
    "moe_bias_gradient",
]


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (63, ALL),
        (1, [*ALL[:2], *ALL[3:5]]),
        (2, [*ALL[:2], *ALL[5:7]]),
        (4, ALL[:3]),
        (8, [*ALL[:2], ALL[4]]),
        (16, [*ALL[:2], ALL[7]]),
        (32, [ALL[8]]),
        (0, []),
    ],
)
def test_order_of_the_backward(needs: int, expected: list[str]) -> None:
    """Only what the requested gradients need."""
    case = replace(FULL, tokens=400, hidden=16, intermediate=8)
    inputs = make_inputs(case)
    kept = forward(case, inputs)
    begin()
    gradients = backward(case, inputs, kept, needs)
    assert [operation.removesuffix("_few_rows") for operation in operations()] == expected
    assert [gradient is not None for gradient in gradients] == [bool(needs >> bit & 1) for bit in range(6)]
    assert [launch["is_dependent"] for launch in launches()] == [index > 0 for index in range(len(expected))]


def test_a_gradient_in_the_place_of_the_preactivation() -> None:
    """The requested gradients decide where temporaries are stored; the results have the same bits."""
    case = replace(FULL, tokens=60, hidden=16, intermediate=8)
    inputs = make_inputs(case)
    kept = forward(case, inputs)
    for needs in (63, 13, 2):
        expected = backward(case, inputs, kept, needs)
        found = backward(case, inputs, (kept[0].clone(), *kept[1:]), needs, consumes=True)
        for one, other in zip(found, expected, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)


def forward(case: Case, inputs: Any) -> tuple[Tensor, ...]:
    words = (case.activation, case.layout, case.transposed, True)
    tensors = (inputs.x, inputs.w13, inputs.w2, inputs.topk_weights, inputs.topk_ids)
    extras = (inputs.b13, inputs.b2, inputs.expert_map, inputs.shared)
    result: tuple[Tensor, ...] = torch.ops.flashmoe._fused_moe(*tensors, *extras, *words)
    return result[1:]


def backward(
    case: Case, inputs: Any, kept: tuple[Tensor, ...], needs: int, *, consumes: bool = False
) -> tuple[Tensor | None, ...]:
    tensors = (torch.ones_like(inputs.x), inputs.x, inputs.w13, inputs.w2, inputs.b13, inputs.b2)
    words = (case.activation, case.layout, case.transposed, needs)
    operators = torch.ops.flashmoe
    call = operators._fused_moe_backward_consuming if consumes else operators._fused_moe_backward
    result: tuple[Tensor | None, ...] = call(*tensors, *kept, *words)
    return result


@pytest.mark.parametrize("capturing", [False, True])
def test_persistent_kernels_draw_tiles_from_a_zeroed_counter(capturing: bool) -> None:
    """More tiles than the GPU holds blocks at once; the fake kernels check the counter."""
    case = replace(SMALL, tokens=2048, experts=2, top_k=1, hidden=8, intermediate=512)
    for _ in range(2):
        begin(capturing=capturing)
        run(case, make_inputs(case))
        gated = launches()[1]
        assert gated["grid"] <= MULTIPROCESSORS * 8


def test_no_ids_are_read_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CHECK_VALUES", "1")
    run(SMALL, make_inputs(SMALL))
    begin(capturing=True)
    with pytest.raises(RuntimeError, match=r"flashmoe:variable\.captured"):
        run(SMALL, make_inputs(SMALL))


def test_strided_inputs_are_copied_where_a_kernel_cannot_load_them() -> None:
    case = replace(FULL, mapped=False)
    inputs = make_inputs(case)
    plain = run(case, inputs)
    for name in ("x", "w13", "w2", "shared"):
        tensor = getattr(inputs, name)
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
        wide[..., 1:-2] = tensor
        assert torch.equal(run(case, replace(inputs, **{name: wide[..., 1:-2]})), plain), name
    expanded = replace(inputs, w13=inputs.w13[:1].expand_as(inputs.w13), x=inputs.x[:1].expand_as(inputs.x))
    dense = replace(expanded, w13=expanded.w13.contiguous(), x=expanded.x.contiguous())
    assert torch.equal(run(case, expanded), run(case, dense))


def test_grouped_mm() -> None:
    """Both forms, any alignment of offsets, and zeros past the last."""
    a, b = torch.randn(21, 16).bfloat16(), torch.randn(3, 16, 24).bfloat16()
    offsets = torch.tensor([5, 5, 17], dtype=torch.int32)
    for weights in (b, b.mT.contiguous().mT):
        out = flashmoe.grouped_mm(a, weights, offsets)
        expected = torch.cat([a[:5].float() @ b[0].float(), a[5:17].float() @ b[2].float(), torch.zeros(4, 24)])
        torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=5e-2)
        assert (out[17:] == 0).all()
    other = torch.randn(21, 8).bfloat16()
    for left in (a.mT, a.mT.contiguous()):
        out = flashmoe.grouped_mm(left, other, offsets)
        groups = [slice(0, 5), slice(5, 5), slice(5, 17)]
        expected = torch.stack([a[rows].float().T @ other[rows].float() for rows in groups])
        torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=5e-2)
    assert {operation.removesuffix("_few_rows") for operation in operations()} == {
        "grouped_gemm",
        "grouped_gemm_weight_gradient",
    }


def test_routing_is_one_kernel() -> None:
    logits = torch.randn(1000, 128)
    _, _, counts = flashmoe.topk_route(logits, 8, return_counts=True)
    (route,) = launches()
    assert (route["operation"], route["grid"]) == ("moe_route", 250)
    assert counts.tolist() == [0] * 128  # zeroed for the kernel, which does nothing here
    begin()
    flashmoe.topk_route(torch.randn(100_000, 8), 2)
    assert launches()[0]["grid"] == 8 * MULTIPROCESSORS


@pytest.mark.parametrize("tokens", [1, 7], ids=["few rows", "more"])
@pytest.mark.parametrize("x_is_quantised", [False, True])
def test_the_layer_with_scaled_weights(x_is_quantised: bool, tokens: int) -> None:
    """By the kernels' loops and by torch; weights are views, an id is out of range, x is strided."""
    x, w13, w2 = torch.randn(tokens, 256).bfloat16(), torch.randn(3, 512, 256) * 80, torch.randn(3, 256, 256) * 80
    w13, w2 = (torch.nn.functional.pad(w, (0, 16)).to(torch.float8_e4m3fn)[..., :256] for w in (w13, w2))
    scales = torch.rand(3, 4, 2) * 1e-3, torch.rand(3, 2, 2).mT * 1e-3
    ids = torch.tensor([[0, 2], [2, 0], [9, 2], [0, 2], [2, 9], [1, 2], [0, 1]])[:tokens]
    weights, shared = torch.rand(tokens, 2), torch.randn(2 * tokens, 256).bfloat16()[::2]
    rows, x_scale = quantize(x) if x_is_quantised else (x.mT.contiguous().mT, None)
    values = (rows, w13, w2, *scales, weights, ids, x_scale, None, shared, "swiglu")
    out = torch.ops.flashmoe._fused_moe_scaled(*values)
    order = ["moe_quantize", "grouped_gemm_gated_scaled", "grouped_gemm_scaled", "moe_combine"]
    if tokens == 1:
        order[1:3] = "grouped_gemm_gated_scaled_few_rows", "moe_quantize", "grouped_gemm_scaled"  # a short sum
    assert operations() == ["moe_sort", *order[x_is_quantised:]]
    assert all(launch["is_dependent"] for launch in launches())
    expected = torch.ops.flashmoe._fused_moe_scaled_torch(*values)
    assert (out - expected).norm() < 0.05 * expected.norm()


def test_what_routing_is_told() -> None:
    logits, bias = torch.randn(5, 96)[:, :64], torch.randn(64)
    options: dict[str, Any] = {"groups": 8, "topk_groups": 3, "renormalize": False, "scale": 2.5}
    flashmoe.topk_route(logits, 4, scoring="sigmoid", bias=bias, **options)
    flashmoe.topk_route(logits.bfloat16().contiguous(), 2)
    sigmoid, softmax = (launch["factors"] for launch in launches())
    assert (sigmoid[0], *sigmoid[3:]) == (96, 5, 64, 4, 8, 3, 0, 2.5, 1)
    assert (softmax[0], *softmax[3:]) == (64, 5, 64, 2, 1, 1, 1, 1, 0)
    assert (sigmoid[1] == softmax[1], sigmoid[2] == softmax[2]) == (False, False)


def test_no_rows_are_no_product() -> None:
    offsets = torch.tensor([0, 0], dtype=torch.int32)
    out = flashmoe.grouped_mm(torch.zeros(0, 16).bfloat16(), torch.zeros(2, 16, 8).bfloat16(), offsets)
    assert out.shape == (0, 8)
    assert launches() == []


def lies(values: Tensor, offset: int, spare: int) -> Tensor:
    """The same values from an offset in their memory, with gaps of ``spare`` elements between rows."""
    *batch, rows, columns = values.shape
    memory = torch.zeros(offset + math.prod(batch) * rows * (columns + spare) + 64, dtype=values.dtype)
    memory = memory[(-memory.data_ptr() // values.element_size()) % 64 :]
    strides = ((columns + spare) * rows, columns + spare, 1)[-values.dim() :]
    result = memory.as_strided(values.shape, strides, memory.storage_offset() + offset)
    result.view(torch.uint8 if values.element_size() == 1 else values.dtype).copy_(
        values.view(torch.uint8 if values.element_size() == 1 else values.dtype)
    )
    return result


@pytest.mark.parametrize(
    ("offset", "spare"), [(0, 0), (16, 0), (0, 16), (8, 0), (0, 8), (4, 0), (0, 4), (1, 0), (0, 1)]
)
def test_factors_are_copied_where_16_bytes_cannot_be_loaded_and_nowhere_else(offset: int, spare: int) -> None:
    """x and both weights, of 16 bits, and of 8 with scales; the results are those of aligned factors."""
    case = replace(SMALL, biases=False)
    inputs = make_inputs(case)
    plain, names = run(case, inputs), ("x", "w13", "w2")
    for name in names:
        begin()
        moved = lies(getattr(inputs, name), offset, spare)
        assert torch.equal(run(case, replace(inputs, **{name: moved})), plain), name
        used = {address for launch in launches() for address in launch["factors"]}
        kept = [getattr(inputs, other).data_ptr() for other in names if other != name]
        assert used >= set(kept)
        assert (moved.data_ptr() in used) is (offset % 8 == 0 and spare % 8 == 0), name
    rows, x_scale = quantize(torch.randn(7, 256).bfloat16())
    w13, w2 = (torch.randn(3, columns, 256).mul(80).to(torch.float8_e4m3fn) for columns in (512, 256))
    scales = torch.rand(3, 4, 2) * 1e-3, torch.rand(3, 2, 2) * 1e-3
    rest = (torch.rand(7, 2), torch.randint(0, 3, (7, 2)), x_scale, None, None, "swiglu")
    tensors = [rows, w13, w2]
    plain = torch.ops.flashmoe._fused_moe_scaled(*tensors, *scales, *rest)
    for index in range(3):
        begin()
        own = [lies(one, offset, spare) if index == at else one for at, one in enumerate(tensors)]
        assert torch.equal(torch.ops.flashmoe._fused_moe_scaled(*own, *scales, *rest), plain)
        used = {address for launch in launches() for address in launch["factors"]}
        assert (own[index].data_ptr() in used) is (offset % 16 == 0 and spare % 16 == 0), index


@pytest.mark.parametrize("needed", ["x", "w13", "w2", "topk_weights", "everything"])
def test_a_step_with_e4m3_products(needed: str) -> None:
    """By the kernels' loops, whose scales and thus roundings differ, and by torch; nothing unneeded is launched."""
    x, dout = torch.randn(9, 128).bfloat16(), torch.randn(9, 128).bfloat16()
    w13, w2 = (torch.randn(3, *shape).mul(0.1).bfloat16() for shape in ((256, 128), (128, 128)))
    ids, weights = torch.tensor([[0, 2], [2, 0], [9, 2]]).repeat(3, 1), torch.rand(9, 2)
    leaves = {"x": x, "w13": w13, "w2": w2, "topk_weights": weights}
    for name, leaf in leaves.items():
        leaf.requires_grad_(needed in (name, "everything"))
    out = flashmoe.fused_moe(x, w13, w2, weights, ids, precision="fp8")
    forward = [
        "moe_sort",
        "moe_quantize",
        "grouped_gemm_gated_scaled_kept",
        "grouped_gemm_scaled_few_rows",
        "moe_combine",
    ]
    assert [name.replace("scaled_few_rows", "scaled") for name in operations()] == [
        "moe_quantize_tiles",
        "moe_quantize_tiles",
        *(name.replace("scaled_few_rows", "scaled") for name in forward),
    ]
    begin()
    found = dict(
        zip(leaves, torch.autograd.grad(out, [t for t in leaves.values() if t.requires_grad], dout), strict=False)
    )
    if needed != "everything":
        found = {needed: next(iter(found.values()))}
    assert operations().count("grouped_gemm_weight_gradient_scaled") == len({"w13", "w2"} & set(found))
    assert operations().count("moe_combine_backward") == bool({"x", "topk_weights"} & set(found))
    with torch.no_grad():
        q13, q2 = (training.quantize_in_torch(w) for w in (w13, w2))
    kept = training.kept(x.detach(), q13[0], q2[0], q13[1], q2[1], weights.detach(), ids, None, None, None, "swiglu")
    assert (out - kept[0]).norm() < 0.15 * kept[0].norm()
    given = (dout, x.detach(), q13[2], q2[2], q13[3], q2[3], *kept[1:], "swiglu", 15)
    expected = dict(zip(leaves, training.backward(*given), strict=True))
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() < 0.25 * expected[name].norm(), name


def test_nothing_is_launched_without_tokens() -> None:
    case = replace(FULL, tokens=0)
    inputs = make_inputs(case)
    kept = forward(case, inputs)
    gradients = backward(case, inputs, kept, 63)
    assert launches() == []
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_a_gpu_without_kernels_refuses() -> None:
    begin(70)
    with pytest.raises(flashmoe.errors.UnsupportedGpuError, match=r"compute capability 7.0"):
        flashmoe.topk_route(torch.randn(3, 8), 2)
    begin(75)
    inputs = make_inputs(SMALL)
    with pytest.raises(flashmoe.errors.DtypeError, match=r"BF16 needs compute capability 8.0"):
        flashmoe.fused_moe(inputs.x, inputs.w13, inputs.w2, inputs.topk_weights, inputs.topk_ids)


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
@pytest.mark.parametrize("tokens", [1, 11, 150])
@pytest.mark.parametrize(("capability", "packed"), [(80, False), (90, False), (90, True), (120, False)])
def test_weights_of_4_bits(capability: int, packed: bool, tokens: int, layout: str) -> None:
    """The same bits as the layer with 16-bit weights."""
    sizes = {"hidden": 128, "intermediate": 64} if packed else {"hidden": 96, "intermediate": 32}
    layer = make_mxfp4("cpu", tokens, activation="swiglu", layout=layout, **sizes)
    layer = replace(layer, shared=torch.randn(tokens, sizes["hidden"]).bfloat16())
    begin(capability)
    expected = layer.in_bfloat16()
    begin(capability)
    LIBRARY.fake_packs(packed)
    try:
        assert torch.equal(layer(), expected)
        found = [launch for launch in launches() if "grouped" in launch["operation"]]
        assert all(("_packed" in launch["operation"]) == packed for launch in found)
        assert ("moe_gather" in operations()) == (packed and tokens == 150)  # only for the tile of many rows
        begin(80)
        if packed:
            with pytest.raises(flashmoe.errors.UnsupportedGpuError, match=r"compute capability 8\.0"):
                layer()
    finally:
        LIBRARY.fake_packs(False)


@pytest.mark.parametrize(("shift", "gap"), [(0, 0), (1, 0), (16, 0), (0, 8), (0, 16)])
def test_weights_of_4_bits_are_copied_where_16_bytes_cannot_be_loaded(shift: int, gap: int) -> None:
    """shift: bytes before the first element; gap: bytes after each row."""
    layer = make_mxfp4("cpu", 11, activation="swiglu", hidden=96, intermediate=32)
    expected = layer()
    wide = [torch.cat((one, one.new_zeros(*one.shape[:2], gap)), -1) for one in (layer.w13, layer.w2)]
    moved = [torch.cat((one.new_zeros(shift), one.flatten()))[shift:].view(one.shape) for one in wide]
    w13, w2 = (one[..., : old.shape[2]] for one, old in zip(moved, (layer.w13, layer.w2), strict=True))
    begin()
    assert torch.equal(layer(w13=w13, w2=w2), expected)
    read = [launch["factors"][1] for launch in launches() if "grouped" in launch["operation"]]
    for at, one in zip(read, (w13, w2), strict=True):
        assert (at == one.data_ptr()) == (one.data_ptr() % 16 == one.stride(1) % 16 == one.stride(0) % 16 == 0)
    shared = layer.w13[:1].expand_as(layer.w13)  # a stride of 0
    begin()
    assert torch.equal(layer(w13=shared), layer(w13=shared.contiguous()))
    assert next(launch for launch in launches() if "grouped" in launch["operation"])["factors"][1] != shared.data_ptr()


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("number", range(len(calls.ROWS)), ids=lambda number: calls.ROWS[number][0])
def test_every_layout_that_is_taken(capability: int, number: int) -> None:
    name = calls.ROWS[number][0]
    begin(capability)
    is_other = (
        name.endswith(("_torch", "_scaled_out", "_mxfp4_out", "_route")) or calls.ROWS[number][1] is calls._packed
    )
    if is_other or "quantize" in name or ("scale" in name and capability < 90):
        return  # not the extension's operators, no loops or slow ones, or no kernels

    def watch(results: list[Tensor]) -> None:
        """After one call: without results nothing is launched; the last kernel is one that was launched."""
        symbols = [launch["symbol"] for launch in launches()]
        assert not symbols or any(one.numel() for one in results)
        has_product = "grouped" in "".join(symbols)  # the gradient of a bias alone names no kernel
        assert not has_product or _extension.last_kernel() in symbols
        assert symbols or _extension.last_kernel() == ""
        begin(capability)

    assert differences(number, calls, layouts_alone=capability == 80, watch=watch) == []
