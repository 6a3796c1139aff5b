"""What attention's operators launch on each GPU, and their results.

Run by tests/host/test_attention_launch.py in a separate process, whose extension has a driver without a GPU."""

import ctypes
import functools
import json
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe import _extension, operator

LIBRARY = ctypes.CDLL(os.environ["FLASHMOE_LIBRARY"])
LIBRARY.fake_log.restype = ctypes.c_char_p
LIBRARY.fake_copies.argtypes = [ctypes.c_int64]
LIBRARY.fake_copies.restype = ctypes.c_int64
EVERY = operator.find_operators
# This library has attention's operators; only the names of the others are known.
operator.find_operators = lambda: tuple(o for o in EVERY() if o.schema or hasattr(torch.ops.flashmoe, o.name))

from flashmoe.attn import merge  # noqa: E402
from tests.arguments import attention as calls  # noqa: E402
from tests.attention import (  # noqa: E402
    test_dropout,
    test_e4m3,
    test_fp8,
    test_fp8_varlen,
    test_varlen_gradients,
    varlen_reference,
)
from tests.attention.gradients import autograd_gradients, plain_function  # noqa: E402
from tests.attention.reference import Problem  # noqa: E402
from tests.attention.varlen_reference import Band, Ragged, check_ragged  # noqa: E402
from tests.host.attention.dense_calls import DTYPE, LIMIT, check_dense, tensors  # noqa: E402
from tests.host.every_call import differences  # noqa: E402

CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
ON_A_GPU = torch.library.Library("flashmoe", "IMPL")
CAPABILITIES = (80, 90)
# Operations that begin before the preceding one has ended, if they are compiled to wait for it; the others do not.
EARLY = ("decode", "decode_e4m3", "decode_scores", "decode_values", "chunk_forward", "chunk_forward_e4m3")
EARLY += ("combine", "dequantize_e4m3", "forward_e4m3")


@pytest.fixture(scope="session", autouse=True)
def calls_for_the_cpu_run_the_gpus_path() -> None:
    """Once, in each file that imports it."""
    _run_the_gpus_path()


@functools.cache
def _run_the_gpus_path() -> None:
    assert flashmoe.attention is not None  # the operators are there
    in_python = {found.name for found in operator.find_operators() if found.schema}
    names = {
        name.removeprefix("flashmoe::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("flashmoe::")
    }
    for name in sorted(names - in_python):
        overload = getattr(torch.ops.flashmoe, name).default
        if overload.has_kernel_for_dispatch_key("CUDA"):
            with warnings.catch_warnings(action="ignore"):
                ON_A_GPU.impl(overload, functools.partial(overload.redispatch, CUDA), "CPU")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fills uninitialised tensors with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(1)
    for module in (varlen_reference, test_e4m3, test_fp8, test_fp8_varlen, test_dropout):
        monkeypatch.setattr(module, "assert_ran_here", lambda device: None)
    yield
    torch.use_deterministic_algorithms(False)


def begin(capability: int, multiprocessors: int = 132) -> None:
    LIBRARY.fake_gpu(capability, multiprocessors, False)


def launches(dtype: str = "bf16") -> list[dict[str, Any]]:
    """Returns what was launched since the GPU was chosen; fails if anything was wrong with it."""
    found: list[dict[str, Any]] = [json.loads(line) for line in LIBRARY.fake_log().decode().splitlines()]
    for launch in found:
        assert launch["problem"] == "", launch
        name = operation_of(launch)
        assert launch["is_dependent"] is (launch["waits"] and name in EARLY), launch
        assert f"_{dtype}" in launch["symbol"] or name == "transpose_e4m3", launch
    return found


def operation_of(launch: dict[str, Any]) -> str:
    return str(launch["operation"]).removeprefix("attention_").removeprefix("varlen_")


def launched(dtype: str = "bf16") -> list[str]:
    """Returns the operations that were launched."""
    return [operation_of(launch) for launch in launches(dtype)]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("causal", "layout"), [(False, "bhsd"), (True, "bshd")])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 59), (2, 1, 128)])
def test_dense(capability: int, causal: bool, layout: str, heads: int, kv_heads: int, head_dim: int) -> None:
    begin(capability)
    check_dense(Problem(70, 65, head_dim, heads, kv_heads, 2, causal), layout, 7, with_lse=causal)
    assert launched()[-2:] == ["backward_dq", "backward_dkv"]


