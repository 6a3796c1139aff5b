"""Caches of 8-bit floats on emulated kernels: the bits are those of the 16-bit kernel on the dequantised cache."""

from dataclasses import replace

import pytest
import torch

from flashmoe_build.emulation.build import Options
from flashmoe_build.emulation.machine import TENSOR_CORES, Settings
from flashmoe_build.emulation.runner import execute
from flashmoe_tools.operations.serving.emulation import decode, e4m3
from flashmoe_tools.operations.serving.emulation.tensors import build
from flashmoe_tools.tables import Unit, load_tables


def _unit(name: str, target: str) -> Unit:
    return next(unit for unit in load_tables().units() if unit.name == name and unit.target.name == target)


@pytest.mark.parametrize(("target", "core", "dtype"), [("sm_80", "a100", "f16"), ("sm_90a", "h100", "bf16")])
@pytest.mark.parametrize(
    "name", ["decode", "window", "page scales, window", "far page scales", "every code", "wide scores"]
)
def test_powers_of_two_give_the_bits_of_the_16_bit_kernel(name: str, target: str, core: str, dtype: str) -> None:
    """In the tensor's column order if eight products are added at once, in the order of the bytes if sixteen are."""
    unit = _unit(f"attention_decode_e4m3_sm80_{dtype}_d64", target)
    found = {problem.name: problem for problem in e4m3.problems(_unit("attention_decode_e4m3_sm80_f16_d64", "sm_80"))}
    problem = replace(
        found[name], dtype=dtype, exponents=(-4, 2) if name == "far page scales" else found[name].exponents
    )
    if problem.scales is e4m3.Scales.SEQUENCES:
        problem = replace(problem, scales=e4m3.Scales.HEADS)  # a page that two sequences share has one value
    tensors, k_scale, v_scale = e4m3.quantize(problem, build(problem))
    settings = Settings(core=TENSOR_CORES[core])
    of_codes = execute(unit, e4m3.trial_on(unit, problem, tensors, k_scale, v_scale), settings, Options())
    assert of_codes.passed, of_codes.explain()
    results = {key: value.clone() for key, value in of_codes.results.items()}
    wide, elements = (
        e4m3.dequantize(problem, tensors, k_scale, v_scale),
        _unit(f"attention_decode_sm80_{dtype}_d64", target),
    )
    of_elements = execute(elements, decode.trial_on(elements, problem, wide), settings, Options())
    assert of_elements.passed, of_elements.explain()
    for key, value in of_elements.results.items():
        assert torch.equal(results[key].nan_to_num(7.0), value.nan_to_num(7.0)), key
