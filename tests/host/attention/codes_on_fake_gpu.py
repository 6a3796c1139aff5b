"""Caches and products of 8-bit floats; run by tests/host/test_attention_launch.py, like on_fake_gpu.py."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings

# isort: off
# Before flashmoe: it says which operators this library has.
from tests.host.attention.on_fake_gpu import (  # noqa: F401
    LIBRARY,
    at,
    begin,
    calls_for_the_cpu_run_the_gpus_path,
    launched,
    launches,
    poisoned_memory,
)

# isort: on
import flashmoe
from flashmoe.attn import fp8
from tests.attention import test_e4m3, test_e4m3_codes, test_e4m3_drawn, test_fp8, test_fp8_varlen
from tests.host.attention.dense_calls import DTYPE, LIMIT


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
    """Like the CPU's own test: the bits of the dequantised cache if scales are powers of two."""
    begin(90)
    case = test_e4m3.make(layout, kind, DTYPE, "cpu", head_dim=head_dim, **test_e4m3.OPTIONS[name])
    for found, wanted in zip(case.call(has_codes=True), case.call(has_codes=False), strict=True):
        assert (found - wanted).abs().nan_to_num().max() <= LIMIT
        assert torch.equal(found.isfinite(), wanted.isfinite())
    assert launched()[0] == "decode_e4m3"


def test_codes_are_appended_and_read_by_many_rows() -> None:
    begin(90)
    test_e4m3_codes.test_appending_rounds_every_number(3.0, DTYPE, "cpu")
    assert launched()[0] == "append_e4m3"
    begin(90)
    test_e4m3.test_many_rows("pages", "pages", True, {}, DTYPE, "cpu")
    assert launched().count("dequantize_e4m3") == 1
    for has_pages in (False, True):
        begin(90)
        test_e4m3.test_a_window_of_a_long_cache(has_pages, DTYPE, "cpu")
        assert launched().count("dequantize_e4m3") == 1
    # With an apparent 1000 keys a chunk kernel reads codes.
    for has_page_scales in (True, False):
        begin(90)
        test_e4m3.test_many_rows_of_pages_with_less_room_than_max_seqlen_k(has_page_scales, DTYPE, "cpu")
        assert launched().count("chunk_forward_e4m3") == 1
        assert launched().count("dequantize_e4m3") == 1
    begin(75)  # which has no kernel that reads codes
    test_e4m3.make("pages", "pages", torch.float16, "cpu").call(has_codes=True)
    assert launched("f16") == ["dequantize_e4m3", "forward"]


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
    assert launched("f16") == kernels


@settings(max_examples=40, deadline=None, derandomize=True)
@drawn(call=test_e4m3_drawn.calls())
def test_codes_take_the_form_of_elements(call: test_e4m3_drawn.Call) -> None:
    """Codes launch the kernels of the dequantised cache: of the same names, dividing the keys alike, on as many blocks.

    Only the kernels that read codes, or convert them to elements, differ."""
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
        ((4, 2), 192, 256, 1, 0, ["chunk_forward_e4m3"], ["chunk_forward"]),
        ((4, 2), 193, 256, 1, 0, ["dequantize_e4m3", "chunk_forward"], ["chunk_forward"]),
        ((4, 2), 40, 24, 1, 0, ["dequantize_e4m3", "chunk_forward"], ["chunk_forward"]),
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
    """One row of more than 64 heads is decoded if sequences are few, or if bits must not depend on their number.

    At head dim 256 chunks of at most three tiles read codes, and only rows of whole 16 bytes."""
    q = torch.zeros(batch, heads[0], rows, head_dim, dtype=DTYPE)
    cache = torch.zeros(batch, heads[1], 4096, head_dim, dtype=torch.uint8).view(torch.float8_e4m3fn)
    lengths = torch.full((batch,), 4096, dtype=torch.int32)
    LIBRARY.fake_computing(0)
    for keys, wanted in ((cache, of_codes), (cache.to(DTYPE), of_elements)):
        begin(90)
        flashmoe.attention_with_kvcache(q, keys, keys, cache_seqlens=lengths, causal=True, num_splits=num_splits)
        assert [name for name in launched() if "combine" not in name and "merge" not in name] == wanted
    LIBRARY.fake_computing(1)


