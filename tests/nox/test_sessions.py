"""The sessions: what nox lists, what they pass on, and the program that only they use."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe_build import lint
from flashmoe_build.gate.steps import select
from flashmoe_tools.report import Verdict

ROOT = Path(__file__).resolve().parents[2]
NOXFILE = ROOT / "noxfile.py"


def noxfile_function(name: str, **others: object) -> Any:
    """One function of the noxfile, without running nox."""
    tree = ast.parse(NOXFILE.read_text(encoding="utf-8"))
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    module = ast.Module(body=[*wanted], type_ignores=[])
    space: dict[str, object] = {"ROOT": ROOT, "Sequence": list, "Path": Path, **others}
    exec(compile(module, "noxfile", "exec"), space)
    return space[name]


def test_nox_lists_every_session_with_what_it_does() -> None:
    command = [sys.executable, "-m", "nox", "--noxfile", str(NOXFILE), "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    listed = dict(re.findall(r"^[*-] (\w+) -> (.*)$", done.stdout, re.MULTILINE))
    assert {"main", "build", "symbols", "smoke", "test", "bench", "lint", "lock", "doctor", "docs"} <= set(listed)
    assert all(listed.values())


def test_test_paths_do_not_depend_on_the_folder() -> None:
    absolute = noxfile_function("absolute_paths")
    given = ["-k", "tests", "tests/lock/test_pins.py::test_x", "-x", "nothing/here", "/dev/null"]
    expected = [*given]
    expected[1] = str(ROOT / "tests")
    expected[2] = str(ROOT / "tests/lock/test_pins.py::test_x")
    assert absolute(given) == expected


@pytest.mark.parametrize("session", ["bench", "compat", "hub", "smoke", "symbols", "verify"])
def test_help_needs_no_wheel(session: str) -> None:
    message: list[tuple[object, ...]] = []
    given = {
        "nox": SimpleNamespace(session=lambda function: function),
        "REPORTS": Path(),
        "locked": lambda *_: "python",
        "newest_wheel": lambda _: pytest.fail("a clean clone has none"),
        "program": lambda _, *words: message.append(words),
        "asks_for_help": noxfile_function("asks_for_help"),
        "sys": sys,
    }
    noxfile_function(session, **given)(SimpleNamespace(posargs=["--help"]))
    assert len(message) == 1
    assert "--help" in message[0]


def test_main_runs_steps_of_the_gate() -> None:
    (words,) = re.findall(r'^MAIN = "(.*)"', NOXFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [step.name for step in select(words.split(","))] == words.split(",")


def test_every_checker_runs_even_when_one_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = lint.run_checker(lint.Checker("good", (sys.executable, "-c", "print('fine')")), tmp_path)
    bad = lint.run_checker(lint.Checker("bad", (sys.executable, "-c", "raise SystemExit(3)"), "mend it"), tmp_path)
    gone = lint.run_checker(lint.Checker("gone", (str(tmp_path / "gone"),)), tmp_path)
    assert [check.verdict for check in (good, bad, gone)] == [Verdict.PASS, Verdict.FAIL, Verdict.FAIL]
    assert (bad.found, bad.next_step) == ("exit status 3", "mend it")
    assert "fine" in capfd.readouterr().out


def test_checkers_look_at_what_is_there(tmp_path: Path) -> None:
    names = [checker.name for checker in lint.checkers(tmp_path, tmp_path)]
    assert not {"hadolint", "zizmor"} & set(names)
    (tmp_path / "Dockerfile").write_text("FROM scratch\n", encoding="utf-8")
    (tmp_path / ".github" / "workflows").mkdir(parents=True)
    (tmp_path / "nox").write_text("#!/bin/sh\n", encoding="utf-8")
    for name in ("csrc/host/a.cpp", "csrc/ptx/b.cuh", "csrc/arch.toml", "tests/c.h", "build/d.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = {checker.name: checker.command for checker in lint.checkers(tmp_path, tmp_path)}
    assert found["hadolint"][1:] == ("Dockerfile",)
    assert "zizmor" in found
    assert found["shellcheck"][1:] == ("nox",)
    assert found["clang-format"][3:] == ("csrc/host/a.cpp", "csrc/ptx/b.cuh", "tests/c.h")


def test_the_launcher_and_ci_are_checked_as_shell() -> None:
    names = [str(path.relative_to(ROOT)) for path in lint.shell_scripts(ROOT)]
    assert names[:2] == ["nox", ".ci/run"]


def test_an_unknown_checker_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint.main(["rufff"]) == 2
    assert "no checker 'rufff'; known: ruff, format, mypy" in capsys.readouterr().err


def run_pytest(
    tmp_path: Path, body: str, arguments: Sequence[str] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    """A separate test run with this project's conftest and one test file."""
    (tmp_path / "conftest.py").write_text(
        (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    (tmp_path / "test_it.py").write_text(body, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n", encoding="utf-8")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FLASHMOE_", "COV", "PYTEST"))}
    package = str(Path(lint.__file__).parents[1])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(tmp_path)]
    # Other plugins take a second per run
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    environ = {**kept, **alone, "PYTHONPATH": package, "CUDA_VISIBLE_DEVICES": "", **environ}
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)


