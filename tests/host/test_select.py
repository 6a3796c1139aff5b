"""Which kernel each GPU gets, and what it is told when there is none."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from flashmoe_tools.tables import load_tables

if TYPE_CHECKING:
    from collections.abc import Callable

    Chooser = Callable[..., object]

GPUS = {gpu.name: 10 * gpu.compute_capability[0] + gpu.compute_capability[1] for gpu in load_tables().gpus}
OWN_TARGET = {
    "sm75": "sm_75",
    "sm80": "sm_80",
    "sm86": "sm_86",
    "sm89": "sm_86",
    "sm90": "sm_90a",
    "sm100": "sm_100a",
    "sm120": "sm_120a",
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_gpu_gets_its_own_machine_code_and_best_family(choose: Chooser, gpu: str, causal: bool) -> None:
    """8.6 and 8.9 run sm_80's code where they have no tile of their own."""
    tables = load_tables()
    for head_dim, bf16 in product((8, 64, 72, 128, 136, 256), (False, True)):
        if bf16 and not tables.gpu(gpu).bf16:
            continue
        choice = choose(GPUS[gpu], head_dim=head_dim, causal=causal, bf16=bf16)
        assert choice.target == (OWN_TARGET[gpu] if OWN_TARGET[gpu] != "sm_86" or 64 < head_dim <= 128 else "sm_80")
        assert f"_{tables.gpu(gpu).families[0]}_{'bf16' if bf16 else 'f16'}_" in choice.symbol
        assert choice.symbol.endswith("_causal" if causal else "_full")
        held = int(choice.symbol.split("_d")[1].split("_")[0])
        assert held == min(size for size in (64, 128, 256) if size >= head_dim)
        assert choice.splits == 1


@pytest.mark.parametrize("gpu", GPUS)
def test_consistent_calls_divide_no_keys_and_have_one_width(choose: Any, gpu: str) -> None:
    """Whatever the sizes, dense or ragged, in pages or not: a head dim's kernels have key blocks of one width, and none is for decoding."""
    tables = load_tables()
    widths = {(unit.name, unit.target.name): unit.row.block_n for unit in tables.units()}

    def width(symbol: str, target: str) -> int:
        name = symbol.removeprefix("flashmoe_")
        return widths.get((name, target)) or widths[name.rsplit("_", 1)[0], target]

    for head_dim, bf16 in product((64, 80, 128, 256), (False, True)):
        if bf16 and not tables.gpu(gpu).bf16:
            continue
        found = set()
        for rows, keys, causal in product((1, 17, 100, 700, 9000), (90, 9000), (False, True)):
            dense = choose(
                GPUS[gpu], head_dim=head_dim, bf16=bf16, causal=causal, seq_q=rows, seq_k=keys, batch=1, consistent=True
            )
            assert dense.splits == 1
            found.add(width(dense.symbol, dense.target))
        for rows, batch, page_size in product((1, 17, 700, 9000), (1, 300), (0, 12, 16)):
            ragged = choose.varlen(
                GPUS[gpu], head_dim, rows=rows, batch=batch, page_size=page_size, bf16=bf16, consistent=True
            )
            assert "attention_decode" not in ragged[0]
            found.add(width(*ragged))
        assert len(found) == 1, (head_dim, found)


@pytest.mark.parametrize("gpu", GPUS)
def test_few_rows_of_a_consistent_call_have_two_kernels_of_its_width(choose: Any, gpu: str) -> None:
    """On Hopper; and another kernel wherever its bits, its tensors or its time ask for one."""
    widths = {unit.name: unit.row.block_n for unit in load_tables().units()}
    for head_dim, bf16 in product((64, 80, 128, 192, 256), (False, True)):
        made = choose.ordered(GPUS[gpu], head_dim, bf16=bf16)
        assert bool(made) == (gpu == "sm90")
        if not made:
            continue
        other = choose.varlen(GPUS[gpu], head_dim, rows=4, batch=1, heads=8, bf16=bf16, consistent=True)
        assert widths[made[1].removeprefix("flashmoe_")] == widths[other[0].removeprefix("flashmoe_")]
    for change in (
        {"consistent": False},
        {"rows": 9},
        {"has_score_functions": True},
        {"alibi": True},
        {"forced": "sm80"},
        {"keys": 1 << 23},  # scores beyond their room
        {"batch": 9},  # 288 blocks
    ):
        assert choose.ordered(GPUS[gpu], 128, **change) == ()
    assert bool(choose.ordered(GPUS[gpu], 128, batch=8)) == (gpu == "sm90")