@pytest.mark.parametrize(("capability", "with_sinks"), [(80, True), (90, False)])
@pytest.mark.parametrize("band", test_varlen_gradients.BANDS, ids=str)
def test_ragged(capability: int, band: Band, with_sinks: bool) -> None:
    """Different head dims, spare tokens, sequences without rows or keys."""
    begin(capability)
    ragged = Ragged((65, 1, 0, 13), (65, 9, 4, 31), 4, 2, 64, 40, spare=3)
    check_ragged(ragged, band, "cpu", DTYPE, with_sinks=with_sinks, num_splits=1)
    test_varlen_gradients._check_ragged(band, "cpu", (DTYPE,), with_sinks=with_sinks)
    assert launched()[-2:] == ["backward_dq", "backward_dkv"]


@pytest.mark.parametrize(
    ("ragged", "multiprocessors", "expected"),
    [
        (Ragged((150, 3), (4500, 700), 4, 2, 64, 64, spare=3), 132, ["chunk_forward", "combine"]),
        (Ragged((20, 3), (2700, 20), 12, 2, 64, 40), 132, ["chunk_forward", "combine"]),
        (Ragged((5, 3, 0), (200, 100, 9), 24, 2, 64, 64), 132, ["chunk_forward"]),
        (Ragged((5, 3, 0), (200, 100, 9), 24, 2, 64, 64), 1, ["chunk_forward"]),
    ],
    ids=str,
)
def test_chunks(ragged: Ragged, multiprocessors: int, expected: list[str]) -> None:
    """Few rows, whose keys one or several blocks read; with sinks, rows that see no key, more tiles than blocks."""
    begin(90, multiprocessors)
    check_ragged(ragged, Band(causal=True), "cpu", DTYPE, with_sinks=True, num_splits=0)
    assert launched() == expected


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_one_split_divides_a_batch_as_its_sequences_alone_would_be(capability: int) -> None:
    """Sequences of up to 16 rows are decoded, whatever the longest one has."""
    begin(capability)
    ragged = Ragged((65, 16, 0, 3, 17), (65, 90, 4, 31, 17), 4, 2, 64, 40, spare=3)
    check_ragged(ragged, Band(causal=True), "cpu", DTYPE, with_sinks=True, num_splits=1)
    assert launched() == ["forward", "decode"]
    check_ragged(ragged, Band(causal=True), "cpu", DTYPE, with_sinks=True)
    assert launched()[2:] == ["forward"]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("page_size", [0, 4, 16])
@pytest.mark.parametrize(("head_dim", "spare", "offset"), [(64, 0, 0), (59, 0, 0), (56, 8, 0), (56, 4, 0), (64, 0, 4)])
def test_new_keys_go_behind_the_lengths(
    capability: int, page_size: int, head_dim: int, spare: int, offset: int
) -> None:
    """Into a dense cache or pages, which the last sequence's keys fill. New rows have gaps, or begin anywhere."""
    begin(capability)
    lengths = torch.tensor([5, 0, 29], dtype=torch.int32)
    own = (3, 2, 3, head_dim)
    new = [at(torch.randn(2**11).to(DTYPE), offset * index, own, head_dim + spare * index) for index in range(2)]
    table = torch.randperm(3 * 32 // page_size).int().view(3, -1) if page_size else None
    shape = (3 * 32 // page_size, page_size, 2, head_dim) if page_size else (3, 2, 32, head_dim)
    caches = [torch.zeros(shape, dtype=DTYPE) for _ in range(2)]
    torch.ops.flashmoe.attention_append_(*caches, *new, lengths, table)
    assert launched() == ["append"]
    for cache, values in zip(caches, new, strict=True):
        seen = cache if table is None else cache[table.long()].flatten(1, 2).transpose(1, 2)
        for sequence, length in enumerate(lengths.tolist()):
            assert torch.equal(seen[sequence, :, length : length + 3], values[sequence])
            assert not seen[sequence, :, :length].any()
            assert not seen[sequence, :, length + 3 :].any()


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("heads", "rows", "keys"), [((8, 8), 4, 1500), ((2, 1), 65, 1100), ((4, 2), 1, 700)])
def test_divided_keys(capability: int, heads: tuple[int, int], rows: int, keys: int) -> None:
    begin(capability)
    for causal in (False, True):
        q, k, v, _ = tensors(Problem(rows, keys, 16, *heads, 1, causal), "bshd")
        out, lse = flashmoe.attention(q, k, v, causal=causal, return_lse=True)
        expected, expected_lse = plain_function(Problem(rows, keys, 16, *heads, 1, causal))(
            q.double(), k.double(), v.double()
        )
        assert (out.double() - expected).abs().max() <= LIMIT
        assert (lse.double() - expected_lse).abs().max() <= 1e-3
    launched()


def at(memory: Tensor, offset: int, shape: tuple[int, ...], row: int) -> Tensor:
    """A view of ``memory`` from an element on, with rows ``row`` elements apart."""
    strides = [row * math.prod(shape[axis + 1 : -1]) for axis in range(len(shape) - 1)]
    return memory[offset:].as_strided(shape, (*strides, 1))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 16), (72, 8), (16, 1), (5, 7), (9, 40), (16, 129)])