@pytest.mark.parametrize(("capability", "num_splits"), [(80, 0), (90, 0), (90, 1), (90, -1)])  # -1: consistent
@pytest.mark.parametrize("rows", [1, 40])
def test_codes_with_slopes_are_copied(rows: int, capability: int, num_splits: int) -> None:
    """No kernel over codes has ALiBi. A cache that is too large for a copy is refused before anything runs."""
    options = ("slopes", True, True, (-1, 0), 3.0, num_splits, 5)
    call = test_e4m3_drawn.Call([(rows, 90), (1, 41)], True, (4, 2), (64, 64), 16, ("pages", "heads"), *options)
    results, names = [], []
    for has_codes in (True, False):
        begin(capability)
        results.append(test_e4m3_drawn.run(call.arguments(DTYPE, "cpu", has_codes=has_codes)))
        names.append(launched())
    assert names[0] == ["dequantize_e4m3", *names[1]]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    arguments = call.arguments(DTYPE, "cpu", has_codes=True)
    pages = torch.zeros(2, 1 << 19, dtype=torch.int32)
    begin(capability)
    with pytest.raises(RuntimeError, match="e4m3_alibi"):
        test_e4m3_drawn.run([*arguments[:6], pages, *arguments[7:10], 1 << 23, *arguments[11:]])
    assert launched() == []


@pytest.mark.parametrize("of_pages", ["k_scale", "v_scale"])
@pytest.mark.parametrize(("rows", "reads_codes"), [(128, True), (129, False)])
def test_chunks_over_pages_with_scales(of_pages: str, rows: int, reads_codes: bool) -> None:
    """At most two tiles of 128 rows read codes, whichever of K and V has a scale per page."""
    q, codes = torch.zeros(1, 4, rows, 64, dtype=DTYPE), torch.zeros(300, 16, 2, 64, dtype=torch.float8_e4m3fn)
    given = {"cache_seqlens": torch.tensor([4096], dtype=torch.int32), "block_table": torch.zeros(1, 256).int()}
    LIBRARY.fake_computing(0)
    begin(90)
    flashmoe.attention_with_kvcache(q, codes, codes, **given, causal=True, **{of_pages: torch.ones(300, 1, 1, 1)})
    LIBRARY.fake_computing(1)
    assert launched()[:1] == ["chunk_forward_e4m3" if reads_codes else "dequantize_e4m3"]


@pytest.mark.parametrize("mask", ["bhqk", "slopes"])
@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize(("kinds", "page_size"), [(("pages", "sequences"), 16), (("heads", "sequences"), 0)])
def test_a_large_cache_is_copied_in_parts(is_ragged: bool, kinds: tuple[str, str], page_size: int, mask: str) -> None:
    """In parts of sequences, of one sequence's heads, or for ragged rows only of heads: each gives the same result."""
    options = (mask, True, True, (-1, 0), 3.0, 1, 5)  # one split: no chunk kernel
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
    assert ("_blocks_" in launches()[1]["symbol"]) is (scales >= 3)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_products_of_codes_that_repeat(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """V is transposed without a copy; TMA reads the others, which need one."""
    monkeypatch.setattr(fp8, "_has_kernel", lambda device: True)
    codes = {one: torch.randn(1, 2, 130, 64).to(torch.float8_e4m3fn) for one in ("q", "k", "v")}
    codes[name] = codes[name][:, :1].expand(1, 2, 130, 64)
    begin(90)
    flashmoe.attention(*codes.values())
    transpose, product = launches()
    assert (codes[name].data_ptr() in transpose["tensors"] + product["tensors"]) is (name == "v")
    begin(90)
    flashmoe.attention(*(one.contiguous() for one in codes.values()))


@pytest.mark.parametrize("of_blocks", ["q", "k", "v"])
def test_one_scale_of_blocks_is_enough(of_blocks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have one scale per tensor. Query scales, one for all rows of a tile, need no separate kernel."""
    monkeypatch.setattr(fp8, "_has_kernel", lambda device: True)
    codes = {name: torch.randn(1, 2, 130, 64).to(torch.float8_e4m3fn) for name in ("q", "k", "v")}
    scales: dict[str, Any] = {f"{name}_scale": 0.5 for name in codes}
    scales[f"{of_blocks}_scale"] = torch.rand(1, 2, 2) + 0.5
    begin(90)
    found = flashmoe.attention(*codes.values(), **scales)
    assert ("_blocks_" in launches()[1]["symbol"]) is (of_blocks != "q")
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


@pytest.mark.parametrize("tokens", [0, 3])
def test_ragged_codes_without_a_key_launch_nothing(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_has_kernel", lambda device: True)
    begin(90)
    test_fp8_varlen.test_no_key_at_all(tokens, "cpu")
    assert launched() == []


@pytest.mark.parametrize(
    ("capability", "rows", "kernel"),
    [(80, 1, "decode_e4m3"), (80, 33, "dequantize_e4m3"), (90, 40, "chunk_forward_e4m3")],
)
def test_codes_are_copied_where_16_bytes_cannot_be_loaded_and_nowhere_else(
    capability: int, rows: int, kernel: str
) -> None:
    """Address and row length in bytes; a cache shared by sequences or heads has a stride of 0, and is read in place."""
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