def test_many_rows_of_many_key_heads_are_not_decoded_on_hopper(choose: Any) -> None:
    """But with num_splits=1, where a sequence has the same bits in any batch."""
    for batch, rows, changes, is_decoding in (
        (16, 16, {}, True),  # 128 key heads
        (17, 16, {}, False),
        (17, 8, {}, True),
        (17, 16, {"batch_invariant": True}, True),
    ):
        found = choose.varlen(90, 128, rows=rows, batch=batch, heads_kv=8, group=4, **changes)
        assert found[0].startswith("flashmoe_attention_decode_") == is_decoding
    assert choose.varlen(80, 128, rows=16, batch=17, heads_kv=8, group=4)[0].startswith("flashmoe_attention_decode_")


@pytest.mark.parametrize("gpu", GPUS)
def test_narrow_values_have_the_width_of_wide_ones(choose: Any, gpu: str) -> None:
    """Values of at most 128 columns beside keys of 129 to 192: their kernel where there is one, and one width with those that stand in for it."""
    widths = {(unit.name, unit.target.name): unit.row.block_n for unit in load_tables().units()}
    for head_dim, head_dim_v, is_narrow in (
        (192, 128, True),
        (136, 8, True),
        (128, 64, False),
        (200, 128, False),
        (192, 136, False),
        (192, 192, False),
    ):
        own = choose.varlen(GPUS[gpu], head_dim, rows=700, head_dim_v=head_dim_v)
        assert ("_v128" in own[0]) == (is_narrow and gpu == "sm90")
        for functions in ({"has_score_functions": True}, {"alibi": True}):
            assert "_v128" not in choose.varlen(GPUS[gpu], head_dim, rows=700, head_dim_v=head_dim_v, **functions)[0]
        found = {
            choose.varlen(
                *(GPUS[gpu], head_dim), rows=rows, head_dim_v=head_dim_v, page_size=page_size, consistent=True
            )
            for rows, page_size in product((1, 17, 700), (0, 12, 16))
        }
        assert len({widths[symbol.removeprefix("flashmoe_"), target] for symbol, target in found}) == 1


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        (87, "sm_86"),
        (101, "compute_80"),
        (103, "compute_80"),
        (121, "compute_80"),
        (130, "compute_80"),
        (91, "compute_80"),
    ],
)
def test_gpu_that_the_table_lacks(choose: Chooser, capability: int, target: str) -> None:
    """Older machine code of the same major version, else PTX; arch-specific code never."""
    choice = choose(capability)
    assert choice.target == target
    assert "_sm80_" in choice.symbol


def test_bf16_below_8_0(choose: Chooser) -> None:
    with pytest.raises(
        Exception, match=r"flashmoe:dtype: BF16 needs compute capability 8\.0; this is 7\.5; use float16"
    ):
        choose(75, bf16=True)


def test_no_kernel_for_this_gpu(choose_of_hopper_build: Chooser) -> None:
    text = (
        r"flashmoe:gpu: no kernel for a GPU \(compute capability 8\.0\) in this build, which holds sm_90a; rebuild with"
    )
    with pytest.raises(Exception, match=text):
        choose_of_hopper_build(80)
    with pytest.raises(Exception, match=r"flashmoe:gpu: .*compute capability 10\.0"):
        choose_of_hopper_build(100)


def test_cpu_only_build_says_so(choose_of_cpu_build: Chooser) -> None:
    with pytest.raises(Exception, match=r"flashmoe:gpu: .*holds none \(a CPU-only build\)"):
        choose_of_cpu_build(90)


@pytest.mark.parametrize("family", load_tables().gpu("sm90").families)
def test_forced_family(choose: Chooser, family: str) -> None:
    for seq in (32, 4096):
        assert f"_{family}_" in choose(90, forced=family, seq_q=seq, seq_k=seq, batch=1, heads=8).symbol


