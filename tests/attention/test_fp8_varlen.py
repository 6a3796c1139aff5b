"""Ragged batches of q, k and v in float8_e4m3fn: against dense calls, bit for bit with 8-bit products; unused memory holds NaN."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashmoe
from flashmoe.errors import ArgumentError, DtypeError, ShapeError
from flashmoe_tools.operations.attention.e4m3 import E4M3

from .reference import assert_ran_here, reference
from .test_fp8 import NAN_CODE, has_products_of_8_bits

SPARE = 5  # rows of q after those of the sequences


@dataclass(frozen=True)
class Batch:
    """Lengths, heads and head dims; ``scales``: number of dimensions of the scales; ``room``: unused keys after each sequence's used ones."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    heads: tuple[int, int]
    head_dim: int
    scales: int
    causal: bool
    room: int = 0
    head_dim_v: int = 0


BATCHES = {
    "causal": Batch((65, 0, 1, 200, 9), (257, 130, 1, 200, 4), (4, 2), 64, 2, True),
    "full": Batch((3, 129, 40), (128, 1, 300), (2, 2), 128, 1, False),
    "no keys": Batch((7, 2, 66), (0, 5, 0), (2, 1), 128, 0, True),
    "used keys": Batch((30, 100), (150, 384), (3, 1), 256, 2, True, room=9),
    "narrow": Batch((70, 3), (128, 256), (2, 1), 80, 1, False, head_dim_v=40),
    "many": Batch(
        (*(index % 3 for index in range(40)), 70), (*(index % 5 for index in range(40)), 140), (2, 1), 64, 2, True
    ),
    "short": Batch((17,) * 60, (90,) * 60, (10, 1), 64, 0, True),
}


@dataclass(frozen=True)
class Drawn:
    """Codes as arguments of one call, and for each sequence [1, heads, length, columns] with scales [1, heads]."""

    tensors: tuple[Tensor, Tensor, Tensor]
    lengths: tuple[Tensor, Tensor]
    options: dict[str, Any]
    sequences: list[tuple[tuple[Tensor, Tensor], ...]]
    firsts: list[int]


def draw(b: Batch, device: str) -> Drawn:
    generator = torch.Generator().manual_seed(len(b.rows) + b.head_dim)
    count, columns = len(b.rows), (b.head_dim, b.head_dim, b.head_dim_v or b.head_dim)
    heads = (b.heads[0], b.heads[1], b.heads[1])
    ends_q = torch.tensor([0, *b.rows]).cumsum(0)
    ends_k = torch.tensor([0, *(length + b.room for length in b.keys)]).cumsum(0)
    totals = (int(ends_q[-1]) + SPARE, int(ends_k[-1]), int(ends_k[-1]))
    tensors, scales = [], []
    for of_heads, total, width in zip(heads, totals, columns, strict=True):
        tensors.append(torch.full((total, of_heads, width), NAN_CODE, dtype=torch.uint8).view(E4M3))
        sizes = {0: (1, 1), 1: (1, of_heads), 2: (count, of_heads)}[b.scales]
        scales.append((torch.rand(sizes, generator=generator) + 0.5).expand(count, of_heads))
    sequences = []
    for index in range(count):
        own = []
        for tensor, scale, ends, lengths in zip(
            tensors, scales, (ends_q, ends_k, ends_k), (b.rows, b.keys, b.keys), strict=True
        ):
            first, length = int(ends[index]), lengths[index]
            codes = (torch.randn(length, *tensor.shape[1:], generator=generator) + 0.25).to(E4M3)
            tensor.view(torch.uint8)[first : first + length] = codes.view(torch.uint8)
            own.append((codes.transpose(0, 1)[None], scale[index : index + 1]))
        sequences.append(tuple(own))
    options: dict[str, Any] = {"causal": b.causal}
    for name, scale in zip("qkv", scales, strict=True):
        given = float(scale[0, 0]) if b.scales == 0 else (scale if b.scales == 2 else scale[0]).contiguous().to(device)
        options[f"{name}_scale"] = given
    if b.room:
        options["seqused_k"] = torch.tensor(b.keys, dtype=torch.int32, device=device)
    lengths = tuple(ends.to(torch.int32).to(device) for ends in (ends_q, ends_k))
    q, k, v = (tensor.to(device) for tensor in tensors)
    return Drawn((q, k, v), (lengths[0], lengths[1]), options, sequences, ends_q.tolist())


