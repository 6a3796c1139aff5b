"""Runners are found in the packages of the operations; an operation without one is not proved, and stops no other."""

import json
from pathlib import Path

import pytest
import torch

from flashmoe.errors import BuildError, ExitCode, TableError
from flashmoe_build.emulation import cases
from flashmoe_build.emulation.build import CSRC, Options, kernel_library
from flashmoe_build.emulation.cases import NOT_EMULATED, matching, run_case, runners, suite
from flashmoe_build.emulation.cli import main
from flashmoe_build.emulation.machine import Settings
from flashmoe_build.emulation.parameters import structure
from flashmoe_build.emulation.runner import Buffer, Launch, Trial, bind, execute, load
from flashmoe_build.emulation.runs import run_cases
from flashmoe_tools import operations
from flashmoe_tools.descriptors import Header
from flashmoe_tools.report import Verdict
from flashmoe_tools.tables import load_tables

QUANTIZE = "moe_quantize_sm90_f16"


def test_every_kernel_operation_has_a_runner() -> None:
    assert {row.operation for row in load_tables().kernels} == set(runners())


@pytest.fixture
def without_quantize(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {name: runner for name, runner in runners().items() if name != "moe_quantize"}
    monkeypatch.setattr(cases, "runners", lambda: rest)


@pytest.mark.usefixtures("without_quantize")
def test_an_operation_without_a_runner_is_a_row_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others still run."""
    assert {case.identity for case in suite(load_tables(), QUANTIZE)} == {f"{QUANTIZE}-not emulated-seed0"}
    report = tmp_path / "report.json"
    others = list(suite(load_tables(), "moe_gather"))
    assert others
    assert NOT_EMULATED not in {case.problem for case in others}
    runs = run_cases([*suite(load_tables(), QUANTIZE), others[0]], Options(), {})
    assert [check.verdict for check in runs.checks] == [Verdict.FAIL, Verdict.PASS]
    assert main(["--kernel", "moe_quantize_sm90", "--quick", "--json", str(report)]) == ExitCode.FAILED
    assert "no operation runs moe_quantize" in capsys.readouterr().out
    checks = json.loads(report.read_text(encoding="utf-8"))["checks"]
    assert {(check["name"], check["verdict"]) for check in checks} == {(f"{QUANTIZE}-not emulated-seed0", "FAIL")}


def test_two_packages_for_one_operation_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "again" / "emulation"
    package.mkdir(parents=True)
    (tmp_path / "again" / "__init__.py").touch()
    (package / "__init__.py").write_text("RUNNERS = {'moe_quantize': None}\n")
    monkeypatch.setattr(operations, "__path__", [*operations.__path__, str(tmp_path)])
    with pytest.raises(TableError, match="another one runs moe_quantize, too"):
        runners()


def test_a_member_that_the_header_lacks_is_named() -> None:
    kind = structure(Header("QuantizeParams", "moe/params/scaled.h"), (CSRC,))
    library = load(kernel_library(matching(load_tables(), QUANTIZE)[0].unit, Options()))
    with pytest.raises(BuildError, match="struct QuantizeParams has no member row; it has: x, values, scales"):
        bind(kind, {"row": 3}, library)
    x = torch.zeros(3, 8)[:, :5]
    params = bind(kind, {"x": Buffer(x), "rows": 3}, library)
    library.clear_buffers()
    assert (params.rows, params.x_stride, params.values) == (3, 8, 0)
    assert params.x != 0


def test_a_counter_that_is_left_is_wrong() -> None:
    """A launch that should leave its buffer at zero, but does not."""
    (kernel,) = matching(load_tables(), QUANTIZE)
    case = next(case for case in suite(load_tables(), QUANTIZE) if case.problem.name == "r5-c384")
    assert run_case(case, Options()).passed
    (launch,) = runners()["moe_quantize"].trial(kernel.unit, case.problem).launches
    values = dict(launch.values)
    scales = values["scales"].tensor
    values["scales"] = Buffer(scales, writable=True, is_counter=True)
    outcome = execute(kernel.unit, Trial([Launch(values, launch.blocks)], list), Settings(), Options())
    assert "scales is" in outcome.explain()
    assert "the next launch needs zeros" in outcome.explain()
