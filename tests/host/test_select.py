"""Which kernel each GPU gets, and the error if there is none."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from flashmoe_tools.tables import load_tables

if TYPE_CHECKING:
    from collections.abc import Callable

    Chooser = Callable[..., object]

GPUS = {gpu.name: 10 * gpu.compute_capability[0] + gpu.compute_capability[1] for gpu in load_tables().gpus}


@pytest.mark.parametrize("gpu", GPUS)
def test_consistent_calls_divide_no_keys_and_have_one_width(choose: Any, gpu: str) -> None:
    """For all sizes, dense or ragged, paged or not: a head dim's key blocks have one width, and no kernel decodes."""
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
def test_consistent_calls_with_alibi_have_one_kernel(choose: Any, gpu: str) -> None:
    """Each family moves the softmax reference at its own blocks, so pages that TMA cannot load are refused."""
    for head_dim in (64, 80, 128, 256):
        found = {
            choose.varlen(GPUS[gpu], head_dim, rows=rows, batch=batch, page_size=page_size, alibi=True, consistent=True)
            for rows, batch, page_size in product((1, 4, 17, 700, 9000), (1, 300), (0, 8, 16))
        }
        assert len(found) == 1, found
        assert "_alibi" in found.pop()[0]
        odd = choose.varlen(GPUS[gpu], head_dim, rows=700, page_size=12, alibi=True, consistent=True)
        assert bool(odd) == (gpu != "sm90")


@pytest.mark.parametrize("gpu", GPUS)
def test_narrow_values_have_the_width_of_wide_ones(choose: Any, gpu: str) -> None:
    """Values of up to 128 columns, keys of 129 to 192: their own kernel if there is one, with its fallbacks' width."""
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


def test_forced_family_that_does_not_exist(choose: Chooser) -> None:
    with pytest.raises(
        Exception, match=r"flashmoe:argument: FLASHMOE_KERNEL=sm70 is not a kernel family of this build"
    ):
        choose(90, forced="sm70")


def test_forced_family_that_does_not_run_here(choose: Chooser) -> None:
    with pytest.raises(
        Exception, match=r"flashmoe:argument: FLASHMOE_KERNEL=sm90: this family has no kernel for float16"
    ):
        choose(80, forced="sm90")
    with pytest.raises(Exception, match=r"FLASHMOE_KERNEL=sm75: this family has no kernel for bfloat16"):
        choose(90, forced="sm75", bf16=True)


# (number of the choice, further arguments, what has no kernel)
REFUSALS = (
    (0, {}, "head_dim 64"),
    (0, {"flags": 2}, "head_dim 64, batch-invariant (consistent=True)"),
    (1, {}, "head_dim 64"),
    (1, {"page_size": 12}, "head_dim 64, pages of 12 keys"),
    (1, {"flags": 2, "head_dim": 40}, "head_dim 40, batch-invariant (consistent=True)"),
    (1, {"flags": 1}, "ALiBi, head_dim 64"),
    (2, {}, "the gradient of packed or windowed attention, head_dim 64"),
    (3, {}, "the gradient of attn_mask, head_dim 64"),
    (3, {"flags": 2}, "the gradient of an attn_mask with one row or one key"),
    (4, {}, "a float8_e4m3fn cache, head_dim 64"),
    (5, {}, "float8_e4m3fn attention, head_dim 64"),
    (6, {}, "dropout, head_dim 64"),
    (7, {}, "dropout with a softcap or a mask tensor, head_dim 64"),
    (8, {}, "the gradient of dropout, head_dim 64"),
    (9, {}, "dk and dv without dq"),
    (10, {}, "appending to a cache"),
    (11, {}, "appending to a float8_e4m3fn cache"),
)


@pytest.mark.parametrize(("which", "given", "what"), REFUSALS, ids=[what for _, _, what in REFUSALS])
def test_what_has_no_kernel_is_named(choose_of_hopper_build: Any, which: int, given: dict[str, int], what: str) -> None:
    """For a named family that the build lacks for the GPU; past the dense kernels' head dims by the rule for those."""
    told = choose_of_hopper_build.refusal(which, forced="sm90", **given)
    beginning = "flashmoe:argument: FLASHMOE_KERNEL=sm90: this family has no kernel for float16"
    assert told == f"{beginning}, {what} on a GPU (compute capability 8.0); unset it or name another family"
    head, _, tail = what.partition(", head_dim ")
    if tail:
        assert choose_of_hopper_build.refusal(which, **{**given, "head_dim": 257}) == (
            f"flashmoe:attention.wide|what={head}|head_dim=257|most=256|"
        )
        assert "no kernel for a GPU" in choose_of_hopper_build.refusal(which, **{**given, "head_dim": 256})


def test_a_family_that_is_named_is_what_lacks_the_bits(choose: Any) -> None:
    """Another family may have them, so nothing is said about all kernels of the GPU."""
    told = choose.refusal(1, forced="sm90", page_size=12, flags=6)
    beginning = "flashmoe:argument: FLASHMOE_KERNEL=sm90: this family has no kernel for float16, head_dim 64"
    assert told.startswith(f"{beginning}, pages of 12 keys, batch-invariant (consistent=True) on a GPU")