def call(b: Batch, drawn: Drawn, device: str, **more: Any) -> tuple[Tensor, Tensor]:
    most = (max(b.rows) + 3, max(*b.keys, 1) + b.room + 2)
    result: tuple[Tensor, Tensor] = flashmoe.attention_varlen(
        *drawn.tensors, *drawn.lengths, *most, return_lse=True, **{**drawn.options, **more}
    )
    assert_ran_here(device)
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_each_sequence_is_a_dense_call(name: str, device: str, dtype: torch.dtype) -> None:
    b = BATCHES[name]
    drawn = draw(b, device)
    out, lse = call(b, drawn, device, out_dtype=dtype)
    assert out.dtype is dtype
    for index, (q, k, v) in enumerate(drawn.sequences):
        first, rows = drawn.firsts[index], b.rows[index]
        own, own_lse = out[first : first + rows].transpose(0, 1)[None], lse[None, :, first : first + rows]
        if has_products_of_8_bits(device):
            scales = {f"{n}_scale": one[1].contiguous().to(device) for n, one in (("q", q), ("k", k), ("v", v))}
            codes = (one[0].to(device) for one in (q, k, v))
            expected, expected_lse = flashmoe.attention(
                *codes, causal=b.causal, out_dtype=dtype, return_lse=True, **scales
            )
            assert torch.equal(own, expected)
            assert torch.equal(own_lse, expected_lse)
            continue
        exact, exact_lse = reference(*(codes.double() * scale[..., None, None] for codes, scale in (q, k, v)), b.causal)
        assert torch.allclose(own.cpu().double(), exact, rtol=2**-7, atol=0.02)
        assert torch.allclose(own_lse.cpu().double(), exact_lse, atol=0.02)


def test_a_sequence_has_its_bits_in_any_batch(device: str) -> None:
    """And the same bits on every run."""
    b = BATCHES["causal"]
    drawn = draw(b, device)
    out, lse = call(b, drawn, device)
    used = sum(b.rows)
    for _ in range(50 if device != "cpu" else 2):
        again, lse_again = call(b, drawn, device)
        assert torch.equal(again[:used], out[:used])
        assert torch.equal(lse_again[:, :used], lse[:, :used])
    first, rows = drawn.firsts[3], b.rows[3]
    lengths = tuple(ends[3:5].clone() for ends in drawn.lengths)
    scales = {f"{n}_scale": drawn.options[f"{n}_scale"][3:4] for n in "qkv"}
    (q, k, v), (ends_q, ends_k) = drawn.tensors, lengths
    q, k, v = q[first : first + rows], *(one[int(ends_k[0]) : int(ends_k[1])] for one in (k, v))
    alone, alone_lse = flashmoe.attention_varlen(
        *(q, k, v, ends_q - ends_q[0], ends_k - ends_k[0], 200, 200), causal=True, return_lse=True, **scales
    )
    inside = slice(first, first + rows)
    assert torch.equal(alone, out[inside])
    assert torch.equal(alone_lse, lse[:, inside])


