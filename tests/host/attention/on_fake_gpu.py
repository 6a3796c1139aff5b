"""Run by tests/host/test_attention_launch.py in a process of its own, whose extension has a driver without a GPU: what attention's
operators launch on each GPU, and what comes out."""

import ctypes
import functools
import itertools
import json
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from torch import Tensor

import flashmoe
from flashmoe import _extension, operator

LIBRARY = ctypes.CDLL(os.environ["FLASHMOE_LIBRARY"])
LIBRARY.fake_log.restype = ctypes.c_char_p
LIBRARY.fake_copies.argtypes = [ctypes.c_int64]
LIBRARY.fake_copies.restype = ctypes.c_int64
EVERY = operator.find_operators
# This library has attention's operators; the others are known by name alone.
operator.find_operators = lambda: tuple(o for o in EVERY() if o.schema or hasattr(torch.ops.flashmoe, o.name))

from flashmoe.attn import bias_gradient, fp8, merge  # noqa: E402
from flashmoe.attn.options import VarlenBackward  # noqa: E402
from flashmoe_tools.operations.attention.reference import ScoreOptions  # noqa: E402
from tests.arguments import attention as calls  # noqa: E402
from tests.attention import (  # noqa: E402
    test_bias_gradient,
    test_dropout,
    test_e4m3,
    test_e4m3_drawn,
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


@pytest.fixture(scope="session", autouse=True)
def calls_for_the_cpu_run_the_gpus_path() -> None:
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
    """Every tensor that is made without values is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(1)
    for module in (varlen_reference, test_e4m3, test_fp8, test_fp8_varlen, test_dropout):
        monkeypatch.setattr(module, "assert_ran_here", lambda device: None)
    yield
    torch.use_deterministic_algorithms(False)


def begin(capability: int, multiprocessors: int = 132) -> None:
    LIBRARY.fake_gpu(capability, multiprocessors, False)


def launches() -> list[dict[str, Any]]:
    """What was launched since the GPU was chosen; nothing was wrong with it."""
    found: list[dict[str, Any]] = [json.loads(line) for line in LIBRARY.fake_log().decode().splitlines()]
    assert [launch for launch in found if launch["problem"]] == [], [
        launch["problem"] for launch in found if launch["problem"]
    ]
    return found


def launched() -> list[str]:
    """The operations."""
    return [launch["operation"].removeprefix("attention_").removeprefix("varlen_") for launch in launches()]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("causal", "layout"), [(False, "bhsd"), (True, "bshd")])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 59), (2, 1, 128)])
def test_dense(capability: int, causal: bool, layout: str, heads: int, kv_heads: int, head_dim: int) -> None:
    begin(capability)
    check_dense(Problem(70, 65, head_dim, heads, kv_heads, 2, causal), layout, 7, with_lse=causal)
    assert launched()[-2:] == ["backward_dq", "backward_dkv"]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("needs", range(1, 7))
def test_kernels_of_other_gradients_do_not_run(capability: int, needs: int) -> None:
    begin(capability)
    check_dense(Problem(65, 70), "bhsd", needs, with_lse=True)
    first = "backward_dq" if needs & 1 else "row_dot"
    assert launched()[1:] == [first, *(["backward_dkv"] if needs & 6 else [])]
    assert ("backward_dkv" if needs & 6 else "backward_dq") in _extension.last_kernel()


def test_nothing_runs_if_one_of_the_kernels_cannot() -> None:
    """Of a width that no other test here has: a kernel that was loaded once is not asked for again."""
    begin(80)
    q, k, v, grad_out = tensors(Problem(20, 20, 256), "bhsd")
    out, lse = flashmoe.attention(q, k, v, return_lse=True)
    before = launched()
    LIBRARY.fake_missing_kernels(b"attention_backward_dkv")
    try:
        with pytest.raises(RuntimeError, match="cuModuleGetFunction"):
            torch.ops.flashmoe._flash_attention_backward(grad_out, None, q, k, v, out, lse, 0.0625, False, 7)
    finally:
        LIBRARY.fake_missing_kernels(b"")
    assert launched() == before


@pytest.mark.parametrize("causal", [False, True])
def test_the_fused_form(causal: bool) -> None:
    begin(90, 1)
    check_dense(Problem(1024, 1100, 16, 1, 1, 2, causal), "bhsd", 7, with_lse=True)
    assert launched()[-3:] == ["backward_fused_prepare", "backward_fused", "backward_fused_convert"]


@pytest.mark.parametrize(("capability", "with_sinks"), [(80, True), (90, False)])
@pytest.mark.parametrize("band", test_varlen_gradients.BANDS, ids=str)
def test_ragged(capability: int, band: Band, with_sinks: bool) -> None:
    """Head dims of their own, spare tokens, sequences without rows or keys."""
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
    """Few rows, whose keys one block or several read; with sinks, and rows that see no key; more tiles than blocks."""
    begin(90, multiprocessors)
    check_ragged(ragged, Band(causal=True), "cpu", DTYPE, with_sinks=True, num_splits=0)
    assert launched() == expected


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_one_split_divides_a_batch_as_its_sequences_alone_would_be(capability: int) -> None:
    """Those of up to 16 rows are decoded, whatever the longest has."""
    begin(capability)
    ragged = Ragged((65, 16, 0, 3, 17), (65, 90, 4, 31, 17), 4, 2, 64, 40, spare=3)
    check_ragged(ragged, Band(causal=True), "cpu", DTYPE, with_sinks=True, num_splits=1)
    assert launched() == ["forward", "decode"]
    check_ragged(ragged, Band(causal=True), "cpu", DTYPE, with_sinks=True)
    assert launched()[2:] == ["forward"]


def test_ragged_by_the_fused_form() -> None:
    begin(90, 1)
    ragged = Ragged((1030, 3), (1030, 1100), 2, 2, 16, 16, spare=2)
    q, k, v = (tensor.nan_to_num().requires_grad_() for tensor in ragged.tensors("cpu", DTYPE))
    out, lse = flashmoe.attention_varlen(q, k, v, *ragged.cu_seqlens("cpu"), *ragged.longest, return_lse=True)
    tokens = sum(ragged.lengths_q)
    grad_out, grad_lse = torch.randn(tokens, 2, 16).to(DTYPE), torch.randn(2, tokens)
    found = torch.autograd.grad((out[:tokens], lse[:, :tokens]), (q, k, v), (grad_out, grad_lse))
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    outputs = varlen_reference.expected(ragged, *wide, Band())
    expected = torch.autograd.grad(outputs, wide, (grad_out.double(), grad_lse.double()))
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours.double() - wanted).abs().max() <= LIMIT * wanted.abs().max()
    assert launched()[-3:] == ["backward_fused_prepare", "backward_fused", "backward_fused_convert"]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("page_size", [0, 4, 16])
@pytest.mark.parametrize(("head_dim", "spare", "offset"), [(64, 0, 0), (59, 0, 0), (56, 8, 0), (56, 4, 0), (64, 0, 4)])
def test_new_keys_go_behind_the_lengths(
    capability: int, page_size: int, head_dim: int, spare: int, offset: int
) -> None:
    """Into a dense cache or pages; those of the last sequence fill it. New rows lie apart, or begin anywhere."""
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


@pytest.mark.parametrize(
    ("layout", "kind", "head_dim", "name"),
    [
        ("pages", "pages", 64, "plain"),
        ("pages", "pages", 24, "rows"),
        ("pages", "sequences", 40, "sinks"),
        ("dense", "heads", 8, "window"),
        ("dense", "one", 64, "one split"),
        ("dense", "sequences", 48, "softcap"),
    ],
)
def test_caches_of_codes(layout: str, kind: str, head_dim: int, name: str) -> None:
    """As the CPU's own test: the bits of the dequantised cache, where scales are powers of two."""
    begin(90)
    case = test_e4m3.make(layout, kind, DTYPE, "cpu", head_dim=head_dim, **test_e4m3.OPTIONS[name])
    for found, wanted in zip(case.call(has_codes=True), case.call(has_codes=False), strict=True):
        assert (found - wanted).abs().nan_to_num().max() <= LIMIT
        assert torch.equal(found.isfinite(), wanted.isfinite())
    assert launched()[0] == "decode_e4m3"


def test_codes_are_appended_and_read_by_many_rows() -> None:
    begin(90)
    test_e4m3.test_appending_rounds_every_number(3.0, DTYPE, "cpu")
    assert launched()[0] == "append_e4m3"
    begin(90)
    test_e4m3.test_many_rows("pages", "pages", True, {}, DTYPE, "cpu")
    assert launched().count("dequantize_e4m3") == 1
    for has_pages in (False, True):
        begin(90)
        test_e4m3.test_a_window_of_a_long_cache(has_pages, DTYPE, "cpu")
        assert launched().count("dequantize_e4m3") == 1
    # Of 1000 keys, which seem to be there, a chunk's kernel reads codes.
    for has_page_scales in (True, False):
        begin(90)
        test_e4m3.test_many_rows_of_pages_with_less_room_than_max_seqlen_k(has_page_scales, DTYPE, "cpu")
        assert launched().count("chunk_forward_e4m3") == 1
        assert launched().count("dequantize_e4m3") == 1
    begin(75)  # which has no kernel that reads codes
    test_e4m3.make("pages", "pages", torch.float16, "cpu").call(has_codes=True)
    assert launched() == ["dequantize_e4m3", "forward"]


@pytest.mark.parametrize("kind", ["heads", "sequences", "pages"])
def test_appended_codes_have_their_own_scales(kind: str) -> None:
    new, caches = torch.randn(2, 2, 5, 64).to(DTYPE), [torch.zeros(4, 16, 2, 64).to(test_e4m3.E4M3) for _ in range(2)]
    table, held = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), torch.tensor([14, 3], dtype=torch.int32)
    scale = torch.rand({"heads": (2,), "sequences": (2, 2), "pages": (4, 1, 2, 1)}[kind]) + 0.5
    begin(90)
    given: dict[str, Any] = {"cache_seqlens": held, "block_table": table, "k_scale": scale, "v_scale": scale}
    flashmoe.attention_with_kvcache(new[:, :, :1], *caches, new, new, **given)
    assert launched()[0] == "append_e4m3"
    for index, key in itertools.product(range(2), range(5)):
        place = int(held[index]) + key
        page = int(table[index, place // 16])
        own = scale if kind == "heads" else scale[index if kind == "sequences" else page].flatten()
        expected = (new[index, :, key].float() / own[:, None]).to(test_e4m3.E4M3)
        for cache in caches:
            assert torch.equal(cache[page, place % 16].float(), expected.float())


@pytest.mark.parametrize(("capability", "kernels"), [(75, ["dequantize_e4m3", "forward"]), (80, ["decode_e4m3"])])
def test_consistent_codes_are_copied_where_no_kernel_reads_them(capability: int, kernels: list[str]) -> None:
    q, lengths = torch.randn(2, 4, 1, 64).half(), torch.tensor([30, 9], dtype=torch.int32)
    k = torch.randn(2, 2, 30, 64).to(test_e4m3.E4M3)
    begin(capability)
    flashmoe.attention_with_kvcache(q, k, k, cache_seqlens=lengths, consistent=True)
    assert launched() == kernels


@settings(max_examples=40, deadline=None, derandomize=True)
@drawn(call=test_e4m3_drawn.calls())
def test_codes_take_the_form_of_elements(call: test_e4m3_drawn.Call) -> None:
    """What is launched over codes is what is launched over the dequantised cache, but for what reads codes, or makes elements of them: kernels of
    the same name, which divide the keys alike, on as many blocks."""
    given = [call.arguments(DTYPE, "cpu", has_codes=has_codes) for has_codes in (True, False)]
    LIBRARY.fake_computing(0)
    for capability, multiprocessors in ((80, 108), (90, 132), (90, 16)):
        forms = []
        for arguments in given:
            begin(capability, multiprocessors)
            test_e4m3_drawn.run(arguments)
            found = [launch for launch in launches() if "dequantize" not in launch["operation"]]
            forms.append(sorted((one["symbol"].replace("_e4m3", ""), one["grid"], one["splits"]) for one in found))
        assert forms[0] == forms[1], capability
    LIBRARY.fake_computing(1)


@pytest.mark.parametrize(
    ("heads", "rows", "head_dim", "batch", "num_splits", "of_codes", "of_elements"),
    [
        ((71, 1), 1, 64, 33, 0, ["decode_e4m3"], ["decode"]),
        ((71, 1), 1, 64, 34, 0, ["dequantize_e4m3", "forward"], ["forward"]),
        ((71, 1), 1, 64, 34, 1, ["decode_e4m3"], ["decode"]),
        ((64, 1), 1, 64, 2, 1, ["dequantize_e4m3", "forward"], ["forward"]),
        ((2, 1), 192, 256, 1, 0, ["chunk_forward_e4m3"], ["chunk_forward"]),
        ((2, 1), 193, 256, 1, 0, ["dequantize_e4m3", "chunk_forward"], ["chunk_forward"]),
    ],
)
def test_where_codes_are_copied(
    heads: tuple[int, int],
    rows: int,
    head_dim: int,
    batch: int,
    num_splits: int,
    of_codes: list[str],
    of_elements: list[str],
) -> None:
    """One row of more than 64 heads is decoded by few sequences, and by any where bits must not depend on their number; three tiles of a chunk at
    head dim 256 are the most that read codes."""
    q = torch.zeros(batch, heads[0], rows, head_dim, dtype=DTYPE)
    cache = torch.zeros(batch, heads[1], 4096, head_dim, dtype=torch.uint8).view(torch.float8_e4m3fn)
    lengths = torch.full((batch,), 4096, dtype=torch.int32)
    LIBRARY.fake_computing(0)
    for keys, wanted in ((cache, of_codes), (cache.to(DTYPE), of_elements)):
        begin(90)
        flashmoe.attention_with_kvcache(q, keys, keys, cache_seqlens=lengths, causal=True, num_splits=num_splits)
        assert [name for name in launched() if "combine" not in name and "merge" not in name] == wanted
    LIBRARY.fake_computing(1)


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize(("kinds", "page_size"), [(("pages", "sequences"), 16), (("heads", "sequences"), 0)])
def test_a_large_cache_is_copied_in_parts(is_ragged: bool, kinds: tuple[str, str], page_size: int) -> None:
    """Of sequences, or of one sequence's heads, or of ragged rows heads alone: each has what the whole has."""
    options = ("bhqk", True, True, (-1, 0), 3.0, 1, 5)  # one split: no chunk's kernel
    call = test_e4m3_drawn.Call([(20, 48), (17, 30), (9, 41)], is_ragged, (6, 3), (16, 24), page_size, kinds, *options)
    of_head = 48 * (16 + 24)
    begin(90)
    arguments = call.arguments(DTYPE, "cpu", has_codes=True)
    whole = test_e4m3_drawn.run(arguments)
    for limit, count in ((of_head * 3 * 3, 1), (of_head * 3 * 2, 2), (of_head * 3, 3), (of_head * 2, 6), (1, 9)):
        before = LIBRARY.fake_copies(limit)
        begin(90)
        parts = test_e4m3_drawn.run(arguments)
        LIBRARY.fake_copies(before)
        assert launched().count("dequantize_e4m3") == (min(count, 3) if is_ragged else count)
        assert all(torch.equal(one, other) for one, other in zip(parts, whole, strict=True))


@pytest.mark.parametrize(
    ("shape", "scales", "causal"),
    [
        ((1, 2, 1, 65, 257, 64), 0, True),
        ((2, 4, 2, 30, 128, 64), 1, False),
        ((2, 3, 1, 29, 200, 72), 2, True),
        ((2, 4, 2, 130, 140, 16), 3, True),
        ((2, 2, 1, 129, 150, 24), 4, False),
    ],
)
def test_products_of_codes(shape: tuple[int, ...], scales: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_has_kernel", lambda device: True)
    begin(90)
    test_fp8.test_the_recurrence(shape, scales, causal, "cpu")
    assert launched() == ["transpose_e4m3", "forward_e4m3"]
    assert ("_blocks_" in launches()[1]["symbol"]) is (scales >= 3 and shape[-1] <= 64)  # the 256 rows have none


@pytest.mark.parametrize("of_blocks", ["q", "k", "v"])
def test_one_scale_of_blocks_is_enough(of_blocks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the kernel that reads them; each of the others is of the whole tensor."""
    monkeypatch.setattr(fp8, "_has_kernel", lambda device: True)
    codes = {name: torch.randn(1, 2, 130, 64).to(torch.float8_e4m3fn) for name in ("q", "k", "v")}
    scales: dict[str, Any] = {f"{name}_scale": 0.5 for name in codes}
    scales[f"{of_blocks}_scale"] = torch.rand(1, 2, 2) + 0.5
    begin(90)
    found = flashmoe.attention(*codes.values(), **scales)
    assert "_blocks_" in launches()[1]["symbol"]
    rows = scales[f"{of_blocks}_scale"].repeat_interleave(128, 2)[:, :, :130, None]
    wide = [one.float() * (rows if name == of_blocks else 0.5) for name, one in codes.items()]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide)
    assert (found.float() - expected).abs().max() <= 2**-4 * expected.abs().max()


@pytest.mark.parametrize("name", test_fp8_varlen.BATCHES)
def test_products_of_ragged_codes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_has_kernel", lambda device: True)
    begin(90)
    test_fp8_varlen.test_each_sequence_is_a_dense_call(name, "cpu", torch.bfloat16)
    assert launched() == ["transpose_e4m3", "forward_e4m3"]


@pytest.mark.parametrize(
    ("capability", "sizes", "letters", "options", "dropout_p"),
    [
        (80, (2, 4, 2, 70, 33, 24, 24), "bhqk", ScoreOptions(causal=True), 0.0),
        (90, (3, 4, 4, 30, 65, 24, 24), "1hqk", ScoreOptions(), 0.0),
        (80, (2, 3, 1, 65, 70, 20, 36), "b1qk", ScoreOptions(window=(33, 5)), 0.0),
        (90, (2, 2, 2, 70, 70, 64, 16), "1h1k", ScoreOptions(causal=True, softcap=2.0), 0.0),
        (90, (2, 2, 1, 80, 75, 24, 24), "bhq1", ScoreOptions(scale=-0.2), 0.0),
        (80, (2, 2, 2, 70, 66, 24, 24), "b111", ScoreOptions(), 0.0),
        (90, (2, 4, 2, 33, 40, 24, 24), "qk", ScoreOptions(causal=True), 0.3),
        (80, (1, 2, 2, 33, 40, 24, 72), "bhqk", ScoreOptions(), 0.0),
    ],
)
def test_gradients_of_a_mask(
    capability: int,
    sizes: tuple[int, ...],
    letters: str,
    options: ScoreOptions,
    dropout_p: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(test_bias_gradient.DTYPES, "cpu", [DTYPE])
    monkeypatch.setattr(bias_gradient, "_on_cpu", bias_gradient._by_kernels)
    begin(capability)
    test_bias_gradient.test_against_autograd("cpu", (sizes, letters, options, dropout_p))
    symbols = [launch["symbol"] for launch in launches() if launch["operation"] == "attention_bias_gradient"]
    assert all(f"_d{64 if max(sizes[5:]) <= 64 else 128}" in symbol for symbol in symbols)
    assert symbols


@pytest.mark.parametrize(
    ("capability", "case"),
    [
        (80, ((4, 2), 40, 50, 20, ScoreOptions(causal=True), "alibi")),
        (90, ((4, 2), 50, 40, 24, ScoreOptions(causal=True), "alibi")),
        (90, ((3, 3), 70, 30, 24, ScoreOptions(), "")),
        (80, ((2, 1), 20, 65, 24, ScoreOptions(causal=True, softcap=15.0), "")),
        (90, ((2, 2), 33, 60, 16, ScoreOptions(window=(33, 5)), "mask")),
        (90, ((8, 2), 1, 70, 24, ScoreOptions(), "")),
        (90, ((2, 1), 20, 65, 144, ScoreOptions(causal=True), "")),
        (90, ((1, 1), 520, 530, 16, ScoreOptions(causal=True), "")),  # by the fused form
    ],
)
def test_dropout_and_its_gradients(capability: int, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_dropout.DTYPES, "cpu", [DTYPE])
    begin(capability)
    test_dropout.test_dense_attention_and_its_gradients("cpu", case)
    assert "dropout" in launched()[0]
    assert any("backward_fused" in name for name in launched()) is (case[1] >= 512)


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
    """Of ``memory`` from an element on, rows ``row`` elements apart."""
    strides = [row * math.prod(shape[axis + 1 : -1]) for axis in range(len(shape) - 1)]
    return memory[offset:].as_strided(shape, (*strides, 1))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 16), (72, 8), (16, 1), (5, 7), (9, 40), (16, 129)])
def test_tensors_are_copied_where_16_bytes_cannot_be_loaded_and_nowhere_else(
    capability: int, head_dim: int, head_dim_v: int
) -> None:
    """Forward, ragged and dense, and backward: address, rows and columns in elements of two bytes."""
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


@pytest.mark.parametrize(
    ("capability", "rows", "kernel"),
    [(80, 1, "decode_e4m3"), (80, 33, "dequantize_e4m3"), (90, 40, "chunk_forward_e4m3")],
)
def test_codes_are_copied_where_16_bytes_cannot_be_loaded_and_nowhere_else(
    capability: int, rows: int, kernel: str
) -> None:
    """Address and rows in bytes; a cache that sequences or heads share has a stride of 0, and is read where it is."""
    keys, memory = 1000, torch.randn(2**18).to(torch.float8_e4m3fn)
    memory = memory[-memory.data_ptr() % 16 :]
    q = torch.randn(2, 8, rows, 16).to(DTYPE)
    for offset, spare, shared in ((0, 0, ""), (16, 16, ""), (8, 0, ""), (0, 8, ""), (0, 0, "batch"), (16, 0, "head")):
        shape = (1 if shared == "batch" else 2, 1 if shared == "head" else 2, keys, 16)
        k, v = (at(memory, offset + start, shape, 16 + spare).expand(2, 2, keys, 16) for start in (0, 2**17))
        given = {"causal": True, "cache_seqlens": torch.tensor([keys, 990], dtype=torch.int32)}
        begin(capability)
        out = flashmoe.attention_with_kvcache(q, k, v, **given)
        (found,) = (one for one in launches() if one["operation"].endswith(kernel))
        stays = (offset | spare) % 16 == 0
        assert [one.data_ptr() in found["tensors"] for one in (k, v)] == [stays] * 2, (offset, spare, shared)
        expected = flashmoe.attention_with_kvcache(q, k.to(DTYPE), v.to(DTYPE), **given)
        assert (out - expected).abs().max() <= LIMIT * expected.abs().max()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_keys_that_all_heads_share(capability: int) -> None:
    """A stride of 0: sm80's kernels read it where it is, a copy engine does not."""
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


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", ["dense", "softcap", "sinks", "codes", "pages"])
def test_rows_that_see_no_key(capability: int, kind: str) -> None:
    """Without any key there is no kernel of attention to launch: zeros, and what the sinks alone add up to."""
    if kind == "codes" and capability < 90:
        capability = 89
    begin(capability)
    q = torch.randn(2, 4, 5, 16).to(DTYPE)
    k = torch.empty(2, 2, 0, 16, dtype=torch.float8_e4m3fn if kind == "codes" else DTYPE)
    sinks = torch.randn(4) if kind == "sinks" else None
    lengths: list[Any] = [None] * 4
    if kind == "pages":
        k = torch.empty(0, 16, 2, 16, dtype=DTYPE)
        lengths[2:] = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32)
    numbers = (5, 0, 0.25, -1, -1, 3.0 if kind == "softcap" else 0.0, 0)
    operators = torch.ops.flashmoe
    if kind == "dense":
        out, lse = operators.flash_attention_forward(q, k, k, 0.25, False)
    elif kind == "codes":
        out, lse = operators.attention_e4m3_forward(q, k, k, *lengths, sinks, None, *numbers, None, None, 1.0, 1.0)
    else:
        out, lse = operators.attention_varlen_forward(q, k, k, *lengths, sinks, None, *numbers)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf) if sinks is None else sinks.view(1, 4, 1).expand(2, 4, 5))
    assert not [name for name in launched() if "forward" in name or "decode" in name]


@pytest.mark.parametrize(("rows", "keys"), [(0, 9), (9, 0)])
def test_gradients_without_rows_or_keys_are_zeros(rows: int, keys: int) -> None:
    """And nothing is launched."""
    begin(90)
    q, k, v = (torch.randn(count, 2, 16, requires_grad=True).to(DTYPE) for count in (rows, keys, keys))
    ends = [torch.tensor([0, count, count], dtype=torch.int32) for count in (rows, keys)]
    out = flashmoe.attention_varlen(q, k, v, *ends, rows, keys)
    before = len(launches())
    for found in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)):
        assert torch.equal(found, torch.zeros_like(found))
    assert len(launches()) == before


