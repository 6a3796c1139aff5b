"""A new operation is two folders: csrc/NAME with its tables, a kernel and its parameters, and its package. With these it is built,
audited, launched, emulated, calculated by smem, timed and documented without changing any shared source file."""

import ctypes
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from flashmoe.__main__ import main  # noqa: E402
from flashmoe.errors import ArgumentError, ExitCode  # noqa: E402
from flashmoe_build import docs  # noqa: E402
from flashmoe_build.compile.cache import Cache  # noqa: E402
from flashmoe_build.compile.codegen import embed_source, index_json, kernel_table_source  # noqa: E402
from flashmoe_build.compile.device import compile_units  # noqa: E402
from flashmoe_build.compile.host import layout_blob  # noqa: E402
from flashmoe_build.compile.toolchain import find_toolchain  # noqa: E402
from flashmoe_build.emulation import cases  # noqa: E402
from flashmoe_build.emulation.build import Options  # noqa: E402
from flashmoe_tools import operations  # noqa: E402
from flashmoe_tools.audit.embedded import read_embedded  # noqa: E402
from flashmoe_tools.audit.kernels import audit_kernels  # noqa: E402
from flashmoe_tools.bench import ceilings  # noqa: E402
from flashmoe_tools.bench.cli import merge  # noqa: E402
from flashmoe_tools.bench.markdown import bench_markdown, describe_case  # noqa: E402
from flashmoe_tools.bench.suites import load_suite  # noqa: E402
from flashmoe_tools.report import Verdict, read_report  # noqa: E402
from flashmoe_tools.smem import cli as smem  # noqa: E402
from flashmoe_tools.tables import Tables, Unit, load_tables  # noqa: E402

HERE = Path(__file__).parent
TOY = HERE / "toy"
PLAIN, RELU = "flashmoe_toy_scale_sm80_f32_v4_plain", "flashmoe_toy_scale_sm80_f32_v4_relu"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout's csrc with one more folder."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copytree(TOY / "csrc" / "toy", folder / "csrc" / "toy")
    return folder


