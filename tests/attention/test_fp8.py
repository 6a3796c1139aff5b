"""q, k and v in float8_e4m3fn: against a reference of the kernels' recurrence, float64 and the 16-bit kernels; unused memory holds NaN."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashmoe
from flashmoe.errors import ArgumentError, ArgumentTypeError, DeviceError, DtypeError, ShapeError
from flashmoe_tools.operations.attention.e4m3 import E4M3, Codes, attend

from .reference import assert_ran_here, reference

NAN_CODE = 0x7F
ROUNDED = 0.031  # relative RMS error of rounding P to three fraction bits, with a margin for the tensor cores
SHAPES = (  # batch, heads, key heads, rows, keys, head dim
    (1, 2, 1, 65, 257, 128),
    (2, 4, 2, 130, 128, 64),
    (1, 2, 2, 300, 300, 256),
    (1, 8, 1, 1, 500, 128),
    (2, 2, 1, 70, 5, 64),
    (1, 3, 1, 129, 400, 80),
    (1, 2, 1, 70, 2400, 64),
)
BLOCKS = {3: 128, 4: 64}  # kind of scales: rows per block
either = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def has_products_of_8_bits(device: str) -> bool:
    return device != "cpu" and torch.cuda.get_device_capability(device) == (9, 0)


def poisoned(tensor: Tensor, device: str) -> Tensor:
    """The same codes inside a larger tensor of NaN."""
    batch, heads, rows, columns = tensor.shape
    whole = torch.full((batch + 1, heads, rows + 40, columns + 48), NAN_CODE, dtype=torch.uint8).view(E4M3).to(device)
    inner = whole[:batch, :, 8 : 8 + rows, 16 : 16 + columns]
    inner.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return inner


def draw(shape: tuple[int, ...], *, scales: int = 0, seed: int = 0, size: float = 1.0) -> tuple[Codes, Codes, Codes]:
    """Codes with a scale per batch and head, equal in the dimensions that ``scales`` leaves out."""
    batch, heads, heads_kv, rows, keys, head_dim = shape
    generator = torch.Generator().manual_seed(seed)

    def one(of_heads: int, length: int) -> Codes:
        values = torch.randn(batch, of_heads, length, head_dim, generator=generator) * size + 0.25
        if scales in BLOCKS:
            blocks = torch.rand(batch, of_heads, -(-length // BLOCKS[scales]), generator=generator) + 0.5
            return Codes(values.to(E4M3), blocks.repeat_interleave(BLOCKS[scales], dim=2)[..., :length])
        sizes = {0: (1, 1), 1: (1, of_heads), 2: (batch, of_heads)}[scales]
        return Codes(values.to(E4M3), (torch.rand(sizes, generator=generator) + 0.5).expand(batch, of_heads))

    q, k, v = one(heads, rows), one(heads_kv, keys), one(heads_kv, keys)
    if scales == 4:  # values have no scales for blocks of 64
        v = Codes(v.codes, v.scale[..., ::128].repeat_interleave(128, dim=2)[..., :keys])
    return q, k, v


def wide(codes: Codes) -> Tensor:
    return codes.values * codes.row_scale[..., None]


def as_given(codes: Codes, scales: int, device: str) -> Any:
    if scales == 0:
        return float(codes.scale[0, 0])
    if scales in BLOCKS:
        return codes.scale[..., :: BLOCKS[scales]].to(device)
    return (codes.scale if scales == 2 else codes.scale[0]).contiguous().to(device)


def call(
    q: Codes, k: Codes, v: Codes, device: str, *, scales: int = 0, is_poisoned: bool = True, **options: Any
) -> tuple[Tensor, Tensor]:
    named = {f"{name}_scale": as_given(one, scales, device) for name, one in (("q", q), ("k", k))}
    named["v_scale"] = as_given(v, 3 if scales == 4 else scales, device)
    tensors = [poisoned(one.codes, device) if is_poisoned else one.codes.to(device) for one in (q, k, v)]
    result: tuple[Tensor, Tensor] = flashmoe.attention(*tensors, return_lse=True, **named, **options)  # type: ignore[call-overload]
    assert_ran_here(device)
    return result


@either
@pytest.mark.parametrize("scales", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_recurrence(shape: tuple[int, ...], scales: int, causal: bool, device: str) -> None:
    q, k, v = draw(shape, scales=scales)
    out, lse = (one.cpu() for one in call(q, k, v, device, scales=scales, causal=causal))
    expected = attend(q, k, v, shape[-1] ** -0.5, causal=causal, roundoff=2.0**-8)
    if not has_products_of_8_bits(device):
        exact, exact_lse = reference(wide(q), wide(k), wide(v), causal)
        assert torch.allclose(out.double(), exact, rtol=2**-7, atol=0.02)
        assert torch.allclose(lse.double(), exact_lse, atol=0.02)
        return
    assert ((out.double() - expected.out).abs() <= expected.out_bound).all()
    assert (((lse.double() - expected.lse).abs() <= expected.lse_bound) | (lse.double() == expected.lse)).all()


@either
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [128, 1000, 8192])
def test_error_against_float64(keys: int, head_dim: int, causal: bool, device: str) -> None:
    """Root mean square error: no larger in long contexts than in short ones."""
    q, k, v = draw((1, 2, 1, 64, keys, head_dim), seed=keys)
    out, lse = call(q, k, v, device, causal=causal)
    exact, exact_lse = reference(wide(q), wide(k), wide(v), causal)
    centred = reference(wide(q), wide(k), wide(v) - wide(v).mean(), causal)[0]
    size = centred.square().mean().sqrt() + exact.square().mean().sqrt() / math.sqrt(keys)
    error = (out.cpu().double() - exact).square().mean().sqrt()
    bfloat16 = exact.square().mean().sqrt() * 2.0**-9
    assert error <= ROUNDED * size + bfloat16, (error / size).item()
    assert torch.allclose(lse.cpu().double(), exact_lse, atol=2e-3)


def test_every_code(device: str) -> None:
    """256 sequences of one key: the result is the key's value, the log-sum-exp its score."""
    codes = torch.arange(256, dtype=torch.uint8)
    k = torch.zeros(256, 1, 1, 64, dtype=torch.uint8)
    k[:, 0, 0, 5] = codes
    v = torch.stack([codes.roll(-index)[:64] for index in range(256)])[:, None, None]
    q = torch.full((256, 1, 1, 64), 0, dtype=torch.uint8)
    q[..., 5] = 0x40  # 2
    tensors = (one.view(E4M3).to(device) for one in (q, k, v))
    out, lse = flashmoe.attention(*tensors, k_scale=2.0**-6, v_scale=0.5, scale=1.0, return_lse=True)
    score = codes.view(E4M3).float() * 2.0**-5
    assert torch.equal(lse.flatten().isnan().cpu(), score.isnan())
    seen = ~score.isnan()
    assert torch.allclose(lse.flatten().cpu()[seen], score[seen], atol=1e-5, rtol=1e-6)
    expected = (v.view(E4M3).float() * 0.5)[seen].to(torch.bfloat16)
    assert torch.equal(out.cpu()[seen].nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("keys", [4096, 131072])
def test_a_needle(keys: int, device: str) -> None:
    """One key of many has all the weight; and values that are all equal are returned unchanged, however many are summed."""
    if device == "cpu" and keys > 4096:
        keys = 8192
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 1, 3, 128, generator=generator).to(E4M3)
    k = (torch.randn(1, 1, keys, 128, generator=generator) * 0.5).to(E4M3)
    v = torch.randn(1, 1, keys, 128, generator=generator).to(E4M3)
    places = (17, keys // 2, keys - 5)
    for row, place in enumerate(places):
        k.view(torch.uint8)[0, 0, place] = (q[0, 0, row].float() * 4).to(E4M3).view(torch.uint8)
    out = flashmoe.attention(q.to(device), k.to(device), v.to(device)).cpu()
    assert torch.allclose(out[0, 0].float(), v[0, 0, list(places)].float(), atol=0.05)
    flat = flashmoe.attention(
        torch.zeros_like(q).to(device), k.to(device), torch.ones_like(v.float()).to(E4M3).to(device)
    )
    assert torch.allclose(flat.float().cpu(), torch.ones(1), rtol=2**-7)


def test_bits_do_not_depend_on_the_call(device: str) -> None:
    """Repeated; one sequence in its own call; the last rows as a chunk; the first keys of a longer sequence."""
    q, k, v = draw((3, 4, 2, 200, 333, 128), scales=2)
    whole = call(q, k, v, device, scales=2, causal=True)
    for _ in range(50 if device != "cpu" else 2):
        assert all(
            torch.equal(one, other)
            for one, other in zip(call(q, k, v, device, scales=2, causal=True), whole, strict=True)
        )
    if not has_products_of_8_bits(device):
        return
    second = [Codes(one.codes[1:2], one.scale[1:2]) for one in (q, k, v)]
    alone = call(second[0], second[1], second[2], device, scales=2, causal=True)
    chunk = call(Codes(q.codes[:, :, 71:], q.scale), k, v, device, scales=2, causal=True)
    short = [Codes(one.codes[:, :, : one.codes.shape[2] - 50], one.scale) for one in (q, k, v)]
    first = call(short[0], short[1], short[2], device, scales=2, causal=True)
    for part, index in ((alone, 0), (alone, 1)):
        assert torch.equal(part[index][0], whole[index][1])
    for index in (0, 1):
        assert torch.equal(chunk[index], whole[index][:, :, 71:])
        assert torch.equal(first[index], whole[index][:, :, :150])


@either
@pytest.mark.parametrize("kind", [3, 4])
def test_equal_scales_of_blocks_are_one_scale(kind: int, causal: bool, device: str) -> None:
    """With powers of two, the products that scale the scores are exact."""
    q, k, v = draw((2, 4, 2, 200, 333, 128))

    def all_of(codes: Codes, scale: float) -> Codes:
        return Codes(codes.codes, torch.full(codes.codes.shape[:3], scale))

    blocks = call(
        *(all_of(one, size) for one, size in zip((q, k, v), (0.5, 2.0, 4.0), strict=True)),
        device,
        scales=kind,
        causal=causal,
    )
    codes = (one.codes.to(device) for one in (q, k, v))
    whole = flashmoe.attention(*codes, causal=causal, q_scale=0.5, k_scale=2.0, v_scale=4.0, return_lse=True)
    assert all(torch.equal(one, other) for one, other in zip(blocks, whole, strict=True))


@either
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scales_of_blocks_of_queries_alone(head_dim: int, causal: bool, device: str) -> None:
    """With powers of two: equal to codes that are larger by the same factor."""
    q, k, v = (one.codes.to(device) for one in draw((1, 4, 2, 400, 333, head_dim)))
    scale = 2.0 ** torch.randint(-1, 2, (1, 4, 7), device=device).float()
    q = (q.float() * 0.125).to(E4M3)
    larger = (q.float() * scale.repeat_interleave(64, 2)[:, :, :400, None]).to(E4M3)
    small = q.float().abs() < 2**-5  # halving these may round
    q, larger = (one.float().masked_fill(small, 0.0).to(E4M3) for one in (q, larger))
    found = flashmoe.attention(q, k, v, causal=causal, q_scale=scale, return_lse=True)
    wanted = flashmoe.attention(larger, k, v, causal=causal, return_lse=True)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("scale", [math.nan, -1.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_that_see_keys_of_no_scale_are_nan(head_dim: int, scale: float, device: str) -> None:
    if scale < 0 and not has_products_of_8_bits(device):
        pytest.skip("keys that are multiplied may have scales below zero")
    codes = [one.codes.to(device) for one in draw((1, 4, 2, 384, 384, head_dim))]
    scales = torch.ones(1, 2, 3, device=device)
    good = flashmoe.attention(*codes, causal=True, k_scale=scales, return_lse=True)
    scales[..., 2] = scale
    found = flashmoe.attention(*codes, causal=True, k_scale=scales, return_lse=True)
    for one, wanted in zip(found, good, strict=True):
        assert torch.equal(one[:, :, :256], wanted[:, :, :256])
        assert one[:, :, 256:].isnan().all()


def test_retrieval_among_many_keys(device: str) -> None:
    """One key per query stands out from the noise with half of all weight: 8 bits find the same values as 16 bits."""
    keys = 131072 if device != "cpu" else 8192
    generator = torch.Generator().manual_seed(11)
    q = torch.randn(1, 4, 64, 128, generator=generator)
    k = torch.randn(1, 2, keys, 128, generator=generator)
    v = torch.randn(1, 2, keys, 128, generator=generator)
    places = torch.randperm(keys, generator=generator)[: 4 * 64].view(4, 64)
    for head in range(4):
        size = q[0, head].square().sum(dim=-1, keepdim=True) / 128**0.5
        k[0, head // 2, places[head]] = q[0, head] * ((math.log(keys) + 0.5) / size)
    codes = [one.to(E4M3).to(device) for one in (q, k, v)]
    wide_type = torch.bfloat16 if device != "cpu" else torch.float32
    for given in (codes, [one.to(wide_type) for one in codes]):
        out = flashmoe.attention(*given).float().cpu()
        found = torch.einsum("hrd,hkd->hrk", out[0], v[0].repeat_interleave(2, dim=0)).argmax(dim=-1)
        assert torch.equal(found, places)


@either
def test_smooth_keys(causal: bool, device: str) -> None:
    """Keys whose mean is eight times their deviation: subtracting it reduces the error of 8 bits to a fraction."""
    generator = torch.Generator().manual_seed(12)
    q, k, v = (torch.randn(1, 2, 256, 64, generator=generator) for _ in range(3))
    k += 8.0 * torch.randn(1, 2, 1, 64, generator=generator)
    exact, exact_lse = reference(q.double(), k.double(), v.double(), causal)

    def error(keys: Tensor) -> float:
        scale = keys.abs().amax(dim=(0, 2, 3)) / 448
        codes = ((keys / scale[:, None, None]).to(E4M3), q.to(E4M3), v.to(E4M3))
        k8, q8, v8 = (one.to(device) for one in codes)
        out, _ = call_plain(q8, k8, v8, scale.to(device), causal)
        return float((out.cpu().double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    smooth = flashmoe.smooth_keys(k)
    same, lse = reference(q.double(), smooth.double(), v.double(), causal)
    assert torch.allclose(same, exact, atol=1e-5)
    mean = k.double().mean(dim=2, keepdim=True)
    assert torch.allclose(lse + (q.double() * mean).sum(dim=-1) / 8, exact_lse, atol=1e-4)
    assert error(smooth) < 0.12
    assert error(smooth) < 0.35 * error(k)


def call_plain(q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = flashmoe.attention(q, k, v, causal=causal, k_scale=k_scale, return_lse=True)
    return result


@pytest.mark.parametrize("layout", ["bshd", "expanded", "offset", "columns"])
def test_layouts(layout: str, device: str) -> None:
    """With any strides, the bits are those of contiguous tensors."""
    head_dim = 40 if layout == "columns" else 64
    q, k, v = draw((2, 4, 4, 100, 140, head_dim))
    expected = call(q, k, v, device, is_poisoned=False)
    scales = {f"{name}_scale": as_given(one, 0, device) for name, one in (("q", q), ("k", k), ("v", v))}

    def laid_out(codes: Tensor) -> Tensor:
        codes = codes.to(device)
        if layout == "bshd":
            return codes.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "expanded":
            return codes[:1, :1].expand(codes.shape)
        whole = torch.zeros(codes.numel() + 3, dtype=torch.uint8, device=device).view(E4M3)
        whole.view(torch.uint8)[3:] = codes.reshape(-1).view(torch.uint8)
        return whole[3:].view(codes.shape) if layout == "offset" else codes

    given = [laid_out(one.codes) for one in (q, k, v)]
    out, lse = flashmoe.attention(*given, return_lse=True, **scales)
    if layout == "expanded":
        expected = flashmoe.attention(*(one.contiguous() for one in given), return_lse=True, **scales)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_values_have_a_head_dim_of_their_own(device: str) -> None:
    q, k, v = draw((1, 2, 1, 90, 150, 128))
    out, _ = call(q, k, v, device)
    narrow, _ = call(q, k, Codes(v.codes[..., :48].contiguous(), v.scale), device)
    assert torch.equal(narrow, out[..., :48])


def test_out_dtype(device: str) -> None:
    q, k, v = draw((1, 2, 1, 20, 30, 64))
    half, _ = call(q, k, v, device, out_dtype=torch.float16)
    full, _ = call(q, k, v, device)
    assert (half.dtype, full.dtype) == (torch.float16, torch.bfloat16)
    assert torch.allclose(half.float(), full.float(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (20, 0)},
        {"softcap": 5.0},
        {"sinks": True},
        {"attn_mask": True},
        {"alibi_slopes": True},
        {"scale": -0.1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_run_in_16_bits(options: dict[str, Any], device: str) -> None:
    q, k, v = draw((1, 2, 1, 70, 90, 64))
    made = dict(options)
    if "sinks" in options:
        made["sinks"] = torch.tensor([0.5, -1.0], device=device)
    if "attn_mask" in options:
        made["attn_mask"] = torch.randn(70, 90, device=device)
    if "alibi_slopes" in options:
        made["alibi_slopes"] = torch.tensor([0.5, 0.1], device=device)
    out, lse = call(q, k, v, device, **made)
    wide = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = ((one.codes.float() * float(one.scale[0, 0])).to(wide).to(device) for one in (q, k, v))
    if "attn_mask" in made:
        made["attn_mask"] = made["attn_mask"].to(wide)
    expected, expected_lse = flashmoe.attention(*tensors, return_lse=True, **made)
    assert torch.equal(out, expected.to(torch.bfloat16))
    assert torch.equal(lse, expected_lse)


def test_gradients_are_those_of_the_dequantised_tensors(device: str) -> None:
    q, k, v = draw((1, 2, 1, 40, 50, 64))
    scale = torch.tensor(0.5, device=device, requires_grad=True)
    out = flashmoe.attention(q.codes.to(device), k.codes.to(device), v.codes.to(device), v_scale=scale)
    out.float().sum().backward()
    assert scale.grad is not None
    assert torch.allclose(scale.grad, out.float().sum() / scale.detach(), rtol=0.02)


def test_scales_of_zero_and_rows_without_keys(device: str) -> None:
    q, k, v = draw((1, 2, 1, 70, 30, 64))
    codes = [one.codes.to(device) for one in (q, k, v)]
    out, lse = flashmoe.attention(*codes, k_scale=torch.zeros(1, device=device), causal=True, return_lse=True)
    assert (out[:, :, :40] == 0).all()
    assert (lse[:, :, :40] == -torch.inf).all()
    assert torch.allclose(lse[0, 0, 40:].cpu(), torch.arange(1, 31).log(), atol=1e-4)
    empty, none = flashmoe.attention(codes[0], codes[1][:, :, :0], codes[2][:, :, :0], return_lse=True)
    assert (empty == 0).all()
    assert (none == -torch.inf).all()


def test_what_is_refused(device: str) -> None:
    q, k, v = (one.codes.to(device) for one in draw((1, 2, 1, 8, 8, 64)))
    wide = q.to(torch.bfloat16)
    cases: tuple[tuple[type[Exception], str, tuple[Tensor, ...], dict[str, Any]], ...] = (
        (DtypeError, "quantise all three", (q, k.to(torch.bfloat16), v), {}),
        (DtypeError, "out_dtype must be", (q, k, v), {"out_dtype": torch.float32}),
        (ArgumentError, "is only used with q, k and v", (wide, wide, wide), {"q_scale": 0.5}),
        (ArgumentError, "is only used with q, k and v", (wide, wide, wide), {"out_dtype": torch.float16}),
        (ArgumentTypeError, "must be a number", (q, k, v), {"k_scale": "one"}),
        (ShapeError, "q_scale must be a number or float32", (q, k, v), {"q_scale": torch.ones(3, device=device)}),
        (
            ShapeError,
            "with 128 or 64 of the 8 rows per block",
            (q, k, v),
            {"k_scale": torch.ones(1, 2, 2, device=device)},
        ),
        (ShapeError, "with 128 of the 8 rows per block", (q, k, v), {"v_scale": torch.ones(1, 1, 2, device=device)}),
        (ShapeError, "may differ only in head_dim", (q, k, v[:, :, :4]), {}),
        (ShapeError, "multiple of the number of key heads", (q[:, :1], q, q), {}),
        (ArgumentError, "scale must be finite", (q, k, v), {"scale": math.inf}),
        (DtypeError, "must be torch.float32", (q, k, v), {"v_scale": torch.ones((), device=device, dtype=torch.int64)}),
    )
    for error, text, tensors, options in cases:
        with pytest.raises(error, match=text):
            flashmoe.attention(*tensors, **options)
    if device != "cpu":
        with pytest.raises(DeviceError, match="on q's device"):
            flashmoe.attention(q, k, v, k_scale=torch.ones(1))


def test_compiled(device: str) -> None:
    q, k, v = (one.codes.to(device) for one in draw((1, 2, 1, 40, 50, 64)))

    def call_it(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashmoe.attention(q, k, v, causal=True, k_scale=0.5)

    compiled = torch.compile(call_it, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), call_it(q, k, v))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 30, 4, 64).to(E4M3).transpose(1, 2)
        k, v = torch.empty(2, 2, 50, 64).to(E4M3), torch.empty(2, 2, 50, 48).to(E4M3)
        out, lse = torch.ops.flashmoe.attention_fp8_forward(q, k, v, 0.1, True, False, None, None, None, 1.0, 1.0, 1.0)
    assert (out.shape, out.dtype, out.stride()) == ((2, 4, 30, 48), torch.bfloat16, (5760, 48, 192, 1))
    assert (lse.shape, lse.dtype) == ((2, 4, 30), torch.float32)