MANY_CASES = """
import pytest
@pytest.mark.parametrize("case", range(12))
def test_many(case): pass
@pytest.mark.parametrize("case", range(5))
def test_few(case): pass
@pytest.mark.gpu
@pytest.mark.parametrize("case", range(9))
def test_gpu(case): pass
@pytest.mark.together(lambda one: one // 10, "case")
@pytest.mark.parametrize("case", range(80))
def test_together(case): pass
def test_alone(): pass
"""


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_draw_takes_a_quarter_of_the_cases_of_large_tests(tmp_path: Path, processes: str) -> None:
    report = tmp_path / "report.json"
    for number in range(8):
        (tmp_path / "bench").mkdir(exist_ok=True)
        (tmp_path / "bench" / f"test_{number}.py").write_text("def test_of_a_tool(): pass\n", encoding="utf-8")
    words = ("-vv", "-n", processes, "--import-mode=importlib", "-W", "ignore::pytest.PytestUnknownMarkWarning")
    done = run_pytest(tmp_path, MANY_CASES, words, FLASHMOE_DRAW="a", FLASHMOE_TEST_REPORT=str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    ran = {
        *re.findall(r"(\S+\.py::\S+) PASSED", done.stdout),
        *re.findall(r"PASSED (\S+\.py::\S+)", done.stdout),
    }
    counts = Counter(name.partition("::")[2].partition("[")[0] for name in ran)
    assert counts == {"test_many": 3, "test_few": 5, "test_together": 20, "test_alone": 1, "test_of_a_tool": 2}
    tens = Counter(int(name[:-1].partition("[")[2]) // 10 for name in ran if "test_together" in name)
    assert set(tens.values()) == {10}
    assert "GPU: 9 tests did not run" in done.stdout
    assert "DRAWN: 69 cases and 6 files were not sampled for this commit" in done.stdout
    data = json.loads(report.read_text())["data"]
    assert (data["left_out"], data["gpu_not_run"], data["skipped"]) == (
        69,
        9,
        1,
    )  # one of those for a GPU is a test here


NO_GPU = "FLASHMOE_REQUIRE_GPU=1, but this machine has no CUDA GPU"
GPU_TEST = "import pytest\ndef test_skip(): pytest.skip('no such tool')\n@pytest.mark.gpu\ndef test_gpu(): raise AssertionError\ndef test_cpu(): pass\n"


def test_gpu_tests_are_counted_where_there_is_no_gpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run_pytest(tmp_path, GPU_TEST, ["-n", "auto"], FLASHMOE_TEST_REPORT=str(report), MAX_JOBS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bringing up nodes" not in done.stdout, "one process needs no second one"
    assert "GPU: 1 tests did not run: this machine has no CUDA GPU" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 passed, 2 skipped")
    assert "SKIP: 1 not run: no such tool" in done.stdout
    data = json.loads(report.read_text(encoding="utf-8"))
    assert data["verdict"] == "PASS"
    assert (data["data"]["passed"], data["data"]["gpu_not_run"]) == (1, 1)


@pytest.mark.parametrize(
    "module",
    [
        *("", ".docs", ".lint"),
        *(f".environments.{name}" for name in ("environment", "lock", "relock")),
        *(f".release.{name}" for name in ("compat", "reproduce", "workflows")),
        *(".emulation", ".containers.gpu", ".containers.image", ".containers.base", ".containers.pins"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # another test has imported it
def test_every_program_tells_its_usage(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs what ``python -m`` runs, without a process (and an import of torch) for each."""
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"flashmoe_build{module}", run_name="__main__", alter_sys=True)
    printed = capsys.readouterr()
    assert (ended.value.code or 0, printed.err) == (0, "")
    assert printed.out.startswith("usage: ")


def test_no_program_takes_an_abbreviated_option() -> None:
    """``build -- --arch 90`` once made a wheel for one target with the name of the full one."""
    folders = ("flashmoe", "flashmoe_build", "flashmoe_tools", "tests/fuzz")
    trees = (ast.parse(path.read_text(encoding="utf-8")) for name in folders for path in (ROOT / name).rglob("*.py"))
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [one for one in calls if ast.unparse(one.func).endswith(("ArgumentParser", ".add_parser"))]
    assert len(made) > 30
    assert [ast.unparse(one) for one in made if not any(word.arg == "allow_abbrev" for word in one.keywords)] == []


def test_a_long_test_is_named_while_it_runs(tmp_path: Path) -> None:
    body = "import time\ndef test_long(): time.sleep(1.5)\ndef test_short(): pass\n"
    done = run_pytest(tmp_path, body, FLASHMOE_TEST_HEARTBEAT_S="0.4")
    assert done.returncode == 0
    assert 2 <= done.stderr.count("... test_it.py::test_long is still running") <= 4
    assert "test_short" not in done.stderr


def test_failures_of_one_cause_are_printed_once(tmp_path: Path) -> None:
    lines = [
        "import pytest",
        "def check(number):",
        "    words = 'all of this is printed'",
        "    assert number < 0, f'race at byte {number}' if number != 7 else 'deadlock'",
        "@pytest.mark.parametrize('number', range(9))",
        "def test_it(number): check(number)",
    ]
    done = run_pytest(tmp_path, "\n".join(lines))
    assert done.returncode == 1
    assert done.stdout.count("words = 'all of this is printed'") == 2  # the race, the deadlock
    assert "8 failures of one cause: test_it.py::test_it[0]" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("9 failed")


def test_processes_report_as_one(tmp_path: Path) -> None:
    """Counts, the name of a test that runs for long and a missing GPU, with the tests distributed over two processes."""
    body = GPU_TEST + "import time\ndef test_long(): time.sleep(1.5)\n"
    report = tmp_path / "report.json"
    environ = {"FLASHMOE_TEST_HEARTBEAT_S": "0.4", "FLASHMOE_TEST_REPORT": str(report), "MAX_JOBS": "2"}
    done = run_pytest(tmp_path, body, ["-n", "auto", "--dist", "loadfile"], **environ, FLASHMOE_REQUIRE_GPU="1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count(NO_GPU) == 1
    assert "bringing up nodes" in done.stdout
    assert done.stderr.count("... test_it.py::test_long is still running") >= 2
    assert "GPU: 1 tests did not run: this machine has no CUDA GPU" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("2 passed, 2 skipped")
    data = json.loads(report.read_text(encoding="utf-8"))
    assert (data["verdict"], data["data"]["passed"], data["data"]["gpu_not_run"]) == ("PASS", 2, 1)


def test_only_gpu_tests_without_a_gpu_is_no_pass(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    body = "import pytest\n@pytest.mark.gpu\ndef test_gpu(): pass\n"
    environ = {"FLASHMOE_TEST_REPORT": str(report), "PYTEST_PLUGINS": ""}  # as on a machine without pytest-xdist
    done = run_pytest(tmp_path, body, FLASHMOE_REQUIRE_GPU="1", **environ)
    assert done.returncode == 1
    assert NO_GPU in done.stderr
    assert json.loads(report.read_text(encoding="utf-8"))["verdict"] == "FAIL"


def test_the_checkouts_package_is_not_tested_by_mistake(tmp_path: Path) -> None:
    source = tmp_path / "source" / "flashmoe"
    source.mkdir(parents=True)
    (source / "__init__.py").touch()
    done = run_pytest(tmp_path, GPU_TEST, FLASHMOE_TEST_INSTALLED="1", PYTHONPATH=str(source.parent))
    assert done.returncode == 2
    assert "the installed flashmoe is meant to be tested" in done.stdout + done.stderr


def test_a_source_tree_does_not_stand_in_front_of_an_installed_wheel(tmp_path: Path) -> None:
    source, installed = (tmp_path / name / "flashmoe" for name in ("source", "site-packages"))
    for folder in (source, installed):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (installed / "libflashmoe.so").touch()
    path = f"{source.parent}:{installed.parent}"
    done = run_pytest(tmp_path, "def test_it(): pass\n", PYTHONPATH=path)
    assert done.returncode == 2
    assert f"in front of the flashmoe installed in {installed.parent}: start from" in done.stdout + done.stderr
    library = source.parent / "build" / "lib" / "libflashmoe.so"
    library.parent.mkdir(parents=True)
    library.touch()
    for environ in ({"PYTHONPATH": path}, {"PYTHONPATH": str(installed.parent)}):
        assert run_pytest(tmp_path, "def test_it(): pass\n", **environ).returncode == 0
