"""`nox -s compat`, without installing torch: which cells there are, and the result of each."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from flashmoe.errors import LockError
from flashmoe_build.release import compat
from flashmoe_build.release.compat import Cell, Setup, known_versions, run_version
from flashmoe_tools.report import Verdict

INDEX = "torch (2.11.0)\nAvailable versions: 2.11.0, 2.10.1, 2.10.0, 2.10.0rc1, 2.9.1, 2.9.0, 1.13.1\n"


def test_versions_from_the_floor_on_and_the_newest_below() -> None:
    assert known_versions(INDEX) == (["2.10.0", "2.10.1", "2.11.0"], "2.9.1")
    assert known_versions(INDEX, Version("2.11")) == (["2.11.0"], "2.10.1")


def test_an_index_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(LockError, match="is the package index reachable"):
        known_versions("ERROR: No matching distribution found for torch")


def cell_of(torch: str, minor: str, verdict: Verdict) -> Cell:
    return Cell(torch, minor, verdict, "", 0 if verdict is Verdict.SKIP else 9, 1.0, 1.0)


def fake(lacking: set[str]) -> Callable[..., Cell]:
    def run_cell(torch: str, minor: str, interpreter: str, setup: Setup, *, refused: bool = False) -> Cell:
        return cell_of(torch, minor, Verdict.SKIP if minor in lacking else Verdict.PASS)

    return run_cell


@pytest.mark.parametrize(
    ("lacking", "expected"),
    [
        (set(), {"3.10": "PASS", "3.13": "PASS"}),
        ({"3.13"}, {"3.10": "PASS", "3.12": "PASS", "3.13": "SKIP"}),
        ({"3.10", "3.13"}, {"3.10": "SKIP", "3.11": "PASS", "3.12": "PASS", "3.13": "SKIP"}),
        ({"3.10", "3.11", "3.12", "3.13"}, dict.fromkeys(("3.10", "3.11", "3.12", "3.13"), "SKIP")),
    ],
)
def test_the_lowest_and_the_highest_python_that_a_torch_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: set[str], expected: dict[str, str]
) -> None:
    monkeypatch.setattr(compat, "run_cell", fake(lacking))
    pythons = {minor: f"/usr/bin/python{minor}" for minor in ("3.10", "3.11", "3.12", "3.13")}
    cells = run_version("2.10.0", pythons, Setup(tmp_path / "x.whl", tmp_path, ()))
    assert {cell.python: str(cell.verdict) for cell in cells} == expected


def test_a_version_of_transformers_runs_under_the_highest_python_that_takes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compat, "run_cell", fake({"3.14"}))
    pythons = {minor: f"/usr/bin/python{minor}" for minor in ("3.10", "3.12", "3.14")}
    cells = compat.run_transformers("2.10.0", ("4.57.6", "5.17.0"), pythons, tmp_path / "x.whl", tmp_path)
    assert [(cell.python, str(cell.verdict)) for cell in cells] == [("3.12", "PASS")] * 2
    assert (
        Cell("2.10.0", "3.12", Verdict.PASS, "", 9, 1.0, 1.0, "5.17.0").label
        == "torch 2.10.0, transformers 5.17.0, Python 3.12"
    )


def program(tmp_path: Path, body: str) -> Path:
    """A fake interpreter."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("body", "verdict", "passed"),
    [
        ("echo '== 12 passed, 3 skipped in 4.1s =='", Verdict.PASS, 12),
        ("echo '== 1 failed, 11 passed in 4.1s =='; echo 'FAILED a::b'; exit 1", Verdict.FAIL, 11),
        ("echo '== 3 skipped in 4.1s =='", Verdict.FAIL, 0),
        ("echo '== no tests ran in 0.1s =='; exit 5", Verdict.FAIL, 0),
        ("exit 139", Verdict.FAIL, 0),
    ],
)
def test_only_tests_that_ran_and_passed_are_a_pass(tmp_path: Path, body: str, verdict: Verdict, passed: int) -> None:
    found = compat._tests(program(tmp_path, body), "cell", ("tests/attention",))
    assert (found[0], found[2]) == (verdict, passed)


def test_a_torch_below_the_floor_must_be_refused_in_words(tmp_path: Path) -> None:
    message = "TorchVersionError: flashmoe needs torch >= 2.10; found 2.9.1; upgrade"
    assert compat._refusal(program(tmp_path, f"echo '{message}' >&2; exit 1"), "2.9.1")[0] is Verdict.PASS
    assert compat._refusal(program(tmp_path, "echo 'undefined symbol: x' >&2; exit 1"), "2.9.1")[0] is Verdict.FAIL
    assert compat._refusal(program(tmp_path, "exit 0"), "2.9.1")[0] is Verdict.FAIL


def test_the_pythons_found_are_what_they_are_called() -> None:
    found = compat.local_pythons()
    assert found
    for minor, path in found.items():
        command = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        assert subprocess.check_output(command, text=True, timeout=60).strip() == minor
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in found


def test_the_running_python_is_found_wherever_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("PATH", str(tmp_path)), ("HOME", str(tmp_path)), ("PYENV_ROOT", str(tmp_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert list(compat.local_pythons()) == [f"{sys.version_info[0]}.{sys.version_info[1]}"]


def test_uvs_reason_without_this_machines_paths() -> None:
    words = (
        "  x No solution found\n  because torch==2.10.0 has no wheels with a matching Python ABI tag (`cp314`), we can"
    )
    assert compat._reason(words) == "torch==2.10.0 has no wheels with a matching Python ABI tag (`cp314`)"
    words = (
        "cause: Because torch==2.15.0 has no wheels with a matching Python implementation tag (e.g., `cp310`) and you "
        "require torch==2.15.0, we can conclude that your requirements are unsatisfiable.\n\nhint: You require CPython 3.10"
    )
    found = "torch==2.15.0 has no wheels with a matching Python implementation tag (e.g., `cp310`)"
    assert compat._reason(words) == found
    assert "/home" not in compat._reason("cannot read /home/someone/x/y.whl")


def test_the_core_is_there() -> None:
    for name in (*compat.CORE, *compat.TESTS, *compat.TRANSFORMERS_TESTS):
        assert (compat.ROOT / name).exists()


@pytest.mark.parametrize(
    ("problem", "verdict"),
    [
        ("because torch==2.10.0 has no wheels with a matching Python ABI tag (`cp314`), we can", Verdict.SKIP),
        ("Failed to extract archive: no space left on device (os error 28)", Verdict.FAIL),
    ],
)
def test_only_a_missing_wheel_is_a_skip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problem: str, verdict: Verdict
) -> None:
    monkeypatch.setattr(compat, "_uv", lambda words, label, cache: problem)
    cell = compat.run_cell("2.10.0", "3.14", "python3.14", Setup(tmp_path / "x.whl", tmp_path, ()))
    assert cell.verdict is verdict
    assert cell.found in problem


def test_a_failure_is_told_with_its_reason() -> None:
    lines = [
        "....F\n",
        "E       AssertionError: 6 of 2112 differ\n",
        "E   \n",
        "FAILED tests/a.py::test_b[cpu]\n",
        "1 failed\n",
    ]
    assert compat.failures_of(lines) == ["FAILED tests/a.py::test_b[cpu]", "AssertionError: 6 of 2112 differ"]