def test_tensors_are_copied_where_16_bytes_cannot_be_loaded_and_nowhere_else(
    capability: int, head_dim: int, head_dim_v: int
) -> None:
    """Forward, dense and ragged, and backward: addresses, rows and columns in elements of two bytes."""
    for offset, spare in ((0, 0), (8, 0), (4, 0), (0, 8), (0, 4)):
        memory = torch.randn(2**17).to(DTYPE)
        q = at(memory, offset, (2, 2, 30, head_dim), head_dim + spare)
        k = at(memory, offset + 32768, (2, 2, 20, head_dim), head_dim + spare)
        v = at(memory, offset + 65536, (2, 2, 20, head_dim_v), head_dim_v + spare)
        grad_out = at(memory, offset + 98304, (2, 2, 30, head_dim_v), head_dim_v + spare)
        inputs = [(tensor, width) for tensor, width in ((q, head_dim), (k, head_dim), (v, head_dim_v))]
        stays = [offset % 8 == 0 and width % 8 == 0 and spare % 8 == 0 for _, width in inputs]
        for is_dense in (True, False):
            begin(capability)
            names: dict[str, Any] = {} if is_dense and head_dim == head_dim_v else {"window": (25, 0)}
            leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            out, lse = flashmoe.attention(*leaves, causal=True, return_lse=True, **names)
            (forward,) = launches()
            assert [one in forward["tensors"] for one in (t.data_ptr() for t, _ in inputs)] == stays, (offset, spare)
            assert (out.data_ptr() in forward["tensors"]) is (head_dim_v % 8 == 0)
            found = torch.autograd.grad(out, leaves, grad_out)
            dq, dkv = launches()[1:]
            assert (grad_out.data_ptr() in dkv["tensors"]) is (stays[2] and head_dim_v % 8 == 0)
            for tensor, width, launch in zip(found, (head_dim, head_dim, head_dim_v), (dq, dkv, dkv), strict=True):
                assert (tensor.data_ptr() in launch["tensors"]) is (width % 8 == 0)
            wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
            seen = torch.ones(30, 20, dtype=torch.bool).tril(-10)
            if names:
                seen &= torch.ones(30, 20, dtype=torch.bool).triu(-10 - 25)
            scores = (wide[0] @ wide[1].mT * head_dim**-0.5).masked_fill(~seen, -math.inf)
            weights = torch.softmax(scores, -1).nan_to_num()
            expected = weights @ wide[2]
            assert (out.double() - expected).abs().max() <= LIMIT * expected.abs().max()
            assert torch.equal(lse > -math.inf, seen.any(-1).expand(2, 2, 30))
            for ours, wanted in zip(found, torch.autograd.grad(expected, wide, grad_out.double()), strict=True):
                assert (ours.double() - wanted).abs().max() <= LIMIT * wanted.abs().max()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_keys_that_all_heads_share(capability: int) -> None:
    """A stride of 0: the sm80 kernels read it in place, TMA does not."""
    begin(capability)
    q, grad_out = (torch.randn(2, 4, 65, 16).to(DTYPE) for _ in range(2))
    k, v = (torch.randn(2, 1, 70, 16).to(DTYPE).expand(2, 4, 70, 16) for _ in range(2))
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    found = torch.autograd.grad(flashmoe.attention(*leaves), leaves, grad_out)
    expected = autograd_gradients(
        plain_function(Problem(65, 70, 16, 4, 4, 2)), (q, k, v), torch.float64, grad_out, None
    )
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours.double() - wanted).abs().max() <= LIMIT * wanted.abs().max()
    uses_maps = {launch["symbol"].split("_sm")[1][:2] for launch in launches()}
    assert (k.data_ptr() in launches()[-1]["tensors"]) is (uses_maps == {"80"})