def test_forced_family_that_does_not_exist(choose: Chooser) -> None:
    with pytest.raises(Exception, match=r"flashmoe:argument: FLASHMOE_KERNEL=sm70 names no kernel family"):
        choose(90, forced="sm70")


def test_forced_family_that_does_not_run_here(choose: Chooser) -> None:
    with pytest.raises(
        Exception, match=r"flashmoe:argument: FLASHMOE_KERNEL=sm90: this family has no kernel for float16"
    ):
        choose(80, forced="sm90")
    with pytest.raises(Exception, match=r"FLASHMOE_KERNEL=sm75: this family has no kernel for bfloat16"):
        choose(90, forced="sm75", bf16=True)


def test_few_query_tiles_get_small_ones(choose: Chooser) -> None:
    """The older family's 64-row kernel starts sooner; with more keys, or more tiles than fit at once, it is behind."""
    assert "_m64_" in choose(90, head_dim=64, batch=1, heads=8, seq_q=128, seq_k=128).symbol
    assert "_m64_" not in choose(90, head_dim=64, batch=64, heads=8, seq_q=128, seq_k=128).symbol
    assert "_sm80_f16_d128_m64_" in choose(90, head_dim=128, batch=1, heads=8, seq_q=128, seq_k=128).symbol
    for head_dim, seq in ((64, 2048), (128, 512), (256, 128)):
        choice = choose(90, head_dim=head_dim, batch=1, heads=8, seq_q=seq, seq_k=seq)
        assert "_sm90_" in choice.symbol, (head_dim, seq, choice)
    assert "_m64_" in choose(80, head_dim=64, batch=1, heads=8, seq_q=128, seq_k=128).symbol
    assert "_m64_" in choose(80, head_dim=128, batch=1, heads=8, seq_q=512, seq_k=512).symbol


@pytest.mark.parametrize("capability", [80, 89])
def test_decode_splits_the_keys(choose: Chooser, capability: int) -> None:
    """B=1, 8 key heads, one row block each: 8 tiles for 132 multiprocessors."""
    choice = choose(capability, batch=1, heads=8, seq_q=4, seq_k=8192)
    assert "_sm80_" in choice.symbol
    assert "_split_" in choice.symbol
    assert choice.splits == 16
    assert choose(capability, batch=1, heads=8, seq_q=4, seq_k=512).splits == 1
    assert choose(capability, batch=64, heads=8, seq_q=4, seq_k=8192).splits == 1


@pytest.mark.parametrize(("head_dim", "splits"), [(64, 2), (128, 2), (256, 4)])
@pytest.mark.parametrize("seq_k", [8192, 32768])
def test_chunked_prefill_on_hopper_fills_the_machine(choose: Chooser, head_dim: int, splits: int, seq_k: int) -> None:
    """512 rows of 2048 / head_dim heads: 64 or 32 tiles for 132 multiprocessors; four such batches need no split."""
    heads = 2048 // head_dim
    choice = choose(90, head_dim=head_dim, batch=1, heads=heads, seq_q=512, seq_k=seq_k, causal=True)
    assert f"_sm90_f16_d{head_dim}_split_causal" in choice.symbol
    assert choice.splits == splits
    assert choose(90, head_dim=head_dim, batch=4, heads=heads, seq_q=512, seq_k=seq_k, causal=True).splits == 1


@pytest.mark.parametrize(
    ("head_dim", "batch", "heads", "seq_q", "seq_k", "splits"),
    [
        (128, 1, 16, 256, 8192, 4),
        (128, 1, 16, 128, 8192, 8),
        (128, 1, 16, 512, 1024, 1),  # the second pass would cost more than it saves
        (128, 2, 16, 512, 32768, 1),  # 128 tiles fill the machine
        (128, 32, 16, 512, 8192, 1),
        (64, 1, 1, 128, 1 << 20, 32),  # a lane of the combining warp each
    ],
)
def test_hopper_divides_keys_to_fill_the_machine(
    choose: Chooser, head_dim: int, batch: int, heads: int, seq_q: int, seq_k: int, splits: int
) -> None:
    for causal in (False, True):
        shape = {"batch": batch, "heads": heads, "seq_q": seq_q, "seq_k": seq_k}
        choice = choose(90, head_dim=head_dim, causal=causal, **shape)
        assert choice.splits == splits, choice
        assert "_sm90_" in choice.symbol
        assert ("_split_" in choice.symbol) == (splits > 1)