def test_a_mask_that_is_streamed() -> None:
    begin(90)
    shapes = ((2, 514), (1, 520), (1, 520))
    q, k, v = (torch.randn(1, many, length, 16).to(DTYPE).requires_grad_() for many, length in shapes)
    mask = torch.randn(1, 1, 514, 520).to(DTYPE)
    out = flashmoe.attention(q, k, v, attn_mask=mask)
    found = torch.autograd.grad(out, (q, k, v), out.detach())
    operations = launched()
    assert "mask_forward" in operations
    assert "mask_backward_fused" in operations
    wide = [one.detach().double().requires_grad_() for one in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, mask.double(), enable_gqa=True)
    for one, other in zip(
        (out, *found), (exact, *torch.autograd.grad(exact, wide, out.detach().double())), strict=True
    ):
        assert (one - other).abs().max() <= LIMIT * other.abs().max().clamp(min=1.0)


@pytest.mark.parametrize(("head_dim", "heads", "stores"), [(64, 252, True), (64, 253, False), (65, 253, True)])
def test_a_shared_mask_s_gradient_of_64_columns_is_stored_up_to_128_mib(
    head_dim: int, heads: int, stores: bool
) -> None:
    q, k = (torch.zeros(1, heads, length, head_dim, dtype=DTYPE) for length in (512, 520))
    mask = torch.zeros(1, 1, 512, 520, dtype=DTYPE)
    LIBRARY.fake_computing(0)
    begin(90)
    lse = torch.zeros(1, heads, 512)
    arguments = (q, None, q, k, k, *[None] * 4, mask, q, lse, 512, 520, head_dim**-0.5, -1, -1, 0.0)
    bias_gradient._mask_backward_by_kernels(VarlenBackward(*arguments, 15))
    LIBRARY.fake_computing(1)
    assert ("scores_sum" in launched(), "bias_gradient" in launched()) == (stores, not stores)