def test_lengths_are_looked_at_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(9, 2, 16).to(DTYPE)
    for ends, words in (([0, 6, 5, 9], "from 6 to 5"), ([0, 4, 6, 9], "")):
        begin(90)
        lengths = torch.tensor(ends, dtype=torch.int32)
        for asked in ("0", "1"):
            monkeypatch.setenv("FLASHMOE_CHECK_VALUES", asked)
            if asked == "1" and words:
                with pytest.raises(flashmoe.errors.ArgumentError, match=words):
                    flashmoe.attention_varlen(q, q, q, lengths, lengths, 9, 9)
            elif not words:
                flashmoe.attention_varlen(q, q, q, lengths, lengths, 9, 9)


def test_lengths_of_a_gpu_are_not_looked_at_unasked() -> None:
    """Reading them would wait for the GPU."""
    q, ends = torch.randn(9, 2, 16).to(DTYPE), torch.tensor([0, 6, 5, 9], dtype=torch.int32)
    begin(90)
    LIBRARY.fake_computing(0)
    LIBRARY.fake_gpu_alone(1)
    try:
        torch.ops.flashmoe.attention_varlen_forward(q, q, q, ends, ends, *[None] * 4, 9, 9, 0.25, -1, -1, 0.0, 0)
    finally:
        LIBRARY.fake_gpu_alone(0)
        LIBRARY.fake_computing(1)
    assert launched()


def test_a_map_that_the_driver_refuses_is_told_in_numbers() -> None:
    q, k = torch.zeros(2, 3, 700, 128, dtype=DTYPE), torch.zeros(2, 3, 640, 128, dtype=DTYPE)
    begin(90)
    LIBRARY.fake_refused_maps(1)
    sizes, strides = r"sizes \[2, 3, 700, 128\]", r"byte strides \[537600, 179200, 256\]"
    try:
        with pytest.raises(RuntimeError, match=rf"{sizes}, {strides}, box \[\d+, 64\]"):
            torch.ops.flashmoe.flash_attention_forward(q, k, k, 0.25, False)
    finally:
        LIBRARY.fake_refused_maps(0)


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
@pytest.mark.parametrize("head_dim", [8, 24, 59, 256, 512])
@pytest.mark.parametrize("layout", ["dense", "rows", "ragged"])
def test_two_results_as_one(layout: str, head_dim: int, dtype: torch.dtype) -> None:
    """In place, into float32 too; some rows of a tensor, ragged, and rows that are not aligned to 16 bytes."""
    begin(90)
    whole = (7, 3, head_dim) if layout == "ragged" else (2, 3, 7, head_dim)
    rows = whole[:-1] if layout != "ragged" else (3, 7)
    own = slice(2, None) if layout == "rows" else slice(None)
    out, part = (torch.randn(whole).to(DTYPE) for _ in range(2))
    lse, part_lse = torch.randn(rows) * 3, torch.randn(rows) * 3
    out = out.to(dtype)
    expected = merge._merged(*(one.double() for one in (out, lse, part, part_lse)))
    before = out.clone()
    cut = [one if layout == "ragged" else one[:, :, own] for one in (out, lse, part, part_lse)]
    torch.ops.flashmoe._attention_merge(*cut, cut[0], cut[1])
    assert launched() == ["merge"]
    for mine, wanted in zip((out, lse), expected, strict=True):
        found, needed = (one if layout == "ragged" else one[:, :, own] for one in (mine, wanted))
        torch.testing.assert_close(found.double(), needed, rtol=LIMIT, atol=LIMIT)
    assert layout != "rows" or torch.equal(out[:, :, :2], before[:, :, :2])


