"""Hopper's kernels over a cache of 8-bit floats, and over keys that indices select.

They have the bits of the same kernel over the dequantised cache, and over the selected keys in contiguous memory."""

from dataclasses import replace

import pytest
import torch

from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.compare import DTYPES
from flashmoe_build.emulation.machine import Settings
from flashmoe_build.emulation.runner import execute
from flashmoe_tools.operations.mla_decode.codes import dequantize
from flashmoe_tools.operations.mla_decode.emulation.decode import trial_on
from flashmoe_tools.operations.mla_decode.emulation.problem import MlaProblem, Tensors, build
from flashmoe_tools.tables import Unit, load_tables

UNITS = {unit.name: unit for unit in load_tables().units(("sm_90a",))}


def tile(rows: int, *words: str) -> Unit:
    return UNITS["_".join(("mla_decode_sm90_f16" if rows == 64 else f"mla_decode_few_sm90_f16_m{rows}", *words))]


def results(unit: Unit, tensors: Tensors) -> list[torch.Tensor]:
    outcome = execute(unit, trial_on(unit, tensors), Settings(), Options())
    assert outcome.passed, outcome.explain()
    return [outcome.results[name].nan_to_num(7.0) for name in ("out", "lse")]


@pytest.mark.parametrize("rows", [8, 16, 64])
def test_the_bits_of_the_dequantised_cache(rows: int) -> None:
    """One, some and all heads of a tile; one and two tokens; lengths from none to several blocks, whole and split."""
    for heads, tokens, keys, splits in (
        (1, 2, (130, 0, 64), 32),
        (rows // 2 - 1, 2, (1, 200), 1),
        (rows, 1, (64, 15, 333), 32),
    ):
        problem = MlaProblem("codes", "f16", keys, heads, tokens, magnitude=3.0, num_splits=splits, has_codes=True)
        of_codes = build(problem)
        wide = dequantize(of_codes.cache, DTYPES["f16"])
        of_elements = replace(build(problem), problem=replace(problem, has_codes=False), cache=wide)
        for one, other in zip(results(tile(rows, "codes"), of_codes), results(tile(rows), of_elements), strict=True):
            assert torch.equal(one, other), problem


@pytest.mark.parametrize("words", [(), ("codes",)], ids=["elements", "codes"])
@pytest.mark.parametrize("rows", [8, 16, 64])
def test_the_bits_of_gathered_keys(rows: int, words: tuple[str, ...]) -> None:
    problem = MlaProblem(
        "named", "f16", (203, 203), rows - 1, is_causal=False, magnitude=3.0, topk=203, has_codes=bool(words)
    )
    named = build(problem)
    assert named.indices is not None
    dense = replace(
        build(replace(problem, topk=0, page_size=0)),
        q=named.q,
        keys=named.keys,
        cache=named.cache.flatten(0, 1)[named.indices.long()],
    )
    found = zip(results(tile(rows, *words, "sparse"), named), results(tile(rows, *words), dense), strict=True)
    assert all(torch.equal(one, other) for one, other in found)