def test_decode_on_hopper_splits_the_keys(choose: Chooser) -> None:
    choice = choose(90, batch=1, heads=8, seq_q=4, seq_k=8192)
    assert "_sm90_" in choice.symbol
    assert "_split_" in choice.symbol
    assert 8 <= choice.splits <= 16
    assert choose(90, batch=8, heads=8, seq_q=4, seq_k=8192).splits == 2
    assert choose(90, batch=1, heads=8, seq_q=4, seq_k=512).splits == 1
    assert choose(90, batch=16, heads=8, seq_q=4, seq_k=8192).splits == 1


def test_hopper_splits_stay_within_the_machine(choose: Chooser) -> None:
    """Every share has a multiprocessor, at least 128 keys and a lane of the combining warp."""
    lengths = product((1, 64, 512, 2048), (300, 1024, 8192, 100_000))
    for (seq_q, seq_k), batch, head_dim, mps in product(lengths, (1, 2, 8), (64, 128, 256), (78, 132, 400)):
        choice = choose(90, head_dim=head_dim, batch=batch, heads=8, seq_q=seq_q, seq_k=seq_k, multiprocessors=mps)
        if choice.splits == 1:
            assert "_split_" not in choice.symbol
            continue
        block_m = {64: 256, 128: 128, 256: 128}[head_dim]
        tiles = -(-seq_q // block_m) * 8 * batch
        assert choice.splits * tiles <= mps
        assert seq_k // choice.splits >= 128
        assert choice.splits <= 32


@pytest.mark.parametrize(
    ("head_dim", "causal", "seq", "variant"),
    [
        (64, False, 512, "short_"),
        (64, False, 1024, "short_"),
        (64, False, 4096, ""),
        (64, True, 512, ""),
        (64, True, 16384, ""),
        (128, False, 512, "short_"),
        (128, False, 4096, ""),
        (128, True, 1024, "short_"),
        (128, True, 8192, ""),
        (256, True, 512, ""),
    ],
)
def test_hopper_tile_follows_the_length(choose: Chooser, head_dim: int, causal: bool, seq: int, variant: str) -> None:
    choice = choose(
        90, head_dim=head_dim, batch=16384 // seq, heads=2048 // head_dim, seq_q=seq, seq_k=seq, causal=causal
    )
    assert f"_sm90_f16_d{head_dim}_{variant}{'causal' if causal else 'full'}" in choice.symbol


def test_hopper_takes_short_tiles_for_the_last_wave(choose: Chooser) -> None:
    """B=8, H=8, S=256: 64 tiles of 256 rows, 128 of 128 rows. B=4, H=16, 512 rows: 192 tiles of 192 rows, 256 of 128."""
    assert "_m128_" in choose(90, head_dim=64, batch=8, heads=8, seq_q=256, seq_k=256).symbol
    assert "_m128_" in choose(90, head_dim=128, batch=4, heads=16, seq_q=512, seq_k=8192, causal=True).symbol


def test_the_choice_depends_on_nothing_else(choose: Chooser) -> None:
    """The same problem gets the same kernel, whatever was asked before."""
    problems = [(1, 8, 4, 8192), (4, 32, 4096, 4096), (1, 16, 512, 8192), (8, 8, 256, 256)]
    first = [choose(90, batch=b, heads=h, seq_q=q, seq_k=k) for b, h, q, k in problems]
    assert [choose(90, batch=b, heads=h, seq_q=q, seq_k=k) for b, h, q, k in reversed(problems)] == first[::-1]


def test_every_choice_is_a_kernel_of_the_table(choose: Chooser) -> None:
    symbols = {symbol for unit in load_tables().units() for _, symbol in unit.entries}
    sizes = ((1, 1), (1, 100_000), (65, 65), (4096, 4096))
    for gpu, (seq_q, seq_k), batch, causal in product(GPUS, sizes, (1, 4, 1000), (False, True)):
        choice = choose(GPUS[gpu], seq_q=seq_q, seq_k=seq_k, batch=batch, causal=causal)
        assert choice.symbol in symbols
        assert 1 <= choice.splits <= 32


def test_chunks_fold_and_share_keys_where_tiles_are_few(choose: Any) -> None:
    """By the multiprocessors of the GPU; whole where the tiles fill them, and not at all where the ragged kernel's do as well."""
    few = choose.chunk(90, 128, rows=128, keys=16384)  # 32 tiles
    assert few == ("flashmoe_attention_chunk_forward_sm90_bf16_d128", 4)
    assert choose.chunk(90, 128, rows=128, keys=16384, multiprocessors=66)[1] == 2
    assert choose.chunk(90, 128, rows=512, keys=16384)[1] == 1  # 128 tiles
    assert choose.chunk(90, 128, rows=512, keys=8192, batch=4, heads_kv=16, group=1)[1] == 1
    assert choose.chunk(90, 128, rows=8192, keys=8192, batch=4) == ("", 0)
    assert choose.chunk(90, 128, rows=128, keys=300)[1] <= 1  # too few keys for two


def test_what_chunks_do_not_serve(choose: Any) -> None:
    few: dict[str, Any] = {"rows": 128, "keys": 16384}
    for changes in (
        {"consistent": True},
        {"num_splits": 1},  # where a sequence has the same bits in any batch
        {"has_score_functions": True},
        {"forced": "sm80"},
        {"page_size": 12},
        {"group": 65},
        {"rows": 4},  # 16 rows of a key head: decoded
    ):
        assert choose.chunk(90, 128, **{**few, **changes}) == ("", 0), changes
    assert choose.chunk(90, 192, head_dim_v=128, **few) == ("", 0)
    assert choose.chunk(80, 128, **few) == ("", 0)
    assert choose.chunk(90, 128, num_splits=3, **few)[1] == 3
    assert choose.chunk(90, 128, rows=5, keys=16384)[1] > 1
    assert choose.chunk(90, 128, seen=100, **few)[1] < 4  # a window


def test_16_rows_of_a_key_head_are_a_chunk_where_that_was_measured_faster(choose: Any) -> None:
    decoded = ("", 0)
    assert choose.chunk(90, 128, rows=4, keys=4096) != decoded
    assert choose.chunk(90, 128, rows=4, keys=4096, batch=2) != decoded
    for changes in ({"rows": 3}, {"keys": 1024}, {"keys": 16384}, {"batch": 4}):
        assert choose.chunk(90, 128, **{"rows": 4, "keys": 4096, **changes}) == decoded, changes
    assert choose.chunk(90, 64, rows=4, keys=4096) == decoded
    assert choose.chunk(90, 256, rows=4, keys=1024)[1] == 4
    assert choose.chunk(90, 256, rows=2, keys=1024) == decoded


def test_few_dense_rows_fold(choose: Any) -> None:
    """Where that was measured: grouped heads of many keys, and up to eight rows of head dim 128 without groups."""
    few: dict[str, Any] = {"rows": 8, "keys": 16384}
    for changes in (
        {},
        {"rows": 2, "keys": 1024},
        {"rows": 64},
        {"head_dim": 64},
        {"head_dim": 256},
        {"group": 1, "heads_kv": 16},
        {"batch": 16, "keys": 1024},
        {"rows": 64, "group": 8},
        {"causal": False},
    ):
        assert choose.folds(90, **{**few, **changes}), changes
    for changes in (
        {"rows": 1},  # a kernel of its own
        {"rows": 65},
        {"rows": 64, "keys": 4096},
        {"keys": 1024},
        {"rows": 9, "group": 1, "heads_kv": 16},
        {"group": 1, "heads_kv": 16, "head_dim": 64},
        {"group": 1, "heads_kv": 16, "head_dim": 256},
        {"rows": 4, "keys": 1024, "head_dim": 256},
        {"consistent": True},
        {"forced": "sm90"},
    ):
        assert not choose.folds(90, **{**few, **changes}), changes
    assert not choose.folds(80, **few)
