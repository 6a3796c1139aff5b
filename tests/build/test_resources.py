"""The resource check reads ptxas's own words, from real compilations of kernels that break each rule."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import pytest

from flashmoe.tables import Unit, load_tables
from flashmoe_build.device import options_for
from flashmoe_build.nvrtc_worker import compile_job
from flashmoe_build.resources import findings, parse_log
from flashmoe_build.toolchain import find_toolchain


@pytest.fixture(scope="module")
def unit() -> Unit:
    """A unit whose one entry the test kernels bear the name of."""
    found = next(unit for unit in load_tables().units(("sm_80",)) if unit.dtype == "f16")
    return dataclasses.replace(found, row=dataclasses.replace(found.row, masks=("full",), allow={}))


def run_job(unit: Unit, body: str, blocks: int = 1) -> dict[str, Any]:
    symbol = unit.entries[0][1]
    source = f'extern "C" __global__ void __launch_bounds__(128, {blocks}) {symbol}(float* x) {{ {body} }}'
    library = str(find_toolchain().nvrtc_library)
    return compile_job({"library": library, "source": source, "name": "case.cu", "options": options_for(unit)})


def compile_log(unit: Unit, body: str, blocks: int = 1) -> str:
    answer = run_job(unit, body, blocks)
    assert answer["status"] == "ok", answer["log"]
    assert base64.b64decode(answer["output"])[:4] == b"\x7fELF"
    return str(answer["log"])


LOCAL_ARRAY = "float a[200]; for (int i = 0; i < 200; ++i) a[i] = x[i]; x[0] = a[(int)x[300] & 127];"


def kinds(unit: Unit, log: str) -> set[str]:
    return {finding.kind for finding in findings(unit, log, load_tables())}


def test_clean_kernel_has_no_finding(unit: Unit) -> None:
    log = compile_log(unit, "x[threadIdx.x] *= 2.0f;")
    assert kinds(unit, log) == set()
    (resources,) = parse_log(log)
    assert resources.symbol == unit.entries[0][1]
    assert 0 < resources.registers < 32
    assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0)


def test_local_memory_is_found(unit: Unit) -> None:
    assert "local_memory" in kinds(unit, compile_log(unit, LOCAL_ARRAY))


def test_spill_is_found(unit: Unit) -> None:
    body = "".join(f"float a{i} = x[{i} * 33 + threadIdx.x];" for i in range(240))
    body += "__syncthreads(); " + "".join(f"x[{i} * 35] = a{i} * a{(i * 7 + 1) % 240};" for i in range(240))
    assert kinds(unit, compile_log(unit, body)) == set()
    assert {"spill", "local_memory"} <= kinds(unit, compile_log(unit, body, blocks=8))


def test_static_shared_memory_over_48_kib_does_not_compile(unit: Unit) -> None:
    """F15: the pre-opt-in limit; ptxas refuses, so no such kernel reaches a launch."""
    answer = run_job(unit, "__shared__ float s[12500]; s[threadIdx.x] = x[0]; __syncthreads(); x[1] = s[5];")
    assert answer["status"] != "ok"
    assert "too much shared data" in answer["log"]


def test_missing_entry_is_found(unit: Unit) -> None:
    two = dataclasses.replace(unit, row=dataclasses.replace(unit.row, masks=("full", "causal")))
    assert "resources" in kinds(two, compile_log(unit, "x[0] = 1.0f;"))


def test_empty_log_is_no_pass(unit: Unit) -> None:
    assert kinds(unit, "") == {"resources"}


def test_wgmma_serialisation_is_found(unit: Unit) -> None:
    log = compile_log(unit, "x[0] = 1.0f;")
    log += (
        "\nptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    )
    assert kinds(unit, log) == {"wgmma_serialised"}


def test_allowed_kind_passes_only_itself(unit: Unit) -> None:
    allowing = dataclasses.replace(unit, row=dataclasses.replace(unit.row, allow={"local_memory": "a reason"}))
    log = compile_log(unit, LOCAL_ARRAY)
    assert "local_memory" not in kinds(allowing, log)
    assert "local_memory" in kinds(unit, log)


def test_bf16_does_not_compile_for_sm75(unit: Unit) -> None:
    """F10: bf16 arithmetic has no code below 8.0; the unit would fail, it cannot silently be built."""
    tables = load_tables()
    bad = dataclasses.replace(unit, target=tables.target("sm_75"))
    toolchain = find_toolchain()
    source = (
        "#include <cuda_bf16.h>\n"
        f'extern "C" __global__ void {bad.entries[0][1]}(unsigned short* x) '
        '{ asm("fma.rn.bf16 %0, %0, %0, %0;" : "+h"(*x)); }'
    )
    job = {
        "library": str(toolchain.nvrtc_library),
        "source": source,
        "name": "case.cu",
        "options": [*options_for(bad), f"--include-path={toolchain.cuda_include}"],
    }
    answer = compile_job(job)
    assert answer["status"] != "ok"
    assert "sm_80" in answer["log"]