@pytest.mark.gpu
def test_a_graph_reads_new_lengths() -> None:
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(300, 2, 128, generator=generator).to(E4M3).cuda() for _ in range(3))
    ends = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")

    def attend(own: Tensor) -> Tensor:
        result: Tensor = flashmoe.attention_varlen(q, k, v, own, own, 300, 300, causal=True)
        return result

    attend(ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(ends)
    for middle in (0, 37, 128, 300):
        ends[1] = middle
        graph.replay()
        assert torch.equal(out, attend(ends.clone()))


@pytest.mark.parametrize(
    "options",
    [
        {"window": (20, 0)},
        {"softcap": 5.0},
        {"sinks": (0.5, -1.0)},
        {"alibi_slopes": (0.5, 0.1)},
        {"scale": -0.1},
        {"dropout_p": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_run_in_16_bits(options: dict[str, Any], device: str) -> None:
    b = Batch((40, 3), (90, 30), (2, 1), 64, 0, True)
    drawn = draw(b, device)
    made = {
        name: torch.tensor(value, device=device) if type(value) is tuple and name != "window" else value
        for name, value in options.items()
    }
    if "dropout_p" in made:
        made["rng_state"] = torch.tensor([3, 4], device=device)
    out, lse = call(b, drawn, device, **made)
    wide = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = (
        one.float().mul(drawn.options[f"{n}_scale"]).to(wide) for n, one in zip("qkv", drawn.tensors, strict=True)
    )
    expected, expected_lse = flashmoe.attention_varlen(
        *tensors, *drawn.lengths, 43, 92, causal=True, return_lse=True, **made
    )
    rows = slice(0, 43)
    assert torch.equal(out[rows], expected[rows].to(torch.bfloat16))
    assert torch.equal(lse[:, rows], expected_lse[:, rows])


@pytest.mark.parametrize("scales", [0, 1, 2])
def test_over_pages_the_queries_are_dequantised(scales: int, device: str) -> None:
    if device != "cpu" and torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("no kernel reads caches of 8 bits there")
    generator = torch.Generator().manual_seed(3)
    rows, used = (5, 0, 17), torch.tensor([20, 3, 40], dtype=torch.int32)
    ends = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(22, 4, 64, generator=generator).to(E4M3).to(device)
    pages = torch.randn(9, 16, 2, 64, generator=generator).to(E4M3).to(device)
    table = torch.tensor([[1, 3, 0], [2, 0, 0], [5, 4, 8]], dtype=torch.int32)
    sizes = {0: (), 1: (4,), 2: (3, 4)}[scales]
    scale = (torch.rand(sizes, generator=generator) + 0.5).to(device)
    of_rows = scale.repeat_interleave(torch.tensor(rows, device=device), dim=0) if scales == 2 else scale
    wide = (q.float() * (of_rows[..., None] if scales else of_rows)).to(torch.bfloat16)
    given = {"causal": True, "seqused_k": used.to(device), "block_table": table.to(device), "k_scale": 0.5}
    found = flashmoe.attention_varlen(q, pages, pages, ends.to(device), None, 17, 40, q_scale=scale, **given)
    expected = flashmoe.attention_varlen(wide, pages, pages, ends.to(device), None, 17, 40, **given)
    assert torch.equal(found, expected)


def test_gradients_are_those_of_the_dequantised_tensors(device: str) -> None:
    b = Batch((40, 9), (50, 20), (2, 1), 64, 2, True)
    drawn = draw(b, device)
    v_scale = drawn.options["v_scale"].clone().requires_grad_()
    out, _ = call(b, drawn, device, v_scale=v_scale)
    rows = out[:49].float()
    rows.sum().backward()
    parts = torch.stack([one.sum(dim=(0, 2)).sum() for one in rows.split(b.rows)])
    assert v_scale.grad is not None
    assert torch.allclose(v_scale.grad[:, 0], parts / v_scale.detach()[:, 0], rtol=0.02, atol=0.05)


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_key_at_all(tokens: int, device: str) -> None:
    """Without tokens, or with tokens that belong to no sequence."""
    q = torch.zeros(3, 2, 64, device=device).to(E4M3)
    k = q[:tokens]
    ends_q, ends_k = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in ((0, 2, 3), (0, 0, 0)))
    out, lse = flashmoe.attention_varlen(q, k, k, ends_q, ends_k, 2, 0, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_what_is_refused(device: str) -> None:
    b = Batch((4, 4), (4, 4), (2, 1), 64, 0, True)
    q, k, v = draw(b, device).tensors
    ends = torch.tensor([0, 4, 8], dtype=torch.int32, device=device)
    q = q[:8]
    wide = q.to(torch.bfloat16)
    out = torch.empty(8, 2, 64, dtype=torch.bfloat16, device=device)
    cases: tuple[tuple[type[Exception], str, tuple[Tensor, ...], dict[str, Any]], ...] = (
        (DtypeError, "quantise all three", (q, k.to(torch.bfloat16), v), {}),
        (DtypeError, "out_dtype must be", (q, k, v), {"out_dtype": torch.float32}),
        (ArgumentError, "is only used with q, k and v", (wide, k, v), {"q_scale": 0.5}),
        (ArgumentError, "is only used with q, k and v", (wide, k, v), {"out_dtype": torch.float16}),
        (ArgumentError, "remove out=", (q, k, v), {"out": out}),
        (ShapeError, "q_scale must be a number", (q, k, v), {"q_scale": torch.ones(3, device=device)}),
        (ShapeError, "v_scale must be a number", (q, k, v), {"v_scale": torch.ones(2, 1, 1, device=device)}),
        (ShapeError, "k_scale must be a number", (q, k, v), {"k_scale": torch.ones(3, device=device), "softcap": 3.0}),
        (ArgumentError, "scale must be finite", (q, k, v), {"scale": math.inf}),
    )
    for error, text, tensors, options in cases:
        with pytest.raises(error, match=text):
            flashmoe.attention_varlen(*tensors, ends, ends, 4, 4, **options)


def test_compiled(device: str) -> None:
    b = BATCHES["full"]
    drawn = draw(b, device)

    def call_it(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = flashmoe.attention_varlen(q, k, v, *drawn.lengths, 129, 300, k_scale=0.5)
        return result

    rows = slice(0, sum(b.rows))
    compiled = torch.compile(call_it, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*drawn.tensors)[rows], call_it(*drawn.tensors)[rows])


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(30, heads, width).to(E4M3) for heads, width in ((4, 64), (2, 64), (2, 48)))
        ends = torch.empty(3, dtype=torch.int32)
        scales = (None, None, None, 1.0, 1.0, 1.0)
        out, lse = torch.ops.flashmoe.attention_fp8_varlen_forward(
            q, k, v, ends, ends, None, 30, 30, 0.1, True, False, *scales
        )
    assert (out.shape, out.dtype) == ((30, 4, 48), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((4, 30), torch.float32)
