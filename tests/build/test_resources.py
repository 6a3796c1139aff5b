"""The resource check reads ptxas's real messages, from compilations of kernels that break each rule."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flashmoe.errors import BuildError
from flashmoe_build.compile.cache import Cache
from flashmoe_build.compile.nvrtc import compile_ptx
from flashmoe_build.compile.ptxas import assemble
from flashmoe_build.compile.resources import findings, parse_log
from flashmoe_build.compile.toolchain import find_toolchain
from flashmoe_tools.tables import Unit, load_tables


@pytest.fixture(scope="module")
def unit() -> Unit:
    """A unit whose only entry has the name of the test kernels."""
    found = next(unit for unit in load_tables().units(("sm_80",)) if unit.dtype == "f16")
    return dataclasses.replace(found, row=dataclasses.replace(found.row, words={"mask": ("full",)}, allow={}))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("cache"))


Compile = Callable[..., str]


@pytest.fixture
def compile_log(unit: Unit, cache: Cache) -> Compile:
    """The compilers' log for a kernel with the unit's name and this body."""

    def compile_body(body: str, blocks: int = 1, to: Unit = unit, header: str = "") -> str:
        toolchain = find_toolchain()
        symbol = to.entries[0][1]
        source = f'{header}extern "C" __global__ void __launch_bounds__(128, {blocks}) {symbol}(float* x) {{ {body} }}'
        ptx = compile_ptx(source, "case", to.virtual, csrc=cache.folder, toolchain=toolchain, cache=cache)
        made = assemble(ptx.text, "case", to.target.name, toolchain)
        assert made.cubin[:4] == b"\x7fELF"
        assert made.peak_bytes > 1_000_000
        return ptx.log + made.log

    return compile_body


WGMMA = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
LOCAL_ARRAY = "float a[200]; for (int i = 0; i < 200; ++i) a[i] = x[i]; x[0] = a[(int)x[300] & 127];"


def kinds(unit: Unit, log: str) -> set[str]:
    return {finding.kind for finding in findings(unit, log, load_tables())}


def test_clean_kernel_has_no_finding(unit: Unit, compile_log: Compile) -> None:
    log = compile_log("x[threadIdx.x] *= 2.0f;")
    assert kinds(unit, log) == set()
    (resources,) = parse_log(log)
    assert resources.symbol == unit.entries[0][1]
    assert 0 < resources.registers < 32
    assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0)


def test_local_memory_is_found(unit: Unit, compile_log: Compile) -> None:
    assert "local_memory" in kinds(unit, compile_log(LOCAL_ARRAY))


def test_spill_is_found(unit: Unit, compile_log: Compile) -> None:
    body = "".join(f"float a{i} = x[{i} * 33 + threadIdx.x];" for i in range(240))
    body += "__syncthreads(); " + "".join(f"x[{i} * 35] = a{i} * a{(i * 7 + 1) % 240};" for i in range(240))
    assert kinds(unit, compile_log(body)) == set()
    spilling = compile_log(body, blocks=8)
    assert kinds(unit, spilling) == {"spill", "local_memory"}
    reasons = {"spill": "a reason", "local_memory": "a reason"}
    allowing = dataclasses.replace(unit, row=dataclasses.replace(unit.row, allow=reasons))
    assert kinds(allowing, spilling) == set()


def test_static_shared_memory_over_48_kib_does_not_compile(compile_log: Compile) -> None:
    """The limit without opt-in; ptxas rejects such a kernel, so it cannot reach a launch."""
    with pytest.raises(BuildError, match=r"(?s)case: ptxas for sm_80 ended with .*too much shared data"):
        compile_log("__shared__ float s[12500]; s[threadIdx.x] = x[0]; __syncthreads(); x[1] = s[5];")


@pytest.mark.parametrize(
    ("pattern", "stands", "says"),
    [
        (r"Used \d+ registers", "Used 255 registers", "131072 registers per block; sm80 has 65536"),
        (r"(Used \d+ registers)", r"\1, 49153 bytes smem", "49153 bytes of static shared memory; any GPU has 49152"),
        (r"(Used \d+ registers)", r"\1, 48000 bytes smem", "bytes of shared memory per block; sm86 has 101376"),
    ],
)
def test_what_no_block_can_have_is_found(
    unit: Unit, compile_log: Compile, pattern: str, stands: str, says: str
) -> None:
    """The log of a kernel that compiled, with the numbers replaced by those of one that could never be launched."""
    row = dataclasses.replace(unit.row, warps=16, block_m=192, block_n=64)
    wide = dataclasses.replace(unit, row=row)
    log = compile_log("x[threadIdx.x] *= 2.0f;", to=wide)
    assert findings(wide, log, load_tables()) == ()
    found = findings(wide, re.sub(pattern, stands, log), load_tables())
    assert any(finding.kind == "resources" and says in finding.text for finding in found), found


def test_missing_entry_is_found(unit: Unit, compile_log: Compile) -> None:
    two = dataclasses.replace(unit, row=dataclasses.replace(unit.row, words={"mask": ("full", "causal")}))
    assert "resources" in kinds(two, compile_log("x[0] = 1.0f;"))


def test_empty_log_is_no_pass(unit: Unit) -> None:
    assert kinds(unit, "") == {"resources"}


def test_wgmma_serialisation_is_found(unit: Unit, compile_log: Compile) -> None:
    log = compile_log("x[0] = 1.0f;")
    assert kinds(unit, f"{log}\n{WGMMA}") == {"wgmma_serialised"}


def test_allowed_kind_passes_only_itself(unit: Unit, compile_log: Compile) -> None:
    allowing = dataclasses.replace(unit, row=dataclasses.replace(unit.row, allow={"local_memory": "a reason"}))
    log = compile_log(LOCAL_ARRAY)
    assert kinds(allowing, log) == set()
    assert "local_memory" in kinds(unit, log)
    assert kinds(allowing, f"{log}\n{WGMMA}") == {"wgmma_serialised"}


def test_a_warning_that_nobody_thought_of_fails(unit: Unit, compile_log: Compile) -> None:
    log = compile_log("x[0] = 1.0f;") + "\nptxas warning : something new about this kernel\n"
    assert kinds(unit, log) == {"warning"}


def test_bf16_does_not_compile_for_sm75(unit: Unit, compile_log: Compile) -> None:
    """There is no bf16 arithmetic below 8.0; the unit fails to compile and cannot be built silently."""
    turing = dataclasses.replace(unit, target=load_tables().target("sm_75"), virtual="compute_75")
    body = 'unsigned short h = 0; asm volatile("fma.rn.bf16 %0, %0, %0, %0;" : "+h"(h)); x[0] = h;'
    assert compile_log(body)
    with pytest.raises(BuildError, match=r"sm_80 or higher"):
        compile_log(body, to=turing)


def test_an_assembler_that_hangs_is_stopped(unit: Unit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has a time limit."""
    slow = tmp_path / "ptxas"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr("flashmoe_build.compile.ptxas.TIME_LIMIT", 0.2)
    with pytest.raises(BuildError, match=r"did not finish within 0\.2 s"):
        assemble(b"", "case", unit.target.name, dataclasses.replace(find_toolchain(), ptxas=slow))


def test_only_warnings_that_say_something_are_findings(unit: Unit) -> None:
    ptx = dataclasses.replace(unit, target=next(t for t in load_tables().targets if t.is_ptx))
    assert kinds(ptx, "ptxas info    : Compiling entry function\nptxas warning : Something new\n") == {"warning"}
    assert kinds(ptx, "ptxas info    : Compiling entry function\nnothing to say\n") == set()
    assert kinds(ptx, "ptxas info    : 0 bytes gmem, no warning\n") == set()