@pytest.fixture(scope="module", autouse=True)
def package() -> Iterator[None]:
    """A checkout's operations with one more."""
    before = list(operations.__path__)
    operations.__path__.append(str(TOY / "operations"))
    yield
    operations.__path__[:] = before
    for name in [name for name in sys.modules if name.startswith(f"{operations.__name__}.toy")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def tables(tree: Path) -> Tables:
    return load_tables(tree / "csrc")


@pytest.fixture(scope="module")
def units(tables: Tables) -> tuple[Unit, ...]:
    return tuple(unit for unit in tables.units() if unit.row.operation == "toy_scale")


@pytest.fixture(scope="module")
def built(tree: Path, tables: Tables, units: tuple[Unit, ...]) -> Path:
    """A library with its kernels, the generated kernel table and the host code for loading and launching."""
    toolchain = find_toolchain()
    code = compile_units(units, root=tree, toolchain=toolchain, cache=Cache(tree / "cache"), jobs=2, tables=tables)
    blob, placed = layout_blob(code.units)
    (tree / "binaries.bin").write_bytes(blob)
    (tree / "index.json").write_text(json.dumps(index_json(placed)))
    (tree / "embed.S").write_text(embed_source("binaries.bin", "index.json"))
    (tree / "table.cpp").write_text(kernel_table_source(tables, placed))
    csrc = tree / "csrc"
    host = [csrc / "host" / f"{name}.cpp" for name in ("find_kernels", "load_kernels", "launch")]
    sources = ("table.cpp", "embed.S", HERE / "fake_driver.cpp", *host)
    flags = (
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        "-Wl,--exclude-libs,ALL",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{csrc}",
    )
    command = [toolchain.cxx, *flags, f"-isystem{toolchain.cuda_include}", *map(str, sources), "-o", "toy.so"]
    subprocess.run(command, cwd=tree, check=True, timeout=120)
    return tree / "toy.so"


def test_its_names_follow_its_descriptor(tables: Tables, units: tuple[Unit, ...]) -> None:
    assert [unit.target.name for unit in units] == ["sm_80", "sm_90a", "compute_80"]
    assert {unit.name for unit in units} == {"toy_scale_sm80_f32_v4"}
    assert [entry.symbol for entry in units[0].entries] == [PLAIN, RELU]
    assert units[0].row.smem_items("f32") == (("staged elements", 2048),)
    assert "| sm80 | 4 | plain, relu | f32 | 512 |" in docs.kernel_page(tables)


def test_it_builds_and_passes_the_audit(built: Path, tables: Tables, units: tuple[Unit, ...]) -> None:
    only = replace(tables, kernels=(units[0].row,))
    audit = audit_kernels(read_embedded(built), only, [unit.target.name for unit in units])
    assert [check for check in audit.checks if check.verdict is not Verdict.PASS] == []
    assert {row.gpu for row in audit.launches} == {"sm80", "sm86", "sm89", "sm90", "sm100", "sm120"}


@pytest.mark.parametrize(
    ("capability", "kind"), [(80, "machine code"), (89, "machine code"), (100, "PTX"), (120, "PTX")]
)
def test_the_host_finds_loads_and_launches_it(built: Path, capability: int, kind: str) -> None:
    answer = ctypes.create_string_buffer(1000)
    status = ctypes.CDLL(str(built)).launch(capability, ctypes.c_longlong(3), answer, len(answer))
    launches = [f"{kind}, grid 3, block 128, shared 2048, parameters {number}" for number in (42, 43)]
    assert (status, answer.value.decode().splitlines()) == (0, [PLAIN, RELU, *launches])


def test_it_is_emulated_and_a_planted_bug_is_found(tree: Path, tables: Tables, tmp_path: Path) -> None:
    found = [case for case in cases.suite(tables, "toy_scale") if case.kernel.unit.target.name == "sm_80"]
    assert [case.identity for case in found] == [
        "toy_scale_sm80_f32_v4-plain-seed0",
        "toy_scale_sm80_f32_v4-relu-seed1",
    ]
    for case in found:
        outcome = cases.run_case(case, Options(overlay=tree / "csrc"))
        assert outcome.passed, outcome.explain()
    wrong = Path(shutil.copytree(tree / "csrc" / "toy", tmp_path / "toy")) / "scale.cuh"
    wrong.write_text(wrong.read_text().replace("value < 0.0f", "value > 0.0f"))
    outcome = cases.run_case(found[1], Options(overlay=tmp_path))
    assert "out is wrong at" in outcome.explain()


def test_its_shared_memory_is_calculated(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smem, "load_tables", lambda: tables)
    assert main(["smem", "--operation", "toy_scale", "--arch", "sm89"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "sm80 f32 v4 tile 512, 4 warps" in text
    assert re.search(r"staged elements +2,048 bytes", text)


def test_its_suite_is_timed_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "PRODUCT_SIZE", {"cpu": 64})
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(ceilings, "SECONDS", {"cpu": 0.01})
    monkeypatch.setattr("flashmoe_tools.bench.session.quiet_check", lambda *_: None)
    assert main(["bench", "--suite", "toy", "--json", str(tmp_path / "toy.json")]) == ExitCode.OK
    report = read_report(tmp_path / "toy.json")
    assert [cell["case"]["key"] for cell in report.data["cells"]] == ["toy-64", "toy-128"]
    assert all(cell["verification"]["ours"]["passed"] for cell in report.data["cells"])
    assert report.verdict in (Verdict.PASS, Verdict.WARN)
    assert "toy-128" in bench_markdown(report)
    assert describe_case(report.data["cells"][0]["case"]) == "64 numbers, scaled"


def test_suites_of_two_operations_are_not_merged() -> None:
    with pytest.raises(ArgumentError, match="suites toy and smoke are of toy and attention"):
        merge([load_suite("toy"), load_suite("smoke")])


def test_an_operation_without_a_package_is_named() -> None:
    with pytest.raises(ArgumentError, match="no operation 'other'; known: attention"):
        operations.problem_type("other")
