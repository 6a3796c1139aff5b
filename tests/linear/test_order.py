"""One order of sums: on the emulated machine every kernel that linear can run gives a row the same bits, and a planted bug that changes
only the order is noticed."""

import itertools
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from flashmoe_build.emulation.build import CSRC, Options
from flashmoe_build.emulation.machine import Settings
from flashmoe_build.emulation.runner import Launch, Trial, counter, execute, output
from flashmoe_tools.operations.linear.emulation import MOST_COLUMNS, Sums, launch
from flashmoe_tools.tables import Unit, load_tables

OPERATIONS = ("grouped_gemm", "grouped_gemm_few_rows", "linear", "linear_nk", "linear_few_rows")
GIVEN = Sums("", "bf16", (70,), n=136, k=328, weights="nk", has_bias=True)
ONE_BLOCK, BLOCKS = replace(GIVEN, segments=4), replace(GIVEN, segments=4, is_divided=True)
WIDE = "linear_sm90_bf16_n128"
SMALL = "linear_nk_sm90_bf16_m64_n64"
FEW = "linear_few_rows_sm80_bf16_m8"


@lru_cache
def units() -> dict[str, Unit]:
    found = load_tables().units(("sm_90a",))
    return {unit.name: unit for unit in found if unit.row.operation in OPERATIONS and unit.dtype == "bf16"}


def result(unit: Unit, options: Options, given: Sums = GIVEN) -> torch.Tensor:
    """The bits of d [70, 136], sums whose terms cancel: only rounding errors and the bias remain. For every family, the tensor
    cores are those of an H100."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((GIVEN.rows, GIVEN.k // 2), (1, GIVEN.n, GIVEN.k // 2), (1, GIVEN.n))
    a, b, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    a, b, bias = torch.cat((a, a), 1), torch.cat((b, -b), 2), bias * 2**-18
    d = torch.full((GIVEN.rows, GIVEN.n), float("nan"), dtype=a.dtype)
    values = {**GIVEN.sizes(), "a": a, "b": b, "b_expert_stride": b.stride(0), "d": output(d), "bias": bias}
    if unit.row.operation == "linear_nk":
        one = launch(unit, given, values)
    else:
        one = Launch({**values, "tile_counter": counter()}, GIVEN.tiles(unit), GIVEN.words)
    outcome = execute(unit, Trial([one], list), Settings(), options)
    assert outcome.passed, outcome.explain()
    assert (d.double() - bias.double()).abs().max() <= GIVEN.k * 2**-20
    return d.view(torch.int16)


@lru_cache
def expected(segments: int) -> torch.Tensor:
    return result(units()[SMALL], Options(), replace(GIVEN, segments=segments))


def assert_every_pair_agrees(results: dict[str, torch.Tensor]) -> None:
    for (name, one), (other_name, other) in itertools.combinations(results.items(), 2):
        assert torch.equal(one, other), f"{name} and {other_name}: {int((one != other).sum())} values differ"


def test_every_pair_of_kernels_agrees() -> None:
    results = {name: result(unit, Options()) for name, unit in units().items() if unit.row.family != "sm75"}
    assert {unit.row.family for unit in units().values()} >= {"sm80", "sm90"}
    assert len(results) >= 15
    assert_every_pair_agrees(results)


def test_every_pair_agrees_on_a_sum_in_segments() -> None:
    """A single block may compute all segments of its tile, or one block each; both differ from an undivided sum."""
    able = [unit for unit in units().values() if unit.row.operation == "linear_nk" and unit.row.block_n <= MOST_COLUMNS]
    results = {f"{unit.name} {p.name}": result(unit, Options(), p) for unit in able for p in (ONE_BLOCK, BLOCKS)}
    assert len(results) >= 8
    assert_every_pair_agrees(results)
    assert not torch.equal(expected(4), expected(1))


LOADS = """load_rows<Spec>(smem.a(state.stage), *a_map, full, tile, k, slabs);
        load_weights<Spec, kWeights>(smem.b(state.stage), b_map, full, tile, k);"""
MULTIPLY = """mainloop.multiply(accum, blocks_of(work.first_segment), wg_tile.rows);
    if constexpr (Spec::kHasSegments) {
      for (int segment = work.first_segment + 1;"""
KERNEL = "linear/sm90/linear.cuh"
# (what, file, text, its replacement, kernel, problem): each leaves results as exact as they were.
PLANTED = [
    (
        "wgmma: the four products of a stage in descending order",
        "moe/grouped_gemm/sm90/mainloop.cuh",
        "a.k_step(step, block * kRowStride), b.k_step(step)",
        "a.k_step(3 - step, block * kRowStride), b.k_step(3 - step)",
        SMALL,
        GIVEN,
    ),
    (
        "wgmma: blocks of 64 k from the last to the first",
        "moe/grouped_gemm/sm90/producer.cuh",
        LOADS,
        LOADS.replace("tile, k", "tile, (params.k - 1) / 64 * 64 - k"),
        WIDE,
        GIVEN,
    ),
    (
        "few rows: the two products of 32 k in descending order",
        "moe/grouped_gemm/few_rows/multiply.cuh",
        "a[i][half], b[2 * half], b[2 * half + 1]",
        "a[i][1 - half], b[2 - 2 * half], b[3 - 2 * half]",
        FEW,
        GIVEN,
    ),
    (
        "few rows: the pairs of a stage in descending order",
        "moe/grouped_gemm/few_rows/multiply.cuh",
        "for (int pair = 0; pair < Spec::kBlockK / 32; ++pair) {",
        "for (int pair = Spec::kBlockK / 32 - 1; pair >= 0; --pair) {",
        FEW,
        GIVEN,
    ),
    (
        "segments: each ends where it should, rounded up",
        KERNEL,
        "return segment * blocks / segments;",
        "return (segment * blocks + segments - 1) / segments;",
        SMALL,
        ONE_BLOCK,
    ),
    (
        "segments of a block: one chain over all of them",
        KERNEL,
        MULTIPLY,
        MULTIPLY.replace("blocks_of(work.first_segment)", "scheduler.start(work.end_segment)").replace(
            "work.first_segment + 1", "work.end_segment"
        ),
        SMALL,
        ONE_BLOCK,
    ),
    (
        "segments of several blocks: added from the last to the first",
        KERNEL,
        "partials_gmem + segment * kSegmentSums + i * 128",
        "partials_gmem + (params.segments - 1 - segment) * kSegmentSums + i * 128",
        SMALL,
        BLOCKS,
    ),
    (
        "segments of several blocks: added by twos",
        KERNEL,
        "partials_gmem + segment * kSegmentSums + i * 128",
        "partials_gmem + (segment ^ 2) * kSegmentSums + i * 128",
        SMALL,
        BLOCKS,
    ),
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: one[0])
def test_another_order_is_noticed(planted: tuple[str, str, str, str, str, Sums], tmp_path: Path) -> None:
    _, path, text, replacement, kernel, given = planted
    source = (CSRC / path).read_text()
    assert source.count(text) == 1
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(source.replace(text, replacement))
    found = result(units()[kernel], Options(overlay=tmp_path), given)
    assert not torch.equal(found, expected(given.segments))
