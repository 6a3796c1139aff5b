"""What latent attention launches on each GPU, and its results.

Run by tests/host/test_mla_launch.py in a separate process, whose extension has a driver without a GPU."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashmoe
from flashmoe import _extension, operator
from tests.mla import test_append, test_decode, test_decode_codes, test_decode_sparse
from tests.mla.coded import KEY_BYTES

LIBRARY = ctypes.CDLL(os.environ["FLASHMOE_LIBRARY"])
LIBRARY.fake_log.restype = ctypes.c_char_p
EVERY = operator.find_operators
NAMES = ("mla_decode", "mla_append_")
operator.find_operators = lambda: tuple(replace(one, impls={}) for one in EVERY() if one.name in NAMES)
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
ON_A_GPU = torch.library.Library("flashmoe", "IMPL")
BF16 = torch.bfloat16


@pytest.fixture(scope="session", autouse=True)
def calls_for_the_cpu_run_the_gpus_path() -> None:
    assert flashmoe.mla_decode is not None
    for name in NAMES:
        overload = getattr(torch.ops.flashmoe, name).default
        with warnings.catch_warnings(action="ignore"):
            ON_A_GPU.impl(overload, functools.partial(overload.redispatch, CUDA), "CPU")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    begin()
    yield
    torch.use_deterministic_algorithms(False)


def begin(capability: int = 90, multiprocessors: int = 132) -> None:
    LIBRARY.fake_gpu(capability, multiprocessors, False)


def launches() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [json.loads(line) for line in LIBRARY.fake_log().decode().splitlines()]
    for launch in found:
        assert launch["problem"] == "", launch
        assert "_bf16" in launch["symbol"], launch
    return found


def test_codes_begin_at_a_multiple_of_16_bytes() -> None:
    q, lengths = torch.randn(2, 1, 16, 576).to(BF16), torch.tensor([3, 16], dtype=torch.int32)
    for offset in (0, 8):
        cache = torch.zeros(2 * 16 * KEY_BYTES + 8, dtype=torch.uint8)[offset:][: 2 * 16 * KEY_BYTES].view(
            2, 16, KEY_BYTES
        )
        if offset == 0:
            flashmoe.mla_decode(q, cache, cache_seqlens=lengths, scale=0.1)
            continue
        with pytest.raises(Exception, match=r"coded_alignment|address 8 bytes past"):
            flashmoe.mla_decode(q, cache, cache_seqlens=lengths, scale=0.1)


MORE = (
    test_decode.Case(
        (5,) * 40, heads=8, page_size=16
    ),  # more sequences than the lanes of a warp, and than parts of the small GPU
    test_decode.Case((70, 64), heads=16, tokens=2, page_size=64, num_splits=2),
)


@pytest.mark.parametrize(("capability", "multiprocessors"), [(80, 132), (90, 132), (90, 6), (120, 1)])
@pytest.mark.parametrize("case", [*test_decode.CASES, *MORE], ids=str)
def test_decoding(case: test_decode.Case, capability: int, multiprocessors: int) -> None:
    begin(capability, multiprocessors)
    test_decode.check(replace(case, dtype=BF16), "cpu")
    found = launches()
    assert [launch["symbol"].split("_sm")[0][9:].removesuffix("_few") for launch in found] == [
        "mla_decode",
        "mla_combine",
    ][: 1 + (case.num_splits != 1)]
    assert [launch["is_dependent"] for launch in found] == [capability == 90] * len(found)  # older code does not wait
    assert _extension.last_kernel() == found[0]["symbol"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", test_decode.CASES[:4], ids=str)
def test_decoding_codes(case: test_decode.Case, capability: int) -> None:
    begin(capability)
    test_decode_codes.check(replace(case, dtype=BF16), "cpu")
    launches()


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("has_codes", [False, True])
@pytest.mark.parametrize("case", test_decode_sparse.CASES, ids=str)
def test_decoding_named_keys(case: test_decode_sparse.Case, has_codes: bool, capability: int) -> None:
    begin(capability)
    test_decode_sparse.check(replace(case, dtype=BF16, has_codes=has_codes, heads=min(case.heads, 34)), "cpu")
    launches()


def test_appending() -> None:
    test_append.test_pages_behind_the_lengths(BF16, torch.uint8, "cpu")
    test_append.test_slots_and_a_dense_cache(BF16, "cpu")
    assert len(launches()) == 3
    assert not any(launch["is_dependent"] for launch in launches())
    assert _extension.last_kernel() == launches()[2]["symbol"]
    latents, cache = test_append.make(3, 2, BF16), torch.zeros(3, 16, KEY_BYTES, dtype=torch.uint8)
    flashmoe.mla_append(latents[:, :0], cache, cache_seqlens=torch.zeros(3, dtype=torch.int32))
    assert len(launches()) == 3


@pytest.mark.parametrize(("batch", "tokens"), [(0, 1), (2, 0)])
def test_nothing_is_launched_without_sequences_or_tokens(batch: int, tokens: int) -> None:
    q, lengths = torch.zeros(batch, tokens, 8, 576, dtype=BF16), torch.zeros(batch, dtype=torch.int32)
    torch.ops.flashmoe.mla_decode(q, torch.zeros(batch, 16, 576, dtype=BF16), lengths, None, None, 1.0, False, 0, None)
    assert _extension.last_kernel() == ""
    codes = torch.zeros(batch, 16, KEY_BYTES, dtype=torch.uint8)
    torch.ops.flashmoe.mla_append_(q[:, :, 0], codes, lengths, None, None)
    assert launches() == []


def decoded(
    rows: int,
    batch: int = 1,
    keys: int = 64,
    *,
    tokens: int = 1,
    codes: bool = False,
    sparse: bool = False,
    splits: int = 0,
) -> str:
    """The kernel for this many rows over keys that overlap in memory and that no row sees."""
    q = torch.zeros(batch, tokens, rows // tokens, 576, dtype=BF16)
    width = KEY_BYTES if codes else 576
    memory = torch.zeros(batch + keys, width, dtype=torch.uint8 if codes else BF16)
    cache = memory.as_strided((batch, keys, width), (width, width, 1))
    given: dict[str, Any] = (
        {"indices": torch.full((batch, tokens, keys), -1, dtype=torch.int32)}
        if sparse
        else {"cache_seqlens": torch.zeros(batch, dtype=torch.int32)}
    )
    before = len(launches())
    flashmoe.mla_decode(q, cache, scale=1.0, num_splits=splits, **given)
    return str(launches()[before]["symbol"]).removeprefix("flashmoe_mla_decode_").replace("_bf16", "")


WGMMA, FEW, MORE_ROWS = "sm90", "sm80", "sm80_m32"


def test_which_kernel_decodes() -> None:
    """docs/kernels/mla.md: both sides of each bound."""
    sparse: tuple[dict[str, Any], ...] = ({"sparse": True}, {"sparse": True, "codes": True, "splits": 1})
    for options in sparse:
        words = "codes_sparse" if options.get("codes") else "sparse"
        for rows, kernel in ((2, "few_sm90_m8"), (8, "few_sm90_m8"), (16, "few_sm90_m16"), (128, "sm90")):
            assert decoded(rows, **options) == f"{kernel}_{words}", (rows, options)
        one = "sm90" if options.get("splits") else "few_sm90_m16"
        assert decoded(18, **options) == f"{one}_{words}"
    dense: tuple[dict[str, Any], ...] = (
        {"keys": 8193},
        {"keys": 8192, "batch": 5},
        {"splits": 1},
        {"keys": 8193, "tokens": 2},
        {"keys": 9000, "codes": True},
    )
    for options in dense:
        codes = "_codes" if options.get("codes") else ""
        for rows, kernel in (
            (2, "few_sm90_m8"),
            (8, "few_sm90_m8"),
            (10, "few_sm90_m16"),
            (16, "few_sm90_m16"),
            (18, "sm90"),
        ):
            assert decoded(rows, **options) == kernel + codes, (rows, options)
    two_tiles: tuple[tuple[int, dict[str, Any], str], ...] = (
        (18, {}, "few_sm90_m16"),
        (32, {"keys": 66 * 64}, "few_sm90_m16"),
        (32, {"keys": 22 * 64, "batch": 3, "codes": True}, "few_sm90_m16_codes"),
        (32, {"keys": 64, "batch": 33, "tokens": 2}, "few_sm90_m16"),
        (32, {"keys": 64, "batch": 33, "tokens": 2, "splits": 2}, "few_sm90_m16"),
        (32, {"keys": 66 * 64 + 1}, "sm90"),
        (32, {"splits": 1}, "sm90"),
        (34, {}, "sm90"),
    )
    for rows, options, kernel in two_tiles:
        assert decoded(rows, **options) == kernel, (rows, options)
    for batch, kernel in ((33, "few_sm90_m16_sparse"), (34, "sm90_sparse")):
        assert decoded(48, batch, tokens=2, sparse=True) == kernel  # of 24 heads: each token is a sequence
    assert decoded(128, keys=0) == MORE_ROWS  # TMA needs keys
    shared = torch.zeros(1, 64, KEY_BYTES, dtype=torch.uint8).expand(2, -1, -1)
    of_none: dict[str, Any] = {"cache_seqlens": torch.zeros(2, dtype=torch.int32), "scale": 1.0}
    for rows, kernel in ((8, "few_sm90_bf16_m8_codes"), (40, "sm90_bf16_codes")):
        flashmoe.mla_decode(torch.zeros(2, 1, rows, 576, dtype=BF16), shared, **of_none)
        first = next(one for one in reversed(launches()) if "decode" in one["symbol"])
        assert first["symbol"].endswith(kernel), first
        assert first["read"] != shared.data_ptr()  # TMA has no stride of 0
    begin(80)
    assert [decoded(rows) for rows in (16, 18)] == [FEW, MORE_ROWS]
    flashmoe.mla_decode(torch.zeros(2, 1, 8, 576, dtype=BF16), shared, **of_none)
    assert launches()[-2]["read"] == shared.data_ptr()  # a kernel without TMA reads any cache in place


def test_a_cache_of_2_to_the_31_keys() -> None:
    """Keys are 16 bytes apart; the largest slot number selects a key."""
    pages, page_size, columns = 2**16, 2**15, 576
    cache = torch.ones(8 * (pages + page_size) + columns, dtype=BF16).as_strided((pages, page_size, columns), (8, 8, 1))
    q, indices = torch.ones(1, 1, 18, columns, dtype=BF16), torch.tensor([[[0, 2**31 - 2]]], dtype=torch.int32)
    assert (flashmoe.mla_decode(q, cache, scale=1e-3, indices=indices) == 1).all()
    launches()


@pytest.mark.parametrize("multiprocessors", [1, 6, 132])
@pytest.mark.parametrize("rows", [2, 8, 10, 128])
def test_the_blocks_that_add_parts_up(rows: int, multiprocessors: int) -> None:
    """Enough for all units of the sums, as the fake driver counts them; with more sequences, fewer warps per sum."""
    begin(90, multiprocessors)
    for batch in (1, 2, 5, 11, 40):
        decoded(rows, batch)
    assert any("mla_combine" in one["symbol"] for one in launches())


def test_forced_families_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_KERNEL", "sm80")
    assert [decoded(rows) for rows in (16, 128)] == [FEW, MORE_ROWS]
    monkeypatch.setenv("FLASHMOE_KERNEL", "sm90")
    assert [decoded(rows) for rows in (2, 128)] == [WGMMA, WGMMA]
    begin(80)
    for options, words in (
        ({}, "multi-head latent attention"),
        ({"codes": True}, "FP8"),
        ({"sparse": True}, "indices"),
    ):
        with pytest.raises(flashmoe.errors.FlashmoeError, match=words):
            decoded(8, **options)  # type: ignore[arg-type]
    monkeypatch.delenv("FLASHMOE_KERNEL")
    begin(75)
    with pytest.raises(flashmoe.errors.UnsupportedGpuError):
        flashmoe.mla_decode(
            *[torch.zeros(1, 1, 8, 576).half(), torch.zeros(1, 64, 576).half()],
            scale=1.0,
            cache_seqlens=torch.zeros(1, dtype=torch.int32),
        )
    with pytest.raises(flashmoe.errors.UnsupportedGpuError):
        flashmoe.mla_append(
            torch.zeros(1, 1, 576).half(),
            torch.zeros(1, 64, KEY_BYTES, dtype=torch.uint8),
            cache_seqlens=torch.zeros(1, dtype=torch.int32),
        )


@pytest.mark.parametrize(("offset", "spare"), [(0, 0), (8, 0), (0, 8), (4, 0), (0, 4)])
def test_what_cannot_be_loaded_is_copied_and_nothing_else(offset: int, spare: int) -> None:
    """q and a 16-bit cache, in elements; q's tokens have one stride of heads, and with indices so do sequences."""
    q, cache, options = test_decode.make(test_decode.Case((70, 9), heads=4, tokens=2, page_size=0), "cpu")
    expected = flashmoe.mla_decode(q, cache, **options)

    def lies(tensor: torch.Tensor, apart: int) -> torch.Tensor:
        memory = torch.zeros(tensor.numel() * 3 + 4096, dtype=BF16)
        memory = memory[-memory.data_ptr() // 2 % 8 + offset :]
        strides = [576 + apart]
        for size in tensor.shape[-2:0:-1]:
            strides.insert(0, strides[0] * size)
        moved = memory.as_strided(tensor.shape, (*strides, 1))
        return moved.copy_(tensor)

    q, cache = lies(q, spare), lies(cache, spare)
    before = len(launches())
    assert torch.equal(flashmoe.mla_decode(q, cache, **options), expected)
    stays = (offset | spare) % 8 == 0
    launch = launches()[before]
    assert [launch["q"] == q.data_ptr(), launch["read"] == cache.data_ptr()] == [stays, stays]
    wide = torch.zeros(2, 2, 9, 576, dtype=BF16)[:, :, :4]
    wide.copy_(q)
    before = len(launches())
    assert torch.equal(flashmoe.mla_decode(wide, cache, **options), expected)  # tokens at another stride than heads
    assert launches()[before]["q"] != wide.data_ptr()
    every = torch.arange(140, dtype=torch.int32).view(2, 1, 70).expand(2, 2, 70)
    for one in (q, torch.cat((q, q), 1)[:, :2]):
        before = len(launches())
        flashmoe.mla_decode(one, cache[:, :70], scale=1.0, indices=every % 75)
        is_even = one is q
        assert (launches()[before]["q"] == one.data_ptr()) is (stays and is_even)