def test_results_that_do_not_go_together() -> None:
    begin(90)
    out, lse = torch.randn(2, 3, 7, 16).to(DTYPE), torch.randn(2, 3, 7)
    call = torch.ops.flashmoe._attention_merge
    call(*[out[:, :0], lse[:, :0]] * 3)
    call(*[out[:, :, :0], lse[:, :, :0]] * 3)
    call(*[out[:0], lse[:0]] * 3)
    assert launched() == []
    wide = torch.zeros(1, 1, 1, 520, dtype=DTYPE), torch.zeros(1, 1, 1)
    many = out[:1, :1, :1].expand(2, 1 << 15, 1 << 15, 16), torch.zeros(1 << 15).expand(2, 1 << 15, -1)
    for given, says in (
        (many * 3, r"tensor\.size\|name=lse_a as one dimension"),
        ((out.float(), lse, out, lse, out, lse), r"companion_dtype\|name=out_a\|found=float32\|needed=bfloat16"),
        ((out, lse, out, lse.double(), out, lse), r"companion_dtype\|name=lse_b\|found=float64\|needed=float32"),
        ((out, lse, out, lse, out[:, :, :5], lse), r"backward_shape\|name=out\|needed=\[2, 3, 7, 16\]"),
        ((out, lse[:, :2], out, lse, out, lse), r"backward_shape\|name=lse_a\|needed=\[2, 3, 7\]"),
        ((out, lse, out, lse, out, lse[0]), r"companion_rank\|name=lse\|rank=3"),
        ((out[0], lse[0], out[0], lse[0], out[0], lse[0]), r"backward_shape\|name=lse_a\|needed=\[7, 3\]"),
        ((out[0, 0], lse[0, 0]) * 3, "too_few_dimensions"),
        (wide * 3, r"head_dim\|name=out_b\|head_dim=520\|most=512"),
        ((out[..., :0], lse) * 3, r"head_dim\|name=out_b\|head_dim=0"),
        ((out[..., ::2], lse) * 3, r"tensor\.stride\|name=out_b"),
    ):
        with pytest.raises(RuntimeError, match=says):
            call(*given)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}, {"window": (3, 0)}, {"window": (-1, 2)}])
def test_consistent_calls_keep_their_options(capability: int, options: dict[str, Any]) -> None:
    begin(capability)
    q, k = torch.randn(2, 2, 40, 16).to(DTYPE), torch.randn(2, 2, 40, 16).to(DTYPE)
    found = flashmoe.attention(q, k, k, consistent=True, **options)
    expected = flashmoe.attention(q, k, k, **options)
    launches()
    assert (found - expected).abs().max() <= LIMIT


@pytest.mark.parametrize(
    ("options", "says"), [({"alibi_slopes": torch.ones(2)}, "ALiBi"), ({"softcap": 2.0}, "a softcap or a mask")]
)
def test_consistent_calls_over_pages_that_no_kernel_with_their_bits_reads(options: dict[str, Any], says: str) -> None:
    q, cache = torch.randn(1, 2, 40, 64).to(DTYPE), torch.randn(5, 12, 2, 64).to(DTYPE)
    given: dict[str, Any] = {"cache_seqlens": torch.tensor([50], dtype=torch.int32), "consistent": True}
    given["block_table"] = torch.arange(5, dtype=torch.int32)[None]
    begin(90)
    text = rf"consistent=True with {says}, head_dim 64 and pages of 12 keys: no kernel of compute capability 9\.0 gives batch-invariant results"
    with pytest.raises(flashmoe.errors.ArgumentError, match=text):
        flashmoe.attention_with_kvcache(q, cache, cache, **given, **options)


def test_few_dense_rows_are_decoded_and_consistent_ones_are_not() -> None:
    q, k = torch.randn(1, 2, 8, 128).to(DTYPE), torch.randn(1, 2, 40, 128).to(DTYPE)
    for consistent, kernel in ((False, "decode"), (True, "forward")):
        begin(90)
        flashmoe.attention(q, k, k, consistent=consistent)
        assert launched() == [kernel]


@pytest.mark.parametrize(
    ("heads", "keys", "decodes"), [(16, 512, True), (17, 512, False), (16, 511, False), (1, 512, True)]
)
def test_one_dense_row_is_decoded_up_to_16_heads_of_a_key_head(heads: int, keys: int, decodes: bool) -> None:
    q, k = torch.randn(1, heads, 1, 128).to(DTYPE), torch.randn(1, 1, keys, 128).to(DTYPE)
    begin(90)
    flashmoe.attention(q, k, k)
    assert [one["symbol"].split("_sm")[1][:2] for one in launches() if "decode" in one["symbol"]] == ["80"] * decodes