@pytest.mark.parametrize(
    ("heads", "head_dim", "window", "is_split", "stores"),
    [
        *((2, 16, -1, False, True), (1, 72, -1, False, True), (1, 16, -1, False, True)),
        *((2, 16, 40, False, False), (2, 16, -1, True, False)),
    ],
)
def test_a_streamed_mask_s_gradient(
    heads: int, head_dim: int, window: int, is_split: bool, stores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel of the other gradients, which run for it alone, too; with a window or in the split form by its own."""
    begin(90)
    monkeypatch.setenv("FLASHMOE_SPLIT_BACKWARD", str(int(is_split)))
    shapes = ((2, 514), (1, 520), (1, 520))
    q, k, v = (torch.randn(1, many, length, head_dim).to(DTYPE) for many, length in shapes)
    mask, upstream = torch.randn(1, heads, 514, 520).to(DTYPE), torch.randn(1, 2, 514, head_dim).to(DTYPE)
    options: dict[str, Any] = {"attn_mask": mask, "window": None if window < 0 else (window, window)}
    out, lse = flashmoe.attention(q, k, v, **options, return_lse=True)
    launches()
    arguments = (upstream, None, q, k, v, *[None] * 4, mask, out, lse, 514, 520, head_dim**-0.5, window, window, 0.0)
    every, alone = (bias_gradient._mask_backward_by_kernels(VarlenBackward(*arguments, needs)) for needs in (15, 0))
    operations = launched()
    assert operations.count("mask_backward_fused") == (2 if stores else int(window < 0 and not is_split))
    assert operations.count("bias_gradient") == 2 * (not stores)
    assert operations.count("scores_sum") == 2 * (stores and heads == 1)
    assert torch.equal(every[4], alone[4])
    assert [one.numel() for one in alone[:4]] == [0] * 4
    leaves = [one.detach().double().requires_grad_() for one in (q, k, v, mask)]
    hidden = torch.zeros(514, 520)
    if window >= 0:
        distance = torch.arange(520) - torch.arange(514)[:, None] - 6
        hidden[distance.abs() > window] = -math.inf
    exact = torch.nn.functional.scaled_dot_product_attention(*leaves[:3], leaves[3] + hidden, enable_gqa=True)
    wanted = torch.autograd.grad(exact, leaves, upstream.double())
    for one, other in zip((*every[:3], every[4]), wanted, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= LIMIT * other.abs().max().clamp(min=1.0)


def test_a_mask_s_gradient_is_of_a_mask_that_was_added() -> None:
    begin(90)
    q, mask, rows = torch.randn(1, 2, 5, 16).to(DTYPE), torch.zeros(1, 1, 5, 5).to(DTYPE), torch.zeros(1, 2, 5)
    operator_ = torch.ops.flashmoe._attention_bias_gradient
    for other in (mask > 0, torch.zeros(1, 2)):
        with pytest.raises(RuntimeError, match=r"attention\.companion_dtype\|name=attn_mask\|needed=bfloat16\|found="):
            operator_(q, q, q, q, other, rows, rows, 0.25, -1, -1, 0.0, 0.0, None)
    assert operator_(q, q, q, q, mask, rows, rows, 0.25, -1, -1, 0.0, 0.0, None).shape[1:] == mask.shape


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
@pytest.mark.parametrize("head_dim", [8, 24, 59, 256, 512])
@pytest.mark.parametrize("layout", ["dense", "rows", "ragged"])
def test_two_results_as_one(layout: str, head_dim: int, dtype: torch.dtype) -> None:
    """In place, into float32 too; of some rows of a tensor, ragged, and of rows that lie on no multiple of 16 bytes."""
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
    text = rf"consistent=True with {says}, head_dim 64 and pages of 12 keys: .* use pages of a multiple of 8 keys"
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


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("number", range(len(calls.ROWS)), ids=lambda number: calls.ROWS[number][0])
def test_every_layout_that_is_taken(capability: int, number: int) -> None:
    begin(capability)
    if "fp8" not in calls.ROWS[number][0] or capability == 90:
        assert differences(number, calls, layouts_alone=capability == 80) == []
    launches()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("rate", "l2_bytes"), [(4000, 1 << 20), (4001, 1 << 20), (4001, 1 << 14), (4001, 1 << 10), (4001, 170_667)]
)
def test_the_first_tiles_of_decoding_are_read_without_a_hint(rate: int, l2_bytes: int, head_dim: int) -> None:
    """On fast memory, wide heads: until the blocks have read twice the L2; one tile of a batch of at most six times the L2."""
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
    """On fast memory, where they are between three fifths of the L2 and six times as much: 2 048 000 bytes here; a tile has 32 rows of four heads."""
    q, k = torch.randn(2, 8, rows, 128).to(DTYPE), torch.randn(2, 2, 1000, 128).to(DTYPE)
    begin(90)
    LIBRARY.fake_memory(rate, l2_bytes)
    flashmoe.attention_with_kvcache(q, k, k, cache_seqlens=torch.full((2,), 1000, dtype=torch.int32), causal=True)
    LIBRARY.fake_memory(0, 0)
    first = launches()[0]
    assert (first["operation"], first["unhinted"] & 1) == ("attention_chunk_forward", expected)


@pytest.mark.parametrize(("multiprocessors", "rows", "expected"), [(132, 8, 2), (13, 8, 0), (13, 32, 2), (12, 32, 0)])
def test_the_sum_of_a_chunk_starts_early_where_it_has_room(multiprocessors: int, rows: int, expected: int) -> None:
    """Of 1000 keys in three shares, which two key heads of two sequences have; its blocks add up four rows."""
    q, k = torch.randn(2, 8, rows, 128).to(DTYPE), torch.randn(2, 2, 1000, 128).to(DTYPE)
    begin(90, multiprocessors)
    flashmoe.attention_with_kvcache(q, k, k, cache_seqlens=torch.full((2,), 1000, dtype=torch.int32), causal=True)
    chunk, combine = launches()
    assert [chunk["operation"], combine["operation"]] == ["attention_chunk_forward", "attention_combine"]
    assert (chunk["grid"], combine["grid"]) == (12, 4 * rows)
    assert chunk["is_dependent"]
    assert combine["is_dependent"]
    assert chunk["unhinted"] == expected