def test_a_wide_head_has_a_block_for_each_part_of_its_values() -> None:
    """Two heads, two tiles of rows, two parts: fewer than the multiprocessors, so that each tile has a block."""
    q, k = torch.randn(1, 2, 130, 512).to(DTYPE), torch.randn(1, 2, 40, 512).to(DTYPE)
    begin(90)
    flashmoe.attention(q, k, k)
    (launch,) = launches()
    assert launch["symbol"] == "flashmoe_attention_varlen_forward_sm90_bf16_d512"
    assert launch["grid"] == 8


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("number", range(len(calls.ROWS)), ids=lambda number: calls.ROWS[number][0])
def test_every_layout_that_is_taken(capability: int, number: int) -> None:

    name = calls.ROWS[number][0]

    def watch(results: list[Tensor]) -> None:
        """After one call: without results nothing is launched; the last kernel is one that was launched."""
        symbols = [launch["symbol"] for launch in launches("f16" if "fp8" in name else "bf16")]
        assert not symbols or any(one.numel() for one in results)
        if "row_dot" not in "".join(symbols[-1:]) and (symbols or name.endswith("_forward")):
            assert _extension.last_kernel() in (symbols or [""])
        begin(capability)

    begin(capability)
    if "fp8" not in name or capability == 90:
        assert differences(number, calls, layouts_alone=capability == 80, watch=watch) == []


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("rate", "l2_bytes"), [(4000, 1 << 20), (4001, 1 << 20), (4001, 1 << 14), (4001, 1 << 10), (4001, 170_667)]
)
def test_the_first_tiles_of_decoding_are_read_without_a_hint(rate: int, l2_bytes: int, head_dim: int) -> None:
    """On fast memory, wide heads: until blocks have read twice the L2; one tile if a batch is at most six L2."""
    batch, heads, keys = 2, 2, 1000
    q, k = torch.randn(batch, heads, 1, head_dim).to(DTYPE), torch.randn(batch, heads, keys, head_dim).to(DTYPE)
    begin(90)
    LIBRARY.fake_memory(rate, l2_bytes)
    flashmoe.attention_with_kvcache(q, k, k, cache_seqlens=torch.full((batch,), keys, dtype=torch.int32))
    LIBRARY.fake_memory(0, 0)
    (launch,) = launches()
    key_bytes = 4 * head_dim
    block_n = 64 if head_dim == 128 else 128
    expected = -(-2 * l2_bytes // (launch["grid"] * block_n * key_bytes))
    expected = 1 if batch * heads * keys * key_bytes <= 6 * l2_bytes else expected
    assert launch["unhinted"] == (expected if rate > 4000 and head_dim > 64 else 0)


@pytest.mark.parametrize(
    ("rate", "l2_bytes", "rows", "expected"),
    [
        (4001, 3_413_333, 32, 1),
        (4001, 3_413_334, 32, 0),
        (4001, 341_334, 32, 1),
        (4001, 341_333, 32, 0),
        (4001, 1 << 20, 33, 0),
        (4000, 1 << 20, 32, 0),
    ],
)
def test_keys_of_a_chunk_that_one_tile_reads_make_room_for_each_other(
    rate: int, l2_bytes: int, rows: int, expected: int
) -> None:
    """On fast memory, if they (2 048 000 bytes) are 3/5 to six times the L2; a tile is 32 rows of four heads."""
    q, k = torch.randn(2, 8, rows, 128).to(DTYPE), torch.randn(2, 2, 1000, 128).to(DTYPE)
    begin(90)
    LIBRARY.fake_memory(rate, l2_bytes)
    flashmoe.attention_with_kvcache(q, k, k, cache_seqlens=torch.full((2,), 1000, dtype=torch.int32), causal=True)
    LIBRARY.fake_memory(0, 0)
    first = launches()[0]
    assert (first["operation"], first["unhinted"] & 1) == ("attention_chunk_forward", expected)


@pytest.mark.parametrize(("multiprocessors", "rows", "expected"), [(132, 8, 2), (13, 8, 0), (13, 32, 2), (12, 32, 0)])
def test_the_sum_of_a_chunk_starts_early_where_it_has_room(multiprocessors: int, rows: int, expected: int) -> None:
    """1000 keys in three splits, for two key heads of two sequences; each block of the sum adds up four rows."""
    q, k = torch.randn(2, 8, rows, 128).to(DTYPE), torch.randn(2, 2, 1000, 128).to(DTYPE)
    begin(90, multiprocessors)
    flashmoe.attention_with_kvcache(q, k, k, cache_seqlens=torch.full((2,), 1000, dtype=torch.int32), causal=True)
    chunk, combine = launches()
    assert [chunk["operation"], combine["operation"]] == ["attention_chunk_forward", "attention_combine"]
    assert (chunk["grid"], combine["grid"]) == (12, 4 * rows)
    assert chunk["is_dependent"]
    assert combine["is_dependent"]
    assert chunk["unhinted"] == expected
